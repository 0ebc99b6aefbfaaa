"""SIGTERM: /readyz says so first, all is served meanwhile, then open requests end, and then the process."""

import asyncio
import signal
from pathlib import Path

import aiohttp

from tests.support.site import Process, Seen, Site
from tests.support.waiting import eventually

LONG = "3600"
"""Nobody waits for it."""


async def readiness(site: Site, gateway: int) -> tuple[int, str]:
    async with site.http.get(f"{site.gateway_urls[gateway]}/readyz") as answer:
        return answer.status, (await answer.json())["status"]


async def refused(site: Site, gateway: int) -> bool:
    """Whether nobody can connect any more."""
    try:
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{site.gateway_urls[gateway]}/healthz") as answer,
        ):
            await answer.read()
    except aiohttp.ClientError:
        return True
    return False


async def ends_well(process: Process) -> None:
    await eventually(lambda: process.exit_code() is not None, "the gateway has ended")
    assert process.exit_code() == 0


async def is_not_ready_first_and_serves(site: Site, gateway: int) -> None:
    assert await readiness(site, gateway) == (200, "ready")
    site.gateways[gateway].send(signal.SIGTERM)

    async def all_processes_say_so() -> bool:
        return {await readiness(site, gateway) for _ in range(8)} == {(503, "ending")}

    await eventually(all_processes_say_so, "it is not ready")
    assert (await site.whole("a", 3, gateway=gateway))[0] == 200


async def serves_until_all_is_answered(site: Site, gateway: int) -> None:
    await is_not_ready_first_and_serves(site, gateway)
    await site.hold(10, "r0")
    seen = Seen()
    streaming = asyncio.create_task(site.stream("completions", "b", 60, seen, gateway=gateway))
    await eventually(lambda: seen.events > 2, "it streams")
    site.gateways[gateway].send(signal.SIGTERM)
    await eventually(lambda: refused(site, gateway), "nobody can connect")
    assert site.gateways[gateway].exit_code() is None
    await site.hold(None, "r0")
    await streaming
    assert seen.text == site.expected("completions", "b", 60)
    assert seen.ended
    await ends_well(site.gateways[gateway])


async def test_how_gateways_end(tokenizer: Path) -> None:
    """Four, beside each other."""
    options = (
        ("--notice", LONG),
        ("--notice", LONG, "--workers", "2"),
        ("--notice", "0.2", "--workers", "2"),
        ("--notice", LONG),
    )
    async with Site(tokenizer, replicas=1, gateways=len(options)) as site:
        for gateway, words in zip(site.gateways, options, strict=True):
            gateway.command += words
        await site.start()
        site.gateways[2].send(signal.SIGTERM)
        site.gateways[3].send(signal.SIGINT)
        await is_not_ready_first_and_serves(site, 1)  # uvicorn's supervisor passes no second signal on
        await serves_until_all_is_answered(site, 0)
        await ends_well(site.gateways[2])  # when its notice was over
        await ends_well(site.gateways[3])  # ctrl-c does not wait
