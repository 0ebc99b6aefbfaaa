"""The bounds of a gateway: how they are written, what a process has room for, and what no parser should be given."""

import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.events import WorkerUp
from router.gateway.errors import ApiError
from router.gateway.replicas.health import Contexts
from router.gateway.request.call import Names
from router.gateway.request.kinds import MAX_MESSAGES
from router.gateway.request.parse import MAX_VALUES, check_size, parse
from router.gateway.settings import OTHER_DESCRIPTORS, fit, limits_in
from sglang_fair.settings.table import Limits

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(0, 9), st.text(alphabet='ab"\\,[{\n')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\,'), inner),
    max_leaves=40,
)


def test_limits_are_read() -> None:
    assert limits_in("") == {}
    assert limits_in(" max-in-flight=7 , body_timeout=2.5,--tries=2") == {
        "max_in_flight": 7,
        "body_timeout_s": 2.5,
        "tries": 2,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-in-flight", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("nothing=3", "no limit 'nothing'; there are max-in-flight, "),
        ("tries=2,tries=3", "twice"),
        ("tries=2.5", "a whole number"),
        ("tries=0", "must be above 0"),
        ("body-timeout=nan", "a finite number"),
        ("body-timeout=inf", "a finite number"),
        ("body-timeout=x", "a number"),
    ],
)
def test_what_is_no_limit_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        limits_in(text)
    assert "\n" not in str(caught.value)


@given(st.integers(1, 100_000), st.integers(1, 20_000), st.integers(1, 20_000))
def test_connections_and_requests_never_need_more_files_than_there_are(
    descriptors: int, requests: int, connections: int
) -> None:
    asked = replace(Limits(), max_in_flight=requests, max_connections=connections)
    found = fit(asked, descriptors)
    free = max(3, descriptors - OTHER_DESCRIPTORS)
    assert 1 <= found.max_in_flight <= requests
    assert 1 <= found.max_connections <= connections
    assert found.max_in_flight + found.max_connections <= free
    if requests + connections <= free:
        assert found == asked


@given(JSON)
def test_values_are_counted_as_a_parser_would_make_them(value: object) -> None:
    def count(one: object) -> int:
        if isinstance(one, dict):
            return 1 + len(one) + sum(map(count, one.values()))
        if isinstance(one, list):
            return 1 + sum(map(count, one))
        return int(isinstance(one, str))

    raw = json.dumps([value] * 3, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.gateway.request.parse.MAX_VALUES", count([value] * 3))
        check_size(raw, 1000)
        patch.setattr("router.gateway.request.parse.MAX_VALUES", count([value] * 3) - 1)
        with pytest.raises(ApiError):
            check_size(raw, 1000)


@pytest.mark.parametrize("inner", ["[[]]", "{}", '""', '{"":{}}'])
def test_a_body_of_nothing_but_structure_is_refused_before_it_is_parsed(inner: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_size(("[" + ",".join([inner] * (MAX_VALUES + 1)) + "]").encode(), 1000)
    assert (caught.value.status, caught.value.code) == (400, "too_many_values")


def test_token_ids_and_long_texts_are_no_structure() -> None:
    check_size(json.dumps({"prompt": [7] * 300_000}).encode(), 300_000)
    check_size(json.dumps({"prompt": 'a, "b", [c], {d} \\' * 100_000}).encode(), 1000)
    with pytest.raises(ApiError):
        check_size(json.dumps({"prompt": [7] * 600_000}).encode(), 300_000)


@pytest.mark.slow
def test_messages_are_bounded() -> None:
    message = {"role": "user", "content": "a"}
    assert (
        parse("chat", json.dumps({"messages": [message] * MAX_MESSAGES}).encode(), Names("m")).kind == "chat"
    )
    with pytest.raises(ApiError, match="at most") as caught:
        parse("chat", json.dumps({"messages": [message] * (MAX_MESSAGES + 1)}).encode(), Names("m"))
    assert caught.value.code == "too_many_messages"


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ({"data": [{"id": "m", "max_model_len": 8192}, {"id": "m:lora", "max_model_len": None}]}, 8192),
        ({"data": [{"id": "m"}]}, None),
        ({"data": [{"id": "m", "max_model_len": 0}]}, None),
        ({"data": []}, None),
        ({"data": [{"id": "m", "max_model_len": "x"}]}, None),
        ([], None),
        (msgspec.Raw(b"\xff"), None),
    ],
)
def test_a_context_is_read_where_one_is_told(answer: object, tokens: int | None) -> None:
    contexts, up = Contexts(), WorkerUp("r0", "http://r0")
    assert contexts.is_due(up, 5.0)
    contexts.answered(up, 200, msgspec.json.encode(answer), 5.0)
    contexts.reckon({"r0": up})
    assert (contexts.tokens("m"), contexts.is_due(up, 6.0)) == (tokens, False)


def test_the_longest_context_of_the_replicas_that_there_are_counts() -> None:
    contexts, ups = Contexts(), {name: WorkerUp(name, f"http://{name}") for name in ("r0", "r1")}
    for name, tokens in (("r0", 100), ("r1", 200)):
        answer = msgspec.json.encode({"data": [{"id": "m", "max_model_len": tokens}]})
        contexts.answered(ups[name], 200, answer, 5.0)
        contexts.reckon(ups)
        assert contexts.tokens("m") == tokens
    contexts.reckon({"r0": ups["r0"]})
    assert contexts.tokens("m") == 100
