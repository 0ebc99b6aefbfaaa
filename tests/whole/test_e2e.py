"""The whole cluster: two real replicas, router and gateway, started by `sglang-fair cluster`."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import pytest

from tests.support.budget import is_night
from tests.support.live import Cluster
from tests.support.waiting import wait_until

ORDER_LIMIT_S = 500.0
"""For all that one test asks at once, on however busy a machine."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3 * ORDER_LIMIT_S)]


@dataclass
class Seen:
    """When a client sent one request, and had all of its answer (seconds on one clock)."""

    sent_s: float
    done_s: float


async def ask(
    session: aiohttp.ClientSession, url: str, client: str, tokens: list[int], output_tokens: int
) -> Seen:
    """One /generate request through the gateway."""
    sampling = {"max_new_tokens": output_tokens, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": tokens, "sampling_params": sampling}
    sent_s = time.monotonic()
    async with session.post(f"{url}/generate", json=body, headers={"x-fair-client": client}) as response:
        assert response.status == 200, await response.text()
        await response.read()
    return Seen(sent_s, time.monotonic())


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=ORDER_LIMIT_S)
    )


FLOOD = 200 if is_night() else 100
"""Requests at once."""
SMALL_REPLICAS = ("--", "--max-running-requests", "4", "--max-total-tokens", "4096")


@pytest.fixture(scope="module")
def clusters() -> Iterator[tuple[Cluster, Cluster]]:
    """D2LPM over DLPM, and round robin over LPM, side by side."""
    fair = Cluster("--quantum", "100", "--worker-quantum", "1000", *SMALL_REPLICAS).start()
    greedy = Cluster("--policy", "lpm", "--placement", "round_robin", *SMALL_REPLICAS).start()
    with fair, greedy:
        yield fair, greedy


def quiet(cluster: Cluster) -> bool:
    """Nothing is in flight anywhere."""
    in_replicas = sum(books["totals"]["waiting"] + books["totals"]["running"] for books in cluster.books())
    return in_replicas == 0 and cluster.status()["in_flight"] == 0


def test_a_light_client_is_not_buried_by_a_flood(clusters: tuple[Cluster, Cluster]) -> None:
    """The flood shares a hot prefix, so LPM serves all of it before the light client's cold prompts."""
    fair, greedy = (asyncio.run(_flood(cluster)) for cluster in clusters)
    assert max(greedy) > FLOOD / 2, f"without fairness the light client should have waited: {greedy}"
    assert max(fair) * 3 < max(greedy), f"overtaken {fair} times under DLPM, {greedy} under LPM"
    for cluster in clusters:
        wait_until(lambda cluster=cluster: quiet(cluster), "an idle cluster")
        assert all(books["conservation"]["ok"] for books in cluster.books())


async def _flood(cluster: Cluster) -> list[int]:
    """For each of the light client's requests: how many of the flood ended while it was open."""
    rng = random.Random(11)
    hot = [rng.randrange(250) for _ in range(192)]
    async with session() as http:
        for _ in range(4):  # both replicas know the prefix
            await ask(http, cluster.url, "flood", hot + [rng.randrange(250) for _ in range(16)], 1)
        flood = [
            asyncio.create_task(
                ask(http, cluster.url, "flood", hot + [rng.randrange(250) for _ in range(16)], 48)
            )
            for _ in range(FLOOD)
        ]
        await asyncio.to_thread(
            wait_until,
            lambda: all(books["totals"]["waiting"] >= 8 for books in cluster.books()),
            "the flood to queue at both replicas",
        )
        light = [
            asyncio.create_task(ask(http, cluster.url, "light", [rng.randrange(250) for _ in range(90)], 4))
            for _ in range(3)
        ]
        mine, theirs = await asyncio.gather(*light), await asyncio.gather(*flood)
    return [sum(one.sent_s < other.done_s < one.done_s for other in theirs) for one in mine]
