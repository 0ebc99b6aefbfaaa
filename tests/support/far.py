"""A cluster over two networks, through cuts, kills and an eavesdropper.

    unshare -rmn python -m tests.support.far FOLDER long|short FD...

FDs are connections to a fork server, of which replicas are forked. Prints what it has seen, as one object of JSON for
each check. The short form kills a gateway alone, whose clients have to ask again, and leaves the cable as it is.
"""

import asyncio
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import zmq

from router.wire import pack_tokens
from sglang_fair.common.curve import Keys, make
from tests.support.cable import BACK, FRONT, Cable
from tests.support.far_load import Applications, Flood, document
from tests.support.far_site import FarReplica, FarSite
from tests.support.live import check_conservation
from tests.support.packets import Packets
from tests.support.site import Process
from tests.support.waiting import eventually

MARK = "nobody on the wire may read this secret"
IDS = list(MARK.encode())
"""A token of an emulated model is a byte of text."""

PATTERNS = {
    "text": MARK.encode(),  # which token ids in msgpack are, too
    "token ids in JSON": ",".join(map(str, IDS)).encode(),
    "token ids in JSON, spaced": ", ".join(map(str, IDS)).encode(),
    "token ids": pack_tokens(IDS),
}

WEIGHTS = {"gold": 2.0, "silver": 1.0, "tin": 1.0}
PLENTY = [
    "--quantum", "100", "--max-running", "4", "--time-scale", "1.5", "--client-weights", json.dumps(WEIGHTS)
]  # fmt: skip
TIMES_THE_BOUND = 1.5


async def overheard(site: FarSite) -> dict[str, Any]:
    """What an eavesdropper reads of a marked prompt, on each channel."""
    channels = {
        "client": set(site.gateway_ports),
        "router": set(site.router_ports),
        "replica": {one.port for one in site.replicas},
        "events": {one.kv_port for one in site.replicas},
        "replay": {one.kv_port + 1 for one in site.replicas},
        "load": {one.load_port for one in site.replicas},
    }
    with Packets() as packets:
        for stream in (False, True):
            body = {
                "messages": [{"role": "user", "content": f"{MARK}. " * 8}],
                "max_tokens": 4,
                "stream": stream,
            }
            async with site.http.post(f"{site.urls[0]}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
        # A router that begins asks for all that was published.
        for router in site.routers:
            router.kill()
            router.start()
        await site.all_up()
        for ports in channels.values():
            await asyncio.to_thread(packets.wait_for, ports)
        for replica in site.replicas:
            await eventually(lambda name=replica.name: followed(site, name), "the router follows")
    return {
        name: [what for what, pattern in PATTERNS.items() if packets.hold(ports, pattern)]
        for name, ports in channels.items()
    }


async def followed(site: FarSite, replica: str) -> bool:
    """Whether a router that began has all that a replica published before."""
    wire = (await site.status())["wire"]["kv"]
    return bool(wire[replica]["replays"]) and not wire[replica].get("held", 0)


async def strangers(site: FarSite, folder: Path) -> dict[str, Any]:
    """Peers with keys of another cluster, and with none: how many more connections each server has refused."""
    make(folder / "other")
    context = zmq.Context()
    made = []
    before = await refused(site)
    for role, server, kind, address in (
        ("gateway", "router", zmq.DEALER, f"tcp://{FRONT}:{site.router_ports[0]}"),
        ("router", "replica", zmq.SUB, f"tcp://{BACK}:{site.replicas[0].kv_port}"),
        ("router", "replica", zmq.DEALER, f"tcp://{BACK}:{site.replicas[0].kv_port + 1}"),
        ("router", "replica", zmq.SUB, f"tcp://{BACK}:{site.replicas[0].load_port}"),
    ):
        wrong, right = Keys.read(folder / "other", role), Keys.read(site.folder / "keys", role)
        for keys in (None, wrong, Keys(role, wrong.public, wrong.secret, right.others)):
            peer = context.socket(kind)
            peer.linger = 0
            if keys is not None:
                keys.connect(peer, server)
            if kind == zmq.SUB:
                peer.subscribe(b"")
            peer.connect(address)
            if kind == zmq.DEALER:
                peer.send_multipart([b"", bytes(8)])
            made.append(peer)

    async def counted() -> dict[str, int] | None:
        more = {name: count - before[name] for name, count in (await refused(site)).items()}
        return more if more["router"] >= 3 and more["replica"] >= 9 else None

    found: dict[str, int] = await eventually(counted, "strangers are refused and counted")
    heard = sum(bool(peer.poll(0)) for peer in made)
    for peer in made:
        peer.close(0)
    context.term()
    url = f"{site.scheme}://{BACK}:{site.replicas[0].port}"
    async with site.http.post(f"{url}/generate", json={"input_ids": IDS}) as answer:
        without_key = answer.status
    believed = True
    async with aiohttp.ClientSession() as outside:  # believes the system's authorities
        for one in (url, site.urls[0]):
            try:
                await outside.get(f"{one}/health")
            except aiohttp.ClientConnectorCertificateError:
                believed = False
    return {"refused": found, "heard": heard, "a replica without its key": without_key, "believed": believed}


async def refused(site: FarSite) -> dict[str, int]:
    return {
        "router": (await site.status())["wire"]["refused"],
        "replica": (await site.book(site.replicas[0]))["refused_peers"],
    }


async def cut(site: FarSite, cable: Cable) -> dict[str, Any]:
    """The cable is cut and healed under load."""
    async with Flood(site, WEIGHTS, connections=20) as flood:
        await flood.goes_on()
        await flood.shares_go_on(TIMES_THE_BOUND)
        assert not flood.failed(), flood.outcomes
        cable.set("down")

        async def all_sick() -> bool:
            states = [await site.status(at) for at in range(len(site.gateways))]
            return all(len(state["gateway"]["sick"]) == len(site.replicas) for state in states)

        await eventually(all_sick, "the gateways miss the replicas")
        await eventually(lambda: flood.failed() > 0, "clients are told")
        cable.set("up")
        await site.all_up()
        told = dict(flood.outcomes)
        await flood.goes_on()
        await flood.shares_go_on(TIMES_THE_BOUND)
        await flood.stop()
    await site.quiet()
    check_conservation(*[await site.book(one) for one in site.replicas])
    return {
        "outcomes": dict(flood.outcomes),
        "until it was healed": told,
        "least service by weight": flood.got(),
        "bounds": {one.name: (await site.book(one))["bound"] for one in site.replicas},
        "tree": await tree(site),
    }


async def tree(site: FarSite) -> dict[str, Any]:
    """Whether routers know what replicas have cached: what they predict for prompts, and what was there."""
    before = (await site.status())["hits"]
    clients = ("gold", "silver", "tin")
    for turn in range(4):
        for client in clients:
            body = {"prompt": document(client) + [97 + turn] * 40, "max_tokens": 2, "temperature": 0}
            async with site.http.post(
                f"{site.urls[turn % 2]}/v1/completions", json=body, headers={"x-fair-client": client}
            ) as answer:
                assert answer.status == 200, await answer.text()
    await site.quiet()
    after = (await site.status())["hits"]
    found = {name: after[name] - before[name] for name in after}
    return {"prompts": 4 * len(clients), **found}


async def kills(site: FarSite, victims: Sequence[FarReplica | Process]) -> dict[str, Any]:
    """They die in turn and come back, while official clients ask."""
    applications = Applications(site, each=2)
    await applications.goes_on()
    found: dict[str, Any] = {}
    for victim in victims:
        before = applications.retries, Counter(applications.asked_again)
        victim.kill()
        await applications.goes_on()
        victim.start()
        await site.all_up()
        await applications.goes_on()
        found[victim.name] = {
            "retried by the client": applications.retries - before[0],
            "streams asked for again": dict(applications.asked_again - before[1]),
        }
    await applications.stop()
    await site.quiet()
    return {"served": applications.served.total(), "applications": len(applications.served), **found}


async def checked(name: str, check: Callable[[], Awaitable[dict[str, Any]]]) -> None:
    began = time.monotonic()
    found = await check()
    print(json.dumps({name: found}), flush=True)
    print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


async def main(folder: Path, is_long: bool, forks: list[socket.socket]) -> None:
    cable = Cable()
    try:
        async with FarSite(cable, forks, folder / "plain", is_secure=False, replicas=1, fronts=1) as plain:
            await checked("overheard without keys", lambda: overheard(plain))
        count = 3 if is_long else 2
        site = FarSite(
            cable, forks, folder / "secure", is_secure=True, replicas=count, fronts=2, options=PLENTY
        )
        async with site:
            await checked("overheard", lambda: overheard(site))
            await checked("strangers", lambda: strangers(site, folder))
            others = (site.replicas[0], site.routers[0]) if is_long else ()
            await checked("kills", lambda: kills(site, (*others, site.gateways[0])))
            if is_long:
                await checked("cut", lambda: cut(site, cable))
    finally:
        cable.close()


if __name__ == "__main__":
    connections = [socket.socket(fileno=int(number)) for number in sys.argv[3:]]
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2] == "long", connections))
    print('"ok"')
