"""The router's process: one thread that moves messages between ZMQ sockets and `Router.handle`.

Gateways and the supervisor are DEALER peers of one ROUTER socket. A message is two frames, the peer's
identity and one encoded event; the answer goes back the same way. An empty message is a heartbeat and is
answered: a peer that has sent one hears of every change of the workers, and one that then falls silent is
taken for dead, and the requests that it had in flight are ended as aborted. A worker is sick as long as any
peer says so. No decision is made here: what a peer may say is refused or passed on.
"""

import contextlib
import logging
import socket
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import zmq

from router.events import (
    Action,
    Arrive,
    Cleared,
    Done,
    Event,
    Follow,
    Place,
    Progress,
    ProtocolError,
    Query,
    Running,
    Snapshot,
    Table,
    WorkerDown,
    WorkerDrain,
    WorkerHealth,
    Workers,
    WorkerUp,
    decode_event,
    encode,
)
from router.replicas import Replica
from router.wire import HEARTBEAT, HEARTBEAT_ANSWER, CacheEvent

log = logging.getLogger("router")

MAX_MESSAGE_BYTES = 64 << 20
MESSAGES_PER_TURN = 256
"""Messages taken from one socket before the others get their turn."""

TURN_MS = 250
"""Longest sleep: deadlines are looked at this often."""

FROM_PEERS = (
    Arrive,
    Progress,
    Done,
    Running,
    Table,
    WorkerUp,
    WorkerDown,
    WorkerDrain,
    WorkerHealth,
    Follow,
    Query,
)
"""What a peer may say. Cache events come from replicas alone."""


class Handles(Protocol):
    """The pure core, as the shell sees it."""

    def handle(self, event: Event, now_s: float, peer: bytes = b"") -> Sequence[Action]:
        """Takes one event and returns who is to be told what."""
        ...


class Shell:
    """Sockets, clock and bookkeeping of peers around one router core.

    `endpoint` is the address it is bound to. `stop` may be called from a signal handler or another
    thread; all else belongs to the thread of `run`.
    """

    def __init__(
        self,
        router: Handles,
        bind: str,
        *,
        peer_timeout_s: float = 10.0,
        replay_timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Binds; raises `zmq.ZMQError` when it cannot."""
        self._router = router
        self._clock = clock
        self._peer_timeout_s = peer_timeout_s
        self._replay_timeout_s = replay_timeout_s
        self._name = uuid.uuid4().hex
        self._replicas: dict[str, Replica] = {}
        self._workers = Workers("", (), router=self._name)
        self._called_sick: defaultdict[str, set[bytes]] = defaultdict(set)
        self._down: set[str] = set()
        self._heard_s: dict[bytes, float] = {}
        self._in_flight: dict[bytes, dict[str, None]] = {}
        self._counts: Counter[str] = Counter()
        self._stopping = False
        self._waker, self._wake = socket.socketpair()
        self._waker.setblocking(False)
        self._wake.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers = self._context.socket(zmq.ROUTER)
        try:
            for option, value in (
                (zmq.LINGER, 200),
                (zmq.SNDHWM, 100_000),
                (zmq.RCVHWM, 100_000),
                (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
                (zmq.ROUTER_MANDATORY, 1),
                (zmq.ROUTER_HANDOVER, 1),
            ):
                self._peers.setsockopt(option, value)
            self._peers.bind(bind)
        except zmq.ZMQError:
            self.close()
            raise
        self.endpoint = self._peers.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._peers, zmq.POLLIN)
        self._poller.register(self._wake.fileno(), zmq.POLLIN)

    def run(self) -> None:
        """Serves until `stop`. Raises what the core raises: a broken core must not go on placing."""
        while not self._stopping:
            self._turn()

    def stop(self) -> None:
        """Makes `run` return soon; any thread, and signal handlers, may call it."""
        self._stopping = True
        with contextlib.suppress(BlockingIOError):  # full: it is awake already
            self._waker.send(b"\0")

    def close(self) -> None:
        """Closes every socket; what was already sent still leaves."""
        for replica in self._replicas.values():
            replica.close()
        self._replicas.clear()
        self._peers.close()
        self._context.term()
        self._waker.close()
        self._wake.close()

    def tell(self, event: Event, peer: bytes = b"") -> None:
        """Hands one event to the core and carries out what it answers."""
        if isinstance(event, WorkerUp):
            self._follow(event)
        elif isinstance(event, WorkerDown):
            self._down.add(event.worker)
            self._drop(event.worker)
        elif isinstance(event, Done):
            self._in_flight.get(peer, {}).pop(event.id, None)
        elif isinstance(event, Running):
            self._in_flight.setdefault(peer, {})[event.id] = None
        elif isinstance(event, WorkerHealth) and not self._is_news(event, peer):
            return
        for to, answer in self._router.handle(event, self._clock(), peer):
            if isinstance(answer, Snapshot):
                answer = Snapshot(answer.id, {**answer.state, "wire": self.state()})
            elif isinstance(answer, Workers):
                answer = msgspec.structs.replace(answer, router=self._name)
            delivered = self._send(to, encode(answer))
            if not isinstance(answer, Place):
                continue
            if delivered:
                self._in_flight.setdefault(to, {})[answer.id] = None
            else:
                self.tell(Done(answer.id, outcome="aborted"), to)
        if isinstance(event, WorkerUp) and event.worker in self._down:
            self._down.discard(event.worker)
            self.tell(Cleared(event.worker))
        if isinstance(event, WorkerUp | WorkerDown | WorkerDrain | WorkerHealth) or (
            self._workers.draining and isinstance(event, Done)
        ):
            self._compare_workers()

    def state(self) -> dict[str, object]:
        """Counters of the wire, for the snapshot."""
        return {
            "counts": dict(sorted(self._counts.items())),
            "peers": len(self._heard_s),
            "kv": {
                name: {"expected": replica.follower.expected, **vars(replica.follower.counts)}
                for name, replica in sorted(self._replicas.items())
            },
        }

    def _turn(self) -> None:
        ready = dict(self._poller.poll(TURN_MS))
        if self._drain_peers():
            # Only with nothing left to read: after a pause of our own, what peers said meanwhile comes first.
            self._end_silent_peers()
        for replica in list(self._replicas.values()):
            if replica.kv_socket in ready:
                self._drain(replica, replica.kv_socket)
            if (replay := replica.replay_socket) is not None and replay in ready:
                self._drain(replica, replay)
            self._take(replica.follower.give_up_after(self._replay_timeout_s, self._clock()))
            self._ask_replay(replica)

    def _drain_peers(self) -> bool:
        """Whether all has been read."""
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = self._peers.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            if len(frames) != 2:
                self._note("peer frames", f"a message of {len(frames) - 1} frames, one is expected")
                continue
            peer, message = frames
            if peer in self._heard_s:
                self._heard_s[peer] = self._clock()
            if message == HEARTBEAT:
                self._heard_s[peer] = self._clock()
                self._send(peer, HEARTBEAT_ANSWER)
                continue
            try:
                event = decode_event(message)
            except ProtocolError as error:
                self._note("peer message", str(error))
                continue
            if isinstance(event, FROM_PEERS):
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

    def _follow(self, up: WorkerUp) -> None:
        known = self._replicas.get(up.worker)
        if known is not None and (known.kv, known.replay) == (up.kv, up.replay):
            return
        self._drop(up.worker)
        if up.kv is None:
            return
        try:
            replica = Replica(self._context, up.worker, up.kv, up.replay)
        except zmq.ZMQError as error:
            self._note("worker address", f"worker {up.worker}: {up.kv}, {up.replay}: {error}")
            return
        self._replicas[up.worker] = replica
        self._poller.register(replica.kv_socket, zmq.POLLIN)
        if replica.replay_socket is not None:
            self._poller.register(replica.replay_socket, zmq.POLLIN)
        self._ask_replay(replica)

    def _is_news(self, event: WorkerHealth, peer: bytes) -> bool:
        """Whether a peer's word changes what is said of a worker by all of them."""
        callers = self._called_sick[event.worker]
        was_sick = bool(callers)
        if event.ok:
            callers.discard(peer)
        else:
            callers.add(peer)
        return bool(callers) is not was_sick

    def _compare_workers(self) -> None:
        """Follows the cache of those that are well again, of none that are gone; tells the gateways."""
        [(_, workers)] = self._router.handle(Follow(""), self._clock())
        assert isinstance(workers, Workers)
        workers = msgspec.structs.replace(workers, router=self._name)
        names = {up.worker for up in workers.workers}
        for worker in self._called_sick.keys() - names:
            del self._called_sick[worker]
        if workers == self._workers:
            return
        before, self._workers = self._workers, workers
        for worker in self._replicas.keys() - names:
            self._drop(worker)
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

    def _end_silent_peers(self) -> None:
        now_s = self._clock()
        for peer in [p for p, heard_s in self._heard_s.items() if now_s - heard_s > self._peer_timeout_s]:
            del self._heard_s[peer]
            lost = self._in_flight.pop(peer, {})
            self._counts["peers lost"] += 1
            log.log(
                logging.WARNING if lost else logging.INFO,
                "a gateway is gone, with %d requests in flight",
                len(lost),
            )
            for request in lost:
                self.tell(Done(request, outcome="aborted"), peer)
            for worker in [name for name, callers in self._called_sick.items() if peer in callers]:
                self.tell(WorkerHealth(worker, True), peer)

    def _send(self, peer: bytes, message: bytes) -> bool:
        try:
            self._peers.send_multipart([peer, message], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._counts["undeliverable"] += 1
            return False
        return True

    def _note(self, kind: str, what: str) -> None:
        self._counts[kind] += 1
        if self._counts[kind] == 1:
            log.warning("ignored (said once per kind): %s: %s", kind, what[:300])
