"""Weights that come with requests and change while others wait and run.

Service counts by the weight that its client has when it is given.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings, target
from hypothesis import strategies as st

from sglang_fair.common.weights import KEPT, Weights
from sglang_fair.core import make_policy
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.job import Job
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.rpm import Rpm
from sglang_fair.core.steps import Steps
from tests.core.test_theorems import READ, Readings, Schedule, bursts, schedules
from tests.support.budget import examples
from tests.support.engine_model import EngineModel, Request

WEIGHT = st.sampled_from([0.05, 0.5, 1.0, 3.0, 20.0])


@dataclass
class Weighed(Readings):
    """The service of each charge by the weight of its time."""

    _seen: Counter[str] = field(default_factory=Counter)
    _by_weight: Counter[str] = field(default_factory=Counter)

    def __call__(self) -> None:
        weights, replica = self.replica.queue.policy.weights, self.replica
        assert weights is not None
        super().__call__()
        for name in self.clients:
            given = replica.service[name] - self._seen[name]
            self._seen[name] = replica.service[name]
            self._by_weight[name] += given / weights.of(name)
        self.rows[-1] = replace(self.rows[-1], service=tuple(self._by_weight[name] for name in self.clients))


def carry_out(schedule: Schedule, queue: FairQueue, told: list[tuple[float | None, int]]) -> Weighed:
    """`told`: the weight and its version of each burst's requests."""
    replica = EngineModel(
        queue,
        pool_tokens=schedule.pool_tokens,
        cache_tokens=schedule.cache_tokens,
        step_tokens=schedule.step_tokens,
    )
    watch = Weighed(replica, schedule.clients)
    replica.watchers.append(watch)
    for step in range(schedule.steps):
        for number, burst in enumerate(schedule.bursts):
            weight, version = told[number % len(told)]
            for request in burst.requests(number):
                if burst.step == step:
                    replica.arrive(replace(request, weight=weight, weight_version=version))
                elif burst.aborted_after and step == burst.step + burst.aborted_after:
                    replica.abort(request.id)
        replica.step()
    return watch


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(READ))
@settings(max_examples=examples(25))
@given(
    schedule=schedules(),
    more=st.lists(bursts(), max_size=10),
    told=st.lists(st.tuples(st.none() | WEIGHT, st.integers(0, 4)), min_size=1, max_size=20),
)
def test_what_is_read_holds_while_weights_change(name, schedule, more, told):
    """For every interval that ends when the bound is read, however the weights changed in it and before it."""
    make, lag = READ[name]
    schedule = replace(schedule, bursts=(*schedule.bursts, *more), steps=90)
    readings = carry_out(schedule, FairQueue(make(Weights({"c": 2.0}))), told)
    gap, behind = readings.exceeds(both=True), readings.exceeds(both=False)
    target(max(gap, behind / lag))
    assert gap <= 1 + 1e-9
    assert behind <= lag + 1e-9


def loaded(
    policy: str, **options: object
) -> tuple[EngineModel, Callable[[float, int, int], dict[str, float]]]:
    """Two clients that always wait. What is returned lets them send with these weights of "b" and versions, for so many
    steps, and returns what each got."""
    queue = FairQueue(make_policy(policy, quantum=50, **options))
    replica, sent = EngineModel(queue, pool_tokens=60, step_tokens=20), Counter[str]()

    def go_on(weight: float, version: int, steps: int) -> dict[str, float]:
        before = dict(replica.service)
        for _ in range(steps):
            for name in "ab":
                while replica.waiting[name] < 12:
                    sent[name] += 1
                    tokens = tuple((name, sent[name], place) for place in range(5))  # type: ignore[misc]
                    told = weight if name == "b" else 1.0
                    replica.arrive(
                        Request(
                            f"{name}{sent[name]}", name, tokens, 6, 6, weight=told, weight_version=version
                        )  # type: ignore[arg-type]
                    )
            replica.step()
        return {name: replica.service[name] - before.get(name, 0.0) for name in "ab"}

    return replica, go_on


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dlpm", "dlpm-predict", "vtc", "drr"])
def test_new_service_is_by_the_new_weight_inside_the_bound(policy):
    replica, go_on = loaded(policy)
    go_on(1.0, 1, 400)
    for weight, version in ((3.0, 2), (0.25, 3)):
        got = go_on(weight, version, 1000)
        bound = replica.queue.account.recent_bound()
        assert bound is not None
        assert abs(got["a"] - got["b"] / weight) <= bound
        assert got["b"] / got["a"] == pytest.approx(weight, rel=0.15)
    got = go_on(3.0, 2, 1000)
    assert got["b"] / got["a"] == pytest.approx(0.25, rel=0.15), "an older file says nothing any more"


def test_the_bound_that_is_read_is_the_old_one_again_when_nobody_is_left_whom_a_small_weight_concerned():
    queue = FairQueue(Dlpm(quantum=10))
    replica = EngineModel(queue, pool_tokens=60)
    for number, weight in enumerate((0.01, 1.0)):
        replica.arrive(Request(f"{number}", "a", (1,) * 5, 4, 4, weight=weight, weight_version=number))
    small = queue.account.recent_bound()
    for _ in range(30):
        replica.step()
    assert small is not None
    for number in range(2, 12):
        replica.arrive(Request(f"{number}", "b", (2,) * 5, 4, 4))
        for _ in range(10):
            replica.step()
        queue.account.recent_bound()
    replica.arrive(Request("last", "a", (1,) * 5, 4, 4, weight=1.0, weight_version=1))
    for _ in range(10):
        replica.step()
    readings = [queue.account.recent_bound() for _ in range(3)]
    assert readings[-1] is not None
    assert readings[-1] < small / 20


# ---- what it costs


def job(id: str, client: str, weight: float | None = None, version: int = 0) -> Job:
    return Job(id, client, 10, 10, weight=weight, weight_version=version)


def test_an_equal_weight_costs_nothing_and_a_changed_one_is_told_once():
    queue, told = FairQueue(Dlpm(quantum=100)), list[str]()
    queue.reweighed.append(told.append)
    for number in range(50):
        queue.arrive(job(f"{number}", "a", 2.0, 7))
    assert told == ["a"]
    queue.arrive(job("older", "a", 9.0, 6))
    queue.arrive(job("none", "a"))
    queue.arrive(job("another", "b", 1.0, 7))
    health = Job("health", "a", 1, 1, system=True, weight=5.0, weight_version=99)
    assert queue.refuses(health) is None
    queue.arrive(health)
    assert told == ["a"]
    queue.arrive(job("newer", "a", 3.0, 8))
    assert told == ["a", "a"]


def test_a_new_name_with_a_weight_makes_nobody_count_all_others(monkeypatch):
    """However many are here: what a change costs is paid for who is here, and not for who comes."""
    sums = Counter[str]()
    monkeypatch.setattr(Steps, "_sum_weights", lambda steps: sums.update(["all"]))
    steps = Steps(0.1, weights := Weights())
    for number in range(1000):
        weights.tell(f"{number}", 2.0 + number, 1)
        steps.reweigh(f"{number}")
        steps.arrive(Job("", f"{number}"))
    assert not sums
    weights.tell("7", 1.0, 2)
    steps.reweigh("7")
    assert sums["all"] == 1


@pytest.mark.slow
def test_ten_thousand_names_with_weights_leave_little_and_debts_keep_theirs():
    queue = FairQueue(Dlpm(quantum=10, remembered_clients=10))
    weights = queue.policy.weights
    assert weights is not None

    def serve(client: str, weight: float, output: int) -> None:
        queue.arrive(one := job(f"of {client}", client, weight, 1))
        queue.begin_pass()
        queue.admit(one, extend_tokens=10, cached_tokens=0)
        queue.account.emit(one, output)
        queue.finish(one.id)

    serve("debtor", 0.5, 10)
    assert queue.policy.owes("debtor")
    for number in range(10_000):
        queue.arrive(one := job(f"{number}", f"name {number}", 2.0, 1))
        queue.leave(one.id)
        assert len(weights.items()) <= KEPT + 2
    assert weights.of("debtor") == 0.5
    assert weights.smallest() == 0.5


def test_a_limit_of_requests_follows_the_weight_that_a_request_brings():
    queue = FairQueue(Rpm(2))
    queue.tick(0.0)

    def admits(number: int, weight: float, version: int) -> bool:
        one = job(f"{number}", "a", weight, version)
        if queue.refuses(one) is not None:
            return False
        queue.arrive(one)
        return True

    assert [admits(number, 1.0, 1) for number in range(3)] == [True, True, False]
    assert [admits(number, 2.0, 2) for number in range(3, 6)] == [True, True, False]
    assert not admits(9, 50.0, 1)
