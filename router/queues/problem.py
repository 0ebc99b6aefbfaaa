"""What the planner decides: in which order each worker serves the groups, and what an order is worth.

The model is that of QLM (Equations 6-13), corrected. For a queue of groups i at worker g, in order:

    start    0 for what is in front of the first, else the end of the one before; if that has another model, its tail
             and the swap are waited for too. The first is compared with the model that is loaded
    end      start + drain
    late     max(0, start - slack), and of the last of its requests max(0, end - last slack)

    minimise lexicographically  late in tier 0,  late in tier 1,  starts

with drain W (`Demand.drain_s`): how long until those behind it begin; tail C - W: how long its last request still
writes; slack: until the earliest deadline of its requests. A group that has begun stays at its worker. No group of tier
1 that has not begun stands before one of tier 0.

`worth` is this definition written out. `search` and `milp` compute the same in other ways.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal, NamedTuple

FAR_S = 30 * 86_400.0
"""Slack of who is late already: nothing is lost by waiting."""

Orders = Mapping[str, Sequence[int]]
"""Worker -> the numbers of its groups, the first one first."""


def is_bound(tier: int, begun_on: str | None) -> bool:
    """Whether a group may not stand before one of tier 0: it is of tier 1 and has not begun."""
    return tier == 1 and begun_on is None


@dataclass(frozen=True, slots=True)
class Demand:
    """A group as it is planned. It can be served by the workers in `drain_s`."""

    number: int
    model: str
    slack_s: float
    drain_s: Mapping[str, float]
    tail_s: Mapping[str, float] = field(default_factory=dict)
    """By worker; 0 where nothing is said."""
    tier: int = 0
    last_slack_s: float = inf
    """Of its last request, which begins when the rest of the group is drained; inf: only the first one counts, as in
    the paper."""
    begun_on: str | None = None
    promised: tuple[float, float] | None = None
    """Of what is late already, whose slack is `FAR_S`: within how long the most urgent of it should have begun, and
    which part of it that is. None: it is in time. It makes no difference to a plan, but shows what is missing."""

    @property
    def is_bound(self) -> bool:
        return is_bound(self.tier, self.begun_on)


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
    """In tier 0."""
    later_s: float
    """In tier 1."""
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


class BadProblem(ValueError):
    """What is asked cannot be planned: names that are there twice, or a group that no worker can serve."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Demands and queues, each named once. Raises `BadProblem`."""

    demands: Sequence[Demand]
    queues: Sequence[Queue]

    def __post_init__(self) -> None:
        workers = {queue.worker for queue in self.queues}
        if len(workers) < len(self.queues):
            raise BadProblem("a worker has two queues")
        if len({demand.number for demand in self.demands}) < len(self.demands):
            raise BadProblem("a group is there twice")
        for queue in self.queues:
            times = (queue.ahead_s, queue.tail_s, *queue.swap_s.values())
            if not all(isfinite(one) and one >= 0 for one in times):
                raise BadProblem(f"the times of {queue.worker} must be finite and not negative")
            if queue.swap_s and queue.loaded is not None and queue.loaded not in queue.swap_s:
                raise BadProblem(f"how long {queue.worker} takes to load {queue.loaded} again is not said")
        for demand in self.demands:
            times = (*demand.drain_s.values(), *demand.tail_s.values())
            if not all(isfinite(one) and one >= 0 for one in times) or not isfinite(demand.slack_s):
                raise BadProblem(f"a time of group {demand.number} is not finite, or is negative")
            if demand.tier not in (0, 1):
                raise BadProblem(f"group {demand.number} is of tier {demand.tier}: there are 0 and 1")
            if not any(can_serve(queue, demand) for queue in self.queues):
                raise BadProblem(f"no worker can serve group {demand.number} of model {demand.model}")


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
    late = [0.0, 0.0]
    waiting_s = 0.0
    for slot in all_slots(problem, orders):
        late[slot.demand.tier] += slot.late_s
        waiting_s += slot.start_s
    return Worth(late[0], late[1], waiting_s)


Solver = Literal["auto", "search", "milp"]
SOLVERS: tuple[Solver, ...] = ("auto", "search", "milp")
MOST_WORK = 100_000_000
"""Of a search, as `search` counts it."""


@dataclass(frozen=True, slots=True)
class Needed:
    """How many more replicas would do: with `more` an order was found that is in time, so that many suffice. None: no
    number does, or none up to `plan.MOST_REPLICAS` was found. Fewer than `least` never suffice."""

    more: int | None
    least: int
    models: Mapping[str, int]
    """How many of `more` begin with which model."""
    why: str


class Answer(NamedTuple):
    """Orders for all queues; how many groups are late all the same, by how much in tier 0 and tier 1. `needed`: what
    would do, if it was to be found out and somebody is late."""

    orders: Orders
    late: int = 0
    late_s: float = 0.0
    later_s: float = 0.0
    is_short: bool = False
    needed: Needed | None = None
