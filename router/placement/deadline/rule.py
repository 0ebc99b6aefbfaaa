"""One rule for requests with deadlines: who is due first goes first, whoever would miss anyway goes last.

    who        within the share of its client (tier 0) before what is ahead of it; then in time before hopeless, but
               each eighth pull of a replica looks at the hopeless first; then by due time in steps of a tenth of the
               promised time, in a step the least work first (gEDF); of those that are near, the one with most cached
    where      the replica with least to do of those that have room (`replica`). Nobody waits at a replica: it pulls
    hopeless   the prompts that a replica has and this one's own would last beyond its due time
    models     another one is loaded when the requests that are saved by it exceed those that are lost (`models`)
    shares     start-time fair queueing gives the tier (`placement.shares`): deadlines order only what a client is
               entitled to. By default a client may be ahead by a part of the smallest KV cache

Everything is decided here, in one process; nothing is planned. All that is measured is learnt again after a restart.

Unit of fairness: units of service (uncached prompt tokens + 2 · output tokens, over weight), across all workers. As
long as a request of a client within its share waits, each other client is served at most `ahead` and one request beyond
that request's tag, whatever deadlines it claims.

Trade-offs: the largest number in time, and not the least lateness: in overload those that are late wait long. Streams
pause at urgent swaps where there are more models than replicas. What is decided is as good as the expected lengths.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import itemgetter

from router.placement.contract import Ended, May, Request, WorkerView
from router.placement.deadline.line import NEAR_PART, Line, Waiting
from router.placement.deadline.models import LOOK_S, UNKNOWN_S, Models
from router.placement.deadline.replica import DUE_S, LATE_PULLS, Flight, Replica
from router.placement.within_shares import WithinShares, left_to_do
from router.radix import Match
from sglang_fair.core.heap import LazyHeap

JUDGED = 16
"""Requests that come into another tier with one that goes, at most: those that miss their deadline change theirs too,
and are more than those that go."""


@dataclass
class Deadline(WithinShares):
    """`ahead`: units beyond its share up to which a client is in tier 0; null: from the smallest KV cache. Without
    `tiers` nobody is ahead of its share. `evicts`: workers take requests back for more urgent ones (policy `slo`).
    `finish_s`: for so long a stream may go on at a worker that is to load another model at once. `kv_tokens` and
    `chunk_tokens`: of a worker that says nothing. `slo_s`: of requests that were promised nothing. `max_clients`: that
    are remembered without requests."""

    finish_s: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.finish_s >= 0:
            raise ValueError(f"finish_s is {self.finish_s}: it is not negative")
        self.replicas: dict[str, Replica] = {}
        self.lines: dict[str, Line] = {}
        self.models = Models(self.lines, self.replicas, self.finish_s)
        self._waiting: dict[str, Waiting] = {}
        self._sent: dict[str, int] = {}
        """Tiers of requests that left the queue, until they are over."""
        self._ready: dict[str, LazyHeap[str]] = {}
        """By model, the workers that may have room for somebody who waits; where least is to do first."""
        self._viewed: Sequence[WorkerView] = ()
        self._now_s, self._looked_s, self._measured_s = 0.0, -inf, -inf
        self._number = 0

    # -- requests

    def place(
        self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float
    ) -> str | None:
        """A worker with room, if nobody waits for its model; one where its client has little; else it waits."""
        self._now_s = now_s
        line, due_s, slo_s = self._line(request.model), self._due_s(request, now_s), self._slo_s(request)
        tier = self._tier(request, match, due_s)
        self._number += 1
        one = Waiting(request, self._number, slo_s, due_s, now_s, tier)
        line.came(slo_s, one.tokens, now_s)
        chosen = self._at_once(one, match, workers, is_first=not line.items)
        if chosen is not None:
            self._sent[request.id] = tier
            return chosen
        if not line.items:
            line.fed_s = now_s
            self._looked_s = -inf
        self._waiting[request.id] = one
        if line.put(one):
            self._first(request.model)
        return None

    def next(
        self, workers: Sequence[WorkerView], match: Callable[[Request], Match], may: May, now_s: float
    ) -> tuple[Request, str] | None:
        """Of the candidates of all workers with room the one of the least tier, in time, where least is to do."""
        self._now_s = now_s
        self._see(workers)
        if now_s >= self._looked_s + LOOK_S:
            self._look(now_s)
        found: list[tuple[tuple[int, bool, float, str], Replica, Waiting]] = []
        for model, heap in self._ready.items():
            line = self.lines.get(model)
            while line is not None and line.items and (name := heap.first()) is not None:
                replica = self.replicas.get(name)
                if replica is not None and replica.serves == model:
                    one = self._candidate(replica, line, may, now_s)
                    if one is not None:
                        found.append(((one.tier, one.is_late, *heap.key(name)), replica, one))
                        break
                heap.discard(name)
        if not found:
            return None
        _, replica, one = min(found, key=itemgetter(0))
        one = self._cached(one, replica, match, may)
        replica.pulls += 1
        self._leave(one)
        self._sent[one.request.id] = one.tier
        self._line(one.request.model).fed_s = now_s
        return one.request, replica.name

    def give_up(self, request: Request) -> None:
        """It leaves the queue, and costs nothing."""
        one = self._waiting.get(request.id)
        if one is not None:
            self._leave(one)
            self.shares.withdraw(request.id)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        """It is in flight, and its client has had its turn."""
        due_s = self._due_s(request, now_s)
        if request.id not in self._sent:  # it came to its worker without this router
            self._sent[request.id] = self._tier(request, match, due_s)
        tier = self._sent[request.id]
        self.shares.go(request.id)
        tokens = request.input_tokens + request.expected_output_tokens
        slo_s = self._slo_s(request)
        replica = self.replicas[worker]
        replica.send(Flight(request, tokens, int(due_s // DUE_S), slo_s, now_s, tier))
        if self._waiting:
            self._wake(replica)
        if self._waiting and self.tiers:
            for name, changed in self.shares.drain_changed(JUDGED):
                self._move(self._waiting.get(name), changed)

    def done(self, ended: Ended, now_s: float) -> None:
        """Its tokens are free. Its client is charged what it took; nothing if it failed."""
        request = ended.request
        took = request.input_tokens - ended.matched_tokens, ended.output_tokens
        self.shares.end(request.id, *((0, 0) if ended.outcome == "failed" else took))
        self._sent.pop(request.id, None)
        replica = self.replicas[ended.worker]
        flight = replica.land(request.id, now_s)
        if flight is not None and ended.outcome == "ok":
            self._line(request.model).answered(now_s - flight.sent_s)
        self._wake(replica)
        if not replica.flights:
            self._looked_s = -inf

    def tier(self, request_id: str) -> int:
        """As it was when it left the queue."""
        return self._sent.get(request_id, 0)

    # -- workers

    def worker_up(self, worker: str, capacity: float = 1.0) -> None:
        """It has nothing in flight. What it can hold and load is said by `equip`."""
        self.replicas[worker] = Replica(worker, self.kv_tokens, self.chunk_tokens)

    def worker_down(self, worker: str) -> None:
        """What waits waits for the others."""
        gone = self.replicas.pop(worker, None)
        if gone is not None:
            self._absent(gone.loaded)
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
        """What it has. One that could not load what it was to load keeps its model."""
        replica = self.replicas[worker]
        replica.kv_tokens = kv_tokens or replica.kv_tokens
        replica.chunk_tokens = replica.chunk_tokens if chunk_tokens is None else chunk_tokens
        if replica.loaded != loaded:
            if replica.loaded == "" and loaded is not None:
                self._rename(loaded)
            self.loaded(worker, loaded, now_s)
        if loaded is not None and kv_tokens:
            self._line(loaded).kv_tokens = kv_tokens
        self._equipped()

    def taking(self, workers: Collection[str]) -> None:
        """All others are sent nothing."""
        for replica in self.replicas.values():
            replica.takes = replica.name in workers
        self._wake(*self.replicas.values())

    def can_load(self, worker: str, swap_s: Mapping[str, float], now_s: float) -> None:
        """It may be given these."""
        replica = self.replicas[worker]
        replica.swap_s = dict(swap_s)
        if replica.target is not None and replica.target not in swap_s:
            replica.target = None
        self._equipped()

    def wanted(self, worker: str) -> str | None:
        """Its target, at once if that is urgent, else when nothing runs there."""
        replica = self.replicas[worker]
        return replica.target if replica.is_urgent or not replica.flights else None

    def next_models(self, worker: str) -> Sequence[str]:
        """Those that wait, the one with most work first."""
        can, has = self.replicas[worker].swap_s, self.replicas[worker].loaded
        wait = [model for model in can if model != has and self._line(model).items]
        return sorted(wait, key=lambda model: -self.lines[model].tokens)

    def loaded(self, worker: str, model: str | None, now_s: float) -> None:
        """It has this model now; None: it loads one."""
        replica = self.replicas[worker]
        had = replica.loaded
        replica.has(model, now_s)
        if model is not None:
            line = self._line(model)
            if line.left_s is not None:
                line.absence_s, line.left_s = now_s - line.left_s, None
        if had != model:
            self._absent(had)
        self._equipped()

    # -- what people see

    def late(self, now_s: float) -> Collection[str]:
        """Those that have, or are to have, a model of which some of tier 0 could not be in time at two looks."""
        if not self._waiting:
            return ()
        short = {model for model, looks in self.models.short.items() if looks > 1}
        return [one.name for one in self.replicas.values() if (one.target or one.loaded) in short]

    def report(self, now_s: float) -> Mapping[str, object]:
        """What waits by model, class and tier, in which order for each worker, and how many replicas would do."""
        rows = Counter[tuple[str, str, int]]()
        late = Counter[tuple[str, str, int]]()
        for model, line in self.lines.items():
            for (slo_class, tier, is_late), count in line.counts.items():
                rows[model, slo_class, tier] += count
                late[model, slo_class, tier] += is_late * count
        missing = self.models.missing if self._waiting else {}
        return {
            "groups": sum(len(line.orders()) for line in self.lines.values()),
            "waiting": [
                {"model": sort[0], "class": sort[1], "tier": sort[2], "requests": count, "late": late[sort]}
                for sort, count in sorted(rows.items())
            ],
            "workers": {name: self._shown(replica, now_s) for name, replica in self.replicas.items()},
            "ahead": self.shares.ahead,
            "shortage": {
                "more": sum(missing.values()),
                "models": dict(missing),
                "why": "what waits within its clients' shares is more than can be served in time",
                "for_s": round(now_s - self.models.missing_since_s, 3),
            }
            if missing
            else None,
        }

    def standing(self, request_id: str, now_s: float, *, ahead: bool = True) -> Mapping[str, object] | None:
        """Its order, and how much is before it."""
        one = self._waiting.get(request_id)
        if one is None:
            return None
        line, model = self._line(one.request.model), one.request.model
        found: dict[str, object] = {
            "group": 2 * one.tier + one.is_late,
            "model": model,
            "class": one.slo_class,
            "tier": one.tier,
            "with": len(line.items) - 1,
        }
        if not ahead:
            return found
        have = [replica for replica in self.replicas.values() if model in (replica.target, replica.loaded)]
        count, tokens = line.before(one)
        rate = sum(replica.rates.get(model, replica.kv_tokens / UNKNOWN_S) for replica in have)
        wait_s = round(tokens / rate, 3) if rate else None
        return found | {
            "worker": have[0].name if have else None,
            "groups_before": 2 * one.tier + one.is_late,
            "requests_before": round(count),
            "swaps_before": int(all(replica.loaded != model for replica in have)),
            "wait_s": wait_s,
            "likely_s": wait_s,
            "before": [],
        }

    # -- inside

    def _line(self, model: str) -> Line:
        line = self.lines.get(model)
        if line is None:
            line = self.lines[model] = Line()
        return line

    def _slo_s(self, request: Request) -> float:
        return self.slo_s if request.promise is None else request.promise.slo_s

    def _tier(self, request: Request, match: Match, due_s: float) -> int:
        tier = self._arrive(request, match, due_s)
        return tier if self.tiers else 0

    def _at_once(
        self, one: Waiting, match: Match, workers: Sequence[WorkerView], *, is_first: bool
    ) -> str | None:
        if not is_first and (one.tier or not self.tiers):
            return None
        best: tuple[float, int, str] | None = None
        for view in workers:
            replica = self.replicas[view.name]
            replica.view = view
            if replica.serves is None:
                continue
            if not (is_first and replica.has_room(one, evicts=self.evicts)) and not (
                self.tiers and not one.tier and replica.is_small(one.request.client, one.tokens)
            ):
                continue
            cost = left_to_do(view, one.request.input_tokens - match.of(view.name))
            key = cost, view.dispatched_tokens, view.name
            if best is None or key < best:
                best = key
        return None if best is None else best[2]

    def _candidate(self, replica: Replica, line: Line, may: May, now_s: float) -> Waiting | None:
        if replica.is_full and not self.evicts:
            return None
        order = (True, False) if replica.pulls % LATE_PULLS == LATE_PULLS - 1 else (False, True)
        for tier in (0, 1):
            for is_late in order:
                one = line.first(tier, is_late)
                while one is not None and not is_late and self._is_hopeless(one, replica, now_s):
                    self.shares.miss(one.request.id)
                    line.move(one, tier=tier, is_late=True)
                    one = line.first(tier, False)
                if one is not None and not may(one.request, replica.name):
                    one = next((other for other in line.near(one) if may(other.request, replica.name)), None)
                if one is not None and replica.has_room(one, evicts=self.evicts):
                    return one
        return None

    def _is_hopeless(self, one: Waiting, replica: Replica, now_s: float) -> bool:
        return now_s + replica.prefill_s(one.request.input_tokens) > one.due_s

    def _to_do_s(self, replica: Replica) -> float:
        rate = replica.rates.get(replica.loaded or "", replica.kv_tokens / UNKNOWN_S)
        return replica.held / rate + replica.prefill_s(0.0)

    def _cached(
        self, first: Waiting, replica: Replica, match: Callable[[Request], Match], may: May
    ) -> Waiting:
        """Of those that are as urgent the one with least work left to do there."""
        best, least = first, inf
        for one in self._line(first.request.model).near(first):
            if one.due_s > first.due_s + NEAR_PART * first.slo_s:
                continue
            work = one.tokens - match(one.request).of(replica.name)
            if work < least and may(one.request, replica.name):
                best, least = one, work
        return best

    def _leave(self, one: Waiting) -> None:
        del self._waiting[one.request.id]
        self._line(one.request.model).remove(one)

    def _move(self, one: Waiting | None, tier: int) -> None:
        if one is not None and self._line(one.request.model).move(one, tier=tier, is_late=one.is_late):
            self._first(one.request.model)

    def _first(self, model: str) -> None:
        """Another one is the first of its order: there may be room for it where there was none for the last."""
        self._wake(
            *(
                one
                for one in self.replicas.values()
                if one.loaded == model and (self.evicts or not one.is_full)
            )
        )

    def _wake(self, *replicas: Replica) -> None:
        """They may have room."""
        for one in replicas:
            if one.serves is not None:
                heap = self._ready.get(one.serves)
                if heap is None:
                    heap = self._ready[one.serves] = LazyHeap()
                heap.put(one.name, (self._to_do_s(one), one.name))

    def _see(self, workers: Sequence[WorkerView]) -> None:
        if workers is not self._viewed:
            self._viewed = workers
            for view in workers:
                self.replicas[view.name].view = view

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
        self._serve(self.replicas.values())
        self._wake(*self.replicas.values())

    def _shown(self, replica: Replica, now_s: float) -> Mapping[str, object]:
        """A worker and the orders from which it takes, the one that goes first before the others."""
        line, rows = self._line(replica.loaded or ""), []
        for at, first, count in line.orders() if replica.loaded is not None else ():
            slack_s = round(first.due_s - now_s, 3)
            rows.append(
                {
                    "group": at,
                    "model": replica.loaded,
                    "class": "(late)" if first.is_late else first.slo_class,
                    "tier": first.tier,
                    "waiting": count,
                    "running": sum(flight.tier == first.tier for flight in replica.flights.values()),
                    "starts_s": round(self._to_do_s(replica), 3),
                    "slack_s": slack_s,
                    "late_s": max(0.0, -slack_s),
                }
            )
        return {
            "loaded": replica.loaded,
            "wanted": replica.target or replica.loaded,
            "in_flight": len(replica.flights),
            "in_flight_tokens": round(replica.held, 3),
            "kv_tokens": replica.kv_tokens,
            "groups": rows,
        }

    def _rename(self, model: str) -> None:
        """The only model that there was has a name now."""
        for one in [one for one in self._waiting.values() if one.request.model == ""]:
            self._line("").remove(one)
            one.request = replace(one.request, model=model)
            self._line(model).put(one)
