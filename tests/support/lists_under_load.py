"""Replicas that are listed and struck off while clients ask: by a file, and by the addresses of a DNS name.

Run as `unshare -rmn python -m …`, this asks dnsmasq, through the system's resolver, and prints `ok`.
"""

import asyncio
import contextlib
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.support.names import NAME, become_network
from tests.support.site import Process, Site
from tests.support.stand_in import make_tokenizer
from tests.support.steady_load import Load
from tests.support.waiting import eventually, wait_until

PORT = 8000
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")

List = Callable[[Sequence[str]], None]
"""Lists these replicas and no others."""


async def come_and_go(site: Site, listed: List) -> None:
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


def of_addresses(tokenizer: Path, options: Sequence[str]) -> Site:
    """Two routers and gateways; the replicas are called as a name's addresses are."""
    site = Site(tokenizer, replicas=0, gateways=2, routers=2, step_s=0.01, router_options=tuple(options))
    for address in ADDRESSES:
        name = f"{address}:{PORT}"
        site.urls[name] = f"http://{name}"
        site.replicas[name] = Process(
            address, "tests.support.stand_in", "--host", address, "--port", str(PORT),
            "--tokenizer", str(tokenizer), "--step", str(site.step_s),
        )  # fmt: skip
    return site


@contextlib.contextmanager
def name_server(folder: Path) -> Iterator[List]:
    """dnsmasq, at this network's own port 53."""
    hosts = folder / "hosts"
    hosts.write_text("")
    command = [
        "dnsmasq", "--no-daemon", "--no-resolv", "--no-hosts", f"--addn-hosts={hosts}", "--local-ttl=0",
        "--listen-address=127.0.0.1", "--bind-interfaces", "--pid-file=",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:

        def listed(names: Sequence[str]) -> None:
            hosts.write_text("".join(f"{name.rpartition(':')[0]} {NAME}\n" for name in names))
            process.send_signal(signal.SIGHUP)  # it reads its files again

        def listens() -> bool:
            assert process.poll() is None, "dnsmasq has ended"
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", 53)) == 0

        try:
            wait_until(listens, "dnsmasq")  # the signal would end it before
            yield listed
        finally:
            process.terminate()


async def main() -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        site = of_addresses(
            make_tokenizer(folder), ("--replicas-dns", f"{NAME}:{PORT}", "--replicas-every", "0.2")
        )
        with name_server(folder) as listed:
            async with site:
                await come_and_go(site, listed)


if __name__ == "__main__":
    become_network()
    asyncio.run(main())
    print("ok")
