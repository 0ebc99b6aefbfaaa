"""A cluster whose queues are planned: what plans is killed and stopped while requests wait, and all are served.

With a deadline that cannot be met it starts one replica more, and no second one."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from random import Random
from typing import TypeVar

import aiohttp
import pytest

from tests.support.budget import is_night
from tests.support.live import Cluster

pytestmark = pytest.mark.e2e

Found = TypeVar("Found")

ARGUMENTS = (
    "--engine", "emulated", "--gpu", "a100-80g", "--model", "llama-3.1-8b", "--placement", "qlm",
    "--placement-options", "chunk_tokens=256", "--slo-classes", '{"chat": 0.5, "batch": 60}', "--scale-up", "1",
    "--", "--max-total-tokens", "6000", "--chunked-prefill-size", "256",
)  # fmt: skip
NEVER = aiohttp.ClientTimeout(total=None)
"""Who may be answered late waits as long as there are others."""
LIMIT_S = 400.0
"""For one look, on however busy a machine."""
CLIENTS = 100
"""Each with one request at a time, so that nobody is ahead of its share."""


async def one(session: aiohttp.ClientSession, cluster: Cluster, client: str, random: Random) -> int:
    """A request of 400 tokens; its status."""
    body = {
        "input_ids": [random.randrange(3, 250) for _ in range(300)],
        "sampling_params": {"max_new_tokens": 100, "ignore_eos": True},
    }
    headers = {"x-fair-client": client, "x-fair-class": random.choice(["chat", "batch"])}
    async with session.post(f"{cluster.url}/generate", json=body, headers=headers) as response:
        await response.read()
        return response.status


@contextlib.asynccontextmanager
async def under_load(cluster: Cluster) -> "contextlib.AbstractAsyncContextManager[list[int]]":
    """One request of each client at a time, as long as this is open; the statuses of all that have ended."""
    statuses: list[int] = []
    stop = asyncio.Event()

    async def client(number: int, session: aiohttp.ClientSession) -> None:
        random = Random(number)
        while not stop.is_set():
            statuses.append(await one(session, cluster, f"c{number}", random))

    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=NEVER) as session,
        asyncio.TaskGroup() as group,
    ):
        for number in range(CLIENTS):
            group.create_task(client(number, session))
        try:
            yield statuses
        finally:
            stop.set()


def plans_of(cluster: Cluster) -> dict:
    return cluster.status()["queues"]["plans"]


async def until(cluster: Cluster, check: Callable[[], Found], what: str) -> Found:
    """The first true value of `check`, a look at the cluster, of which there are few: it has its work to do."""
    end = time.monotonic() + LIMIT_S
    while not (found := await asyncio.to_thread(check)):
        assert time.monotonic() < end, (what, cluster.status()["queues"]["plans"])
        await asyncio.sleep(0.2)
    return found


def pid_of(cluster: Cluster) -> int | None:
    """Of the process that plans; None: there is none."""
    return cluster.status()["wire"]["planning"]


def scaled(cluster: Cluster) -> bool:
    return "r2" in cluster.status()["workers"]


async def goes_on_while_it_stands_still(cluster: Cluster, pid: int, statuses: list[int]) -> None:
    os.kill(pid, signal.SIGSTOP)
    served, late = len(statuses), plans_of(cluster)["unanswered"]
    await until(cluster, lambda: plans_of(cluster)["unanswered"] > late, "a plan that is late")
    await until(cluster, lambda: pid_of(cluster) not in (None, pid), "a process in its place")
    await until(cluster, lambda: len(statuses) > served + 50, "requests served meanwhile")


@pytest.mark.timeout(900)
def test_no_request_waits_for_a_plan_and_replicas_that_are_missing_come() -> None:
    async def run(cluster: Cluster) -> None:
        async with under_load(cluster) as statuses:
            await until(cluster, lambda: plans_of(cluster)["answered"] >= 2, "plans")
            first = await until(cluster, lambda: pid_of(cluster), "a process")
            assert first is not None
            os.kill(first, signal.SIGKILL)
            served = len(statuses)
            await until(cluster, lambda: len(statuses) > served + 50, "requests served while it is dead")
            await until(cluster, lambda: pid_of(cluster) not in (None, first), "a process in its place")
            answered = plans_of(cluster)["answered"]
            await until(cluster, lambda: plans_of(cluster)["answered"] > answered, "its plans")

            if is_night():
                second = await until(cluster, lambda: pid_of(cluster), "that process")
                await goes_on_while_it_stands_still(cluster, second or 0, statuses)

            shown = [sys.executable, "-m", "sglang_fair.cli", "status", cluster.url]
            told = await asyncio.to_thread(subprocess.check_output, shown, text=True)
            assert re.search(r"plans: asked \d+", told), told
            await until(
                cluster, lambda: cluster.status()["queues"]["shortage"] or scaled(cluster), "a shortage"
            )
            await until(cluster, lambda: scaled(cluster), "one more replica")
            await until(cluster, lambda: cluster.status()["workers"]["r2"]["dispatched"] > 20, "work for it")
        assert set(statuses) == {200}
        assert sorted(cluster.status()["workers"]) == ["r0", "r1", "r2"]

    with Cluster(*ARGUMENTS) as cluster:
        asyncio.run(run(cluster))
        log = cluster.log.read_text()
    assert "scale-up 1 of 1: one more replica is started" in log
    assert "scale-up: r2 serves; 0 more may be started" in log
