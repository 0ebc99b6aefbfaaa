"""Speak to the router: ask where a request goes, tell how it ended. One DEALER socket, one reader.

Messages leave only over a live connection (`ZMQ_IMMEDIATE`), so a router that is down is known at once and
nothing stale waits for it; zmq reconnects by itself. What is told of an end is kept and told again later,
for else a router that was only unreachable would count the request as running for ever.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from typing import Any

import zmq
import zmq.asyncio

from router.events import (
    Answer,
    Arrive,
    Done,
    Event,
    Place,
    ProtocolError,
    Query,
    Refuse,
    Snapshot,
    decode_answer,
    encode,
)
from router.wire import HEARTBEAT, HEARTBEAT_ANSWER

log = logging.getLogger("gateway")

HEARTBEAT_S = 1.0
SEARCH_S = 0.02
"""Between two looks for a router that is not there."""
MAX_UNSENT = 100_000


class RouterGone(Exception):
    """The router cannot be reached, or did not answer in time."""


class Link:
    """The gateway's side of the router's wire. Belongs to one event loop."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """`timeout_s` bounds every question."""
        self._address = address
        self._timeout_s = timeout_s
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._unsent: deque[bytes] = deque(maxlen=MAX_UNSENT)
        self._echo_s = float("-inf")
        self._tasks: list[asyncio.Task[None]] = []
        self._context: zmq.asyncio.Context | None = None
        self._socket: Any = None

    async def start(self) -> None:
        """Connects; a router that is not there yet is waited for in the background."""
        self._context = zmq.asyncio.Context()
        self._open()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]

    def _open(self) -> None:
        assert self._context is not None
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 500),
            (zmq.IMMEDIATE, 1),
            (zmq.SNDHWM, 100_000),
            (zmq.RCVHWM, 100_000),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 1000),
        ):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IDENTITY, b"g" + uuid.uuid4().bytes)
        self._socket.connect(self._address)

    async def close(self) -> None:
        """Ends the tasks and the socket; what was told just before still leaves."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._flush()
        if self._socket is not None:
            self._socket.close()
        if self._context is not None:
            self._context.term()

    @property
    def alive(self) -> bool:
        """The router has answered a heartbeat within the last three."""
        return time.monotonic() - self._echo_s < 3 * HEARTBEAT_S

    async def place(self, arrive: Arrive) -> Place | Refuse:
        """The router's answer. When this raises, `RouterGone` or cancelled, the request counts nowhere."""
        try:
            answer = await self._ask(arrive.id, arrive)
        except BaseException:
            # Behind the question on the same connection: whatever it was answered is undone.
            self.tell(Done(arrive.id, outcome="failed"))
            raise
        if isinstance(answer, Snapshot):
            raise RouterGone("the router answered something else than was asked")
        return answer

    async def snapshot(self) -> dict[str, object]:
        """The router's state. Raises `RouterGone`."""
        name = uuid.uuid4().hex
        answer = await self._ask(name, Query(name))
        if not isinstance(answer, Snapshot):
            raise RouterGone("the router answered something else than was asked")
        return answer.state

    def tell(self, event: Event) -> None:
        """Sends what needs no answer, at once if possible; of what is not delivered, ends are kept."""
        message = encode(event)
        if not self._send(message) and isinstance(event, Done):
            self._unsent.append(message)

    async def _ask(self, name: str, event: Event) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[name] = future
        try:
            if not self._send(encode(event)):
                raise RouterGone(f"no connection to the router at {self._address}")
            async with asyncio.timeout(self._timeout_s):
                return await future
        except TimeoutError as error:
            raise RouterGone(f"no answer from the router within {self._timeout_s:g} s") from error
        finally:
            del self._waiting[name]

    def _send(self, message: bytes) -> bool:
        # With NOBLOCK zmq.asyncio tries at once and returns a future that is done.
        sent = self._socket.send(message, zmq.NOBLOCK)
        error = sent.exception()
        if error is None:
            return True
        if isinstance(error, zmq.Again):
            return False
        raise error

    def _flush(self) -> None:
        while self._unsent and self._send(self._unsent[0]):
            self._unsent.popleft()

    async def _beat(self) -> None:
        while True:
            if self._send(HEARTBEAT):
                self._flush()
            else:
                self._echo_s = float("-inf")
            await asyncio.sleep(HEARTBEAT_S if self.alive else SEARCH_S)

    async def _read(self) -> None:
        said = False
        while True:
            frames = await self._socket.recv_multipart()
            if frames == [HEARTBEAT_ANSWER]:
                self._echo_s = time.monotonic()
                continue
            if frames == [HEARTBEAT]:  # our own, see HEARTBEAT_ANSWER
                self._socket.close(0)
                self._open()
                continue
            try:
                answer = decode_answer(b"".join(frames))
            except ProtocolError as error:
                if not said:
                    said = True
                    log.warning("ignored a message of the router (said once): %s", error)
                continue
            future = self._waiting.get(answer.id)
            if future is not None and not future.done():
                with contextlib.suppress(asyncio.InvalidStateError):
                    future.set_result(answer)
