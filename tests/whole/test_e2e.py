"""The whole cluster: two real replicas, router and gateway, started by `sglang-fair cluster`."""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from tests.support.live import Cluster
from tests.support.waiting import wait_until

ORDER_LIMIT_S = 500.0
"""For all that one test asks at once, and for a replica that was killed to serve again, on however busy a machine."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3 * ORDER_LIMIT_S)]

PAUSES_S = (0.1, 0.5, 2.0)
"""For what a replica evicts to reach the router. Where one was too short, the next has to do."""


@dataclass
class Seen:
    """What a client saw of one request, and when (seconds on one clock)."""

    client: str
    status: int = 0
    sent_s: float = 0.0
    done_s: float = 0.0
    worker: str = ""
    matched_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    client: str,
    tokens: list[int],
    output_tokens: int,
    *,
    stream: bool = True,
) -> Seen:
    """One /generate request through the gateway. An error that the gateway reports is in `error`."""
    seen = Seen(client, sent_s=time.monotonic())
    body = {
        "input_ids": tokens,
        "stream": stream,
        "sampling_params": {"max_new_tokens": output_tokens, "ignore_eos": True, "temperature": 0},
    }
    async with session.post(f"{url}/generate", json=body, headers={"x-fair-client": client}) as response:
        seen.status = response.status
        seen.worker = response.headers.get("x-fair-worker", "")
        seen.matched_tokens = int(response.headers.get("x-fair-matched-tokens", 0))
        if stream and response.status == 200:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    read(seen, json.loads(line[6:]))
        else:
            read(seen, await response.json())
    seen.done_s = time.monotonic()
    return seen


def read(seen: Seen, event: dict[str, Any]) -> None:
    if "error" in event:
        seen.error = event["error"]["message"]
    meta = event.get("meta_info", {})
    seen.cached_tokens = meta.get("cached_tokens", seen.cached_tokens)
    seen.output_tokens = meta.get("completion_tokens", seen.output_tokens)


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=ORDER_LIMIT_S)
    )


def quiet(cluster: Cluster) -> bool:
    """Nothing is in flight anywhere."""
    in_replicas = sum(books["totals"]["waiting"] + books["totals"]["running"] for books in cluster.books())
    return in_replicas == 0 and cluster.status()["in_flight"] == 0


def test_the_openai_client_is_answered(fair_cluster: Cluster) -> None:
    import openai  # takes as long as many tests, and is for this one

    with openai.OpenAI(base_url=f"{fair_cluster.url}/v1", api_key="sk-test") as client:
        assert [model.id for model in client.models.list().data] == ["tiny"]
        chat = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "hello"}], max_tokens=8
        )
        assert chat.choices[0].message.content
        assert chat.usage is not None
        pieces = list(
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=8, stream=True
            )
        )
        assert len(pieces) > 1
        assert all(piece.choices for piece in pieces), (
            "the usage that the gateway asked for itself is not ours"
        )
        assert (
            client.completions.create(model="tiny", prompt="once", max_tokens=4).usage.completion_tokens <= 4
        )
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="another", prompt="once", max_tokens=4)
    served = {name for books in fair_cluster.books() for name in books["clients"]}
    assert any(name.startswith("key:") for name in served), served


def test_a_light_client_is_not_buried_by_a_flood(clusters: tuple[Cluster, Cluster]) -> None:
    """The flood shares a hot prefix, so LPM serves all of it before the light client's cold prompts."""
    fair, greedy = (asyncio.run(_flood(cluster)) for cluster in clusters)
    assert max(greedy) > 100, f"without fairness the light client should have waited: {greedy}"
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
                ask(http, cluster.url, "flood", hot + [rng.randrange(250) for _ in range(16)], 64)
            )
            for _ in range(200)
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
    assert {seen.status for seen in [*mine, *theirs]} == {200}
    return [sum(one.sent_s < other.done_s < one.done_s for other in theirs) for one in mine]


def test_the_routers_tree_agrees_with_the_replicas_after_evictions(fair_cluster: Cluster) -> None:
    """Four times as many tokens as both pools hold; then every prediction must equal the hit."""
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


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_the_replica(fair_cluster: Cluster, stream: bool) -> None:
    wait_until(lambda: quiet(fair_cluster), "an idle cluster")

    def emitted() -> int:
        books = fair_cluster.books()
        return sum(one["clients"]["leaver"]["output_tokens"] for one in books if "leaver" in one["clients"])

    async def scenario() -> None:
        async with session() as http:
            request = asyncio.create_task(
                ask(http, fair_cluster.url, "leaver", [3] * 40, 3000, stream=stream)
            )
            await asyncio.to_thread(
                wait_until,
                lambda: sum(books["totals"]["running"] for books in fair_cluster.books()) == 1,
                "a start",
            )
            request.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await request

    before = emitted()
    asyncio.run(scenario())
    wait_until(lambda: quiet(fair_cluster), "the replica to stop")
    assert emitted() - before < 3000


def test_nothing_hangs_when_a_replica_is_killed_under_load(fair_cluster: Cluster) -> None:
    """What had no byte sent yet is served by the other replica; the rest ends with an error that says why."""
    wait_until(lambda: quiet(fair_cluster), "an idle cluster")
    rng = random.Random(9)

    async def scenario() -> list[Seen]:
        async with session() as http:
            tasks = [
                asyncio.create_task(
                    ask(http, fair_cluster.url, f"c{n % 4}", [rng.randrange(250) for _ in range(100)], 300)
                )
                for n in range(40)
            ]
            await asyncio.to_thread(
                wait_until,
                lambda: all(books["totals"]["running"] >= 1 for books in fair_cluster.books()),
                "both replicas at work",
            )
            os.kill(fair_cluster.addresses["pids"]["r0"], signal.SIGKILL)
            return await asyncio.gather(*tasks)

    seen = asyncio.run(scenario())
    whole = [one for one in seen if one.output_tokens == 300 and not one.error]
    broken = [one for one in seen if one.error]
    assert len(whole) + len(broken) == 40, seen
    assert len(whole) >= 36 - 1, "only what r0 was streaming (at most four) may break"
    assert all(one.status == 200 and "r0" in one.error for one in broken), broken
    assert {one.worker for one in whole if one.worker} <= {"r0", "r1"}

    wait_until(lambda: fair_cluster.status()["in_flight"] == 0, "the router to have nothing in flight")
    wait_until(
        lambda: "r0" in fair_cluster.status()["workers"], "the replica to be taken back", ORDER_LIMIT_S
    )
    wait_until(lambda: quiet(fair_cluster), "an idle cluster")

    async def after() -> list[Seen]:
        async with session() as http:
            return await asyncio.gather(
                *(
                    ask(http, fair_cluster.url, "back", [rng.randrange(250) for _ in range(300)], 2)
                    for _ in range(12)
                )
            )

    again = asyncio.run(after())
    assert {one.worker for one in again} == {"r0", "r1"}
    assert all(one.status == 200 and not one.error for one in again)


def test_processes_have_one_owner(fair_cluster: Cluster) -> None:
    """All of a cluster are descendants of one process; the fixture checks that none outlives Ctrl-C."""
    names = fair_cluster.addresses["pids"]
    descendants = {process.pid for process in fair_cluster.processes()}
    assert {names["router"], names["gateway"], names["r1"]} <= descendants
