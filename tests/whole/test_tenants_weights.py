"""Two gateways with a router each, which know nothing of each other, over two replicas.

Shares are kept in the replicas, where all traffic meets, so it does not matter who placed a request; and all obey the
newest tenants' file.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from sglang_fair.common.caller import GROUP_MARK
from sglang_fair.models.catalog import resolve
from sglang_fair.tenants import edit, keys
from sglang_fair.tenants.model import Tenant
from tests.support.budget import is_night
from tests.support.front import front
from tests.support.live import Replica
from tests.support.shares import Shares
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e]

KEYS = {"gold": "key of gold", "silver": "key of silver"}
CONNECTIONS = {"gold": 48, "silver": 40}
"""Enough that both always wait at both replicas."""
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 16
TIMES_THE_BOUND = 8
PHASE_S = 300
"""On a busy machine; an idle one needs a tenth."""


@dataclass
class Site:
    urls: list[str]
    replicas: list[Replica]
    tenants: Path

    def headers(self, client: str) -> dict[str, str]:
        return {"authorization": f"Bearer {KEYS[client]}"}

    def weigh(self, client: str, before: float, after: float) -> None:
        """As an editor does it: another file in place of the old one."""
        text = self.tenants.read_text()
        head, name, entry = text.partition(f"{client}:")
        assert f"weight: {before}" in entry
        made = self.tenants.with_suffix(".new")
        made.write_text(head + name + entry.replace(f"weight: {before}", f"weight: {after}", 1))
        made.replace(self.tenants)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("tenants")
    path = folder / "tenants.yaml"
    for name, group in (("gold", "one"), ("silver", "two")):
        made = Tenant(keys=[keys.written(keys.digest(KEYS[name]))], weight=1.5, cache_group=group)
        edit.add(path, name, made)
    arguments = ("--quantum", "100", "--max-running", "4")
    with (
        Replica(*arguments, kv_events=True) as r0,
        Replica(*arguments, kv_events=True) as r1,
        contextlib.ExitStack() as stack,
    ):
        options = ["--placement", "d2lpm"]
        for place, replica in enumerate((r0, r1)):
            assert replica.kv_port is not None
            kv, replay = (f"tcp://127.0.0.1:{replica.kv_port + at}" for at in (0, 1))
            options += ["--worker", f"r{place},http={replica.url},kv={kv},replay={replay}"]
        fronts = [front(resolve("tiny"), folder, options, ("--tenants", str(path))) for _ in range(2)]
        yield Site([stack.enter_context(one) for one in fronts], [r0, r1], path)


async def post(
    session: aiohttp.ClientSession, url: str, headers: dict[str, str], tokens: list[int], **body: Any
) -> Any:
    asked = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0},
        **body,
    }
    async with session.post(f"{url}/generate", json=asked, headers=headers) as answer:
        return answer.status, answer.headers, await answer.json()


async def flood(site: Site, client: str, stop: asyncio.Event) -> None:
    """As many requests at any time as the client has connections, until `stop`. Gold's enter by one gateway, silver's
    by both, so that fairness of each router by itself would be none."""
    random, headers = Random(client), site.headers(client)
    liar = headers | {"x-fair-weight": "1000.0@9999999999999999999", "x-fair-client": "gold"}

    async def one_after_another(session: aiohttp.ClientSession, number: int) -> None:
        while not stop.is_set():
            tokens = [random.randrange(3, 250) for _ in range(PROMPT_TOKENS)]
            url = site.urls[number % 2 if client == "silver" else 0]
            status, _, answer = await post(session, url, liar if number % 3 else headers, tokens)
            assert status == 200, answer

    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as group,
    ):
        for number in range(CONNECTIONS[client]):
            group.create_task(one_after_another(session, number))


async def books(replica: Replica) -> dict[str, Any]:
    found: dict[str, Any] = await asyncio.to_thread(replica.fair)
    return found


async def weighs(replica: Replica, client: str, weight: float) -> bool:
    return bool((await books(replica))["clients"].get(client, {}).get("weight") == weight)


async def shares(replica: Replica, weights: dict[str, float]) -> dict[str, float]:
    """What both got while both waited at `replica`; inside the bound that it reports."""
    seen = Shares(weights)
    while True:
        book = await books(replica)
        assert book["conservation"]["ok"]
        got = seen.see(book)
        if min(got.values()) > TIMES_THE_BOUND * book["bound"]:
            return got
        await asyncio.sleep(0.5)


async def both(site: Site, weights: dict[str, float]) -> None:
    """New service is by these weights, at each replica inside its bound."""
    async with asyncio.timeout(PHASE_S):
        got = await asyncio.gather(*(shares(replica, weights) for replica in site.replicas))
    gold, silver = (sum(one[name] for one in got) for name in weights)
    assert gold / silver == pytest.approx(weights["gold"] / weights["silver"], rel=0.2), got


@pytest.mark.timeout(4 * PHASE_S)
def test_new_service_is_by_the_newest_file_at_every_gateway_router_and_replica(site: Site) -> None:
    """3:1 after one line of the file has changed, and after a replica was killed; whatever clients claim."""

    async def obeyed(replica: Replica, client: str, weight: float) -> None:
        await eventually(lambda: weighs(replica, client, weight), f"weight {weight} at {replica.url}")

    async def run() -> None:
        stop = asyncio.Event()
        floods = [asyncio.create_task(flood(site, client, stop)) for client in CONNECTIONS]
        try:
            for replica in site.replicas:
                await obeyed(replica, "gold", 1.5)
            if is_night():
                await both(site, {"gold": 1.5, "silver": 1.5})
            site.weigh("gold", 1.5, 4.5)
            for replica in site.replicas:
                await obeyed(replica, "gold", 4.5)
            await both(site, {"gold": 4.5, "silver": 1.5})

            killed = site.replicas[0]
            await asyncio.to_thread(killed.kill)
            await asyncio.to_thread(killed.__enter__)
            for client, weight in (("gold", 4.5), ("silver", 1.5)):
                await obeyed(killed, client, weight)
            if is_night():
                await both(site, {"gold": 4.5, "silver": 1.5})
        finally:
            stop.set()
            await asyncio.gather(*floods)

    asyncio.run(run())


def test_groups_neither_hit_nor_are_expected_to(site: Site) -> None:
    """What one group has at every replica is unknown to another one's first request, whatever salt that names."""
    random = Random(5)
    tokens = [random.randrange(3, 250) for _ in range(200)]

    async def run() -> None:
        async with aiohttp.ClientSession() as session:

            async def ask(client: str, url: str, **body: Any) -> tuple[int, int]:
                """Expected and found in the cache, tokens."""
                status, headers, answer = await post(session, url, site.headers(client), tokens, **body)
                assert status == 200, answer
                return int(headers["x-fair-matched-tokens"]), int(answer["meta_info"]["cached_tokens"])

            for url in site.urls:

                async def is_known(url: str = url) -> bool:
                    return min(await ask("gold", url)) >= 150

                await eventually(is_known, "the prompt of the first group")
            for url, salt in zip(site.urls, (None, f"{GROUP_MARK}one{GROUP_MARK}"), strict=True):
                assert await ask("silver", url, cache_salt=salt) == (0, 0)

    asyncio.run(run())
