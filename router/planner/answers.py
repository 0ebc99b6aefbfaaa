"""From a question to a plan, and to how many replicas more would do. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf
from statistics import fmean

from router.events import MOST_NEEDED, Lengths, Plan, Replan, Shortage
from router.queues.centres import centres
from router.queues.plan import Needed, Planned, Solver, needed, plan
from router.queues.problem import Demand, Problem, Queue

SOON_S = 60.0
"""What is late whatever is added shall begin within so long; else a queue that is hours behind would need nothing."""

NEVER_S = 1e7
"""A swap that a new replica cannot do takes so long that no order has it."""


def planned(question: Replan, solver: Solver) -> Planned:
    """The best orders that were found."""
    return plan(question.problem, solver=solver)


def answer(question: Replan, found: Planned, took_s: float, short: Shortage | None) -> Plan:
    """What the router is told. `short`: what would do, as far as that is known."""
    return Plan(
        question.number,
        {worker: tuple(order) for worker, order in found.orders.items()},
        len(found.late),
        found.worth.late_s,
        found.worth.later_s,
        took_s,
        None if found.is_feasible else short,
        tuple(
            Lengths(one.model, one.slo_class, centres(one.points)) for one in question.lengths if one.points
        ),
    )


def shortage(problem: Problem) -> Shortage | None:
    """How many replicas more would do; None where there is none that they could be like."""
    if not problem.queues:
        return None
    with_one, like = one_more(problem)
    late = {demand.number for demand in with_one.demands if is_hopeless(demand)}
    soon = [
        replace(demand, slack_s=SOON_S, last_slack_s=inf) if demand.number in late else demand
        for demand in with_one.demands
    ]
    found = needed(replace(with_one, demands=soon), like)
    why = found.why
    if late:
        why += f"; {len(late)} groups that are late whatever is added begin within {SOON_S:g} s"
    return Shortage(_bounded(found), min(found.least, MOST_NEEDED), dict(found.models), why[:1_000])


def is_hopeless(demand: Demand) -> bool:
    """Whether it will be late even if a worker that has its model does nothing else from now on."""
    return demand.slack_s < 0 or min(demand.drain_s.values()) > demand.last_slack_s


def _bounded(found: Needed) -> int | None:
    return None if found.more is None else min(found.more, MOST_NEEDED)


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
