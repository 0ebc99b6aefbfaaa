"""Which events of a stream the client gets, however many come together."""

import json

from hypothesis import given
from hypothesis import strategies as st

from router.gateway.answer.sse import Stream
from router.gateway.answer.usage import Usage
from tests.gateway.test_gateway import call

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
    stream = Stream(call("chat", stream=True, **asked))
    got = b"".join(stream.feed(whole[at : at + step]) for at in range(0, len(whole), step))
    hidden = [] if is_shown else [ALONE, TWICE]
    kept = [one for one, event in zip(sent, events, strict=True) if event not in hidden]
    assert got == b"".join(kept) + b"data: [DONE]\n\n"
    said = [event for event in events if event in (ALONE, TWICE)]
    if said:
        assert stream.usage == (Usage(9, 4) if said[-1] == ALONE else Usage(2))
