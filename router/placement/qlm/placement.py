"""QLM: requests with deadlines wait in groups, and each worker has a queue of groups. All clients are one.

A request that none has to go before, and for which a worker has room, is sent at once. All others wait, in groups of
one model and class.

    which goes first   `queues`: what can be in time, then the earliest deadline; models in the order of the queue.
                       Within a group first come, first served
    how much           while the tokens in flight are below the KV cache and a prefill chunk
    what it takes      `estimate`, learnt from full workers
    planning           every `every_s` it is looked which groups will be late; if some will, a plan is asked for, one at
                       a time. Until the first has come, and after one that failed or took longer than `patience_s`,
                       each look orders groups by EDF

A later call of an interaction has class and start of the first one: it waits before all that came since.

Unit of fairness: none; whoever claims short deadlines is served. Placement `deadline` has shares. Trade-off: a request
that waits is not at its worker, so a slot is empty for a round trip; the window hides that, as each worker has a chunk
more than it can hold. Prefixes that are cached count for requests that are sent at once alone.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isfinite
from typing import ClassVar

from router.placement.contract import Ended, Equipment, May, Placement, Request, WorkerView
from router.placement.qlm.estimate import Estimator
from router.placement.qlm.groups import Group, Groups
from router.placement.qlm.problem import Orders, Slot, edf
from router.placement.qlm.queues import VirtualQueues, Worker
from router.placement.qlm.search import MOST_WORK, SOLVERS, Answer, Solver, plan
from router.placement.window import least_to_do
from router.radix import Match
from sglang_fair.common.deadlines import DEFAULT_CLASSES, Promise

MOST_GROUPS = 20
"""Of a worker that are listed."""
_PREDICTED_S = 0.25
"""The wait of one request in so long is predicted, for R²."""
_FASTER = 0.1
"""Weight of the last one in a mean."""
_CHANGED = 1.25
"""By this factor a batch must have changed for groups to be cut anew."""
_PLANS = ("asked", "answered", "stale", "failed", "unanswered", "edf", "taken over")

Question = tuple[int, Callable[[], Answer]]


@dataclass
class Qlm(Placement):
    """`delta`: average batches in a group. `literal`: waits by Equations 1-5. `evicts`: workers take requests back for
    more urgent ones (policy `slo`), so these may be sent beyond the window. `kv_tokens` and `chunk_tokens`: of a worker
    that says nothing. `slo_s`: of requests that were promised nothing. `every_s`, `patience_s`: how often is planned,
    and how long a plan may take. `solver`: search, exact, or auto: search, and exact too for few groups. `plan_work`:
    how much the search may consider. ValueError for a parameter that is none."""

    holds: ClassVar[bool] = True
    loads: ClassVar[bool] = True
    plans: ClassVar[bool] = True

    delta: float = 4.0
    literal: bool = False
    evicts: bool = False
    kv_tokens: int = 65_536
    chunk_tokens: int = 8_192
    slo_s: float = DEFAULT_CLASSES["interactive"]
    every_s: float = 1.0
    patience_s: float = 10.0
    solver: Solver = "auto"
    plan_work: int = MOST_WORK

    queues: VirtualQueues = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not (self.kv_tokens > 0 and self.chunk_tokens >= 0):
            raise ValueError("kv_tokens is above 0, and chunk_tokens not negative")
        if not all(0 < one < inf for one in (self.slo_s, self.every_s, self.patience_s)):
            raise ValueError("slo_s, every_s and patience_s are numbers of seconds above 0")
        if self.solver not in SOLVERS:
            raise ValueError(f"solver is one of {', '.join(SOLVERS)}, not {self.solver!r}")
        self.queues = VirtualQueues(Groups(self.delta), Estimator(literal=self.literal))
        self._waiting: dict[str, tuple[Request, float]] = {}
        """Each with when it came."""
        self._sent_s: dict[str, float] = {}
        """Since when requests are at a worker."""
        self._ready: dict[str, None] = {}
        """Workers that may have room for one that waits, in order."""
        self._views: dict[str, WorkerView] = {}
        self._viewed: Sequence[WorkerView] = ()
        self._now_s = 0.0
        self._predicts_s = -inf
        self._looks_s = -inf
        self._late = self._late_first = frozenset[str]()
        """Workers that were late at the last two looks, and at the last."""
        self._short_since_s = 0.0
        """The last look at which nothing was late, or would be."""
        self._asked_s: float | None = None
        """Of the question that has no answer."""
        self._is_planned = False
        """The last question that is over had an answer."""
        self._answer: Answer | None = None
        self._answered_s = -inf
        self._counts: Counter[str] = Counter()

    # -- requests

    def place(
        self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float
    ) -> str | None:
        """The worker that has least to do of those that have room, if none has to go first; else it waits."""
        promise = self._promise(request, now_s)
        if not (self._ready and self._waiting):
            chosen = self._at_once(request, match, workers, promise.due_s)
            if chosen is not None:
                return chosen
        self._waiting[request.id] = request, now_s
        self.queues.groups.add(request, promise)
        self.queues.settle()
        if now_s >= self._predicts_s:
            self._predicts_s = now_s + _PREDICTED_S
            if (wait := self.queues.wait(request.id, now_s)) is not None:
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
            request = self.queues.pull(name, now_s, may)
            if request is None:
                self._learn(view, now_s)
                continue
            _, arrived_s = self._waiting.pop(request.id)
            self._ready[name] = None
            self.queues.estimator.begun(request.id, now_s - arrived_s)
            return request, name
        return None

    def give_up(self, request: Request) -> None:
        """It leaves the queue."""
        del self._waiting[request.id]
        self.queues.estimator.begun(request.id, None)
        self.queues.ended(request.id)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        """It is in the worker's window."""
        if request.id not in self.queues.pulled:
            self.queues.send(worker, request, self._promise(request, now_s).due_s)
        self._sent_s[request.id] = now_s

    def done(self, ended: Ended, now_s: float) -> None:
        """Its tokens are free again."""
        request, worker = ended.request, self.queues.workers[ended.worker]
        self.queues.ended(request.id)
        sent_s, estimator = self._sent_s.pop(request.id, now_s), self.queues.estimator
        if ended.outcome == "ok":
            estimator.learn_answer(worker.name, request.model, ended.output_tokens, ended.tpot_s)
            if ended.tpot_s is not None:
                wrote_s = ended.tpot_s * max(0, ended.output_tokens - 1)
                first_s = max(0.0, now_s - sent_s - wrote_s)
                worker.first_token_s += _FASTER * (first_s - worker.first_token_s)
        if self._waiting:
            self._ready[worker.name] = None
        elif worker.held < worker.kv_tokens:
            estimator.lapse(worker.name)

    # -- workers

    def worker_up(self, worker: str, capacity: float = 1.0) -> None:
        """It has nothing in flight. What it can hold and load is said by `equip`."""
        self.queues.worker_up(Worker(worker, "", self.kv_tokens, self.chunk_tokens, evicts=self.evicts))
        self._ready[worker] = None

    def worker_down(self, worker: str) -> None:
        """Its groups go to the others."""
        self.queues.worker_down(worker)
        self._all_ready()
        self._ready.pop(worker, None)

    def equip(self, worker: str, has: Equipment, now_s: float) -> None:
        """Its queue stays, but for what it cannot serve any more."""
        made, loaded = self.queues.workers[worker], has.loaded
        if made.loaded == "" != loaded and loaded is not None:  # the only model that there was has a name
            for request, since_s in [one for one in self._waiting.values() if one[0].model == ""]:
                promise = self.queues.groups.entries[request.id].promise
                self.queues.ended(request.id)
                self._waiting[request.id] = replace(request, model=loaded), since_s
                self.queues.groups.add(self._waiting[request.id][0], promise)
            self.queues.settle()
        elif made.loaded != loaded:
            self.queues.loaded(worker, loaded)
        self.queues.equip(worker, has)
        self._all_ready()

    def taking(self, workers: Collection[str]) -> None:
        """The queues of all others are empty from now on."""
        self.queues.taking(workers)
        self._all_ready()

    def wanted(self, worker: str) -> str | None:
        """The model that it needs next; None: it needs none."""
        return self.queues.wanted(worker, self._now_s)

    def next_models(self, worker: str) -> Sequence[str]:
        """In the order of its queue."""
        waiting = self.queues.waiting(self.queues.workers[worker])
        models = dict.fromkeys(group.kind.model for group in waiting)
        return [model for model in models if model != self.queues.workers[worker].loaded]

    # -- planning

    def question(self, now_s: float) -> Question | None:
        """The problem, when a group will be late. Costs nothing but `every_s` seconds after the last time."""
        self._now_s = now_s
        if not self._waiting or now_s < self._looks_s:
            return None
        since_s, self._looks_s = now_s - self._looks_s, now_s + self.every_s
        slots = self.queues.late(now_s)
        late = frozenset(slot.worker for slot in slots)
        self._late = late & self._late_first if since_s <= self.every_s else frozenset()
        if not slots and not any(group.kind.late and len(group) for group in self.queues.groups):
            self._short_since_s = now_s
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
        return self._counts["asked"], partial(plan, problem, solver=self.solver, most_work=self.plan_work)

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
        self._answer, self._answered_s = found, now_s
        self._apply(found.orders, "plan")

    def late(self, now_s: float) -> Collection[str]:
        """Those where some were late at the last two looks, while any wait."""
        return self._late if self._waiting and now_s < self._looks_s + self.every_s else ()

    # -- what people see

    def report(self, now_s: float) -> Mapping[str, object]:
        """What waits by model and class, each worker's groups in order with when they start, plans, and how good
        estimates were. O(groups)."""
        queues, workers = self.queues, dict[str, object]()
        waiting, late, short = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[str]()
        for group in queues.groups:
            waiting[_sort(group)] += len(group)
        for name, worker in queues.workers.items():
            rows = self._slots(name, now_s)
            for group, slot in rows:
                late[_sort(group)] += len(group) * (slot.late_s > 0)
                short[group.kind.model] += len(group) * (slot.late_s > 0 or group.kind.late)
            workers[name] = _shown(worker, queues.wanted(name), rows)
        answer, last, shortage, r2 = self._answer, None, None, queues.estimator.r2
        if answer is not None:
            s_ago = round(now_s - self._answered_s, 3)
            last = {"s_ago": s_ago, "late": answer.late, "late_s": round(answer.late_s, 3)}
            for_s = round(self._looks_s - self.every_s - self._short_since_s, 3)
            if for_s > 0 and self._waiting:
                models = {model: 1 for model, count in short.most_common(1) if count}
                why = "no order was found that is in time"
                shortage = {"more": None, "least": 1, "models": models, "why": why, "for_s": for_s}
        return {
            "groups": len(queues.groups),
            "stranded": len(queues.stranded),
            "waiting": [
                {"model": model, "class": slo_class, "tier": 0, "requests": count,
                 "late": late[model, slo_class]}
                for (model, slo_class), count in sorted(waiting.items())
                if count
            ],
            "workers": workers,
            "r2": None if r2 is None else _number(r2),
            "shortage": shortage,
            "plans": {name: self._counts[name] for name in _PLANS} | {"ignored": queues.ignored, "last": last},
        }  # fmt: skip

    def standing(self, request_id: str, now_s: float, *, ahead: bool = True) -> Mapping[str, object] | None:
        """Its group; with `ahead` also what is before that at its worker and how long it still waits."""
        group = self.queues.groups.of(request_id)
        if group is None:
            return None
        model, slo_class = _sort(group)
        found = {"group": group.number, "model": model, "class": slo_class, "tier": 0}
        found["with"] = max(0, len(group) - 1)
        if not ahead:
            return found
        owner = self.queues.owner(group)
        if owner is None:
            return found | {"worker": None}
        slots = self._slots(owner.name, now_s)
        at = next((at for at, (one, _) in enumerate(slots) if one is group), 0)
        wait = self.queues.wait(request_id, now_s)
        return found | {
            "worker": owner.name,
            "groups_before": at,
            "requests_before": sum(len(one) for one, _ in slots[:at]),
            "swaps_before": sum(slot.swaps for _, slot in slots[: at + 1]),
            "before": [_row(*one) for one in slots[: min(at, MOST_GROUPS)]],
            "wait_s": None if wait is None else _number(wait.mean_s),
            "likely_s": None if wait is None else _number(wait.likely_s),
        }

    # -- inside

    def _promise(self, request: Request, now_s: float) -> Promise:
        return request.promise or Promise("", self.slo_s, now_s + self.slo_s)

    def _at_once(
        self, request: Request, match: Match, views: Sequence[WorkerView], due_s: float
    ) -> str | None:
        """The worker with room where least is to be done; None if none has room. One whose queue begins with another
        model is none of them."""
        able = list[WorkerView]()
        for view in views:
            worker = self.queues.workers[view.name]
            worker.overrun_tokens = view.overrun_tokens
            if not (worker.takes and worker.has_room(due_s)):
                continue
            if not worker.groups or self.queues.wanted(view.name) in (None, worker.loaded):
                able.append(view)
        return least_to_do(request, match, able)

    def _learn(self, view: WorkerView, now_s: float) -> None:
        """A worker has all that it may have."""
        worker, groups = self.queues.workers[view.name], self.queues.groups
        if worker.held < worker.kv_tokens or worker.loaded is None:
            self.queues.estimator.lapse(view.name)
            return
        model, done = worker.loaded, (view.prefilled_tokens, view.produced_tokens)
        if self.queues.estimator.full(view.name, model, *done, now_s):
            known, requests = groups.batch(model), len(worker.in_flight)
            if requests and not 1 / _CHANGED < requests / known < _CHANGED:
                groups.set_batch(model, known + _FASTER * (requests - known))
                self.queues.settle()

    def _apply(self, orders: Orders, reason: str) -> None:
        self._counts[reason] += 1
        self.queues.apply(orders)
        self._all_ready()

    def _all_ready(self) -> None:
        self._ready.update(dict.fromkeys(self.queues.workers))

    def _slots(self, name: str, now_s: float) -> list[tuple[Group, Slot]]:
        known = self.queues.groups.by_number
        return [(known[slot.demand.number], slot) for slot in self.queues.slots(name, now_s)]


def _sort(group: Group) -> tuple[str, str]:
    """Model and class; that without what tells apart those that were promised unlike times. What is late already waits
    in groups of all classes."""
    return group.kind.model, "(late)" if group.kind.late else group.kind.slo_class.partition("~")[0]


def _shown(worker: Worker, wanted: str | None, rows: list[tuple[Group, Slot]]) -> dict[str, object]:
    return {
        "loaded": worker.loaded,
        "wanted": wanted,
        "in_flight": len(worker.in_flight),
        "in_flight_tokens": _number(worker.tokens),
        "kv_tokens": worker.kv_tokens,
        "waiting": sum(len(group) for group, _ in rows),
        "groups": [_row(*row) for row in rows[:MOST_GROUPS]],
        "more_groups": max(0, len(rows) - MOST_GROUPS),
    }


def _row(group: Group, slot: Slot) -> dict[str, object]:
    model, slo_class = _sort(group)
    return {
        "group": group.number,
        "model": model,
        "class": slo_class,
        "tier": 0,
        "waiting": len(group),
        "running": group.running,
        "begun": group.begun_on is not None,
        "starts_s": _number(slot.start_s),
        "slack_s": _number(slot.demand.slack_s),
        "late_s": _number(slot.late_s),
    }


def _number(value: float) -> float | None:
    """Finite, to a millisecond."""
    return round(value, 3) if isfinite(value) else None
