"""Two routers behind two gateways, of which one is killed under load: no request fails, and none is counted twice.

Processes are real, engines are stand-ins, so that the right answer of every request is known.
"""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sglang_fair.common.curve import make
from tests.support.site import Seen, Site
from tests.support.stand_in import make_tokenizer
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

CLIENTS = [f"client {number}" for number in range(12)]
LENGTH = 30


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Load:
    """Each client asks again and again, at both gateways in turn, until `stop`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._stops = False
        self.served: Counter[str] = Counter()
        self._tasks = [asyncio.create_task(self._ask(client)) for client in CLIENTS]

    async def _ask(self, client: str) -> None:
        number = 0
        while not self._stops:
            number += 1
            prompt, seen = f"{client} {number}", Seen()
            await self._site.stream("completions", prompt, LENGTH, seen, client=client, gateway=number % 2)
            assert (seen.status, seen.error, seen.ended) == (200, "", True), seen
            assert seen.text == self._site.expected("completions", prompt, LENGTH)
            self.served[client] += 1

    async def goes_on(self, more: int = 4) -> None:
        """Each client is served so often again."""
        before = dict(self.served)
        await eventually(
            lambda: self._broken() or all(self.served[c] >= before.get(c, 0) + more for c in CLIENTS),
            "every client is served",
        )

    async def stop(self) -> None:
        self._stops = True
        await asyncio.gather(*self._tasks)

    def _broken(self) -> bool:
        """A client was not served, which `stop` says."""
        return any(task.done() for task in self._tasks)


def states(state: dict[str, Any]) -> list[str]:
    return [router["state"] for router in state["gateway"]["routers"]]


@pytest.mark.parametrize("has_keys", [False, True], ids=["open", "keys"])
def test_one_of_two_routers_is_killed_under_load_and_comes_back(
    tokenizer: Path, tmp_path: Path, has_keys: bool
) -> None:
    make(tmp_path / "keys")
    options = ("--keys", str(tmp_path / "keys")) if has_keys else ()

    async def body(site: Site) -> None:
        load = Load(site)
        await load.goes_on()
        placed = [router["in_flight"] for router in (await site.state())["gateway"]["routers"]]
        assert len(placed) == 2
        first, second = site.routers
        for victim, others in ((first, ["gone", "up"]), (second, ["up", "gone"])):
            victim.kill()
            for gateway in (0, 1):

                async def seen(gateway: int = gateway, others: list[str] = others) -> bool:
                    return states(await site.state(gateway)) == others

                await eventually(seen, "the gateway misses one router")
            await load.goes_on()
            victim.start()
            for gateway in (0, 1):
                await eventually(lambda gateway=gateway: site.all_up(gateway), "it serves its clients again")
            await load.goes_on()
        await load.stop()
        for gateway in (0, 1):
            state = await site.quiet(gateway)
            assert state["gateway"]["placed in fallback"] == 0, "there was always a router"
            assert state["gateway"]["failed"] == state["gateway"]["retried"] == 0

    async def main() -> None:
        async with Site(
            tokenizer, gateways=2, routers=2, step_s=0.01, router_options=options, gateway_options=options
        ) as site:
            await site.start()
            await body(site)

    asyncio.run(main())


def test_both_are_killed_and_gateways_place_by_themselves(tokenizer: Path) -> None:
    async def main() -> None:
        async with Site(tokenizer, gateways=2, routers=2, step_s=0.01) as site:
            await site.start()
            load = Load(site)
            await load.goes_on()
            for router in site.routers:
                router.kill()
            for gateway in (0, 1):

                async def alone(gateway: int = gateway) -> bool:
                    return bool((await site.state(gateway))["gateway"]["fallback"])

                await eventually(alone, "the gateway misses both")
            await load.goes_on()
            for router in site.routers:
                router.start()
            for gateway in (0, 1):
                await eventually(lambda gateway=gateway: site.all_up(gateway), "routers decide again")
            await load.goes_on()
            await load.stop()
            for gateway in (0, 1):
                await site.quiet(gateway)

    asyncio.run(main())


def test_an_operator_drains_a_replica_at_both(tokenizer: Path) -> None:
    """Also at the one that does not answer at that moment."""

    async def main() -> None:
        async with Site(tokenizer, gateways=2, routers=2, step_s=0.01) as site:
            await site.start()
            load = Load(site)
            await load.goes_on()
            site.routers[1].pause()

            async def gone() -> bool:
                return states(await site.state()) == ["up", "gone"]

            await eventually(gone, "the gateway misses one router")
            async with site.http.delete(f"{site.admin_urls[0]}/workers/r1") as answer:
                assert answer.status == 200, await answer.text()
            site.routers[1].go_on()

            async def drained() -> bool:
                state = await site.state()
                return states(state) == ["up", "up"] and list(state["workers"]) == ["r0"]

            await eventually(drained, "both routers have forgotten it")
            await load.goes_on()
            await load.stop()

    asyncio.run(main())
