"""SIGTERM: /readyz says so first, all is served meanwhile, then open requests end, and then the process."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.site import Process, Seen, Site
from tests.support.stand_in import make_tokenizer
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

LONG = "3600"
"""No test waits for it."""


async def readiness(site: Site) -> tuple[int, str]:
    async with site.http.get(f"{site.gateway_urls[0]}/readyz") as answer:
        return answer.status, (await answer.json())["status"]


async def refused(site: Site) -> bool:
    """Whether nobody can connect any more."""
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{site.gateway_urls[0]}/healthz") as answer:
            await answer.read()
    except aiohttp.ClientError:
        return True
    return False


async def ended(process: Process) -> int:
    found: Any = await eventually(lambda: process.exit_code() is not None, "the gateway has ended")
    assert found
    code = process.exit_code()
    assert code is not None
    return code


@pytest.mark.parametrize("workers", [1, 2])
async def test_it_is_not_ready_first_and_serves_until_all_is_answered(tmp_path: Path, workers: int) -> None:
    options = ("--notice", LONG, "--workers", str(workers))
    async with Site(make_tokenizer(tmp_path), replicas=1, step_s=0.05, gateway_options=options) as site:
        await site.start()
        assert await readiness(site) == (200, "ready")
        [gateway] = site.gateways
        gateway.send(signal.SIGTERM)

        async def all_say_so() -> bool:
            found = [await readiness(site) for _ in range(4 * workers)]
            return set(found) == {(503, "ending")}

        await eventually(all_say_so, "it is not ready")
        assert (await site.whole("a", 3))[0] == 200
        if workers > 1:
            return  # uvicorn's supervisor passes no second signal on
        await site.hold(10, "r0")
        seen = Seen()
        streaming = asyncio.create_task(site.stream("completions", "b", 60, seen))
        await eventually(lambda: seen.events > 2, "it streams")
        gateway.send(signal.SIGTERM)
        await eventually(lambda: refused(site), "nobody can connect")
        assert gateway.exit_code() is None
        await site.hold(None, "r0")
        await streaming
        assert seen.text == site.expected("completions", "b", 60)
        assert seen.ended
        assert await ended(gateway) == 0


async def test_when_the_notice_is_over_it_ends_by_itself(tmp_path: Path) -> None:
    options = ("--notice", "0.2")
    async with Site(make_tokenizer(tmp_path), replicas=1, gateway_options=options) as site:
        await site.start()
        site.gateways[0].send(signal.SIGTERM)
        assert await ended(site.gateways[0]) == 0


async def test_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    options = ("--notice", LONG)
    async with Site(make_tokenizer(tmp_path), replicas=1, gateway_options=options) as site:
        await site.start()
        site.gateways[0].send(signal.SIGINT)
        assert await ended(site.gateways[0]) == 0
