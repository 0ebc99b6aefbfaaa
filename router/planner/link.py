"""The planner's connection to the router, and the loop that answers.

One thread moves messages, another one plans, so heartbeats go on meanwhile. Of questions that come while one is planned
only the last one counts. After each heartbeat it says again that it plans: a router that was restarted knows nobody.
How many replicas would do is found out when a plan has gone out that does not meet all deadlines, at most every
`NEEDED_EVERY_S`, and goes out with the next one.

Messages leave only over a live connection, so nothing piles up for a router that is down. ZMQ reconnects by itself.
"""

import contextlib
import logging
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable

import zmq

from router.events import Plan, Planner, ProtocolError, Replan, Shortage, decode_answer, encode
from router.planner import answers
from router.queues.plan import Solver
from router.wire import HEARTBEAT, HEARTBEAT_ANSWER
from sglang_fair.common.curve import Keys

log = logging.getLogger("planner")

HEARTBEAT_S = 1.0
NEEDED_EVERY_S = 5.0
MAX_MESSAGE_BYTES = 256 << 20


class Planning:
    """Answers questions one after the other, in a thread of its own; always the last one that was asked."""

    def __init__(self, solver: Solver, done: Callable[[], None]) -> None:
        """`done` is called, in that thread, when an answer is there."""
        self._solver = solver
        self._done = done
        self._asked: queue.SimpleQueue[Replan] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Plan] = queue.SimpleQueue()
        self._short: Shortage | None = None
        self._short_s = float("-inf")
        self.failed: BaseException | None = None
        """What has ended the thread: a defect, after which nothing is answered."""
        threading.Thread(target=self._run, name="planning", daemon=True).start()

    def ask(self, question: Replan) -> None:
        """To be answered next."""
        self._asked.put(question)

    def answered(self) -> Plan | None:
        """An answer that is there, once."""
        with contextlib.suppress(queue.Empty):
            return self._answers.get_nowait()
        return None

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.failed = error
            self._done()

    def _serve(self) -> None:
        while True:
            question = self._asked.get()
            with contextlib.suppress(queue.Empty):
                while True:
                    question = self._asked.get_nowait()
            began_s = time.monotonic()
            found = answers.planned(question, self._solver)
            took_s = time.monotonic() - began_s
            self._answers.put(answers.answer(question, found, took_s, self._short))
            self._done()
            if not answers.is_short(question.problem, found):
                self._short, self._short_s = None, float("-inf")
            elif self._asked.empty() and time.monotonic() - self._short_s >= NEEDED_EVERY_S:
                self._short = answers.shortage(question.problem)
                self._short_s = time.monotonic()


class Link:
    """Serves one router until `stop`, which any thread and any signal handler may call."""

    def __init__(
        self, address: str, solver: Solver = "auto", keys: Keys | None = None, name: str = ""
    ) -> None:
        """Connects in the background; with `keys`, to a router that has its own. Raises `zmq.ZMQError` for what is no
        address."""
        self._keys = keys
        self._address = address
        self._hello = encode(Planner(name or f"{socket.gethostname()}/{os.getpid()}"))
        self._is_stopping = self._is_known = self._has_complained = False
        self._waker, self._wake = socket.socketpair()
        self._waker.setblocking(False)
        self._wake.setblocking(False)
        self._planning = Planning(solver, self._rouse)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self._wake.fileno(), zmq.POLLIN)
        self._beat_s = float("-inf")
        self._open()

    def stop(self) -> None:
        """Makes `run` return soon."""
        self._is_stopping = True
        self._rouse()

    def run(self, up: Callable[[], None] = lambda: None) -> None:
        """Serves. `up` is called when a router has answered for the first time."""
        while not self._is_stopping:
            if time.monotonic() - self._beat_s >= HEARTBEAT_S:
                self._beat_s = time.monotonic()
                self._send(HEARTBEAT)
                self._send(self._hello)
            left_s = self._beat_s + HEARTBEAT_S - time.monotonic()
            self._poller.poll(max(0, int(1e3 * left_s) + 1))
            with contextlib.suppress(BlockingIOError):
                while self._wake.recv(4096):
                    pass
            if self._planning.failed is not None:
                raise self._planning.failed
            while (plan := self._planning.answered()) is not None:
                self._send(encode(plan))
            was_known = self._is_known
            self._read()
            if self._is_known and not was_known:
                log.info("plans for the router at %s", self._address)
                up()

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close(0)
        self._context.term()
        self._waker.close()
        self._wake.close()

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 1000),
        ):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IDENTITY, b"p" + uuid.uuid4().bytes)
        if self._keys is not None:
            self._keys.connect(self._socket, "router")
        self._socket.connect(self._address)
        self._poller.register(self._socket, zmq.POLLIN)

    def _read(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if frames == [HEARTBEAT]:  # our own came back, see HEARTBEAT_ANSWER
                self._poller.unregister(self._socket)
                self._socket.close(0)
                self._open()
                return
            if frames == [HEARTBEAT_ANSWER]:
                self._is_known = True
                continue
            try:
                answer = decode_answer(b"".join(frames))
            except ProtocolError as error:
                if not self._has_complained:
                    self._has_complained = True
                    log.warning("ignored a message of the router (said once): %s", error)
                continue
            if isinstance(answer, Replan):  # it also tells of every change of the workers
                self._planning.ask(answer)

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # there is no router
            self._socket.send(message, zmq.NOBLOCK)

    def _rouse(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # the pipe is full, or closed at the end
            self._waker.send(b"\0")
