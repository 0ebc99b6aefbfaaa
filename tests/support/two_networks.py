"""Routers and gateways in one network, replicas in another, and a cable between: run it as `unshare -rmn python -m …`.

It cuts the cable under load and heals it, kills a replica and both routers in turn, and prints `ok`.
"""

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

from tests.support.cable import BACK, Cable
from tests.support.site import Seen, Site
from tests.support.stand_in import make_tokenizer
from tests.support.waiting import eventually

CLIENTS = [f"client {number}" for number in range(10)]
LENGTH = 40


class Load:
    """Each client asks again and again. Every request must end, in one of three ways."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._stops = False
        self.served: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self._tasks = [asyncio.create_task(self._ask(client)) for client in CLIENTS]

    async def _ask(self, client: str) -> None:
        number = 0
        while not self._stops:
            number += 1
            prompt, seen = f"{client} {number}", Seen()
            await self._site.stream("completions", prompt, LENGTH, seen, client=client, gateway=number % 2)
            if seen.status != 200 or seen.error:
                assert not seen.ended, seen
                assert self._site.expected("completions", prompt, LENGTH).startswith(seen.text), seen
                self.outcomes["refused" if seen.status != 200 else "broken off"] += 1
                await asyncio.sleep(0.1)
                continue
            assert seen.ended, seen
            assert seen.text == self._site.expected("completions", prompt, LENGTH), seen
            self.outcomes["served"] += 1
            self.served[client] += 1

    async def goes_on(self, more: int = 3) -> None:
        """Each client is served so often again."""
        before = dict(self.served)
        await eventually(
            lambda: self.broken() or all(self.served[c] >= before.get(c, 0) + more for c in CLIENTS),
            "every client is served",
        )

    def failed(self) -> int:
        """How many requests had another outcome than to be served."""
        return self.outcomes.total() - self.outcomes["served"]

    def broken(self) -> bool:
        return any(task.done() for task in self._tasks)

    async def stop(self) -> None:
        self._stops = True
        await asyncio.gather(*self._tasks)


async def body(site: Site, cable: Cable) -> None:
    await site.start()
    load = Load(site)
    await load.goes_on()
    for _ in range(2):
        cable.set("down")

        async def all_sick() -> bool:
            states = [await site.state(gateway) for gateway in (0, 1)]
            return all(len(state["gateway"]["sick"]) == len(site.replicas) for state in states)

        await eventually(all_sick, "the gateways miss the replicas")
        failed = load.failed()
        await eventually(lambda failed=failed: load.broken() or load.failed() > failed, "clients are told")
        cable.set("up")
        for gateway in (0, 1):
            await eventually(lambda gateway=gateway: site.all_up(gateway), "all replicas answer again")
        await load.goes_on()
    failed = load.failed()
    for victim in (site.replicas["r0"], *site.routers):
        victim.kill()
        await load.goes_on()
        victim.start()
        for gateway in (0, 1):
            await eventually(lambda gateway=gateway: site.all_up(gateway), f"{victim.name} is back")
        await load.goes_on()
    assert load.failed() == failed, "with the cable in place, what dies takes no request along"
    await load.stop()
    for gateway in (0, 1):
        await site.quiet(gateway)
    for name in site.replicas:

        async def idle(name: str = name) -> bool:
            return (await site.work(name))["running"] == 0

        await eventually(idle, "nothing is computed for nobody")
    print(f"outcomes: {dict(load.outcomes)}")


async def main() -> None:
    cable = Cable()
    try:
        with tempfile.TemporaryDirectory() as folder:
            options = ("--health-timeout", "2", "--connect-timeout", "1")
            async with Site(
                make_tokenizer(Path(folder)), replicas=3, gateways=2, routers=2, step_s=0.01,
                gateway_options=options, replica_host=BACK, before_replicas=cable.inside,
            ) as site:  # fmt: skip
                await body(site, cable)
    finally:
        cable.close()


if __name__ == "__main__":
    asyncio.run(main())
    print("ok")
