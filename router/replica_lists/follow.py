"""Follows lists of replicas, in the router's loop."""

import asyncio
import logging
import ssl
from collections.abc import Sequence

import aiohttp

from router.events import WorkerDrain, WorkerUp
from router.replica_lists.listing import Listing
from router.replica_lists.sources import Source
from router.shell import Shell
from sglang_fair.common.service_keys import replica_key

log = logging.getLogger("router")

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 5.0


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
        """Looks once, and tells the router what has changed."""
        ups = await self._source.look()
        if ups is not None:
            events = self._listing.found(ups)
            log.info("%s lists %d replicas", self._source, len(self._listing))
            self._tell(events)
        if self._source.is_settled:
            self._tell(self._listing.lost(self._shell.listing()))

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
