"""How many replicas would do when deadlines cannot be met."""

from collections.abc import Sequence
from dataclasses import replace

from router.queues.plan import plan
from router.queues.problem import FAR_S, Demand, Needed, Problem, Queue
from router.queues.shortage import is_short, one_more, shortage


def needs(demands: Sequence[Demand], queues: Sequence[Queue]) -> Needed:
    found = shortage(Problem(demands, queues))
    assert found is not None
    return found


def test_as_many_replicas_as_do_of_the_model_that_is_late() -> None:
    queues = [Queue("a", "x"), Queue("b", "y")]
    drains = {"a": 10.0}
    busy = [Demand(number, "x", 12.0, drains) for number in range(6)]
    calm = [Demand(10, "y", 12.0, {"b": 1.0})]
    found = needs(busy + calm, queues)
    assert found.more == 2  # three queues begin two groups each within 12 s
    assert found.models == {"x": 2}


def test_what_is_late_whatever_is_added_still_asks_for_help() -> None:
    queues = [Queue("a", "x")]
    late = [Demand(number, "x", -100.0, {"a": 30.0}) for number in range(8)]
    found = needs(late, queues)
    assert found.more == 2  # 30 s each, begun within 60 s: three at each queue
    assert "8 groups are late already" in found.why


def test_what_is_late_counts_as_if_it_came_now() -> None:
    queues = [Queue("a", "x")]
    late = [Demand(number, "x", FAR_S, {"a": 4.0}, promised=(3.0, 1.0)) for number in range(4)]
    problem = Problem(late, queues)
    found = plan(problem, solver="search")
    assert found.is_feasible
    assert is_short(problem, found)
    assert needs(late, queues).more == 7  # each is shared by two, which end within 3 s
    ahead = [replace(demand, tier=1) for demand in late]
    problem = Problem(ahead, queues)
    assert not is_short(problem, plan(problem, solver="search"))
    assert shortage(problem) is None
    mixed = [replace(demand, promised=(3.0, 0.25)) for demand in late]
    assert needs(mixed, queues).more == 1  # four seconds of it are urgent
    few = Problem(late[:1], queues)
    assert not is_short(few, plan(few, solver="search"))


def test_a_group_that_is_too_large_for_one_replica_is_shared() -> None:
    queues = [Queue("a", "x")]
    found = needs([Demand(1, "x", 3.0, {"a": 8.0}, last_slack_s=3.0, begun_on="a")], queues)
    assert found.more == 2  # 8 s of work that end within 3 s
    found = needs([Demand(1, "x", 0.0, {"a": 8.0}, last_slack_s=0.0)], queues)
    assert found.more == 15


def test_replicas_that_keep_their_model_are_not_thought_to_swap() -> None:
    queues = [Queue("a", "x"), Queue("b", "y")]
    demands = [Demand(number, "x", 1.0, {"a": 10.0}) for number in range(2)]
    demands += [Demand(10 + number, "y", 1.0, {"b": 10.0}) for number in range(2)]
    found = needs(demands, queues)
    assert found.models == {"x": 1, "y": 1}
    assert found.more == 2


def test_a_new_replica_serves_one_model_after_the_other_only_if_it_can() -> None:
    demands = [Demand(number, "x", 1.0, {"a": 10.0}) for number in range(2)]
    demands += [
        Demand(10 + number, "y", second, {"b": 10.0}) for number, second in enumerate((1.0, 12.0, 12.0))
    ]
    swap_s = {"x": 1.0, "y": 1.0}
    assert needs(demands, [Queue("a", "x"), Queue("b", "y")]).more == 2
    swapping = [Queue("a", "x", swap_s), Queue("b", "y", swap_s)]
    assert needs(demands, swapping).more == 1


def test_names_of_workers_are_not_taken() -> None:
    queues = [Queue("new", "x"), Queue("new+", "x")]
    problem, like = one_more(Problem([Demand(1, "x", 1.0, {"new": 2.0, "new+": 4.0})], queues))
    assert like.worker == "new++"
    assert problem.demands[0].drain_s["new++"] == 3.0
