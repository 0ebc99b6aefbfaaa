"""Follows lists of replicas in a thread of its own, and tells the router's loop as any peer does."""

import asyncio
import logging
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import aiohttp
import zmq
import zmq.asyncio

from router.events import Follow, ProtocolError, WorkerDrain, Workers, WorkerUp, decode_answer, encode
from router.replica_lists.listing import Listing
from router.replica_lists.sources import Source
from router.shell import INSIDE
from sglang_fair.common.service_keys import replica_key

log = logging.getLogger("router")

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 5.0


@contextmanager
def following(
    sources: Sequence[Source],
    context: "zmq.Context[zmq.Socket[bytes]]",
    tls: ssl.SSLContext | None = None,
) -> Iterator[None]:
    """Tells the router whose sockets are `context`'s of the replicas that `sources` list. `tls` is for https://
    addresses; None: as the system believes."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(_follow(sources, context, stop, tls)),
        name="replicas",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


async def _follow(
    sources: Sequence[Source],
    context: "zmq.Context[zmq.Socket[bytes]]",
    stop: asyncio.Event,
    tls: ssl.SSLContext | None,
) -> None:
    inner = zmq.asyncio.Context.shadow(context.underlying)
    with inner.socket(zmq.DEALER, zmq.asyncio.Socket) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.connect(INSIDE)
        async with aiohttp.ClientSession(
            headers=replica_key.headers(),
            connector=aiohttp.TCPConnector(ssl=tls or True),
            timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S),
        ) as session:
            followers = {str(one): Follower(one, router, session) for one in sources}
            tasks = [asyncio.create_task(one.run()) for one in followers.values()]
            others = [asyncio.create_task(stop.wait()), asyncio.create_task(_hear(router, followers))]
            await asyncio.wait([*tasks, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in (*tasks, *others):
                task.cancel()
            ended = await asyncio.gather(*tasks, others[1], return_exceptions=True)
    for one, error in zip((*followers, "the router"), ended, strict=True):
        if isinstance(error, Exception):
            log.error("%s is followed no more", one, exc_info=error)


async def _hear(router: zmq.asyncio.Socket, followers: Mapping[str, "Follower"]) -> None:
    """Passes on the router's answers, until it is cancelled."""
    while True:
        message = await router.recv()
        try:
            answer = decode_answer(message)
        except ProtocolError as error:
            log.warning("ignored a message of the router: %s", error)
            continue
        if isinstance(answer, Workers) and answer.id in followers:
            await followers[answer.id].hear(answer)


class Follower:
    """Looks at one source, and probes what it lists."""

    def __init__(self, source: Source, router: zmq.asyncio.Socket, session: aiohttp.ClientSession) -> None:
        self._source = source
        self._router = router
        self._session = session
        self._listing = Listing(str(source))
        self._probing: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
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
            await self._tell(events)
        if self._source.is_settled:
            await self._router.send(encode(Follow(str(self._source))))

    async def hear(self, workers: Workers) -> None:
        """The router has these workers, as it was asked at a look."""
        await self._tell(self._listing.lost(workers))

    async def _probe(self, up: WorkerUp) -> None:
        try:
            async with self._session.get(f"{up.url.rstrip('/')}/ready") as response:
                is_ready = response.status != 503
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            is_ready = False
        finally:
            del self._probing[up.worker]
        if is_ready:
            await self._tell(self._listing.ready(up))

    async def _tell(self, events: Sequence[WorkerUp | WorkerDrain]) -> None:
        for event in events:
            how = "is ready" if isinstance(event, WorkerUp) else "is listed no more: it is drained"
            log.info("%s: worker %s %s", self._source, event.worker, how)
            await self._router.send(encode(event))
