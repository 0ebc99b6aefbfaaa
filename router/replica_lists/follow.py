"""Follows lists of replicas, a file and the addresses of a DNS name, in the router's loop.

A list that is just being written, or a name server that is being started, does not say which replicas are gone. So what
is found is used when the look before has found the same, or no look was before; and only what was used, and is found
again, says which replicas of the router are on a list no more.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from router.events import WorkerDrain, WorkerUp
from router.replica_lists.listing import Listing
from router.replica_lists.specs import Name, lines
from router.shell import Shell
from sglang_fair.common.service_keys import replica_key

log = logging.getLogger("router")

FILE_EVERY_S = 1.0
DNS_TIMEOUT_S = 10.0
PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Source:
    """A file with a replica in each line (`specs.lines`), of which one with a line that cannot be read changes nothing
    and an empty one drains all; or the A and AAAA records of a name, as this machine resolves names, each address a
    replica. Without addresses nothing changes: a name server that is being restarted may say so for a while."""

    where: Path | Name
    every_s: float = FILE_EVERY_S

    def __str__(self) -> str:
        return f"{'file' if isinstance(self.where, Path) else 'name'} {self.where}"

    async def read(self) -> str:
        """The file's text; the addresses, one in a line."""
        if isinstance(self.where, Path):
            return self.where.read_text()
        host, port, loop = self.where.host, self.where.port, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(DNS_TIMEOUT_S):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except TimeoutError:
            raise OSError(f"no answer within {DNS_TIMEOUT_S:g} s") from None
        return "\n".join(sorted({str(address[0]) for *_, address in found}))

    def replicas(self, found: str) -> list[WorkerUp]:
        """What was read means these. ValueError."""
        if isinstance(self.where, Path):
            return lines(found)
        return [self.where.worker(address) for address in found.split("\n")]


async def follow(sources: Sequence[Source], shell: Shell, tls: ssl.SSLContext | None = None) -> None:
    """Tells the router of the replicas that `sources` list, until it is cancelled. `tls` is for https:// addresses;
    None: as the system believes."""
    async with (
        aiohttp.ClientSession(
            headers=replica_key.headers(),
            connector=aiohttp.TCPConnector(ssl=tls or True),
            timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S),
        ) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for source in sources:
            tasks.create_task(Follower(source, shell, session).run())


class Follower:
    """Looks at one source, and probes what it lists."""

    def __init__(self, source: Source, shell: Shell, session: aiohttp.ClientSession) -> None:
        self._source = source
        self._shell = shell
        self._session = session
        self._listing = Listing(str(source))
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._is_first = True
        self._found: str | None = None
        """By the last look that found anything."""
        self._used: str | None = None
        self._complaint = ""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        next_look_s = loop.time()
        try:
            while True:
                if loop.time() >= next_look_s:
                    next_look_s = loop.time() + self._source.every_s
                    await self.look()
                for up in self._listing.waiting():
                    if up.worker not in self._probing:
                        self._probing[up.worker] = asyncio.create_task(self._probe(up))
                await asyncio.sleep(min(PROBE_EVERY_S, max(0.0, next_look_s - loop.time())))
        finally:
            for task in self._probing.values():
                task.cancel()

    async def look(self) -> None:
        """Looks once, and tells the router what has changed. What is wrong with the list is logged, once."""
        is_first, self._is_first = self._is_first, False
        try:
            before, self._found = self._found, await self._source.read()
            if self._found == self._used:
                self._tell(self._listing.lost(self._shell.listing()))
            elif is_first or self._found == before:
                ups = self._source.replicas(self._found)
                self._used = self._found
                events = self._listing.found(ups)
                log.info("%s lists %d replicas", self._source, len(self._listing))
                self._tell(events)
            else:
                return
        except (OSError, ValueError) as error:  # of which UnicodeError is one
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            if reason != self._complaint:
                log.warning("%s: %s: the replicas of before stay", self._source, reason)
            self._complaint = reason
            return
        self._complaint = ""

    async def _probe(self, up: WorkerUp) -> None:
        try:
            async with self._session.get(f"{up.url.rstrip('/')}/ready") as response:
                is_ready = response.status != 503
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            is_ready = False
        finally:
            del self._probing[up.worker]
        if is_ready:
            self._tell(self._listing.ready(up))

    def _tell(self, events: Sequence[WorkerUp | WorkerDrain]) -> None:
        for event in events:
            how = "is ready" if isinstance(event, WorkerUp) else "is listed no more: it is drained"
            log.info("%s: worker %s %s", self._source, event.worker, how)
            self._shell.tell(event)
