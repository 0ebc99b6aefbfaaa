"""Two routers that know nothing of each other, and traffic that is split unevenly between them.

Fairness per router process would turn shares of 4:1 into 1:1 here. The shares are kept in the replicas, where
all traffic meets, so it does not matter who placed a request.
"""

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import aiohttp
import httpx
import pytest

from sglang_fair.models.catalog import resolve
from tests.support.live import Replica
from tests.support.ports import free_port
from tests.support.shares import Shares
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

WEIGHTS = '{"heavy": 4}'
CONNECTIONS = {"heavy": 80, "light": 40}
"""Enough that both always wait at both replicas."""
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 16
TIMES_THE_BOUND = 14


@contextlib.contextmanager
def front(replicas: list[Replica], logs: Path, tenants: Path | None = None) -> Iterator[str]:
    """A router and a gateway of its own over `replicas`; the gateway's address. With a tenants' file the router knows
    no weights of its own."""
    router, gateway = f"tcp://127.0.0.1:{free_port()}", free_port()
    workers = [
        word
        for place, replica in enumerate(replicas)
        for word in (
            "--worker",
            f"r{place},http={replica.url},kv=tcp://127.0.0.1:{replica.kv_port},"
            f"replay=tcp://127.0.0.1:{(replica.kv_port or 0) + 1}",
        )
    ]
    weights = ["--client-weights", WEIGHTS] if tenants is None else []
    keys = [] if tenants is None else ["--tenants", str(tenants)]
    commands = [
        ["router", "--bind", router, "--placement", "d2lpm", *weights, *workers],
        ["router.gateway", "--port", str(gateway), "--router", router, "--model-name", "tiny",
         "--tokenizer", str(resolve("tiny")), *keys],
    ]  # fmt: skip
    url = f"http://127.0.0.1:{gateway}"

    def ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            if tenants is not None:  # its status is for operators
                return httpx.get(f"{url}/health", timeout=5).status_code == 200
            return len(httpx.get(f"{url}/status", timeout=5).json().get("workers", ())) == len(replicas)
        return False

    with contextlib.ExitStack() as stack:
        for place, command in enumerate(commands):
            log = stack.enter_context((logs / f"{gateway}-{place}.log").open("wb"))
            process = subprocess.Popen(
                [sys.executable, "-m", *command], stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(process.wait)
            stack.callback(os.killpg, process.pid, signal.SIGKILL)
        wait_until(ready, f"{url} to know its replicas")
        yield url


async def flood(client: str, urls: list[str], stop: asyncio.Event) -> None:
    """As many requests of `client` at any time as it has connections, spread over `urls`, until `stop`."""
    random = Random(client)

    async def one_after_another(session: aiohttp.ClientSession, url: str) -> None:
        while not stop.is_set():
            body = {
                "input_ids": [random.randrange(3, 250) for _ in range(PROMPT_TOKENS)],
                "sampling_params": {"max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0},
            }
            async with session.post(
                f"{url}/generate", json=body, headers={"x-fair-client": client}
            ) as response:
                assert response.status == 200, await response.text()
                await response.read()

    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as group,
    ):
        for number in range(CONNECTIONS[client]):
            group.create_task(one_after_another(session, urls[number % len(urls)]))


async def shares(replica: Replica) -> tuple[float, float]:
    """Service of both clients while both waited at `replica`; inside the bound that it reports. It is so much that
    what the bound allows in each stretch is small in their sum."""
    seen = Shares({"heavy": 4.0, "light": 1.0})
    while True:
        book = await asyncio.to_thread(replica.fair)
        assert book["conservation"]["ok"]
        got = seen.see(book)
        if got["light"] > TIMES_THE_BOUND * book["bound"] * math.sqrt(max(1, seen.stretches)):
            return got["heavy"], got["light"]
        await asyncio.sleep(0.2)


@pytest.mark.timeout(900)
def test_shares_hold_whichever_router_the_traffic_enters_by(tmp_path: Path) -> None:
    """4:1 within 10 %, with all of the heavy client's requests at one router and the light one's at both."""

    async def run(first: str, second: str, replicas: list[Replica]) -> list[tuple[float, float]]:
        stop = asyncio.Event()
        floods = [
            asyncio.create_task(flood("heavy", [first], stop)),
            asyncio.create_task(flood("light", [first, second], stop)),
        ]
        try:
            async with asyncio.timeout(600):
                return list(await asyncio.gather(*(shares(replica) for replica in replicas)))
        finally:
            stop.set()
            await asyncio.gather(*floods)

    arguments = ("--client-weights", WEIGHTS, "--quantum", "100", "--max-running", "4")
    with (
        Replica(*arguments, kv_events=True) as r0,
        Replica(*arguments, kv_events=True) as r1,
        front([r0, r1], tmp_path) as first,
        front([r0, r1], tmp_path) as second,
    ):
        got = asyncio.run(run(first, second, [r0, r1]))
    heavy, light = (sum(units) for units in zip(*got, strict=True))
    assert heavy / light == pytest.approx(4, rel=0.1), got
    for heavy, light in got:
        assert heavy / light == pytest.approx(4, rel=0.2), got
