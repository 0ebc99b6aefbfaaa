"""RPM(n): the window against its definition, with lists; refusals that are true; delays that are no longer."""

import pickle
from collections import Counter
from dataclasses import dataclass, field, replace
from math import floor

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.common.weights import Weights
from sglang_fair.core.job import Job
from sglang_fair.core.policy import Policy
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.rpm import Rpm
from tests.support.budget import examples
from tests.support.engine_model import EngineModel, Traffic, cases
from tests.support.twins import Both, Literal, Script

RPM = settings(max_examples=examples(40))
WEIGHTS = st.fixed_dictionaries({name: st.sampled_from([0.1, 0.5, 1.0, 2.5]) for name in "abcd"})
MOMENTS = st.lists(
    st.tuples(st.integers(0, 64 * 40).map(lambda ticks: ticks / 64), st.sampled_from("ab")), max_size=60
)
"""Requests: seconds since the one before, and whose."""


@dataclass
class LiteralRpm(Literal):
    """Everything that ever counted is kept, and counted again each time."""

    limit: int = 1
    delays: bool = False
    weights: dict[str, float] = field(default_factory=dict)
    now_s: float = 0.0
    times_s: list[tuple[str, float]] = field(default_factory=list)

    def tick(self, now_s: float) -> None:
        self.now_s = now_s

    def is_open(self, client: str) -> bool:
        limit = max(1, floor(self.limit * self.weights.get(client, 1.0) + 0.5))
        return self.counts()[client] < limit

    def counts(self) -> Counter[str]:
        return Counter(client for client, at_s in self.times_s if self.now_s - at_s < 60)

    def accepts(self, job: Job) -> bool:
        return self.delays or self.is_open(job.client)

    def arrive(self, job: Job) -> None:
        super().arrive(job)
        if not self.delays:
            self.times_s.append((job.client, self.now_s))

    def pick(self) -> Job | None:
        offered = [job for job in self.waiting if job not in self.held]
        open_to = [job for job in offered if not self.delays or self.is_open(job.client)]
        return min(open_to, key=lambda job: job.arrival, default=None)

    def admitted(self, job: Job) -> None:
        if self.delays:
            self.times_s.append((job.client, self.now_s))

    def charge(self, client: str, units: int) -> None:
        pass

    def agrees_with(self, policy: Policy) -> bool:
        return policy.counters() == self.counts()


@settings(RPM, max_examples=examples(80))
@given(
    limit=st.integers(1, 6),
    delays=st.booleans(),
    weights=WEIGHTS,
    holds=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_picks_and_refusals_are_those_of_the_definition(limit, delays, weights, holds, seed):
    """So nobody is delayed or refused who is below the limit, and the order is arrival, within a client too."""
    fast = Rpm(limit, "delay" if delays else "refuse", Weights(weights))
    slow = LiteralRpm(limit=limit, delays=delays, weights=weights)
    Script(Both(fast, slow), seed, holds=holds, delays=delays).run(120)


@RPM
@given(moments=MOMENTS, limit=st.integers(1, 4))
def test_a_refusal_says_when_to_try_again(moments, limit):
    policy, now_s = Rpm(limit), 1000.0
    for number, (gap_s, client) in enumerate(moments):
        now_s += gap_s
        policy.tick(now_s)
        job = Job(str(number), client, arrival=number)
        refusal = policy.refuses(job)
        if refusal is None:
            policy.arrive(job)
            continue
        wait_s = int(refusal.removesuffix(" s").rpartition(" ")[2])
        assert 1 <= wait_s <= 60
        for later_s, open_then in ((wait_s - 1, False), (wait_s, True)):
            then = pickle.loads(pickle.dumps(policy))
            then.tick(now_s + later_s)
            assert (then.refuses(job) is None) == open_then


@settings(RPM, max_examples=examples(20))
@given(case=cases())
def test_who_is_delayed_is_served_in_the_end(case):
    """On the engine model, where a step is a second."""
    queue = FairQueue(Rpm(3, "delay"))
    replica = EngineModel(queue, pool_tokens=case.pool_tokens, step_tokens=case.step_tokens)
    traffic = Traffic(replace(case, steps=10))
    for _ in range(10):
        traffic.step(replica)
        replica.step()
    for _ in range(60 * len(queue) + 10_000):
        if not len(queue) and not any(replica.running.values()):
            break
        replica.step()
    assert len(queue) == 0
    assert replica.refused == []


def test_weights_change_while_requests_are_delayed():
    """A lower limit counts at once, a higher one from the client's next request on."""
    policy = Rpm(2, excess="delay")
    jobs = [Job(str(number), "a", arrival=number) for number in range(6)]
    for job in jobs[:4]:
        policy.arrive(job)

    def admit_all() -> list[str]:
        admitted = []
        while (job := policy.pick()) is not None:
            policy.leave(job)
            policy.admitted(job)
            admitted.append(job.id)
        return admitted

    assert admit_all() == ["0", "1"]
    policy.weights.set("a", 1.5)
    policy.arrive(jobs[4])
    assert policy.pick() is jobs[2]
    policy.weights.set("a", 1)
    assert admit_all() == []
    policy.tick(60)
    assert admit_all() == ["2", "3"]


def test_who_sent_nothing_for_a_minute_is_forgotten():
    policy = Rpm(2)
    empty = len(pickle.dumps(policy))
    for number in range(2000):
        policy.arrive(job := Job(str(number), f"client{number}", arrival=number))
        policy.leave(job)
    for number in range(2000):
        assert policy.refuses(Job("x", f"nobody{number}")) is None
    assert len(policy.counters()) == 2000
    policy.tick(60)
    assert policy.counters() == {}
    assert len(pickle.dumps(policy)) <= empty + 2000
