"""Several models on few replicas, in the simulated cluster: they take turns, and no model starves."""

from typing import Any

import pytest

from router.events import Agent, Event, Exchange
from workloads.deadlines.run import Outcome, attained, simulate
from workloads.deadlines.traffic import Stream, requests
from workloads.experiments.qlm_setting import qlm, rule
from workloads.simulation.cluster import Agents, Cluster

THREE = {"a": "mistral-7b", "b": "vicuna-13b", "c": "mistral-7b"}
TWO = {"a": "mistral-7b", "b": "vicuna-13b"}


def served(site: Any, models: str, rate_per_s: float, count: int, slo_s: float) -> Outcome:
    streams = [Stream(model, "batch-1", rate_per_s, count=count, slo_s=slo_s) for model in models]
    return simulate(site, requests(streams, "0"))


@pytest.mark.slow
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("make", [lambda site: site, rule], ids=["qlm", "deadline"])
def test_two_models_on_one_replica_are_served_in_turn_within_their_deadlines(make: Any, shares: bool) -> None:
    outcome = served(make(qlm(1, TWO, shares=shares)), "ab", 0.5, 30, 60.0)
    assert attained(outcome.served) == 1.0
    assert 1 <= outcome.total("swaps") <= 8, "what can wait waits until its model is loaded anyway"


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_plan_that_always_wants_another_model_starves_none(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is loaded or being loaded, its plans put the groups of all other models first."""
    tell = Cluster.tell

    def meddled(self: Cluster, router: int, event: Event) -> None:
        tell(self, router, event)
        queues: Any = self.routers[0].placement.queues  # type: ignore[attr-defined]
        loaded = {name: queues.workers[name].loaded for name in queues.orders()}
        by_number = queues.groups.by_number
        orders = {
            name: tuple(sorted(order, key=lambda one: by_number[one].kind.model == loaded[name]))
            for name, order in queues.orders().items()
        }
        queues.apply(orders)

    monkeypatch.setattr(Cluster, "tell", meddled)
    outcome = served(qlm(replicas, THREE), "abc", 1e3, 20, 30.0)
    assert all(one.ended_s is not None for one in outcome.served)
    assert outcome.total("swaps") < len(outcome.served) / 2


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda site: site, rule], ids=["qlm", "deadline"])
def test_a_model_that_cannot_be_loaded_is_waited_for_and_others_are_served(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Agents, order: Exchange) -> None:
        swap_s = {"a": 1.0, "b": 1.0}
        said = Agent("", order.worker, "a", order.number, "damaged", swap_s=swap_s)
        self._cluster.at(self._cluster.now_s + 0.5, lambda one: self._cluster.tell(0, one), said)

    monkeypatch.setattr(Agents, "load", fails)
    streams = [Stream("b", "batch-1", 1.0, count=1), Stream("a", "batch-1", 1.0, count=100)]
    outcome = simulate(make(qlm(1, TWO)), requests(streams, "0"), until_s=130.0)
    assert [one.asked.model for one in outcome.served if one.ended_s is None] == ["b"]
    state: Any = outcome.cluster.routers[0].state()["swaps"]
    assert 3 < state["r0"]["failed"] < 10, "less and less often"
