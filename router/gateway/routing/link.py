"""The connection to one router: asks where a request goes, and reports how it ended. One ZMQ DEALER socket.

Messages leave only over a live connection (`ZMQ_IMMEDIATE`). So the gateway learns at once that a router is down, and
no stale messages pile up for it. ZMQ reconnects by itself. Questions are repeated until they are answered. Lost
reports are found by comparing tables with the router: as soon as one answers, and every `COMPARE_S`.

A question that the router holds (`Held`) waits as long as a router lives, and is not repeated: it carries a whole
prompt, and thousands may wait. Each comparison says which are still held. Any other one is asked again, because its
answer was lost, or the router has forgotten it: after a restart, say. It was let in, so it is then asked as a further
attempt at the same call, which nobody throttles. What a question says of its deadline is said anew each time.

What needs no answer leaves with the next question, or `TELL_S` later: each message that leaves by itself wakes threads
here and in the router. All leave in the order in which they were said.

ZMQ makes the socket's descriptor readable once for any number of messages, and sending may reset it. So the socket is
read until it is empty, and checked again after each message that is sent.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from typing import cast

import msgspec
import zmq

from router.events import (
    Answer,
    Arrive,
    Cut,
    Difference,
    Due,
    Event,
    Explain,
    Explained,
    Follow,
    Held,
    Lift,
    Place,
    ProtocolError,
    Query,
    Refuse,
    SetLimits,
    Snapshot,
    Swap,
    Workers,
    decode_answer,
    encode,
)
from router.gateway.routing.side import Side
from router.silence import OwnTime
from router.sockets import has_come
from router.wire import HEARTBEAT, HEARTBEAT_ANSWER
from sglang_fair.common.curve import Keys, Refusals

log = logging.getLogger("gateway")

HEARTBEAT_S = 1.0
SILENT_S = 3.0
"""A router that has not answered for so long, while this process ran, is gone."""
SEARCH_S = 0.02
"""Between two heartbeats while no router answers."""
COMPARE_S = 5.0
ASK_AGAIN_S = 1.0
TELL_S = 0.001
REOPEN_S = 1.0
"""Between two attempts at a router that refuses our key."""
MESSAGES_PER_TURN = 256
"""Read in a row before other tasks of the event loop run."""


class RouterGone(Exception):
    """The router cannot be reached, or did not answer in time."""

    was_held = False
    """It had let the request in that it was asked about."""


class _Question:
    """One question on the wire. It is repeated until it is answered or held, and fails when its time is over."""

    def __init__(self, send: Callable[[bytes], bool], event: Event, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[Answer] = self._loop.create_future()
        self.is_held = False
        """The router holds it, so that it need not be repeated."""
        self.was_held = False
        self._send = send
        self._event = event
        self._made_s = self._loop.time()
        self._timeout_s = timeout_s
        self._until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def ask(self) -> bool:
        """Asks, as if for the first time. False if there is no connection."""
        self.stop()
        self.is_held = False
        self._until_s = self._loop.time() + self._timeout_s
        is_sent = self._send(self._message())
        self._timer = self._loop.call_later(min(ASK_AGAIN_S, self._timeout_s), self._again)
        return is_sent

    def hold(self) -> None:
        """The router holds it: nothing is repeated and no time is counted until it is asked again."""
        self.stop()
        self.is_held = self.was_held = True
        if isinstance(self._event, Arrive):
            self._event = msgspec.structs.replace(self._event, attempt=max(1, self._event.attempt))

    def fail(self, error: RouterGone) -> None:
        """No answer will come."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def stop(self) -> None:
        """Stops the clock."""
        if self._timer is not None:
            self._timer.cancel()

    def _message(self) -> bytes:
        event, now_s = self._event, self._loop.time()
        if isinstance(event, Arrive) and event.due is not None:
            promise = event.due.promise(self._made_s)
            event = msgspec.structs.replace(event, due=Due.of(promise, now_s))
        return encode(event)

    def _again(self) -> None:
        left_s = self._until_s - self._loop.time()
        if self.answer.done():
            return
        if left_s <= 0:
            self.fail(RouterGone(f"no answer from the router within {self._timeout_s:g} s"))
            return
        self._send(self._message())
        self._timer = self._loop.call_later(min(ASK_AGAIN_S, left_s), self._again)


class Link:
    """The gateway's end of a router's wire. Belongs to one event loop."""

    def __init__(self, address: str, timeout_s: float, side: Side, keys: Keys | None = None) -> None:
        """`timeout_s` bounds every question that the router does not hold. `side` learns what the router says about
        workers. With `keys`, the router must have its own."""
        self.changed: Callable[[], None] = lambda: None
        """Called when clients come to this router from others, or leave it for them."""
        self.cut: Callable[[str], None] = lambda attempt: None
        """Called with the id of a request that the router wants cut off."""
        self.side = side
        self._address = address
        self._timeout_s = timeout_s
        self._keys = keys
        self._waiting: dict[str, _Question] = {}
        self._told: list[bytes] = []
        """What is about to leave."""
        self._telling: asyncio.TimerHandle | None = None
        self._time = OwnTime(2 * HEARTBEAT_S)
        self._echo_s = float("-inf")
        """By `_time`."""
        self._compared_s = float("-inf")
        self._beating: asyncio.Task[None] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes]
        self._refusals: Refusals | None = None
        self._reopen_s = float("-inf")
        self._has_complained_of_keys = False
        self._is_open = self._will_read = self._has_complained = self._has_refused = False

    async def start(self) -> None:
        """Connects in the background, whether or not a router is there yet."""
        self._context = zmq.Context()
        self._open()
        self._beating = asyncio.create_task(self._beat())

    def _open(self) -> None:
        assert self._context is not None
        self._socket = self._context.socket(zmq.DEALER)
        self._is_open = True
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
        if self._keys is not None:
            self._keys.connect(self._socket, "router")
            self._refusals = Refusals(self._socket)
        self._socket.connect(self._address)
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    @property
    def _descriptor(self) -> int:
        return cast(int, self._socket.getsockopt(zmq.FD))

    def _shut(self, linger_ms: int | None = None) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        self._is_open = False
        if self._refusals is not None:
            self._refusals.close()
            self._refusals = None
        self._socket.close(linger_ms)

    async def close(self) -> None:
        """Stops the heartbeat and closes the socket; messages sent just before still leave."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        self._tell_all()
        if self._is_open:
            self._shut()
        if self._context is not None:
            self._context.term()

    @property
    def alive(self) -> bool:
        """Whether the router has answered a heartbeat lately."""
        return self._time.look(time.monotonic()) - self._echo_s < SILENT_S

    async def place(self, arrive: Arrive) -> Place | Refuse:
        """The router's answer, which it may hold back while it lives. Raises `RouterGone`; then, or when cancelled, the
        router may still have placed it."""
        answer = await self._ask(arrive.id, msgspec.structs.replace(arrive, may_hold=True))
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

    async def explain(self, request: str, client: str | None) -> tuple[dict[str, object], ...]:
        """What the router remembers of a request, by its name or an attempt's id. Raises `RouterGone`."""
        name = uuid.uuid4().hex
        answer = await self._ask(name, Explain(name, request, client))
        if not isinstance(answer, Explained):
            raise RouterGone("the router answered something else than was asked")
        return answer.placements

    async def set_limits(self, rules: bytes, at_s: float) -> Snapshot | Refuse:
        """Replaces the rules of throttling, in JSON, at `at_s` of Unix time. The router's state then, or what it has
        against them. Raises `RouterGone`."""
        name = uuid.uuid4().hex
        answer = await self._ask(name, SetLimits(name, rules, at_s))
        if not isinstance(answer, Snapshot | Refuse):
            raise RouterGone("the router answered something else than was asked")
        if isinstance(answer, Snapshot):
            with contextlib.suppress(RouterGone):
                await self.workers()  # with the limits: a router that is restarted is told of them
        return answer

    async def lift(self, client: str) -> Snapshot | Refuse:
        """Ends the quarantine of a client. The router's state then, or that it is in none. Raises `RouterGone`."""
        name = uuid.uuid4().hex
        answer = await self._ask(name, Lift(name, client))
        if not isinstance(answer, Snapshot | Refuse):
            raise RouterGone("the router answered something else than was asked")
        return answer

    async def swap(self, worker: str, model: str) -> Snapshot | Refuse:
        """Has a worker load another model. The router's state then, or why that cannot be. Raises `RouterGone`."""
        name = uuid.uuid4().hex
        answer = await self._ask(name, Swap(name, worker, model))
        if not isinstance(answer, Snapshot | Refuse):
            raise RouterGone("the router answered something else than was asked")
        return answer

    async def workers(self) -> Workers:
        """The workers, as they are after every event told before. Raises `RouterGone`."""
        name = uuid.uuid4().hex
        answer = await self._ask(name, Follow(name))
        if not isinstance(answer, Workers):
            raise RouterGone("the router answered something else than was asked")
        return answer

    def tell(self, event: Event) -> None:
        """Sends an event that needs no answer, within `TELL_S`. It is dropped if there is no connection then."""
        self._told.append(encode(event))
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TELL_S, self._tell_all)

    def _tell_all(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        told, self._told = self._told, []
        for message in told:
            self._send(message)

    def _send_behind(self, message: bytes) -> bool:
        """Sends it behind what was told before. False if there is no connection."""
        if self._told:
            self._tell_all()
        return self._send(message)

    async def _ask(self, name: str, event: Event) -> Answer:
        if not self.alive:
            raise RouterGone(f"no router answers at {self._address}")
        question = _Question(self._send_behind, event, self._timeout_s)
        self._waiting[name] = question
        try:
            if not question.ask():
                raise RouterGone(f"no connection to the router at {self._address}")
            return await question.answer
        except RouterGone as error:
            error.was_held = question.was_held
            raise
        finally:
            question.stop()
            del self._waiting[name]

    def _send(self, message: bytes) -> bool:
        if not self._is_open:
            return False
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self._read_soon()
        return True

    def _read_soon(self) -> None:
        if not self._will_read and has_come(self._socket):
            self._will_read = True
            asyncio.get_running_loop().call_soon(self._read)

    async def _beat(self) -> None:
        while True:
            if not self._send_behind(HEARTBEAT):
                self._echo_s = float("-inf")
            if self.alive and (time.monotonic() - self._compared_s >= COMPARE_S or not self.side.workers):
                self.compare()
            elif not self.alive:
                self._compared_s = float("-inf")
                if self.side.lost():
                    self.changed()
                for question in self._waiting.values():
                    question.fail(RouterGone(f"the router at {self._address} is gone"))
                self._look_for_refusals()
            await asyncio.sleep(HEARTBEAT_S if self.alive else SEARCH_S)

    def _look_for_refusals(self) -> None:
        """A socket that was refused connects no more. The router may be started again with other keys."""
        if self._refusals is None or time.monotonic() < self._reopen_s or not self._refusals.has_come():
            return
        self._reopen_s = time.monotonic() + REOPEN_S
        if not self._has_complained_of_keys:
            self._has_complained_of_keys = True
            log.error("the router at %s and this gateway do not have each other's keys", self._address)
        self._shut(0)
        self._open()

    def compare(self) -> None:
        """Asks for the workers, and how the tables of requests differ; both sides are told what they lack."""
        self._compared_s = time.monotonic()
        self.tell(Follow(""))
        self.tell(self.side.table(""))

    def _read(self) -> None:
        self._will_read = False
        for _ in range(MESSAGES_PER_TURN):
            if not self._is_open or not has_come(self._socket):
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
        self._read_soon()

    def _take(self, frames: list[bytes]) -> None:
        if frames == [HEARTBEAT_ANSWER]:
            is_new = not self.alive
            now_s = time.monotonic()
            self._echo_s = self._time.look(now_s)
            if self.side.answers(now_s):
                self.changed()
            if is_new:
                self.compare()
            return
        if frames == [HEARTBEAT]:  # our own came back, see HEARTBEAT_ANSWER
            self._shut(0)
            self._open()
            return
        try:
            answer = decode_answer(b"".join(frames))
        except ProtocolError as error:
            if not self._has_complained:
                self._has_complained = True
                log.warning("ignored a message of the router (said once): %s", error)
            return
        if isinstance(answer, Workers):
            if self.side.plans(answer):
                self.changed()
            if self.side.is_refused and not self._has_refused:
                log.error(
                    "the router at %s is refused: it plans the replicas' queues, and another one of --router does "
                    "already; only one may",
                    self._address,
                )
            self._has_refused = self.side.is_refused
            for event in self.side.learn(answer):
                self.tell(event)
        elif isinstance(answer, Difference):
            for event in self.side.settle(answer):
                self.tell(event)
            self._ask_for_lost(answer)
        elif isinstance(answer, Cut):
            self.cut(answer.id)
            return
        question = self._waiting.get(answer.id)
        if question is None or question.answer.done():
            return
        if isinstance(answer, Held):
            question.hold()
        else:
            question.answer.set_result(answer)

    def _ask_for_lost(self, difference: Difference) -> None:
        """Asks again what was held and is held no more."""
        held = set(difference.held)
        for name, question in self._waiting.items():
            if question.is_held and name not in held and not question.answer.done():
                question.ask()
