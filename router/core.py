"""The router as one state machine: an event comes in, answers go out, and nothing else happens.

It owns the tree of cached prefixes, the loads, the table of requests in flight and the placement. A request
is placed at once or refused at once: queues are at the workers. Only a placement that holds requests lets
them wait here, at most `MAX_WAITING`; such an `Arrive` is answered when its turn comes, and a `Done` takes it
back. Every request that is placed ends exactly once, by its gateway's `Done` or with its worker, and what a
peer says out of turn is counted and ignored.
"""

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, fields, is_dataclass
from math import isfinite
from typing import assert_never

from router.events import (
    TOKEN_BYTES,
    Action,
    Arrive,
    Cleared,
    Difference,
    Done,
    Event,
    Follow,
    Outcome,
    Place,
    Progress,
    Query,
    Refuse,
    Removed,
    Running,
    Snapshot,
    Stored,
    Table,
    WorkerDown,
    WorkerDrain,
    WorkerHealth,
    Workers,
    WorkerUp,
)
from router.placement.contract import Ended, Holding, Placement, Request
from router.placement.outputs import ExpectedOutputs
from router.radix import Hold, Match, RadixTree
from router.shared_limit import SharedLimit

MAX_LISTED_CLIENTS = 100
"""Clients that a snapshot lists."""

MAX_WAITING = 10_000
"""Requests that wait here under a placement that holds them, shared by the clients; beyond, they are refused."""

MAX_HOLD_PART = 32
"""A request in flight adds to the tree no more than this part of what that may hold."""

_MAX_ORPHANS = 100_000
"""Requests that ended with their worker and whose `Done` is awaited; beyond, the oldest is not waited for."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker that is up."""

    name: str
    url: str
    kv: str | None
    replay: str | None
    capacity: float
    draining: bool = False
    sick: bool = False
    in_flight: int = 0
    load: float = 0.0
    """`in_flight` per unit of capacity, kept because placements read it more often than it changes."""
    prefill_tokens: int = 0
    decode_tokens: float = 0.0
    dispatched: int = 0
    dispatched_tokens: int = 0

    @property
    def takes_requests(self) -> bool:
        """Whether it may be named."""
        return not (self.draining or self.sick)

    def count(self, requests: int) -> None:
        """So many more requests are in flight."""
        self.in_flight += requests
        assert self.in_flight >= 0, self.name
        self.load = self.in_flight / self.capacity
        if not self.in_flight:
            self.decode_tokens = 0.0  # what rounding has left over


@dataclass(slots=True, eq=False)
class _Flight:
    """A request in flight. What it has still to prefill and to decode is part of its worker's load."""

    request: Request
    worker: _Worker
    peer: bytes
    matched_tokens: int
    hold: Hold
    prefill_tokens: int
    decode_tokens: float
    expected_tokens: float
    output_tokens: int = 0


class Router:
    """Places requests by `placement`. Single-threaded; the caller brings the clock, which never goes back.

    A prefix whose request ended before the worker's own event confirmed it is believed for `linger_s` more.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        name: str = "",
        page_size: int = 16,
        max_tree_tokens: int = 8_000_000,
        linger_s: float = 1.0,
    ) -> None:
        if not linger_s >= 0:
            raise ValueError(f"linger_s is {linger_s}: it cannot be negative")
        self.tree = RadixTree(page_size, max_tree_tokens, max_tree_tokens // MAX_HOLD_PART)
        self._placement = placement
        self._name = name or type(placement).__name__
        self._linger_s = linger_s
        self._workers: dict[str, _Worker] = {}
        self._taking: list[_Worker] = []
        """Those that take requests, in the order of names."""
        self._outputs = ExpectedOutputs()
        self._flights: dict[str, _Flight] = {}
        self._holding = placement if isinstance(placement, Holding) else None
        self._waiting: dict[str, tuple[Request, bytes]] = {}
        """With whom they wait for: the peer."""
        self._room = SharedLimit(MAX_WAITING)
        self._matches: dict[str, Match] = {}
        """Of those that wait, as the tree is: forgotten when it changes."""
        self._orphans: OrderedDict[str, None] = OrderedDict()
        self._lingering: deque[tuple[float, Hold]] = deque()
        self._counts: Counter[str] = Counter()

    def handle(self, event: Event, now_s: float, peer: bytes = b"") -> list[Action]:
        """What to answer to `event`, which `peer` sent at `now_s`. Raises nothing on a peer's input."""
        while self._lingering and self._lingering[0][0] <= now_s:
            self.tree.release(self._lingering.popleft()[1])
        self._matches.clear()
        actions = self._take(event, now_s, peer)
        return actions + self._place_waiting(now_s) if self._waiting else actions

    def _take(self, event: Event, now_s: float, peer: bytes) -> list[Action]:
        match event:
            case Arrive():
                answer = self._arrive(event, now_s, peer)
                return [] if answer is None else [(peer, answer)]
            case Done():
                self._done(event, now_s)
            case Stored() | Removed() | Cleared():
                self._cache_changed(event)
            case Progress():
                self._progress(event)
            case Running():
                self._running(event, now_s, peer)
            case Table():
                return [(peer, self._difference(event, peer))]
            case WorkerUp():
                self._worker_up(event, now_s)
            case WorkerDown():
                self._worker_down(event.worker, now_s)
            case WorkerDrain():
                self._worker_drain(event.worker, now_s)
            case WorkerHealth():
                self._worker_health(event)
            case Follow():
                return [(peer, self._list_workers(event.id))]
            case Query():
                return [(peer, Snapshot(event.id, self.state()))]
            case _:
                assert_never(event)
        return []

    # -- requests

    def _arrive(self, event: Arrive, now_s: float, peer: bytes) -> Place | Refuse | None:
        self._counts["arrived"] += 1
        known = self._flights.get(event.id)
        waiting = self._waiting.get(event.id)
        if (known is not None and known.peer != peer) or (waiting is not None and waiting[1] != peer):
            return self._refuse(
                event.id, "a request with this id is in flight from another gateway", retry=False
            )
        if known is not None:  # its gateway heard no answer
            self._counts["asked again"] += 1
            if known.worker.takes_requests and known.worker.name not in event.exclude:
                return Place(event.id, known.worker.name, known.worker.url, known.matched_tokens)
            self._end(known, Done(event.id, outcome="failed"), now_s)
        if waiting is not None and waiting[0].exclude == event.exclude:
            self._counts["asked again"] += 1
            return None
        self._give_up(event.id)
        self._orphans.pop(event.id, None)
        if not self._workers:
            return self._refuse(event.id, "no worker is up", retry=True)
        if not self._taking:
            return self._refuse(
                event.id, "no worker takes requests: each drains or does not answer", retry=True
            )
        allowed = self._taking
        if event.exclude:
            allowed = [worker for worker in allowed if worker.name not in event.exclude]
        if not allowed:
            return self._refuse(event.id, "every worker that is up is excluded", retry=True)
        if self._holding is not None and not self._room.take(event.client):
            reason = f"too many requests wait for a worker: {self._room.held(event.client)} of this client"
            return self._refuse(event.id, reason, retry=True, is_full=True)

        input_tokens = len(event.tokens) // TOKEN_BYTES
        request = Request(
            event.id,
            event.client,
            event.tokens,
            input_tokens,
            event.max_output_tokens,
            event.namespace,
            event.exclude,
        )
        match = self.tree.match(event.tokens, event.namespace)
        name = self._placement.place(request, match, allowed, now_s)
        if name is None:
            self._waiting[event.id] = request, peer
            self._matches[event.id] = match
            return None
        if self._holding is not None:
            self._room.give(event.client)
        worker = self._workers[name]
        assert worker in allowed, worker.name
        return self._place(request, worker, match, peer, now_s)

    def _place(self, request: Request, worker: _Worker, match: Match, peer: bytes, now_s: float) -> Place:
        matched_tokens = self._begin(request, worker, match, peer, now_s).matched_tokens
        self._counts["placed"] += 1
        self._counts["input_tokens"] += request.input_tokens
        self._counts["predicted_tokens"] += matched_tokens
        return Place(request.id, worker.name, worker.url, matched_tokens)

    def _place_waiting(self, now_s: float) -> list[Action]:
        """Answers those whose turn has come."""
        assert self._holding is not None
        actions: list[Action] = []
        while self._waiting and (found := self._holding.next(self._taking, self._match)) is not None:
            request, worker = found
            _, peer = self._waiting.pop(request.id)
            self._room.give(request.client)
            match = self._match(request)
            actions.append((peer, self._place(request, self._workers[worker], match, peer, now_s)))
        return actions

    def _match(self, request: Request) -> Match:
        match = self._matches.get(request.id)
        if match is None:
            match = self._matches[request.id] = self.tree.match(request.tokens, request.namespace)
        return match

    def _give_up(self, name: str) -> bool:
        """Whether `name` waited, which it does no more."""
        waiting = self._waiting.pop(name, None)
        if waiting is None:
            return False
        assert self._holding is not None
        self._room.give(waiting[0].client)
        self._holding.give_up(waiting[0])
        self._counts["given up"] += 1
        return True

    def _begin(self, request: Request, worker: _Worker, match: Match, peer: bytes, now_s: float) -> _Flight:
        """Takes a request into the table: the only place where one enters it."""
        self._placement.placed(request, worker.name, match, now_s)
        hold = self.tree.hold(worker.name, request.tokens, request.namespace, match)
        self._matches.clear()
        matched_tokens = match.of(worker.name)
        prefill_tokens = request.input_tokens - matched_tokens
        expected_tokens = self._outputs.of(request.client, request.max_output_tokens)
        flight = _Flight(
            request, worker, peer, matched_tokens, hold, prefill_tokens, expected_tokens, expected_tokens
        )
        self._flights[request.id] = flight
        worker.count(1)
        worker.prefill_tokens += prefill_tokens
        worker.decode_tokens += expected_tokens
        worker.dispatched += 1
        worker.dispatched_tokens += request.input_tokens
        return flight

    def _running(self, event: Running, now_s: float, peer: bytes) -> None:
        """Takes over a request that another router, or no router, has placed."""
        worker = self._workers.get(event.worker)
        if worker is None or event.id in self._flights or event.id in self._orphans:
            self._counts["running ignored"] += 1
            return
        self._give_up(event.id)
        request = Request(
            event.id,
            event.client,
            event.tokens,
            len(event.tokens) // TOKEN_BYTES,
            event.max_output_tokens,
            event.namespace,
        )
        match = self.tree.match(event.tokens, event.namespace)
        self._produced(self._begin(request, worker, match, peer, now_s), event.output_tokens)
        self._counts["taken over"] += 1

    def _difference(self, event: Table, peer: bytes) -> Difference:
        theirs = set(event.requests)
        return Difference(
            event.id,
            missing=tuple(
                name for name in event.requests if name not in self._flights and name not in self._orphans
            ),
            unsettled=tuple(
                name for name, flight in self._flights.items() if flight.peer == peer and name not in theirs
            ),
        )

    def _refuse(self, request: str, reason: str, *, retry: bool, is_full: bool = False) -> Refuse:
        self._counts["refused"] += 1
        return Refuse(request, reason, retry, is_full)

    def _progress(self, event: Progress) -> None:
        flight = self._flights.get(event.id)
        if flight is None:
            self._counts["progress ignored"] += 1
        else:
            self._produced(flight, event.output_tokens)

    def _produced(self, flight: _Flight, output_tokens: int) -> None:
        if output_tokens > flight.output_tokens:
            flight.output_tokens = output_tokens
            self._owes(flight, 0, max(1.0, flight.expected_tokens - output_tokens))

    def _owes(self, flight: _Flight, prefill_tokens: int, decode_tokens: float) -> None:
        """So much of the request is still to be computed."""
        flight.worker.prefill_tokens += prefill_tokens - flight.prefill_tokens
        flight.worker.decode_tokens += decode_tokens - flight.decode_tokens
        flight.prefill_tokens, flight.decode_tokens = prefill_tokens, decode_tokens

    def _done(self, event: Done, now_s: float) -> None:
        flight = self._flights.get(event.id)
        if flight is not None:
            self._end(flight, event, now_s)
            if flight.worker.draining and not flight.worker.in_flight:
                self._worker_down(flight.worker.name, now_s)
        elif self._give_up(event.id):
            return
        elif event.id in self._orphans:
            del self._orphans[event.id]
            self._counts["done after its worker"] += 1
        else:
            self._counts["done ignored"] += 1

    def _end(self, flight: _Flight, done: Done, now_s: float) -> None:
        """Ends a request: the only place where one leaves the table."""
        request, worker = flight.request, flight.worker
        del self._flights[request.id]
        self._owes(flight, 0, 0.0)
        worker.count(-1)
        if done.outcome == "failed":
            self.tree.release(flight.hold, served=False)
        elif self._linger_s and worker.kv is not None and not self.tree.is_confirmed(flight.hold):
            self.tree.linger(flight.hold)
            self._lingering.append((now_s + self._linger_s, flight.hold))
        else:
            self.tree.release(flight.hold)
        output_tokens = max(flight.output_tokens, done.output_tokens)
        if done.outcome == "ok":
            self._outputs.learn(request.client, output_tokens)
        self._counts[f"ended {done.outcome}"] += 1
        self._counts["output_tokens"] += output_tokens
        if done.cached_tokens is not None:
            self._counts["measured_input_tokens"] += request.input_tokens
            self._counts["measured_predicted_tokens"] += flight.matched_tokens
            self._counts["measured_cached_tokens"] += done.cached_tokens
        outcome: Outcome = done.outcome
        ended = Ended(
            request, worker.name, flight.matched_tokens, output_tokens, outcome, done.ttft_s, done.tpot_s
        )
        self._placement.done(ended, now_s)

    # -- workers

    def _worker_up(self, event: WorkerUp, now_s: float) -> None:
        known = self._workers.get(event.worker)
        if known is not None and (known.url, known.kv) == (event.url, event.kv):
            known.draining = False
            self._list_taking()
            if known.capacity != event.capacity:
                known.capacity = event.capacity
                known.count(0)
                self._placement.worker_changed(event.worker, event.capacity)
            return
        if known is not None:  # it moved, so it is another process
            self._worker_down(event.worker, now_s)
        worker = _Worker(event.worker, event.url, event.kv, event.replay, event.capacity)
        # Ties go to whoever was sent fewer tokens: a newcomer is not to win all of them.
        worker.dispatched_tokens = min(
            (other.dispatched_tokens for other in self._workers.values()), default=0
        )
        self._workers[event.worker] = worker
        self._workers = dict(sorted(self._workers.items()))
        self._list_taking()
        self.tree.add_worker(event.worker, has_events=event.kv is not None)
        self._placement.worker_up(event.worker, event.capacity)
        self._counts["workers up"] += 1

    def _worker_down(self, name: str, now_s: float) -> None:
        worker = self._workers.get(name)
        if worker is None:
            self._counts["worker down ignored"] += 1
            return
        for flight in [flight for flight in self._flights.values() if flight.worker is worker]:
            self._end(flight, Done(flight.request.id, outcome="failed"), now_s)
            self._counts["lost with their worker"] += 1
            self._orphans[flight.request.id] = None
        while len(self._orphans) > _MAX_ORPHANS:
            self._orphans.popitem(last=False)
        del self._workers[name]
        self._list_taking()
        self._placement.worker_down(name)
        self.tree.remove_worker(name)
        self._counts["workers down"] += 1

    def _worker_drain(self, name: str, now_s: float) -> None:
        worker = self._workers.get(name)
        if worker is None:
            self._counts["worker drain ignored"] += 1
            return
        worker.draining = True
        self._list_taking()
        if not worker.in_flight:
            self._worker_down(name, now_s)

    def _worker_health(self, event: WorkerHealth) -> None:
        worker = self._workers.get(event.worker)
        if worker is None or worker.sick is not event.ok:
            self._counts["worker health ignored"] += 1
            return
        worker.sick = not event.ok
        self._list_taking()
        self._counts["workers well" if event.ok else "workers sick"] += 1
        self.tree.clear(event.worker)

    def _list_taking(self) -> None:
        self._taking = [worker for worker in self._workers.values() if worker.takes_requests]

    def _list_workers(self, name: str) -> Workers:
        workers = self._workers.values()
        return Workers(
            name,
            tuple(WorkerUp(w.name, w.url, w.kv, w.replay, w.capacity) for w in workers),
            draining=tuple(w.name for w in workers if w.draining),
            sick=tuple(w.name for w in workers if w.sick),
        )

    def _cache_changed(self, event: Stored | Removed | Cleared) -> None:
        if event.worker not in self._workers:
            self._counts["cache event ignored"] += 1
            return
        match event:
            case Stored():
                self.tree.stored(
                    event.worker,
                    event.hashes,
                    event.parent,
                    event.tokens,
                    event.block_tokens,
                    event.namespace,
                )
            case Removed():
                self.tree.removed(event.worker, event.hashes)
            case Cleared():
                self.tree.clear(event.worker)
            case _:
                assert_never(event)

    # -- looking in

    def state(self) -> dict[str, object]:
        """All that a dashboard shows: plain maps, texts and finite numbers. None stands for no limit."""
        counts = self._counts
        return {
            "placement": self._name,
            "parameters": _parameters(self._placement),
            "workers": {
                worker.name: {
                    "url": worker.url,
                    "kv": worker.kv,
                    "capacity": worker.capacity,
                    "state": "draining" if worker.draining else "sick" if worker.sick else "up",
                    "in_flight": worker.in_flight,
                    "prefill_tokens": worker.prefill_tokens,
                    "decode_tokens": round(worker.decode_tokens, 1),
                    "dispatched": worker.dispatched,
                    "dispatched_tokens": worker.dispatched_tokens,
                    "tree_tokens": self.tree.worker_tokens(worker.name),
                }
                for worker in self._workers.values()
            },
            "in_flight": len(self._flights),
            "waiting": len(self._waiting),
            "decisions": counts["placed"],
            "hits": {
                "input_tokens": counts["input_tokens"],
                "predicted_tokens": counts["predicted_tokens"],
                "measured_input_tokens": counts["measured_input_tokens"],
                "measured_predicted_tokens": counts["measured_predicted_tokens"],
                "measured_cached_tokens": counts["measured_cached_tokens"],
            },
            "deficits": {
                client: {worker: _plain(credit) for worker, credit in row.items()}
                for client, row in self._placement.credits(MAX_LISTED_CLIENTS).items()
            },
            "tree": {
                "page_size": self.tree.page_size,
                "lingering": len(self._lingering),
                **self.tree.counters(),
            },
            "counts": dict(sorted(counts.items())),
        }


def _parameters(placement: Placement) -> dict[str, object]:
    """The parameters of a placement that is a dataclass."""
    if not is_dataclass(placement):
        return {}
    return {field.name: _plain(getattr(placement, field.name)) for field in fields(placement) if field.init}


def _plain(value: object) -> object:
    """`value` as JSON can say it."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, float) and not isfinite(value):
        return None
    return value
