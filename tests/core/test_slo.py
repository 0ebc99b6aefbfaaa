"""`slo`: the order among clients with credit, DLPM's bound whatever deadlines are claimed, and how long who waits."""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings, target
from hypothesis import strategies as st

from sglang_fair.common.weights import Weights
from sglang_fair.core import make_policy
from sglang_fair.core.clients import PATIENCE
from sglang_fair.core.job import Job
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.slo import Slo, due_step
from sglang_fair.core.steps import Steps
from tests.core.test_theorems import carry_out, schedules
from tests.support.budget import examples
from tests.support.engine_model import BASE_S, EngineModel, Request

THEOREMS = settings(max_examples=examples(60))


def picked(queue: FairQueue) -> list[str]:
    """Everybody who waits, in order."""
    order = []
    queue.begin_pass()
    while (job := queue.next()) is not None:
        order.append(job.id)
        queue.hold(job)
    return order


def queue_of(*jobs: Job, **options) -> FairQueue:
    queue = FairQueue(make_policy("slo", **options))
    for job in jobs:
        queue.arrive(job)
    return queue


# ---- the order


def test_least_slack_goes_first_in_steps_then_begun_interactions_then_prefixes_then_arrival():
    queue = queue_of(
        Job("never", "a", prefix_tokens=900),
        Job("late", "b", deadline_s=9.1, prefix_tokens=900),
        Job("short prefix", "c", deadline_s=4.4, prefix_tokens=10),
        Job("long prefix", "d", deadline_s=4.2, prefix_tokens=99),
        Job("begun", "e", deadline_s=4.4, call=2),
        Job("as short", "f", deadline_s=4.01, prefix_tokens=10),
        Job("overdue", "g", deadline_s=-3.0),
        Job("beyond its share", "h", deadline_s=0.1, tier=1),
    )
    assert picked(queue) == [
        "overdue", "begun", "long prefix", "short prefix", "as short", "late", "never", "beyond its share"
    ]  # fmt: skip


def test_within_a_client_slack_counts_and_tiers_do_not():
    queue = queue_of(
        Job("lax", "a", deadline_s=50.0),
        Job("soon, beyond its share", "a", deadline_s=1.0, tier=1),
        Job("other", "b", deadline_s=70.0),
    )
    assert picked(queue) == ["other", "soon, beyond its share", "lax"]


def test_a_new_name_is_no_more_urgent_than_it_says():
    queue = queue_of(Job("known", "known", 10, deadline_s=1.0))
    queue.begin_pass()
    queue.admit(queue.next(), extend_tokens=10, cached_tokens=0)
    for job in (Job("known again", "known", deadline_s=5.0), Job("new", "new", deadline_s=9.0)):
        queue.arrive(job)
    assert picked(queue) == ["known again", "new"]


@pytest.mark.parametrize("normalised", [False, True])
def test_it_charges_as_the_policy_that_it_is_made_of(normalised):
    """The same calls: counters are those of dlpm, or of wsc-dlpm."""
    ours = make_policy("slo", quantum=50.0, normalised=normalised)
    theirs = make_policy("wsc-dlpm" if normalised else "dlpm", quantum=50.0)
    for policy in (ours, theirs):
        queue = FairQueue(policy)
        for number in range(40):
            client, app = "ab"[number % 2], "pq"[number % 3 == 0]
            queue.arrive(Job(f"{number}", client, 10 + number % 7, 9, app=app))
            queue.begin_pass()
            job = queue.next()
            queue.admit(job, extend_tokens=job.prompt_tokens, cached_tokens=0)
            queue.account.emit(job, 3 + number % 5)
            queue.finish(job.id)
    assert ours.counters() == pytest.approx(theirs.counters())
    assert ours.bound(10, 20) == theirs.bound(10, 20)


@pytest.mark.parametrize(("name", "left"), [("slo", 100), ("dlpm", 20)])
def test_a_light_client_has_a_full_quantum_again_after_a_round(name, left):
    """Under dlpm it goes on with the 20 units that were left, and then waits for the flood's turn."""
    queue = FairQueue(make_policy(name, quantum=100))
    for number in range(3):
        queue.arrive(Job(f"flood {number}", "flood", 150))
    queue.arrive(Job("light", "light", 80, deadline_s=1.0))
    for client in ("light", "flood") if name == "slo" else ("flood", "light"):
        queue.begin_pass()
        job = queue.next()
        assert job.client == client
        queue.admit(job, extend_tokens=job.prompt_tokens, cached_tokens=0)
    queue.finish("light")
    assert queue.policy.counters() == {"flood": -50, "light": 20}
    queue.begin_pass()
    assert queue.next().client == "flood"
    assert queue.policy.counters() == {"flood": 50, "light": left}


# ---- the bound of DLPM


@dataclass(frozen=True)
class Claims:
    """What each client says of its requests, and what the gateway says of them."""

    slack_s: dict[str, float | None]
    tier: dict[str, int]
    begun: frozenset[str] = frozenset()

    def of(self, request: Request) -> Request:
        client = request.client
        return replace(
            request, slack_s=self.slack_s[client], tier=self.tier[client], call=1 + (client in self.begun)
        )


class Claiming(EngineModel):
    claims: Claims

    def arrive(self, request: Request) -> None:
        super().arrive(self.claims.of(request))


claims = st.builds(
    Claims,
    slack_s=st.fixed_dictionaries({name: st.sampled_from([None, 0.001, 3.0, 1e4]) for name in "abc"}),
    tier=st.fixed_dictionaries({name: st.sampled_from([0, 0, 1]) for name in "abc"}),
    begun=st.frozensets(st.sampled_from("abc")),
)


@pytest.mark.parametrize("is_shared", [False, True], ids=["prompts first", "steps shared"])
@THEOREMS
@given(
    schedule=schedules(),
    claims=claims,
    weights=st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 3.0]) for name in "abc"}),
    quantum=st.sampled_from([1, 10, 40, 200]),
)
def test_no_claim_breaks_the_bound(is_shared, schedule, claims, weights, quantum):
    """Theorem 4.1 for any deadlines, tiers and interactions, honest or not, with aborts, chunks and hot prefixes."""
    policy = make_policy("slo", quantum=quantum, weights=Weights(weights))
    shared = Steps(BASE_S, policy.weights) if is_shared else None
    replica_type = type("Claims", (Claiming,), {"claims": claims})
    trace = carry_out(schedule, FairQueue(policy), replica_type, shared=shared)
    bound = trace.replica.queue.account.bound()
    gap = trace.gap_between_backlogged()
    target(gap / bound)
    assert gap <= bound + 1e-6
    assert trace.lag_of_backlogged() <= bound + 1e-6


# ---- how long who waits


OWN = "0"
"""The honest client."""


@dataclass
class Waits:
    """Watches an engine: for each request of the honest client, what was given while it waited."""

    replica: EngineModel
    weights: Weights = field(default_factory=Weights)
    waiting: dict[str, Counter] = field(default_factory=dict)
    """Those that wait, with what each client had got when they began to."""
    worst: float = 0.0
    """Service that was given while a request waited, over its bound."""
    names: int = 0

    def __call__(self) -> None:
        replica = self.replica
        for job in replica.queue.jobs():
            if job.client == OWN and job.id not in self.waiting:
                self.waiting[job.id] = Counter(replica.service)
        for id, before in list(self.waiting.items()):
            if not replica.queue.is_waiting(id):
                del self.waiting[id]  # what it got itself, came after its wait
            else:
                self.look(before)

    def look(self, before: Counter) -> None:
        replica, weight = self.replica, self.weights.of
        given = Counter(replica.service)
        given.subtract(before)
        served = {name for name, units in given.items() if units} | {OWN}
        bound = replica.queue.account.bound()
        assert bound is not None
        limit = sum(weight(name) for name in served) * (given[OWN] / weight(OWN) + bound)
        self.names = max(self.names, len(served))
        self.worst = max(self.worst, sum(given.values()) / limit)


@dataclass(frozen=True)
class Adversary:
    """Sends `count` requests every `every` steps; `renames`: under a new name each time."""

    slack_s: float | None
    count: int
    every: int
    prompt_tokens: int
    output_tokens: int
    renames: bool = False
    tier: int = 0


adversaries = st.builds(
    Adversary,
    slack_s=st.sampled_from([0.001, 0.001, 2.0, None]),
    count=st.sampled_from([1, 1, 2, 5]),
    every=st.sampled_from([1, 3, 10]),
    prompt_tokens=st.integers(1, 10),
    output_tokens=st.integers(1, 12),
    renames=st.booleans(),
)


def against(
    others: list[Adversary], policy: Slo, honest: Adversary, steps: int = 50
) -> tuple[EngineModel, Waits]:
    replica = EngineModel(FairQueue(policy), pool_tokens=60, step_tokens=16)
    waits = Waits(replica, policy.weights)
    replica.watchers.append(waits)
    replica.block_tokens = None
    for step in range(steps):
        for number, one in enumerate([honest, *others]):
            if step % one.every:
                continue
            name = f"{number} {step}" if one.renames else f"{number}"
            for each in range(one.count):
                tokens = tuple((number, step, each, place) for place in range(one.prompt_tokens))
                replica.arrive(
                    Request(f"{name}/{step}/{each}", name, tokens, one.output_tokens, one.output_tokens,
                            slack_s=one.slack_s, tier=one.tier)
                )  # fmt: skip
        replica.step()
    return replica, waits


HONEST = Adversary(slack_s=30.0, count=2, every=7, prompt_tokens=6, output_tokens=4)


@THEOREMS
@given(
    others=st.lists(adversaries, min_size=1, max_size=5),
    quantum=st.sampled_from([1, 20, 150]),
    newcomers=st.sampled_from([0, 4]),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_a_request_waits_for_n_times_its_own_and_the_bound_at_most(others, quantum, newcomers, weight):
    """Others claim 1 ms, come in trickles, under new names each time, and are charged token by token. What is given
    while a request waits is at most n·(b + 2·(U + Q)), n the names that are served meanwhile."""
    policy = make_policy("slo", quantum=quantum, newcomers=newcomers, weights=Weights({"0": weight}))
    _, waits = against(others, policy, HONEST)
    target(waits.worst)
    assert waits.worst <= 1 + 1e-9


class Order:
    """Watches: of each client, nobody is admitted before a more urgent one of its own."""

    def __init__(self, replica: EngineModel) -> None:
        self.replica, self.before = replica, list[Job]()

    def __call__(self) -> None:
        queue = self.replica.queue
        here = list(queue.waiting())
        waits = {job.id for job in here}
        for job in self.before:
            if job.id not in waits and queue.find(job.id) is not None:
                later = [due_step(one) for one in here if one.client == job.client]
                assert due_step(job) <= min(later, default=due_step(job)), "b has less urgent work in it"
        self.before = here


@pytest.mark.parametrize("seed", range(5))
def test_what_its_client_gets_meanwhile_is_more_urgent(seed):
    replica = EngineModel(FairQueue(make_policy("slo", quantum=30, patience=PATIENCE**3)), pool_tokens=60)
    replica.watchers.append(Order(replica))
    for step in range(60):
        for number in range(3):
            slack_s = [0.001, 5.0, 40.0, None][(step * 7 + number * seed) % 4]
            replica.arrive(
                Request(f"{step}/{number}", "ab"[number % 2], ((step, number),) * 5, 6, 6, slack_s=slack_s)
            )
        replica.step()
    assert len(replica.admissions) > 20
