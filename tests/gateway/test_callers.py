"""What goes to router and replica with a tenant's request, and what a sender cannot put there."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.gateway.errors import ApiError
from router.gateway.request.call import Call, Names
from router.gateway.request.kinds import BY_HEADER, PATHS, WITHOUT_ENGINE
from router.gateway.request.parse import parse
from router.wire import namespace
from sglang_fair.common.caller import GROUP_MARK, HEADER_WEIGHT, read_weight, salted
from tests.gateway.clusters import CHAT, COMPLETION, GENERATE, MODEL, Cluster, add_tenant, listening
from tests.support.apis import BODIES
from tests.support.budget import examples

GOLD, SILVER = "key of gold", "key of silver"
SALT = f"{GROUP_MARK}team{GROUP_MARK}"


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    for name, key, more in (("gold", GOLD, {"weight": 3.0, "cache_group": "team"}), ("silver", SILVER, {})):
        add_tenant(path, name, key, **more)
    return path


async def test_weight_and_group_go_with_each_request(tenants: Path, c: Cluster) -> None:
    arrived = listening(c)
    liar = {HEADER_WEIGHT: "9@99", "x-fair-client": "silver", "x-fair-group": "other"}
    for path, asked in (
        ("/v1/chat/completions", CHAT | {"custom_params": {"fair": {"weight": 9, "weight_version": 99}}}),
        ("/v1/completions", COMPLETION | {"cache_salt": "mine", "weight": 9}),
        ("/generate", GENERATE | {"cache_salt": ""}),
    ):
        for key, client, weight, group in ((GOLD, "gold", 3.0, "team"), (SILVER, "silver", 1.0, None)):
            bearer = {"authorization": f"Bearer {key}"}
            status, headers, _ = await c.post(path, asked, headers=liar | bearer)
            assert (status, headers["x-fair-client"]) == (200, client)
            _, seen, sent = c.replicas[0].requests[-1]
            assert seen["x-fair-client"] == client
            told = read_weight(seen[HEADER_WEIGHT])
            assert told is not None
            assert told[0] == weight
            salt = salted(group, asked.get("cache_salt"))
            assert (sent.get("cache_salt") or None) == salt
            assert "fair" not in (sent.get("custom_params") or {})
            assert arrived[-1].namespace == namespace(None, salt, None)
            assert (arrived[-1].client, arrived[-1].weight, arrived[-1].weight_version) == (client, *told)
    assert len({one.weight_version for one in arrived}) == 1


# ---- bodies


def parsed(kind: Any, group: str | None, **more: object) -> Call:
    return parse(kind, json.dumps(BODIES[PATHS[kind]] | more).encode(), Names(MODEL), group)


SALTED = sorted(set(PATHS) - WITHOUT_ENGINE)
"""Kinds with a cache salt."""


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.sampled_from(["", "s", SALT, SALT + "s", "\x1d", "\x1f"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "fair"]), inner, max_size=2)
    ),
    max_leaves=5,
)


@settings(max_examples=examples(200))
@given(
    kind=st.sampled_from(SALTED), salt=JSON, extra_key=JSON, lora=JSON, group=st.sampled_from([None, "other"])
)
def test_no_body_reaches_into_a_group(kind, salt, extra_key, lora, group) -> None:
    """Neither of somebody without a group nor of another one's: not at the replica, not in the router's tree."""
    try:
        call = parsed(kind, group, cache_salt=salt, extra_key=extra_key, lora_path=lora)
    except ApiError:
        return
    salts = call.salt if kind in BY_HEADER else call.body.get("cache_salt")
    for one in salts if isinstance(salts, list) else [salts]:
        assert not (isinstance(one, str) and one.startswith(SALT))
        if group is not None:
            assert isinstance(one, str)
            assert one.startswith(f"{GROUP_MARK}other{GROUP_MARK}")
    assert json.loads(call.encoded).get("cache_salt") == (None if kind in BY_HEADER else salts)
    for mine in (None, "s", SALT):
        assert call.namespace != namespace(None, salted("team", mine), None)


@pytest.mark.parametrize("kind", ["chat", "completions", "generate"])
def test_each_salt_of_a_batch_is_put_into_the_group(kind) -> None:
    call = parsed(kind, "team", cache_salt=["", "s"])
    assert call.body["cache_salt"] == [salted("team", None), salted("team", "s")]
    for wrong in (3, {"a": 1}, [1], ["s", None], True):
        with pytest.raises(ApiError) as caught:
            parsed(kind, "team", cache_salt=wrong)
        assert caught.value.status == 400


@pytest.mark.parametrize("kind", ["chat", "completions", "generate"])
def test_without_a_group_a_body_is_passed_on_as_it_is(kind) -> None:
    for salt in (None, "", "s", ["a", ""], 3):
        assert parsed(kind, None, cache_salt=salt).body["cache_salt"] == salt
    assert "cache_salt" not in parsed(kind, None).body


async def test_a_client_s_trace_goes_on_at_the_replica(c: Cluster) -> None:
    trace = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "a=1"}
    for path, asked in (("/v1/chat/completions", CHAT), ("/generate", GENERATE)):
        await c.post(path, asked, headers=trace)
        _, seen, _ = c.replicas[0].requests[-1]
        assert {name: seen[name] for name in trace} == trace
    await c.post("/generate", GENERATE)
    assert not trace.keys() & c.replicas[0].requests[-1][1].keys()
