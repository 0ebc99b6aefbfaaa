"""Follow one replica's KV events in order: a pure `Follower` of sequence numbers, and the sockets that feed it.

A publisher numbers its batches from 0 and keeps the last ones for replay. PUB/SUB loses what is sent before a
subscription, and what overflows. So of a live batch number n, with e the next one expected:

    n = e             apply it
    n > e             a gap: hold n, ask for a replay from e, apply both in order
    an old number     (n < e, or no higher than one before) on a batch that is newer than all others, by the replica's
                      clock: the replica has restarted and its cache is empty; begin again at 0
    n < e otherwise   it came twice, or a replay was faster: drop it

What no replay can bring back is counted as lost and passed over. KV events are hints to placement: a tree that misses
some predicts fewer hits or hits that are gone, but no answer becomes wrong.
"""

import asyncio
import logging
import math
from collections.abc import Callable

import zmq

from router.events import CacheEvent, Cleared, ProtocolError, ReplicaEvent, WorkerUp
from router.sockets import Reader, has_come
from router.wire import (
    END_OF_REPLAY,
    decode_kv_batch,
    decode_load,
    decode_numbered,
    encode_sequence,
    published_s,
)
from sglang_fair.common.curve import Keys

log = logging.getLogger("router")

MAX_HELD_BATCHES = 20_000
"""Batches held while a replay is under way; beyond, the gap is passed over."""

RECONNECT_MS = 1_000
"""Longest pause between two attempts to connect."""


COUNTS = (
    "applied_batches", "duplicate_batches", "lost_batches", "unreadable_batches", "skipped_events", "gaps", "replays",
    "restarts",
)  # fmt: skip
"""What became of the batches and events of one replica."""


class Follower:
    """Turns numbered batches, live and replayed, into events in order. No sockets and no clock.

    After each call, `ask_from` is the number from which to ask for a replay, or None; the caller then calls `asked`.
    If `reopen` is set, answers still under way are out of date: the caller must open a new replay socket.
    """

    def __init__(self, worker: str, can_replay: bool) -> None:
        self.worker = worker
        self.counts = dict.fromkeys(COUNTS, 0)
        self.ask_from: int | None = 0 if can_replay else None
        self.reopen = False
        self._can_replay = can_replay
        self._replay_start: int | None = None
        self._expected = 0
        self._newest_live = -1
        self._published_s = -math.inf
        self._held: dict[int, bytes] = {}
        self._waiting_since_s = math.inf

    @property
    def expected(self) -> int:
        """The number of the next batch to apply."""
        return self._expected

    def asked(self, now_s: float) -> None:
        """The caller has asked for a replay from `ask_from`."""
        self._replay_start, self.ask_from = self.ask_from, None
        self.counts["replays"] += 1
        if self._held:
            self._waiting_since_s = now_s

    def live(self, sequence: int, payload: bytes, now_s: float) -> list[CacheEvent]:
        """A batch came from the PUB socket. Returns the events that are now in order."""
        events: list[CacheEvent] = []
        if self._is_restart(sequence, payload):
            events.append(self._restart())
        self._newest_live = max(self._newest_live, sequence)
        if sequence < self._expected:
            self.counts["duplicate_batches"] += 1
            return events
        if not self._held:
            self._waiting_since_s = now_s
        self._held[sequence] = payload
        events += self._drain()
        if self._held and self._replay_start is None and self.ask_from is None:
            self.counts["gaps"] += 1
            self._ask_or_skip(events)
        if len(self._held) > MAX_HELD_BATCHES:
            self._skip_gaps(events)
        return events

    def replayed(self, sequence: int, payload: bytes) -> list[CacheEvent]:
        """A batch came from the replay socket. Returns the events that are now in order."""
        if self._replay_start is None or sequence < self._expected:
            return []
        self._held[sequence] = payload
        if sequence > self._expected:
            # A replay answers in order: the replica no longer has what it skipped.
            oldest = min(self._held)
            self.counts["lost_batches"] += oldest - self._expected
            self._expected = oldest
        return self._drain()

    def end_of_replay(self) -> list[CacheEvent]:
        """The replica has sent all that it has. Asks again as long as that makes progress."""
        events: list[CacheEvent] = []
        start, self._replay_start = self._replay_start, None
        if start is None or not self._held:
            return events
        if self._expected > start:
            self.ask_from = self._expected
        else:
            self._skip_gaps(events)
        return events

    def give_up_after(self, timeout_s: float, now_s: float) -> list[CacheEvent]:
        """Passes over the gap if batches have waited for a replay for more than `timeout_s`."""
        events: list[CacheEvent] = []
        if self._held and now_s - self._waiting_since_s > timeout_s:
            self._replay_start, self.reopen = None, True
            self._skip_gaps(events)
        return events

    def ask_again(self) -> None:
        """The request for a replay has reached nobody: ask on a new connection."""
        self.reopen = True
        if self._replay_start is not None:
            self._replay_start, self.ask_from = None, self._expected

    def _is_restart(self, sequence: int, payload: bytes) -> bool:
        if sequence >= self._expected and sequence > self._newest_live:
            return False
        newest_s = self._published_s
        try:
            if self._newest_live in self._held:
                newest_s = max(newest_s, published_s(self._held[self._newest_live]))
            return published_s(payload) > newest_s
        except ProtocolError:
            return False

    def _restart(self) -> Cleared:
        self.counts["restarts"] += 1
        self._expected, self._newest_live, self._published_s = 0, -1, -math.inf
        self._held.clear()
        self._replay_start, self.ask_from, self.reopen = None, None, True
        return Cleared(self.worker)

    def _ask_or_skip(self, events: list[CacheEvent]) -> None:
        if self._can_replay:
            self.ask_from = self._expected
        else:
            self._skip_gaps(events)

    def _skip_gaps(self, events: list[CacheEvent]) -> None:
        while self._held:
            oldest = min(self._held)
            self.counts["lost_batches"] += oldest - self._expected
            self._expected = oldest
            events += self._drain()

    def _drain(self) -> list[CacheEvent]:
        events: list[CacheEvent] = []
        while (payload := self._held.pop(self._expected, None)) is not None:
            self._expected += 1
            try:
                batch = decode_kv_batch(self.worker, payload)
            except ProtocolError as error:
                self._complain(self.counts["unreadable_batches"], f"a batch cannot be read: {error}")
                self.counts["unreadable_batches"] += 1
                continue
            self.counts["applied_batches"] += 1
            if batch.skipped:
                self._complain(self.counts["skipped_events"], "an event cannot be read")
                self.counts["skipped_events"] += batch.skipped
            self._published_s = max(self._published_s, batch.published_s)
            events += batch.events
        return events

    def _complain(self, before: int, what: str) -> None:
        if not before:
            log.warning("worker %s: %s (said once)", self.worker, what[:300])


class Replica:
    """The sockets to one replica: SUB for its KV events and for its load, DEALER for replays if it offers them."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        up: WorkerUp,
        keys: Keys | None,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        tell: Callable[[ReplicaEvent], None],
        note: Callable[[str, str], None],
    ) -> None:
        """Connects; with `keys`, to a replica that has its own. `tell` gets its events, `note` what cannot be read, by
        its kind. Raises `zmq.ZMQError` for a malformed address."""
        self.addresses = addresses_of(up)
        self.follower = Follower(up.worker, can_replay=self.addresses[1] is not None)
        self._context, self._keys, self._loop = context, keys, loop
        self._clock, self._tell, self._note = clock, tell, note
        self._readers: dict[str, Reader] = {}
        try:
            if up.kv is not None:
                self._open("kv", zmq.SUB, up.kv, self._take_kv)
            if up.load is not None:
                self._open("load", zmq.SUB, up.load, self._take_load)
            self._open_replay()
        except zmq.ZMQError:
            self.close()
            raise
        self._ask_replay()

    def give_up_after(self, timeout_s: float) -> None:
        """Passes over a gap that has waited for its replay for longer."""
        self._pass_on(self.follower.give_up_after(timeout_s, self._clock()))

    def close(self) -> None:
        """Calling it twice is harmless."""
        for reader in self._readers.values():
            reader.close()

    def _open(self, name: str, kind: int, address: str, take: Callable[[list[bytes]], None]) -> None:
        source = self._context.socket(kind)
        try:
            for option, value in (
                (zmq.LINGER, 0),
                (zmq.RCVHWM, 100_000),
                (zmq.HEARTBEAT_IVL, 5_000),
                (zmq.RECONNECT_IVL_MAX, RECONNECT_MS),
            ):
                source.setsockopt(option, value)
            if kind == zmq.SUB:
                source.setsockopt(zmq.SUBSCRIBE, b"")
            if self._keys is not None:
                self._keys.connect(source, "replica")
            source.connect(address)
        except zmq.ZMQError:
            source.close(0)
            raise

        def receive() -> None:
            try:
                take(source.recv_multipart(zmq.NOBLOCK))
            except ProtocolError as error:
                self._note(
                    "load" if name == "load" else "kv frames", f"worker {self.follower.worker}: {error}"
                )

        self._readers[name] = Reader(self._loop, source, receive)

    def _open_replay(self) -> None:
        """Answers to what was asked on the socket before are dropped with it."""
        self.follower.reopen = False
        if (before := self._readers.pop("replay", None)) is not None:
            before.close()
        _, replay, _ = self.addresses
        if replay is not None:
            self._open("replay", zmq.DEALER, replay, self._take_replay)

    def _take_kv(self, frames: list[bytes]) -> None:
        """`[topic, number, batch]`"""
        sequence, payload = decode_numbered(frames)
        self._pass_on(self.follower.live(sequence, payload, self._clock()))

    def _take_replay(self, frames: list[bytes]) -> None:
        """`["", topic, number, batch]`, or without the topic."""
        if len(frames) == 2 and frames[0] == b"":
            # Our own request: the socket is connected to itself, see HEARTBEAT_ANSWER.
            self.follower.ask_again()
            self._ask_replay()
            return
        sequence, payload = decode_numbered(frames[1:], END_OF_REPLAY)
        is_over = sequence == END_OF_REPLAY
        self._pass_on(self.follower.end_of_replay() if is_over else self.follower.replayed(sequence, payload))

    def _take_load(self, frames: list[bytes]) -> None:
        """Of what has come only the latest matters."""
        if not has_come(self._readers["load"].socket):
            self._tell(decode_load(self.follower.worker, frames))

    def _pass_on(self, events: list[CacheEvent]) -> None:
        for event in events:
            self._tell(event)
        self._ask_replay()

    def _ask_replay(self) -> None:
        if self.follower.reopen:
            self._open_replay()
        replay = self._readers.get("replay")
        if self.follower.ask_from is not None and replay is not None:
            # Never blocks: at most one request is under way on a socket.
            replay.socket.send_multipart([b"", encode_sequence(self.follower.ask_from)], zmq.NOBLOCK)
            self.follower.asked(self._clock())
            replay.look()


def addresses_of(up: WorkerUp) -> tuple[str | None, str | None, str | None]:
    """Of KV events, replays and load. Without events there are no replays."""
    return up.kv, up.replay if up.kv is not None else None, up.load
