"""From a problem to a plan, and to how many replicas more would do. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count, islice
from math import ceil, inf
from statistics import fmean

from router.queues.plan import Planned, needed, plan
from router.queues.problem import MOST_WORK, Answer, Demand, Needed, Problem, Queue, Solver, all_slots

SOON_S = 60.0
"""What is late already, of which is not known what was promised, shall begin within so long."""

MOST_PARTS = 16
"""Of a group, at as many replicas."""

NEVER_S = 1e7
"""A swap that a new replica cannot do takes so long that no order has it."""


def answered(problem: Problem, *, solver: Solver, most_work: int, needs: bool) -> Answer:
    """The plan for a problem, and with `needs` what would do if it is late. Pure."""
    found = plan(problem, solver=solver, most_work=most_work)
    short = is_short(problem, found)
    needed = shortage(problem, most_work // 10) if short and needs else None
    return Answer(found.orders, len(found.late), found.worth.late_s, found.worth.later_s, short, needed)


def is_short(problem: Problem, found: Planned) -> bool:
    """Whether somebody of tier 0 is late by this plan, or what is late already would be late again if it came now."""
    return not found.is_feasible or any(
        slot.start_s > promised[0]
        for slot in all_slots(problem, found.orders)
        if slot.demand.tier == 0 and (promised := slot.demand.promised) is not None
    )


def shortage(problem: Problem, most_work: int = MOST_WORK // 10) -> Needed | None:
    """How many replicas more would do; None if those that are there would, or there are none to be like. What is late
    already counts as if it came now."""
    if not problem.queues:
        return None
    with_one, like = one_more(problem)
    fresh = count(1 + max((demand.number for demand in problem.demands), default=0))
    in_time = [part for demand in with_one.demands for part in _in_time(demand, fresh)]
    demands = [part for demand in in_time for part in _parts(demand, fresh)]
    found = needed(replace(with_one, demands=demands), like, most_work=most_work)
    if not (found.more or found.least):
        return None
    late = sum(
        demand.promised is not None or demand.slack_s < 0 for demand in problem.demands if demand.tier == 0
    )
    why = found.why + (f"; {late} groups are late already" if late else "")
    return replace(found, why=why)


def _in_time(demand: Demand, fresh: Iterator[int]) -> list[Demand]:
    """The group as if it came now, if it is late already; what of it has more time stands apart."""
    if demand.promised is not None:
        within_s, part = demand.promised
        urgent = replace(_part(demand, part), slack_s=within_s, last_slack_s=within_s)
        return [urgent, replace(_part(demand, 1 - part), number=next(fresh))] if part < 1 else [urgent]
    if demand.slack_s < 0:
        return [replace(demand, slack_s=SOON_S, last_slack_s=inf)]
    return [demand]


def _part(demand: Demand, part: float) -> Demand:
    return replace(demand, drain_s={worker: part * one_s for worker, one_s in demand.drain_s.items()})


def _parts(demand: Demand, fresh: Iterator[int]) -> list[Demand]:
    """What replicas that are added can take of a group. Of one whose last request would be late at any worker, though
    nothing is before it, each takes a part: so it is when workers have nothing else to do."""
    drain_s, within_s = min(demand.drain_s.values()), demand.last_slack_s
    if drain_s <= within_s:
        return [demand]
    parts = min(MOST_PARTS, ceil(drain_s / within_s * (1 + 1e-9))) if within_s > 0 else MOST_PARTS
    part = replace(
        _part(demand, 1 / parts),
        last_slack_s=max(within_s, drain_s / parts),
        begun_on=None,
    )
    return [replace(part, number=number) for number in islice(fresh, parts)]


def one_more(problem: Problem) -> tuple[Problem, Queue]:
    """The problem with, for each demand, how long a replica that is added would take, and the queue of that replica.

    It takes as long as those that are there do on average. It can have any model that is there or is waited for. If
    workers load models, it loads those that the one loads that has most; else it keeps the first one that it has.
    """
    names = {queue.worker for queue in problem.queues}
    name = "new"
    while name in names:
        name += "+"

    def typical(times: Mapping[str, float]) -> Mapping[str, float]:
        return {**times, name: fmean(times.values())} if times else times

    demands = [
        replace(demand, drain_s=typical(demand.drain_s), tail_s=typical(demand.tail_s))
        for demand in problem.demands
    ]
    swap_s = max((dict(queue.swap_s) for queue in problem.queues), key=lambda one: len(one))
    models = _models(problem.demands, problem.queues)
    if not swap_s:
        swap_s = dict.fromkeys(models, NEVER_S)
    like = Queue(name, None, swap_s)
    return Problem(demands, problem.queues), like


def _models(demands: Iterable[Demand], queues: Iterable[Queue]) -> list[str]:
    loaded = [queue.loaded for queue in queues if queue.loaded is not None]
    return list(dict.fromkeys([*loaded, *(demand.model for demand in demands)]))
