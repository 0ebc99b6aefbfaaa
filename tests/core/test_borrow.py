"""DLPM's `borrow`: what may be admitted without credit, how much, and the bound with it."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.common.weights import Weights
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.job import Job
from sglang_fair.core.policy import Policy
from sglang_fair.core.queue import FairQueue
from tests.core.test_theorems import WEIGHTS, Schedule, carry_out, schedules
from tests.support.budget import examples
from tests.support.engine_model import Trace

SHARE = 0.3


def carried_out(policy: Policy, schedule: Schedule) -> tuple[FairQueue, Trace]:
    queue = FairQueue(policy)
    return queue, carry_out(schedule, queue)


# ---- the bound


@pytest.mark.slow
@settings(max_examples=examples(150))
@given(
    schedule=schedules(),
    weights=WEIGHTS,
    quantum=st.sampled_from([1, 10, 40, 200]),
    share=st.sampled_from([SHARE, 3.0, 1e6]),
)
def test_no_schedule_breaks_the_bound(schedule, weights, quantum, share):
    """Whatever part of a prefix is cheap: bursts, aborts, outputs that end early, prompts in chunks."""
    queue, trace = carried_out(Dlpm(quantum=quantum, weights=Weights(weights), borrow=share), schedule)
    bound = queue.account.bound()
    assert trace.gap_between_backlogged() <= bound + 1e-6
    assert trace.lag_of_backlogged() <= bound + 1e-6


# ---- what is admitted, and how much


def job(number: int, client: str, prompt: int, cached: int, output: int = 0) -> Job:
    return Job(f"{number}", client, prompt, output, arrival=number, prefix_tokens=cached)


def admit(queue: FairQueue, one: Job) -> None:
    queue.admit(one, extend_tokens=one.prompt_tokens - one.prefix_tokens, cached_tokens=one.prefix_tokens)


@pytest.mark.parametrize(("output", "picked"), [(10, "f"), (11, "g")])
def test_what_is_cheap_beside_its_prefix_goes_on_without_credit(output, picked):
    """10 tokens and 2 · 10 of output are 0.3 of a cached prefix of 100."""
    queue = FairQueue(Dlpm(quantum=50, borrow=SHARE))
    queue.arrive(one := job(1, "f", 60, 0))
    queue.begin_pass()
    admit(queue, one)
    assert queue.policy.deficit("f") == -10
    queue.arrive(job(2, "f", 110, 100, output))
    queue.arrive(job(3, "g", 50, 0))
    queue.policy.charge("g", 1)  # no newcomer any more
    assert queue.next().client == picked


@settings(max_examples=examples(80))
@given(
    seed=st.integers(0, 2**32),
    quantum=st.sampled_from([5, 30, 100]),
    share=st.sampled_from([SHARE, 5.0]),
    weights=st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 3.0]) for name in "fgh"}),
)
def test_what_is_admitted_without_credit_is_cheap_and_within_the_limit(seed, quantum, share, weights):
    """Charges come token by token, long after the admission, and in any order; some requests leave unserved."""
    random = Random(seed)
    policy = Dlpm(quantum=quantum, weights=Weights(weights), borrow=share)
    queue = FairQueue(policy)
    borrowed = dict.fromkeys("fgh", 0.0)
    running: list[Job] = []
    for number in range(150):
        client = random.choice("fgh")
        prompt, output = random.randint(1, 40), random.randint(1, 12)
        queue.arrive(job(number, client, prompt, random.choice([0, prompt // 2, prompt - 1]), output))
        queue.begin_pass()
        while (one := queue.next()) is not None:
            borrowed = {name: 0.0 if policy.deficit(name) > 0 else units for name, units in borrowed.items()}
            if random.random() < 0.4:
                break
            if random.random() < 0.1:
                queue.leave(one.id)
                continue
            if policy.deficit(one.client) <= 0:
                own = one.prompt_tokens - one.prefix_tokens + 2 * one.max_output_tokens
                assert own <= share * one.prefix_tokens
                borrowed[one.client] += own / weights[one.client]
                assert borrowed[one.client] <= quantum + 1e-6
            admit(queue, one)
            running.append(one)
        for one in list(running):
            if random.random() < 0.5:
                queue.account.emit(one, 1)
            if one.output_tokens >= one.max_output_tokens or random.random() < 0.05:
                queue.finish(one.id)
                running.remove(one)
        borrowed = {name: 0.0 if policy.deficit(name) > 0 else units for name, units in borrowed.items()}


def test_a_heavier_weight_lets_a_client_borrow_from_the_request_on_that_brings_it():
    """Its first request costs 60, a quantum is 50."""
    queue = FairQueue(Dlpm(quantum=50, borrow=SHARE))
    for served in (job(1, "f", 60, 0), job(2, "g", 1, 0)):
        queue.arrive(served)
        admit(queue, served)
    queue.arrive(first := job(3, "f", 1060, 1000))
    queue.arrive(other := job(4, "g", 60, 0))
    assert queue.next() is other
    later = job(5, "f", 1060, 1000)
    later.weight, later.weight_version = 2.0, 1
    queue.arrive(later)
    assert queue.next() is first
