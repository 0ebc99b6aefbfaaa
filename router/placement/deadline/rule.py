"""One rule for requests with deadlines: what is due first goes first, what would miss anyway goes last.

    who        requests within the share of their client (tier 0) before those ahead of it; then in time before
               hopeless, but each eighth pull of a replica looks at the hopeless first; then by due time in steps of a
               tenth of the promised time, in a step the least work first (gEDF); of those that are near, the one with
               least work left to do there (`line`)
    where      the replica with least to do of those that have room (`replica`). Nothing waits at a replica: it pulls
    hopeless   the prompts that a replica has and this one's own would last beyond its due time
    models     another one is loaded when the requests that are saved by it exceed those that are lost (`models`)
    shares     start-time fair queueing gives the tier (`placement.shares`): deadlines order only what a client is
               entitled to. By default a client may be ahead by a part of the smallest KV cache

Everything is decided here, in one process; nothing is planned. All that is measured is learnt again after a restart.

Unit of fairness: units of service (uncached prompt tokens + 2 · output tokens, over weight), across all workers. As
long as a request of a client within its share waits, each other client is served at most `ahead` and one request beyond
that client's start, whatever deadlines it claims.

Trade-offs: the largest number in time, and not the least lateness: in overload those that are late wait long. Streams
pause at urgent swaps where there are more models than replicas. What is decided is as good as the expected lengths.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from msgspec import structs

from router.placement.contract import Ended, Equipment, May, Placement, Request, WorkerView
from router.placement.deadline.line import Job, Line
from router.placement.deadline.models import LOOK_S, Models
from router.placement.deadline.replica import Replica
from router.placement.deadline.shown import report, standing
from router.placement.shares import Shares
from router.placement.window import least_to_do
from router.radix import Match
from sglang_fair.common.deadlines import DEFAULT_CLASSES
from sglang_fair.common.weights import Weights

AHEAD_PART = 0.25
"""Of the smallest KV cache."""
LATE_PULLS = 8
"""Of so many pulls one looks at the hopeless first."""
MISSED = 16
"""Requests that are found to be hopeless with one pull, at most."""


@dataclass
class Deadline(Placement):
    """`ahead`: units beyond its share up to which a client is in tier 0; null: from the smallest KV cache. Without
    `tiers` no client is ahead of its share. `evicts`: workers take requests back for more urgent ones (policy `slo`).
    `finish_s`: for so long a stream may go on at a worker that is to load another model at once. `kv_tokens` and
    `chunk_tokens`: of a worker that says nothing. `slo_s`: of requests that were promised nothing. `max_clients`: that
    are remembered without requests. ValueError for a parameter that is none."""

    holds: ClassVar[bool] = True
    loads: ClassVar[bool] = True
    plans: ClassVar[bool] = True

    ahead: float | None = None
    tiers: bool = True
    evicts: bool = False
    kv_tokens: int = 65_536
    chunk_tokens: int = 8_192
    slo_s: float = DEFAULT_CLASSES["interactive"]
    client_weights: Mapping[str, float] = field(default_factory=dict)
    max_clients: int = 50_000
    finish_s: float = 5.0

    shares: Shares = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not (self.kv_tokens > 0 and self.chunk_tokens >= 0):
            raise ValueError("kv_tokens is above 0, and chunk_tokens not negative")
        if not 0 < self.slo_s < inf:
            raise ValueError(f"slo_s is {self.slo_s}: it is a number of seconds above 0")
        if self.max_clients < 1:
            raise ValueError(f"max_clients is {self.max_clients}: at least one is needed")
        if not self.finish_s >= 0:
            raise ValueError(f"finish_s is {self.finish_s}: it is not negative")
        first = self.kv_tokens * AHEAD_PART if self.ahead is None else self.ahead
        weights = Weights(self.client_weights)
        self.shares = Shares(first if self.tiers else inf, weights, most_owing=self.max_clients)
        self.replicas: dict[str, Replica] = {}
        self.lines: dict[str, Line] = {}
        self.models = Models(self.lines, self.replicas, self.finish_s)
        self._waiting: dict[str, Job] = {}
        self._leaving: dict[str, Job] = {}
        """Requests that have a worker, until they are `placed` there."""
        self._ready: dict[str, None] = {}
        """Workers that may have room for one that waits."""
        self._viewed: Sequence[WorkerView] = ()
        self._open = set[str]()
        """The workers that take requests now."""
        self._now_s, self._looked_s, self._measured_s = 0.0, -inf, -inf
        self._number = 0

    # -- requests

    def place(
        self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float
    ) -> str | None:
        """A worker with room, if nothing waits for its model; one where its client has little; else it waits."""
        self._now_s = now_s
        one, line = self._job(request, match, now_s), self._line(request.model)
        line.came(one)
        chosen = self._at_once(one, match, workers, is_first=not line.count)
        if chosen is not None:
            self._leaving[request.id] = one
            return chosen
        if not line.count:
            line.fed_s, self._looked_s = now_s, -inf
        self._waiting[request.id], one.waited = one, True
        self.shares.wait(request.client, request.model, one.cost)
        if line.put(one):  # there may be room for it where there was none for the last
            for replica in self.replicas.values():
                if replica.loaded == request.model and (self.evicts or not replica.is_full):
                    self._ready[replica.name] = None
        return None

    def next(
        self, workers: Sequence[WorkerView], match: Callable[[Request], Match], may: May, now_s: float
    ) -> tuple[Request, str] | None:
        """Of the candidates of all workers with room the one of the least tier, in time, where least is to do."""
        self._now_s = now_s
        if workers is not self._viewed:
            self._viewed, self._open = workers, {view.name for view in workers}
            for view in workers:
                self.replicas[view.name].view = view
        if now_s >= self._looked_s + LOOK_S:
            self._look(now_s)
        found: list[tuple[Replica, Job]] = []
        for name in list(self._ready):
            replica = self.replicas.get(name)
            if (
                replica is None or name not in self._open
            ):  # it may empty for another model, as an operator wants
                del self._ready[name]
            elif (one := self._candidate(replica, may, now_s)) is not None:
                found.append((replica, one))
        if not found:
            return None
        replica, one = found[0] if len(found) == 1 else min(found, key=self._rank)
        line, name = self.lines[one.request.model], replica.name
        if len(near := line.near(one)) > 1:
            near.sort(key=lambda each: each.tokens - match(each.request).of(name))
            one = next((each for each in near if may(each.request, name)), one)
        replica.pulls += 1
        tier = line.tier(one)
        line.remove(one)
        line.fed_s, one.tier = now_s, tier
        self._leaving[one.request.id] = self._waiting.pop(one.request.id)
        return one.request, name

    def give_up(self, request: Request) -> None:
        """It leaves the queue, and costs nothing."""
        one = self._waiting.pop(request.id)
        self.lines[one.request.model].remove(one)
        self.shares.withdraw(request.client, one.request.model, one.cost)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        """It is in flight, and its client has had its turn."""
        one = self._leaving.pop(request.id, None)
        if one is None:  # it came to its worker without this router
            one = self._job(request, match, now_s)
        self.shares.go(request.client, one.cost, one.request.model if one.waited else None)
        self.replicas[worker].send(one, now_s)
        self._ready[worker] = None

    def done(self, ended: Ended, now_s: float) -> None:
        """Its tokens are free. Its client is charged what it took; nothing if it failed."""
        request, replica = ended.request, self.replicas[ended.worker]
        one = replica.land(request.id, now_s)
        took = request.input_tokens - ended.matched_tokens, ended.output_tokens
        cost = self.shares.cost(request.client, *((0, 0) if ended.outcome == "failed" else took))
        self.shares.end(request.client, cost - one.cost)
        if cost < one.cost:
            for model in self.shares.models(request.client):
                self.lines[model].judge(request.client)
        if ended.outcome == "ok":
            self._line(request.model).answered(now_s - one.sent_s)
        self._ready[ended.worker] = None
        if not replica.flights:
            self._looked_s = -inf

    def tier(self, request_id: str) -> int:
        """Of one that leaves the queue."""
        one = self._leaving.get(request_id)
        return 0 if one is None else one.tier

    @property
    def weights(self) -> Weights:
        """The clients' shares. What a client sends is charged by its weight."""
        return self.shares.weights

    # -- workers

    def worker_up(self, worker: str, capacity: float = 1.0) -> None:
        """It has nothing in flight. What it can hold and load is said by `equip`."""
        self.replicas[worker] = Replica(worker, None, self.kv_tokens, self.chunk_tokens, evicts=self.evicts)

    def worker_down(self, worker: str) -> None:
        """What waits waits for the others."""
        gone = self.replicas.pop(worker)
        self._absent(gone.loaded)
        self._equipped()

    def equip(self, worker: str, has: Equipment, now_s: float) -> None:
        """One that could not load what it was to load keeps its model."""
        replica, model, had = self.replicas[worker], has.loaded, self.replicas[worker].loaded
        replica.equip(has)
        if replica.target is not None and replica.target not in has.swap_s:
            replica.target = None
        if model is not None:
            line = self._line(model)
            line.kv_tokens = has.kv_tokens or line.kv_tokens
            if line.left_s is not None:
                line.absence_s, line.left_s = now_s - line.left_s, None
        if had != model:
            if had == "" and model is not None:
                self._rename(model)
            replica.has(model, now_s)
            self._absent(had)
        self._equipped()

    def taking(self, workers: Collection[str]) -> None:
        """All others are sent nothing."""
        for replica in self.replicas.values():
            replica.takes = replica.name in workers
        self._ready.update(dict.fromkeys(self.replicas))

    def wanted(self, worker: str) -> str | None:
        """Its target, at once if that is urgent, else when nothing runs there."""
        replica = self.replicas[worker]
        return replica.target if replica.is_urgent or not replica.flights else None

    def next_models(self, worker: str) -> Sequence[str]:
        """Those that wait, the one with most work first."""
        can, has = self.replicas[worker].swap_s, self.replicas[worker].loaded
        wait = [model for model in can if model != has and self._line(model).count]
        return sorted(wait, key=lambda model: -self.lines[model].tokens)

    # -- what people see

    def late(self, now_s: float) -> Collection[str]:
        """Those that have, or are to have, a model of which some of tier 0 could not be in time at two looks."""
        if not self._waiting:
            return ()
        short = {model for model, looks in self.models.short.items() if looks > 1}
        return [one.name for one in self.replicas.values() if (one.target or one.loaded) in short]

    def report(self, now_s: float) -> Mapping[str, object]:
        """What waits by model, class and tier, in which order for each worker, and how many replicas would do."""
        return report(self.models, self.shares.ahead, now_s)

    def standing(self, request_id: str, now_s: float, *, ahead: bool = True) -> Mapping[str, object] | None:
        """Its order, and how much is before it."""
        one = self._waiting.get(request_id)
        return None if one is None else standing(self.models, one, ahead=ahead)

    # -- inside

    def _line(self, model: str) -> Line:
        line = self.lines.get(model)
        if line is None:
            line = self.lines[model] = Line(self.shares)
        return line

    def _job(self, request: Request, match: Match, now_s: float) -> Job:
        self._number += 1
        promise, client = request.promise, request.client
        due_s, slo_s = (now_s + self.slo_s, self.slo_s) if promise is None else (promise.due_s, promise.slo_s)
        cost = self.shares.cost(client, request.input_tokens - match.tokens, request.expected_output_tokens)
        return Job(request, self._number, now_s, due_s, slo_s, cost, self.shares.tier(client))

    def _at_once(
        self, one: Job, match: Match, workers: Sequence[WorkerView], *, is_first: bool
    ) -> str | None:
        may_pass = self.tiers and not one.tier
        client, able = one.request.client, list[WorkerView]()
        for view in workers if is_first or may_pass else ():
            replica = self.replicas[view.name]
            replica.view = view
            if replica.serves is not None and (
                (is_first and replica.fits(one, one.tier))
                or (may_pass and replica.is_small(client, one.tokens))
            ):
                able.append(view)
        return least_to_do(one.request, match, able)

    def _rank(self, candidate: tuple[Replica, Job]) -> tuple[int, bool, float, str]:
        replica, one = candidate
        return self.lines[one.request.model].tier(one), one.is_late, replica.to_do_s, replica.name

    def _candidate(self, replica: Replica, may: May, now_s: float) -> Job | None:
        """None: it is not ready, or what goes first may not go there, of which the next may be another."""
        line = None if replica.serves is None else self.lines.get(replica.serves)
        if line is None or not line.count or (replica.is_full and not self.evicts):
            del self._ready[replica.name]
            return None
        line.settle()
        order = (True, False) if replica.pulls % LATE_PULLS == LATE_PULLS - 1 else (False, True)
        missed, is_barred = 0, False
        for tier in (0, 1):
            for is_late in order:
                one = line.first(tier, is_late)
                while one is not None and not is_late and missed < MISSED:
                    if now_s + replica.prefill_s(one.request.input_tokens) <= one.due_s:
                        break
                    line.miss(one)
                    missed += 1
                    one = line.first(tier, False)
                if one is not None and not may(one.request, replica.name):
                    one = next((other for other in line.near(one) if may(other.request, replica.name)), None)
                    is_barred |= one is None
                if one is not None and replica.fits(one, tier):
                    return one
        if not is_barred:
            del self._ready[replica.name]
        return None

    def _look(self, now_s: float) -> None:
        self._looked_s = now_s
        for replica in self.replicas.values():
            replica.measure(now_s)
        measures = now_s >= self._measured_s + 2 * LOOK_S
        if measures:
            self._measured_s = now_s
        self.models.look(now_s, measures=measures)

    def _absent(self, model: str | None) -> None:
        """A replica gave it up."""
        if model is not None and all(one.loaded != model for one in self.replicas.values()):
            self._line(model).left_s = self._now_s

    def _equipped(self) -> None:
        """What a client may be ahead, and whose requests hold virtual time back, follows from the workers."""
        some = self.replicas.values()
        if self.ahead is None and self.tiers and some:
            self.shares.ahead = AHEAD_PART * min(one.kv_tokens for one in some)
        self.shares.serve({m for one in some for m in (*one.swap_s, one.loaded) if m is not None})
        self._ready.update(dict.fromkeys(self.replicas))

    def _rename(self, model: str) -> None:
        """The only model that there was has a name now."""
        for one in [one for one in self._waiting.values() if one.request.model == ""]:
            self._line("").remove(one)
            self.shares.wait(one.request.client, model, one.cost)
            self.shares.withdraw(one.request.client, "", one.cost)
            one.request = structs.replace(one.request, model=model)
            self._line(model).put(one)
