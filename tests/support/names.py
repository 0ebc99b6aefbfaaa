"""A network of this process's own, in which it is the name server: run it as `unshare -rmn python -m …`.

The resolver is the system's. `main` follows a name with a real router, adds and removes addresses, and prints `ok`.
"""

import asyncio
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from aiohttp import web

from sglang_fair.cluster.workers import router_state
from tests.support.waiting import eventually

NAME = "replicas.test"
PORT = 8000
KINDS = {1: socket.AF_INET, 28: socket.AF_INET6}
"""Types of records, A and AAAA."""


class NameServer(asyncio.DatagramProtocol):
    """Answers with `addresses`; with `is_broken` it fails."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()
        self.is_broken = False
        self.asked = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = transport

    def datagram_received(self, data: bytes, peer: object) -> None:
        self.asked += 1
        end = data.index(b"\0", 12) + 5
        kind = int.from_bytes(data[end - 4 : end - 2], "big")
        family = KINDS.get(kind)
        found = [a for a in self.addresses if family and (":" in a) == (family is socket.AF_INET6)]
        code = 2 if self.is_broken else 0 if self.addresses else 3
        records = b"".join(
            b"\xc0\x0c" + kind.to_bytes(2, "big") + b"\0\1\0\0\0\0" + len(raw).to_bytes(2, "big") + raw
            for raw in (socket.inet_pton(KINDS[kind], address) for address in found if not code)
        )
        count = len(found) if not code else 0
        head = data[:2] + bytes([0x84, 0x80 | code]) + b"\0\1" + count.to_bytes(2, "big") + b"\0\0\0\0"
        self._wire.sendto(head + data[12:end] + records, peer)  # type: ignore[attr-defined]


class FakeReplica:
    """Says whether it is ready."""

    def __init__(self) -> None:
        self.status = 200
        self.probes = 0

    async def ready(self, _: web.Request) -> web.Response:
        self.probes += 1
        return web.Response(status=self.status)

    async def start(self, address: str, port: int = PORT) -> str:
        """Its URL."""
        app = web.Application()
        app.add_routes([web.get("/ready", self.ready)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, address, port).start()
        return f"http://{address}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()


def become_network() -> None:
    """Brings up loopback, and makes this process's server the one that the resolver asks."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    made = Path(tempfile.mkstemp()[1])
    made.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    subprocess.run(["mount", "--bind", str(made), "/etc/resolv.conf"], check=True)


async def body() -> None:
    _, server = await asyncio.get_running_loop().create_datagram_endpoint(
        NameServer, local_addr=("127.0.0.1", 53)
    )
    replicas = {address: FakeReplica() for address in ("127.0.0.2", "127.0.0.3", "::1")}
    for address, replica in replicas.items():
        await replica.start(address)
    bound = "tcp://127.0.0.1:5555"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "--bind", bound, "--replicas-every", "0.1",
        "--replicas-dns", f"{NAME}:{PORT},kv=9000,replay=9001",
    )  # fmt: skip

    async def lists(*addresses: str) -> bool:
        return set(await router_state(bound, "workers") or ()) == {
            f"{address}:{PORT}" for address in addresses
        }

    async def asked_again() -> None:
        before = server.asked
        await eventually(lambda: server.asked >= before + 4, "it is asked again")

    try:
        await asked_again()
        assert await lists(), "a name without addresses is nobody"
        server.addresses = {"127.0.0.2", "::1"}
        await eventually(lambda: lists("127.0.0.2", "::1"), "both kinds of addresses are replicas")
        known = await router_state(bound, "workers") or {}
        assert known[f"::1:{PORT}"]["url"] == f"http://[::1]:{PORT}"
        assert known[f"127.0.0.2:{PORT}"]["kv"] == "tcp://127.0.0.2:9000"
        late = replicas["127.0.0.3"]
        late.status = 503
        server.addresses = {"127.0.0.2", "127.0.0.3"}
        await eventually(lambda: lists("127.0.0.2"), "one is gone, another not ready")
        await eventually(lambda: late.probes >= 2, "it is probed again")
        assert await lists("127.0.0.2")
        late.status = 200
        await eventually(lambda: lists("127.0.0.2", "127.0.0.3"), "it is ready")
        for broken in (True, False):
            server.is_broken, server.addresses = broken, set()
            await asked_again()
            assert await lists("127.0.0.2", "127.0.0.3"), "a name server that fails takes nobody away"
        server.is_broken, server.addresses = False, {"127.0.0.3"}
        await eventually(lambda: lists("127.0.0.3"), "it follows again")
    finally:
        process.terminate()
        await process.wait()


if __name__ == "__main__":
    become_network()
    asyncio.run(body())
    print("ok")
