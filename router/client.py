"""A connection to one router: `ask` a question, `tell` an event, and `on_event` for what comes. One ZMQ DEALER socket,
or a `Stream` on one machine.

With heartbeats, messages leave only over a live connection (`ZMQ_IMMEDIATE`): its owner learns at once that the router
is down, and no stale messages pile up for it. Without them, messages wait for a router, in order. ZMQ reconnects by
itself. Questions are repeated until they are answered; events that are lost are not.

A question that the router holds (`Held`) waits as long as a router lives, and is not repeated: it carries a whole
prompt, and thousands may wait. Any other one is asked again, because its answer was lost, or the router has forgotten
it: after a restart, say. If it was let in, it is then asked as a further attempt at the same call, which is not
throttled. What a question says of its deadline is computed anew each time.

What needs no answer leaves with the next question, or `TELL_S` later: each message that leaves by itself wakes threads
here and in the router. All leave in order.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection
from typing import TypeVar

import msgspec
import zmq

from router.events import (
    Answer,
    Arrive,
    Cut,
    Due,
    Event,
    Held,
    ProtocolError,
    Question,
    decode_answer,
    encode,
)
from router.silence import ActiveClock
from router.sockets import Reader
from router.stream import SCHEME, Stream
from router.wire import HEARTBEAT, HEARTBEAT_ANSWER
from sglang_fair.common.curve import Keys, Refusals

log = logging.getLogger("router.client")

HEARTBEAT_S = 1.0
SILENT_S = 3.0
"""A router that has not answered for so long, while this process ran, is gone."""
SEARCH_S = 0.02
"""Between two heartbeats while no router answers."""
ASK_AGAIN_S = 1.0
TELL_S = 0.001
REOPEN_S = 1.0
"""Between two attempts at a router that refuses our key."""

Kind = TypeVar("Kind", bound=Answer)


class RouterGone(Exception):
    """The router cannot be reached, or did not answer in time."""

    was_held = False
    """It held the request in question before."""


class _Asked:
    """One question on the wire. It is repeated until it is answered or held, and fails when its time is over."""

    def __init__(self, send: Callable[[bytes], bool], question: Question, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[Answer] = self._loop.create_future()
        self.is_held = False
        """The router holds it, so that it need not be repeated."""
        self.was_held = False
        self._send = send
        self._question = question
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
        if isinstance(self._question, Arrive):
            self._question = msgspec.structs.replace(self._question, attempt=max(1, self._question.attempt))

    def fail(self, why: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(RouterGone(why))

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _message(self) -> bytes:
        question = self._question
        if isinstance(question, Arrive) and question.due is not None:
            promise = question.due.promise(self._made_s)
            question = msgspec.structs.replace(question, due=Due.of(promise, self._loop.time()))
        return encode(question)

    def _again(self) -> None:
        left_s = self._until_s - self._loop.time()
        if self.answer.done():
            return
        if left_s <= 0:
            self.fail(f"no answer from the router within {self._timeout_s:g} s")
            return
        self._send(self._message())
        self._timer = self._loop.call_later(min(ASK_AGAIN_S, left_s), self._again)


class RouterClient:
    """One end of the router's wire. Belongs to one event loop, between `start` and `close`."""

    def __init__(
        self,
        address: str,
        keys: Keys | None = None,
        *,
        beats: bool = True,
        on_event: Callable[[Answer], None] = lambda answer: None,
        on_beat: Callable[[bool], None] = lambda is_alive: None,
    ) -> None:
        """With `keys`, the router must have its own. `beats`: it sends heartbeats, and so gets every change of the
        workers. `on_event` is called with each answer, `on_beat` with True for each heartbeat that is answered, and
        with False again and again while none is."""
        self.address = address
        self.lives = 0
        """How often a router has begun to answer heartbeats."""
        self._keys = keys
        self._beats = beats
        self._on_event = on_event
        self._on_beat = on_beat
        self._waiting: dict[str, _Asked] = {}
        self._told: list[bytes] = []
        """What is about to leave."""
        self._telling: asyncio.TimerHandle | None = None
        self._time = ActiveClock(2 * HEARTBEAT_S)
        self._echo_s = float("-inf")
        """By `_time`."""
        self._beating: asyncio.Task[None] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._name = b"g" + uuid.uuid4().bytes
        self._reader: Reader | None = None
        self._stream: Stream | None = None
        self._refusals: Refusals | None = None
        self._reopen_s = float("-inf")
        self._has_complained_of_keys = False
        self._has_complained = False

    def start(self) -> None:
        """Connects in the background, whether or not a router is there yet."""
        self._context = zmq.Context()
        self._open()
        if self._beats:
            self._beating = asyncio.create_task(self._beat())

    def close(self) -> None:
        """Stops the heartbeat and closes the socket. Over a live connection, what was sent just before still leaves."""
        if self._beating is not None:
            self._beating.cancel()
        self._tell_all()
        self._shut(None if self._beats else 0)
        if self._context is not None:
            self._context.term()

    async def __aenter__(self) -> "RouterClient":
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the router has answered a heartbeat lately."""
        return self._time.look(time.monotonic()) - self._echo_s < SILENT_S

    async def ask(self, question: Question, kinds: tuple[type[Kind], ...], timeout_s: float) -> Kind:
        """The answer, which the router may hold back while it lives. `question` gets an id if it has none. Raises
        `RouterGone`; then, or when cancelled, the router may still have done what was asked."""
        if self._beats and not self.alive:
            raise RouterGone(f"no router answers at {self.address}")
        if not question.id:
            question = msgspec.structs.replace(question, id=uuid.uuid4().hex)
        asked = self._waiting[question.id] = _Asked(self._send_behind, question, timeout_s)
        try:
            if not asked.ask():
                raise RouterGone(f"no connection to the router at {self.address}")
            answer = await asked.answer
        except RouterGone as error:
            error.was_held = asked.was_held
            raise
        finally:
            asked.stop()
            del self._waiting[question.id]
        if not isinstance(answer, kinds):
            raise RouterGone("the router answered something else than was asked")
        return answer

    def tell(self, event: Event) -> None:
        """Sends an event that needs no answer, within `TELL_S`. It is dropped if there is no connection then, unless
        it need not be a live one."""
        self._told.append(encode(event))
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TELL_S, self._tell_all)

    def ask_again(self, held: Collection[str]) -> None:
        """Of the requests that it held, the router holds only these."""
        for name, asked in self._waiting.items():
            if asked.is_held and name not in held and not asked.answer.done():
                asked.ask()

    def _open(self) -> None:
        if self._keys is None and self.address.startswith(SCHEME):
            self._stream = Stream(self.address, self._name, self._take, keeps=not self._beats)
            return
        assert self._context is not None
        socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 500),
            (zmq.IMMEDIATE, int(self._beats)),
            (zmq.SNDHWM, 100_000),
            (zmq.RCVHWM, 100_000),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 1000),
        ):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.IDENTITY, self._name)
        if self._keys is not None:
            self._keys.connect(socket, "router")
            self._refusals = Refusals(socket)
        socket.connect(self.address)
        self._reader = Reader(
            asyncio.get_running_loop(),
            socket,
            lambda: self._take(b"".join(socket.recv_multipart(zmq.NOBLOCK))),
        )

    def _shut(self, linger_ms: int | None = None) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._refusals is not None:
            self._refusals.close()
            self._refusals = None
        if self._reader is not None:
            self._reader.close(linger_ms)
            self._reader = None

    def _reopen(self) -> None:
        self._shut(0)
        self._open()

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

    def _send(self, message: bytes) -> bool:
        if self._stream is not None:
            return self._stream.send(message)
        if self._reader is None:
            return False
        try:
            self._reader.socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self._reader.look()
        return True

    async def _beat(self) -> None:
        while True:
            if not self._send_behind(HEARTBEAT):
                self._echo_s = float("-inf")
            if not self.alive:
                self._on_beat(False)
                for asked in self._waiting.values():
                    asked.fail(f"the router at {self.address} is gone")
                self._look_for_refusals()
            await asyncio.sleep(HEARTBEAT_S if self.alive else SEARCH_S)

    def _look_for_refusals(self) -> None:
        """A socket that was refused connects no more. The router may be started again with other keys."""
        if self._refusals is None or time.monotonic() < self._reopen_s or not self._refusals.has_come():
            return
        self._reopen_s = time.monotonic() + REOPEN_S
        if not self._has_complained_of_keys:
            self._has_complained_of_keys = True
            log.error("the router at %s and this process do not have each other's keys", self.address)
        self._reopen()

    def _take(self, message: bytes) -> None:
        if message == HEARTBEAT_ANSWER:
            self.lives += not self.alive
            self._echo_s = self._time.look(time.monotonic())
            self._on_beat(True)
            return
        if message == HEARTBEAT:  # our own came back, see HEARTBEAT_ANSWER
            self._reopen()
            return
        try:
            answer = decode_answer(message)
        except ProtocolError as error:
            if not self._has_complained:
                self._has_complained = True
                log.warning("ignored a message of the router (logged once): %s", error)
            return
        self._on_event(answer)
        asked = self._waiting.get(answer.id)
        if asked is None or asked.answer.done() or isinstance(answer, Cut):
            return
        if isinstance(answer, Held):
            asked.hold()
        else:
            asked.answer.set_result(answer)
