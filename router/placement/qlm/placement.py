"""QLM with fair shares: requests with deadlines wait in groups, and each worker has a queue of groups.

A request that none has to go before, and for which a worker has room, is sent at once. All others wait: within the
share of their client (tier 0) or ahead of it (tier 1), in groups of one model, class and tier.

    who goes first     `queues`: tier, then who can be in time, then the earliest deadline; models in the order of the
                       queue. Within a group first come, first served
    how much           while the tokens in flight are below the KV cache; tier 0 a prefill chunk more
    who is ahead       `shares`: start-time fair queueing. By default `ahead` is a part of the smallest KV cache known
    what it takes      `estimate`, learnt from full workers
    planning           every `every_s` it is looked which groups will be late; if some will, a plan is asked for, one at
                       a time. Until the first has come, and after one that failed or took longer than `patience_s`,
                       each look orders groups by EDF

A later call of an interaction has class and start of the first one: it waits before all that came since.

Unit of fairness: units of service (uncached prompt tokens + 2 · output tokens, over weight), across all workers. As
long as a request of a client within its share waits, each other client is served at most `ahead`, one request and what
its groups had in flight beyond that request's tag, whatever deadlines it claims.

Trade-offs: a request that waits is not at its worker, so a slot is empty for a round trip; the window hides that, as
each worker has a chunk more than it can hold. Prefixes that are cached count for requests that are sent at once alone.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf, log2
from operator import attrgetter

from router.placement.contract import Ended, May, Request, WorkerView
from router.placement.qlm.estimate import Estimator
from router.placement.qlm.groups import Entry, Groups
from router.placement.qlm.problem import MOST_WORK, SOLVERS, Answer, Orders, Problem, Solver, edf
from router.placement.qlm.queues import VirtualQueues, Worker
from router.placement.qlm.report import report, standing
from router.placement.within_shares import WithinShares, left_to_do
from router.radix import Match
from sglang_fair.common.deadlines import Promise

NEEDED_EVERY_S = 5.0
"""How often it is looked for what would do."""
OLD_S = 15.0
"""What was planned so long ago says nothing of a shortage any more."""
_PREDICTED = 16
"""Of so many that wait, the wait of one is predicted, for R²."""
_FASTER = 0.1
"""Weight of the last one in a mean."""
_CHANGED = 1.25
"""By this factor a batch must have changed for groups to be cut anew."""

Question = tuple[int, Callable[[], Answer]]


@dataclass(slots=True)
class _Waiting:
    request: Request
    entry: Entry
    arrived_s: float


@dataclass
class Qlm(WithinShares):
    """`ahead`: units beyond its share up to which a client is in tier 0; null: from the smallest KV cache. `delta`:
    average batches in a group. Without `prefixes` what is cached makes no difference, as in the paper. `literal`:
    waits by Equations 1-5. Without `tiers` none is ahead of its share. `evicts`: workers take requests back for
    more urgent ones (policy `slo`), so these may be sent beyond the window. `kv_tokens` and `chunk_tokens`: of a
    worker that says nothing. `slo_s`: of requests that were promised nothing. `every_s`, `patience_s`: how often is
    planned, and how long a plan may take. `solver`: search, milp (exact, for few groups), or auto: search, and milp
    too for few groups. `plan_work`: how much the search may consider. `max_clients`: that are remembered without
    requests.
    """

    delta: float = 4.0
    prefixes: bool = True
    literal: bool = False
    every_s: float = 1.0
    patience_s: float = 10.0
    solver: Solver = "auto"
    plan_work: int = MOST_WORK

    queues: VirtualQueues = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.every_s > 0 and self.patience_s > 0):
            raise ValueError(f"every_s and patience_s are above 0, not {self.every_s} and {self.patience_s}")
        if self.solver not in SOLVERS:
            raise ValueError(f"solver is one of {', '.join(SOLVERS)}, not {self.solver!r}")
        self.queues = VirtualQueues(Groups(self.delta), Estimator(literal=self.literal))
        self._waiting: dict[str, _Waiting] = {}
        self._leaving: dict[str, int] = {}
        """Tiers of requests that were given to a worker and are not `placed` yet."""
        self._sent: dict[str, tuple[int, float]] = {}
        """Tiers of those that are at a worker, and since when."""
        self._ready: dict[str, None] = {}
        """Workers that may have room for one that waits, in order."""
        self._views: dict[str, WorkerView] = {}
        self._viewed: Sequence[WorkerView] = ()
        self._now_s = 0.0
        self._arrivals = 0
        self._looks_s = -inf
        self._late = self._late_first = frozenset[str]()
        """Workers that were late at the last two looks, and at the last."""
        self._asked_s: float | None = None
        """Of the question that has no answer."""
        self._is_planned = False
        """The last question that is over had an answer."""
        self._answer: Answer | None = None
        self._answered_s = self._needed_s = -inf
        self._short_since_s = 0.0
        self._counts: Counter[str] = Counter()

    # -- requests

    def place(
        self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float
    ) -> str | None:
        """The worker that has least to do of those that have room, if none has to go first; else it waits."""
        tier, due_s = self.shares.standing(request.client), self._due_s(request, now_s)
        is_alone = tier is not None
        if tier is None:
            tier = self._arrive(request, match, due_s)
        if not self.tiers:
            tier = 0
        if not (self._ready and self._waiting):
            chosen = self._at_once(request, match, workers, tier, due_s)
            if chosen is not None:
                self._leaving[request.id] = tier
                return chosen
        if is_alone:
            self._arrive(request, match, due_s)
        promise = request.promise or Promise("", self.slo_s, now_s + self.slo_s)
        entry = Entry(
            id=request.id,
            client=request.client,
            model=request.model,
            slo_class=f"{promise.slo_class}~{ceil(2 * log2(promise.slo_s))}",
            prompt_tokens=request.input_tokens,
            expected_output_tokens=request.expected_output_tokens,
            since_s=promise.due_s - promise.slo_s,
            deadline_s=promise.due_s,
            output_variance=request.expected_output_tokens**2,
            exclude=request.exclude,
        )
        self._waiting[request.id] = _Waiting(request, entry, now_s)
        self.queues.groups.add(entry, tier)
        self.queues.settle()
        self._arrivals += 1
        if not tier and not self._arrivals % _PREDICTED:
            wait = self.queues.wait(request.id, now_s)
            if wait is not None:
                self.queues.estimator.predict(request.id, wait.mean_s)
        return None

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
            self.queues.workers[name].overrun_tokens = view.overrun_tokens
            entry = self.queues.pull(name, now_s)
            if entry is None:
                self._learn(view, now_s)
                continue
            waiting = self._waiting[entry.id]
            if not may(waiting.request, name):
                self.queues.taken_back(entry.id)
                continue
            del self._waiting[entry.id]
            self._ready[name] = None
            group = self.queues.groups.of(entry.id)
            self._leaving[entry.id] = 0 if group is None else group.kind.tier
            self.queues.estimator.begun(entry.id, now_s - waiting.arrived_s)
            return waiting.request, name
        return None

    def give_up(self, request: Request) -> None:
        """It leaves the queue, and costs nothing."""
        if self._waiting.pop(request.id, None) is not None:
            self.queues.estimator.begun(request.id, None)
            self.shares.withdraw(request.id)
            self.queues.ended(request.id)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        """It is in the worker's window, and its client has had its turn."""
        tier, due_s = self._leaving.pop(request.id, None), self._due_s(request, now_s)
        if tier is None:  # it came to its worker without this router
            standing = self.shares.standing(request.client)
            tier = self._arrive(request, match, due_s) if standing is None else standing
        if self.queues.where(request.id) is None:
            tokens = request.input_tokens + request.expected_output_tokens
            self.queues.send(worker, request.id, tokens, due_s, request.client)
        uncached, expected = request.input_tokens - match.tokens, request.expected_output_tokens
        if self.shares.tier(request.id) is None:
            self.shares.pass_by(request.id, request.client, request.model, uncached, expected)
        else:
            self.shares.go(request.id)
        self._sent[request.id] = tier, now_s
        if self._waiting:
            self._judge()

    def done(self, ended: Ended, now_s: float) -> None:
        """Its tokens are free again. Its client is charged what it took; nothing if it failed."""
        request, worker = ended.request, self.queues.workers[ended.worker]
        self.queues.ended(request.id)
        tier, sent_s = self._sent.pop(request.id, (0, now_s))
        if ended.outcome == "failed":
            self.shares.end(request.id, 0, 0)
        else:
            self.shares.end(request.id, request.input_tokens - ended.matched_tokens, ended.output_tokens)
        if ended.outcome == "ok":
            estimator = self.queues.estimator
            estimator.learn_answer(worker.name, request.model, ended.output_tokens, ended.tpot_s)
            if ended.tpot_s is not None and not tier:
                wrote_s = ended.tpot_s * max(0, ended.output_tokens - 1)
                first_s = max(0.0, now_s - sent_s - wrote_s)
                worker.first_token_s += _FASTER * (first_s - worker.first_token_s)
        if self._waiting:
            self._ready[worker.name] = None
        elif worker.held_tokens < worker.kv_tokens:
            self.queues.estimator.lapse(worker.name)

    def tier(self, request_id: str) -> int:
        """As it was when it left the queue."""
        leaving = self._leaving.get(request_id)
        return self._sent.get(request_id, (0,))[0] if leaving is None else leaving

    # -- workers

    def worker_up(self, worker: str, capacity: float = 1.0) -> None:
        """It has nothing in flight. What it can hold and load is said by `equip`."""
        made = Worker(worker, "", self.kv_tokens, self.chunk_tokens, evicts=self.evicts)
        self.queues.worker_up(made)
        self._ready[worker] = None

    def worker_down(self, worker: str) -> None:
        """Its groups go to the others."""
        self.queues.worker_down(worker)
        self._ready.pop(worker, None)
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
        made = self.queues.workers[worker]
        if made.loaded == "" != loaded and loaded is not None:
            for waiting in self._waiting.values():  # the only model that there was has a name
                if waiting.entry.model == "":
                    waiting.entry = self.queues.rename(waiting.entry, loaded)
            self.queues.settle()
        made.kv_tokens = kv_tokens or made.kv_tokens
        made.chunk_tokens = made.chunk_tokens if chunk_tokens is None else chunk_tokens
        self.queues.equip(worker, loaded, made.swap_s)
        self._equipped()

    def taking(self, workers: Collection[str]) -> None:
        """The queues of all others are empty from now on."""
        self.queues.taking(workers)
        self._all_ready()

    def wanted(self, worker: str) -> str | None:
        """The model that it needs next; None: it needs none."""
        return self.queues.wanted(worker, self._now_s)

    def next_models(self, worker: str) -> Sequence[str]:
        """In the order of its queue."""
        return self.queues.next_models(worker)

    def loaded(self, worker: str, model: str | None, now_s: float) -> None:
        """It has this model; None: it loads one."""
        self.queues.loaded(worker, model)
        self._equipped()

    def can_load(self, worker: str, swap_s: Mapping[str, float], now_s: float) -> None:
        """Groups of these models may come into its queue."""
        self.queues.equip(worker, self.queues.workers[worker].loaded, dict(swap_s))
        self._equipped()

    # -- planning

    def question(self, now_s: float) -> Question | None:
        """The problem, when a group will be late. Costs nothing but `every_s` seconds after the last time."""
        self._now_s = now_s
        if not self._waiting or now_s < self._looks_s:
            return None
        since_s, self._looks_s = now_s - self._looks_s, now_s + self.every_s
        slots = self.queues.late(now_s)
        late = frozenset(slot.worker for slot in slots if slot.demand.tier == 0)
        self._late = late & self._late_first if since_s <= self.every_s else frozenset()
        self._late_first = late
        self._counts["taken over"] += self.queues.take_over(now_s)
        if self._asked_s is not None and now_s - self._asked_s >= self.patience_s:
            self._asked_s, self._is_planned = None, False
            self._counts["unanswered"] += 1
        if not slots:
            return None
        problem = self.queues.problem(now_s)
        if not self._is_planned:
            self._apply(edf(problem), "edf")
        if self._asked_s is not None:
            return None
        self._asked_s = now_s
        self._counts["asked"] += 1
        needs = now_s - self._needed_s >= NEEDED_EVERY_S
        self._needed_s = now_s if needs else self._needed_s
        work = partial(planned, problem, solver=self.solver, most_work=self.plan_work, needs=needs)
        return self._counts["asked"], work

    def answer(self, number: int, found: object, now_s: float) -> None:
        """What of it still holds is applied."""
        if number != self._counts["asked"] or self._asked_s is None:
            self._counts["stale"] += 1
            return
        self._asked_s, self._is_planned = None, isinstance(found, Answer)
        if not isinstance(found, Answer):
            self._counts["failed"] += 1
            return
        self._counts["answered"] += 1
        was_short = self._is_short(now_s)
        if found.is_short and found.needed is None and self._answer is not None:
            found = found._replace(needed=self._answer.needed)
        self._answer, self._answered_s = found, now_s
        if not was_short:
            self._short_since_s = now_s
        self._apply(found.orders, "plan")

    def late(self, now_s: float) -> Collection[str]:
        """Those where some within their share were late at the last two looks, while any wait."""
        return self._late if self._waiting and now_s < self._looks_s + self.every_s else ()

    def report(self, now_s: float) -> Mapping[str, object]:
        """The queues, what waits in which tier, plans, and how good the estimates were."""
        names = ("asked", "answered", "stale", "failed", "unanswered", "edf", "taken over")
        plans: dict[str, object] = {name: self._counts[name] for name in names}
        answer, shortage = self._answer, None
        plans |= {"ignored": self.queues.ignored, "last": None}
        if answer is not None:
            plans["last"] = {
                "s_ago": round(now_s - self._answered_s, 3),
                "late": answer.late,
                "late_s": round(answer.late_s, 3),
                "later_s": round(answer.later_s, 3),
            }
        if answer is not None and answer.needed is not None and self._is_short(now_s):
            shortage = {**answer.needed._asdict(), "for_s": round(now_s - self._short_since_s, 3)}
        return {
            **report(self.queues, now_s),
            "plans": plans,
            "shortage": shortage,
            "ahead": self.shares.ahead,
        }

    def standing(self, request_id: str, now_s: float, *, ahead: bool = True) -> Mapping[str, object] | None:
        """Its group, and what is before it."""
        return standing(self.queues, request_id, now_s, ahead=ahead)

    # -- inside

    def _at_once(
        self, request: Request, match: Match, views: Sequence[WorkerView], tier: int, due_s: float
    ) -> str | None:
        """The worker with room where least is to be done, the request's own tokens that are not cached there counted
        `RECOMPUTED` times; None if none has room. One whose queue begins with another model is none of them."""
        best, least, lengths = None, inf, match.lengths if self.prefixes else {}
        size = request.input_tokens + request.expected_output_tokens
        for view in views:
            worker = self.queues.workers[view.name]
            worker.overrun_tokens = view.overrun_tokens
            cost = left_to_do(view, request.input_tokens - lengths.get(view.name, 0))
            if cost > least or not worker.is_open:
                continue
            is_small = not tier and self.tiers and worker.is_small(request.client, size)
            if not (is_small or worker.has_room(tier, due_s)):
                continue
            if worker.groups and self.queues.wanted(view.name) not in (None, worker.loaded):
                continue
            if best is None or cost < least or _by_tokens(view) < _by_tokens(best):
                best, least = view, cost
        return None if best is None else best.name

    def _learn(self, view: WorkerView, now_s: float) -> None:
        """A worker has all that it may have."""
        worker, groups = self.queues.workers[view.name], self.queues.groups
        if worker.held_tokens < worker.kv_tokens or worker.loaded is None:
            self.queues.estimator.lapse(view.name)
            return
        model, done = worker.loaded, (view.prefilled_tokens, view.produced_tokens)
        if self.queues.estimator.full(view.name, model, *done, now_s):
            known, requests = groups.batch(model), len(worker.in_flight)
            if requests and not 1 / _CHANGED < requests / known < _CHANGED:
                groups.set_batch(model, known + _FASTER * (requests - known))
                self.queues.settle()

    def _judge(self) -> None:
        """Some requests come within their client's share, or are pushed out of it by more urgent ones."""
        missed, self.queues.groups.missed = self.queues.groups.missed, []
        for name in missed:
            self.shares.miss(name)
        if self.tiers:
            changed = self.shares.drain_changed(1)
            for name, tier in changed:
                self.queues.judge(name, tier)
            if any(not tier for _, tier in changed):
                self._all_ready()

    def _apply(self, orders: Orders, reason: str) -> None:
        self._counts[reason] += 1
        self.queues.apply(orders)
        self._all_ready()

    def _is_short(self, now_s: float) -> bool:
        answer = self._answer
        return answer is not None and answer.needed is not None and now_s - self._answered_s <= OLD_S

    def _all_ready(self) -> None:
        self._ready.update(dict.fromkeys(self.queues.workers))

    def _equipped(self) -> None:
        """A worker has other memory, or another model."""
        self._serve(self.queues.workers.values())
        self._all_ready()


def planned(problem: Problem, *, solver: Solver, most_work: int, needs: bool) -> Answer:
    """As `plan.plan`, which the router itself does not load: it takes numpy and scipy."""
    from router.placement.qlm.plan import plan

    return plan(problem, solver=solver, most_work=most_work, needs=needs)


_by_tokens = attrgetter("dispatched_tokens", "name")
