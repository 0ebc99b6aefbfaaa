"""The tenants of the file, as one gateway process knows them; the file is read again when it changes.

Rule. The file is looked at every `LOOK_S`, and read when two looks in a row have found the same new state of it, so
that one that is being written is left alone. If it cannot be read, or is wrong, what was known stays, and the failure
is counted once for each state of the file. Leak: a writer that pauses for longer than `LOOK_S` may leave a beginning
that is right by itself; `sglang-fair tenants` replaces the file at once, and so should others.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from sglang_fair.common.caller import Caller
from sglang_fair.tenants import file, keys
from sglang_fair.tenants.model import Tenant, Tenants

log = logging.getLogger("gateway")

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
    """Belongs to one event loop. Reading happens in a thread."""

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
