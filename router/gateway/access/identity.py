"""From a request's key and headers to its caller.

Rule. With a tenants' file, a request's caller is the tenant whose key it has, or, from a trusted proxy, the tenant that
the first identity header names; anything else is refused with 401. Without one, `common.identity` says who the client
is. A header from elsewhere than a trusted proxy is ignored and counted; without a file and without `--trusted-proxies`
every header is believed. The feeder of batches, which has the key in `SGLANG_FAIR_FEEDER_KEY`, asks as whichever client
`HEADER_ON_BEHALF` names; whoever sends another key there is refused.
"""

import asyncio
import ipaddress
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from router.gateway.errors import ApiError
from router.gateway.metrics import Count
from sglang_fair.common.caller import HEADER_WEIGHT, Caller
from sglang_fair.common.identity import API_KEY, DEFAULT_ORDER, USER, api_key, bounded, identify
from sglang_fair.common.service_keys import is_same
from sglang_fair.tenants import file, keys
from sglang_fair.tenants.model import Tenant, Tenants

log = logging.getLogger("gateway")

HEADER_FEEDER = "x-fair-feeder"
"""The feeder's key."""
HEADER_ON_BEHALF = "x-fair-on-behalf-of"
"""The client whose request the feeder sends."""

HEADER_STANDS_FOR = "x-fair-stands-for"
"""How many lines of a batch, this one among them, wait for the feeder to send them. Of others it is ignored."""

MOST_DIGITS = 9

Headers = Mapping[str, str]
Peer = Sequence[Any] | None


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
"""Of trusted proxies, whose headers are believed."""


def is_trusted(networks: Sequence[Network], peer: Sequence[Any] | None) -> bool:
    """Whether the peer, (host, port), of a connection stands in one of the networks."""
    if not networks or not peer:
        return False
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:  # a Unix socket, or a name
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in network for network in networks)


LOOK_S = 0.5
"""Between two looks at the file."""

_State = tuple[int, int, int, int, int] | str


class Known(NamedTuple):
    """A request's caller, and its tenant; None where there is no file."""

    tenant: Tenant | None
    caller: Caller
    stands_for: int = 1
    """Of the feeder: requests like this one that it has, this one among them."""


class Directory:
    """The tenants of the file, as one gateway process knows them. Belongs to one event loop.

    Rule. The file is looked at every `LOOK_S`, and read, in a thread, when two looks in a row have found the same new
    state of it, so that one that is being written is left alone. If it cannot be read, or is wrong, what was known
    stays, and the failure is counted once for each state of the file. Leak: a writer that pauses for longer than
    `LOOK_S` may leave a beginning that is right by itself; `sglang-fair tenants` replaces the file at once, and so
    should others.
    """

    def __init__(self, path: Path) -> None:
        """Reads the file at once. Raises SettingError if it cannot."""
        self._path = path
        self._seen = self._read_state = _state(path)
        self._by_name: Mapping[str, Known] = {}
        self._by_digest: Mapping[bytes, Known] = {}
        self.reloads = 0
        self.failures = 0
        """States of the file that could not be used."""
        self.error = ""
        """Why the newest state cannot be used; "" if it is in force."""
        self._version = 0
        """Of what is in force, by which routers and replicas know the newer of two weights."""
        self._take(file.read(path))

    def by_name(self, name: str) -> Known | None:
        return self._by_name.get(name)

    def by_key(self, key: str) -> Known | None:
        """The tenant that has this key. It is found by its digest, so the time tells nothing of other keys: nobody can
        steer a SHA-256."""
        return self._by_digest.get(keys.digest(key))

    def state(self) -> dict[str, object]:
        return {
            "tenants": len(self._by_name),
            "reloads": self.reloads,
            "failures": self.failures,
            "error": self.error,
        }

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        seen = await asyncio.to_thread(_state, self._path)
        if seen != self._seen:
            self._seen = seen
        elif seen != self._read_state:
            self._read_state = seen
            await self._read()

    async def _read(self) -> None:
        try:
            found = await asyncio.to_thread(file.read, self._path)
        except Exception as error:  # whatever a file may hold
            self.failures += 1
            self.error = str(error)
            log.error("the tenants stay as they were: %s", error)
            return
        self.reloads += 1
        self.error = ""
        self._take(found)
        log.info("%s: %d tenants", self._path, len(found.tenants))

    def _take(self, found: Tenants) -> None:
        # Of a shared file all gateways see the same time. A copy that was put back with the time when it was written
        # has a new time of change all the same.
        changed_ns = self._read_state[0] if isinstance(self._read_state, tuple) else 0
        self._version = max(changed_ns, self._version + 1)
        self._by_name = {
            name: Known(tenant, Caller(name, tenant.weight, tenant.cache_group, self._version))
            for name, tenant in found.tenants.items()
        }
        self._by_digest = {
            keys.read(one): self._by_name[name]
            for name, tenant in found.tenants.items()
            for one in tenant.keys
        }


def _state(path: Path) -> _State:
    """What changes when the file does."""
    try:
        found = os.stat(path)
    except OSError as error:
        return f"{error.strerror or error}"
    return found.st_ctime_ns, found.st_mtime_ns, found.st_ino, found.st_dev, found.st_size


class Identity:
    """Who asks. Belongs to one event loop."""

    def __init__(
        self,
        order: Sequence[str],
        count: Count,
        directory: Directory | None = None,
        trusted: Sequence[Network] | None = None,
        feeder_key: str = "",
    ) -> None:
        """`order` is where a name is looked for (`common.identity`); `trusted` is None where nothing was said. Without
        a `feeder_key` nobody is the feeder."""
        self.directory = directory
        self._feeder_key = feeder_key
        self._count = count
        self._order = order
        self._unheaded = [place for place in order if place in (API_KEY, USER)]
        self._headers = [place for place in order if place not in (API_KEY, USER)]
        self._counted = {one for one in (*order, *DEFAULT_ORDER, HEADER_WEIGHT) if one not in (API_KEY, USER)}
        self._trusted = trusted
        self._believes_all = directory is None and trusted is None

    @property
    def reads_user(self) -> bool:
        """Whether the body may name the client."""
        return self.directory is None and USER in self._order

    def of(self, headers: Headers, peer: Peer, user: str | None = None) -> Known:
        """The caller of a request from `peer`, and its tenant. Raises `ApiError` 401. Call it once with `user`, the
        body's field, and once without where that is not known yet; what is ignored is counted without only.
        """
        if self._feeder_key and HEADER_FEEDER in headers:
            return self._on_behalf(headers)
        if self._believes_all:
            return _client(headers, user, self._order)
        is_believed = is_trusted(self._trusted or (), peer)
        if not is_believed and user is None:
            for name in self._counted.intersection(headers):
                self._count("ignored_headers_total", name)
        if self.directory is None:
            return _client(headers, user, self._order if is_believed else self._unheaded)
        if is_believed and (named := next((headers[one] for one in self._headers if headers.get(one)), None)):
            found = self.directory.by_name(named.strip())
            if found is None:
                raise _refused("the proxy names no tenant", "unknown_tenant")
            return found
        key = api_key(headers)
        if not key:
            raise _refused(
                "no API key: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`", "missing_api_key"
            )
        found = self.directory.by_key(key)
        if found is None:
            raise _refused("this API key is not known here", "invalid_api_key")
        return found

    def _on_behalf(self, headers: Headers) -> Known:
        if not is_same(headers[HEADER_FEEDER], self._feeder_key):
            raise _refused("this is not the feeder's key", "invalid_feeder_key")
        name = headers.get(HEADER_ON_BEHALF, "")
        found = Known(None, Caller(bounded(name))) if self.directory is None else self.directory.by_name(name)
        if found is None or not name:
            raise _refused("the feeder names no tenant", "unknown_tenant")
        return found._replace(stands_for=_count(headers.get(HEADER_STANDS_FOR, "")))


def _count(text: str) -> int:
    """1 for what is no number that can be."""
    return max(1, int(text)) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else 1


def _client(headers: Headers, user: str | None, order: Sequence[str]) -> Known:
    return Known(None, Caller(identify(headers, user, order)))


def _refused(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"})
