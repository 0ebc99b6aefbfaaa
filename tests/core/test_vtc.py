"""VTC against the paper: Algorithm 2 transcribed, lemmas and theorems, and what breaks without the lift.

The theorems assume that a step takes whole prompts and that the engine passes nobody over: a first request
that does not fit ends the pass. U is their max(w_p·L_input, w_q·M), as w_q >= w_p here and admission reserves
the longest output.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.common.weights import Weights
from sglang_fair.core.cost import Linear
from sglang_fair.core.job import Job
from sglang_fair.core.policy import Policy
from sglang_fair.core.vtc import Vtc
from tests.support.budget import examples
from tests.support.engine_model import ClientHabit, EngineCase, EngineModel, cases, run, traced
from tests.support.twins import Literal, Twins

VTC = settings(max_examples=examples(30))
WEIGHTS = st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 2.0, 3.0]) for name in "abcd"})
WHOLE = cases(whole_prompts=True, deferral=False)


def u_of(case: EngineCase, cost: Linear | None = None) -> float:
    cost = cost or Linear()
    return max(cost(case.longest_prompt, 0), cost(0, case.pool_tokens))


# ---- the algorithm, literally


@dataclass
class LiteralVtc(Literal):
    """Algorithm 2 with lists. It forgets nobody."""

    c: dict[str, float] = field(default_factory=dict)
    last_left: str | None = None

    def arrive(self, job: Job) -> None:
        queued = {other.client for other in self.waiting}
        counter = self.c.get(job.client, 0)
        if job.client not in queued:  # L7
            if not queued:  # L8
                floor = self.c[self.last_left] if self.last_left is not None else 0  # L9, L10
            else:
                floor = min(self.c[client] for client in queued)  # L12, L13
            counter = max(counter, floor)
        self.c[job.client] = counter
        super().arrive(job)  # L14

    def leave(self, job: Job) -> None:
        super().leave(job)
        if all(other.client != job.client for other in self.waiting):
            self.last_left = job.client

    def pick(self) -> Job | None:
        open_to = [job for job in self.waiting if job not in self.held]
        heads = {job.client: job for job in sorted(open_to, key=lambda job: -job.arrival)}
        return min(
            heads.values(), key=lambda job: (self.c[job.client], job.arrival), default=None
        )  # L20, L21

    def charge(self, client: str, units: int) -> None:
        self.c[client] += units

    def agrees_with(self, policy: Policy) -> bool:
        return policy.counters().items() <= self.c.items()


@settings(VTC, max_examples=examples(100))
@given(seed=st.integers(0, 2**32))
def test_picks_and_counters_are_those_of_algorithm_2(seed):
    Twins(Vtc(), LiteralVtc(), seed, clients="abcdef").run(120)


@settings(VTC, max_examples=examples(100))
@given(seed=st.integers(0, 2**32))
def test_picks_are_those_of_algorithm_2_while_requests_are_held(seed):
    """A held client still waits: a newcomer is lifted to the smallest counter in the queue, held or not."""
    Twins(Vtc(), LiteralVtc(), seed, clients="abcdef", holds=True).run(120)


def test_nobody_is_forgotten_for_a_client_that_is_held():
    """A counter never goes down. While h is passed over, the others' smallest counter is above h's, and x,
    between them, would come back at h's counter if it were forgotten now."""
    policy = Vtc()

    def arrive(client: str, arrival: int) -> Job:
        policy.arrive(job := Job(str(arrival), client, arrival=arrival))
        return job

    held = arrive("h", 1)
    x = arrive("x", 2)
    arrive("y", 3)
    policy.charge("h", 10)
    policy.charge("x", 90)
    policy.charge("y", 100)
    policy.hold(held)
    policy.leave(x)
    policy.idle("x")
    policy.release()
    arrive("x", 4)
    assert policy.counters()["x"] >= 90


# ---- lemmas and theorems


@dataclass
class Queued:
    """Counters of the clients that wait, after every event."""

    replica: EngineModel
    rows: list[dict[str, float]] = field(default_factory=list)

    def __call__(self) -> None:
        counters = self.replica.queue.policy.counters()
        waiting = {job.client for job in self.replica.queue.waiting()}
        self.rows.append({client: counters[client] for client in waiting})


def queued(case: EngineCase, policy: Vtc) -> list[dict[str, float]]:
    kept: list[Queued] = []

    def watch(replica: EngineModel) -> Queued:
        kept.append(Queued(replica))
        return kept[0]

    run(case, policy, watch=watch)
    return kept[0].rows


@VTC
@given(case=WHOLE)
def test_the_smallest_counter_never_decreases(case):
    """L1 (lemma A.1), over idle times too."""
    least = 0.0
    for row in queued(case, Vtc()):
        if row:
            assert min(row.values()) >= least
            least = min(row.values())


@VTC
@given(case=WHOLE)
def test_waiting_counters_differ_by_at_most_u(case):
    """L2 (lemma 4.3)."""
    for row in queued(case, Vtc()):
        assert not row or max(row.values()) - min(row.values()) <= u_of(case)


@VTC
@given(case=WHOLE, weights=st.just({}) | WEIGHTS)
def test_theorems_4_4_and_4_9_and_4_11_and_4_13(case, weights):
    """T1 with the bound that the queue exports, T3, T4 without a clock and with the one U more that its proof needs,
    and T5 turned round, W_f >= T/n - 4·U in every interval in which f is backlogged: for service divided by weight."""
    trace = traced(case, Vtc(weights=Weights(weights)), weights=weights)
    u, others = u_of(case) / min([1.0, *weights.values()]), len(case.clients) - 1
    gap = trace.gap_between_backlogged()
    assert gap <= 2 * u + 1e-6
    assert gap <= trace.replica.queue.account.bound() + 1e-6
    assert trace.lag_of_backlogged() <= 4 * u + 1e-6
    if not weights:
        assert trace.service_before_dispatch() <= (2 * others + 1) * u
        assert trace.lag_behind_mean() <= 4 * u


@pytest.mark.slow
@pytest.mark.parametrize("cache_tokens", [0, 4096])
def test_waiting_for_a_shared_prefix_does_not_break_the_bound(cache_tokens):
    """f's requests share a prefix, h's share nothing. While one of f's computes the prefix, the others must
    not be passed over in h's favour: `bound` holds for the queue as it is, deferral included."""
    case = EngineCase(
        loads=(
            ClientHabit("f", 40, prompt_tokens=(1, 1), output_tokens=(2, 2), families=1, shared_tokens=20),
            ClientHabit("h", 40, prompt_tokens=(20, 20), output_tokens=(8, 8), families=1, shared_tokens=0),
        ),
        pool_tokens=400,
        cache_tokens=cache_tokens,
        block_tokens=4,
        steps=200,
    )
    trace = traced(case, Vtc())
    assert trace.gap_between_backlogged() <= trace.replica.queue.account.bound()


# ---- without the lift


def test_a_client_is_lifted_to_the_one_that_left_last():
    """The lift over an empty queue, also when the one that left is forgotten by then."""
    for forgotten in (False, True):
        policy = Vtc()
        policy.arrive(job := Job("1", "a", arrival=1))
        policy.leave(job)
        policy.charge("a", 70)
        if forgotten:
            policy.idle("a")
            assert policy.counters() == {}
        policy.arrive(Job("2", "b", arrival=2))
        assert policy.counters()["b"] == 70


def test_a_client_ahead_of_the_queue_is_not_forgotten():
    policy = Vtc()
    policy.arrive(Job("1", "a", arrival=1))
    policy.arrive(job := Job("2", "b", arrival=2))
    policy.leave(job)
    policy.charge("b", 5)
    policy.idle("b")
    assert policy.counters() == {"a": 0, "b": 5}
    policy.charge("a", 6)
    policy.idle("nobody")
    assert policy.counters() == {"a": 6}
