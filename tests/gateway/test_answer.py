"""Which events of a stream a client gets, and that one who takes nothing is given up."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from router.gateway.answer.sse import Usage, stream_of, usage_of
from router.gateway.attempt import ClientGone, Reply
from tests.gateway.clusters import call
from tests.support.virtual_time import VirtualLoop

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


IDLE_S = 0.05


class Peer:
    """Takes messages while it is `willing`."""

    def __init__(self) -> None:
        self.willing = asyncio.Event()
        self.willing.set()
        self.taken: list[Message] = []

    async def send(self, message: Message) -> None:
        await self.willing.wait()
        self.taken.append(message)


@pytest.fixture
def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    return VirtualLoop


@asynccontextmanager
async def replying(idle_s: float = IDLE_S) -> AsyncIterator[tuple[Reply, Peer]]:
    peer = Peer()
    reply = Reply(peer.send, idle_s)
    yield reply, peer
    reply.close()
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_a_client_that_takes_nothing_is_gone() -> None:
    async with replying() as (reply, peer):
        await reply.start(200, {"x": "y"})
        peer.willing.clear()
        with pytest.raises(ClientGone):
            await reply.piece(b"a")
        assert len(peer.taken) == 1


async def test_pieces_that_are_taken_may_take_long_together_and_nothing_may_be_sent_for_long() -> None:
    async with replying(idle_s=1.0) as (reply, peer):
        await reply.start(200, {})
        await asyncio.sleep(1.2)
        for _ in range(6):
            peer.willing.clear()
            asyncio.get_running_loop().call_later(0.2, peer.willing.set)
            await reply.piece(b"a")
        await reply.end(b"z")
        assert [message.get("body") for message in peer.taken] == [None, *[b"a"] * 6, b"z"]


async def test_whoever_else_cancels_is_not_taken_for_the_client() -> None:
    async with replying() as (reply, peer):
        peer.willing.clear()
        sending = asyncio.create_task(reply.piece(b"a"))
        await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending


async def test_a_connection_that_breaks_is_a_client_that_has_gone() -> None:
    async def broken(_: Message) -> None:
        raise ConnectionResetError

    reply = Reply(broken, IDLE_S)
    with pytest.raises(ClientGone):
        await reply.piece(b"a")
    reply.close()
