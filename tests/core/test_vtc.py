"""VTC against the paper: Algorithm 2 transcribed, and its theorems.

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
from tests.support.engine_model import ClientHabit, EngineCase, cases, traced
from tests.support.twins import Both, Literal, Script

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


@settings(VTC, max_examples=examples(200))
@given(seed=st.integers(0, 2**32), holds=st.booleans())
def test_picks_and_counters_are_those_of_algorithm_2(seed, holds):
    """A held client still waits: a newcomer is lifted to the smallest counter in the queue, held or not."""
    Script(Both(Vtc(), LiteralVtc()), seed, clients="abcdef", holds=holds).run(120)


# ---- theorems


@VTC
@given(case=WHOLE, weights=st.just({}) | WEIGHTS)
def test_theorems_4_4_and_4_9_and_4_11_and_4_13(case, weights):
    """T1 with the bound that the queue exports, T3, T4 without a clock and with the one U more that its proof needs,
    for service divided by weight. T5 turned round, W_f >= T/n - 4·U, follows from T3."""
    trace = traced(case, Vtc(weights=Weights(weights)), weights=weights)
    u, others = u_of(case) / min([1.0, *weights.values()]), len(case.clients) - 1
    gap = trace.gap_between_backlogged()
    assert gap <= 2 * u + 1e-6
    assert gap <= trace.replica.queue.account.bound() + 1e-6
    assert trace.lag_of_backlogged() <= 4 * u + 1e-6
    if not weights:
        assert trace.service_before_dispatch() <= (2 * others + 1) * u


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
