"""Two models and deadlines at a gateway over real sockets: who gets what, and what is said of it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from router.events import Place
from router.gateway.request.call import Names
from tests.gateway.clusters import (
    COMPLETION,
    ENDPOINTS,
    GENERATE,
    MODEL,
    Cluster,
    add_tenant,
    listening,
    stand_ins,
    text_of,
)
from tests.support.site import Seen
from tests.support.waiting import eventually

OTHER = "org/other-1"
two = pytest.mark.cluster(replicas=2, models=(MODEL, OTHER))
"""r0 has the first, r1 the other."""


def asked(c: Cluster) -> list[int]:
    return [len(replica.requests) for replica in c.replicas]


# ---- models


def test_names() -> None:
    names = Names("a", "org/b", "a:x")
    assert [names.asked_for(name) for name in (None, "default", "a", "org/b", "a:y")] == [
        "a", "a", "a", "org/b", "a:y",
    ]  # fmt: skip
    assert [names.model_of(name) for name in ("a:y", "a:x", "a:x:z", "org/b:y", "c", "org")] == [
        "a", "a:x", "a:x", "org/b", None, None,
    ]  # fmt: skip


@two
async def test_each_request_goes_to_a_replica_of_its_model(c: Cluster) -> None:
    for path, one in ENDPOINTS.items():
        before = asked(c)
        for model, index in ((MODEL, 0), (OTHER, 1), ("default", 0), (f"{OTHER}:adapter", 1)):
            for _ in range(3):
                status, headers, answer = await c.post(path, one | {"model": model})
                assert (status, headers["x-fair-worker"]) == (200, f"r{index}"), answer
        assert [now - then for now, then in zip(asked(c), before, strict=True)] == [6, 6]
    *_, told = c.replicas[1].requests[-1]
    assert "model" not in told, "SGLang's /generate knows no such field"
    assert told["lora_path"] == "adapter"
    state = await c.ended(ok=36)
    assert {name: one["model"] for name, one in state["workers"].items()} == {"r0": MODEL, "r1": OTHER}
    assert state["gateway"]["models"] == {MODEL: {"ok": 18}, OTHER: {"ok": 18}}
    async with c.http.get(c.url + "/metrics") as response:
        page = await response.text()
    assert f'sglang_fair_model_requests_total{{model="{OTHER}",outcome="ok"}} 18.0' in page


@two
async def test_they_are_listed_and_others_are_not_found(c: Cluster) -> None:
    status, listed = await c.get("/v1/models")
    assert (status, [one["id"] for one in listed["data"]]) == (200, [MODEL, OTHER])
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (MODEL, OTHER, False)
    for one in listed["data"]:
        openai.types.Model.model_validate(one)
        assert anthropic.types.ModelInfo.model_validate(one).display_name == one["id"] == one["root"]
    assert (await c.get(f"/v1/models/{OTHER}"))[1]["id"] == OTHER
    assert (await c.get("/health"))[1] == {"status": "ok", "model": MODEL, "models": [MODEL, OTHER]}
    assert (await c.get("/v1/models/gpt-9"))[0] == 404


@pytest.mark.cluster(replicas=2, models=(MODEL, OTHER), router_timeout_s=2.0)
async def test_without_a_router_the_gateway_keeps_to_the_models(c: Cluster) -> None:
    await c.lose_router()
    assert (await c.get("/health"))[1]["status"] == "fallback"
    for number in range(10):
        for model, index in ((MODEL, 0), (OTHER, 1)):
            who = {"x-fair-client": f"c{number}"}
            status, headers, _ = await c.post("/generate", GENERATE | {"model": model}, headers=who)
            assert (status, headers["x-fair-worker"]) == (200, f"r{index}")
    state = await c.state()
    assert {name: one["model"] for name, one in state["workers"].items()} == {"r0": MODEL, "r1": OTHER}
    c.replicas[1].mode = "die"
    status, _, answer = await c.post("/generate", GENERATE | {"model": OTHER})
    assert status in (502, 503), answer
    assert asked(c) == [10, 11]


@two
async def test_a_replica_is_added_for_a_model(c: Cluster) -> None:
    url = c.replicas[0].url
    status, _, answer = await c.post("/workers", {"url": url + "/", "name": "x", "model": "gpt-9"})
    assert (status, json.loads(answer)["error"]["code"]) == (404, "model_not_found")
    status, _, answer = await c.post("/workers", {"url": url + "/", "name": "x"})
    assert (status, json.loads(answer)["model"]) == (201, MODEL), "as it says at /v1/models"
    status, _, answer = await c.post("/workers", {"url": url + "//", "name": "y", "model": OTHER})
    assert status == 400, "no URL"
    other = c.replicas[1].url + "/"
    assert (await c.post("/workers", {"url": other, "name": "y", "model": OTHER}))[0] == 201
    listed = (await c.get("/workers"))[1]["workers"]
    assert {one["name"]: one["model"] for one in listed} == {
        "r0": MODEL, "r1": OTHER, "x": MODEL, "y": OTHER,
    }  # fmt: skip
    for _ in range(4):
        _, headers, _ = await c.post("/generate", GENERATE | {"model": OTHER})
        assert headers["x-fair-worker"] in ("r1", "y")


@pytest.mark.cluster(replicas=0, models=(OTHER,))
async def test_a_stream_goes_on_at_a_replica_of_its_model_and_nowhere_else(
    tokenizer: Path, c: Cluster
) -> None:
    """r0 and r1 have one model, r2 another one, which would go on in other words."""

    def stream(prompt: str, seen: Seen) -> "asyncio.Task[Seen]":
        return asyncio.create_task(c.stream("completions", prompt, 60, seen, model=MODEL))

    hello, again = (text_of(tokenizer, "completions", prompt, 60) for prompt in ("hello", "again"))
    async with stand_ins(c, tokenizer, MODEL, MODEL, OTHER) as replicas:
        for kind in ("completions", "generate"):
            seen = await c.stream(kind, "hello", 60, Seen(), model=OTHER)
            assert (seen.worker, seen.ended, seen.error) == ("r2", True, "")
            assert seen.text == text_of(tokenizer, kind, "hello", 60, salt=1) != hello
        for name in ("r0", "r1"):
            replicas[name].hold(30)
        seen = Seen()
        going = stream("hello", seen)
        await eventually(lambda: seen.events > 20, "the stream has begun")
        (left,) = {"r0", "r1"} - {seen.worker}
        await replicas[seen.worker].close()
        replicas[left].hold(None)
        await going
        assert (seen.ended, seen.error, seen.text) == (True, "", hello)
        before = replicas["r2"].work["requests"]
        replicas[left].hold(30)
        seen = Seen()
        going = stream("again", seen)
        await eventually(lambda: seen.events > 20, "the stream has begun")
        await replicas[left].close()
        await going
        assert (seen.ended, seen.worker) == (False, left)
        assert seen.error, "nobody has this model any more"
        assert again.startswith(seen.text)
        assert replicas["r2"].work["requests"] == before, "the other model's replica heard of nothing"


# ---- deadlines


async def test_what_cannot_be_promised_is_refused_by_its_header_s_name(c: Cluster) -> None:
    for header, text in (("x-fair-slo-ms", "soon"), ("x-llm-d-slo-ttft-ms", "1_0"), ("x-fair-class", "")):
        status, _, answer = await c.post("/v1/completions", COMPLETION, headers={header: text})
        error = json.loads(answer)["error"]
        assert (status, error["code"], error["param"]) == (400, "invalid_deadline", header)
        assert error["message"].startswith(header)
    assert asked(c) == [0]
    assert (await c.state())["gateway"]["classes"] == {}


async def test_router_and_replica_are_told_what_is_promised(c: Cluster) -> None:
    arrived = listening(c)
    forged = {"x-fair-slack-ms": "-1e9", "x-fair-class": "batch-1"}
    assert (await c.post("/generate", GENERATE, headers=forged))[0] == 200
    due = arrived[-1].due
    assert due is not None
    assert (due.slo_class, due.slo_s) == ("batch-1", 60.0)
    assert 0 < due.left_s <= 60.0
    told = c.replicas[0].headers
    assert told["x-fair-class"] == "batch-1"
    assert 0 < float(told["x-fair-slack-ms"]) <= 60_000, "not what its client says"
    assert (await c.post("/generate", GENERATE, headers={"x-sgl-ttft-slo-ms": "2500"}))[0] == 200
    assert 0 < float(c.replicas[0].headers["x-fair-slack-ms"]) <= 2500
    assert c.replicas[0].headers["x-fair-class"] == "interactive"


async def test_a_replica_is_told_the_tier_that_the_router_says_and_not_the_client(c: Cluster) -> None:
    assert (await c.post("/generate", GENERATE, headers={"x-fair-tier": "1"}))[0] == 200
    assert "x-fair-tier" not in c.replicas[0].headers
    handle = c.router.shell._router.handle

    def beyond(event: Any, now_s: float, peer: bytes = b"") -> Any:
        actions = handle(event, now_s, peer)
        return [
            (to, msgspec.structs.replace(answer, tier=1) if isinstance(answer, Place) else answer)
            for to, answer in actions
        ]

    c.router.shell._router.handle = beyond  # type: ignore[method-assign]
    assert (await c.post("/generate", GENERATE, headers={"x-fair-tier": "0"}))[0] == 200
    assert c.replicas[0].headers["x-fair-tier"] == "1"


@pytest.mark.cluster(router_timeout_s=2.0)
async def test_later_calls_keep_class_and_start_of_the_first(c: Cluster) -> None:
    own = {"x-fair-client": "c", "x-fair-interaction": "7"}
    assert (await c.post("/generate", GENERATE, headers=own | {"x-fair-slo-ms": "5000"}))[0] == 200
    first_ms = float(c.replicas[0].headers["x-fair-slack-ms"])
    later = own | {"x-fair-class": "batch-2"}
    assert (await c.post("/generate", GENERATE, headers=later))[0] == 200
    assert c.replicas[0].headers["x-fair-class"] == "interactive"
    assert float(c.replicas[0].headers["x-fair-slack-ms"]) < first_ms
    await c.lose_router()
    assert (await c.post("/generate", GENERATE, headers=later))[0] == 200
    assert c.replicas[0].headers["x-fair-class"] == "interactive", "kept without a router, too"
    other = later | {"x-fair-interaction": "8"}
    assert (await c.post("/generate", GENERATE, headers=other))[0] == 200
    assert c.replicas[0].headers["x-fair-class"] == "batch-2"
    bad = own | {"x-fair-class": "gold"}
    assert (await c.post("/generate", GENERATE, headers=bad))[0] == 400, "a mistake stays one"


@pytest.mark.cluster(access={"log_format": "json"})
async def test_what_was_attained_is_counted_and_told(monkeypatch: pytest.MonkeyPatch, c: Cluster) -> None:
    lines: list[Any] = []
    monkeypatch.setattr(c.gateway.record, "_log", lines.append)
    stream = COMPLETION | {"stream": True}
    name = {"x-request-id": "named", "x-fair-client": "c"}
    assert (await c.post("/v1/completions", stream, headers=name))[0] == 200
    assert (await c.post("/v1/completions", stream, headers={"x-fair-slo-ms": "0.001"}))[0] == 200
    assert (await c.post("/generate", GENERATE, headers={"x-fair-class": "batch-1"}))[0] == 200
    assert (await c.post("/v1/completions", COMPLETION | {"model": "gpt-9"}))[0] == 404
    c.replicas[0].mode = "die"
    assert (await c.post("/generate", GENERATE, headers={"x-fair-class": "batch-1"}))[0] == 502
    state = await c.state()
    assert state["gateway"]["classes"] == {
        "batch-1": {"requests": 2, "met": 1, "missed": 1},
        "interactive": {"requests": 2, "met": 1, "missed": 1},
    }
    async with c.http.get(c.url + "/metrics") as response:
        page = await response.text()
    for attained in ("met", "missed"):
        series = f'sglang_fair_slo_requests_total{{attained="{attained}",slo_class="interactive"}} 1.0'
        assert series in page
    [told] = (await c.get("/explain/named"))[1]["requests"]
    assert told["slo"]["class"] == "interactive"
    assert (told["slo"]["slo_s"], told["slo"]["attained"]) == (20.0, "met")
    assert told["slo"]["due_s"] == pytest.approx(20.0, abs=5.0)
    [attempt] = told["attempts"]
    assert attempt["router"]["slo"]["class"] == "interactive"
    assert [(line["slo_class"], line["slo_attained"]) for line in lines] == [
        ("interactive", "met"), ("interactive", "missed"), ("batch-1", "met"), ("", ""), ("batch-1", "missed"),
    ]  # fmt: skip
    listed = (await c.get("/requests"))[1]["requests"]
    assert [one["slo_class"] for one in listed] == ["batch-1", "", "batch-1", "interactive", "interactive"]


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "t.yaml"
    for name in ("gold", "silver"):
        add_tenant(path, name)
    return path


async def test_a_tenant_sees_what_its_own_requests_attained(tenants: Path, c: Cluster) -> None:
    late = {"x-fair-class": "batch-1", "x-fair-slo-ms": "0.001"}
    for key, headers in (("gold", {}), ("gold", late), ("silver", {})):
        headers = {"authorization": f"Bearer {key}", **headers}
        assert (await c.post("/generate", GENERATE, headers=headers))[0] == 200
    _, usage = await c.get("/v1/usage", headers={"authorization": "Bearer gold"})
    assert usage["classes"] == {
        "batch-1": {"requests": 1, "met": 0, "missed": 1},
        "interactive": {"requests": 1, "met": 1, "missed": 0},
    }


@pytest.mark.slow
@pytest.mark.cluster(idle_timeout_s=0.5, health_timeout_s=60.0)
async def test_a_class_of_hours_waits_longer_for_a_replica_that_is_silent(c: Cluster) -> None:
    """Timeouts are made for the first class. What may take longer by its class is not given up before."""

    c.replicas[0].mode = "silent"
    status, _, answer = await c.post("/generate", GENERATE)
    assert (status, json.loads(answer)["error"]["code"]) == (502, "no_replica")
    patient = asyncio.create_task(
        c.post("/generate", GENERATE, headers={"x-fair-class": "batch-2", "x-request-id": "patient"})
    )
    await eventually(lambda: len(c.replicas[0].requests) == 2, "it waits there")
    for _ in range(2):  # each takes as long as the patient one would have been waited for
        assert (await c.post("/generate", GENERATE))[0] == 502
    assert not patient.done()
    patient.cancel()
    await asyncio.gather(patient, return_exceptions=True)
