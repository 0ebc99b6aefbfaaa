"""The router's process: one thread that moves messages between ZMQ sockets and `Router.handle`.

Gateways and the supervisor are DEALER peers of one ROUTER socket. A message is two frames, the peer's identity and
one encoded event; the answer goes back the same way. An empty message is a heartbeat and is answered. A peer that
has sent one is told of every change of the workers; if it then falls silent, the core hears that it is gone.

The shell keeps the sockets, the clock, and when each peer was last heard. What follows from a message is decided
in the core.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar, get_args

import msgspec
import zmq

from router.core import Router
from router.events import (
    Agent,
    Answer,
    CacheEvent,
    Done,
    Event,
    PeerEvent,
    PeerGone,
    Place,
    Posted,
    ProtocolError,
    SetLimits,
    Snapshot,
    Tick,
    Undelivered,
    WorkerDown,
    WorkerDrain,
    WorkerHealth,
    Workers,
    WorkerUp,
    decode_event,
    encode,
)
from router.plans import Plans
from router.replicas import LoadFeed, Replica
from router.silence import ActiveClock
from router.sockets import has_come
from router.wire import HEARTBEAT, HEARTBEAT_ANSWER
from sglang_fair.common.curve import Gate, Keys

log = logging.getLogger("router")

MAX_MESSAGE_BYTES = 64 << 20
MESSAGES_PER_TURN = 256
"""Messages read from one socket before the others get their turn."""

TURN_MS = 250
"""Deadlines are checked at least this often, and the core hears so often that time has passed."""


_CHANGES_WORKERS = (
    WorkerUp, WorkerDown, WorkerDrain, WorkerHealth, PeerGone, SetLimits, Posted, Agent
)  # fmt: skip
_FREES_WORKERS = (Done, Undelivered)
"""A worker that drains may be empty by that."""
_PEER_EVENTS = get_args(PeerEvent)
"""As a tuple, which is made once: a union is taken apart each time."""
_FIRST_FRAME = int(zmq.NOBLOCK | zmq.SNDMORE)

Found = TypeVar("Found")


class Shell:
    """Runs one router core behind a bound socket.

    `endpoint` is the address of that socket. `stop` may be called from a signal handler or another thread, and `call`
    from another thread; all other methods belong to the thread of `run`.
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
        """Binds the socket. Raises `zmq.ZMQError` if it cannot.

        A peer that has sent a heartbeat and then nothing for `peer_timeout_s` is gone. A gap in the KV events of a
        replica is passed over if its replay has not closed it within `replay_timeout_s`. With `keys`, peers and
        replicas must have theirs.
        """
        self._router = router
        self._clock = clock
        self._peer_timeout_s = peer_timeout_s
        self._replay_timeout_s = replay_timeout_s
        self._keys = keys
        self._name = uuid.uuid4().hex
        self._replicas: dict[str, Replica] = {}
        self._loads: dict[str, LoadFeed] = {}
        self._workers = Workers("", (), router=self._name)
        """As the peers were last told."""
        self._time = ActiveClock(2 * TURN_MS / 1e3)
        self._heard_s: dict[bytes, float] = {}
        """When each peer that sends heartbeats was last heard, by `_time`."""
        self._counts: Counter[str] = Counter()
        self._plans = Plans(self._rouse)
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._ticked_s = clock()
        self._stopping = False
        self._waker, self._wake = socket.socketpair()
        self._waker.setblocking(False)
        self._wake.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers = self._context.socket(zmq.ROUTER)
        self._gate = None if keys is None else Gate(self._context, keys)
        try:
            if keys is not None and self._gate is not None:
                keys.serve(self._peers)
                self._gate.watch(self._peers)
            self.endpoint = _bind(self._peers, bind)
        except zmq.ZMQError:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._peers, zmq.POLLIN)
        self._poller.register(self._wake.fileno(), zmq.POLLIN)
        for source in [] if self._gate is None else self._gate.sockets:
            self._poller.register(source, zmq.POLLIN)

    def run(self) -> None:
        """Serves until `stop`. What the core raises ends it: a broken core must not go on placing."""
        while not self._stopping:
            self._turn()

    def stop(self) -> None:
        """Makes `run` return soon. Any thread and any signal handler may call it."""
        self._stopping = True
        self._rouse()

    def close(self) -> None:
        """Closes every socket. Messages sent before still leave."""
        for replica in self._replicas.values():
            replica.close()
        self._replicas.clear()
        for feed in self._loads.values():
            feed.close()
        self._loads.clear()
        self._peers.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()
        self._plans.close()
        self._waker.close()
        self._wake.close()

    def call(self, what: Callable[[], Found]) -> Future[Found]:
        """Has the loop run `what` between two messages; from any thread. What that raises ends the loop."""
        future: Future[Found] = Future()
        self._calls.append((what, future))
        self._rouse()
        return future

    def listing(self) -> Workers:
        """The workers and limits that peers are told of."""
        return msgspec.structs.replace(self._router.listing(), router=self._name)

    def snapshot(self) -> dict[str, object]:
        """The core's state, and that of the wire."""
        return {**self._router.state(), "wire": self.state()}

    def tell(self, event: Event, peer: bytes = b"") -> None:
        """Hands `event` to the core and sends its answers; what cannot be sent is the next event."""
        events: deque[tuple[Event, bytes]] = deque([(event, peer)])
        while events:
            event, peer = events.popleft()
            for to, answer in self._router.handle(event, self._clock(), peer):
                if self._send(to, encode(self._completed(answer))):
                    continue
                if isinstance(answer, Place):
                    events.append((Undelivered(answer.id), to))
            if (question := self._router.question(self._clock())) is not None:
                self._plans.ask(*question)
            if isinstance(event, WorkerUp):
                self._follow(event)
            may_be_empty = self._workers.draining and isinstance(event, _FREES_WORKERS)
            if may_be_empty or isinstance(event, _CHANGES_WORKERS):
                self._compare_workers()

    def state(self) -> dict[str, object]:
        """Counters of the wire, for the snapshot."""
        return {
            "counts": dict(sorted(self._counts.items())),
            "peers": len(self._heard_s),
            "refused": 0 if self._gate is None else self._gate.refused,
            "planning": self._plans.pid,
            "kv": {
                name: {"expected": replica.follower.expected, **vars(replica.follower.counts)}
                for name, replica in sorted(self._replicas.items())
            },
        }

    def _completed(self, answer: Answer) -> Answer:
        """`answer` with what only the shell knows: the counters of the wire, the name of this run."""
        if isinstance(answer, Snapshot):
            return Snapshot(answer.id, {**answer.state, "wire": self.state()})
        if isinstance(answer, Workers):
            return msgspec.structs.replace(answer, router=self._name)
        return answer

    def _turn(self) -> None:
        ready = dict(self._poller.poll(TURN_MS))
        if self._wake.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(4096)
        while self._calls:
            what, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                future.set_result(what())
        if (planned := self._plans.done()) is not None:
            self.tell(planned)
        if self._gate is not None:
            for source in self._gate.sockets:
                if source in ready:
                    self._gate.serve(source)
        if self._drain_peers():
            # Only with nothing left to read: after a pause of our own, what peers said meanwhile comes first.
            self._drop_silent_peers()
            if self._clock() - self._ticked_s >= TURN_MS / 1e3:
                self._ticked_s = self._clock()
                self.tell(Tick())
        for replica in list(self._replicas.values()):
            if replica.kv_socket in ready:
                self._drain(replica, replica.kv_socket)
            if (replay := replica.replay_socket) is not None and replay in ready:
                self._drain(replica, replay)
            self._take(replica.follower.give_up_after(self._replay_timeout_s, self._clock()))
            self._ask_replay(replica)
        for worker, feed in list(self._loads.items()):
            if feed.socket in ready:
                self._hear_load(worker, feed)

    def _drain_peers(self) -> bool:
        """Whether all has been read."""
        for _ in range(MESSAGES_PER_TURN):
            if not has_come(self._peers):
                return True
            try:
                frames = self._peers.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            if len(frames) != 2:
                self._note("peer frames", f"a message of {len(frames) - 1} frames, one is expected")
                continue
            peer, message = frames
            if message == HEARTBEAT or peer in self._heard_s:
                self._heard_s[peer] = self._time.look(self._clock())
            if message == HEARTBEAT:
                self._send(peer, HEARTBEAT_ANSWER)
                continue
            try:
                event = decode_event(message)
            except ProtocolError as error:
                self._note("peer message", str(error))
                continue
            if isinstance(event, _PEER_EVENTS):
                self.tell(event, peer)
            else:
                self._note("peer event", f"{type(event).__name__} is not for peers to send")
        return False

    def _drain(self, replica: Replica, source: "zmq.Socket[bytes]") -> None:
        for _ in range(MESSAGES_PER_TURN):
            if source.closed:
                return
            try:
                frames = source.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            unreadable = replica.follower.counts.unreadable_batches
            skipped = replica.follower.counts.skipped_events
            try:
                if source is replica.kv_socket:
                    self._take(replica.on_kv(frames, self._clock()))
                else:
                    self._take(replica.on_replay(frames))
            except ProtocolError as error:
                self._note("kv frames", f"worker {replica.follower.worker}: {error}")
            if replica.follower.counts.unreadable_batches > unreadable:
                self._note("kv batch", f"worker {replica.follower.worker}: a batch cannot be read")
            if replica.follower.counts.skipped_events > skipped:
                self._note("kv event", f"worker {replica.follower.worker}: an event cannot be read")
            self._ask_replay(replica)

    def _hear_load(self, worker: str, feed: LoadFeed) -> None:
        try:
            load = feed.latest()
        except ProtocolError as error:
            self._note("load", f"worker {worker}: {error}")
            return
        if load is not None:
            self.tell(load)

    def _take(self, events: list[CacheEvent]) -> None:
        for event in events:
            self.tell(event)

    def _ask_replay(self, replica: Replica) -> None:
        old = replica.replay_socket
        if replica.ask_replay(self._clock()):
            if old is not None:
                self._poller.unregister(old)
            if replica.replay_socket is not None:
                self._poller.register(replica.replay_socket, zmq.POLLIN)

    def _follow_load(self, up: WorkerUp) -> None:
        known = self._loads.get(up.worker)
        if known is not None and known.address == up.load:
            return
        self._drop_load(up.worker)
        if up.load is None:
            return
        try:
            feed = LoadFeed(self._context, up.worker, up.load, self._keys)
        except zmq.ZMQError as error:
            self._note("worker address", f"worker {up.worker}: {up.load}: {error}")
            return
        self._loads[up.worker] = feed
        self._poller.register(feed.socket, zmq.POLLIN)

    def _drop_load(self, worker: str) -> None:
        feed = self._loads.pop(worker, None)
        if feed is not None:
            self._poller.unregister(feed.socket)
            feed.close()

    def _follow(self, up: WorkerUp) -> None:
        self._follow_load(up)
        known = self._replicas.get(up.worker)
        if known is not None and (known.kv, known.replay) == (up.kv, up.replay):
            return
        self._drop(up.worker)
        if up.kv is None:
            return
        try:
            replica = Replica(self._context, up.worker, up.kv, up.replay, self._keys)
        except zmq.ZMQError as error:
            self._note("worker address", f"worker {up.worker}: {up.kv}, {up.replay}: {error}")
            return
        self._replicas[up.worker] = replica
        self._poller.register(replica.kv_socket, zmq.POLLIN)
        if replica.replay_socket is not None:
            self._poller.register(replica.replay_socket, zmq.POLLIN)
        self._ask_replay(replica)

    def _compare_workers(self) -> None:
        """If the core's workers or limits have changed: follows the KV events of workers that are up, and tells peers.

        The events of a worker that is well again are followed from the beginning, because the core has forgotten
        what it cached.
        """
        workers = self.listing()
        if workers == self._workers:
            return
        before, self._workers = self._workers, workers
        for worker in self._replicas.keys() - {up.worker for up in workers.workers}:
            self._drop(worker)
        for worker in self._loads.keys() - {up.worker for up in workers.workers}:
            self._drop_load(worker)
        for up in workers.workers:
            if up.worker in before.sick and up.worker not in workers.sick:
                self._drop(up.worker)
                self._follow(up)
        message = encode(workers)
        for peer in list(self._heard_s):
            self._send(peer, message)

    def _drop(self, worker: str) -> None:
        replica = self._replicas.pop(worker, None)
        if replica is None:
            return
        for source in (replica.kv_socket, replica.replay_socket):
            if source is not None and source in self._poller:
                self._poller.unregister(source)
        replica.close()

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
        try:
            self._peers.send(peer, _FIRST_FRAME)
            self._peers.send(message, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._counts["undeliverable"] += 1
            return False
        return True

    def _rouse(self) -> None:
        """From any thread and any signal handler."""
        with contextlib.suppress(OSError):  # the pipe is full, so it is awake already; or closed
            self._waker.send(b"\0")

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


@contextlib.contextmanager
def beside(*jobs: Coroutine[Any, Any, None]) -> Iterator[None]:
    """Runs `jobs` in the event loop of another thread, and cancels them in the end. What one raises is logged."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def run() -> None:
        tasks = [asyncio.create_task(_logged(job)) for job in jobs]
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), name="beside", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


async def _logged(job: Coroutine[Any, Any, None]) -> None:
    try:
        await job
    except Exception:
        log.exception("%r has failed", job)
