"""Two models and deadlines at a gateway over real sockets: who gets what, and what is said of it."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from router.events import Arrive, Place, WorkerUp
from router.gateway import logs
from router.gateway.guard import KEY_VARIABLE
from router.gateway.request.names import Names
from sglang_fair.tenants import edit, keys
from sglang_fair.tenants.model import Tenant
from tests.gateway.test_gateway import CHAT, COMPLETION, GENERATE, MODEL, Cluster, run
from tests.support.ports import free_port
from tests.support.site import Seen, Site
from tests.support.stand_in import Engine, make_tokenizer
from tests.support.waiting import eventually

OTHER = "org/other-1"
ENDPOINTS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/generate": GENERATE}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def run_two(body: Callable[[Cluster], Awaitable[None]], tokenizer: Path, **options: Any) -> None:
    """r0 has `MODEL`, r1 has `OTHER`."""

    async def named(c: Cluster) -> None:
        for index, model in enumerate((MODEL, OTHER)):
            c.router.tell(WorkerUp(f"r{index}", c.replicas[index].url, models=(model,), loaded=model))

        def are_known() -> bool:
            return {up.loaded for up in c.gateway.fleet.workers.values()} == {MODEL, OTHER}

        await eventually(are_known, "the gateway knows who has what")
        await body(c)

    access = {"more_models": {OTHER: str(tokenizer)}, **options.pop("access", {})}
    run(named, tokenizer, replicas=2, access=access, **options)


async def get(c: Cluster, path: str) -> tuple[int, Any]:
    async with c.http.get(c.url + path) as response:
        return response.status, json.loads(await response.read())


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


def test_each_request_goes_to_a_replica_of_its_model(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
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

    run_two(body, tokenizer)


def test_they_are_listed_and_others_are_not_found(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        status, listed = await get(c, "/v1/models")
        assert (status, [one["id"] for one in listed["data"]]) == (200, [MODEL, OTHER])
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (MODEL, OTHER, False)
        for one in listed["data"]:
            openai.types.Model.model_validate(one)
            assert anthropic.types.ModelInfo.model_validate(one).display_name == one["id"]
        assert (await get(c, f"/v1/models/{OTHER}"))[1]["id"] == OTHER
        assert (await get(c, "/health"))[1] == {"status": "ok", "model": MODEL, "models": [MODEL, OTHER]}
        assert (await get(c, "/v1/models/gpt-9"))[0] == 404
        for path, one in ENDPOINTS.items():
            status, _, answer = await c.post(path, one | {"model": "gpt-9"})
            error = json.loads(answer)["error"]
            assert (status, error["code"], error["type"]) == (404, "model_not_found", "invalid_request_error")
            assert (await c.post(path, one | {"model": 7}))[0] == 400
        assert asked(c) == [0, 0]

    run_two(body, tokenizer)


def test_a_model_whose_replica_is_lost_is_answered_by_no_other(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        c.replicas[1].mode = "die"
        status, _, answer = await c.post("/v1/completions", COMPLETION | {"model": OTHER})
        assert (status, json.loads(answer)["error"]["code"]) == (502, "no_replica")
        assert asked(c) == [0, 1]
        c.router.tell(WorkerUp("r1", c.replicas[1].url + "/", models=(OTHER,), loaded=OTHER))
        assert (await c.post("/v1/completions", COMPLETION))[0] == 200

    run_two(body, tokenizer)


def test_without_a_router_the_gateway_keeps_to_the_models(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        c.router.close()
        await eventually(lambda: not c.gateway.link.alive, "the gateway misses the router")
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

    run_two(body, tokenizer, router_timeout_s=2.0)


def test_a_replica_is_added_for_a_model(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        url = c.replicas[0].url
        status, _, answer = await c.post("/workers", {"url": url + "/", "name": "x", "model": "gpt-9"})
        assert (status, json.loads(answer)["error"]["code"]) == (404, "model_not_found")
        status, _, answer = await c.post("/workers", {"url": url + "/", "name": "x"})
        assert (status, json.loads(answer)["model"]) == (201, MODEL), "as it says at /v1/models"
        status, _, answer = await c.post("/workers", {"url": url + "//", "name": "y", "model": OTHER})
        assert status == 400, "no URL"
        other = c.replicas[1].url + "/"
        assert (await c.post("/workers", {"url": other, "name": "y", "model": OTHER}))[0] == 201
        listed = (await get(c, "/workers"))[1]["workers"]
        assert {one["name"]: one["model"] for one in listed} == {
            "r0": MODEL, "r1": OTHER, "x": MODEL, "y": OTHER,
        }  # fmt: skip
        for _ in range(4):
            _, headers, _ = await c.post("/generate", GENERATE | {"model": OTHER})
            assert headers["x-fair-worker"] in ("r1", "y")

    run_two(body, tokenizer)


def said(tokenizer: Path, salt: int, prompt: str, tokens: int) -> str:
    """What a model says."""
    *_, last = Engine(tokenizer, salt).steps(
        "completions", {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    )
    return last.text


@pytest.mark.slow
def test_a_stream_goes_on_at_a_replica_of_its_model_and_nowhere_else(tokenizer: Path) -> None:
    """r0 and r1 have one model, r2 another one, which would go on in other words."""

    async def main() -> None:
        made = Site(tokenizer, replicas=3, step_s=0.01, models=[MODEL, MODEL, OTHER])
        async with made as site:
            await site.start()
            for kind in ("completions", "generate"):
                seen = Seen()
                stream = asyncio.create_task(site.stream(kind, "hello", 200, seen, model=OTHER))
                await stream
                assert (seen.worker, seen.ended, seen.error) == ("r2", True, "")
                assert seen.text == said(tokenizer, 1, "hello", 200) != said(tokenizer, 0, "hello", 200)
            await site.hold(30, "r0", "r1")
            seen = Seen()
            stream = asyncio.create_task(site.stream("completions", "hello", 300, seen, model=MODEL))
            await eventually(lambda: seen.events > 20, "the stream has begun")
            lost = seen.worker
            (left,) = {"r0", "r1"} - {lost}
            site.replicas[lost].kill()
            await site.hold(None, left)
            await stream
            assert (seen.ended, seen.error, seen.text) == (
                True,
                "",
                site.expected("completions", "hello", 300),
            )
            before = (await site.work("r2"))["requests"]
            await site.hold(30, left)
            seen = Seen()
            stream = asyncio.create_task(site.stream("completions", "again", 300, seen, model=MODEL))
            await eventually(lambda: seen.events > 20, "the stream has begun")
            site.replicas[left].kill()
            await stream
            assert (seen.ended, seen.worker) == (False, left)
            assert seen.error, "nobody has this model any more"
            whole = site.expected("completions", "again", 300)
            assert whole.startswith(seen.text)
            assert (await site.work("r2"))["requests"] == before, "the other model's replica heard of nothing"

    asyncio.run(main())


# ---- deadlines


BAD = [
    ("x-fair-slo-ms", "soon"),
    ("x-fair-slo-ms", "0"),
    ("x-fair-slo-ms", "-5"),
    ("x-fair-slo-ms", "604800001"),
    ("x-sgl-ttft-slo-ms", "nan"),
    ("x-llm-d-slo-ttft-ms", "1_0"),
    ("x-fair-class", "gold"),
    ("x-fair-class", ""),
]


def test_what_cannot_be_promised_is_refused_by_its_header_s_name(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        for header, text in BAD:
            status, _, answer = await c.post("/v1/completions", COMPLETION, headers={header: text})
            error = json.loads(answer)["error"]
            assert (status, error["code"], error["param"]) == (400, "invalid_deadline", header)
            assert error["message"].startswith(header)
        assert asked(c) == [0]
        assert (await c.state())["gateway"]["classes"] == {}

    run(body, tokenizer)


def headers_of(c: Cluster) -> dict[str, str]:
    _, seen, _ = c.replicas[0].requests[-1]
    return {name.lower(): value for name, value in seen.items()}


def test_router_and_replica_are_told_what_is_promised(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        arrived: list[Arrive] = []
        handle = c.router.shell._router.handle

        def listening(event: Any, now_s: float, peer: bytes = b"") -> Any:
            if isinstance(event, Arrive):
                arrived.append(event)
            return handle(event, now_s, peer)

        c.router.shell._router.handle = listening  # type: ignore[method-assign]
        forged = {"x-fair-slack-ms": "-1e9", "x-fair-class": "batch-1"}
        assert (await c.post("/generate", GENERATE, headers=forged))[0] == 200
        due = arrived[-1].due
        assert due is not None
        assert (due.slo_class, due.slo_s) == ("batch-1", 60.0)
        assert 0 < due.left_s <= 60.0
        told = headers_of(c)
        assert told["x-fair-class"] == "batch-1"
        assert 0 < float(told["x-fair-slack-ms"]) <= 60_000, "not what its client says"
        assert (await c.post("/generate", GENERATE, headers={"x-sgl-ttft-slo-ms": "2500"}))[0] == 200
        assert 0 < float(headers_of(c)["x-fair-slack-ms"]) <= 2500
        assert headers_of(c)["x-fair-class"] == "interactive"

    run(body, tokenizer)


def test_a_replica_is_told_the_tier_that_the_router_says_and_not_the_client(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        assert (await c.post("/generate", GENERATE, headers={"x-fair-tier": "1"}))[0] == 200
        assert "x-fair-tier" not in headers_of(c)
        handle = c.router.shell._router.handle

        def beyond(event: Any, now_s: float, peer: bytes = b"") -> Any:
            actions = handle(event, now_s, peer)
            return [
                (to, msgspec.structs.replace(answer, tier=1) if isinstance(answer, Place) else answer)
                for to, answer in actions
            ]

        c.router.shell._router.handle = beyond  # type: ignore[method-assign]
        assert (await c.post("/generate", GENERATE, headers={"x-fair-tier": "0"}))[0] == 200
        assert headers_of(c)["x-fair-tier"] == "1"

    run(body, tokenizer)


def test_later_calls_keep_class_and_start_of_the_first(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        own = {"x-fair-client": "c", "x-fair-interaction": "7"}
        assert (await c.post("/generate", GENERATE, headers=own | {"x-fair-slo-ms": "5000"}))[0] == 200
        first_ms = float(headers_of(c)["x-fair-slack-ms"])
        later = own | {"x-fair-class": "batch-2"}
        assert (await c.post("/generate", GENERATE, headers=later))[0] == 200
        assert headers_of(c)["x-fair-class"] == "interactive"
        assert float(headers_of(c)["x-fair-slack-ms"]) < first_ms
        c.router.close()
        await eventually(lambda: not c.gateway.link.alive, "the gateway misses the router")
        assert (await c.post("/generate", GENERATE, headers=later))[0] == 200
        assert headers_of(c)["x-fair-class"] == "interactive", "kept without a router, too"
        other = later | {"x-fair-interaction": "8"}
        assert (await c.post("/generate", GENERATE, headers=other))[0] == 200
        assert headers_of(c)["x-fair-class"] == "batch-2"
        bad = own | {"x-fair-class": "gold"}
        assert (await c.post("/generate", GENERATE, headers=bad))[0] == 400, "a mistake stays one"

    run(body, tokenizer, router_timeout_s=2.0)


def test_what_was_attained_is_counted_and_told(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = []
    monkeypatch.setattr("router.gateway.gateway.request_ended", lines.append)
    assert logs.request_ended is not lines.append

    async def body(c: Cluster) -> None:
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
        [told] = (await get(c, "/explain/named"))[1]["requests"]
        assert told["slo"]["class"] == "interactive"
        assert (told["slo"]["slo_s"], told["slo"]["attained"]) == (20.0, "met")
        assert told["slo"]["due_s"] == pytest.approx(20.0, abs=5.0)
        [attempt] = told["attempts"]
        assert attempt["router"]["slo"]["class"] == "interactive"
        assert [(line["slo_class"], line["slo_attained"]) for line in lines] == [
            ("interactive", "met"), ("interactive", "missed"), ("batch-1", "met"), ("", ""), ("batch-1", "missed"),
        ]  # fmt: skip
        listed = (await get(c, "/requests"))[1]["requests"]
        assert [one["slo_class"] for one in listed] == [
            "batch-1",
            "",
            "batch-1",
            "interactive",
            "interactive",
        ]

    run(body, tokenizer, access={"log_format": "json"})


def test_a_tenant_sees_what_its_own_requests_attained(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "the admin's")
    path = tmp_path / "t.yaml"
    for name in ("gold", "silver"):
        edit.add(path, name, Tenant(keys=[keys.written(keys.digest(name))]))

    async def body(c: Cluster) -> None:
        def bearer(key: str, **more: str) -> dict[str, Any]:
            return {"headers": {"authorization": f"Bearer {key}", **more}}

        assert (await c.post("/generate", GENERATE, **bearer("gold")))[0] == 200
        late = bearer("gold", **{"x-fair-class": "batch-1", "x-fair-slo-ms": "0.001"})
        assert (await c.post("/generate", GENERATE, **late))[0] == 200
        assert (await c.post("/generate", GENERATE, **bearer("silver")))[0] == 200
        async with c.http.get(c.url + "/v1/usage", **bearer("gold")) as answer:
            classes = (await answer.json())["classes"]
        assert classes == {
            "batch-1": {"requests": 1, "met": 0, "missed": 1},
            "interactive": {"requests": 1, "met": 1, "missed": 0},
        }

    run(body, tokenizer, access={"tenants": str(path), "admin_port": free_port()})


def test_a_class_of_hours_waits_longer_for_a_replica_that_is_silent(tokenizer: Path) -> None:
    """Timeouts are made for the first class. What may take longer by its class is not given up before."""

    async def body(c: Cluster) -> None:
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

    run(body, tokenizer, idle_timeout_s=0.5, health_timeout_s=60.0)
