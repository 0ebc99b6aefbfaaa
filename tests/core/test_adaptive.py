"""DLPM with a quantum that changes: its theorems, and the targets that it follows."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.common.weights import Weights
from sglang_fair.core import make_policy
from sglang_fair.core.adaptive import DOUBLED, GAIN, STEP, DlpmAdaptive
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.job import Job
from sglang_fair.core.predictor import MeanOfLast, Predictor
from tests.support.budget import examples
from tests.support.engine_model import ClientHabit, EngineCase, EngineModel, Trace, cases, run

ADAPTIVE = settings(max_examples=examples(18))
CHANGES = st.lists(st.sampled_from([1, 3, 10, 25, 80, 400]), max_size=12)
WEIGHTS = st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 2.0, 3.0]) for name in "abcd"})


@dataclass
class Scheduled(DlpmAdaptive):
    """Its quantum is the next of `changes`, over and over, from each refill on."""

    changes: list[int] = field(default_factory=list)
    changed: int = 0

    def _wanted(self) -> float:
        self.changed += 1
        return self.changes[self.changed % len(self.changes)] if self.changes else self.quantum


@dataclass
class Live(Trace):
    """Beside the service: U, with what a predictor charges ahead, and the largest credit, after every event."""

    debts: list[float] = field(default_factory=list)
    credits: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        super().__call__()
        queue = self.replica.queue
        policy = queue.policy
        assert isinstance(policy, DlpmAdaptive)
        credit = policy._credit()
        if policy.predictor is None:
            held = [account.units + account.refund for account in policy._deficits.values()]
            assert credit == max([policy.quantum, *held])
        bound = queue.account.bound()
        assert bound is not None
        self.debts.append(bound * policy.weights.smallest() / 2 - policy._largest_credit())
        self.credits.append(credit)

    def starts_of(self, f: int, g: int | None) -> Iterator[tuple[int, bool]]:
        """Each event at which f, and g if given, wait, and whether they only begin to."""
        fresh = True
        for now, row in enumerate(self.rows):
            if row.waiting[f] and (g is None or row.waiting[g]):
                yield now, fresh
                fresh = False
            else:
                fresh = True

    def exceeds(self, *, both: bool) -> float:
        """By how much W_g - W_f exceeds (2·U + C(s) + C(t)) / smallest weight in the worst interval [s, t] in which
        f waits, and g too if `both`; U is that of t. Negative: nowhere."""
        worst, count = -1e18, len(self.clients)
        smallest = self.replica.queue.policy.weights.smallest()
        for f, g in ((f, g) for f in range(count) for g in range(count) if f != g):
            least = 0.0
            for now, fresh in self.starts_of(f, g if both else None):
                lead = (self.rows[now].service[g] - self.rows[now].service[f]) * smallest
                least = lead + self.credits[now] if fresh else min(least, lead + self.credits[now])
                worst = max(worst, lead - self.credits[now] - least - 2 * self.debts[now])
        return worst


def lived(case: EngineCase, policy: DlpmAdaptive, weights: dict[str, float] | None = None) -> Live:
    kept: list[Live] = []

    def watch(replica: EngineModel) -> Live:
        kept.append(Live(replica, case.clients, weights or {}))
        return kept[0]

    run(case, policy, watch=watch)
    return kept[0]


# ---- the theorems, whatever the quantum does


@ADAPTIVE
@given(
    case=cases(),
    changes=CHANGES,
    weights=WEIGHTS,
    predictor=st.one_of(st.none(), st.builds(MeanOfLast)),
    remembered=st.sampled_from([0, 1, 10_000]),
)
def test_the_bound_holds_over_changes(case, changes, weights, predictor: Predictor | None, remembered):
    """T2 and T3 over intervals with any changes, and T4."""
    policy = Scheduled(
        min_quantum=1,
        quantum=20,
        changes=changes,
        weights=Weights(weights),
        predictor=predictor,
        remembered_clients=remembered,
    )
    live = lived(case, policy, weights)
    assert live.exceeds(both=True) <= 1e-6
    assert live.exceeds(both=False) <= 1e-6
    largest = 2 * (live.debts[-1] + max(live.credits)) / policy.weights.smallest()
    assert live.service_before_dispatch() <= (len(case.clients) - 1) * largest + 1e-6
    assert all(units <= policy.quantum for units in policy.counters().values())


@ADAPTIVE
@given(case=cases(), quantum=st.sampled_from([1, 10, 80]))
def test_without_room_to_change_it_is_dlpm(case, quantum):
    limits = {"min_quantum": quantum, "max_quantum": quantum, "newcomers": 0}
    fixed = DlpmAdaptive(quantum=5, target_hit_rate=0.9, **limits)
    assert run(case, fixed).admissions == run(case, Dlpm(quantum=quantum, newcomers=0)).admissions


def test_credit_from_a_larger_quantum_counts_in_the_bound():
    """x is away with what is left of 1,000 when the quantum becomes 1, and comes back with it."""
    policy = Scheduled(quantum=1000, min_quantum=1, changes=[1000, 1000, *[1] * 1000])
    served = {"a": 0, "x": 0}
    number = 0

    def arrive(client: str) -> None:
        nonlocal number
        number += 1
        policy.arrive(Job(str(number), client, arrival=number))

    def serve() -> str:
        job = policy.pick()
        assert job is not None
        policy.leave(job)
        policy.charge(job.client, 10)
        served[job.client] += 10
        return job.client

    arrive("x")
    arrive("a")
    assert [serve(), serve()] == ["x", "a"]
    policy.idle("x")
    while policy.quantum > 1:
        arrive("a")
        serve()
    assert anew(policy).recent_bound(10, 0) == 2 * (10 + 990)
    arrive("x")
    arrive("a")
    before = dict(served)
    for _ in range(99):
        arrive("x")
        arrive("a")
        serve()
    lead = served["x"] - before["x"] - (served["a"] - before["a"])
    assert 2 * (10 + 1) < lead <= 2 * (10 + 990)
    for _ in range(3):
        serve()
    assert policy.recent_bound(10, 0) == 2 * (10 + 990), "an interval may have begun before"
    assert anew(policy).recent_bound(10, 0) == 2 * (10 + 1), "the credit is spent"
    assert policy.bound(10, 0) == 2 * (10 + 1000), "since the start"


def anew(policy: DlpmAdaptive) -> DlpmAdaptive:
    """Everybody who waited has stopped waiting."""
    policy.all_waited_anew()
    policy.all_waited_anew()
    return policy


# ---- the targets


HOT = ClientHabit("a", 12, prompt_tokens=(4, 4), output_tokens=(2, 2), families=1, shared_tokens=24)
CROWDED = EngineCase(
    tuple(replace(HOT, client=name) for name in "abcdef"), 80, 60, 1, None, None, seed=1, steps=600
)
"""Six clients, each with a hot prefix, and a cache for two of them: the longer the runs, the more hits."""


def test_without_a_cache_the_quantum_stays_near_what_one_request_is_charged():
    """28 prompt tokens and 2 of output."""
    cold = replace(CROWDED, cache_tokens=0)
    policy = DlpmAdaptive(quantum=200, min_quantum=5, max_quantum=2000, horizon_tokens=500)
    run(cold, policy)
    assert 32 / STEP <= policy.quantum <= 32 * STEP**4
    assert policy.hit_rate() == 0


@dataclass
class Responding(DlpmAdaptive):
    """Its hit rate is `most` from a quantum of `knee` on; below, each halving costs as much, and nothing more below
    `LEAST`."""

    knee: float = 10.0
    most: float = 0.0

    def hit_rate(self) -> float | None:
        doublings, all_doublings = (1 + log2(quantum / LEAST) for quantum in (self.quantum, self.knee))
        return self.most * min(1.0, max(1.0, doublings) / all_doublings)

    def steps(self, count: int) -> list[float]:
        """The quantum after each of so many steps."""
        found = []
        for _ in range(count):
            self._tokens_since_step = self.horizon_tokens
            self._before_refill()
            found.append(self.quantum)
        return found


LEAST, MOST = 10.0, 100_000.0
QUANTA = st.floats(LEAST, MOST)
KNEES = st.floats(2 * LEAST, MOST / 4)


def responding(quantum: float, target: float, knee: float, most: float) -> Responding:
    return Responding(
        quantum=quantum, min_quantum=LEAST, max_quantum=MOST, target_hit_rate=target, knee=knee, most=most
    )


@settings(max_examples=examples(100))
@given(QUANTA, st.floats(0, 0.49))
def test_where_the_hit_rate_stays_the_same_the_quantum_falls_and_stays_near_its_least(quantum, most):
    path = responding(quantum, 0.5, LEAST, most).steps(100)
    down = path[: path.index(LEAST) + 1]
    assert down == sorted(down, reverse=True)
    assert max(path[len(down) :]) == pytest.approx(LEAST * STEP**4)


@settings(max_examples=examples(100))
@given(QUANTA, KNEES, st.floats(0.4, 0.79))
def test_a_target_that_is_out_of_reach_ends_near_the_smallest_quantum_of_the_best_hit_rate(
    quantum, knee, most
):
    """From any quantum: not far below the knee, where hits are lost, and at most a climb in vain above it."""
    policy = responding(quantum, 0.8, knee, most)
    settled = policy.steps(300)[150:]
    assert max(settled) <= knee * STEP * DOUBLED * STEP
    policy.quantum = min(settled) * STEP
    assert policy.hit_rate() > most - 2 * GAIN
    assert max(settled) > min(settled)


@settings(max_examples=examples(100))
@given(QUANTA, KNEES, st.floats(0.6, 1.0))
def test_a_target_within_reach_is_kept_within_a_step(quantum, knee, most):
    """Whatever the way there: from then on it swings by a step around the quantum that reaches it."""
    policy = responding(quantum, 0.5, knee, most)
    settled = policy.steps(300)[150:]
    wanted = LEAST * 2 ** (0.5 / most * (1 + log2(knee / LEAST)) - 1)
    assert all(max(LEAST, wanted / STEP) <= quantum <= max(LEAST, wanted) * STEP for quantum in settled)
    for before, after in itertools.pairwise(settled):
        assert before == after == LEAST or (after > before) == (before < wanted)


def test_at_its_limit_a_climb_is_in_vain_too():
    """It cannot double any more, so one look at the limit decides."""
    policy = responding(MOST / 1.5, 0.8, MOST, 0.7)
    assert max(policy.steps(40)) == MOST
    policy.knee = LEAST
    assert LEAST in policy.steps(60)


def test_the_quantum_is_the_largest_that_keeps_the_gap():
    """Everything is of one size, so U is soon known; from then on the bound is the target, and is kept."""
    target, policy = 700.0, DlpmAdaptive(quantum=300, min_quantum=5, max_quantum=2000, target_gap=700)
    live = lived(CROWDED, policy)
    queue = live.replica.queue
    u = queue.account.largest.ever.input_units + 2 * queue.account.largest.ever.owed_tokens
    assert policy.quantum == target / 2 - u
    assert anew(policy).recent_bound(u, 0) == target
    settled = next(now for now, credit in enumerate(live.credits) if credit + live.debts[now] == target / 2)
    assert settled < len(live.rows) / 2
    live.rows = live.rows[settled:]
    assert u < live.gap_between_backlogged() <= target


@pytest.mark.slow
def test_a_gap_below_the_least_bound_is_not_promised():
    policy = DlpmAdaptive(min_quantum=5, target_gap=10, newcomers=0)
    queue = run(CROWDED, policy).queue
    assert policy.quantum == 5
    assert queue.account.bound() > 10


@pytest.mark.parametrize(
    ("options", "quantum"),
    [({"weights": Weights({"a": 0.5})}, 1000 / 4 - 60), ({"predictor": MeanOfLast()}, 1000 / 2 - 100)],
)
def test_a_weight_and_what_is_charged_ahead_narrow_the_quantum_for_a_gap(options, quantum):
    """The bound is of service divided by weight: half a weight doubles it."""
    policy = DlpmAdaptive(min_quantum=5, target_gap=1000, newcomers=0, **options)
    policy.admitted(Job("1", "a"), 20, 40)
    policy.arrive(Job("2", "a", arrival=1))
    policy.pick()
    assert policy.quantum == quantum
    assert anew(policy).recent_bound(20, 40) == 1000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_gap": 5, "target_hit_rate": 0.5}, "give target_gap or target_hit_rate, not both"),
        ({"target_gap": 0}, "target_gap must be a positive number of service units, not 0"),
        ({"target_gap": float("nan")}, "target_gap must be a positive number"),
        ({"target_hit_rate": 1.1}, "target_hit_rate must be between 0 and 1, not 1.1"),
        ({"target_hit_rate": float("nan")}, "target_hit_rate must be between 0 and 1"),
        ({"min_quantum": 9, "max_quantum": 8}, "min_quantum 9 is above max_quantum 8"),
        ({"min_quantum": 0}, "quantum must be a positive number"),
        ({"max_quantum": float("inf")}, "quantum must be a positive number"),
        ({"horizon_tokens": 0}, "horizon_tokens must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_followed_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        make_policy("dlpm-adaptive", **options)
