"""What becomes of requests: they arrive, are placed, refused or held, go on and end.

A request is placed or refused at once: the queues are at the workers. Only a placement that holds requests
(`Placement.holds`) lets them wait here. Such an `Arrive` is answered by `Held`, then by `Place` when a worker is ready
for it, or by `Refuse` when no worker is left that could be. A placed request ends exactly once: by its gateway's
`Done`, with its worker, or with its gateway.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from router.events import (
    TOKEN_BYTES,
    Action,
    Arrive,
    Difference,
    Done,
    Due,
    Event,
    Held,
    Lift,
    PeerGone,
    Place,
    Progress,
    Refuse,
    Running,
    Table,
    Tick,
    WorkerDown,
    WorkerHealth,
    WorkerUp,
)
from router.flights import Flight, Flights, State
from router.placement.contract import Request
from router.radix import Match
from router.record import figures, placement_reason
from router.suspects import CLEAR_S, Denial
from router.waiting import Waiting
from router.worker_events import WorkerEvents
from router.workers import Pool, Worker
from sglang_fair.common.deadlines import Promise
from sglang_fair.core.throttle import Refusal

HELD_WHY = "every worker has as many requests as the placement allows"

_OF_SUSPECTS = Arrive, Done, Progress, Tick, WorkerUp, WorkerDown, WorkerHealth, Lift
"""Events after which a suspect may be tried."""


class RequestEvents:
    """Handles what peers say of requests. What does not fit, such as a second `Done`, is counted and ignored."""

    def __init__(self, state: State, flights: Flights, worker_events: WorkerEvents) -> None:
        self.waiting = Waiting(state, worker_events.swaps)
        self._placement, self._workers, self._tree = state.placement, state.workers, state.tree
        self._throttling, self._suspects = state.throttling, state.suspects
        self._record, self._counts = state.record, state.counts
        self._flights, self._worker_events, self._swaps = flights, worker_events, worker_events.swaps

    # -- requests arrive

    def arrive(
        self, event: Arrive, now_s: float, peer: bytes, trial: str | None = None
    ) -> Place | Refuse | None:
        """The answer, or None if the request waits. `trial`: the worker at which a suspect is tried."""
        self._counts["arrived"] += 1
        pool = self._workers.pool(event.model)
        if event.id in self._flights.by_id or event.id in self.waiting:
            is_over, answer = self._asked_again(event, pool, now_s, peer)
            if is_over:
                return answer
        allowed = pool.taking
        if event.exclude:
            allowed = [worker for worker in allowed if worker.name not in event.exclude]
        if trial is None and (event.lost or self._suspects.are_there(now_s)):
            suspected = self._suspects.judge(event, now_s)
            if isinstance(suspected, Denial):
                return self._deny(event.id, suspected)
            if suspected and self._able(event) is not None:
                self._suspects.wait(event, peer, now_s)
                return None
            held = self._suspects.held(now_s)
            allowed = [worker for worker in allowed if worker.name not in held] or allowed
        verdict = self._throttling.judge(event, pool.names_taking, now_s)
        call = verdict if event.interaction and not isinstance(verdict, Refusal) else 0
        promise = None if event.due is None else self._throttling.promised(event, event.due, now_s)
        request = _request(event, pool, call, promise, event.exclude, event.stands_for)
        if isinstance(verdict, Refusal):
            self._counts[verdict.code] += 1
            return self._refuse(
                request, event.request, verdict.reason, now_s,
                code=verdict.code, retry_after_s=verdict.retry_after_s,
            )  # fmt: skip
        if not allowed and not self._swaps.may_come(pool.model, event.exclude):
            return self._refuse(request, event.request, self._workers.why_nobody(event.model), now_s)
        is_held = trial is None and self._placement.holds
        if is_held and not self.waiting.limit.take(event.client):
            waits = self.waiting.limit.held(event.client)
            reason = f"too many requests wait for a worker: {waits} of this client"
            return self._refuse(request, event.request, reason, now_s, is_full=True)
        if event.weight is not None:
            self._weigh(event)
        match = self._tree.match(event.tokens, request.namespace)
        name = trial or pool.placement.place(request, match, allowed, now_s)
        if name is None:
            self.waiting.enter(request, peer, match)
            standing = self.waiting.standing(event.id, now_s)
            self._record.note(request, event.request, now_s, waited_for=HELD_WHY, standing=standing)
            return None
        if is_held:
            self.waiting.limit.give(event.client)
        costs = None if trial is not None else pool.placement.costs()
        worker = self._workers.by_name[name]
        assert worker in allowed, name
        return self._place(request, event.request, worker, match, allowed, costs, peer, now_s)

    def _asked_again(
        self, event: Arrive, pool: Pool, now_s: float, peer: bytes
    ) -> tuple[bool, Place | Refuse | None]:
        """Whether the answer to a request that is in flight or waits already is known, and which. A gateway asks again
        if it got no answer; it gets the same one, unless it excludes the worker by now."""
        known, waiting = self._flights.by_id.get(event.id), self.waiting.asked(event.id)
        if (known is not None and known.peer != peer) or (waiting is not None and waiting[0] != peer):
            self._counts["refused"] += 1
            reason = "a request with this id is in flight from another gateway"
            return True, Refuse(event.id, reason, retry=False)
        if known is not None:
            self._counts["asked again"] += 1
            if known.worker in pool.taking and known.worker.name not in event.exclude:
                return True, self._placed_at(known, now_s)
            self._settle(known, Done(event.id, outcome="failed"), now_s)
            self._suspects.forget(event.id)
        elif waiting is not None and waiting[2] == event.exclude and self._workers.pool(waiting[1]) is pool:
            self._counts["asked again"] += 1
            return True, None
        self.waiting.give_up(event.id, now_s)
        return False, None

    def _deny(self, request: str, denial: Denial) -> Refuse:
        self._counts["refused"] += 1
        may_retry = denial.retry_after_s is not None or not denial.code
        return Refuse(request, denial.reason, may_retry, code=denial.code, retry_after_s=denial.retry_after_s)

    def _refuse(self, request: Request, name: str, reason: str, now_s: float, **more: Any) -> Refuse:
        """`name` as `PlacementRecord` has it; `more` fields of the refusal."""
        self._counts["refused"] += 1
        self._throttling.ended(request.id, now_s)
        self._record.note(request, name, now_s, decided_s=now_s, refused=reason, outcome="refused")
        return Refuse(request.id, reason, retry=True, **more)

    def _place(
        self,
        request: Request,
        name: str,
        worker: Worker,
        match: Match,
        allowed: Sequence[Worker],
        costs: Sequence[float] | None,
        peer: bytes,
        now_s: float,
    ) -> Place:
        """`costs`: what the placement weighed, for each of `allowed`."""
        why = placement_reason(request, worker, match, allowed)
        worker.placed[why] += 1
        self._record.placed(request, name, worker, why, match, allowed, costs, self._workers.by_name, now_s)
        counts = self._counts
        if self._placement.plans and (tier := self._placement.tier(request.id)):
            request = structs.replace(request, tier=tier)
            counts["placed ahead of their share"] += 1
        flight = self._flights.begin(request, worker, match, peer, now_s)
        counts["placed"] += 1
        counts["input_tokens"] += request.input_tokens
        counts["predicted_tokens"] += flight.matched_tokens
        return self._placed_at(flight, now_s)

    def _placed_at(self, flight: Flight, now_s: float) -> Place:
        request, up = flight.request, flight.worker.up
        return Place(
            request.id,
            up.worker,
            up.url,
            flight.matched_tokens,
            request.call,
            None if request.promise is None else Due.of(request.promise, now_s),
            request.tier,
            up.loaded if len(up.models) > 1 else "",
            request.id in self._suspects.trials,
        )

    def _weigh(self, event: Arrive | Running) -> None:
        """What the newest tenants' file says of its client, holds for all of that client's requests."""
        if event.weight is not None:
            self._workers.weigh(event.client, event.weight, event.weight_version, self._present)

    def _present(self) -> set[str]:
        present = {flight.request.client for flight in self._flights.by_id.values()}
        present.update(request.client for request, _ in self.waiting.by_id.values())
        return present

    def running(self, event: Running, now_s: float, peer: bytes) -> None:
        """Takes over a request that another router, or a gateway without a router, has placed."""
        worker = self._workers.get(event.worker)
        if worker is None or event.id in self._flights.by_id:
            self._counts["running ignored"] += 1
            return
        self.waiting.give_up(event.id, now_s)
        self._weigh(event)
        self._throttling.running(event, now_s)
        request = _request(event, worker.pool)
        match = self._tree.match(event.tokens, request.namespace)
        at = figures(worker, match, None)
        self._record.note(request, "", now_s, decided_s=now_s, why="told", worker=at)
        self._flights.begin(request, worker, match, peer, now_s).produce(event.output_tokens)
        self._counts["taken over"] += 1

    # -- requests that wait

    def follow_up(self, event: Event, now_s: float, peer: bytes) -> list[Action]:
        """What an event means for requests that wait for a worker."""
        actions = self._move_waiting(now_s) if self.waiting.by_id else []
        if isinstance(event, Arrive) and self.waiting.has(event.id, peer):
            actions.append((peer, Held(event.id)))
        return actions

    def _move_waiting(self, now_s: float) -> list[Action]:
        """Refuses those that no worker is left for, as an `Arrive` would be refused, and places those that one is ready
        for."""
        actions: list[Action] = []
        for request, peer in self.waiting.hopeless(now_s):
            reason = self._workers.why_nobody(request.model)
            actions.append((peer, self._refuse(request, "", reason, now_s)))
        for request, peer, worker, match in self.waiting.ready(now_s):
            allowed = [one for one in worker.pool.taking if one.name not in request.exclude]
            assert worker in allowed, worker.name
            actions.append((peer, self._place(request, "", worker, match, allowed, None, peer, now_s)))
        return actions

    def _able(self, event: Arrive) -> list[str] | None:
        """The workers at which a suspect can be tried, in the order of names; None: there is none, not even a sick
        one."""
        pool = self._workers.pool(event.model)
        known = [one for one in self._workers if one.pool is pool and one.name not in event.exclude]
        return [one.name for one in known if one in pool.taking] if known else None

    def try_suspects(self, event: Event, now_s: float, peer: bytes) -> list[Action]:
        """What an event means for the suspects that wait."""
        actions: list[Action] = []
        if isinstance(event, Arrive) and event.id in self._suspects.waiting:
            actions.append((peer, Held(event.id)))
        if not isinstance(event, _OF_SUSPECTS):
            return actions
        unclear = Counter(
            flight.worker.name
            for name, flight in self._flights.by_id.items()
            if not flight.output_tokens
            and now_s - flight.placed_s < CLEAR_S
            and name not in self._suspects.trials
        )
        for waiting, found in self._suspects.due(self._able, unclear, now_s):
            if isinstance(found, Denial):
                answer: Place | Refuse | None = self._deny(waiting.event.id, found)
            else:
                answer = self.arrive(waiting.event, now_s, waiting.peer, found)
            if answer is not None:
                actions.append((waiting.peer, answer))
        return actions

    # -- requests go on and end

    def progress(self, event: Progress, now_s: float, peer: bytes) -> None:
        flight = self._flights.by_id.get(event.id)
        if flight is None:
            self._counts["progress ignored"] += 1
            return
        flight.produce(event.output_tokens)
        if event.output_tokens:
            self._suspects.begun(event.id)

    def done(self, event: Done, now_s: float, peer: bytes) -> None:
        flight = self._flights.by_id.get(event.id)
        self._suspects.ended(event, None if flight is None else flight.worker.name, now_s)
        if flight is not None:
            self._settle(flight, event, now_s)
        elif not self.waiting.give_up(event.id, now_s):
            self._counts["done ignored"] += 1

    def peer_gone(self, event: PeerGone, now_s: float, peer: bytes) -> None:
        """Ends what `peer` had in flight as aborted, and forgets what it asked and what it said of workers."""
        for name in self.waiting.of_peer(peer):
            self.waiting.give_up(name, now_s)
        self._suspects.peer_gone(peer)
        for flight in self._flights.of_peer(peer):
            self._settle(flight, Done(flight.request.id, outcome="aborted"), now_s)
            self._counts["lost with their peer"] += 1
        self._worker_events.peer_gone(peer, now_s)

    def _settle(self, flight: Flight, done: Done, now_s: float) -> None:
        """Ends a request, and with the last one a worker that drains."""
        self._flights.end(flight, done, now_s)
        self._worker_events.drained(flight.worker, now_s)

    def difference(self, event: Table, now_s: float, peer: bytes) -> Difference:
        theirs, known = set(event.requests), self._flights.by_id
        ours = [flight.request.id for flight in self._flights.of_peer(peer)]
        return Difference(
            event.id,
            missing=tuple(name for name in event.requests if name not in known and name not in self.waiting),
            unsettled=tuple(name for name in (*ours, *self.waiting.of_peer(peer)) if name not in theirs),
            held=tuple(name for name in event.requests if self.waiting.has(name, peer)),
        )


def _request(
    event: Arrive | Running,
    pool: Pool,
    call: int = 0,
    promise: Promise | None = None,
    exclude: tuple[str, ...] = (),
    stands_for: int = 1,
) -> Request:
    return Request(
        event.id,
        event.client,
        event.tokens,
        len(event.tokens) // TOKEN_BYTES,
        event.max_output_tokens,
        pool.outputs.of(event.client, event.max_output_tokens),
        pool.key(event.namespace) if pool.model else event.namespace,
        exclude,
        call,
        pool.model,
        promise,
        stands_for,
        event.session if isinstance(event, Arrive) else "",
    )
