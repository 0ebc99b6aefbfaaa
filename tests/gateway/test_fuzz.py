"""Whatever comes over a wire is taken or refused: nothing else is raised, and nothing answers 500."""

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.events import Arrive, ProtocolError, decode_answer, decode_event, encode
from router.gateway.answer.resume import Diverged, Resumable
from router.gateway.answer.sse import stream_of
from router.gateway.errors import ApiError
from router.gateway.request.call import Call, Names
from router.gateway.request.parse import parse
from router.wire import decode_kv_batch
from sglang_fair.common.fields import GENERATE
from tests.support.budget import examples
from tests.support.stand_in import MODEL

pytestmark = pytest.mark.slow
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
msgpack_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def damaged(draw: Any, whole: st.SearchStrategy[bytes]) -> bytes:
    """`whole` with a few bytes changed, and perhaps cut."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(0, 3))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))]) if draw(st.booleans()) else bytes(data)


ARRIVE = encode(Arrive("a", "b", bytes(8), 5, "c", exclude=("a",)))


@settings(max_examples=examples(400))
@given(st.one_of(st.binary(), damaged(st.just(ARRIVE)), msgpack_values.map(msgspec.msgpack.encode)))
def test_a_message_is_an_event_or_refused(data: bytes) -> None:
    for decode in (decode_event, decode_answer):
        with suppress(ProtocolError):
            found = decode(data)
            assert decode(encode(found)) == found or "nan" in repr(found)


STORED = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2}


@settings(max_examples=examples(400))
@given(
    st.one_of(
        st.binary(),
        msgpack_values.map(msgspec.msgpack.encode),
        st.lists(msgpack_values, max_size=3).map(lambda values: msgspec.msgpack.encode([1.0, values, 0])),
        damaged(st.just(msgspec.msgpack.encode([1.0, [STORED], 0]))),
    )
)
def test_a_kv_batch_is_read_or_refused(data: bytes) -> None:
    with suppress(ProtocolError):
        assert decode_kv_batch("r0", data).skipped >= 0


KEYS = (
    "model", "messages", "prompt", "text", "input_ids", "sampling_params", "stream", "stream_options", "n",
    "max_tokens", "max_completion_tokens", "max_new_tokens", "temperature", "seed", "stop", "user", "rid",
    "custom_params", "lora_path", "cache_salt", "extra_key", "top_k", "min_tokens", "best_of", "tools",
)  # fmt: skip
bodies = st.one_of(
    st.binary(max_size=40),
    st.dictionaries(st.sampled_from(KEYS), json_values, max_size=6).map(
        lambda body: json.dumps({"prompt": "x", "text": "x", "messages": [{"role": "user"}]} | body).encode()
    ),
    json_values.map(lambda value: json.dumps(value).encode()),
    damaged(
        st.just(b'{"model":"tiny","prompt":"x","messages":[{"role":"user","content":"x"}],"stream":true}')
    ),
)


def parsed(kind: Any, raw: bytes, most: int | None = None) -> Call:
    """/generate gets only those fields that it knows."""
    with suppress(ValueError):
        if kind == "generate" and isinstance(body := json.loads(raw), dict):
            raw = json.dumps({name: one for name, one in body.items() if name in GENERATE}).encode()
    return parse(kind, raw, Names(MODEL), most_output_tokens=most)


@settings(max_examples=examples(500))
@given(kind=st.sampled_from(["chat", "completions", "generate"]), raw=bodies)
def test_a_body_is_a_call_or_refused(kind: Any, raw: bytes) -> None:
    try:
        call = parsed(kind, raw)
    except ApiError as error:
        refused = error
    else:
        assert json.loads(call.forwarded("0" * 32))["rid"]
        assert call.max_output_tokens >= 0
        return
    assert 400 <= refused.status < 500
    assert json.loads(refused.body())["error"]["message"]


def _call(kind: Any) -> Call:
    asked: dict[str, dict[str, Any]] = {
        "chat": {"messages": [{"role": "user"}]},
        "completions": {"prompt": "x", "max_tokens": 5},
        "generate": {"text": "x", "sampling_params": {"max_new_tokens": 5}},
    }
    return parsed(kind, json.dumps(asked[kind] | {"stream": True}).encode())


chunk = st.fixed_dictionaries(
    {},
    optional={
        "choices": st.one_of(
            json_values,
            st.fixed_dictionaries(
                {},
                optional=dict.fromkeys(("text", "delta", "token_ids", "finish_reason"), json_values)
                | {
                    "delta": st.fixed_dictionaries(
                        {}, optional={"content": json_values, "tool_calls": json_values}
                    )
                },
            ).map(lambda one: [one]),
        ),
        "text": json_values,
        "output_ids": json_values,
        "usage": json_values,
        "id": json_values,
        "meta_info": st.fixed_dictionaries(
            {},
            optional=dict.fromkeys(
                ("completion_tokens", "prompt_tokens", "finish_reason", "id"), json_values
            ),
        ),
    },
)


@settings(max_examples=examples(150))
@given(
    kind=st.sampled_from(["chat", "completions", "generate"]),
    first=st.lists(chunk, min_size=1, max_size=4),
    second=st.lists(chunk, max_size=4),
)
def test_whatever_a_replica_streams_is_passed_on_or_given_up(
    kind: Any, first: list[Any], second: list[Any]
) -> None:
    call = _call(kind)
    resumable, stream = Resumable(call), stream_of(call)
    for leg in (first, second):
        data = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in leg)
        with suppress(Diverged):
            if shown := stream.feed(data):
                resumable.pass_on(shown)
            assert resumable.leg_tokens is None or resumable.leg_tokens >= 0
            assert stream.usage.output_tokens >= 0
            resumable.next_leg([1, 2, 3], lambda ids, hide: "x" * len(ids))
            continue
        return


LENGTHS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "n")


def limits_in_a_body(named: dict[str, int]) -> bytes:
    body = {"prompt": "x", "text": "x", "messages": [{"role": "user"}], "sampling_params": named}
    return json.dumps(body | named).encode()


@settings(max_examples=examples(300))
@given(
    kind=st.sampled_from(["chat", "completions", "generate"]),
    raw=bodies | st.dictionaries(st.sampled_from(LENGTHS), st.integers(0, 400)).map(limits_in_a_body),
    most=st.sampled_from([9, 300]),
)
@example(kind="chat", raw=limits_in_a_body({"max_completion_tokens": 0, "max_tokens": 5}), most=9)
def test_no_body_asks_for_a_longer_answer_than_it_may(kind: Any, raw: bytes, most: int) -> None:
    """What SGLang would make of the body, by its own rules, is at most the longest answer, and is what is held."""
    try:
        call = parsed(kind, raw, most)
    except ApiError:
        return
    body = json.loads(call.encoded)
    match kind:
        case "chat":
            asked = [body.get("max_completion_tokens") or body.get("max_tokens")]
        case "completions":
            asked = [body.get("max_tokens", 16)]
            if asked == [None]:  # which SGLang refuses
                return
        case _:
            given = body.get("sampling_params")
            every = given if isinstance(given, list) else [given or {}]
            asked = [one.get("max_new_tokens", 128) for one in every]
    assert all(one is not None and one <= most for one in asked)
    assert call.max_output_tokens >= sum(asked)
    if len(asked) == 1:
        assert call.max_output_tokens == asked[0] * call.samples
