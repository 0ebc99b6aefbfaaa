"""What is planned: in which order each worker serves the groups, and what an order is worth.

The model is that of QLM (Equations 6-13), corrected. For a queue of groups i at worker g, in order:

    start    0 for what is in front of the first, else the end of the one before; if that has another model, its tail
             and the swap are waited for too. The first is compared with the model that is loaded
    end      start + drain
    late     max(0, start - slack), and of the last of its requests max(0, end - last slack)

    minimise lexicographically  late,  starts

with drain W (`Demand.drain_s`): how long until those behind it begin; tail C - W: how long its last request still
writes; slack: until the earliest deadline of its requests. A group that has begun stays at its worker.

`worth` is this definition written out. `search` computes the same in another way. `edf` is the order until a
plan comes, and where the search starts. With `stays` a deadline of an hour does not cause a swap now.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

FAR_S = 30 * 86_400.0
"""Slack of what is late already: nothing is lost by waiting."""

Orders = Mapping[str, Sequence[int]]
"""Worker -> the numbers of its groups, the first one first."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A group as it is planned. It can be served by the workers in `drain_s`."""

    number: int
    model: str
    slack_s: float
    drain_s: Mapping[str, float]
    tail_s: Mapping[str, float] = field(default_factory=dict)
    """By worker; 0 where nothing is said."""
    last_slack_s: float = inf
    """Of its last request, which begins when the rest of the group is drained; inf: only the first one counts, as in
    the paper."""
    begun_on: str | None = None


@dataclass(frozen=True, slots=True)
class Queue:
    """A worker with a virtual queue."""

    worker: str
    loaded: str | None
    """Its model."""
    swap_s: Mapping[str, float] = field(default_factory=dict)
    """By model that it can load, how long that takes: with the loaded one, or empty if it keeps that."""
    ahead_s: float = 0.0
    """Until the first of its queue can begin without a switch."""
    tail_s: float = 0.0
    """What a switch in front of the first waits for, beyond that."""


class Worth(NamedTuple):
    """Less is better, the first number first. Seconds, summed over groups."""

    late_s: float
    waiting_s: float

    def rounded(self) -> "Worth":
        """To a microsecond, so that the order of additions makes no difference."""
        return Worth(*(round(part, 6) for part in self))


class Slot(NamedTuple):
    """A group in its queue."""

    worker: str
    demand: Demand
    start_s: float
    swaps: bool
    late_s: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Demands and queues, each named once. Each demand can be served by one of them."""

    demands: Sequence[Demand]
    queues: Sequence[Queue]


def can_serve(queue: Queue, demand: Demand) -> bool:
    """Whether the group may stand in this queue."""
    if demand.begun_on is not None and demand.begun_on != queue.worker:
        return False
    has_model = demand.model == queue.loaded or demand.model in queue.swap_s
    return queue.worker in demand.drain_s and has_model


def slots(queue: Queue, order: Sequence[Demand]) -> Iterator[Slot]:
    """When each group of a queue starts."""
    now_s, tail_s, model = queue.ahead_s, queue.tail_s, queue.loaded
    for demand in order:
        swaps = demand.model != model
        start_s = now_s + (tail_s + queue.swap_s[demand.model] if swaps else 0.0)
        now_s = start_s + demand.drain_s[queue.worker]
        late_s = max(0.0, start_s - demand.slack_s, now_s - demand.last_slack_s)
        tail_s, model = demand.tail_s.get(queue.worker, 0.0), demand.model
        yield Slot(queue.worker, demand, start_s, swaps, late_s)


def all_slots(problem: Problem, orders: Orders) -> Iterator[Slot]:
    """Of all queues."""
    demands = {demand.number: demand for demand in problem.demands}
    for queue in problem.queues:
        yield from slots(queue, [demands[number] for number in orders.get(queue.worker, ())])


def worth(problem: Problem, orders: Orders) -> Worth:
    """Of all queues."""
    late_s = waiting_s = 0.0
    for slot in all_slots(problem, orders):
        late_s += slot.late_s
        waiting_s += slot.start_s
    return Worth(late_s, waiting_s)


def edf(problem: Problem) -> dict[str, list[int]]:
    """Orders for all queues, with each group once: by the earliest deadline."""
    assigned = assign(problem, lambda one: (one.slack_s, one.number))
    return {worker: [one.number for one in order] for worker, order in assigned.items()}


def assign(problem: Problem, by: Callable[[Demand], tuple[float, int]]) -> dict[str, list[Demand]]:
    """Groups in order of `by`, each to the queue where it would start first. Of equal ones the first queue."""
    queues = problem.queues
    now_s = [queue.ahead_s for queue in queues]
    tail_s = [queue.tail_s for queue in queues]
    models = [queue.loaded for queue in queues]
    assigned: list[list[Demand]] = [[] for _ in queues]
    for demand in sorted(problem.demands, key=by):
        best, start_s = -1, 0.0
        for at, queue in enumerate(queues):
            if not can_serve(queue, demand):
                continue
            switch_s = tail_s[at] + queue.swap_s[demand.model] if models[at] != demand.model else 0.0
            if best < 0 or now_s[at] + switch_s < start_s:
                best, start_s = at, now_s[at] + switch_s
        worker = queues[best].worker
        now_s[best] = start_s + demand.drain_s[worker]
        tail_s[best], models[best] = demand.tail_s.get(worker, 0.0), demand.model
        assigned[best].append(demand)
    return {queue.worker: order for queue, order in zip(queues, assigned, strict=True)}


def stays(queue: Queue, order: Sequence[Demand]) -> bool:
    """Whether a worker serves all of its loaded model first, before it loads the one that its queue, in this order, has
    next: if no group of another model is later by that, with the time of one more swap to spare. A swap costs the same
    whenever it is made, so each that is put off until more waits for the other model saves one. O(groups)."""
    if not order or order[0].model == queue.loaded or order[0].model not in queue.swap_s:
        return False
    mine = [one for one in order if one.model == queue.loaded]
    others = [one for one in order if one.model != queue.loaded]
    if not mine:
        return False
    as_it_is = {slot.demand.number: slot.late_s for slot in slots(queue, order)}
    later = replace(queue, ahead_s=queue.ahead_s + queue.swap_s[order[0].model])
    return all(
        slot.late_s <= as_it_is[slot.demand.number]
        for slot in slots(later, [*mine, *others])
        if slot.demand.model != queue.loaded
    )
