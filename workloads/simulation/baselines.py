"""What QLM is compared with, as placements that hold requests, and `rivals.DualMap`. Pure.

edf           request by request, the earliest deadline first: it goes to the worker with most room, which ends what
              it runs and loads its model if it has another one. With `prefers_loaded` a worker with room that has
              the model comes first
fcfs_models   the same in order of arrival
shepherd      whole batches: a worker takes as many requests of one model as fit if each answer is the longest
              possible, those of the earliest deadline that can still be kept, and the next batch when all are over
spread        each request goes to one worker's queue at once, in turn or at random (`by`), whatever its model or
              speed; there the earliest deadline is first
push          no queue: each request goes at once to the replica of its model that holds least
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import ClassVar

from router.placement.contract import Ended, Equipment, May, Placement, Request, WorkerView
from router.radix import Match
from workloads.simulation.rivals import DualMap

Entry = tuple[tuple[float, int], Request]

LONGEST_TOKENS = 2048
"""Of an answer, for SHEPHERD."""


@dataclass(slots=True)
class Place:
    """A worker, what it has and what it is about to have."""

    name: str
    loaded: str | None = None
    swap_s: Mapping[str, float] = field(default_factory=dict)
    kv_tokens: int = 0
    chunk_tokens: int = 0
    in_flight: dict[str, float] = field(default_factory=dict)
    tokens: float = 0.0
    overrun_tokens: int = 0
    """By how much answers are longer than was expected."""
    target: str | None = None
    bound: list[Entry] = field(default_factory=list)
    """Requests that it is to get first."""

    @property
    def room(self) -> float:
        return self.kv_tokens + self.chunk_tokens - self.tokens - self.overrun_tokens

    def may_have(self, model: str) -> bool:
        takes = self.target is None and self.loaded is not None and self.room > 0
        return takes and (model == self.loaded or model in self.swap_s)


class _Queueing(Placement):
    """Workers, and what is in flight there."""

    uses_caches: ClassVar[bool] = False
    holds: ClassVar[bool] = True
    loads: ClassVar[bool] = True

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self._count = 0
        self._gone: set[str] = set()

    def worker_up(self, worker: str, capacity: float = 1.0) -> None:
        self.places[worker] = Place(worker)

    def equip(self, worker: str, has: Equipment, now_s: float) -> None:
        place = self.places[worker]
        place.loaded, place.swap_s = has.loaded, has.swap_s
        place.kv_tokens = place.kv_tokens if has.kv_tokens is None else has.kv_tokens
        place.chunk_tokens = place.chunk_tokens if has.chunk_tokens is None else has.chunk_tokens
        if place.loaded == place.target:
            place.target = None

    def wanted(self, worker: str) -> str | None:
        place = self.places[worker]
        return place.target or place.loaded

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        place = self.places[worker]
        tokens = request.input_tokens + request.expected_output_tokens
        place.in_flight[request.id] = tokens
        place.tokens += tokens

    def done(self, ended: Ended, now_s: float) -> None:
        place = self.places[ended.worker]
        place.tokens -= place.in_flight.pop(ended.request.id)
        if not place.in_flight:
            place.tokens = 0.0

    def give_up(self, request: Request) -> None:
        self._gone.add(request.id)

    def place(
        self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float
    ) -> str | None:
        return self._take(request, now_s)

    def next(
        self,
        workers: Sequence[WorkerView],
        match: Callable[[Request], Match],
        may: May,
        now_s: float = 0.0,
    ) -> tuple[Request, str] | None:
        for view in workers:
            self.places[view.name].overrun_tokens = view.overrun_tokens
        return self._pull(now_s)

    def _take(self, request: Request, now_s: float) -> str | None:
        """The worker that gets a new request at once, or none."""
        raise NotImplementedError

    def _pull(self, now_s: float) -> tuple[Request, str] | None:
        """The next of those that wait, with its worker."""
        return None

    def _entry(self, request: Request, first: float | None = None) -> Entry:
        """Of a heap: by when it is due, if nothing else is to be `first`; then in order of arrival."""
        if first is None:
            first = request.promise.due_s if request.promise is not None else inf
        self._count += 1
        return (first, self._count), request

    def _first(self, heap: list[Entry]) -> Entry | None:
        """Of a heap, without those that were given up and stood before it."""
        while heap and heap[0][1].id in self._gone:
            heappop(heap)
        return heap[0] if heap else None


class Edf(_Queueing):
    by_deadline: ClassVar[bool] = True

    def __init__(self, prefers_loaded: bool = False) -> None:
        super().__init__()
        self._prefers_loaded = prefers_loaded
        self._heap: list[Entry] = []

    def _take(self, request: Request, now_s: float) -> str | None:
        heappush(self._heap, self._entry(request, None if self.by_deadline else now_s))
        return None

    def _pull(self, now_s: float) -> tuple[Request, str] | None:
        for place in self.places.values():
            if place.bound and place.loaded is not None and place.target is None:
                return place.bound.pop(0)[1], place.name
        while (entry := self._first(self._heap)) is not None:
            request = entry[1]
            able = [one for one in self.places.values() if one.may_have(request.model)]
            if self._prefers_loaded:
                able = [one for one in able if one.loaded == request.model] or able
            if not able:
                return None
            heappop(self._heap)
            chosen = max(able, key=lambda one: (one.room / one.kv_tokens, one.name))
            if chosen.loaded == request.model:
                return request, chosen.name
            chosen.target = request.model
            chosen.bound.append(entry)
        return None


class Fcfs(Edf):
    by_deadline: ClassVar[bool] = False


class Shepherd(_Queueing):
    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[str, list[Entry]] = {}

    def _take(self, request: Request, now_s: float) -> str | None:
        heappush(self._waiting.setdefault(request.model, []), self._entry(request))
        return None

    def _pull(self, now_s: float) -> tuple[Request, str] | None:
        for place in self.places.values():
            if place.target is None and place.loaded is not None:
                if place.bound:
                    return place.bound.pop(0)[1], place.name
                if not place.in_flight and (model := self._choose(place, now_s)) is not None:
                    self._take_batch(place, model, now_s)
                    if model == place.loaded:
                        return place.bound.pop(0)[1], place.name
                    place.target = model
        return None

    def _choose(self, place: Place, now_s: float) -> str | None:
        """The model of the earliest deadline that can be kept; of the earliest, if none can."""
        best: tuple[bool, float, str] | None = None
        for model, heap in self._waiting.items():
            first = self._first(heap)
            if first is None or (model != place.loaded and model not in place.swap_s):
                continue
            ready_s = now_s + (0.0 if model == place.loaded else place.swap_s[model])
            in_time = [key[0] for key, _ in heap if key[0] >= ready_s]
            one = (not in_time, min(in_time) if in_time else first[0][0], model)
            best = one if best is None or one < best else best
        return None if best is None else best[2]

    def _take_batch(self, place: Place, model: str, now_s: float) -> None:
        """As many as fit; those that are late already come last."""
        heap, tokens = self._waiting[model], 0
        late, batch = list[Entry](), list[Entry]()
        place.bound = batch

        def takes(entry: Entry) -> bool:
            nonlocal tokens
            size = entry[1].input_tokens + LONGEST_TOKENS
            if batch and tokens + size > place.kv_tokens:
                heappush(heap, entry)
                return False
            tokens += size
            batch.append(entry)
            return True

        while (entry := self._first(heap)) is not None:
            heappop(heap)
            if entry[0][0] < now_s:
                late.append(entry)
            elif not takes(entry):
                break
        for entry in late:
            takes(entry)


class Spread(_Queueing):
    def __init__(self, by: str = "turn", seed: int = 0) -> None:
        super().__init__()
        self._by, self._rng, self._turn = by, Random(seed), 0
        self._heaps: dict[str, list[Entry]] = {}

    def _take(self, request: Request, now_s: float) -> str | None:
        names = list(self.places)
        self._turn += 1
        at = self._turn % len(names) if self._by == "turn" else self._rng.randrange(len(names))
        heappush(self._heaps.setdefault(names[at], []), self._entry(request))
        return None

    def _pull(self, now_s: float) -> tuple[Request, str] | None:
        for name, heap in self._heaps.items():
            place = self.places[name]
            first = self._first(heap)
            if first is None or place.loaded is None or place.target is not None or place.room <= 0:
                continue
            if first[1].model == place.loaded:
                return heappop(heap)[1], name
            place.target = first[1].model
        return None


class Push(_Queueing):
    def _take(self, request: Request, now_s: float) -> str | None:
        able = [one for one in self.places.values() if one.loaded == request.model]
        return min(able, key=lambda one: (one.tokens / one.kv_tokens, one.name)).name


BASELINES: Mapping[str, type[Placement]] = {
    "edf": Edf,
    "fcfs_models": Fcfs,
    "shepherd": Shepherd,
    "spread": Spread,
    "push": Push,
    "dualmap": DualMap,
}
