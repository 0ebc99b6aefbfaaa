"""The router's process: one event loop that moves messages between ZMQ sockets and `Router.handle`.

Gateways and the supervisor are DEALER peers of one ROUTER socket, or connect to a Unix socket in its place (`stream`).
A message is two frames, the peer's identity and one encoded event; the answer goes back the same way. An empty message
is a heartbeat and is answered. A peer that has sent one is told of every change of the workers; if it then falls
silent, the core hears that it is gone.

The shell keeps the sockets, the clock, and when each peer was last heard. What follows from a message is decided
in the core.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import uvloop
import zmq

from router.core import Router
from router.events import (
    Agent,
    Done,
    Event,
    PeerGone,
    Place,
    Posted,
    ProtocolError,
    SetLimits,
    Snapshot,
    Tick,
    WorkerDown,
    WorkerDrain,
    WorkerHealth,
    Workers,
    WorkerUp,
    decode_event,
    encode,
)
from router.plans import Plans
from router.replicas import Replica, addresses_of
from router.silence import ActiveClock
from router.sockets import Reader, has_come
from router.stream import MAX_MESSAGE_BYTES, SCHEME, Streams
from router.wire import HEARTBEAT, HEARTBEAT_ANSWER
from sglang_fair.common.curve import Gate, Keys

log = logging.getLogger("router")

TURN_MS = 250
"""Deadlines are checked so often, and the core hears that time has passed."""

_CHANGES_WORKERS = (
    WorkerUp, WorkerDown, WorkerDrain, WorkerHealth, PeerGone, SetLimits, Posted, Agent
)  # fmt: skip
_FIRST_FRAME = int(zmq.NOBLOCK | zmq.SNDMORE)


class Shell:
    """Runs one router core behind a bound socket, in `loop`, which is its own.

    `endpoint` is the address of that socket. Only `stop` may be called from a signal handler or another thread; all
    other methods belong to the thread of `run`.
    """

    def __init__(
        self,
        router: Router,
        bind: str,
        *,
        peer_timeout_s: float = 10.0,
        replay_timeout_s: float = 5.0,
        keys: Keys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Binds the socket. Raises `zmq.ZMQError` or OSError if it cannot.

        A peer that has sent a heartbeat and then nothing for `peer_timeout_s` is gone. A gap in the KV events of a
        replica is passed over if its replay has not closed it within `replay_timeout_s`. With `keys`, peers and
        replicas must have theirs.
        """
        self.loop = uvloop.new_event_loop()
        self._router = router
        self._clock = clock
        self._peer_timeout_s = peer_timeout_s
        self._replay_timeout_s = replay_timeout_s
        self._keys = keys
        router.run = uuid.uuid4().hex
        self._replicas: dict[str, Replica] = {}
        self._workers = router.listing()
        """As the peers were last told."""
        self._time = ActiveClock(2 * TURN_MS / 1e3)
        self._heard_s: dict[bytes, float] = {}
        """When each peer that sends heartbeats was last heard, by `_time`."""
        self._counts: Counter[str] = Counter()
        self._plans = Plans(lambda: self._from_elsewhere(self._take_plan))
        self._ended: asyncio.Future[None] = self.loop.create_future()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers = self._context.socket(zmq.ROUTER)
        self._gate = None if keys is None else Gate(self._context, keys)
        self._reader: Reader | None = None
        self._streams: Streams | None = None
        try:
            if keys is not None and self._gate is not None:
                keys.serve(self._peers)
                self._gate.watch(self._peers)
            if keys is None and bind.startswith(SCHEME):
                self._streams, self.endpoint = Streams(bind, self._hear), bind
            else:
                self.endpoint = _bind(self._peers, bind)
        except (zmq.ZMQError, OSError):
            self.close()
            raise

    def run(self, *jobs: Coroutine[Any, Any, None]) -> None:
        """Serves until `stop`, and does `jobs` beside that; what one of these raises is logged. What the core raises
        ends it: a broken core must not go on placing."""
        tasks = [self.loop.create_task(_logged(job)) for job in jobs]
        self._reader = Reader(self.loop, self._peers, self._read_peer)
        if (gate := self._gate) is not None:
            for source in gate.sockets:
                Reader(self.loop, source, partial(gate.serve, source))
        self._turn()
        try:
            if self._streams is None:
                self.loop.run_until_complete(self._ended)
            else:
                self.loop.run_until_complete(self._streams.serve(self._ended))
                self._ended.result()
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks))

    def stop(self, after_s: float = 0.0) -> None:
        """Makes `run` return. Any thread and any signal handler may call it."""
        self._from_elsewhere(partial(self.loop.call_later, after_s, self._end))

    def close(self) -> None:
        """Closes every socket. Messages sent before still leave."""
        for replica in self._replicas.values():
            replica.close()
        self._replicas.clear()
        if self._reader is not None:
            self._reader.close(None)
        self._peers.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()
        self._plans.close()
        if self._streams is not None:
            self._streams.close()
        self.loop.close()

    def listing(self) -> Workers:
        """The workers and limits that peers know of."""
        return self._router.listing()

    def snapshot(self) -> dict[str, object]:
        """The core's state, and that of the wire."""
        return {**self._router.state(), "wire": self.state()}

    def tell(self, event: Event, peer: bytes = b"") -> None:
        """Hands `event` to the core and sends its answers; what cannot be sent is the next event."""
        events: deque[tuple[Event, bytes]] = deque([(event, peer)])
        while events:
            event, peer = events.popleft()
            try:
                actions = self._router.handle(event, self._clock(), peer)
                question = self._router.question(self._clock())
            except Exception as error:
                self._end(error)
                raise
            for to, answer in actions:
                if isinstance(answer, Snapshot):
                    answer.state["wire"] = self.state()
                if self._send(to, encode(answer)):
                    continue
                if isinstance(answer, Place):  # so its gateway will never send it there
                    events.append((Done(answer.id, outcome="failed"), to))
            if question is not None:
                self._plans.ask(*question)
            if isinstance(event, WorkerUp):
                self._follow(event)
            may_be_empty = self._workers.draining and isinstance(event, Done)
            if may_be_empty or isinstance(event, _CHANGES_WORKERS):
                self._compare_workers()

    def state(self) -> dict[str, object]:
        return {
            "counts": dict(sorted(self._counts.items())),
            "peers": len(self._heard_s),
            "refused": 0 if self._gate is None else self._gate.refused,
            "planning": self._plans.pid,
            "kv": {
                name: {"expected": replica.follower.expected, **replica.follower.counts}
                for name, replica in sorted(self._replicas.items())
                if replica.addresses[0] is not None
            },
        }

    def _turn(self) -> None:
        """Looks at what is due, again and again."""
        if self._reader is not None:
            self._reader.read()
        if has_come(self._peers):
            # After a pause of our own, what peers said meanwhile comes first.
            self.loop.call_soon(self._turn)
        elif self._streams is not None:
            self.loop.call_soon(self.loop.call_soon, self._look)  # the loop reads its sockets in between
        else:
            self._look()

    def _look(self) -> None:
        self._drop_silent_peers()
        self.tell(Tick())
        for replica in list(self._replicas.values()):
            replica.give_up_after(self._replay_timeout_s)
        self.loop.call_later(TURN_MS / 1e3, self._turn)

    def _read_peer(self) -> None:
        frames = self._peers.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 2:
            self._note("peer frames", f"a message of {len(frames) - 1} frames, one is expected")
            return
        self._hear(*frames)

    def _hear(self, peer: bytes, message: bytes) -> None:
        if message == HEARTBEAT or peer in self._heard_s:
            self._heard_s[peer] = self._time.look(self._clock())
        if message == HEARTBEAT:
            self._send(peer, HEARTBEAT_ANSWER)
            return
        try:
            event = decode_event(message)
        except ProtocolError as error:
            self._note("peer message", str(error))
            return
        self.tell(event, peer)

    def _take_plan(self) -> None:
        if (planned := self._plans.done()) is not None:
            self.tell(planned)

    def _end(self, error: Exception | None = None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def _from_elsewhere(self, what: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(what)

    def _follow(self, up: WorkerUp) -> None:
        """Follows what the replica publishes, if it has said where, or where else."""
        known = self._replicas.get(up.worker)
        if known is not None and known.addresses == addresses_of(up):
            return
        self._drop(up.worker)
        if up.kv is None and up.load is None:
            return
        try:
            self._replicas[up.worker] = Replica(
                self._context, up, self._keys, self.loop, self._clock, self.tell, self._note
            )
        except zmq.ZMQError as error:
            self._note("worker address", f"worker {up.worker}: {addresses_of(up)}: {error}")

    def _drop(self, worker: str) -> None:
        if (replica := self._replicas.pop(worker, None)) is not None:
            replica.close()

    def _compare_workers(self) -> None:
        """If the core's workers or limits have changed: follows what workers that are up publish, and tells peers.

        The KV events of a worker that is well again are followed from the beginning, because the core has forgotten
        what it cached.
        """
        workers = self.listing()
        if workers == self._workers:
            return
        before, self._workers = self._workers, workers
        for worker in self._replicas.keys() - {up.worker for up in workers.workers}:
            self._drop(worker)
        for up in workers.workers:
            if up.worker in before.sick and up.worker not in workers.sick:
                self._drop(up.worker)
                self._follow(up)
        message = encode(workers)
        for peer in list(self._heard_s):
            self._send(peer, message)

    def _drop_silent_peers(self) -> None:
        now_s = self._time.look(self._clock())
        for peer in [p for p, heard_s in self._heard_s.items() if now_s - heard_s > self._peer_timeout_s]:
            del self._heard_s[peer]
            self._counts["peers lost"] += 1
            lost = self._router.requests_of(peer)
            log.log(
                logging.WARNING if lost else logging.INFO,
                "a gateway is gone, with %d requests in flight",
                lost,
            )
            self.tell(PeerGone(), peer)

    def _send(self, peer: bytes, message: bytes) -> bool:
        if self._streams is not None:
            if self._streams.send(peer, message):
                return True
            self._counts["undeliverable"] += 1
            return False
        try:
            self._peers.send(peer, _FIRST_FRAME)
            self._peers.send(message, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._counts["undeliverable"] += 1
            return False
        finally:
            if self._reader is not None:
                self._reader.look()
        return True

    def _note(self, kind: str, what: str) -> None:
        self._counts[kind] += 1
        if self._counts[kind] == 1:
            log.warning("ignored (said once per kind): %s: %s", kind, what[:300])


def _bind(peers: "zmq.Socket[bytes]", address: str) -> str:
    """The address that it is bound to. Raises `zmq.ZMQError`."""
    for option, value in (
        (zmq.LINGER, 200),
        (zmq.SNDHWM, 100_000),
        (zmq.RCVHWM, 100_000),
        (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.ROUTER_HANDOVER, 1),
    ):
        peers.setsockopt(option, value)
    peers.bind(address)
    return peers.getsockopt_string(zmq.LAST_ENDPOINT)


async def _logged(job: Coroutine[Any, Any, None]) -> None:
    try:
        await job
    except Exception:
        log.exception("%r has failed", job)
