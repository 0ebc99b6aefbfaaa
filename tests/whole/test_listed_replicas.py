"""Replicas come and go under load by the file that lists them: one that appears gets requests when it is ready.

One that vanishes loses none. Processes are real, engines are stand-ins.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.site import Site
from tests.support.stand_in import make_tokenizer
from tests.support.steady_load import Load
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_they_come_and_go_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "replicas"

    async def main() -> None:
        site = Site(
            make_tokenizer(tmp_path), replicas=0, gateways=2, routers=2, step_s=0.01,
            router_options=("--replicas-file", str(path)),
        )  # fmt: skip
        for name in ("a", "b", "c"):
            site.add_replica(name)
        urls = dict(site.urls)

        def listed(names: Sequence[str]) -> None:
            new = path.with_suffix(".new")
            new.write_text("".join(f"{name},http={urls[name]}\n" for name in names))
            new.rename(path)

        async with site:
            await come_and_go(site, listed)

    asyncio.run(main())


async def come_and_go(site: Site, listed: Callable[[Sequence[str]], None]) -> None:
    """Two are listed at first; the third comes before it runs, and all of the first go, one after the other.

    Between, all routers die and come back. No request fails, and whoever is struck off and forgotten may be killed.
    """
    first, second, third = site.replicas
    late = {third: (site.replicas.pop(third), site.urls[third])}
    listed([first, second])
    await site.start()
    load = Load(site)
    await load.goes_on()
    listed([first, second, third])
    await load.goes_on()
    assert third not in (await site.state())["workers"], "it does not run yet"
    site.replicas[third], site.urls[third] = late[third]
    site.replicas[third].start()
    await has(site, first, second, third)
    before = (await site.work(third))["requests"]

    async def asked() -> bool:
        return (await site.work(third))["requests"] > before

    await eventually(asked, "it gets requests")
    for router in site.routers:
        router.kill()
    for router in site.routers:
        router.start()
    await load.goes_on()
    await has(site, first, second, third)
    await load.goes_on()
    for gone, left in ((first, (second, third)), (second, (third,))):
        listed(left)
        await has(site, *left)
        assert (await site.work(gone))["running"] == 0, "it was forgotten when it had finished"
        site.replicas.pop(gone).kill()
        await load.goes_on()
    await load.stop()
    for gateway in (0, 1):
        state = await site.quiet(gateway)
        assert state["gateway"]["failed"] == state["gateway"]["retried"] == 0


async def has(site: Site, *names: str) -> None:
    """Until both gateways and routers know these replicas, and they are well."""
    for gateway in range(len(site.gateways)):

        async def knows(gateway: int = gateway) -> bool:
            state = await site.state(gateway)
            rows = state["workers"]
            is_well = not state["gateway"]["sick"] and all(row["state"] == "up" for row in rows.values())
            return is_well and set(rows) == set(names) and state["gateway"]["workers"] == len(names)

        await eventually(knows, f"gateway {gateway} knows {', '.join(names)}")
