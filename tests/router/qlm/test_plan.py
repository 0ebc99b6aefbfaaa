"""The search and branch and bound against the definition and all orders."""

import pickle
from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.placement.qlm.problem import Demand, Problem, Queue, Worth, all_slots, edf, slots, worth
from router.placement.qlm.search import Found, exact, plan, search
from tests.support.budget import examples
from tests.support.queue_problems import a_problem, all_orders, best_of_all, faults

LITTLE_WORK = 80_000
TIGHT = st.sampled_from([0.2, 0.5, 1.0])
SEEDS = st.integers(0, 2**32)


def one_queue(*demands: tuple[float, float]) -> Problem:
    """One worker, one model, no swaps: groups of (drain, slack)."""
    made = [Demand(number, "m", slack_s, {"w": drain_s}) for number, (drain_s, slack_s) in enumerate(demands)]
    return Problem(made, [Queue("w", "m")])


def close(one: Worth, other: Worth) -> bool:
    return one.late_s == pytest.approx(other.late_s, abs=1e-5)


def exactly(problem: Problem) -> Found:
    """From the worst beginning: orders that are worth nothing."""
    return exact(problem, Found({}, Worth(inf, inf), Worth(inf, inf), 0))


# ---- QLM-P4: against brute force


@pytest.mark.slow
@settings(max_examples=examples(25))
@given(SEEDS, st.integers(1, 4), st.integers(1, 2), TIGHT)
def test_qlm_p4_exact_is_as_good_as_the_best_of_all_orders(
    seed: int, groups: int, workers: int, tight: float
) -> None:
    problem = a_problem(Random(seed), groups, workers, tight=tight)
    found = exactly(problem)
    assert faults(problem, found.orders) == []
    assert found.worth == worth(problem, found.orders).rounded() == best_of_all(problem)


def test_qlm_p4_exact_waits_for_what_runs() -> None:
    """A switch in front of the first group waits for its tail; what has begun stays."""
    demands = [Demand(1, "a", 100.0, {"w": 10.0}), Demand(2, "a", 1.0, {"w": 10.0})]
    assert exactly(Problem(demands, [Queue("w", "a")])).orders == {"w": [2, 1]}
    swaps = {"a": 5.0, "b": 5.0}
    queues = [Queue("v", "a", swaps, tail_s=50.0), Queue("w", "a", swaps, tail_s=1.0, ahead_s=10.0)]
    for slack_s in (16.0, 40.0):
        problem = Problem([Demand(1, "b", slack_s, {"v": 10.0, "w": 10.0})], queues)
        assert exactly(problem).orders == {"v": [], "w": [1]}


def test_where_nothing_is_late_groups_start_earlier_than_in_the_first_orders() -> None:
    earlier = 0
    for seed in range(8):
        problem = a_problem(Random(seed), 12, 3, models=3)
        loose = [replace(one, slack_s=1e4, last_slack_s=float("inf")) for one in problem.demands]
        found = search(Problem(loose, problem.queues), most_work=LITTLE_WORK)
        assert found.worth.late_s == found.start.late_s == 0
        earlier += found.worth.waiting_s < found.start.waiting_s
    assert earlier >= 4


@pytest.mark.slow
def test_qlm_p4_the_search_is_optimal_in_nearly_all_small_cases() -> None:
    """39 of 40 are the least that must be; the seeds are fixed, so this always says the same."""
    rng, optimal = Random(11), 0
    for _ in range(40):
        problem = a_problem(rng, rng.choice([3, 4, 5]), 2, tight=rng.choice([0.3, 0.6, 1.0]))
        optimal += close(search(problem, most_work=LITTLE_WORK).worth, best_of_all(problem))
    assert optimal >= 39


@settings(max_examples=examples(80))
@given(SEEDS, st.integers(1, 5) | st.integers(6, 30), st.integers(1, 2) | st.integers(3, 6), TIGHT)
def test_qlm_p4_the_search_keeps_every_rule_and_is_between_the_best_of_all_orders_and_edf(
    seed: int, groups: int, workers: int, tight: float
) -> None:
    """Each group once, where it can be served, begun ones at their worker."""
    is_small = groups <= 5 and workers <= 2
    problem = a_problem(Random(seed), groups, workers, models=2 if is_small else 3, tight=tight)
    found = search(problem, most_work=LITTLE_WORK // 4)
    assert faults(problem, found.orders) == []
    assert worth(problem, found.orders).rounded() == found.worth
    assert found.worth <= found.start <= worth(problem, edf(problem)).rounded()
    assert not is_small or best_of_all(problem) <= found.worth


def test_the_same_problem_has_the_same_plan_and_less_work_is_not_exceeded() -> None:
    problem = a_problem(Random(5), 30, 4, models=3, tight=0.2)
    one, other = search(problem, most_work=LITTLE_WORK), search(problem, most_work=LITTLE_WORK)
    assert one == other
    least = search(problem, most_work=1)
    assert faults(problem, least.orders) == []
    assert least.work < 100_000
    assert one.worth < least.worth


@pytest.mark.slow
@settings(max_examples=examples(6))
@given(SEEDS)
def test_a_plan_is_exact_where_groups_are_few(seed: int) -> None:
    problem = a_problem(Random(seed), 4, 2, tight=0.3)
    best = best_of_all(problem)
    planned = {solver: plan(problem, solver=solver, most_work=LITTLE_WORK) for solver in ("auto", "exact")}  # type: ignore[arg-type]
    for one in planned.values():
        assert faults(problem, one.orders) == []
        assert close(worth(problem, one.orders), best)
        assert one.late_s == worth(problem, one.orders).rounded().late_s
        assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(ValueError, match="solver is one of"):
        plan(problem, solver="best")  # type: ignore[arg-type]


# ---- QLM-P5, P6


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=6))
def test_qlm_p5_one_model_is_in_time_if_and_only_if_it_is_in_the_order_of_slack_and_drain(
    groups: list[tuple[int, int]],
) -> None:
    problem = one_queue(*groups)
    by_end = sorted(problem.demands, key=lambda one: one.slack_s + one.drain_s["w"])
    in_time = worth(problem, {"w": [one.number for one in by_end]}).late_s == 0
    assert in_time == (best_of_all(problem).late_s == 0)
    assert in_time == (search(problem, most_work=LITTLE_WORK).worth.late_s == 0)


def test_qlm_p5_edf_by_slack_does_not_do() -> None:
    problem = one_queue((10, 5), (1, 6))
    assert worth(problem, edf(problem)).late_s == 4
    assert plan(problem).late_s == 0


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(SEEDS, st.integers(1, 20), st.integers(1, 4))
def test_qlm_p6_swaps_are_at_most_the_boundaries_between_models(seed: int, groups: int, workers: int) -> None:
    problem = a_problem(Random(seed), groups, workers, models=3)
    demands = {demand.number: demand for demand in problem.demands}
    for orders in (edf(problem), search(problem, most_work=1).orders):
        for queue in problem.queues:
            order = [demands[number] for number in orders[queue.worker]]
            models = [queue.loaded, *(demand.model for demand in order)]
            boundaries = sum(one != other for one, other in pairwise(models))
            assert sum(slot.swaps for slot in slots(queue, order)) == boundaries


def test_groups_of_one_model_are_served_together_if_there_is_time() -> None:
    demands = [Demand(number, "ab"[number % 2], 1000.0 + number, {"w": 10.0}) for number in range(8)]
    problem = Problem(demands, [Queue("w", "a", {"a": 30.0, "b": 30.0})])
    orders = search(problem).orders
    assert sum(slot.swaps for slot in all_slots(problem, orders)) == 1
    assert worth(problem, orders).late_s == 0
    assert edf(problem)["w"] == list(range(8))


# ---- QLM-P9: what cannot be met


@settings(max_examples=examples(30))
@given(SEEDS, st.integers(1, 25), st.integers(1, 4))
def test_qlm_p9_what_cannot_be_in_time_is_planned_all_the_same(seed: int, groups: int, workers: int) -> None:
    problem = a_problem(Random(seed), groups, workers, models=3)
    hopeless = Problem([replace(one, slack_s=-100.0) for one in problem.demands], problem.queues)
    planned = plan(hopeless, solver="search", most_work=LITTLE_WORK // 4)
    for orders in (planned.orders, edf(hopeless)):
        assert faults(hopeless, orders) == []
    assert planned.late == groups


def test_all_orders_of_a_small_problem_keep_the_rules() -> None:
    """The oracle itself: two free groups at two workers stand in six ways."""
    demands = [Demand(number, "m", 1.0, {"v": 1.0, "w": 1.0}) for number in range(2)]
    queues = [Queue("v", "m"), Queue("w", "m")]
    assert len(list(all_orders(Problem(demands, queues)))) == 6
    assert len(list(all_orders(Problem([replace(demands[0], begun_on="v"), demands[1]], queues)))) == 3


def test_nothing_to_plan() -> None:
    problem = Problem([], [Queue("w", "m")])
    assert plan(problem, solver="exact").orders == {"w": []}
