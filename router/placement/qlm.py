"""QLM with fair shares: requests with deadlines wait in groups, and each worker has a queue of groups.

A request that nobody waits before, and for which a worker has room, is sent at once: where least is to be done, its own
tokens that are not cached there counted `RECOMPUTED` times. All others wait: within the share of their client (tier 0)
or ahead of it (tier 1), in groups of one model, class and tier, each in the queue of a worker (`router.queues`, where
the rules stand, one module each).

    who goes first     `queues.virtual`: tier, then who can be in time, then the earliest deadline; models in the order
                       of the queue
    how much           `queues.worker`: while the tokens in flight are below the KV cache; tier 0 a prefill chunk more
    who is ahead       `queues.shares`: start-time fair queueing. By default `ahead` is a part of the smallest KV cache
                       known: what a client may have beyond its share is a part of what one worker has in its batch, so
                       others find room there soon
    what it takes      `queues.estimate`, learnt from full workers (`queues.learning`)
    planning           when a group will be late and a planner is there it is asked (`queues.replan`); without one, or
                       if it is silent, groups are ordered by EDF

A later call of an interaction has class and start of the first one: it waits before all that came since.

Unit of fairness: units of service (uncached prompt tokens + 2 · output tokens, over weight), across all workers. As
long as a request of a client within its share waits, each other client is served at most `ahead`, one request and what
its groups had in flight beyond that request's tag, whatever deadlines it claims.

Trade-offs: a request that waits is not at its worker, so a slot is empty for a round trip; the window hides that, as
each worker has a chunk more than it can hold. Deadlines are kept in the order of groups, not beyond them: what is
planned is as good as the expected lengths of answers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import ceil, inf, log2
from operator import attrgetter
from typing import ClassVar

from router.placement.contract import Ended, May, Request, WorkerView
from router.queues.edf import edf
from router.queues.estimate import Estimator
from router.queues.groups import Centre, Groups, lengths
from router.queues.learning import Learning
from router.queues.line import Queued
from router.queues.problem import Orders, Problem
from router.queues.replan import Replans
from router.queues.report import report, standing
from router.queues.shares import OUTPUT_PRICE, Shares
from router.queues.virtual import VirtualQueues
from router.queues.worker import Worker
from router.radix import Match
from sglang_fair.common.deadlines import DEFAULT_CLASSES, Promise
from sglang_fair.common.weights import Weights

AHEAD_PART = 0.25
"""Of the smallest KV cache."""
RECOMPUTED = 4.0
"""A prompt token that is not cached at a worker, in tokens that wait there: computing it again is lost to all. Chosen
among 1, 4 and 16 by the throughput of simulated trees and judges (one seed)."""
_JUDGED = 1
"""Requests that come into another tier with one that goes, at most. In a trial it was one for every second."""
_TOKEN_BYTES = 4
_HEAD_TOKENS = 256
"""So many first tokens tell prompts apart that nobody has cached."""
_PREDICTED = 16
"""Of so many that wait, the wait of one is predicted, for R²."""
_SAMPLED = 500
"""Lengths that a planner is told, for each model and class."""
_FASTER = 0.1
"""Weight of the last one in a mean."""
_CHANGED = 1.25
"""By this factor a batch must have changed for groups to be cut anew."""


@dataclass(slots=True)
class _Waiting:
    request: Request
    queued: Queued
    arrived_s: float


@dataclass(slots=True)
class _Sent:
    worker: str
    tier: int
    at_s: float


@dataclass
class Qlm:
    """`ahead`: units beyond its share up to which a client is in tier 0; null: from the smallest KV cache. `delta`:
    average batches in a group. Without `prefixes` groups are first come, first served, and what is cached makes no
    difference to their plan, as in the paper; `literal`: waits by Equations 1-5. Without `tiers` nobody is ahead of its
    share. `evicts`: workers take requests back for more urgent ones (policy `slo`), so these may be sent beyond the
    window. `kv_tokens` and `chunk_tokens`: of a worker that says nothing. `slo_s`: of requests that were promised
    nothing. `every_s`, `patience_s`: how often is planned, and after how long a planner is taken for dead.
    `max_clients`: that are remembered without requests.
    """

    uses_caches: ClassVar[bool] = True
    uses_progress: ClassVar[bool] = True

    ahead: float | None = None
    delta: float = 4.0
    prefixes: bool = True
    literal: bool = False
    tiers: bool = True
    evicts: bool = False
    kv_tokens: int = 65_536
    chunk_tokens: int = 8_192
    slo_s: float = DEFAULT_CLASSES["interactive"]
    every_s: float = 1.0
    patience_s: float = 10.0
    client_weights: Mapping[str, float] = field(default_factory=dict)
    max_clients: int = 50_000

    queues: VirtualQueues = field(init=False, repr=False)
    shares: Shares = field(init=False, repr=False)
    estimator: Estimator = field(init=False, repr=False)
    replans: Replans = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not (self.kv_tokens > 0 and self.chunk_tokens >= 0):
            raise ValueError("kv_tokens is above 0, and chunk_tokens not negative")
        if not 0 < self.slo_s < inf:
            raise ValueError(f"slo_s is {self.slo_s}: it is a number of seconds above 0")
        if self.max_clients < 1:
            raise ValueError(f"max_clients is {self.max_clients}: at least one is needed")
        if not isinstance(self.client_weights, Mapping):
            raise ValueError(f"client_weights is {self.client_weights!r}: it maps clients to weights")
        first = self.kv_tokens * AHEAD_PART if self.ahead is None else self.ahead
        weights = Weights(self.client_weights)
        self.shares = Shares(first, weights, most_owing=self.max_clients)
        self.estimator = Estimator(literal=self.literal)
        groups = Groups(self.delta, prefixes=self.prefixes)
        self.queues = VirtualQueues(groups, self.estimator, self._held_of if self.prefixes else None)
        self.replans = Replans(self.every_s, self.patience_s)
        self._learning = Learning()
        self._waiting: dict[str, _Waiting] = {}
        self._leaving: dict[str, int] = {}
        """Tiers of requests that were given to a worker and are not `placed` yet."""
        self._sent: dict[str, _Sent] = {}
        self._ready: dict[str, None] = {}
        """Workers that may have room for somebody who waits, in order."""
        self._held: dict[object, dict[str, int]] = {}
        """By prefix of those that wait, how many of its tokens each worker was found to hold."""
        self._prefix_counts: dict[object, int] = {}
        self._views: dict[str, WorkerView] = {}
        self._viewed: Sequence[WorkerView] = ()
        self._attended = False
        self._looks_s = -inf
        self._late = self._late_first = frozenset[str]()
        """Workers that were late at the last two looks, and at the last."""
        self._now_s = 0.0
        self._asked_for: dict[str, int] = {}
        """By reason, how often queues were ordered."""
        self._arrivals = 0

    # -- requests

    def place(
        self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float
    ) -> str | None:
        """The worker that has least to do of those that have room, if nobody has to go first; else it waits."""
        tier = self.shares.standing(request.client)
        is_alone = tier is not None
        if tier is None:
            tier = self._arrive(request, match, now_s)
        if not self.tiers:
            tier = 0
        if not (self._ready and self._waiting):
            due_s = self._due_s(request, now_s)
            chosen = self._at_once(request, match, workers, tier, due_s)
            if chosen is not None:
                self._leaving[request.id] = tier
                return chosen
        if is_alone:
            self._arrive(request, match, now_s)
        queued = self._as_queued(request, match, now_s)
        self._waiting[request.id] = _Waiting(request, queued, now_s)
        self._follow(queued, match)
        self.queues.groups.add(queued, tier)
        self.queues.settle()
        self._arrivals += 1
        if (
            not tier
            and not self._arrivals % _PREDICTED
            and (wait := self.queues.wait(request.id, now_s)) is not None
        ):
            self.estimator.predict(request.id, wait.mean_s)
        return None

    def _at_once(
        self, request: Request, match: Match, workers: Sequence[WorkerView], tier: int, due_s: float
    ) -> str | None:
        """Of the workers that have room, and where nobody of another model comes first, the one with least to do."""
        best, least, tokens, held = None, inf, request.input_tokens, match.lengths.get
        found, more, beyond = self.queues.workers, not tier, self.tiers and not tier
        for view in workers:
            name = view.name
            worker = found[name]
            worker.overrun_tokens = overrun = view.overrun_tokens
            left = (
                RECOMPUTED * (tokens - held(name, 0))
                + view.prefill_tokens
                + OUTPUT_PRICE * view.decode_tokens
            )
            cost = left / view.capacity
            if cost > least or not worker.is_open:
                continue
            room = worker.kv_tokens - worker.in_flight_tokens - overrun
            if more:
                room += worker.chunk_tokens
            if (
                room <= 0
                and not (worker.evicts and worker.has_room(tier, due_s))
                and not (beyond and worker.is_small(request.client, tokens + request.expected_output_tokens))
            ):
                continue
            if worker.groups and self.queues.wanted(name) not in (None, worker.loaded):
                continue
            if best is None or cost < least or _by_tokens(view) < _by_tokens(best):
                best, least = view, cost
        return None if best is None else best.name

    def next(
        self, workers: Sequence[WorkerView], match: Callable[[Request], Match], may: May, now_s: float
    ) -> tuple[Request, str] | None:
        """What the next worker that has room pulls."""
        if workers is not self._viewed:
            self._viewed, self._views = workers, {view.name: view for view in workers}
        while self._ready:
            name = next(iter(self._ready))
            del self._ready[name]
            view = self._views.get(name)
            if view is None:
                continue
            self.queues.of(name).overrun_tokens = view.overrun_tokens
            queued = self.queues.pull(name, now_s)
            if queued is None:
                self._look_at(view, now_s)
                continue
            waiting = self._waiting.pop(queued.id)
            if not may(waiting.request, name):
                self._waiting[queued.id] = waiting
                self.queues.taken_back(queued.id)
                continue
            self._ready[name] = None
            group = self.queues.groups.of(queued.id)
            assert group is not None
            self._leaving[queued.id] = group.kind.tier
            self._unfollow(queued)
            self.estimator.begun(queued.id, now_s - waiting.arrived_s)
            return waiting.request, name
        return None

    def give_up(self, request: Request) -> None:
        """It leaves the queue, and costs nothing."""
        waiting = self._waiting.pop(request.id, None)
        if waiting is not None:
            self._unfollow(waiting.queued)
            self.estimator.begun(request.id, None)
            self.shares.withdraw(request.id)
            self.queues.ended(request.id)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        """It is in the worker's window, and its client has had its turn."""
        tier = self._leaving.pop(request.id, None)
        if tier is None:  # it came to its worker without this router
            standing = self.shares.standing(request.client)
            tier = self._arrive(request, match, now_s) if standing is None else standing
        prefix, prefix_tokens = _prefix(request, match)
        if self.queues.where(request.id) is None:
            tokens = request.input_tokens + request.expected_output_tokens
            due_s = self._due_s(request, now_s)
            self.queues.send(worker, request.id, tokens, prefix, prefix_tokens, due_s, request.client)
        held = self._held.get(prefix) if self._held else None
        if held is not None:
            held[worker] = prefix_tokens
        if self.shares.tier(request.id) is None:
            self.shares.pass_by(
                request.id,
                request.client,
                request.model,
                request.input_tokens - match.tokens,
                request.expected_output_tokens,
            )
        else:
            self.shares.go(request.id)
        self._sent[request.id] = _Sent(worker, tier, now_s)
        if self._waiting:
            self._judge()

    def done(self, ended: Ended, now_s: float) -> None:
        """Its tokens are free again. Its client is charged what it took; nothing if it failed."""
        request, worker = ended.request, ended.worker
        self.queues.ended(request.id)
        sent = self._sent.pop(request.id, None)
        if ended.outcome == "failed":
            self.shares.end(request.id, 0, 0)
        else:
            self.shares.end(request.id, request.input_tokens - ended.matched_tokens, ended.output_tokens)
        if ended.outcome == "ok" and sent is not None:
            self._learn_answer(ended, sent, now_s)
        if self._waiting:
            self._ready[worker] = None
        elif not self.queues.of(worker).is_full:
            self._learning.lapse(worker)

    def tier(self, request_id: str) -> int:
        """As it was when it left the queue."""
        leaving = self._leaving.get(request_id)
        if leaving is not None:
            return leaving
        sent = self._sent.get(request_id)
        return 0 if sent is None else sent.tier

    # -- workers

    def worker_up(self, worker: str, capacity: float = 1.0) -> None:
        """It has nothing in flight. What it can hold and load is said by `equip`."""
        made = Worker(worker, "", self.kv_tokens, self.chunk_tokens, evicts=self.evicts)
        self.queues.worker_up(made)
        self._ready[worker] = None

    def worker_changed(self, worker: str, capacity: float) -> None:
        """Nothing changes: how fast it is is measured."""

    def worker_down(self, worker: str) -> None:
        """Its groups go to the others."""
        self.queues.worker_down(worker)
        self._learning.lapse(worker)
        self._ready.pop(worker, None)
        for held in self._held.values():
            held.pop(worker, None)
        self._equipped()

    def equip(
        self,
        worker: str,
        *,
        loaded: str | None,
        kv_tokens: int | None,
        chunk_tokens: int | None,
        now_s: float,
    ) -> None:
        """Its queue stays, but for what it cannot serve any more."""
        made = self.queues.of(worker)
        if made.loaded == "" != loaded and loaded is not None:
            self._rename(loaded)
        made.kv_tokens = kv_tokens or made.kv_tokens
        made.chunk_tokens = made.chunk_tokens if chunk_tokens is None else chunk_tokens
        self.queues.equip(worker, loaded, made.swap_s)
        self._equipped()

    def taking(self, workers: Collection[str]) -> None:
        """The queues of all others are empty from now on."""
        names = list(self.queues.orders())
        for name in sorted(names, key=lambda one: one not in workers):  # first those that can take over
            self.queues.open(name, name in workers)
        self._all_ready()

    def wanted(self, worker: str) -> str | None:
        """The model that it needs next; None: it needs none."""
        return self.queues.wanted(worker, self._now_s)

    def loaded(self, worker: str, model: str | None, now_s: float) -> None:
        """It has this model now; None: it loads one."""
        self.queues.loaded(worker, model)
        self._equipped()

    def next_models(self, worker: str) -> Sequence[str]:
        """In the order of its queue."""
        return self.queues.next_models(worker)

    def can_load(self, worker: str, swap_s: Mapping[str, float], now_s: float) -> None:
        """Groups of these models may come into its queue."""
        made = self.queues.of(worker)
        self.queues.equip(worker, made.loaded, dict(swap_s))
        self._equipped()

    # -- planning

    def question(self, now_s: float) -> tuple[int, Problem] | None:
        """Asked for when a group will be late. Costs nothing but `every_s` seconds after the last time."""
        self._now_s = now_s
        if now_s < self._looks_s or not self._waiting:
            return None
        since_s, self._looks_s = now_s - self._looks_s, now_s + self.every_s
        slots = self.queues.late(now_s)
        is_late, late = bool(slots), frozenset(slot.worker for slot in slots if slot.demand.tier == 0)
        self._late = late & self._late_first if since_s <= self.every_s else frozenset()
        self._late_first = late
        if not self._attended:
            if is_late:
                self._order_by_edf(now_s)
            return None
        steps = self.replans.due(is_late, now_s)
        if "edf" in steps:
            self._order_by_edf(now_s)
        if "ask" not in steps:
            return None
        return self.replans.asked, self.queues.problem(now_s)

    def late(self, now_s: float) -> Collection[str]:
        """Those where somebody was late at the last two looks, while anybody waits."""
        return self._late if self._waiting and now_s < self._looks_s + self.every_s else ()

    def answer(self, number: int, orders: Orders, now_s: float) -> bool:
        """What of it still holds is applied."""
        if not self.replans.accept(number):
            return False
        self._apply(orders, "planner")
        return True

    def attend(self, is_there: bool, now_s: float) -> None:
        """With another planner questions begin anew."""
        self._attended = is_there
        self.replans.restart()

    def lengths(self) -> Mapping[tuple[str, str], Sequence[Centre]]:
        """Of the latest that wait."""
        found: dict[tuple[str, str], list[Centre]] = {}
        for waiting in reversed(self._waiting.values()):
            queued = waiting.queued
            of_kind = found.setdefault((queued.model, queued.slo_class), [])
            if len(of_kind) < _SAMPLED:
                of_kind.append(lengths(queued))
        return found

    def centre(self, model: str, slo_class: str, centres: Sequence[Centre]) -> None:
        """They hold for requests that come from now on."""
        self.queues.groups.set_centres(model, slo_class, centres)

    def report(self) -> Mapping[str, object]:
        """The queues, who waits in which tier, and how good the estimates were."""
        return {
            **report(self.queues, self.replans, self._now_s),
            "ahead": self.shares.ahead,
            "ordered": dict(self._asked_for),
        }

    def standing(self, request_id: str, now_s: float, *, ahead: bool = True) -> Mapping[str, object] | None:
        """Its group, and what is before it."""
        return standing(self.queues, request_id, now_s, ahead=ahead)

    # -- shares

    @property
    def weights(self) -> Weights:
        """The clients' shares."""
        return self.shares.weights

    def reweighed(self, client: str) -> None:
        """What it sends from now on is charged by its weight."""

    def credits(self, limit: int) -> dict[str, dict[str, float]]:
        """Empty: a client's lead is over all workers."""
        return {}

    # -- inside

    def _arrive(self, request: Request, match: Match, now_s: float) -> int:
        """It waits for its client's turn. Its tier."""
        return self.shares.arrive(
            request.id,
            request.client,
            request.model,
            request.input_tokens - match.tokens,
            request.expected_output_tokens,
            self._due_s(request, now_s),
        )

    def _promise(self, request: Request, now_s: float) -> Promise:
        return request.promise or Promise("", self.slo_s, now_s + self.slo_s)

    def _due_s(self, request: Request, now_s: float) -> float:
        return now_s + self.slo_s if request.promise is None else request.promise.due_s

    def _as_queued(self, request: Request, match: Match, now_s: float) -> Queued:
        promise = self._promise(request, now_s)
        prefix, tokens = _prefix(request, match)
        if prefix is None:
            tokens = min(_HEAD_TOKENS, request.input_tokens)
            prefix = _digest(request.namespace, request.tokens[: tokens * _TOKEN_BYTES])
        return Queued(
            id=request.id,
            client=request.client,
            model=request.model,
            slo_class=_class_of(promise),
            prompt_tokens=request.input_tokens,
            expected_output_tokens=request.expected_output_tokens,
            since_s=promise.due_s - promise.slo_s,
            deadline_s=promise.due_s,
            output_variance=request.expected_output_tokens**2,
            prefix=prefix,
            prefix_tokens=tokens,
            exclude=request.exclude,
        )

    def _follow(self, queued: Queued, match: Match) -> None:
        """One more waits with this prefix."""
        if queued.prefix is None or not self.prefixes:
            return
        self._prefix_counts[queued.prefix] = self._prefix_counts.get(queued.prefix, 0) + 1
        held = self._held.setdefault(queued.prefix, {})
        for worker, tokens in match.lengths.items():
            held[worker] = min(tokens, queued.prefix_tokens)

    def _unfollow(self, queued: Queued) -> None:
        count = self._prefix_counts.pop(queued.prefix, 0)
        if count > 1:
            self._prefix_counts[queued.prefix] = count - 1
        else:
            self._held.pop(queued.prefix, None)

    def _judge(self) -> None:
        """Some requests come within their client's share, or are pushed out of it by more urgent ones."""
        for name in self.queues.drain_missed():
            self.shares.miss(name)
        if self.tiers:
            changed = self.shares.drain_changed(_JUDGED)
            for name, tier in changed:
                self.queues.judge(name, tier)
            if any(not tier for _, tier in changed):
                self._all_ready()

    def _held_of(self, prefix: object) -> Mapping[str, int]:
        return self._held.get(prefix, {})

    def _all_ready(self) -> None:
        self._ready.update(dict.fromkeys(self.queues.orders()))

    def _look_at(self, view: WorkerView, now_s: float) -> None:
        """A worker has all that it may have."""
        worker = self.queues.of(view.name)
        if not worker.is_full or worker.loaded is None:
            self._learning.lapse(view.name)
            return
        record = self._learning.full(view.name, view.prefilled_tokens, view.produced_tokens, now_s)
        if record is not None:
            self.estimator.learn(view.name, worker.loaded, *record)
            self._set_batch(worker.loaded, len(worker.in_flight))

    def _set_batch(self, model: str, requests: int) -> None:
        known = self.queues.groups.batch(model)
        mean = known + _FASTER * (requests - known)
        if not 1 / _CHANGED < requests / known < _CHANGED:
            self.queues.groups.set_batch(model, mean)
            self.queues.settle()

    def _learn_answer(self, ended: Ended, sent: _Sent, now_s: float) -> None:
        made = self.queues.of(ended.worker)
        self.estimator.learn_answer(ended.worker, ended.request.model, ended.output_tokens, ended.tpot_s)
        if ended.tpot_s is not None and not sent.tier:
            wrote_s = ended.tpot_s * max(0, ended.output_tokens - 1)
            first_s = max(0.0, now_s - sent.at_s - wrote_s)
            made.first_token_s += _FASTER * (first_s - made.first_token_s)

    def _equipped(self) -> None:
        """Somebody has other memory, or another model."""
        workers = [self.queues.of(name) for name in self.queues.orders()]
        if self.ahead is None and workers:
            self.shares.ahead = AHEAD_PART * min(one.kv_tokens for one in workers)
        served = {model for one in workers for model in (*one.swap_s, one.loaded) if model is not None}
        self.shares.serve(served)
        self._all_ready()

    def _rename(self, model: str) -> None:
        """The only model that there was has a name now."""
        for waiting in [one for one in self._waiting.values() if one.queued.model == ""]:
            group = self.queues.groups.of(waiting.queued.id)
            assert group is not None
            self.queues.ended(waiting.queued.id)
            waiting.queued = waiting.queued.of_model(model)
            self.queues.groups.add(waiting.queued, group.kind.tier)
        self.queues.settle()

    def _order_by_edf(self, now_s: float) -> None:
        self._apply(edf(self.queues.problem(now_s)), "edf")

    def _apply(self, orders: Orders, reason: str) -> None:
        self._asked_for[reason] = self._asked_for.get(reason, 0) + 1
        self.queues.apply(orders)
        self._all_ready()

    def _is_silent(self) -> bool:
        return self.replans.is_silent


def _prefix(request: Request, match: Match) -> tuple[bytes | None, int]:
    """Of what is cached of a prompt, the part up to where others left it last, and its tokens; None: nothing is."""
    tokens = match.branches[-1] if match.branches else match.tokens
    if not tokens:
        return None, 0
    return _digest(request.namespace, request.tokens[: tokens * _TOKEN_BYTES]), tokens


def _digest(namespace: str, tokens: bytes) -> bytes:
    """Nobody can send two prompts that are taken for one."""
    made = blake2b(tokens, digest_size=12)
    made.update(namespace.encode())
    return made.digest()


_by_tokens = attrgetter("dispatched_tokens", "name")


def _class_of(promise: Promise) -> str:
    """Requests that were promised unlike times are of unlike classes: the class, and how often its time is doubled."""
    return f"{promise.slo_class}~{ceil(2 * log2(promise.slo_s))}"
