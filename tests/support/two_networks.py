"""Routers and gateways in one network, replicas in another, and a cable between, which is cut under load and healed.

unshare -rmn python -m tests.support.two_networks      prints `ok`
"""

import asyncio
import tempfile
from pathlib import Path

from tests.support.cable import BACK, Cable
from tests.support.site import Site
from tests.support.stand_in import make_tokenizer
from tests.support.steady_load import Load
from tests.support.waiting import eventually


async def body(site: Site, cable: Cable) -> None:
    await site.start()
    load = Load(site, may_fail=True)
    await load.goes_on()
    assert not load.failed
    cable.set("down")

    async def all_sick() -> bool:
        states = [await site.state(gateway) for gateway in (0, 1)]
        return all(len(state["gateway"]["sick"]) == len(site.replicas) for state in states)

    await eventually(all_sick, "the gateways miss the replicas")
    failed = load.failed
    await eventually(lambda: load.broken() or load.failed > failed, "clients are told")
    cable.set("up")
    for gateway in (0, 1):
        await eventually(lambda gateway=gateway: site.all_up(gateway), "all replicas answer again")
    await load.goes_on()
    failed = load.failed
    await load.goes_on()
    assert load.failed == failed
    await load.stop()
    for gateway in (0, 1):
        await site.quiet(gateway)
    for name in site.replicas:

        async def idle(name: str = name) -> bool:
            return (await site.work(name))["running"] == 0

        await eventually(idle, "nothing is computed for nobody")


async def main() -> None:
    cable = Cable()
    try:
        with tempfile.TemporaryDirectory() as folder:
            options = ("--health-timeout", "2", "--connect-timeout", "1")
            async with Site(
                make_tokenizer(Path(folder)), replicas=2, gateways=2, routers=2, step_s=0.01,
                gateway_options=options, replica_host=BACK, before_replicas=cable.inside,
            ) as site:  # fmt: skip
                await body(site, cable)
    finally:
        cable.close()


if __name__ == "__main__":
    asyncio.run(main())
    print("ok")
