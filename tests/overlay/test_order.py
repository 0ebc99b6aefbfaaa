"""DLPM in the real scheduler: who is admitted when, request by request."""

import asyncio
from uuid import uuid4

import aiohttp
import pytest

from tests.support.live import Answer, Replica
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

PREFIX_TOKENS = 64
OWN_TOKENS = 48


def hot_prompt(number: int) -> list[int]:
    """64 tokens that were sent before, and 48 of its own."""
    return [7] * PREFIX_TOKENS + [20 + number] * OWN_TOKENS


def cold_prompt(number: int) -> list[int]:
    """80 tokens that nobody has sent before."""
    return [60 + number] * (PREFIX_TOKENS + 16)


def test_the_worked_example(one_at_a_time: Replica) -> None:
    """Quantum 100; a request of A costs 48 + 2 units (its prefix is cached), one of B 80 + 2.

    Both start at 0. Refill: A 100, B 100. A's hot requests go first, until A is at 0; then B until it is
    at -64; one round: A 100, B 36; and so on. LPM alone would run all of A before any of B.
    """
    replica = one_at_a_time
    replica.flush()
    replica.generate("before", hot_prompt(9))
    replica.generate("before", hot_prompt(8))  # the shared 64 tokens are a node of their own from here on

    order = asyncio.run(_admission_order(replica, [
        *[("A", f"A{n}", hot_prompt(n)) for n in range(1, 7)],
        *[("B", f"B{n}", cold_prompt(n)) for n in range(1, 5)],
    ]))  # fmt: skip

    assert order == ["A1", "A2", "B1", "B2", "A3", "A4", "B3", "A5", "A6", "B4"]
    assert replica.fair()["conservation"]["ok"]


async def _admission_order(replica: Replica, requests: list[tuple[str, str, list[int]]]) -> list[str]:
    """Queue `requests` in this order behind a running one, let go, and see in which order they ran."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        blocks = uuid4().hex
        blocker = asyncio.create_task(
            replica.ask(f"before {requests[0][0]}", [5] * 16, 20_000, session=session, rid=blocks)
        )
        await asyncio.to_thread(wait_until, lambda: replica.fair()["totals"]["running"] == 1, "the blocker")
        tasks: list[asyncio.Task[Answer]] = []
        for client, _, tokens in requests:
            tasks.append(asyncio.create_task(replica.ask(client, tokens, session=session)))
            count = len(tasks)
            await asyncio.to_thread(
                wait_until,
                lambda count=count: replica.fair()["totals"]["waiting"] == count,
                f"{count} waiting",
            )
        await asyncio.to_thread(replica.abort, blocks)
        answers = await asyncio.gather(*tasks)
        await blocker
    assert [answer.output_tokens for answer in answers] == [1] * len(requests)
    ended = sorted(zip(answers, requests, strict=True), key=lambda pair: pair[0].finished_at)
    return [name for _, (_, name, _) in ended]
