"""Guarantees against an adversary, and the limits of the printed theorems.

The other files of tests try each theorem on clients with habits. Here requests come at any time in any size, and the
search is driven towards the largest part of the bound; a printed theorem that is false has its counter-example, beside
the form of it that holds.
"""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings, target
from hypothesis import strategies as st

from sglang_fair.common.weights import Weights
from sglang_fair.core import POLICIES, make_policy
from sglang_fair.core.cost import Cost, Linear, Profiled, Quadratic, Tiered
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.drr import Drr
from sglang_fair.core.job import Job
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.steps import Steps
from sglang_fair.core.vtc import Vtc
from tests.support.budget import examples
from tests.support.engine_model import BASE_S, REQUEST_S, EngineModel, Request, Trace, cases, run, traced

THEOREMS = settings(max_examples=examples(40))
WEIGHTS = st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 3.0]) for name in "abc"})


# ---- any arrivals


@dataclass(frozen=True)
class Burst:
    """Requests of one size that come together."""

    step: int
    client: str
    count: int
    prompt_tokens: int
    output_tokens: int
    spare_tokens: int = 0
    """What they might have made besides."""
    hot: bool = False
    """They begin with the same tokens as all the client's hot ones."""
    aborted_after: int = 0
    """Steps after which they are aborted; 0: they are not."""
    weight: float | None = None
    weight_version: int = 0
    """What they bring of their client's weight."""
    sessions: int = 1
    """That their client names for them."""

    def requests(self, number: int) -> list[Request]:
        head = tuple((self.client, place) for place in range(self.prompt_tokens - 1 if self.hot else 0))
        return [
            Request(
                f"{self.client}{number}-{one}",
                self.client,
                (*head, *((number, one, place) for place in range(self.prompt_tokens - len(head)))),
                self.output_tokens,
                self.output_tokens + self.spare_tokens,
                weight=self.weight,
                weight_version=self.weight_version,
                session=str(one % self.sessions),
            )
            for one in range(self.count)
        ]


@dataclass(frozen=True)
class Schedule:
    """An adversary's plan, and the engine that it meets."""

    bursts: tuple[Burst, ...]
    pool_tokens: int
    step_tokens: int | None = None
    cache_tokens: int = 0
    steps: int = 60

    @property
    def clients(self) -> list[str]:
        return sorted({burst.client for burst in self.bursts})


def bursts(*, aborts: bool = True) -> st.SearchStrategy[Burst]:
    return st.builds(
        Burst,
        step=st.integers(0, 25),
        client=st.sampled_from("abc"),
        count=st.sampled_from([1, 3, 10, 40]),
        prompt_tokens=st.integers(1, 8),
        output_tokens=st.integers(1, 4),
        spare_tokens=st.sampled_from([0, 0, 3]),
        hot=st.booleans(),
        aborted_after=st.sampled_from([0, 0, 3]) if aborts else st.just(0),
        sessions=st.sampled_from([1, 1, 40]),
    )


def schedules(*, whole_prompts: bool = False, aborts: bool = True) -> st.SearchStrategy[Schedule]:
    return st.builds(
        Schedule,
        bursts=st.lists(bursts(aborts=aborts), min_size=2, max_size=10).map(tuple),
        pool_tokens=st.integers(15, 60),
        step_tokens=st.none() if whole_prompts else st.sampled_from([None, 4, 16]),
        cache_tokens=st.sampled_from([0, 16, 128]),
    )


def carry_out(
    schedule: Schedule,
    queue: FairQueue,
    replica_type: type[EngineModel] = EngineModel,
    trace_type: type[Trace] = Trace,
    shared: Steps | None = None,
) -> Trace:
    replica = replica_type(
        queue,
        shared=shared,
        pool_tokens=schedule.pool_tokens,
        cache_tokens=schedule.cache_tokens,
        step_tokens=schedule.step_tokens,
    )
    weights = queue.policy.weights
    trace = trace_type(replica, schedule.clients, dict(weights.items()) if weights is not None else {})
    replica.watchers.append(trace)
    requests = [(burst, burst.requests(number)) for number, burst in enumerate(schedule.bursts)]
    for step in range(schedule.steps):
        for burst, group in requests:
            for request in group:
                if burst.step == step:
                    replica.arrive(request)
                elif burst.aborted_after and step == burst.step + burst.aborted_after:
                    replica.abort(request.id)
        replica.step()
    return trace


SERVED = {"vtc": (2.0, 0.5), "dlpm": (1.0, 0.0), "dlpm-predict": (1.0, 0.0), "drr": (1.0, 0.0)}
"""Of each policy, in units of its bound: how far a client that waits may fall behind any other, and what the others
together get before a newcomer's first dispatch, beyond one bound each."""


TARGETS_S = (None, 0, BASE_S + 3 * REQUEST_S)
"""Of the rule of steps: by the shares, none, and one that three requests meet."""


@pytest.mark.parametrize("is_shared", [False, True], ids=["prompts first", "steps shared"])
@pytest.mark.parametrize("name", sorted(SERVED))
@THEOREMS
@given(
    schedule=schedules(),
    weights=WEIGHTS,
    quantum=st.sampled_from([1, 10, 40, 200]),
    which=st.integers(0, 2),
    mixes=st.booleans(),
)
def test_no_schedule_breaks_a_guarantee(name, is_shared, schedule, weights, quantum, which, mixes):
    """Weighted clients, chunks, aborts, hot prefixes: T1 or T2 (both wait), T3 (one waits), T4 (a newcomer)."""
    policy = make_policy(name, quantum=quantum, weights=Weights(weights))
    shared = Steps(BASE_S, policy.weights, target_s=TARGETS_S[which], mixes=mixes) if is_shared else None
    trace = carry_out(schedule, FairQueue(policy), shared=shared)
    bound, (lag, more) = trace.replica.queue.account.bound(), SERVED[name]
    assert bound is not None
    gap, behind = trace.gap_between_backlogged(), trace.lag_of_backlogged()
    others = len(schedule.clients) - 1
    target(max(gap, behind / lag) / bound)
    assert gap <= bound + 1e-6
    assert behind <= lag * bound + 1e-6
    assert trace.service_before_dispatch() <= (others + more) * bound + 1e-6
    if shared is not None:
        assert shared.largest_lag_s <= shared.bound_s + 1e-9


COSTS: list[Cost] = [
    Profiled(),
    Quadratic(d=8.0),
    Quadratic(d=8.0, context=True),
    Tiered(threshold=6),
]


@pytest.mark.parametrize("cost", COSTS, ids=repr)
@settings(THEOREMS, max_examples=examples(20))
@given(schedule=schedules(), quantum=st.sampled_from([1.0, 50.0, 1000.0]))
def test_the_bounds_hold_for_any_cost(cost, schedule, quantum):
    """T6 of VTC, and the same of DLPM: U is the dearest prompt and the dearest outputs owed (VTC §4.2)."""
    for policy, lag in ((Vtc(), 2), (Dlpm(quantum=quantum), 1)):
        trace = carry_out(schedule, FairQueue(policy, cost))
        bound = trace.replica.queue.account.bound()
        assert trace.gap_between_backlogged() <= bound * (1 + 1e-9)
        assert trace.lag_of_backlogged() <= lag * bound * (1 + 1e-9)


# ---- forgetting


class VtcWithoutForgetting(Vtc):
    def idle(self, client: str) -> None:
        pass


@settings(THEOREMS, max_examples=examples(20))
@given(case=cases())
def test_vtc_serves_as_if_it_forgot_nobody(case):
    """Who is forgotten would have been lifted over its counter: the order is the same to the last request."""
    assert run(case, Vtc()).admissions == run(case, VtcWithoutForgetting()).admissions


# ---- printed theorems and their limits


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_scheduler_does_better_than_a_pool_of_outputs(name):
    """VTC's theorem 4.8: f fills the pool a moment before g comes. Nobody preempts, so g waits for w_q·M, less the
    tokens that f's prompts and first outputs take."""
    room, longest = 6, 20
    plan = (
        Burst(0, "f", 2 * room, prompt_tokens=1, output_tokens=longest),
        Burst(1, "g", 2 * room, prompt_tokens=1, output_tokens=longest),
    )
    pool = room * (1 + longest)
    trace = carry_out(Schedule(plan, pool), FairQueue(make_policy(name, quantum=10)))
    assert trace.gap_between_backlogged() >= 2 * (pool - 2 * room)


def test_dear_prompts_break_the_printed_bound_of_vtc():
    """w_p = 3 > w_q = 1: max(w_p·L_input, w_q·M) is too small, and the sum, which is exported, is not."""
    plan = (Burst(0, "f", 32, prompt_tokens=30, output_tokens=30), Burst(0, "g", 6, 30, 16))
    trace = carry_out(Schedule(plan, pool_tokens=64, steps=60), FairQueue(Vtc(), Linear(3.0, 1.0)))
    assert 2 * max(3 * 30, 64) < trace.gap_between_backlogged() <= trace.replica.queue.account.bound()


class Lending(EngineModel):
    """Admits what will fit at every later step, however long the outputs: who ends early lends its place."""

    def fits(self, request: Request) -> bool:
        entries = [(running.request, running.job.output_tokens) for running in self._running.values()]
        made_and_left = [
            (len(entry.tokens) + output, entry.max_output_tokens - output)
            for entry, output in [*entries, (request, 0)]
        ]
        made_and_left.sort(key=lambda entry: -entry[1])
        made = 0
        for count, (tokens, left) in enumerate(made_and_left, 1):
            made += tokens
            if made + left * count > self.pool_tokens:
                return False
        return True


def test_memory_that_is_lent_breaks_the_printed_bounds():
    """Outputs of 1 to 12 tokens share a pool of 50 and make 78: what one client's requests may still make counts, not
    the pool. g leads by one full pool, f catches up with another, and then starts all its short ones at once."""
    plan = (
        Burst(0, "g", 3, 1, 49),
        Burst(0, "f", 1, 1, 48),
        *(Burst(0, "f", 1, 1, length) for length in range(1, 13)),
        Burst(0, "f", 3, 1, 49),
    )
    schedule = Schedule(plan, pool_tokens=50, steps=200)
    trace = carry_out(schedule, FairQueue(Vtc()), Lending)
    assert 2 * max(1, 2 * 50) < trace.gap_between_backlogged() <= trace.replica.queue.account.bound()
    assert carry_out(schedule, FairQueue(Vtc())).gap_between_backlogged() <= 2 * max(1, 2 * 50)


@settings(THEOREMS, max_examples=examples(20))
@given(schedule=schedules(), quantum=st.sampled_from([1, 10, 80]))
def test_the_exported_bounds_hold_where_memory_is_lent(schedule, quantum):
    for policy, lag in ((Vtc(), 2), (Dlpm(quantum=quantum), 1), (Drr(quantum=quantum), 1)):
        trace = carry_out(schedule, FairQueue(policy), Lending)
        bound = trace.replica.queue.account.bound()
        assert trace.gap_between_backlogged() <= bound
        assert trace.lag_of_backlogged() <= lag * bound


def test_whole_quanta_are_counted_from_zero_only():
    """DLPM's theorem A.1 prints |W - K·Qu| <= max(Qu, U) for any interval. From a full counter it is up to Qu + U."""
    policy, quantum, u = Dlpm(quantum=10, newcomers=0), 10, 8
    for number in range(3):
        policy.arrive(Job(str(number), "f", arrival=number))
    policy.pick()
    assert policy.deficit("f") == quantum
    service = 0
    for units in (9, u):
        assert policy.refills == 1
        policy.leave(policy.pick())
        policy.charge("f", units)
        service += units
    assert max(quantum, u) < service < quantum + u


@pytest.mark.slow
def test_the_latency_of_a_newcomer_is_that_of_its_first_dispatch():
    """DLPM's theorem A.2 says it of the request that came first, and its proof takes that for the client's next one.
    Hotter ones of the same client go before it; `patience` limits how many."""
    bound = 2 * (8 + 2 * 20 + 30)

    def others_before(patience: int) -> float:
        flood = [Burst(step, "g", 3, prompt_tokens=8, output_tokens=1) for step in range(200)]
        warm = Burst(0, "f", 1, prompt_tokens=8, output_tokens=1, hot=True)
        cold = Burst(20, "f", 1, prompt_tokens=8, output_tokens=1)
        hot = [Burst(step, "f", 3, prompt_tokens=8, output_tokens=1, hot=True) for step in range(20, 200)]
        plan = Schedule((warm, cold, *flood, *hot), pool_tokens=20, cache_tokens=400, steps=200)
        trace = carry_out(plan, FairQueue(Dlpm(quantum=30, patience=patience)))
        assert trace.service_before_dispatch() <= bound
        since = [entry for entry in trace.replica.admissions if entry.step > 20]
        place = next((n for n, entry in enumerate(since) if entry.id == cold.requests(1)[0].id), len(since))
        return sum(entry.extend_tokens + 2 for entry in since[:place] if entry.client == "g")

    assert others_before(patience=10**9) > bound
    assert others_before(patience=1) <= bound


@settings(THEOREMS, max_examples=examples(25))
@given(case=cases(whole_prompts=True, deferral=False, aborts=False))
def test_a_tiny_quantum_is_vtc(case):
    """Q^u below every charge, no shared prefixes, and clients that wait from the first step to the last: the same
    requests in the same order."""
    steady = {"depth": 30, "pause_steps": 0, "start": 0, "closed": False, "shared_tokens": 0}
    loads = tuple(replace(load, **steady) for load in case.loads)
    case = replace(case, loads=loads, steps=10, pool_tokens=min(case.pool_tokens, 60))
    tiny, vtc = traced(case, Dlpm(quantum=1 / 1024)), traced(case, Vtc())
    assert all(all(row.waiting) for row in vtc.rows[30 * len(loads) :])
    assert tiny.replica.admissions == vtc.replica.admissions
