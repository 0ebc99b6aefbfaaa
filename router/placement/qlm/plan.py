"""From a problem to a plan, and to how many replicas more would do: what is computed in a process of its own. Pure.

`search` plans. With up to `milp.MOST_GROUPS` groups of which it has some late, `milp` is computed too, and with the
solver "milp" always; the better of both is taken. What comes out is always complete, so a queue never stands still
because a deadline cannot be met.

How many more replicas would do is shown by an order with so many of them that is in time for tier 0, each there at once
with one of the models, in proportion to the late work of each (D'Hondt). Tier 1 takes what is left. What is late
already counts as if it came now; a group that no replica drains in time is shared by several.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from statistics import fmean

from router.placement.qlm import milp
from router.placement.qlm.problem import (
    MOST_WORK,
    SOLVERS,
    Answer,
    Demand,
    Needed,
    Orders,
    Problem,
    Queue,
    Solver,
    all_slots,
    edf,
    worth,
)
from router.placement.qlm.search import search

MOST_REPLICAS = 64
"""More that are looked for."""
MOST_PARTS = 16
"""Of a group, at as many replicas."""
SOON_S = 60.0


def plan(
    problem: Problem,
    *,
    solver: Solver = "auto",
    most_work: int = MOST_WORK,
    needs: bool = False,
    seed: int = 0,
) -> Answer:
    """The best orders found, and with `needs` what would do if some of tier 0 is late; the same for the same arguments.
    ValueError for an unknown solver."""
    if solver not in SOLVERS:
        raise ValueError(f"solver is one of {', '.join(SOLVERS)}, not {solver!r}")
    found = search(problem, most_work=most_work, seed=seed)
    orders: Orders = found.orders
    best = found.worth
    is_late = bool(best.late_s or best.later_s)
    if solver == "milp" or (solver == "auto" and is_late and len(problem.demands) <= milp.MOST_GROUPS):
        exact = milp.solve(problem, starts=solver == "milp")
        if exact is not None and worth(problem, exact).rounded() < best:
            orders, best = exact, worth(problem, exact).rounded()
    slots = list(all_slots(problem, orders))
    late = sum(slot.late_s > 0 for slot in slots)
    is_short = best.late_s > 0 or any(
        slot.demand.tier == 0 and promised is not None and slot.start_s > promised[0]
        for slot in slots
        for promised in (slot.demand.promised,)
    )
    needed = shortage(problem, most_work // 10) if needs and is_short else None
    return Answer(orders, late, best.late_s, best.later_s, is_short, needed)


def shortage(problem: Problem, most_work: int = MOST_WORK // 10) -> Needed | None:
    """How many replicas more would do; None if those that are there would, or there are none to be like."""
    if not problem.queues:
        return None
    urgent = [
        part
        for demand in problem.demands
        if demand.tier == 0
        for one in _as_if_it_came_now(demand)
        for part in _parts(one)
    ]
    urgent = [replace(demand, number=number) for number, demand in enumerate(urgent)]
    swap_s = max((queue.swap_s for queue in problem.queues), key=len)
    work = Counter[str]()
    for slot in all_slots(Problem(urgent, problem.queues), edf(Problem(urgent, problem.queues))):
        if slot.late_s:
            work[slot.demand.model] += ceil(1e3 * slot.demand.drain_s[slot.worker])
    if not work:
        return None
    late = sum(
        demand.promised is not None or demand.slack_s < 0 for demand in problem.demands if demand.tier == 0
    )
    why = f"{len(urgent)} groups of tier 0, {late} of them late already"

    def does(more: int) -> Mapping[str, int] | None:
        models = Counter[str]()
        for _ in range(more):
            models[max(sorted(work), key=lambda model: work[model] / (models[model] + 1))] += 1
        found = search(_with(problem.queues, urgent, swap_s, models), most_work=most_work)
        return None if found.worth.late_s else models

    low, high, models = 0, 1, does(1)
    while models is None:
        if high >= MOST_REPLICAS:
            return Needed(None, low, {}, f"with {high} more no order was found that is in time; {why}")
        low, high = high, 2 * high
        models = does(high)
    while high - low > 1:
        middle = (low + high) // 2
        fewer = does(middle)
        low, high, models = (middle, high, models) if fewer is None else (low, middle, fewer)
    return Needed(high, 0, models, why)


def _as_if_it_came_now(demand: Demand) -> list[Demand]:
    """What of it is late already had to begin within what was promised, or `SOON_S`; the rest stands apart."""
    if demand.promised is None:
        return [replace(demand, slack_s=SOON_S, last_slack_s=inf)] if demand.slack_s < 0 else [demand]
    within_s, part = demand.promised
    drains = [
        {worker: share * drain_s for worker, drain_s in demand.drain_s.items()} for share in (part, 1 - part)
    ]
    urgent = replace(demand, slack_s=within_s, last_slack_s=within_s, drain_s=drains[0])
    return [urgent] if part == 1 else [urgent, replace(demand, drain_s=drains[1])]


def _parts(demand: Demand) -> list[Demand]:
    """Of one whose last request would be late at any worker, though nothing is before it, each of several takes a
    part: so it is when workers have nothing else to do."""
    drain_s, within_s = min(demand.drain_s.values()), demand.last_slack_s
    if drain_s <= within_s:
        return [demand]
    count = min(MOST_PARTS, ceil(drain_s / within_s * (1 + 1e-9))) if within_s > 0 else MOST_PARTS
    drains_s = {worker: one_s / count for worker, one_s in demand.drain_s.items()}
    last_s = max(within_s, drain_s / count)
    return [replace(demand, drain_s=drains_s, last_slack_s=last_s, begun_on=None)] * count


def _with(
    queues: Sequence[Queue],
    demands: list[Demand],
    swap_s: Mapping[str, float],
    models: Counter[str],
) -> Problem:
    """The problem with more replicas, which take as long as those that are there do on average. They load what the one
    loads that can load most, or keep their model."""
    sign = "+" * (1 + max(len(queue.worker) for queue in queues))
    names = {f"{sign}{at}": model for at, model in enumerate(models.elements())}
    added = [Queue(name, model, swap_s if model in swap_s else {}) for name, model in names.items()]

    def everywhere(times: Mapping[str, float], model: str) -> Mapping[str, float]:
        mean_s = fmean(times.values()) if times else 0.0
        return {**times, **{name: mean_s for name, own in names.items() if own == model or model in swap_s}}

    return Problem(
        [
            replace(one, drain_s=everywhere(one.drain_s, one.model), tail_s=everywhere(one.tail_s, one.model))
            for one in demands
        ],
        [*queues, *added],
    )
