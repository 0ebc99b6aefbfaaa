"""OpenAI's Responses API, Anthropic's Messages API, embeddings and the tokenizer's paths, through the gateway."""

import json
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.gateway.answer.sse import TypedStream, Usage, error_event, stream_of, usage_of
from router.gateway.errors import ANTHROPIC_TYPES, ApiError, of_replica
from router.gateway.request.call import Names
from router.gateway.request.intake import Tokens
from router.gateway.request.kinds import (
    ANTHROPIC,
    BY_HEADER,
    EMBEDDING,
    NATIVE,
    PATHS,
    WITHOUT_ENGINE,
    Kind,
    style_of,
)
from router.gateway.request.parse import parse
from router.wire import namespace
from sglang_fair.common.caller import GROUP_MARK, HEADER_SALT, read_salt, salt_header, salted
from sglang_fair.common.identity import HEADER_ATTEMPT, HEADER_CLIENT
from sglang_fair.tenants.model import Limits
from tests.gateway.clusters import MODEL, Cluster, add_tenant, listening
from tests.support.apis import BODIES, Counts, events, whole
from tests.support.budget import examples

STREAMED: tuple[Kind, ...] = ("responses", "messages")
LATER: tuple[Kind, ...] = (
    "responses",
    "messages",
    "embeddings",
    "encode",
    "count_tokens",
    "tokenize",
    "detokenize",
)
GOLD = "key of gold"


@pytest.fixture(scope="module")
def tokens(tokenizer: Path) -> Tokens:
    return Tokens(tokenizer)


async def noted(c: Cluster, name: str) -> Any:
    """What the gateway remembers of a request."""
    [found] = (await c.gateway.explainer.explain(name, None)).requests
    return found


def read(kind: Kind, **more: object) -> Any:
    return parse(kind, json.dumps(BODIES[PATHS[kind]] | more).encode(), Names(MODEL))


def refused(kind: Kind, **more: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(kind, **more)
    return caught.value


# -- bodies


@pytest.mark.parametrize(
    ("kind", "field", "value", "says"),
    [
        ("responses", "store", True, "responses are not stored here"),
        ("responses", "background", True, "responses are not stored here"),
        ("responses", "previous_response_id", "resp_1", "responses are not stored here"),
        ("responses", "conversation", {"id": "conv_1"}, "responses are not stored here"),
        ("responses", "prompt", {"id": "pmpt_1"}, "is not served here"),
        ("responses", "input", [], "must be a text or a non-empty list of objects"),
        ("responses", "input", 3, "must be a text or a non-empty list of objects"),
        ("responses", "max_output_tokens", 2, "must be `int` >= 3"),
        ("responses", "max_output_tokens", -1, "must be `int` >= 3"),
        ("messages", "messages", [], "must be a non-empty list of objects"),
        ("messages", "max_tokens", 0, "must be `int` >= 1"),
        ("messages", "max_tokens", None, "must be an integer from 1"),
        ("messages", "system", 3, "must be a text or a list of objects"),
        ("messages", "cache_salt", ["a"], "must be a text"),
        ("embeddings", "input", None, "`input` is missing"),
        ("embeddings", "input", ["a", 3], "mixes texts with something else"),
        ("embeddings", "input", [[]], "non-empty list of token ids"),
        ("count_tokens", "messages", [], "must be a non-empty list of objects"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    kind: Kind, field: str, value: object, says: str
) -> None:
    error = refused(kind, **{field: value})
    assert error.status == 400
    assert says in error.message
    assert "\n" not in error.message


@pytest.mark.parametrize("kind", LATER)
def test_a_model_that_is_not_served_is_not_found(kind: Kind) -> None:
    assert refused(kind, model="claude-of-elsewhere").status == 404
    assert read(kind, model="default").body["model"] == MODEL


def test_an_adapter_is_not_passed_over_in_silence() -> None:
    assert "adapters" in refused("responses", model=f"{MODEL}:fine").message
    assert "not served" in refused("responses", lora_path="fine").message
    assert read("messages", model=f"{MODEL}:fine").namespace == namespace("fine", None, None)


@pytest.mark.parametrize("kind", [kind for kind in LATER if kind not in NATIVE])
def test_the_body_goes_on_as_it_came_with_an_id_to_cancel_by(kind: Kind) -> None:
    call = read(kind, rid="theirs", request_id="theirs", more={"a": [1]})
    [rid] = call.rids("0" * 32) or [None]
    sent = json.loads(call.forwarded("0" * 32))
    assert sent["more"] == {"a": [1]}
    assert "rid" not in sent or sent["rid"] == rid
    match kind:
        case "responses":
            assert sent["request_id"] == rid == "resp_" + "0" * 32
            assert sent["store"] is False
        case "messages":
            assert rid == "0" * 32
        case "embeddings":
            assert sent["rid"] == rid
        case _:
            assert rid is None


def test_answers_are_as_long_as_a_tenant_may_have_them() -> None:
    def capped(kind: Kind, **more: object) -> Any:
        return parse(kind, json.dumps(BODIES[PATHS[kind]] | more).encode(), Names(MODEL), None, 10)

    assert capped("responses").max_output_tokens == 10
    assert capped("messages").max_output_tokens == 8
    assert capped("embeddings").max_output_tokens == capped("tokenize").max_output_tokens == 0
    for kind, name in (("responses", "max_output_tokens"), ("messages", "max_tokens")):
        with pytest.raises(ApiError, match="you may have 10"):
            capped(kind, **{name: 11})


@given(st.text(max_size=50), st.sampled_from([None, "team", "é"]))
def test_a_salt_travels_in_a_header_as_it_is(salt: str, group: str | None) -> None:
    for kind in BY_HEADER:
        call = parse(
            kind, json.dumps(BODIES[PATHS[kind]] | {"cache_salt": salt}).encode(), Names(MODEL), group
        )
        assert call.salt == salted(group, salt)
        assert "cache_salt" not in json.loads(call.encoded)
        if call.salt is not None:
            header = salt_header(call.salt)
            assert header.isascii()
            assert header.isprintable()
            assert read_salt(header) == call.salt


# -- streams


def feed(kind: Kind, stream: bytes, at: list[int]) -> tuple[TypedStream, bytes]:
    reader, out, cuts = stream_of(read(kind, stream=True)), b"", sorted({0, *at, len(stream)})
    assert isinstance(reader, TypedStream)
    for start, end in pairwise(cuts):
        out += reader.feed(stream[start:end])
    return reader, out


@settings(max_examples=examples(50))
@given(
    kind=st.sampled_from(STREAMED),
    pieces=st.lists(
        st.text(max_size=8) | st.just("event: message_stop\n\nevent: response.completed\n"), max_size=6
    ),
    at=st.lists(st.integers(0, 3000), max_size=8),
    lost=st.integers(0, 400),
)
def test_a_stream_passes_unchanged_and_ends_with_its_last_event(kind, pieces, at, lost) -> None:
    """However it is cut on its way, and whatever its texts say."""
    stream = b"".join(events(PATHS[kind], "id", pieces, MODEL, 5))
    reader, out = feed(kind, stream, [min(one, len(stream)) for one in at])
    assert out == stream
    assert reader.ended
    assert reader.usage.output_tokens == len(pieces)
    cut, part = feed(kind, stream[: max(1, len(stream) - 1 - lost)], [])
    assert not cut.ended
    assert stream.startswith(part)
    assert cut.usage.output_tokens <= len(pieces)


@pytest.mark.parametrize("kind", [*STREAMED, *sorted(EMBEDDING), *sorted(WITHOUT_ENGINE)])
def test_a_whole_answer_says_what_it_came_to(kind: Kind) -> None:
    body = json.dumps(whole(PATHS[kind], "id", "ttt", MODEL, Counts(5, 3, 2))).encode()
    expected = {"responses": Usage(3, 2), "messages": Usage(3, 2), "embeddings": Usage(0), "encode": Usage(0)}
    assert usage_of(kind, body) == expected.get(kind)


def test_errors_have_the_shape_of_their_api() -> None:
    error = ApiError(502, "the replica is lost", code="replica_lost")
    name, data = error_event("messages", error).decode().removesuffix("\n\n").split("\n")
    assert name == "event: error"
    said = {"type": "api_error", "message": "the replica is lost"}
    assert json.loads(data.removeprefix("data: ")) == {"type": "error", "error": said}
    name, data = error_event("responses", error, 7).decode().removesuffix("\n\n").split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "code": "replica_lost",
        "message": "the replica is lost",
        "param": None,
        "sequence_number": 7,
    }
    assert json.loads(error_event("chat", error).removeprefix(b"data: "))["error"]["code"] == "replica_lost"
    for status, kind in ANTHROPIC_TYPES.items():
        assert json.loads(ApiError(status, "x").body("anthropic"))["error"]["type"] == kind


SAID = "temperature must be a number"


@pytest.mark.parametrize("kind", [*LATER, "chat", "generate"])
@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        ({"object": "error", "message": SAID, "type": "BadRequestError", "code": 400}, SAID, 400),
        ({"error": {"message": SAID, "type": "Bad Request", "code": "odd"}}, SAID, "odd"),
        ({"type": "error", "error": {"type": "BadRequestError", "message": SAID}}, SAID, 400),
        ({"message": f'{SAID}\n\n  File "/opt/sglang/http_server.py", line 5, in ask\n'}, SAID, 400),
        ({"error": SAID}, SAID, 400),
        (SAID, SAID, 400),
        ({"error": {"message": 3, "code": [4]}}, "the replica answered 400", 400),
        (None, "the replica answered 400", 400),
    ],
)
def test_what_a_replica_refuses_is_said_as_the_api_says_it(
    kind: Kind, body: object, message: str, code: object
) -> None:
    said = json.loads(of_replica(400, json.dumps(body).encode()).body(style_of(kind)))
    if kind in ANTHROPIC:
        expected: Any = {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
    else:
        detail = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        expected = {"error": detail}
    assert said == expected


@given(st.binary(max_size=40) | st.recursive(st.none() | st.text(max_size=4), lambda one: st.dictionaries(
    st.sampled_from(["error", "message", "code", "param"]), one, max_size=3)).map(lambda one: json.dumps(one).encode())
)  # fmt: skip
def test_whatever_a_replica_says_its_error_is_one_of_the_api(body: bytes) -> None:
    for kind in ("messages", "embeddings"):
        said = json.loads(of_replica(500, body).body(style_of(kind)))["error"]
        assert isinstance(said["message"], str)
        assert said["message"]


# -- through the gateway


async def test_the_clients_understand_what_a_replica_refuses(c: Cluster) -> None:
    for kind, mode, stream in product(PATHS, ("400", "500"), (True, False)):
        c.replicas[0].mode = mode
        status, headers, raw = await c.post(PATHS[kind], BODIES[PATHS[kind]] | {"stream": stream})
        assert (status, headers["content-type"]) == (int(mode), "application/json")
        assert headers["x-fair-worker"] == "r0"
        assert json.loads(raw)["error"]["message"] == "as told"
        assert ("type" in json.loads(raw)) is (kind in ANTHROPIC)
    for path, is_anthropic in (("/v1/messages/batches", True), ("/v1/elsewhere", False)):
        status, _, raw = await c.post(path, {})
        assert status == 404
        assert ("type" in json.loads(raw)) is is_anthropic


async def test_each_kind_is_placed_charged_and_passed_on(c: Cluster) -> None:
    arrived = listening(c)
    for kind, path in PATHS.items():
        status, headers, raw = await c.post(path, BODIES[path], headers={HEADER_CLIENT: "me"})
        assert (status, headers["x-fair-client"], headers["x-fair-worker"]) == (200, "me", "r0")
        assert 0 <= int(headers["x-fair-matched-tokens"]) <= len(arrived[-1].tokens) // 4
        assert json.loads(raw)
        seen_path, seen, sent = c.replicas[0].requests[-1]
        assert (seen_path, seen[HEADER_CLIENT]) == (path, "me")
        assert seen[HEADER_ATTEMPT] == headers["x-fair-request-id"]
        assert len(seen[HEADER_ATTEMPT]) == 32
        if kind in ("chat", "completions", *NATIVE):
            assert sent["rid"] == seen[HEADER_ATTEMPT]
        assert sent.get("model") == (None if kind in NATIVE else MODEL)
        assert bool(arrived[-1].tokens) is (kind not in WITHOUT_ENGINE)
        found = await noted(c, headers["x-request-id"])
        assert found["outcome"] == "ok"
        assert found["tokens"]["output"] == (0 if kind in WITHOUT_ENGINE | EMBEDDING else 3)
    state = await c.ended(ok=len(PATHS))
    assert state["counts"]["output_tokens"] == 5 * 3
    assert state["hits"]["measured_cached_tokens"] == 5 * 2


async def test_a_stream_is_passed_on_and_counted(c: Cluster) -> None:
    for kind in STREAMED:
        status, headers, raw = await c.post(PATHS[kind], BODIES[PATHS[kind]] | {"stream": True})
        assert status == 200
        assert headers["content-type"].startswith("text/event-stream")
        assert raw == b"".join(
            events(PATHS[kind], c.replicas[0].body.get("request_id", "x"), ["t0", "t1", "t2"], MODEL, 5)
        ).replace(b"msg_x", f"msg_{headers['x-fair-request-id']}".encode())
        assert (await noted(c, headers["x-request-id"]))["tokens"]["output"] == 3


async def test_a_stream_that_loses_its_replica_ends_in_an_error_event(c: Cluster) -> None:
    for kind in STREAMED:
        c.replicas[0].mode = "die midway"
        _, _, raw = await c.post(PATHS[kind], BODIES[PATHS[kind]] | {"stream": True})
        last = raw.decode().rstrip("\n").split("\n\n")[-1]
        assert last.startswith("event: error\n")
        assert "the stream was lost midway" in last
        if kind == "responses":
            assert json.loads(last.split("data: ")[1])["sequence_number"] == 2
        c.replicas[0].mode = "die"
        another = {"stream": True, "temperature": 0.5}
        status, _, raw = await c.post(PATHS[kind], BODIES[PATHS[kind]] | another)
        assert status == 502
        assert ("type" in json.loads(raw)) is (kind in ANTHROPIC)


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    limits = Limits(tokens_per_minute=400)
    add_tenant(path, "gold", GOLD, cache_group="team", weight=3.0, limits=limits)
    return path


async def test_a_tenant_s_key_group_and_limits_hold_for_each_kind(tenants: Path, c: Cluster) -> None:
    arrived = listening(c)
    key = {"x-api-key": GOLD}
    for kind in LATER:
        path = PATHS[kind]
        status, _, raw = await c.post(path, BODIES[path])
        assert status == 401
        assert ("type" in json.loads(raw)) is (kind in ANTHROPIC)
        status, headers, _ = await c.post(path, BODIES[path], headers=key | {HEADER_SALT: "theirs"})
        assert (status, headers["x-fair-client"]) == (200, "gold")
        _, seen, sent = c.replicas[0].requests[-1]
        assert "x-api-key" not in seen
        salt = salted("team", None)
        if kind in WITHOUT_ENGINE:
            assert HEADER_SALT not in seen
        else:
            assert (read_salt(seen[HEADER_SALT]) if kind in BY_HEADER else sent["cache_salt"]) == salt
            assert arrived[-1].namespace == namespace(None, salt, None)
            assert GROUP_MARK in (salt or "")
    [left] = (await c.get("/v1/usage", headers=key))[1]["limits"]
    used = sum(len(one.tokens) // 4 for one in arrived) + 2 * 3
    assert left["remaining"] == 400 - used
    status, _, raw = await c.post("/v1/messages", BODIES["/v1/messages"] | {"max_tokens": 400}, headers=key)
    assert (status, json.loads(raw)["error"]["type"]) == (429, "rate_limit_error")


# -- what the router is told


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def part(type: str, text: str, **more: Any) -> dict[str, Any]:
    return {"type": type, "text": text, **more}


CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "r"}
CHATS: list[tuple[Kind, dict[str, Any], list[dict[str, Any]]]] = [
    ("messages", {"messages": [said("user", "a")]}, [said("user", "a")]),
    (
        "messages",
        {
            "system": [part("text", "s"), part("text", "t")],
            "messages": [
                said("user", [part("text", "a", cache_control={"type": "ephemeral"})]),
                said("assistant", [part("text", "b")]),
                said("user", "c"),
            ],
        },
        [said("system", "s\nt"), said("user", "a"), said("assistant", "b"), said("user", "c")],
    ),
    (
        "messages",
        {"messages": [said("user", "a"), said("assistant", [CALL]), said("user", [RESULT, part("text", "b")])]},
        [said("user", "a"), said("assistant", ""), said("tool", "r"), said("user", "b")],
    ),
    ("responses", {"input": "a", "instructions": "s"}, [said("system", "s"), said("user", "a")]),
    (
        "responses",
        {
            "instructions": "s",
            "input": [
                said("developer", "d"),
                said("user", [part("input_text", "a")]),
                {"type": "reasoning", "summary": [], "encrypted_content": "?"},
                {"type": "message", "id": "m", **said("assistant", [part("output_text", "b")])},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "r"},
            ],
        },
        [
            said("system", "s\n\nDeveloper instructions:\nd"), said("user", "a"),
            said("assistant", "b"), said("tool", "r"),
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "asked", "messages"), CHATS)
def test_the_router_is_told_of_the_chat_that_it_becomes(
    tokens: Tokens, kind: Kind, asked: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    if any(one["role"] == "system" for one in messages) and "Developer" in messages[0]["content"]:
        messages = [
            {"role": "system", "content": text} for text in messages[0]["content"].split("\n\n")
        ] + messages[1:]
    chat = parse("chat", json.dumps({"messages": messages}).encode(), Names(MODEL))
    assert tokens.text(tokens.ids(read(kind, **asked)), False) == tokens.text(tokens.ids(chat), False)
    assert tokens.system_text(read(kind, **asked)) == tokens.system_text(chat)
    assert tokens.plain_chats == 0


WORDS = ["type", "role", "content", "text", "name", "input", "tool_use", "function_call", "arguments"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=8,
)
ITEMS = st.lists(
    st.dictionaries(st.sampled_from([*WORDS, "id", "summary"]), JSON, max_size=4), min_size=1, max_size=4
)
MORE = st.dictionaries(st.sampled_from(["tools", "tool_choice", "thinking", "reasoning", "system"]), JSON)


@settings(max_examples=examples(100))
@given(kind=st.sampled_from(STREAMED), items=ITEMS, more=MORE)
def test_no_body_breaks_the_routing(tokens: Tokens, kind: Kind, items: Any, more: Any) -> None:
    """What a body says is the replica's to judge; the router gets some tokens for it."""
    try:
        call = read(kind, **{"input": items, "messages": items, **more})
    except ApiError:
        return
    assert isinstance(tokens.ids(call), list)
    assert isinstance(tokens.system_text(call), str)
