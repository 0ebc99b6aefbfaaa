"""A client that takes nothing is given up, a replica that falls silent too; whoever is quick enough is not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from starlette.types import Message

from router.gateway.answer.reply import ClientGone, Reply
from tests.support.virtual_time import VirtualLoop

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
