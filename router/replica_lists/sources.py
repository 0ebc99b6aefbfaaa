"""Reads lists of replicas: a file, and the addresses of a DNS name.

A list that is just being written, or a name server that is being started, does not say which replicas are gone: `look`
finds what is new, and `is_settled` says whether the last look found what the one before did.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

from router.events import WorkerUp
from router.replica_lists.specs import Name, lines

log = logging.getLogger("router")

FILE_EVERY_S = 1.0
DNS_TIMEOUT_S = 10.0

Signature = tuple[int, int, int]


class Source:
    """A list that is kept elsewhere. `every_s`: between two looks at it."""

    every_s = FILE_EVERY_S

    def __init__(self) -> None:
        self.is_settled = False
        self._complaint = ""

    async def look(self) -> Sequence[WorkerUp] | None:
        """Those that it lists; None: nothing that is new and can be used. What is wrong is logged, once."""
        self.is_settled = False
        try:
            found = await self._read()
        except (OSError, ValueError) as error:  # of which TimeoutError and UnicodeError are some
            if (reason := _reason(error)) != self._complaint:
                self._complaint = reason
                log.warning("%s: %s: the replicas of before stay", self, reason)
            return None
        if self.is_settled or found is not None:
            self._complaint = ""
        return found

    async def _read(self) -> Sequence[WorkerUp] | None:
        """As `look`; sets `is_settled`."""
        raise NotImplementedError


class ReplicaFile(Source):
    """A file with a replica in each line (`specs.lines`). One that has changed is read when it was the same for two
    looks, and one with a line that cannot be read changes nothing. An empty one drains all."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._was_read: Signature | None = None
        self._seen: Signature | None = None
        self._is_first = True

    def __str__(self) -> str:
        return f"file {self._path}"

    def check(self) -> None:
        """Raises ValueError if the file is there and cannot be used."""
        try:
            lines(self._path.read_text())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._path}: {_reason(error)}") from None

    async def _read(self) -> Sequence[WorkerUp] | None:
        is_first, self._is_first = self._is_first, False
        signature = self._signature()
        may_read = signature == self._seen or is_first
        self._seen = signature
        self.is_settled = signature == self._was_read
        if self.is_settled or not may_read:
            return None
        text = self._path.read_text()
        if self._signature() != signature:  # it is just being written
            return None
        found = lines(text)
        self._was_read = signature
        return found

    def _signature(self) -> Signature:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino


class DnsName(Source):
    """The A and AAAA records of a name, as this machine resolves names. Each address is a replica. Without addresses
    nothing changes: a name server that is being restarted may say so for a while."""

    def __init__(self, name: Name, every_s: float) -> None:
        super().__init__()
        self.every_s = every_s
        self._name = name
        self._listed: frozenset[str] | None = None

    def __str__(self) -> str:
        return f"name {self._name}"

    async def _read(self) -> Sequence[WorkerUp] | None:
        resolving = asyncio.get_running_loop().getaddrinfo(
            self._name.host, self._name.port, type=socket.SOCK_STREAM
        )
        found = await asyncio.wait_for(resolving, DNS_TIMEOUT_S)
        addresses = frozenset(str(address[0]) for *_, address in found)
        self.is_settled = addresses == self._listed
        if self.is_settled:
            return None
        self._listed = addresses
        return [self._name.worker(address) for address in sorted(addresses)]


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not error.args:
        return f"no answer within {DNS_TIMEOUT_S:g} s"
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
