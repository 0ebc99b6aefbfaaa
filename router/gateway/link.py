"""Speak to the router: ask where a request goes, tell how it ended. One DEALER socket, one reader.

Messages leave only over a live connection (`ZMQ_IMMEDIATE`), so a router that is down is known at once and
nothing stale waits for it; zmq reconnects by itself. A question is asked again until it is answered. What was
told and is lost is found when the tables are compared: as soon as a router answers, and every `COMPARE_S`.
"""

import asyncio
import logging
import time
import uuid
from typing import Any

import zmq
import zmq.asyncio

from router.events import (
    Answer,
    Arrive,
    Difference,
    Event,
    Follow,
    Place,
    ProtocolError,
    Query,
    Refuse,
    Snapshot,
    Workers,
    decode_answer,
    encode,
)
from router.gateway.fleet import Fleet
from router.wire import HEARTBEAT, HEARTBEAT_ANSWER

log = logging.getLogger("gateway")

HEARTBEAT_S = 1.0
SEARCH_S = 0.02
"""Between two looks for a router that is not there."""
COMPARE_S = 5.0
ASK_AGAIN_S = 1.0


class RouterGone(Exception):
    """The router cannot be reached, or did not answer in time."""


class Link:
    """The gateway's side of the router's wire. Belongs to one event loop."""

    def __init__(self, address: str, timeout_s: float, fleet: Fleet) -> None:
        """`timeout_s` bounds every question. What the router says of workers goes to `fleet`."""
        self._address = address
        self._timeout_s = timeout_s
        self._fleet = fleet
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._echo_s = float("-inf")
        self._compared_s = float("-inf")
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
        if self._socket is not None:
            self._socket.close()
        if self._context is not None:
            self._context.term()

    @property
    def alive(self) -> bool:
        """The router has answered a heartbeat within the last three."""
        return time.monotonic() - self._echo_s < 3 * HEARTBEAT_S

    async def place(self, arrive: Arrive) -> Place | Refuse:
        """The router's answer. When this raises, `RouterGone` or cancelled, it may still come to be counted."""
        answer = await self._ask(arrive.id, arrive)
        if not isinstance(answer, Place | Refuse):
            raise RouterGone("the router answered something else than was asked")
        return answer

    async def snapshot(self) -> dict[str, object]:
        """The router's state. Raises `RouterGone`."""
        name = uuid.uuid4().hex
        answer = await self._ask(name, Query(name))
        if not isinstance(answer, Snapshot):
            raise RouterGone("the router answered something else than was asked")
        return answer.state

    async def workers(self) -> Workers:
        """The workers, after all that was told before. Raises `RouterGone`."""
        name = uuid.uuid4().hex
        answer = await self._ask(name, Follow(name))
        if not isinstance(answer, Workers):
            raise RouterGone("the router answered something else than was asked")
        return answer

    def tell(self, event: Event) -> None:
        """Sends what needs no answer, at once or not at all."""
        self._send(encode(event))

    async def _ask(self, name: str, event: Event) -> Answer:
        if not self.alive:
            raise RouterGone(f"no router answers at {self._address}")
        message = encode(event)
        if not self._send(message):
            raise RouterGone(f"no connection to the router at {self._address}")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._waiting[name] = future
        until_s = loop.time() + self._timeout_s

        timer: asyncio.TimerHandle | None = None

        def again() -> None:
            nonlocal timer
            left_s = until_s - loop.time()
            if future.done():
                return
            if left_s <= 0:
                future.set_exception(RouterGone(f"no answer from the router within {self._timeout_s:g} s"))
                return
            self._send(message)
            timer = loop.call_later(min(ASK_AGAIN_S, left_s), again)

        timer = loop.call_later(min(ASK_AGAIN_S, self._timeout_s), again)
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()
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

    async def _beat(self) -> None:
        while True:
            if not self._send(HEARTBEAT):
                self._echo_s = float("-inf")
            if self.alive and (time.monotonic() - self._compared_s >= COMPARE_S or not self._fleet.workers):
                self._compare()
            elif not self.alive:
                self._compared_s = float("-inf")
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(RouterGone(f"the router at {self._address} is gone"))
            await asyncio.sleep(HEARTBEAT_S if self.alive else SEARCH_S)

    def _compare(self) -> None:
        self._compared_s = time.monotonic()
        self.tell(Follow(""))
        self.tell(self._fleet.table(""))

    async def _read(self) -> None:
        said = False
        while True:
            frames = await self._socket.recv_multipart()
            if frames == [HEARTBEAT_ANSWER]:
                is_new = not self.alive
                self._echo_s = time.monotonic()
                if is_new:
                    self._compare()
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
            if isinstance(answer, Workers):
                for event in self._fleet.learn(answer):
                    self.tell(event)
            elif isinstance(answer, Difference):
                for event in self._fleet.settle(answer):
                    self.tell(event)
            future = self._waiting.get(answer.id)
            if future is not None and not future.done():
                future.set_result(answer)
