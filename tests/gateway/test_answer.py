"""Which events of a stream a client gets."""

import json

from hypothesis import given
from hypothesis import strategies as st

from router.gateway.answer.sse import Usage, stream_of, usage_of
from tests.gateway.clusters import call

TEXT = {"choices": [{"delta": {"content": 'b "usage":{ \n\n'}}]}
WITH_TEXT = TEXT | {"usage": {"completion_tokens": 3}}
ALONE = {"choices": [], "usage": {"completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}
TWICE = {"choices": [], "usage": {"completion_tokens": 2}, "more": {"usage": {"completion_tokens": 1}}}
EVENTS = st.lists(
    st.sampled_from([TEXT, TEXT | {"usage": None}, WITH_TEXT, ALONE, TWICE, "no JSON"]), max_size=12
)


@given(events=EVENTS, step=st.integers(1, 400), is_shown=st.booleans())
def test_events_of_usage_alone_are_hidden_and_all_others_passed_on(
    events: list[object], step: int, is_shown: bool
) -> None:
    sent = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    whole = b"".join(sent) + b"data: [DONE]\n\n"
    asked = {"stream_options": {"include_usage": True}} if is_shown else {}
    stream = stream_of(call("chat", stream=True, **asked))
    got = b"".join(stream.feed(whole[at : at + step]) for at in range(0, len(whole), step))
    hidden = [] if is_shown else [ALONE, TWICE]
    kept = [one for one, event in zip(sent, events, strict=True) if event not in hidden]
    assert got == b"".join(kept) + b"data: [DONE]\n\n"
    said = [event for event in events if event in (ALONE, TWICE)]
    if said:
        assert stream.usage == (Usage(9, 4) if said[-1] == ALONE else Usage(2))


def test_without_usage_events_are_counted() -> None:
    stream = stream_of(call("completions", stream=True))
    for _ in range(5):
        stream.feed(b'data: {"choices":[{"text":"a"}]}\n\n')
    assert stream.usage == Usage(4)
    assert not stream.ended


def test_generate_streams_count_the_last_of_each_index() -> None:
    def event(index: int, tokens: int) -> bytes:
        meta = {"completion_tokens": tokens, "cached_tokens": index}
        return b"data: " + json.dumps({"index": index, "meta_info": meta}).encode() + b"\n\n"

    stream = stream_of(call("generate", text=["a", "b"], stream=True))
    stream.feed(event(0, 1) + event(1, 1) + event(0, 2))
    stream.feed(event(1, 2) + event(1, 5) + b"data: [DONE]\n\n")
    assert stream.usage == Usage(7, 1)


def test_a_body_without_usage_has_none() -> None:
    for kind, body in (("chat", b"no json"), ("chat", b"{}"), ("generate", b"[]")):
        assert usage_of(kind, body) is None
    assert usage_of("completions", b'{"usage":{"completion_tokens":3}}') == Usage(3, None)
