"""The router as one state machine: `Router.handle` takes an event and returns the answers to send. No I/O, no clock.

It owns the tree of cached prefixes, the workers with their loads, the requests in flight, and the placement.

A request is placed or refused at once: the queues are at the workers. Only a placement that holds requests
(`contract.Holding`) lets them wait here, at most `MAX_WAITING`. Such an `Arrive` is answered by `Held`, then by `Place`
when a worker is ready for it, or by `Refuse` when no worker is left that could be. A placed request ends exactly once:
by its gateway's `Done`, with its worker, or with its gateway. A message that does not fit, such as a second `Done`, is
counted and ignored.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from math import isfinite
from typing import assert_never

import msgspec

from router.events import (
    MOST_COUNT,
    TOKEN_BYTES,
    Action,
    Agent,
    Arrive,
    Begun,
    CacheEvent,
    Cleared,
    Difference,
    Done,
    Due,
    Event,
    Explain,
    Explained,
    Follow,
    Held,
    Lift,
    Load,
    PeerGone,
    Place,
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
    Undelivered,
    WorkerDown,
    WorkerDrain,
    WorkerHealth,
    Workers,
    WorkerUp,
)
from router.placement.contract import Ended, Holding, Placement, Queued, Request, Swapping, Work
from router.radix import Hold, Match, RadixTree
from router.record import PlacementRecord
from router.shared_limit import SharedLimit
from router.suspects import CLEAR_S, Denial, Suspects
from router.swaps import Swaps
from router.throttling import BAD_LIMITS, NO_THROTTLE, Throttling
from router.workers import Flight, Pool, Worker, WorkerTable
from sglang_fair.common.deadlines import Promise
from sglang_fair.common.weights import Weights
from sglang_fair.core.throttle import Refusal
from sglang_fair.settings.table import FINISH_S

MAX_LISTED_CLIENTS = 100
"""Clients in a snapshot."""

MAX_WAITING = 10_000
"""Requests of all clients together that may wait here; beyond, they are refused."""

STANDING_EVERY_S = 0.01
"""What stands before a request is recorded of one in so long."""

MAX_HOLD_PART = 32
"""One request in flight may add at most 1 / `MAX_HOLD_PART` of the tree's limit to the tree."""

_OF_SUSPECTS = Arrive, Done, Progress, Tick, WorkerUp, WorkerDown, WorkerHealth, Lift
"""Events after which a suspect may be tried."""

_MAX_ORPHANS = 100_000
"""Requests lost with their worker whose `Done` is still expected; beyond, the oldest are forgotten."""


class Router:
    """Places requests by `placement`. Single-threaded; the caller passes the time, which never goes back.

    If a request ends before its worker's KV events have confirmed its prefix, the prefix is taken to be cached for
    `linger_s` more. `shares`: the clients' weights, if what they use is evicted from the tree fairly among them.
    `throttling` refuses calls while the workers are overloaded; by default none. `swap_finish_s`: how long what runs
    at a worker that is to load another model may go on, where another one can go on with it.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        name: str = "",
        page_size: int = 16,
        max_tree_tokens: int = 8_000_000,
        linger_s: float = 1.0,
        shares: Weights | None = None,
        throttling: Throttling | None = None,
        swap_finish_s: float = FINISH_S,
        suspects: Suspects | None = None,
    ) -> None:
        if not linger_s >= 0:
            raise ValueError(f"linger_s is {linger_s}: it cannot be negative")
        self.tree = RadixTree(page_size, max_tree_tokens, max_tree_tokens // MAX_HOLD_PART, shares)
        self._weights: list[tuple[Weights, Callable[[str], None]]] = []
        """Each with what is to know of a client whose weight has changed."""
        if shares is not None:
            self._weights.append((shares, self.tree.reweigh))
        self._placement = placement
        """Of the first model. Each has one of its own, but for one that holds requests: that is the queue of all."""
        self._holding = placement if isinstance(placement, Holding) else None
        self._swapping = placement if isinstance(placement, Swapping) else None
        self._queued = placement if isinstance(placement, Queued) else None
        self._fresh = deepcopy(placement)
        self._placements: list[Placement] = []
        self._name = name or type(placement).__name__
        self._linger_s = linger_s
        self._workers = WorkerTable(self._make_placement)
        self._told_taking: list[Worker] = []
        """The workers of which a `Swapping` placement was told that they take requests."""
        self._flights: dict[str, Flight] = {}
        self._swaps = Swaps(
            self._workers, placement, self._rehome, lambda: list(self._flights.values()), swap_finish_s
        )
        self._orphans: OrderedDict[str, bytes] = OrderedDict()
        """Requests that were lost with their worker -> the peer whose `Done` is still expected."""
        self._lingering: deque[tuple[float, Hold]] = deque()
        self._suspects = suspects or Suspects()
        self._record = PlacementRecord()
        self._waiting: dict[str, tuple[Request, bytes]] = {}
        """Requests that the placement holds, each with the peer that asked."""
        self._kinds: Counter[tuple[str, tuple[str, ...]]] = Counter()
        """Of these, how many are for a model and exclude some workers."""
        self._offered: list[Worker] = []
        """The workers among which each waiting request has one that it may go to."""
        self._throttling = Throttling() if throttling is None else throttling
        self._now_s = 0.0
        self._stood_s = float("-inf")
        """When it was last looked at what stands before a request that came."""
        self._waiting_limit = SharedLimit(MAX_WAITING)
        self._matches: dict[str, Match] = {}
        """What the waiting requests match. Valid until the tree changes."""
        self._counts: Counter[str] = Counter()

    def _make_placement(self) -> Placement:
        """For one more model."""
        if self._placements and self._holding is not None:
            return self._placement
        made = deepcopy(self._fresh) if self._placements else self._placement
        self._placements.append(made)
        if made.weights is not None:
            self._weights.append((made.weights, made.reweighed))
        return made

    def handle(self, event: Event, now_s: float, peer: bytes = b"") -> list[Action]:
        """The answers to `event`, which came from `peer` at `now_s`. Nothing that a peer sends makes it raise."""
        self._now_s = now_s
        while self._lingering and self._lingering[0][0] <= now_s:
            self.tree.release(self._lingering.popleft()[1])
        self._matches.clear()
        actions = self._dispatch(event, now_s, peer)
        if self._holding is not None or not self._swaps.is_empty:
            actions += self._follow_up(event, now_s, peer)
        if self._suspects.waiting:
            actions += self._try_suspects(event, now_s, peer)
        return actions

    def _follow_up(self, event: Event, now_s: float, peer: bytes) -> list[Action]:
        """What an event means for models, and for requests that wait."""
        actions = self._swaps.after(now_s)
        if self._swapping is not None and self._workers.taking is not self._told_taking:
            self._told_taking = self._workers.taking
            self._swapping.taking(
                [one.name for one in self._workers if not (one.draining or (one.sick and not one.swapping))]
            )
        if self._waiting:
            actions += self._refuse_hopeless(now_s)
            actions += self._place_waiting(now_s)
        if isinstance(event, Arrive) and event.may_hold and self._holds(event.id, peer):
            actions.append((peer, Held(event.id)))
        return actions

    def _dispatch(self, event: Event, now_s: float, peer: bytes) -> list[Action]:
        match event:
            case Arrive():
                answer = self._arrive(event, now_s, peer)
                return [] if answer is None else [(peer, answer)]
            case Done():
                self._done(event, now_s)
            case Lift():
                if not self._suspects.lift(event.client):
                    return [(peer, Refuse(event.id, "this client is in no quarantine", retry=False))]
                return [(peer, Snapshot(event.id, self.state()))]
            case Stored() | Removed() | Cleared():
                self._cache_changed(event)
            case Load():
                self._load(event, now_s)
            case Progress():
                self._progress(event)
            case Running():
                self._running(event, now_s, peer)
            case Begun():
                self._throttling.begun(event, now_s)
            case Table():
                return [(peer, self._difference(event, peer))]
            case WorkerUp():
                self._worker_up(event, now_s)
            case WorkerDown():
                self._worker_down(event.worker, now_s)
            case WorkerDrain():
                self._worker_drain(event.worker, now_s)
            case WorkerHealth():
                self._worker_health(event, peer)
            case Agent():
                return self._swaps.told(event, now_s, peer)
            case Swap():
                return [(peer, self._swap(event, now_s))]
            case PeerGone():
                self._peer_gone(peer, now_s)
            case Tick():
                if self._queued is not None:
                    self._throttling.predicted(self._queued.late(now_s), now_s)
            case Planned():
                self._placement.answer(event.number, event.found, now_s)
            case Undelivered():
                self._undelivered(event, now_s, peer)
            case Follow():
                return [(peer, self.listing(event.id))]
            case Explain():
                found = self._record.find(event.request, event.client, now_s)
                return [(peer, Explained(event.id, tuple(map(self._with_standing, found))))]
            case Query():
                return [(peer, Snapshot(event.id, self.state()))]
            case Posted():
                if not self._throttling.resume_limits(event):
                    self._counts["posted limits ignored"] += 1
            case SetLimits():
                return [(peer, self._set_limits(event))]
            case _:
                assert_never(event)
        return []

    # -- requests arrive

    def _arrive(
        self, event: Arrive, now_s: float, peer: bytes, trial: str | None = None
    ) -> Place | Refuse | None:
        """The answer, or None if the request waits.

        A gateway asks again if it has heard no answer: the request is then in flight or waits already. It gets the
        same answer, unless it excludes the worker by now.
        """
        self._counts["arrived"] += 1
        known = self._flights.get(event.id)
        waiting = self._waiting.get(event.id)
        suspect = self._suspects.waiting.get(event.id)
        if (
            (known is not None and known.peer != peer)
            or (waiting is not None and waiting[1] != peer)
            or (suspect is not None and suspect.peer != peer)
        ):
            return self._refuse(
                event.id, "a request with this id is in flight from another gateway", retry=False
            )
        pool = self._workers.pool(event.model)
        if known is not None:
            self._counts["asked again"] += 1
            if known.worker in pool.taking and known.worker.name not in event.exclude:
                return self._placed_at(known.request, known.worker, known.matched_tokens, now_s)
            self._end(known, Done(event.id, outcome="failed"), now_s)
            self._suspects.forget(event.id)
        if (
            waiting is not None
            and waiting[0].exclude == event.exclude
            and self._workers.pool(waiting[0].model) is pool
        ):
            self._counts["asked again"] += 1
            return None
        if suspect is not None and suspect.event.exclude == event.exclude:
            self._counts["asked again"] += 1
            return None
        self._give_up(event.id)
        self._orphans.pop(event.id, None)
        if trial is None:
            suspected = self._suspects.judge(event, now_s)
            if isinstance(suspected, Denial):
                return self._deny(event.id, suspected)
            if suspected and self._able(event) is not None:
                self._suspects.wait(event, peer, now_s)
                return None
        allowed = pool.taking
        if event.exclude:
            allowed = [worker for worker in allowed if worker.name not in event.exclude]
        if trial is None and (held := self._suspects.held(now_s)):
            allowed = [worker for worker in allowed if worker.name not in held] or allowed
        verdict = self._throttling.judge(event, pool.names_taking, now_s)
        call = verdict if event.interaction and not isinstance(verdict, Refusal) else 0
        promise = None if event.due is None else self._throttling.promised(event, event.due, now_s)
        request = self._request(event, pool, event.exclude, call, promise)
        self._record.came(request, event.request, now_s)
        if isinstance(verdict, Refusal):
            return self._refuse(event.id, verdict.reason, retry=True, now_s=now_s, throttled=verdict)
        if not allowed and not self._swaps.may_come(pool.model, event.exclude):
            return self._refuse(event.id, self._why_nobody(event.model), retry=True, now_s=now_s)
        if trial is None and self._holding is not None and not self._waiting_limit.take(event.client):
            reason = f"too many requests wait for a worker: {self._waiting_limit.held(event.client)} of this client"
            return self._refuse(event.id, reason, retry=True, is_full=True, now_s=now_s)

        self._hear(event)
        match = self.tree.match(event.tokens, request.namespace)
        name = trial
        if name is None:
            name = pool.placement.place(request, match, allowed, now_s)
        if name is None:
            self._waiting[event.id] = request, peer
            self._kinds[request.model, request.exclude] += 1
            standing = self._standing(event.id, now_s)
            self._record.held(
                request.id, "every worker has as many requests as the placement allows", standing
            )
            self._matches[event.id] = match
            return None
        if trial is None and self._holding is not None:
            self._waiting_limit.give(event.client)
        worker = self._workers.by_name[name]
        assert worker in allowed, worker.name
        return self._place(request, worker, match, allowed, peer, now_s)

    def _deny(self, request: str, denial: Denial) -> Refuse:
        self._counts["refused"] += 1
        may_retry = denial.retry_after_s is not None or not denial.code
        return Refuse(request, denial.reason, may_retry, code=denial.code, retry_after_s=denial.retry_after_s)

    def _why_nobody(self, model: str) -> str:
        if not self._workers.by_name:
            return "no worker is up"
        pool = self._workers.pool(model)
        if pool is self._workers.nobody:
            return f"no worker has model {model}" if model else "there are several models, and it names none"
        which = f" of model {pool.model}" if len(self._workers.pools) > 1 else ""
        if not any(worker.pool is pool for worker in self._workers):
            return f"no worker{which} is up"
        if not pool.taking:
            return f"no worker{which} takes requests: each drains or does not answer"
        return f"every worker{which} that is up is excluded"

    def _refuse(
        self,
        request: str,
        reason: str,
        *,
        retry: bool,
        is_full: bool = False,
        now_s: float | None = None,
        throttled: Refusal | None = None,
    ) -> Refuse:
        """`now_s`: it is to be recorded."""
        self._counts["refused"] += 1
        if now_s is not None:
            self._throttling.ended(request, now_s)
            self._record.refused(request, reason, now_s)
        if throttled is None:
            return Refuse(request, reason, retry, is_full)
        self._counts[throttled.code] += 1
        return Refuse(request, reason, retry, code=throttled.code, retry_after_s=throttled.retry_after_s)

    def _set_limits(self, event: SetLimits) -> Snapshot | Refuse:
        if self._throttling.kind == "none":
            reason = "the router was started without --throttle"
            return Refuse(event.id, reason, retry=False, code=NO_THROTTLE)
        try:
            self._throttling.post(event)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            return Refuse(event.id, str(error), retry=False, code=BAD_LIMITS)
        return Snapshot(event.id, self.state())

    def _place(
        self,
        request: Request,
        worker: Worker,
        match: Match,
        allowed: Sequence[Worker],
        peer: bytes,
        now_s: float,
    ) -> Place:
        why = placement_reason(request, worker, match, allowed)
        worker.placed[why] += 1
        costs = worker.pool.placement.costs()
        self._record.placed(request, worker, why, match, allowed, costs, now_s)
        if self._queued is not None and (tier := self._queued.tier(request.id)):
            request = replace(request, tier=tier)
            self._counts["placed ahead of their share"] += 1
        matched_tokens = self._begin(request, worker, match, peer, now_s).matched_tokens
        self._counts["placed"] += 1
        self._counts["input_tokens"] += request.input_tokens
        self._counts["predicted_tokens"] += matched_tokens
        return self._placed_at(request, worker, matched_tokens, now_s)

    def _placed_at(self, request: Request, worker: Worker, matched_tokens: int, now_s: float) -> Place:
        due = None if request.promise is None else Due.of(request.promise, now_s)
        model = worker.loaded if len(worker.models) > 1 else ""
        return Place(
            request.id,
            worker.name,
            worker.url,
            matched_tokens,
            request.call,
            due,
            request.tier,
            model,
            self._suspects.is_on_trial(request.id),
        )

    def _begin(self, request: Request, worker: Worker, match: Match, peer: bytes, now_s: float) -> Flight:
        """Puts a request in flight. Nothing else does."""
        worker.pool.placement.placed(request, worker.name, match, now_s)
        hold = self.tree.hold(worker.name, request.tokens, request.namespace, match, request.client)
        self._matches.clear()
        flight = Flight(request, worker, peer, match.of(worker.name), hold, placed_s=now_s)
        self._flights[request.id] = flight
        self._suspects.placed(request.id, worker.name)
        flight.begin()
        return flight

    def _request(
        self,
        event: Arrive | Running,
        pool: Pool,
        exclude: tuple[str, ...] = (),
        call: int = 0,
        promise: Promise | None = None,
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
            event.stands_for if isinstance(event, Arrive) else 1,
        )

    def _hear(self, event: Arrive | Running) -> None:
        """What the newest tenants' file says of its client, holds for all of that client's requests."""
        if event.weight is None:
            return
        for weights, reweighed in self._weights:
            if weights.tell(event.client, event.weight, event.weight_version):
                reweighed(event.client)
            if weights.are_many:
                present = {flight.request.client for flight in self._flights.values()}
                present.update(request.client for request, _ in self._waiting.values())
                weights.forget(present.__contains__)

    def _running(self, event: Running, now_s: float, peer: bytes) -> None:
        """Takes over a request that another router, or a gateway without a router, has placed."""
        worker = self._workers.get(event.worker)
        if worker is None or event.id in self._flights or event.id in self._orphans:
            self._counts["running ignored"] += 1
            return
        self._give_up(event.id)
        self._hear(event)
        self._throttling.running(event, now_s)
        request = self._request(event, worker.pool)
        match = self.tree.match(event.tokens, request.namespace)
        self._record.told(request, worker, match, now_s)
        self._begin(request, worker, match, peer, now_s).produce(event.output_tokens)
        self._counts["taken over"] += 1

    def _difference(self, event: Table, peer: bytes) -> Difference:
        theirs = set(event.requests)
        return Difference(
            event.id,
            missing=tuple(
                name
                for name in event.requests
                if name not in self._flights
                and name not in self._orphans
                and name not in self._waiting
                and name not in self._suspects.waiting
            ),
            unsettled=(
                *(
                    name
                    for name, flight in self._flights.items()
                    if flight.peer == peer and name not in theirs
                ),
                *(name for name, (_, asker) in self._waiting.items() if asker == peer and name not in theirs),
                *(
                    name
                    for name, one in self._suspects.waiting.items()
                    if one.peer == peer and name not in theirs
                ),
            ),
            held=tuple(name for name in event.requests if self._holds(name, peer)),
        )

    # -- requests that wait

    def _holds(self, name: str, peer: bytes) -> bool:
        """Whether request `name` of `peer` waits."""
        waiting, suspect = self._waiting.get(name), self._suspects.waiting.get(name)
        return (waiting is not None and waiting[1] == peer) or (suspect is not None and suspect.peer == peer)

    def _refuse_hopeless(self, now_s: float) -> list[Action]:
        """Refuses what waits and excludes every worker that is left, as an `Arrive` would be refused."""
        if self._workers.taking is self._offered:
            return []
        self._offered = self._workers.taking
        kinds = {kind for kind in self._kinds if self._is_hopeless(*kind)}
        if not kinds:
            return []
        hopeless = [one for one in self._waiting.values() if (one[0].model, one[0].exclude) in kinds]
        actions: list[Action] = []
        for request, peer in hopeless:
            self._give_up(request.id)
            why = self._why_nobody(request.model)
            actions.append((peer, self._refuse(request.id, why, retry=True, now_s=now_s)))
        return actions

    def _is_hopeless(self, model: str, exclude: tuple[str, ...]) -> bool:
        """Whether no worker but those is left that has the model, or may come to have it."""
        taking = self._workers.pool(model).taking
        return all(one.name in exclude for one in taking) and not self._swaps.may_come(model, exclude)

    def _place_waiting(self, now_s: float) -> list[Action]:
        """Places the waiting requests for which a worker is ready."""
        assert self._holding is not None
        actions: list[Action] = []
        taking = self._workers.taking
        while self._waiting and (chosen := self._holding.next(taking, self._match, self._may, now_s)):
            request, name = chosen
            peer = self._leave(request.id)[1]
            self._waiting_limit.give(request.client)
            match, worker = self._match(request), self._workers.by_name[name]
            allowed = [one for one in worker.pool.taking if one.name not in request.exclude]
            assert worker in allowed, worker.name
            actions.append((peer, self._place(request, worker, match, allowed, peer, now_s)))
        return actions

    def _able(self, event: Arrive) -> list[str] | None:
        """The workers at which a suspect can be tried, in the order of names; None: there is none, not even a sick
        one."""
        pool = self._workers.pool(event.model)
        known = [one for one in self._workers if one.pool is pool and one.name not in event.exclude]
        return [one.name for one in known if one in pool.taking] if known else None

    def _try_suspects(self, event: Event, now_s: float, peer: bytes) -> list[Action]:
        """What an event means for the suspects that wait."""
        actions: list[Action] = []
        if isinstance(event, Arrive) and event.may_hold and event.id in self._suspects.waiting:
            actions.append((peer, Held(event.id)))
        if not isinstance(event, _OF_SUSPECTS):
            return actions
        unclear = Counter(
            flight.worker.name
            for name, flight in self._flights.items()
            if not flight.output_tokens
            and now_s - flight.placed_s < CLEAR_S
            and not self._suspects.is_on_trial(name)
        )
        for waiting, found in self._suspects.due(self._able, unclear, now_s):
            if isinstance(found, Denial):
                answer: Place | Refuse | None = self._deny(waiting.event.id, found)
            else:
                answer = self._arrive(waiting.event, now_s, waiting.peer, found)
            if answer is not None:
                actions.append((waiting.peer, answer))
        return actions

    def _standing(self, name: str, now_s: float) -> Mapping[str, object] | None:
        """Where a request that has come stands among those that wait. What is before it is looked at only if that was
        not just done for another one, because it takes as long as there are groups."""
        if self._queued is None:
            return None
        ahead = now_s - self._stood_s >= STANDING_EVERY_S
        self._stood_s = now_s if ahead else self._stood_s
        return self._queued.standing(name, now_s, ahead=ahead)

    def _with_standing(self, placement: dict[str, object]) -> dict[str, object]:
        """What is recorded of a request, and where it stands if it still waits."""
        name = str(placement["id"])
        if self._queued is None or name not in self._waiting:
            return placement
        return placement | {"stands": self._queued.standing(name, self._now_s)}

    def _may(self, request: Request, worker: str) -> bool:
        """Whether `worker`, which takes requests, may get a request that waits."""
        pool = self._workers.by_name[worker].pool
        if worker in (held := self._suspects.held(self._now_s)) and not held.issuperset(pool.names_taking):
            return False
        return worker not in request.exclude and self._workers.pool(request.model) is pool

    def _match(self, request: Request) -> Match:
        match = self._matches.get(request.id)
        if match is None:
            match = self._matches[request.id] = self.tree.match(request.tokens, request.namespace)
        return match

    def _leave(self, name: str) -> tuple[Request, bytes]:
        """A request that waits does so no more."""
        request, peer = self._waiting.pop(name)
        kind = request.model, request.exclude
        self._kinds[kind] -= 1
        if not self._kinds[kind]:
            del self._kinds[kind]
        return request, peer

    def _give_up(self, name: str) -> bool:
        """Takes request `name` out of the queue; False if it was not there."""
        if self._suspects.waiting.pop(name, None) is not None:
            return True
        if name not in self._waiting:
            return False
        waiting = self._leave(name)
        assert self._holding is not None
        self._waiting_limit.give(waiting[0].client)
        self._holding.give_up(waiting[0])
        self._throttling.ended(name, self._now_s)
        self._counts["given up"] += 1
        return True

    # -- requests go on and end

    def _progress(self, event: Progress) -> None:
        flight = self._flights.get(event.id)
        if flight is None:
            self._counts["progress ignored"] += 1
        else:
            flight.produce(event.output_tokens)
            if event.output_tokens:
                self._suspects.begun(event.id)

    def _done(self, event: Done, now_s: float) -> None:
        flight = self._flights.get(event.id)
        self._suspects.ended(event, None if flight is None else flight.worker.name, now_s)
        if flight is not None:
            self._settle(flight, event, now_s)
        elif self._give_up(event.id):
            return
        elif event.id in self._orphans:
            del self._orphans[event.id]
            self._counts["done after its worker"] += 1
        else:
            self._counts["done ignored"] += 1

    def _undelivered(self, event: Undelivered, now_s: float, peer: bytes) -> None:
        """The gateway does not know where its request was placed, so it will never send it there."""
        flight = self._flights.get(event.id)
        if flight is not None and flight.peer == peer:
            self._suspects.forget(event.id)
            self._settle(flight, Done(event.id, outcome="aborted"), now_s)

    def _peer_gone(self, peer: bytes, now_s: float) -> None:
        """Ends what `peer` had in flight as aborted, and forgets what it asked and what it said of workers."""
        for name in [name for name, (_, asker) in self._waiting.items() if asker == peer]:
            self._give_up(name)
        for name in [name for name, one in self._suspects.waiting.items() if one.peer == peer]:
            self._suspects.forget(name)
        for flight in [flight for flight in self._flights.values() if flight.peer == peer]:
            self._suspects.forget(flight.request.id)
            self._settle(flight, Done(flight.request.id, outcome="aborted"), now_s)
            self._counts["lost with their peer"] += 1
        for name in [name for name, asker in self._orphans.items() if asker == peer]:
            self._suspects.forget(name)
            del self._orphans[name]
        self._swaps.peer_gone(peer, now_s)
        for worker in self._workers.drop_votes(peer):
            self._health_changed(worker)

    def _settle(self, flight: Flight, done: Done, now_s: float) -> None:
        """Ends a request, and with the last one a worker that drains."""
        self._end(flight, done, now_s)
        if flight.worker.draining and not flight.worker.in_flight:
            self._worker_down(flight.worker.name, now_s)

    def _end(self, flight: Flight, done: Done, now_s: float) -> None:
        """Takes a request out of flight. Nothing else does."""
        request, worker = flight.request, flight.worker
        del self._flights[request.id]
        flight.end(done.output_tokens)
        self._throttling.ended(request.id, now_s, is_served=done.outcome == "ok")
        self._record.ended(request.id, done.outcome, done.cached_tokens, now_s)
        if done.outcome == "failed":
            self.tree.release(flight.hold, served=False)
        elif self._linger_s and worker.kv is not None and not self.tree.is_confirmed(flight.hold):
            self.tree.linger(flight.hold)
            self._lingering.append((now_s + self._linger_s, flight.hold))
        else:
            self.tree.release(flight.hold)
        output_tokens = max(flight.output_tokens, done.output_tokens)
        if done.outcome == "ok":
            self._suspects.served(request.client)
            worker.pool.outputs.learn(request.client, output_tokens)
        self._counts[f"ended {done.outcome}"] += 1
        self._counts["output_tokens"] += output_tokens
        if done.cached_tokens is not None:
            self._counts["measured_input_tokens"] += request.input_tokens
            self._counts["measured_predicted_tokens"] += flight.matched_tokens
            self._counts["measured_cached_tokens"] += done.cached_tokens
        ended = Ended(
            request,
            worker.name,
            flight.matched_tokens,
            output_tokens,
            done.outcome,
            done.ttft_s,
            done.tpot_s,
        )
        worker.pool.placement.done(ended, now_s)

    # -- workers

    def _worker_up(self, event: WorkerUp, now_s: float) -> None:
        known = self._workers.get(event.worker)
        has_same = known is not None and (not event.models or known.loaded == event.loaded)
        if known is not None and has_same and (known.url, known.kv) == (event.url, event.kv):
            known.models = event.models or known.models
            known.replay, known.load_address = event.replay, event.load
            known.listed = event.listed  # whoever tells of it last
            self._workers.set_draining(known, False)
            if known.capacity != event.capacity:
                known.capacity = event.capacity
                known.count(0)
                known.pool.placement.worker_changed(event.worker, event.capacity)
            known.kv_tokens = event.kv_tokens or known.kv_tokens
            known.chunk_tokens = event.chunk_tokens or known.chunk_tokens
            self._equip(known, now_s)
            return
        if known is not None:  # another address is another process, and so is another model
            self._worker_down(event.worker, now_s)
        worker = self._workers.add(event)
        self.tree.add_worker(event.worker, has_events=event.kv is not None)
        self._placement_of(worker).worker_up(event.worker, event.capacity)
        self._swaps.up(event.worker, now_s)
        for one in self._workers:  # the first one that names a model says what the others have, too
            self._equip(one, now_s)
        self._counts["workers up"] += 1

    def _equip(self, worker: Worker, now_s: float) -> None:
        """Tells a `Swapping` placement what the worker has."""
        if self._swapping is None:
            return
        self._swapping.equip(
            worker.name,
            loaded=None if worker.pool is self._workers.nobody else worker.pool.model,
            kv_tokens=worker.kv_tokens or None,
            chunk_tokens=worker.chunk_tokens or None,
            now_s=now_s,
        )

    def _worker_down(self, name: str, now_s: float) -> None:
        worker = self._workers.get(name)
        if worker is None:
            self._counts["worker down ignored"] += 1
            return
        for flight in [flight for flight in self._flights.values() if flight.worker is worker]:
            self._end(flight, Done(flight.request.id, outcome="failed"), now_s)
            self._counts["lost with their worker"] += 1
            self._orphans[flight.request.id] = flight.peer
        while len(self._orphans) > _MAX_ORPHANS:
            self._suspects.forget(self._orphans.popitem(last=False)[0])
        self._suspects.leaves(name, is_gone=True)
        self._workers.remove(name)
        self._throttling.worker_gone(name)
        self._placement_of(worker).worker_down(name)
        self.tree.remove_worker(name)
        self._swaps.gone(name, now_s)
        self._counts["workers down"] += 1

    def _placement_of(self, worker: Worker) -> Placement:
        """That is told when the worker comes and goes."""
        return worker.pool.placement if self._holding is None else self._placement

    def _rehome(self, worker: Worker, model: str, now_s: float) -> None:
        """Has a worker serve `model`, "" none, with an empty cache. What it was taken to have in flight it has not: who
        knows better tells it again."""
        for flight in [flight for flight in self._flights.values() if flight.worker is worker]:
            self._end(flight, Done(flight.request.id, outcome="failed"), now_s)
        self.tree.clear(worker.name)
        if self._swapping is not None:
            self._workers.set_loaded(worker, model)
            self._swapping.loaded(worker.name, model or None, now_s)
            return
        self._placement_of(worker).worker_down(worker.name)
        self._workers.set_loaded(worker, model)
        self._placement_of(worker).worker_up(worker.name, worker.capacity)

    def _swap(self, event: Swap, now_s: float) -> Snapshot | Refuse:
        """An operator has a worker load another model."""
        reason = self._swaps.ask(event.worker, event.model, now_s)
        if reason is not None:
            return Refuse(event.id, reason, retry=False)
        return Snapshot(event.id, self.state())

    def _worker_drain(self, name: str, now_s: float) -> None:
        worker = self._workers.get(name)
        if worker is None:
            self._counts["worker drain ignored"] += 1
            return
        self._workers.set_draining(worker, True)
        self._suspects.leaves(name, is_gone=False)
        if not worker.in_flight:
            self._worker_down(name, now_s)

    def _worker_health(self, event: WorkerHealth, peer: bytes) -> None:
        worker = self._workers.get(event.worker)
        if worker is None:
            self._counts["worker health ignored"] += 1
        elif self._workers.vote(peer, worker, ok=event.ok):
            self._health_changed(worker)

    def _load(self, event: Load, now_s: float) -> None:
        worker = self._workers.get(event.worker)
        if worker is None:
            self._counts["load ignored"] += 1
            return
        self._throttling.load(event, now_s)
        if 0 < event.size_tokens <= MOST_COUNT and event.size_tokens != worker.kv_tokens:
            worker.kv_tokens = event.size_tokens
            self._equip(worker, now_s)

    def _health_changed(self, worker: Worker) -> None:
        """A worker that did not answer may have restarted: what it caches is learnt anew."""
        self._counts["workers sick" if worker.sick else "workers well"] += 1
        self.tree.clear(worker.name)

    def _cache_changed(self, event: CacheEvent) -> None:
        worker = self._workers.get(event.worker)
        if worker is None:
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
                    worker.pool.key(event.namespace),
                )
            case Removed():
                self.tree.removed(event.worker, event.hashes)
            case Cleared():
                self.tree.clear(event.worker)
            case _:
                assert_never(event)

    # -- looking in

    @property
    def plans(self) -> bool:
        """Whether it orders the workers' queues, so that gateways use no other router beside it."""
        return self._queued is not None

    def question(self, now_s: float) -> tuple[int, Work] | None:
        """The work that the placement has for another process, and its number; None mostly. To be asked after each
        event; what it has found is told by `Planned`. With another question the one before is over."""
        return self._placement.question(now_s)

    def requests_of(self, peer: bytes) -> int:
        """How many requests `peer` has in flight."""
        return sum(flight.peer == peer for flight in self._flights.values())

    def listing(self, question: str = "") -> Workers:
        """The workers, limits and plans that peers are told of, as the answer to `question`."""
        return self._workers.listing(question, self._throttling.posted, self.plans)

    def state(self) -> dict[str, object]:
        """The state as plain maps, strings and finite numbers. None stands for infinity."""
        counts = self._counts
        return {
            "placement": self._name,
            "parameters": _parameters(self._placement),
            "workers": {
                worker.name: {
                    "url": worker.url,
                    "kv": worker.kv,
                    "capacity": worker.capacity,
                    "model": worker.loaded or worker.pool.model,
                    "models": list(worker.models),
                    "state": _state(worker),
                    "in_flight": worker.in_flight,
                    "prefill_tokens": worker.prefill_tokens,
                    "decode_tokens": round(worker.decode_tokens, 1),
                    "dispatched": worker.dispatched,
                    "dispatched_tokens": worker.dispatched_tokens,
                    "tree_tokens": self.tree.worker_tokens(worker.name),
                    "placed": dict(worker.placed),
                }
                for worker in self._workers
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
                for client, row in self._credits().items()
            },
            "tree": {
                "page_size": self.tree.page_size,
                "lingering": len(self._lingering),
                **self.tree.counters(),
            },
            "throttle": self._throttling.state(
                [pool.names_taking for pool in self._workers.pools.values()], self._now_s
            ),
            "swaps": self._swaps.state(self._now_s),
            "suspects": self._suspects.state(self._now_s),
            "queues": None if self._queued is None else self._queued.report(self._now_s),
            "counts": dict(sorted(counts.items())),
        }

    def _credits(self) -> dict[str, dict[str, float]]:
        """Of the latest clients, at the workers of all models."""
        found: dict[str, dict[str, float]] = {}
        for placement in self._placements:
            for client, row in placement.credits(MAX_LISTED_CLIENTS).items():
                if client in found:
                    found[client] |= row
                elif len(found) < MAX_LISTED_CLIENTS:
                    found[client] = dict(row)
        return found


def placement_reason(request: Request, worker: Worker, match: Match, allowed: Sequence[Worker]) -> str:
    """Why `request` goes to `worker`, in a word; `allowed` are those that it could have gone to.

    retry: a replica failed it before. only: there was no other. prefix: none of them has more of its prompt. new: none
    has any of it. load: another one has more of it, but the placement preferred this one.
    """
    if request.exclude:
        return "retry"
    if len(allowed) == 1:
        return "only"
    held, own = match.lengths, match.of(worker.name)
    if own and own == match.tokens:
        return "prefix"
    longest = max([held.get(one.name, 0) for one in allowed]) if held else 0
    if not longest:
        return "new"
    return "prefix" if own == longest else "load"


def _state(worker: Worker) -> str:
    if worker.draining:
        return "draining"
    return "swapping" if worker.swapping else "sick" if worker.sick else "up"


def _parameters(placement: Placement) -> dict[str, object]:
    """The parameters of a placement that is a dataclass."""
    if not is_dataclass(placement):
        return {}
    return {field.name: _plain(getattr(placement, field.name)) for field in fields(placement) if field.init}


def _plain(value: object) -> object:
    """`value` as JSON can represent it."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, float) and not isfinite(value):
        return None
    return value
