"""Weights that come with requests and change while others wait and run.

Service counts by the weight that its client has when it is given.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import cycle

import pytest
from hypothesis import given, settings, target
from hypothesis import strategies as st

from sglang_fair.common.weights import KEPT, Weights
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.drr import Drr
from sglang_fair.core.job import Job
from sglang_fair.core.policy import Policy
from sglang_fair.core.predicted import DlpmPredict
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.rpm import Rpm
from sglang_fair.core.steps import Steps
from sglang_fair.core.vtc import Vtc
from tests.core.test_theorems import Burst, Schedule, bursts, carry_out, schedules
from tests.support.budget import examples
from tests.support.engine_model import EngineModel, Request, Trace

WEIGHT = st.sampled_from([0.05, 0.5, 1.0, 3.0, 20.0])

READ: dict[str, tuple[Callable[[Weights], Policy], float]] = {
    "vtc": (lambda weights: Vtc(weights=weights), 2.0),
    "dlpm": (lambda weights: Dlpm(quantum=10, weights=weights), 1.0),
    "dlpm-predict": (lambda weights: DlpmPredict(quantum=10, weights=weights), 1.0),
    "drr": (lambda weights: Drr(quantum=10, weights=weights), 1.0),
}
"""Each policy, and how far a client that waits may fall behind any other, in units of its bound."""


@dataclass
class Weighed(Trace):
    """The service of each charge by the weight of its time, and the bound that is read after every event."""

    bounds: list[float] = field(default_factory=list)
    _seen: Counter[str] = field(default_factory=Counter)
    _by_weight: Counter[str] = field(default_factory=Counter)

    def __call__(self) -> None:
        queue, replica = self.replica.queue, self.replica
        assert queue.policy.weights is not None
        super().__call__()
        for name in self.clients:
            given = replica.service[name] - self._seen[name]
            self._seen[name] = replica.service[name]
            self._by_weight[name] += given / queue.policy.weights.of(name)
        self.rows[-1] = replace(self.rows[-1], service=tuple(self._by_weight[name] for name in self.clients))
        bound = queue.account.recent_bound()
        assert bound is not None
        self.bounds.append(bound)


@pytest.mark.parametrize("name", sorted(READ))
@settings(max_examples=examples(50))
@given(
    schedule=schedules(),
    more=st.lists(bursts(), max_size=10),
    told=st.lists(st.tuples(st.none() | WEIGHT, st.integers(0, 4)), min_size=1, max_size=20),
    huge=st.none() | st.integers(0, 25),
)
def test_what_is_read_holds_for_every_interval_that_ends_then(name, schedule, more, told, huge):
    """However the weights changed in it and before it, and however large requests were before it: one of them may make
    thirty times as much as any other."""
    make, lag = READ[name]
    if huge is not None:
        more = [*more, Burst(huge, "a", 1, prompt_tokens=1, output_tokens=60)]
    bring = [
        replace(burst, weight=weight, weight_version=version)
        for burst, (weight, version) in zip((*schedule.bursts, *more), cycle(told), strict=False)
    ]
    pool = max(schedule.pool_tokens, 70)
    schedule = replace(schedule, bursts=tuple(bring), pool_tokens=pool, steps=120)
    readings = carry_out(schedule, FairQueue(make(Weights({"c": 2.0}))), trace_type=Weighed)
    assert isinstance(readings, Weighed)
    gap, behind = (readings.worst_lead(both=both, bounds=readings.bounds) for both in (True, False))
    target(max(gap, behind / lag))
    assert gap <= 1 + 1e-9
    assert behind <= lag + 1e-9


@pytest.mark.parametrize("policy", sorted(READ))
@pytest.mark.parametrize("weight", [3.0, 0.25])
def test_service_is_by_the_weight_that_requests_bring(policy, weight):
    """Of two clients that always wait."""
    weights = {"a": 1.0, "b": weight}
    plan = [Burst(step, name, 1, 5, 6, weight=weights[name]) for step in range(400) for name in "ab"]
    schedule = Schedule(tuple(plan), pool_tokens=60, step_tokens=20, steps=400)
    service = carry_out(schedule, FairQueue(READ[policy][0](Weights()))).replica.service
    assert service["b"] / service["a"] == pytest.approx(weight, rel=0.15)


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
