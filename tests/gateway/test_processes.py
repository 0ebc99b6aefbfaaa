"""Processes at one port share its connections. At SIGTERM /readyz says so first; open requests end, then they do."""

import asyncio
import multiprocessing
import pickle
import signal
import socket
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import aiohttp
import pytest

from router.gateway.address import SharedPort
from tests.support.site import Process, Seen, Site
from tests.support.waiting import eventually


def serve(sockets: list[socket.socket], told: Connection) -> None:
    """Listens, says so, and says how many have connected when it is asked."""
    [own] = sockets
    own.listen(256)
    told.send("listens")
    told.recv()
    own.setblocking(False)
    taken = []
    while True:
        try:
            taken.append(own.accept()[0])
        except BlockingIOError:
            break
    told.send(len(taken))


@pytest.mark.slow
def test_connections_that_come_at_once_are_dealt_out() -> None:
    context = multiprocessing.get_context("spawn")
    with SharedPort("127.0.0.1", 0) as port:
        number = port.getsockname()[1]
        ends = [context.Pipe() for _ in range(2)]
        workers = [context.Process(target=serve, args=([port], far)) for _, far in ends]
        for worker in workers:
            worker.start()
        for near, _ in ends:
            assert near.poll(60)
            assert near.recv() == "listens"
        clients = [socket.create_connection(("127.0.0.1", number)) for _ in range(128)]
        for near, _ in ends:
            near.send("how many?")
        found = [near.recv() for near, _ in ends if near.poll(60)]
        for worker in workers:
            worker.join()
        for client in clients:
            client.close()
        for pipe in ends:
            for end in pipe:
                end.close()
    assert sum(found) == 128
    assert min(found) > 20


def test_a_port_that_somebody_has_is_not_shared() -> None:
    with SharedPort("127.0.0.1", 0) as first:
        number = first.getsockname()[1]
        own = pickle.loads(ForkingPickler.dumps(first))
        with own:
            own.listen()
            with pytest.raises(OSError, match="in use"):
                SharedPort("127.0.0.1", number)


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
