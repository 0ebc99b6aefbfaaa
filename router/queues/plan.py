"""A plan for all queues, and what would do if there is none that is in time.

`search` plans. With up to `MOST_GROUPS` groups of which it has some late, `milp` is asked too, and with the solver
"milp" it is asked always; the better of both is taken. What comes out is always complete, so a queue never stands still
because a deadline cannot be met.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from router.queues import milp
from router.queues.edf import edf
from router.queues.problem import (
    MOST_WORK,
    SOLVERS,
    Demand,
    Needed,
    Problem,
    Queue,
    Solver,
    Worth,
    all_slots,
    can_serve,
    slots,
    worth,
)
from router.queues.search import search

MOST_REPLICAS = 64
"""More that are looked for."""


@dataclass(frozen=True, slots=True)
class Planned:
    """Orders for all queues. `late` are the groups that are predicted to miss their deadline, the earliest first."""

    orders: Mapping[str, Sequence[int]]
    worth: Worth
    late: tuple[int, ...]
    by: Literal["search", "milp"]

    @property
    def is_feasible(self) -> bool:
        """Nobody within its share is late."""
        return not self.worth.late_s


def plan(problem: Problem, *, solver: Solver = "auto", most_work: int = MOST_WORK, seed: int = 0) -> Planned:
    """The best orders found; the same for the same arguments. ValueError for an unknown solver."""
    if solver not in SOLVERS:
        raise ValueError(f"solver is one of {', '.join(SOLVERS)}, not {solver!r}")
    found = search(problem, most_work=most_work, seed=seed)
    orders: Mapping[str, Sequence[int]] = found.orders
    best, by = found.worth, "search"
    is_late = bool(best.late_s or best.later_s)
    if solver == "milp" or (solver == "auto" and is_late and len(problem.demands) <= milp.MOST_GROUPS):
        exact = milp.solve(problem, starts=solver == "milp")
        if exact is not None and worth(problem, exact).rounded() < best:
            orders, best, by = exact, worth(problem, exact).rounded(), "milp"
    late = sorted(
        (slot.demand.slack_s, slot.demand.number) for slot in all_slots(problem, orders) if slot.late_s > 0
    )
    return Planned(orders, best, tuple(number for _, number in late), "milp" if by == "milp" else "search")


def needed(problem: Problem, like: Queue, *, most_work: int = MOST_WORK // 10) -> Needed:
    """How many replicas like the worker of `like`, each there at once with one of its models, must be added so that
    nobody of tier 0 is late. Tier 1 takes what is left and is not counted.

    That `more` suffice is shown by an order. That fewer than `least` do not, by work: of groups that all have to begin
    within T, all but the last one of each queue are drained within T; so on m queues they drain in m · (T + the longest
    of them) at most. Replicas get models in proportion to the late work of each.
    """
    urgent = [demand for demand in problem.demands if demand.tier == 0]
    for demand in sorted(urgent, key=lambda one: (one.slack_s, one.number)):
        if not _can_be_in_time(problem, demand, like):
            reason = "its deadline has passed" if demand.slack_s < 0 else "alone it would be late everywhere"
            return Needed(None, 0, {}, f"group {demand.number} of {demand.model}: {reason}")
    least, why = _least(problem, urgent)
    work = _late_work(replace(problem, demands=urgent), like)

    def tried(more: int) -> Needed | None:
        models = _shared_out(work, more)
        found = search(_with(problem, urgent, like, models), most_work=most_work, seed=0)
        return None if found.worth.late_s else Needed(more, least, models, why)

    low, more = least - 1, least
    while (found := tried(more)) is None:
        if more >= MOST_REPLICAS:
            return Needed(None, least, {}, f"with {more} more no order was found that is in time; {why}")
        low, more = more, min(MOST_REPLICAS, max(1, 2 * more))
    while found.more is not None and found.more - low > 1:
        middle = (low + found.more) // 2
        fewer = tried(middle)
        low, found = (middle, found) if fewer is None else (low, fewer)
    return found


def _can_be_in_time(problem: Problem, demand: Demand, like: Queue) -> bool:
    """Whether it is in time if it is alone, anywhere or at a new replica."""
    alone = [queue for queue in problem.queues if can_serve(queue, demand)]
    if demand.begun_on is None and can_serve(like, demand):
        alone.append(replace(like, loaded=demand.model, ahead_s=0.0, tail_s=0.0))
    return any(not slot.late_s for queue in alone for slot in slots(queue, [demand]))


def _least(problem: Problem, urgent: Sequence[Demand]) -> tuple[int, str]:
    """How many more are necessary, and because of what."""
    within_s = longest_s = work_s = 0.0
    least, why = 0, "an order was found that is in time"
    for demand in sorted(urgent, key=lambda one: one.slack_s):
        shortest_s = min(demand.drain_s.values())
        within_s, longest_s = max(0.0, demand.slack_s), max(longest_s, shortest_s)
        work_s += shortest_s
        if not within_s + longest_s:
            continue
        more = ceil(work_s / (within_s + longest_s) - 1e-9) - len(problem.queues)
        if more > least:
            least = more
            why = f"{work_s:.1f} s of work, in groups of {longest_s:.1f} s at most, begin within {within_s:.1f} s"
    return least, why


def _late_work(problem: Problem, like: Queue) -> Mapping[str, float]:
    """Seconds by model of the groups that are late if nothing is added, and that another replica can serve."""
    work: Counter[str] = Counter()
    for slot in all_slots(problem, edf(problem)):
        if slot.late_s and can_serve(like, slot.demand):
            work[slot.demand.model] += slot.demand.drain_s[slot.worker]  # type: ignore[assignment]
    return work


def _shared_out(work: Mapping[str, float], count: int) -> dict[str, int]:
    """So many replicas among models, each to the one with the most work for each that it has (D'Hondt)."""
    models = dict.fromkeys(sorted(work), 0)
    for _ in range(count if models else 0):
        most = max(models, key=lambda model: work[model] / (models[model] + 1))
        models[most] += 1
    return {model: number for model, number in models.items() if number}


def _with(problem: Problem, urgent: Sequence[Demand], like: Queue, models: Mapping[str, int]) -> Problem:
    """The problem with more replicas. A plus sign in front keeps their names apart from those that are there."""
    sign = "+" * (1 + max((len(queue.worker) for queue in problem.queues), default=0))
    loaded = [model for model, count in models.items() for _ in range(count)]
    names = [f"{sign}{number}" for number in range(len(loaded))]
    added = [
        replace(like, worker=name, loaded=model, ahead_s=0.0)
        for name, model in zip(names, loaded, strict=True)
    ]

    def everywhere(times: Mapping[str, float]) -> dict[str, float]:
        own = {name: times[like.worker] for name in names if like.worker in times}
        return {**times, **own}

    demands = [
        replace(demand, drain_s=everywhere(demand.drain_s), tail_s=everywhere(demand.tail_s))
        for demand in urgent
    ]
    return Problem(demands, [*problem.queues, *added])
