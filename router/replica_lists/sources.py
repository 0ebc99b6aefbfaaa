"""Reads lists of replicas: a file, and the addresses of a DNS name."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from router.events import WorkerUp
from router.replica_lists.specs import Name, lines

log = logging.getLogger("router")

FILE_EVERY_S = 1.0
DNS_TIMEOUT_S = 10.0

Signature = tuple[int, int, int]


class Source(Protocol):
    """A list of replicas that somebody else keeps."""

    every_s: float
    """Between two looks at it."""
    is_settled: bool
    """Whether the last look found what the one before did. A list that is just being written, or a name server that
    is being started, does not say whom it lists no more."""

    async def look(self) -> Sequence[WorkerUp] | None:
        """Those that it lists; None: it says nothing that is new and can be used. What is wrong is logged, once."""
        ...


class ReplicaFile:
    """A file with a replica in each line (`specs.lines`).

    A file that is being written may be half there. So one that has changed is read when it has been the same for two
    looks, and one with a line that cannot be read changes nothing. An empty one lists nobody: that is how all are
    drained.
    """

    every_s = FILE_EVERY_S

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: Signature | None = None
        self._seen: Signature | None = None
        self._is_first = True
        self._complaint = ""
        self.is_settled = False

    def __str__(self) -> str:
        return f"file {self._path}"

    def check(self) -> None:
        """Raises ValueError if the file is there and cannot be used."""
        try:
            lines(self._path.read_text())
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self._path}: {_reason(error)}") from None
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}") from None

    async def look(self) -> Sequence[WorkerUp] | None:
        """The replicas in it, when it has changed."""
        is_first, self._is_first = self._is_first, False
        self.is_settled = False
        try:
            signature = self._signature()
            may_read = signature == self._seen or is_first
            self._seen = signature
            if signature == self._read:
                self.is_settled, self._complaint = True, ""
                return None
            if not may_read:
                return None
            text = self._path.read_text()
            if self._signature() != signature:  # somebody writes it just now
                return None
            ups = lines(text)
        except (OSError, ValueError) as error:  # of which UnicodeDecodeError is one
            self._complain(_reason(error))
            return None
        self._read, self._complaint = signature, ""
        return ups

    def _signature(self) -> Signature:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            log.warning("%s: %s: the replicas of before stay", self, text)


class DnsName:
    """The A and AAAA records of a name, as this machine resolves names. Each address is a replica.

    Without addresses nothing changes: a name server that is being restarted may say so for a while.
    """

    def __init__(self, name: Name, every_s: float) -> None:
        self.every_s = every_s
        self._name = name
        self._listed: frozenset[str] | None = None
        self._complaint = ""
        self.is_settled = False

    def __str__(self) -> str:
        return f"name {self._name}"

    async def look(self) -> Sequence[WorkerUp] | None:
        """The replicas at its addresses, when these have changed."""
        self.is_settled = False
        resolving = asyncio.get_running_loop().getaddrinfo(
            self._name.host, self._name.port, type=socket.SOCK_STREAM
        )
        try:
            found = await asyncio.wait_for(resolving, DNS_TIMEOUT_S)
        except (OSError, UnicodeError) as error:  # of which TimeoutError is one
            if _reason(error) != self._complaint:
                self._complaint = _reason(error)
                log.warning("%s: %s: the replicas of before stay", self, self._complaint)
            return None
        self._complaint = ""
        addresses = frozenset(str(address[0]) for *_, address in found)
        if addresses == self._listed:
            self.is_settled = True
            return None
        self._listed = addresses
        return [self._name.worker(address) for address in sorted(addresses)]


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not error.args:
        return f"no answer within {DNS_TIMEOUT_S:g} s"
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
