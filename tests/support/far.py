"""A cluster over two networks, through a cut and with an eavesdropper.

    unshare -rmn python -m tests.support.far FOLDER FD...

FDs are connections to a fork server, of which replicas are forked. Prints what it has seen, as one object of JSON for
each check.
"""

import asyncio
import json
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from random import Random
from typing import Any

from router.wire import pack_tokens
from tests.support.cable import Cable
from tests.support.far_site import FarSite
from tests.support.live import check_conservation
from tests.support.streams import Load
from tests.support.waiting import eventually, wait_until

ALL_PROTOCOLS = 0x0003
OUTGOING = 4
TCP = 6
BUFFER_BYTES = 64 << 20
"""As much of it as the machine allows."""


class Packets:
    """`with` it: what is sent over TCP in this process's network meanwhile, over its loopback too, is kept."""

    def __init__(self) -> None:
        self._flows: dict[tuple[bytes, bytes], list[bytes]] = defaultdict(list)
        self._stops = False

    def __enter__(self) -> "Packets":
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ALL_PROTOCOLS))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._socket.settimeout(0.05)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stops = True
        self._thread.join()
        self._socket.close()

    def of(self, ports: Collection[int]) -> list[bytes]:
        """What each connection to or from one of these ports carried, one direction each."""
        return [
            b"".join(pieces)
            for (one, other), pieces in list(self._flows.items())
            if {_port(one), _port(other)} & set(ports)
        ]

    def hold(self, ports: Collection[int], mark: bytes) -> bool:
        """Whether such a connection carried `mark`."""
        return any(mark in flow for flow in self.of(ports))

    def seen(self, ports: Collection[int]) -> int:
        """Bytes of such connections."""
        return sum(map(len, self.of(ports)))

    def wait_for(self, ports: Collection[int]) -> None:
        """Until something was said there."""
        wait_until(lambda: self.seen(ports), f"something is said at {sorted(ports)}")

    def _read(self) -> None:
        while True:
            try:
                data, (interface, _, kind, *_) = self._socket.recvfrom(1 << 17)
            except TimeoutError:
                if self._stops:
                    return
                continue
            if interface == "lo" and kind == OUTGOING:
                continue  # it comes in, too
            if len(data) < 40 or data[0] >> 4 != 4 or data[9] != TCP:
                continue
            head = (data[0] & 15) * 4
            body = data[head + (data[head + 12] >> 4) * 4 : int.from_bytes(data[2:4], "big") or None]
            if body:
                source, target = data[12:16] + data[head : head + 2], data[16:20] + data[head + 2 : head + 4]
                self._flows[source, target].append(body)


def _port(end: bytes) -> int:
    return int.from_bytes(end[4:], "big")


MARK = "nobody on the wire may read this secret"
IDS = list(MARK.encode())
"""A token of an emulated model is a byte of text."""

PATTERNS = {
    "text": MARK.encode(),  # which token ids in msgpack are, too
    "token ids in JSON": ",".join(map(str, IDS)).encode(),
    "token ids in JSON, spaced": ", ".join(map(str, IDS)).encode(),
    "token ids": pack_tokens(IDS),
}

CLIENTS = ("gold", "silver", "tin")
PLENTY = ["--quantum", "100", "--max-running", "4", "--time-scale", "1.5"]
SHARED_TOKENS = 256


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


def document(client: str) -> list[int]:
    """What all prompts of a client begin with."""
    random = Random(client)
    return [random.randrange(97, 123) for _ in range(SHARED_TOKENS)]


async def cut(site: FarSite, cable: Cable) -> dict[str, Any]:
    """The cable is cut and healed under load."""
    load = Load(*site.urls, tls=site.tls)
    await load.goes_on()
    assert not load.failed(), load.outcomes
    cable.set("down")

    async def all_sick() -> bool:
        states = [await site.status(at) for at in range(len(site.gateways))]
        return all(len(state["gateway"]["sick"]) == len(site.replicas) for state in states)

    await eventually(all_sick, "the gateways miss the replicas")
    await eventually(lambda: load.failed() > 0, "clients are told")
    cable.set("up")
    await site.all_up()
    served = load.outcomes["served"]
    await load.goes_on()
    await load.stop()
    await site.quiet()
    check_conservation(*[await site.book(one) for one in site.replicas])
    again = load.outcomes["served"] - served
    return {"failed": load.failed(), "served when it was healed": again, "tree": await tree(site)}


async def tree(site: FarSite) -> dict[str, Any]:
    """Whether routers know what replicas have cached: what they predict for prompts, and what was there."""
    before = (await site.status())["hits"]
    for turn in range(4):
        for client in CLIENTS:
            body = {"prompt": document(client) + [97 + turn] * 40, "max_tokens": 2, "temperature": 0}
            async with site.http.post(
                f"{site.urls[turn % 2]}/v1/completions", json=body, headers={"x-fair-client": client}
            ) as answer:
                assert answer.status == 200, await answer.text()
    await site.quiet()
    after = (await site.status())["hits"]
    found = {name: after[name] - before[name] for name in after}
    return {"prompts": 4 * len(CLIENTS), **found}


async def checked(name: str, check: Callable[[], Awaitable[dict[str, Any]]]) -> None:
    began = time.monotonic()
    found = await check()
    print(json.dumps({name: found}), flush=True)
    print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


async def main(folder: Path, forks: list[socket.socket]) -> None:
    cable = Cable()
    try:
        async with FarSite(cable, forks, folder / "plain", is_secure=False, replicas=1, fronts=1) as plain:
            await checked("overheard without keys", lambda: overheard(plain))
        site = FarSite(cable, forks, folder / "secure", is_secure=True, replicas=2, fronts=2, options=PLENTY)
        async with site:
            await checked("overheard", lambda: overheard(site))
            await checked("cut", lambda: cut(site, cable))
    finally:
        cable.close()


if __name__ == "__main__":
    connections = [socket.socket(fileno=int(number)) for number in sys.argv[2:]]
    asyncio.run(main(Path(sys.argv[1]), connections))
    print('"ok"')
