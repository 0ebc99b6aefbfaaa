"""A replica is not given more to read than it has time for, and what it is given comes from the clients in turn."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from router.gateway.replicas.pool import WINDOW_BYTES, SendWindow


class Replica:
    """Answers the questions when the test says so."""

    def __init__(self) -> None:
        self.asked = 0
        self.window = SendWindow(self._ask)
        self.sent: list[str] = []
        self._answer: asyncio.Future[None] | None = None

    async def _ask(self) -> None:
        self.asked += 1
        self._answer = asyncio.get_running_loop().create_future()
        await self._answer

    async def answers(self) -> None:
        assert self._answer is not None
        self._answer.set_result(None)
        await settle()

    def send(self, client: str, size: int) -> "asyncio.Task[None]":
        async def one() -> None:
            await self.window.reserve(client, size)
            self.sent.append(client)

        return asyncio.create_task(one())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def replica(runner: asyncio.Runner) -> Iterator[Replica]:
    made = Replica()
    yield made
    made.window.close()


QUARTER = WINDOW_BYTES // 4


async def test_what_a_replica_keeps_up_with_does_not_wait(replica: Replica) -> None:
    for _ in range(40):
        await replica.window.reserve("c", QUARTER)  # would wait for ever
        await settle()
        if replica.asked and replica._answer is not None and not replica._answer.done():
            await replica.answers()
    assert 10 <= replica.asked <= 20


async def test_a_flood_leaves_the_next_turn_to_another_client(replica: Replica) -> None:
    for _ in range(20):
        replica.send("flood", WINDOW_BYTES)
    await settle()
    assert replica.sent == ["flood"]
    replica.send("modest", 100)
    await settle()
    await replica.answers()
    assert Counter(replica.sent) == {"flood": 2}, "it came first"
    await replica.answers()
    assert replica.sent == ["flood", "flood", "modest", "flood"]
    for _ in range(17):
        await replica.answers()
    assert Counter(replica.sent) == {"flood": 20, "modest": 1}


async def test_no_more_than_two_windows_and_two_requests_are_unread(replica: Replica) -> None:
    """Even where each answer overtakes all that was sent since the one before it."""
    for _ in range(60):
        replica.send("flood", QUARTER)
    await settle()
    read = 0
    while len(replica.sent) < 60:
        overtaken = len(replica.sent)
        await replica.answers()
        assert (len(replica.sent) - read) * QUARTER <= 2 * WINDOW_BYTES + 2 * QUARTER
        read = overtaken


async def test_who_leaves_is_not_waited_for_and_when_the_replica_goes_all_may_go_on(replica: Replica) -> None:
    tasks = [replica.send(client, WINDOW_BYTES) for client in "abcd"]
    await settle()
    tasks[1].cancel()
    await settle()
    await replica.answers()
    assert replica.sent == ["a", "c"]
    replica.window.close()
    await settle()
    assert replica.sent == ["a", "c", "d"]
    await replica.window.reserve("e", WINDOW_BYTES)
