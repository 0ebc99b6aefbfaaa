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


CLIENTS = [f"client {number}" for number in range(10)]
LENGTH = 30


class Load:
    """Each client asks again and again, at both gateways in turn, until `stop`. No request may fail."""

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
            expected = self._site.expected("completions", prompt, LENGTH)
            assert (seen.status, seen.error, seen.ended) == (200, "", True), seen
            assert seen.text == expected, seen
            self.served[client] += 1

    async def goes_on(self, more: int = 3) -> None:
        """Each client is served so often again."""
        before = dict(self.served)
        await eventually(
            lambda: self.broken() or all(self.served[c] >= before.get(c, 0) + more for c in CLIENTS),
            "every client is served",
        )

    async def stop(self) -> None:
        self._stops = True
        await asyncio.gather(*self._tasks)

    def broken(self) -> bool:
        """A client has seen what it must not, which `stop` says."""
        return any(task.done() for task in self._tasks)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def states(state: dict[str, Any]) -> list[str]:
    return [router["state"] for router in state["gateway"]["routers"]]


def test_one_of_two_routers_is_killed_under_load_and_comes_back(tokenizer: Path, tmp_path: Path) -> None:
    """With keys, of which those of a router that comes back are the same."""
    make(tmp_path / "keys")
    options = ("--keys", str(tmp_path / "keys"))

    async def body(site: Site) -> None:
        load = Load(site)
        await load.goes_on()
        site.routers[0].kill()
        for gateway in (0, 1):

            async def seen(gateway: int = gateway) -> bool:
                return states(await site.state(gateway)) == ["gone", "up"]

            await eventually(seen, "the gateway misses one router")
        await load.goes_on()
        site.routers[0].start()
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
