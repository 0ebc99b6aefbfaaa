"""The replicas' addresses as gateways write them, `ip:port`, and which of them a request may go to."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from router.events import WorkerUp
from router.gateway.routing.fleet import Fleet

log = logging.getLogger("picker")

LOOK_S = 5.0
"""Between two times that the names in replicas' addresses are looked up."""

Subset = Collection[str] | None
"""Addresses, or IPs for all their ports, that a gateway allows; None: any."""


class Endpoints:
    """Of the replicas that the routers name. Belongs to one event loop."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._ips: dict[str, str] = {}
        """Of the names in addresses."""
        self._known: Mapping[str, WorkerUp] = {}
        self._by_worker: dict[str, str] = {}
        self._by_address: dict[str, str] = {}

    async def run(self) -> None:
        """Looks names up, until it is cancelled."""
        while True:
            for up in tuple(self._fleet.workers.values()):
                host = urlsplit(up.url).hostname or ""
                if _ip(host) is None:
                    await self._look_up(host)
            self._known = {}
            await asyncio.sleep(LOOK_S)

    def of(self, worker: str) -> str | None:
        """None: it has none, or its name is not known yet."""
        self._read()
        return self._by_worker.get(worker)

    def worker_at(self, address: str) -> str:
        """The name of the replica there; if none is known, the address."""
        self._read()
        return self._by_address.get(address, address)

    def excluded(self, subset: Subset) -> tuple[str, ...]:
        """The replicas outside of it."""
        if subset is None:
            return ()
        self._read()
        return tuple(name for name in self._fleet.workers if not _is_in(self._by_worker.get(name), subset))

    def able(self, subset: Subset, most: int, first: str | None = None) -> list[str]:
        """At most so many addresses: that of the replica `first`, and of others that are well and have its model, the
        least loaded first. None at all if `first` is not in the subset."""
        self._read()
        fleet, found = self._fleet, list[str]()
        if first is not None:
            address = self._by_worker.get(first)
            if address is None or not _is_in(address, subset):
                return []
            found.append(address)
        model = None if first is None else fleet.workers[first].loaded
        if len(found) < most:
            others = [
                name
                for name, address in self._by_worker.items()
                if name != first
                and model in (None, fleet.workers[name].loaded)
                and fleet.takes_more(name)
                and _is_in(address, subset)
            ]
            others.sort(key=lambda name: fleet.in_flight[name] / fleet.workers[name].capacity)
            found += [self._by_worker[name] for name in others[: most - len(found)]]
        return found

    def _read(self) -> None:
        """The routers may have named others."""
        if self._known is self._fleet.workers:
            return
        self._known = self._fleet.workers
        self._by_worker = {
            name: address for name, up in self._known.items() if (address := self._address(up.url))
        }
        self._by_address = {address: name for name, address in self._by_worker.items()}

    def _address(self, url: str) -> str | None:
        parts = urlsplit(url)
        ip = _ip(host := parts.hostname or "") or self._ips.get(host)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return None if ip is None else f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"

    async def _look_up(self, host: str) -> None:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:  # the one before stays
            log.warning("%s: %s", host, error)
            return
        self._ips[host] = str(found[0][4][0])


def _ip(host: str) -> str | None:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def _is_in(address: str | None, subset: Subset) -> bool:
    if subset is None:
        return address is not None
    return address is not None and (
        address in subset or address.rpartition(":")[0].strip("[]") in {one.strip("[]") for one in subset}
    )
