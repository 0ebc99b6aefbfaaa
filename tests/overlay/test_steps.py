"""The rule for steps in the loop that a GPU has. That it keeps its bound there: `tests.support.loops`."""

import asyncio
import json
import random
from collections.abc import Iterator

import aiohttp
import pytest

from tests.support.budget import is_night
from tests.support.live import Replica

pytestmark = pytest.mark.engine

STALL_MS = 1.0
"""So short that every step for prompts puts those that run behind, but for a mixed one, which also serves them."""

HEAVY = "runs 0"
"""Its share is nearly all of the time, so a mixed step serves it for less than it is due, however slow the machine."""


@pytest.fixture(scope="module", params=["on", "off"] if is_night() else ["on"])
def overlapping(request: pytest.FixtureRequest) -> Iterator[Replica]:
    """A real server whose loop forms a step before it has seen the last one's end; "off": where steps of both kinds
    take turns."""
    with Replica(
        "--policy", "dlpm", "--stall-ms", str(STALL_MS), "--mixed-chunk", request.param, "--kv-tokens", "8192",
        "--client-weights", json.dumps({HEAVY: 100}),
        "--", "--chunked-prefill-size", "256", module="tests.support.odd_replica",
    ) as replica:  # fmt: skip
        yield replica


def test_a_cut_prompt_that_stands_aside_for_another_one_loses_no_token(overlapping: Replica) -> None:
    """Prompts of many lengths are admitted between the chunks of long ones, which are answered as they are alone."""
    rng = random.Random(2)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(250) for _ in range(tokens)]

    async def ask(session: aiohttp.ClientSession, client: str, tokens: list[int], output: int) -> list[int]:
        return (await overlapping.ask(client, tokens, output, session=session)).ids

    async def scenario() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            stop = asyncio.Event()

            async def asks_on(client: str) -> None:
                while not stop.is_set():
                    await ask(session, client, prompt(rng.randrange(20, 256)), 4)

            others = [asyncio.create_task(asks_on(f"short {number}")) for number in range(4)]
            longs = [prompt(1000) for _ in range(12)]
            beside = [await ask(session, "long", tokens, 8) for tokens in longs]
            stop.set()
            await asyncio.gather(*others)
            await asyncio.to_thread(overlapping.flush)
            for tokens, found in zip(longs, beside, strict=True):
                assert await ask(session, "long", tokens, 8) == found

    asyncio.run(scenario())
    overlapping.flush()
