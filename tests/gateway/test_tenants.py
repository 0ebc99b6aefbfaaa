"""Tenants at a gateway over real sockets: invented keys, forged headers, keys that change, limits that are charged."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from router.gateway.guard import KEY_VARIABLE
from sglang_fair.common.service_keys import replica_key
from sglang_fair.tenants.model import Limits
from tests.gateway.clusters import CHAT, COMPLETION, ENDPOINTS, GENERATE, MODEL, Cluster, add_tenant
from tests.support.ports import free_port
from tests.support.waiting import eventually

STREAM = COMPLETION | {"stream": True}


@pytest.fixture
def tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(KEY_VARIABLE, "the admin's")
    monkeypatch.setenv(replica_key.variable, "the replicas'")
    made = tmp_path / "t.yaml"
    for name in ("gold", "silver"):
        add_tenant(made, name)
    return made


@pytest.fixture
def options(tenants: Path, options: dict[str, Any]) -> dict[str, Any]:
    """With the file; `thrifty` are the limits of a tenant of that name."""
    if thrifty := dict(options.pop("thrifty", {})):
        add_tenant(tenants, "thrifty", models=thrifty.pop("models", None), limits=Limits(**thrifty))
    access = {"admin_port": free_port(), **options.pop("access", {})}
    return {"tenants": tenants, "access": access, **options}


def as_(key: str, **headers: str) -> dict[str, Any]:
    return {"headers": {"authorization": f"Bearer {key}", **headers}}


def charged(c: Cluster) -> int:
    """What the tenant "thrifty" has been charged today."""
    quotas = c.gateway.quotas
    return quotas._local.incr(f"sglang-fair/tokens-day/thrifty/{int(quotas._clock_s() // 86400)}", 60, 0)


async def used(c: Cluster) -> int:
    """The same, once everything is settled."""

    async def settled() -> bool:
        state = await c.state()
        return not (state["gateway"]["in_flight"] or c.gateway.quotas._settling)

    await eventually(settled, "everything is charged")
    return charged(c)


@pytest.mark.cluster(access={"trusted_proxies": "127.0.0.0/8"})
async def test_a_proxy_that_is_trusted_names_the_tenant(c: Cluster) -> None:
    given = {"headers": {"x-tenant-id": "silver"}}
    status, headers, _ = await c.post("/v1/completions", COMPLETION, **given)
    assert (status, headers["x-fair-client"]) == (200, "silver")
    given = {"headers": {"x-tenant-id": "bronze"}}
    assert (await c.post("/v1/completions", COMPLETION, **given))[0] == 401


async def test_a_client_s_key_stays_here_and_the_gateway_has_its_own(c: Cluster) -> None:
    await c.post("/v1/completions", COMPLETION, **as_("gold"))
    assert c.replicas[0].headers["authorization"] == "Bearer the replicas'"


@pytest.mark.cluster(thrifty={"models": [MODEL], "output_tokens": 8, "prompt_tokens": 200})
async def test_models_and_lengths(c: Cluster) -> None:
    async def ask(kind: str, **more: Any) -> tuple[int, str | None]:
        status, _, answer = await c.post(kind, ENDPOINTS[kind] | more, **as_("thrifty"))
        return status, json.loads(answer)["error"]["code"] if status >= 400 else None

    chat, completions, generate = ENDPOINTS
    sampling, new = "sampling_params", "max_new_tokens"
    for kind, asked, name, sent in (
        (chat, {}, "max_completion_tokens", 8),
        (chat, {"max_tokens": 0, "max_completion_tokens": 0}, "max_completion_tokens", 8),
        (chat, {"max_tokens": 5}, "max_completion_tokens", None),
        (completions, {}, "max_tokens", 8),
        (generate, {sampling: None}, sampling, {new: 8}),
        (generate, {sampling: {new: None}}, sampling, {new: 8}),
        (generate, {"text": ["a"], sampling: [{new: 1}]}, sampling, [{new: 1}]),
        (generate, {"text": ["a"], sampling: [{"n": 1}]}, sampling, [{"n": 1, new: 8}]),
    ):
        assert await ask(kind, **asked) == (200, None)
        assert c.replicas[0].body.get(name) == sent
    for kind, asked, status, code in (
        (chat, {"max_tokens": 9, "max_completion_tokens": 1}, 400, "output_too_long"),
        (completions, {"max_tokens": 9}, 400, "output_too_long"),
        (generate, {"text": ["a", "b"], sampling: [{new: 1}, {new: 9}]}, 400, "output_too_long"),
        (completions, {"prompt": "x" * 201}, 400, "prompt_too_large"),
        (completions, {"prompt": ["x" * 101, "x" * 101]}, 400, "prompt_too_large"),
        (completions, {"model": f"{MODEL}:adapter"}, 404, "model_not_found"),
        (completions, {"lora_path": "adapter"}, 404, "model_not_found"),
        (generate, {"lora_path": ["adapter"]}, 404, "model_not_found"),
        (generate, {"text": ["a", "b"], "lora_path": [None, "adapter"]}, 404, "model_not_found"),
    ):
        assert await ask(kind, **asked) == (status, code), asked


@pytest.mark.cluster(thrifty={"requests_per_minute": 10_000, "tokens_per_day": 20})
async def test_what_is_left_is_told_and_too_much_is_429(c: Cluster) -> None:
    for left in (20 - 2 - 5, 20 - (2 + 3) - 2 - 5, 20 - 2 * (2 + 3) - 2 - 5):
        status, headers, _ = await c.post("/v1/completions", COMPLETION | {"max_tokens": 5}, **as_("thrifty"))
        assert status == 200
        assert headers["x-ratelimit-limit-tokens-day"] == "20"
        assert headers["x-ratelimit-remaining-tokens-day"] == str(left)
        assert int(headers["x-ratelimit-remaining-requests"]) < 10_000
        await used(c)
    status, headers, answer = await c.post(
        "/v1/completions", COMPLETION | {"max_tokens": 5}, **as_("thrifty")
    )
    error = json.loads(answer)["error"]
    assert (status, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert 1 <= int(headers["retry-after"]) <= 86400
    assert headers["x-ratelimit-remaining-tokens-day"] == "5"
    assert (await c.post("/v1/completions", COMPLETION, **as_("gold")))[0] == 200
    assert await used(c) == 15
    assert (await c.state())["gateway"]["limits"]["refused"] == {"tokens-day": 1}


PROMPT, ANSWER = 2, 3
"""Tokens of every request here."""


@pytest.mark.parametrize("kind", list(ENDPOINTS))
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.cluster(thrifty={"tokens_per_day": 10_000})
async def test_an_answer_is_charged_once(kind: str, stream: bool, c: Cluster) -> None:
    for number in range(1, 4):
        assert (await c.post(kind, ENDPOINTS[kind] | {"stream": stream}, **as_("thrifty")))[0] == 200
        each = await used(c) / number
        assert each == (PROMPT + ANSWER if kind != "/v1/chat/completions" else each)
        assert each >= PROMPT + ANSWER


@pytest.mark.parametrize("mode", ["die", "503", "die after headers"])
@pytest.mark.cluster(thrifty={"tokens_per_day": 10_000}, replicas=2)
async def test_a_request_that_is_tried_again_is_charged_once(mode: str, c: Cluster) -> None:
    c.replicas[0].mode = mode
    for number in range(1, 5):  # in turn, so that half of them come to the bad one first
        status, _, _ = await c.post("/v1/completions", STREAM, **as_("thrifty"))
        assert status == 200
        assert await used(c) == number * (PROMPT + ANSWER)
    assert (await c.state())["gateway"]["retried"] >= 1


@pytest.mark.cluster(thrifty={"tokens_per_day": 100_000})
async def test_a_stream_that_is_cut_is_charged_what_came(c: Cluster) -> None:
    c.replicas[0].mode = "endless"
    request = GENERATE | {"stream": True, "sampling_params": {"max_new_tokens": 50_000}}
    async with c.http.post(c.url + "/generate", json=request, **as_("thrifty")) as stream:
        seen = 0
        while seen < 20:
            seen += (await stream.content.readline()).startswith(b"data: ")
    after = await used(c)
    assert PROMPT + 20 <= after < 50_000


@pytest.mark.cluster(thrifty={"tokens_per_day": 100_000})
async def test_a_client_that_leaves_an_answer_in_one_piece_pays_what_it_asked_for(c: Cluster) -> None:
    c.replicas[0].mode = "endless"
    request = GENERATE | {"sampling_params": {"max_new_tokens": 500}}
    asking = asyncio.create_task(c.post("/generate", request, **as_("thrifty")))
    await eventually(lambda: c.replicas[0].working, "it is at work")
    asking.cancel()
    assert await used(c) == PROMPT + 500


@pytest.mark.parametrize("mode", ["503", "401", "refuse", "no worker"])
@pytest.mark.cluster(thrifty={"tokens_per_day": 100_000}, replicas=2, router_timeout_s=1.0)
async def test_what_nobody_serves_costs_no_tokens(mode: str, c: Cluster) -> None:
    if mode == "no worker":
        await c.lose_router()
        c.gateway.fleet.workers.clear()
    for replica in c.replicas:
        if mode == "refuse":
            await replica.close()
        replica.mode = mode
    for kind in ENDPOINTS:
        assert (await c.post(kind, ENDPOINTS[kind], **as_("thrifty")))[0] in (502, 503)
    await eventually(lambda: not (c.gateway.quotas._settling or charged(c)), "all is given back")


async def test_a_key_that_the_replica_refuses_is_not_the_client_s_fault(c: Cluster) -> None:
    c.replicas[0].mode = "401"
    status, _, answer = await c.post("/v1/chat/completions", CHAT, **as_("gold"))
    assert status == 502
    assert "does not accept this gateway's key" in json.loads(answer)["error"]["message"]
