"""The feeder's connections to routers: it hears of the replicas, and tells what waits. One ZMQ DEALER socket each."""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import zmq
import zmq.asyncio

from router.events import Answer, Backlog, Event, Follow, ProtocolError, Workers, decode_answer, encode
from router.silence import OwnTime
from router.wire import HEARTBEAT, HEARTBEAT_ANSWER
from sglang_fair.common.curve import Keys

log = logging.getLogger("feeder")

HEARTBEAT_S = 1.0
SILENT_S = 5.0
"""A router that has not answered for so long is gone."""


def by_model(workers: Workers) -> Mapping[str, int]:
    """How many replicas take requests of each model; "" where there is one that nobody names."""
    out = {*workers.draining, *workers.sick}
    found: Counter[str] = Counter()
    for up in workers.workers:
        if up.worker not in out:
            found.update(set(up.models) or {""})
    return found


class _Side:
    """One router."""

    def __init__(
        self, context: zmq.asyncio.Context, address: str, hear: Callable[[Answer], None], keys: Keys | None
    ) -> None:
        self._context, self._address, self._hear, self._keys = context, address, hear, keys
        self.workers: Workers | None = None
        self._time = OwnTime(2 * HEARTBEAT_S)
        self._echo_s = float("-inf")
        self._open()

    @property
    def alive(self) -> bool:
        return self._time.look(time.monotonic()) - self._echo_s < SILENT_S

    def send(self, event: Event) -> None:
        self._send(encode(event))

    async def read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if frames == [HEARTBEAT]:  # our own came back, see HEARTBEAT_ANSWER
                self.close()
                self._open()
                continue
            self._echo_s = self._time.look(time.monotonic())
            if frames == [HEARTBEAT_ANSWER]:
                continue
            try:
                answer = decode_answer(b"".join(frames))
            except ProtocolError as error:
                log.debug("ignored a message of the router: %s", error)
                continue
            if isinstance(answer, Workers):
                self.workers = answer
            self._hear(answer)

    async def beat(self) -> None:
        while True:
            was_alive = self.alive
            self._send(HEARTBEAT)
            if not was_alive or self.workers is None:
                self.send(Follow(""))
            await asyncio.sleep(HEARTBEAT_S)

    def close(self) -> None:
        self._socket.close(0)

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 200),
            (zmq.IMMEDIATE, 1),
            (zmq.SNDHWM, 1000),
            (zmq.RCVHWM, 100_000),
        ):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IDENTITY, b"f" + uuid.uuid4().bytes)
        if self._keys is not None:
            self._keys.connect(self._socket, "router")
        self._socket.connect(self._address)

    def _send(self, message: bytes) -> None:
        """Now or never: what cannot leave is said again. Through zmq's own loop, which looks for what has come after it
        has sent: sending may take the mark from the descriptor that says so."""
        sending = asyncio.ensure_future(self._socket.send(message, zmq.NOBLOCK))
        sending.add_done_callback(lambda sent: sent.exception())


class Link:
    """To all routers. Belongs to one event loop."""

    def __init__(
        self, addresses: Sequence[str], hear: Callable[[Answer], None], keys: Keys | None = None
    ) -> None:
        """`hear` is called with each answer. With `keys`, to routers that have theirs."""
        self._context = zmq.asyncio.Context()
        self._sides = [_Side(self._context, address, hear, keys) for address in addresses]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Connects in the background."""
        for side in self._sides:
            self._tasks += [asyncio.create_task(side.read()), asyncio.create_task(side.beat())]

    def replicas(self) -> Mapping[str, int]:
        """Of a router that answers, how many there are, by model; of one that did before, if none does."""
        known = [side for side in self._sides if side.workers is not None]
        found = next((side for side in known if side.alive), known[0] if known else None)
        return {} if found is None or found.workers is None else by_model(found.workers)

    def tell(self, backlog: Backlog) -> None:
        """All routers."""
        for side in self._sides:
            side.send(backlog)

    async def close(self) -> None:
        """What was told still leaves."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for side in self._sides:
            side.close()
        self._context.term()
