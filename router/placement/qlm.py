"""QLM with fair shares: requests with deadlines wait in groups, and each worker has a queue of groups.

A request that nobody waits before, and for which a worker has room, is sent at once (`deadlines.at_once`). All others
wait: within the share of their client (tier 0) or ahead of it (tier 1), in groups of one model, class and tier, each in
the queue of a worker (`router.queues`, where the rules stand, one module each).

    who goes first     `queues.pulls`: tier, then who can be in time, then the earliest deadline; models in the order
                       of the queue
    how much           `queues.worker`: while the tokens in flight are below the KV cache; tier 0 a prefill chunk more
    who is ahead       `queues.shares`: start-time fair queueing. By default `ahead` is a part of the smallest KV cache
                       known: what a client may have beyond its share is a part of what one worker has in its batch, so
                       others find room there soon
    what it takes      `queues.estimate`, learnt from full workers (`deadlines.teacher`)
    planning           when a group will be late a plan is asked for (`queues.ordering`), which is made in another
                       process; until it comes groups are ordered by EDF

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
from math import inf
from typing import ClassVar

from router.placement.contract import Ended, May, Request, WorkerView
from router.placement.deadlines.at_once import at_once
from router.placement.deadlines.requests import Sent, Waiting, as_queued, cached_prefix, due_s
from router.placement.deadlines.teacher import Teacher
from router.queues.estimate import Estimator
from router.queues.groups import Groups
from router.queues.ordering import Ordering, Question
from router.queues.prefixes import Prefixes
from router.queues.problem import MOST_WORK, SOLVERS, Solver
from router.queues.report import report, standing
from router.queues.shares import Shares
from router.queues.virtual import VirtualQueues
from router.queues.worker import Worker
from router.radix import Match
from sglang_fair.common.deadlines import DEFAULT_CLASSES
from sglang_fair.common.weights import Weights

AHEAD_PART = 0.25
"""Of the smallest KV cache."""
_JUDGED = 1
"""Requests that come into another tier with one that goes, at most. In a trial it was one for every second."""
_PREDICTED = 16
"""Of so many that wait, the wait of one is predicted, for R²."""


@dataclass
class Qlm:
    """`ahead`: units beyond its share up to which a client is in tier 0; null: from the smallest KV cache. `delta`:
    average batches in a group. Without `prefixes` groups are first come, first served, and what is cached makes no
    difference to their plan, as in the paper; `literal`: waits by Equations 1-5. Without `tiers` nobody is ahead of its
    share. `evicts`: workers take requests back for more urgent ones (policy `slo`), so these may be sent beyond the
    window. `kv_tokens` and `chunk_tokens`: of a worker that says nothing. `slo_s`: of requests that were promised
    nothing. `every_s`, `patience_s`: how often is planned, and how long a plan may take. `solver`: search, milp (exact,
    for few groups), or auto: search, and milp too for few groups. `plan_work`: how much the search may consider.
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
    solver: Solver = "auto"
    plan_work: int = MOST_WORK
    client_weights: Mapping[str, float] = field(default_factory=dict)
    max_clients: int = 50_000

    queues: VirtualQueues = field(init=False, repr=False)
    shares: Shares = field(init=False, repr=False)
    estimator: Estimator = field(init=False, repr=False)

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
        self._prefixes = Prefixes()
        held = self._prefixes.held if self.prefixes else None
        self.queues = VirtualQueues(groups, self.estimator, held)
        self._teacher = Teacher(self.queues)
        if self.solver not in SOLVERS:
            raise ValueError(f"solver is one of {', '.join(SOLVERS)}, not {self.solver!r}")
        self._ordering = Ordering(
            self.queues, self._all_ready, self.every_s, self.patience_s, self.solver, self.plan_work
        )
        self._waiting: dict[str, Waiting] = {}
        self._leaving: dict[str, int] = {}
        """Tiers of requests that were given to a worker and are not `placed` yet."""
        self._sent: dict[str, Sent] = {}
        self._ready: dict[str, None] = {}
        """Workers that may have room for somebody who waits, in order."""
        self._views: dict[str, WorkerView] = {}
        self._viewed: Sequence[WorkerView] = ()
        self._now_s = 0.0
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
            due = due_s(request, self.slo_s, now_s)
            chosen = at_once(request, match, workers, self.queues, tier, due, beyond=self.tiers)
            if chosen is not None:
                self._leaving[request.id] = tier
                return chosen
        if is_alone:
            self._arrive(request, match, now_s)
        queued = as_queued(request, match, self.slo_s, now_s)
        self._waiting[request.id] = Waiting(request, queued, now_s)
        if self.prefixes:
            self._prefixes.follow(queued, match.lengths)
        self.queues.groups.add(queued, tier)
        self.queues.settle()
        self._arrivals += 1
        if not tier and not self._arrivals % _PREDICTED:
            wait = self.queues.wait(request.id, now_s)
            if wait is not None:
                self.estimator.predict(request.id, wait.mean_s)
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
            self.queues.of(name).overrun_tokens = view.overrun_tokens
            queued = self.queues.pull(name, now_s)
            if queued is None:
                self._teacher.look_at(view, now_s)
                continue
            waiting = self._waiting.pop(queued.id)
            if not may(waiting.request, name):
                self._waiting[queued.id] = waiting
                self.queues.taken_back(queued.id)
                continue
            self._ready[name] = None
            self._leaving[queued.id] = self.queues.tier(queued.id)
            self._prefixes.unfollow(queued)
            self.estimator.begun(queued.id, now_s - waiting.arrived_s)
            return waiting.request, name
        return None

    def give_up(self, request: Request) -> None:
        """It leaves the queue, and costs nothing."""
        waiting = self._waiting.pop(request.id, None)
        if waiting is not None:
            self._prefixes.unfollow(waiting.queued)
            self.estimator.begun(request.id, None)
            self.shares.withdraw(request.id)
            self.queues.ended(request.id)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        """It is in the worker's window, and its client has had its turn."""
        tier = self._leaving.pop(request.id, None)
        if tier is None:  # it came to its worker without this router
            standing = self.shares.standing(request.client)
            tier = self._arrive(request, match, now_s) if standing is None else standing
        prefix, prefix_tokens = cached_prefix(request, match)
        if self.queues.where(request.id) is None:
            tokens = request.input_tokens + request.expected_output_tokens
            due = due_s(request, self.slo_s, now_s)
            self.queues.send(worker, request.id, tokens, prefix, prefix_tokens, due, request.client)
        self._prefixes.sent(worker, prefix, prefix_tokens)
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
        self._sent[request.id] = Sent(worker, tier, now_s)
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
            self._teacher.answered(ended, sent.at_s, sent.tier, now_s)
        if self._waiting:
            self._ready[worker] = None
        else:
            self._teacher.idle(worker)

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
        self._teacher.gone(worker)
        self._ready.pop(worker, None)
        self._prefixes.worker_down(worker)
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
        self.queues.taking(workers)
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

    def question(self, now_s: float) -> Question | None:
        """Asked for when a group will be late. Costs nothing but `every_s` seconds after the last time."""
        self._now_s = now_s
        return self._ordering.look(now_s) if self._waiting and self._ordering.is_due(now_s) else None

    def late(self, now_s: float) -> Collection[str]:
        """Those where somebody was late at the last two looks, while anybody waits."""
        return self._ordering.late(now_s) if self._waiting else ()

    def answer(self, number: int, found: object, now_s: float) -> None:
        """What of it still holds is applied."""
        self._ordering.answer(number, found, now_s)

    def report(self, now_s: float) -> Mapping[str, object]:
        """The queues, who waits in which tier, and how good the estimates were."""
        return {
            **report(self.queues, now_s),
            **self._ordering.report(now_s),
            "ahead": self.shares.ahead,
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
            due_s(request, self.slo_s, now_s),
        )

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

    def _all_ready(self) -> None:
        self._ready.update(dict.fromkeys(self.queues.orders()))

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
            waiting.queued = self.queues.rename(waiting.queued, model)
        self.queues.settle()
