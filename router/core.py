"""The router as one state machine: `Router.handle` takes an event and returns the answers to send. No I/O, no clock.

What becomes of requests is in `request_events`, of workers in `worker_events`; requests in flight are in `flights`,
those that the placement holds in `waiting`. A message that does not fit is counted and ignored.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

import msgspec

from router.events import (
    Action,
    Agent,
    Answer,
    Arrive,
    Begun,
    Cleared,
    Done,
    Event,
    Explain,
    Explained,
    Follow,
    Lift,
    Load,
    PeerGone,
    Planned,
    Posted,
    Progress,
    Query,
    Refuse,
    Removed,
    Running,
    SetLimits,
    Snapshot,
    Stored,
    Swap,
    Table,
    Tick,
    WorkerDown,
    WorkerDrain,
    WorkerHealth,
    Workers,
    WorkerUp,
)
from router.flights import Flights, State
from router.placement.contract import Placement, Work
from router.radix import RadixTree
from router.request_events import RequestEvents
from router.suspects import Suspects
from router.throttling import BAD_LIMITS, NO_THROTTLE, Throttling
from router.worker_events import LEAST_TREE_TOKENS, WorkerEvents
from router.workers import Worker, WorkerTable
from sglang_fair.settings.table import FINISH_S

MAX_HOLD_PART = 32
"""One request in flight may add at most 1 / `MAX_HOLD_PART` of the tree's limit to the tree."""

HITS = (
    "input_tokens", "predicted_tokens", "measured_input_tokens", "measured_predicted_tokens", "measured_cached_tokens"
)  # fmt: skip
"""Counts of prompts, and of what of them was believed and measured to be cached."""

MAX_LISTED_CLIENTS = 100
"""Whose credits are in the state."""


class Router:
    """Places requests by `placement`. Single-threaded; the caller passes the time, which never goes back.

    If a request ends before its worker's KV events have confirmed its prefix, the prefix is taken to be cached for
    `linger_s` more. `max_tree_tokens`: most that the tree of prefixes holds; None: what the workers can cache.
    `throttling` refuses calls while the workers are overloaded; by default none. `swap_finish_s`: how long what runs
    at a worker that is to load another model may go on, where another one can go on with it.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        name: str = "",
        page_size: int = 16,
        max_tree_tokens: int | None = None,
        linger_s: float = 1.0,
        throttling: Throttling | None = None,
        swap_finish_s: float = FINISH_S,
        suspects: Suspects | None = None,
    ) -> None:
        self.name = name or type(placement).__name__
        self.run = ""
        """Of this process: after a restart it is another one."""
        self.now_s = 0.0
        self.tree = RadixTree(page_size, max_tree_tokens or LEAST_TREE_TOKENS, MAX_HOLD_PART)
        self.placement = placement
        """Of the first model."""
        self.workers = WorkerTable(placement)
        self.throttling = throttling or Throttling()
        self.suspects = suspects or Suspects()
        state = State(placement, self.workers, self.tree, self.throttling, self.suspects)
        self.record, self.counts = state.record, state.counts
        self.flights = Flights(state, linger_s)
        self._worker_events = WorkerEvents(
            state, self.flights, finish_s=swap_finish_s, resizes_tree=max_tree_tokens is None
        )
        self.swaps = self._worker_events.swaps
        self._requests = RequestEvents(state, self.flights, self._worker_events)
        self.waiting = self._requests.waiting
        self._handlers = self._make_handlers()

    def _make_handlers(self) -> dict[type[Event], Callable[[Any, float, bytes], Answer | None]]:
        """For each kind of event, what handles it: it may answer the peer that sent it."""
        workers, requests = self._worker_events, self._requests
        return {
            Arrive: requests.arrive,
            Done: requests.done,
            Stored: workers.stored,
            Removed: workers.removed,
            Cleared: workers.cleared,
            Load: workers.load,
            Progress: requests.progress,
            Running: requests.running,
            Begun: lambda event, now_s, peer: self.throttling.begun(event, now_s),
            Table: requests.difference,
            WorkerUp: workers.up,
            WorkerDown: workers.down,
            WorkerDrain: workers.drain,
            WorkerHealth: workers.health,
            Agent: self.swaps.told,
            Swap: lambda event, now_s, peer: workers.swap(event, now_s) or self._snapshot(event),
            PeerGone: requests.peer_gone,
            Tick: self._tick,
            Planned: self._planned,
            Follow: lambda event, now_s, peer: self.listing(event.id),
            Explain: self._explain,
            Query: lambda event, now_s, peer: self._snapshot(event),
            Posted: self._posted,
            SetLimits: self._set_limits,
            Lift: self._lift,
        }

    def handle(self, event: Event, now_s: float, peer: bytes = b"") -> list[Action]:
        """The answers to `event`, which came from `peer` at `now_s`. Nothing that a peer sends makes it raise."""
        self.now_s = now_s
        if self.flights.lingering:
            self.flights.settle(now_s)
        self.waiting.matches.clear()
        answer = self._handlers[type(event)](event, now_s, peer)
        actions: list[Action] = [] if answer is None else [(peer, answer)]
        if self.placement.holds or not self.swaps.is_empty:
            actions += self.swaps.after(now_s)
            self._worker_events.announce()
            actions += self._requests.follow_up(event, now_s, peer)
        if self.suspects.waiting:
            actions += self._requests.try_suspects(event, now_s, peer)
        return actions

    # -- questions and orders

    def _tick(self, event: Tick, now_s: float, peer: bytes) -> None:
        if self.placement.plans:
            self.throttling.predicted(self.placement.late(now_s), now_s)

    def _planned(self, event: Planned, now_s: float, peer: bytes) -> None:
        self.placement.answer(event.number, event.found, now_s)

    def _explain(self, event: Explain, now_s: float, peer: bytes) -> Explained:
        found = self.record.find(event.request, event.client, now_s)
        return Explained(event.id, tuple(self.waiting.with_standing(one, now_s) for one in found))

    def _posted(self, event: Posted, now_s: float, peer: bytes) -> None:
        if not self.throttling.resume_limits(event):
            self.counts["posted limits ignored"] += 1

    def _set_limits(self, event: SetLimits, now_s: float, peer: bytes) -> Snapshot | Refuse:
        if self.throttling.kind == "none":
            reason = "the router was started without --throttle"
            return Refuse(event.id, reason, retry=False, code=NO_THROTTLE)
        try:
            self.throttling.post(event)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            return Refuse(event.id, str(error), retry=False, code=BAD_LIMITS)
        return self._snapshot(event)

    def _lift(self, event: Lift, now_s: float, peer: bytes) -> Snapshot | Refuse:
        if not self.suspects.lift(event.client):
            return Refuse(event.id, "this client is in no quarantine", retry=False)
        return self._snapshot(event)

    def _snapshot(self, event: Query | Swap | SetLimits | Lift) -> Snapshot:
        return Snapshot(event.id, self.state())

    # -- looking in

    @property
    def plans(self) -> bool:
        """Whether it orders the workers' queues, so that gateways use no other router beside it."""
        return self.placement.plans

    def question(self, now_s: float) -> tuple[int, Work] | None:
        """The work that the placement has for another process, and its number; None mostly. To be asked after each
        event; what it has found is told by `Planned`. With another question the one before is over."""
        return self.placement.question(now_s)

    def requests_of(self, peer: bytes) -> int:
        return len(self.flights.of_peer(peer))

    def listing(self, question: str = "") -> Workers:
        """The workers, limits and plans that peers are told of, as the answer to `question`."""
        return self.workers.listing(question, self.run, self.throttling.posted, self.plans)

    def state(self) -> dict[str, object]:
        """The state as plain maps, strings and finite numbers. None stands for infinity."""
        counts = self.counts
        return {
            "placement": self.name,
            "parameters": _parameters(self.placement),
            "workers": {
                worker.name: {
                    "url": worker.up.url,
                    "kv": worker.up.kv,
                    "capacity": worker.capacity,
                    "model": worker.up.loaded or worker.pool.model,
                    "models": list(worker.up.models),
                    "state": _state(worker),
                    "in_flight": worker.in_flight,
                    "prefill_tokens": worker.prefill_tokens,
                    "decode_tokens": round(worker.decode_tokens, 1),
                    "dispatched": worker.dispatched,
                    "dispatched_tokens": worker.dispatched_tokens,
                    "tree_tokens": self.tree.worker_tokens(worker.name),
                    "placed": dict(worker.placed),
                }
                for worker in self.workers
            },
            "in_flight": len(self.flights.by_id),
            "waiting": len(self.waiting.by_id),
            "decisions": counts["placed"],
            "hits": {name: counts[name] for name in HITS},
            "deficits": {
                client: {worker: _plain(credit) for worker, credit in row.items()}
                for client, row in self.workers.credits(MAX_LISTED_CLIENTS).items()
            },
            "tree": {
                "page_size": self.tree.page_size,
                "lingering": len(self.flights.lingering),
                **self.tree.counters(),
            },
            "throttle": self.throttling.state(
                [pool.names_taking for pool in self.workers.pools.values()], self.now_s
            ),
            "swaps": self.swaps.state(self.now_s),
            "suspects": self.suspects.state(self.now_s),
            "queues": self.placement.report(self.now_s),
            "counts": dict(sorted(counts.items())),
        }


def _state(worker: Worker) -> str:
    if worker.draining:
        return "draining"
    return "swapping" if worker.swapping else "sick" if worker.sick else "up"


def _parameters(placement: Placement) -> dict[str, object]:
    if not is_dataclass(placement):
        return {}
    return {field.name: _plain(getattr(placement, field.name)) for field in fields(placement) if field.init}


def _plain(value: object) -> object:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, float) and not isfinite(value):
        return None
    return value
