"""Two routers behind two gateways, of which one is killed under load: no request fails, and none is counted twice.

Processes are real, engines are stand-ins, so that the right answer of every request is known.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sglang_fair.common.curve import make
from tests.support.site import Site
from tests.support.stand_in import make_tokenizer
from tests.support.steady_load import Load
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow


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
