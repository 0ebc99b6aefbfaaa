"""All ranks of one scheduler decide the same, by one clock. Ranks that differ wait for each other for ever."""

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.conftest import PRESSURE
from tests.overlay.test_charges import idle, prompt
from tests.support.budget import is_night
from tests.support.live import REPORTS, Replica
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]  # where ranks are spawned, each imports SGLang

PARALLEL = {
    "tensor": ("--tp-size", "2"),
    # SGLang cannot divide a Llama whose embeddings are its output weights.
    "pipeline": (
        "--pp-size", "2", "--load-format", "dummy",
        "--json-model-override-args", json.dumps({"tie_word_embeddings": False}),
    ),
}  # fmt: skip


class Ranks:
    """A replica of two ranks."""

    def __init__(self, replica: Replica, directory: Path) -> None:
        self.replica = replica
        self._directory = directory

    def reports(self) -> list[dict[str, Any]]:
        """What each rank decided, once nobody waits or runs."""
        idle(self.replica)
        self.replica.fair()

        def both() -> list[dict[str, Any]] | None:
            """A rank behind may still have to answer what was asked before."""
            told = [json.loads(path.read_text()) for path in sorted(self._directory.glob("*.json"))]
            return told if len(told) == 2 and told[0]["now_s"] == told[1]["now_s"] else None

        return wait_until(both, "reports of both ranks at one time")


@contextmanager
def ranks(directory: Path, *arguments: str, forked: bool = False) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(REPORTS, str(directory))
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # on a CPU SGLang binds each rank to a core
        with Replica(*arguments, module="tests.support.ranks_replica", forked=forked) as replica:
            yield Ranks(replica, directory)


@pytest.mark.parametrize("kind", PARALLEL if is_night() else ["pipeline"])
def test_a_limit_per_minute_is_the_same_minute_on_all_ranks(kind: str, tmp_path: Path) -> None:
    """Each rank would open the minute by its own clock, and admit what the other one refuses."""
    limit = ("--policy", "hasty", "--policy-options", "limit=3")

    async def load(replica: Replica) -> list[int]:
        rng = random.Random(1)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            asked = []
            for _ in range(200):
                asked.append(asyncio.create_task(replica.ask("a", prompt(rng, 20), 2, session=session)))
                await asyncio.sleep(0.02)
            return [(await each).status for each in asked]

    with ranks(tmp_path, *limit, "--", *PARALLEL[kind], forked=True) as both:
        statuses = asyncio.run(load(both.replica))
        first, second = both.reports()
    assert set(statuses) == {200, 429}
    assert first == second
    assert first["books"]["refused"] == statuses.count(429)


def test_dlpm_decides_the_same_on_all_ranks(tmp_path: Path) -> None:
    """Shared prefixes, prompts in chunks, a pool so small that requests are taken back, aborts. At night each process
    is spawned and has its own hash seed; `tests/core/test_policies.py` compares such processes on each push."""

    async def load(replica: Replica) -> int:
        rng = random.Random(2)
        shared = prompt(rng, 200)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            asked = []
            for number in range(60):
                client, tokens = "abcd"[number % 4], prompt(rng, rng.randrange(10, 200))
                asked.append(
                    asyncio.create_task(
                        replica.ask(
                            client,
                            shared + tokens if number % 3 else tokens,
                            rng.randrange(20, 300),
                            session=session,
                            ignore_eos=False,
                            leave_after_tokens=5 if number % 7 == 0 else None,
                        )
                    )
                )
                await asyncio.sleep(0.01)
            return sum([(await each).retractions for each in asked])

    policy = ("--policy", "dlpm", "--quantum", "300", "--kv-tokens", "2048")
    with ranks(tmp_path, *policy, "--", *PARALLEL["tensor"], *PRESSURE, forked=not is_night()) as both:
        retractions = asyncio.run(load(both.replica))
        first, second = both.reports()
    assert retractions > 0, "the pool was not small enough"
    assert first == second
    assert first["books"]["conservation"]["ok"]
    assert first["told"] > 100
