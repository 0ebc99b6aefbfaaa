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

PAUSES_S = (0.1, 0.5, 2.0)
"""For what a replica evicts to reach the router. Where one was too short, the next has to do."""


@dataclass
class Seen:
    """What a client saw of one request, and when (seconds on one clock)."""

    sent_s: float
    done_s: float
    worker: str
    matched_tokens: int
    cached_tokens: int


async def ask(
    session: aiohttp.ClientSession, url: str, client: str, tokens: list[int], output_tokens: int
) -> Seen:
    """One /generate request through the gateway."""
    sampling = {"max_new_tokens": output_tokens, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": tokens, "sampling_params": sampling}
    sent_s = time.monotonic()
    async with session.post(f"{url}/generate", json=body, headers={"x-fair-client": client}) as response:
        assert response.status == 200, await response.text()
        cached = (await response.json())["meta_info"]["cached_tokens"]
        worker, matched = (response.headers[f"x-fair-{name}"] for name in ("worker", "matched-tokens"))
    return Seen(sent_s, time.monotonic(), worker, int(matched), cached)


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


def test_the_routers_tree_agrees_with_the_replicas_after_evictions(clusters: tuple[Cluster, Cluster]) -> None:
    """Four times as many tokens as both pools hold; then every prediction must equal the hit."""
    fair_cluster, _ = clusters
    rng = random.Random(5)
    roots = [[rng.randrange(250) for _ in range(160)] for _ in range(8)]
    prompts = [
        rng.choice(roots) + [rng.randrange(250) for _ in range(rng.randrange(60, 900))] for _ in range(60)
    ]
    prompts = [prompt[:-1] if len(prompt) % 16 == 0 else prompt for prompt in prompts]

    async def scenario(pause_s: float) -> list[Seen]:
        async with session() as http:
            for start in range(0, len(prompts), 6):
                await asyncio.gather(
                    *(
                        ask(http, fair_cluster.url, f"c{i % 3}", p, 4)
                        for i, p in enumerate(prompts[start : start + 6])
                    )
                )
            await asyncio.to_thread(wait_until, lambda: quiet(fair_cluster), "an idle cluster")
            await asyncio.to_thread(
                wait_until,
                lambda: not fair_cluster.status()["tree"]["lingering"],
                "the router lets go of what it only hoped for",
            )
            probes = []
            for prompt in prompts:
                probes.append(await ask(http, fair_cluster.url, "probe", prompt, 1))
                await asyncio.sleep(pause_s)  # the router hears of what this one evicted
            return probes

    for pause_s in PAUSES_S:
        probes = asyncio.run(scenario(pause_s))
        wrong = [(seen.worker, seen.matched_tokens, seen.cached_tokens) for seen in probes
                 if seen.matched_tokens != seen.cached_tokens]  # fmt: skip
        if not wrong:
            break
    assert {seen.worker for seen in probes} == {"r0", "r1"}
    assert not wrong, f"{len(wrong)} of {len(probes)} predictions differ from the hit: {wrong[:5]}"
    hits = [seen.cached_tokens for seen in probes]
    assert max(hits) > 0
    assert min(hits) < 160, "the pools were too large to evict anything"
