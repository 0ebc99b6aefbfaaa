"""What becomes of requests: they arrive, are placed, refused or held, go on and end.

A request is placed or refused at once: the queues are at the workers. Only a placement that holds requests
(`contract.Holding`) lets them wait here. Such an `Arrive` is answered by `Held`, then by `Place` when a worker is ready
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
    Undelivered,
    WorkerDown,
    WorkerHealth,
    WorkerUp,
)
from router.flights import Flight, Flights
from router.placement.contract import Request
from router.radix import Match, RadixTree
from router.record import PlacementRecord, placement_reason
from router.suspects import CLEAR_S, Denial, Suspects
from router.throttling import Throttling
from router.waiting import Waiting
from router.worker_events import WorkerEvents
from router.workers import Placements, Pool, Worker, WorkerTable
from sglang_fair.common.deadlines import Promise
from sglang_fair.core.throttle import Refusal

HELD_WHY = "every worker has as many requests as the placement allows"

_OF_SUSPECTS = Arrive, Done, Progress, Tick, WorkerUp, WorkerDown, WorkerHealth, Lift
"""Events after which a suspect may be tried."""


class RequestEvents:
    """Handles what peers say of requests. What does not fit, such as a second `Done`, is counted and ignored."""

    def __init__(
        self,
        placements: Placements,
        workers: WorkerTable,
        tree: RadixTree,
        flights: Flights,
        worker_events: WorkerEvents,
        suspects: Suspects,
        throttling: Throttling,
        record: PlacementRecord,
        counts: Counter[str],
    ) -> None:
        self.waiting = Waiting(
            placements.first, workers, worker_events.swaps, suspects, tree, self._left_the_queue
        )
        self._placements, self._workers, self._tree, self._flights = placements, workers, tree, flights
        self._worker_events, self._swaps, self._suspects = worker_events, worker_events.swaps, suspects
        self._throttling, self._record, self._counts = throttling, record, counts

    # -- requests arrive

    def arrive(
        self, event: Arrive, now_s: float, peer: bytes, trial: str | None = None
    ) -> Place | Refuse | None:
        """The answer, or None if the request waits. `trial`: the worker at which a suspect is tried."""
        self._counts["arrived"] += 1
        pool = self._workers.pool(event.model)
        if (
            event.id in self._flights.by_id
            or event.id in self.waiting.by_id
            or event.id in self._suspects.waiting
        ):
            is_over, answer = self._asked_again(event, pool, now_s, peer)
            if is_over:
                return answer
        if self._flights.orphans:
            self._flights.orphans.pop(event.id, None)
        allowed = pool.taking
        if event.exclude:
            allowed = [worker for worker in allowed if worker.name not in event.exclude]
        if trial is None:
            suspected = self._suspects.judge(event, now_s)
            if isinstance(suspected, Denial):
                return self._deny(event.id, suspected)
            if suspected and self._able(event) is not None:
                self._suspects.wait(event, peer, now_s)
                return None
            if held := self._suspects.held(now_s):
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
        is_held = trial is None and self.waiting.holding is not None
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
            self._record.held(request, event.request, HELD_WHY, standing, now_s)
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
        known = self._flights.by_id.get(event.id)
        waiting = self.waiting.by_id.get(event.id)
        suspect = self._suspects.waiting.get(event.id)
        if (
            (known is not None and known.peer != peer)
            or (waiting is not None and waiting[1] != peer)
            or (suspect is not None and suspect.peer != peer)
        ):
            self._counts["refused"] += 1
            reason = "a request with this id is in flight from another gateway"
            return True, Refuse(event.id, reason, retry=False)
        if known is not None:
            self._counts["asked again"] += 1
            if known.worker in pool.taking and known.worker.name not in event.exclude:
                return True, self._placed_at(known.request, known.worker, known.matched_tokens, now_s)
            self._settle(known, Done(event.id, outcome="failed"), now_s)
            self._suspects.forget(event.id)
        is_same = waiting is not None and (
            waiting[0].exclude == event.exclude and self._workers.pool(waiting[0].model) is pool
        )
        if is_same or (suspect is not None and suspect.event.exclude == event.exclude):
            self._counts["asked again"] += 1
            return True, None
        self._give_up(event.id, now_s)
        return False, None

    def _deny(self, request: str, denial: Denial) -> Refuse:
        self._counts["refused"] += 1
        may_retry = denial.retry_after_s is not None or not denial.code
        return Refuse(request, denial.reason, may_retry, code=denial.code, retry_after_s=denial.retry_after_s)

    def _refuse(self, request: Request, name: str, reason: str, now_s: float, **more: Any) -> Refuse:
        """`name` as `PlacementRecord` has it; `more` fields of the refusal."""
        self._counts["refused"] += 1
        self._throttling.ended(request.id, now_s)
        self._record.refused(request, name, reason, now_s)
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
        queued, counts = self.waiting.queued, self._counts
        if queued is not None and (tier := queued.tier(request.id)):
            request = structs.replace(request, tier=tier)
            counts["placed ahead of their share"] += 1
        matched_tokens = self._begin(request, worker, match, peer, now_s).matched_tokens
        counts["placed"] += 1
        counts["input_tokens"] += request.input_tokens
        counts["predicted_tokens"] += matched_tokens
        return self._placed_at(request, worker, matched_tokens, now_s)

    def _placed_at(self, request: Request, worker: Worker, matched_tokens: int, now_s: float) -> Place:
        due = None if request.promise is None else Due.of(request.promise, now_s)
        up = worker.up
        return Place(
            request.id,
            up.worker,
            up.url,
            matched_tokens,
            request.call,
            due,
            request.tier,
            up.loaded if len(up.models) > 1 else "",
            self._suspects.is_on_trial(request.id),
        )

    def _begin(self, request: Request, worker: Worker, match: Match, peer: bytes, now_s: float) -> Flight:
        flight = self._flights.begin(request, worker, match, peer, now_s)
        self.waiting.matches.clear()
        return flight

    def _weigh(self, event: Arrive | Running) -> None:
        """What the newest tenants' file says of its client, holds for all of that client's requests."""
        if event.weight is not None:
            self._placements.weigh(event.client, event.weight, event.weight_version, self._present)

    def _present(self) -> set[str]:
        present = {flight.request.client for flight in self._flights.by_id.values()}
        present.update(request.client for request, _ in self.waiting.by_id.values())
        return present

    def running(self, event: Running, now_s: float, peer: bytes) -> None:
        """Takes over a request that another router, or a gateway without a router, has placed."""
        worker = self._workers.get(event.worker)
        if worker is None or event.id in self._flights.by_id or event.id in self._flights.orphans:
            self._counts["running ignored"] += 1
            return
        self._give_up(event.id, now_s)
        self._weigh(event)
        self._throttling.running(event, now_s)
        request = _request(event, worker.pool)
        match = self._tree.match(event.tokens, request.namespace)
        self._record.told(request, worker, match, now_s)
        self._begin(request, worker, match, peer, now_s).produce(event.output_tokens)
        self._counts["taken over"] += 1

    # -- requests that wait

    def follow_up(self, event: Event, now_s: float, peer: bytes) -> list[Action]:
        """What an event means for requests that wait for a worker."""
        actions = self._move_waiting(now_s) if self.waiting.by_id else []
        if isinstance(event, Arrive) and self._holds(event.id, peer):
            actions.append((peer, Held(event.id)))
        return actions

    def _holds(self, name: str, peer: bytes) -> bool:
        suspect = self._suspects.waiting.get(name)
        return self.waiting.has(name, peer) or (suspect is not None and suspect.peer == peer)

    def _give_up(self, name: str, now_s: float) -> bool:
        """Request `name` waits no more; False if it did not."""
        return self._suspects.waiting.pop(name, None) is not None or self.waiting.give_up(name, now_s)

    def _left_the_queue(self, name: str, now_s: float) -> None:
        self._throttling.ended(name, now_s)
        self._counts["given up"] += 1

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
            and not self._suspects.is_on_trial(name)
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
        elif not self._give_up(event.id, now_s):
            was_lost = self._flights.orphans.pop(event.id, None) is not None
            self._counts["done after its worker" if was_lost else "done ignored"] += 1

    def undelivered(self, event: Undelivered, now_s: float, peer: bytes) -> None:
        """The gateway does not know where its request was placed, so it will never send it there."""
        flight = self._flights.by_id.get(event.id)
        if flight is not None and flight.peer == peer:
            self._suspects.forget(event.id)
            self._settle(flight, Done(event.id, outcome="aborted"), now_s)

    def peer_gone(self, event: PeerGone, now_s: float, peer: bytes) -> None:
        """Ends what `peer` had in flight as aborted, and forgets what it asked and what it said of workers."""
        for name in self.waiting.of_peer(peer):
            self._give_up(name, now_s)
        for name in [name for name, one in self._suspects.waiting.items() if one.peer == peer]:
            self._suspects.forget(name)
        for flight in self._flights.of_peer(peer):
            self._suspects.forget(flight.request.id)
            self._settle(flight, Done(flight.request.id, outcome="aborted"), now_s)
            self._counts["lost with their peer"] += 1
        for name in [name for name, asker in self._flights.orphans.items() if asker == peer]:
            self._suspects.forget(name)
            del self._flights.orphans[name]
        self._worker_events.peer_gone(peer, now_s)

    def _settle(self, flight: Flight, done: Done, now_s: float) -> None:
        """Ends a request, and with the last one a worker that drains."""
        self._flights.end(flight, done, now_s)
        self._worker_events.drained(flight.worker, now_s)

    def difference(self, event: Table, now_s: float, peer: bytes) -> Difference:
        theirs, flights = set(event.requests), self._flights
        suspects = [name for name, one in self._suspects.waiting.items() if one.peer == peer]
        ours = [flight.request.id for flight in flights.of_peer(peer)]
        return Difference(
            event.id,
            missing=tuple(
                name
                for name in event.requests
                if name not in flights.by_id
                and name not in flights.orphans
                and name not in self.waiting.by_id
                and name not in self._suspects.waiting
            ),
            unsettled=tuple(
                name for name in (*ours, *self.waiting.of_peer(peer), *suspects) if name not in theirs
            ),
            held=tuple(name for name in event.requests if self._holds(name, peer)),
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
        pool.key(event.namespace),
        exclude,
        call,
        pool.model,
        promise,
        stands_for,
    )
