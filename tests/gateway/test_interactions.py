"""What the gateway passes on of interactions, what it remembers of them, and what a refused client is told."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from router.events import Arrive, Load
from router.gateway.app import create_app
from router.throttling import Throttling
from sglang_fair.core.throttle import Rules
from sglang_fair.tenants.model import Overload
from tests.gateway.clusters import (
    CHAT,
    COMPLETION,
    GENERATE,
    Cluster,
    add_tenant,
    cluster,
    gateway_settings,
    listening,
    served,
)
from tests.support.stand_in import make_tokenizer
from tests.support.waiting import eventually

NAMED = {"x-fair-client": "c", "x-fair-app": "chat", "x-fair-interaction": "7", "x-fair-stage": "plan"}


def oit(calls: int) -> dict[str, Any]:
    """A router that throttles, and lets a user have so many calls."""
    return {"throttling": Throttling("oit", Rules(calls))}


def fair_headers(c: Cluster) -> dict[str, str]:
    """Those of ours that the replica got with the last request, but for the attempt's name and the deadline."""
    ours = {name: value for name, value in c.replicas[0].headers.items() if name.startswith("x-fair-")}
    for name in ("x-fair-attempt", "x-fair-class", "x-fair-slack-ms"):
        del ours[name]
    return ours


def full(c: Cluster) -> None:
    """The only replica says that it is."""
    c.router.shell.tell(Load("r0", 1000, 0, 1000))


async def test_a_call_s_place_in_its_interaction_goes_to_router_and_replica(c: Cluster) -> None:
    arrived = listening(c)
    for number in (1, 2):
        assert (await c.post("/generate", GENERATE, headers=NAMED | {"x-fair-call": "99"}))[0] == 200
        assert fair_headers(c) == NAMED | {"x-fair-call": str(number)}
    assert [one.begun for one in arrived] == [0, 1]
    said = {"metadata": {"app": "chat", "interaction": "7", "stage": "m\u00e9rge", "last": "1"}}
    for path, asked in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        assert (await c.post(path, asked | said, headers={"x-fair-client": "c"}))[0] == 200
    assert arrived[-1].stage == "m%C3%A9rge"
    assert (arrived[-2].begun, arrived[-2].last, arrived[-1].begun) == (2, True, 0), (
        "it ended with its last call"
    )
    assert fair_headers(c)["x-fair-last"] == "1"
    bare = {"x-fair-client": "c", "x-fair-call": "5"}
    assert (await c.post("/generate", GENERATE, headers=bare))[0] == 200
    assert fair_headers(c) == {"x-fair-client": "c"}


@pytest.mark.cluster(router=partial(oit, 1))
async def test_a_throttled_client_is_told_why_and_when_to_come_back(c: Cluster) -> None:
    assert (await c.post("/generate", GENERATE, headers=NAMED))[0] == 200
    full(c)
    status, headers, told = await c.post("/generate", GENERATE, headers=NAMED | {"x-fair-interaction": "8"})
    error = json.loads(told)["error"]
    assert (status, error["code"], error["type"]) == (429, "throttled_user", "rate_limit_error")
    assert 1 <= int(headers["retry-after"]) <= 60
    assert "limit is 1" in error["message"]
    assert "pressure 1.00" in error["message"]
    assert (await c.post("/generate", GENERATE, headers=NAMED))[0] == 200, "its interaction goes on"
    other = NAMED | {"x-fair-client": "other"}
    assert (await c.post("/generate", GENERATE, headers=other))[0] == 200
    state = (await c.state())["throttle"]
    assert state["refused"]["throttled_user"] == 1
    assert state["open_interactions"] == 2
    status, _, told = await c.post("/limits", {"user": 5})
    assert (status, json.loads(told)["throttle"]["rules"]["user"]) == (200, 5)
    again = NAMED | {"x-fair-interaction": "9"}
    assert (await c.post("/generate", GENERATE, headers=again))[0] == 200
    for bad in ({"user": 0}, {"low": 0.9, "high": 0.5}, {"users": 3}, [], {"apps": {"chat": "many"}}):
        assert (await c.post("/limits", bad))[0] == 400
    assert (await c.get("/limits"))[1]["throttle"]["rules"]["user"] == 5


async def test_a_gateway_remembers_the_number_that_the_router_gave(tokenizer: Path, c: Cluster) -> None:
    arrived = listening(c)
    other = create_app(gateway_settings(c.router.endpoint, tokenizer, router_timeout_s=2.0))
    async with served(other) as url:
        await eventually(lambda: other.gateway.link.alive, "the other gateway hears the router")
        for _ in range(2):
            for at in (url, c.url):
                async with c.http.post(at + "/generate", json=GENERATE, headers=NAMED) as answer:
                    assert answer.status == 200
    assert fair_headers(c)["x-fair-call"] == "4"
    assert [one.begun for one in arrived] == [0, 0, 1, 2]


@pytest.mark.cluster(replicas=2, router=partial(oit, 9))
async def test_a_retry_is_the_same_call(c: Cluster) -> None:
    arrived: list[Arrive] = listening(c)
    c.replicas[0].mode = "die"
    assert (await c.post("/generate", GENERATE, headers=NAMED))[0] == 200
    assert [(one.attempt, one.begun) for one in arrived] == [(0, 0), (1, 1)]
    assert c.replicas[1].headers["x-fair-call"] == "1"
    [row] = (await c.state())["throttle"]["nearest"]
    assert row == {"client": "c", "calls": 1, "limit": 9}


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    own = Overload(calls_per_minute=5, apps={"chat": 2, "*": 1})
    add_tenant(path, "gold", apps=["chat"], overload=own)
    return path


async def test_tenants_have_applications_and_limits_of_their_own(tenants: Path, c: Cluster) -> None:
    arrived = listening(c)
    for app in ("chat", "code"):
        headers = NAMED | {"x-fair-app": app, "authorization": "Bearer gold"}
        assert (await c.post("/generate", GENERATE, headers=headers))[0] == 200
    assert [(one.app, one.most_calls, one.app_calls) for one in arrived] == [
        ("chat", 5, 2),
        ("(other)", 5, 1),
    ]


@pytest.mark.parametrize("length", [6, 9000])
async def test_the_tokens_of_system_messages_go_to_the_replica(length: int, c: Cluster) -> None:
    """Counted by the gateway, whatever the client says."""
    system = {"role": "system", "content": "é" + "s" * (length - 2)}  # a token is a byte
    parts = {"role": "system", "content": [{"type": "text", "text": "more"}]}
    user = {"role": "user", "content": "hi"}
    path = "/v1/chat/completions"
    for at, asked, counted in (
        (path, CHAT | {"messages": [system, user]}, str(length)),
        (path, CHAT | {"messages": [system, parts, user]}, str(length + 1 + 4)),
        (path, CHAT | {"messages": [system, user], "input_ids": [1, 2]}, None),
        (path, CHAT | {"messages": [{"role": "system"}, user]}, None),
        (path, CHAT | {"system_tokens": 5}, None),
        ("/v1/completions", COMPLETION | {"system_tokens": 5}, None),
    ):
        lie = {"x-fair-client": "c", "x-fair-system-tokens": "1"}
        assert (await c.post(at, asked, headers=lie))[0] == 200
        assert fair_headers(c).get("x-fair-system-tokens") == counted


async def test_system_messages_are_no_more_than_the_prompt(tmp_path: Path) -> None:
    """Of a template that leaves them out."""
    folder = make_tokenizer(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[-1]['content'] }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": "system", "content": "s" * 100}, {"role": "user", "content": "hi"}]
    async with cluster(folder) as c:
        assert (await c.post("/v1/chat/completions", CHAT | {"messages": messages}))[0] == 200
        assert fair_headers(c)["x-fair-system-tokens"] == "2"
