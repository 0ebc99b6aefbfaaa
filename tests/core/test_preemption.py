"""Eviction of running requests: for whom, whom, the least that suffices, and no circles."""

from dataclasses import dataclass
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.core import POLICIES, make_policy
from sglang_fair.core.admission import Admission
from sglang_fair.core.job import Job
from sglang_fair.core.preemption import Missing, Preemption, Runner
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.slo import MOST_EVICTIONS, due_step
from tests.support.budget import examples, seeds

PURE = settings(max_examples=examples(200))
STEP_S, TOKEN_S = 0.1, 0.001
MISSING = Missing(tokens=10)


def measured(most: int = MOST_EVICTIONS) -> Preemption:
    preemption = Preemption(most)
    preemption.step(STEP_S, {}, decoded=1)
    preemption.step(100 * TOKEN_S, {"a": 100})
    return preemption


def running(name: str, tokens: float = 10, **given) -> Runner:
    """A request that has made one of 1,000 tokens."""
    job = Job(name, "flood", 20, 1000, reached_tokens=20, output_tokens=1, **given)
    return Runner(job, tokens)


def urgent(deadline_s: float | None = 5.0, **given) -> Job:
    return Job("urgent", "chat", 100, 10, deadline_s=deadline_s, **given)


def names(jobs: list[Job]) -> list[str]:
    return [job.id for job in jobs]


# ---- for whom


def test_somebody_goes_only_if_the_deadline_would_be_missed():
    """999 tokens of 0.1 s are left."""
    late = [running("long", tier=1)]
    assert names(measured().choose(urgent(), MISSING, late, 0.0)) == ["long"]
    assert measured().choose(urgent(120.0), MISSING, late, 0.0) == []
    ends_soon = Runner(Job("short", "flood", 20, 30, reached_tokens=20, output_tokens=1), 10)
    assert measured().choose(urgent(), MISSING, [*late, ends_soon], 0.0) == [], (
        "2.9 s, and 0.1 s for the prompt"
    )
    assert names(measured().choose(urgent(2.95), MISSING, [*late, ends_soon], 0.0)) == ["long"]


def test_who_owes_makes_room_however_long_it_is_overdue():
    """A flood that is alone in its share is of tier 0, and its running requests were due long ago."""
    one = measured()
    flood, own = (
        running("flood", deadline_s=-9.0),
        Runner(Job("own", "chat", 20, 1000, reached_tokens=20), 500),
    )
    own.job.deadline_s = -9.0
    assert one.choose(urgent(), MISSING, [flood, own], 0.0) == []
    one.owes = {"flood", "chat"}.__contains__
    assert names(one.choose(urgent(), MISSING, [own, flood], 0.0)) == ["flood"], "nobody for its own client"


def test_an_announced_length_counts_until_it_is_over():
    honest = running("honest", tier=1, expected_output_tokens=11)
    assert measured().choose(urgent(), MISSING, [honest], 0.0) == []
    honest.job.output_tokens = 11
    assert names(measured().choose(urgent(), MISSING, [honest], 0.0)) == ["honest"]


@pytest.mark.parametrize(
    "job",
    [urgent(None), urgent(tier=1), urgent(system=True), urgent(output_tokens=1)],
    ids=["none", "tier 1", "system", "it has had its first token"],
)
def test_nobody_goes_for_one_without_a_claim(job):
    assert not measured().may_take_back(job)
    assert measured().choose(job, MISSING, [running("long", tier=1)], 0.0) == []


def test_nobody_goes_while_nothing_is_missing_or_measured():
    late = [running("long", tier=1)]
    assert measured().choose(urgent(), Missing(), late, 0.0) == []
    assert Preemption(3).choose(urgent(), MISSING, late, 0.0) == []


def test_nobody_goes_for_one_that_is_late_already():
    assert names(measured().choose(urgent(0.1), MISSING, [running("lax", deadline_s=1e6)], 0.1)) == ["lax"]
    assert measured().choose(urgent(0.1), MISSING, [running("lax", deadline_s=1e6)], 0.2) == []


# ---- whom


def test_tier_1_goes_first_then_the_largest_slack_then_the_latest():
    runners = [
        running("chat", deadline_s=124.0),
        running("later", deadline_s=126.0),
        running("never"),
        running("never, too", arrival=7),
        running("beyond, due soon", tier=1, deadline_s=0.1),
        running("beyond", tier=1),
    ]
    order = ["beyond", "beyond, due soon", "never, too", "never", "later"]
    for count in range(1, 6):
        assert names(measured().choose(urgent(), Missing(10 * count), runners, 0.0)) == order[:count]
    assert measured().choose(urgent(), Missing(60), runners, 0.0) == [], "all together do not suffice"


def test_some_are_never_taken_back():
    often, cut, server = (
        running("often", tier=1),
        running("cut", tier=1),
        running("server", system=True, tier=1),
    )
    cut.job.reached_tokens = 19
    preemption = measured()
    for times in range(3):
        assert names(preemption.choose(urgent(), MISSING, [often, cut, server], 0.0)) == ["often"], times
        preemption.evict(often.job, often.job)
    assert preemption.choose(urgent(), MISSING, [often, cut, server], 0.0) == []
    preemption.leave(often.job)
    assert preemption.times(often.job) == 0


def test_a_small_one_is_spared_if_the_next_one_suffices():
    runners = [running("small", 3, tier=1, arrival=2), running("large", 10, tier=1, arrival=1)]
    assert names(measured().choose(urgent(), MISSING, runners, 0.0)) == ["large"]


jobs = st.builds(
    Job,
    id=st.just("x"),
    client=st.sampled_from("ab"),
    prompt_tokens=st.just(10),
    max_output_tokens=st.sampled_from([1, 50, 1000]),
    tier=st.sampled_from([0, 1]),
    deadline_s=st.sampled_from([None, -1.0, 0.001, 3.0, 3.2, 9.0, 1e4]),
    reached_tokens=st.sampled_from([9, 10, 30]),
    arrival=st.integers(0, 9),
)
runners = st.lists(st.builds(Runner, jobs, st.sampled_from([1, 4, 10, 25])), max_size=6)


@PURE
@given(job=jobs, running=runners, tokens=st.integers(0, 60), places=st.integers(0, 2))
def test_it_suffices_none_can_be_spared_and_all_may_go(job, running, tokens, places):
    missing, of = Missing(tokens, places), {id(one.job): one.tokens for one in running}
    chosen = measured().choose(job, missing, running, 0.0)

    def suffices(some) -> bool:
        return sum(of[id(one)] for one in some) >= tokens and len(some) >= places

    if not chosen:
        return
    assert suffices(chosen)
    assert not any(suffices(fewer) for fewer in combinations(chosen, len(chosen) - 1))
    assert job.tier == 0
    for one in chosen:
        assert one.reached_tokens >= one.prompt_tokens
        assert one.tier == 1 or due_step(one) > due_step(job)


@PURE
@given(one=jobs, other=jobs)
def test_nobody_takes_back_whom_he_was_taken_back_for(one, other):
    one.reached_tokens = other.reached_tokens = 10
    there = measured().choose(one, MISSING, [Runner(other, 10)], 0.0)
    back = measured().choose(other, MISSING, [Runner(one, 10)], 0.0)
    assert not (there and back)


# ---- in the queue


def admission(name: str = "slo", **options) -> Admission:
    return Admission(FairQueue(make_policy(name, **options)), lambda job: (0, None))


def admit(one: Admission, job: Job, cached_tokens: int = 0) -> None:
    one.arrive(job)
    run_it(one, job, cached_tokens)


def run_it(one: Admission, job: Job, cached_tokens: int) -> None:
    known = job.prompt_tokens + job.output_tokens
    one.admit(job, extend_tokens=known - cached_tokens, cached_tokens=cached_tokens)
    one.computed([job])


def test_policies_other_than_slo_take_nobody_back():
    assert [name for name in POLICIES if admission(name).preemption is not None] == ["slo"]
    assert admission(evictions=0).preemption is None
    one = admission("dlpm")
    admit(one, job := Job("1", "a", 10, 5))
    with pytest.raises(ValueError, match="takes no request back"):
        one.evict(job, job)


def test_one_that_was_taken_back_waits_by_the_policy_and_what_is_computed_again_is_the_servers():
    one = admission()
    admit(one, flood := Job("flood", "a", 10, 50, tier=1))
    one.queue.account.emit(flood, 5)
    one.arrive(other := Job("other", "b", 10, 5, deadline_s=1.0))
    one.evict(flood, other)
    assert (one.preemption.times(flood), flood.retractions, one.preemption.evictions) == (1, 1, 1)
    assert one.queue.next() is other, "it has no precedence"
    one.record.tick(0.5)
    shown = one.record.find("flood")[0]
    assert (shown["state"], shown["retractions"]) == ("waiting", 1)
    assert shown["evicted_for"] == [{"same_client": False, "tier": 0, "slack_s": 1.0}]
    run_it(one, other, 0)
    before = one.queue.account.ledger.usage("a").service
    assert one.queue.next() is flood
    run_it(one, flood, 12)
    assert one.queue.account.ledger.usage("a").service == before
    assert one.queue.account.ledger.usage("(system)").extend_tokens == 3
    one.evict(flood, other)
    one.leave(flood)
    one.finish(other)
    assert len(one.queue) == len(list(one.queue.running())) == 0


def test_memory_still_goes_before_everything():
    """One that was taken back for another and then again for want of memory waits first in line."""
    one = admission()
    admit(one, flood := Job("flood", "a", 10, 50, tier=1))
    one.arrive(Job("other", "b", 10, 5, deadline_s=1.0))
    one.evict(flood, flood)
    run_it(one, flood, 9)
    one.retract(flood)
    assert one.queue.next() is flood
    run_it(one, flood, 9)
    one.evict(flood, flood)
    assert one.queue.next().id == "other"


@dataclass
class Pool:
    """An engine with memory for `size` tokens that keeps nothing back."""

    one: Admission
    size: int = 100
    now_s: float = 0.0

    def free(self) -> int:
        return self.size - sum(need(job) for job in self.one.queue.running())


def need(job: Job) -> int:
    return job.prompt_tokens + job.max_output_tokens


@pytest.mark.parametrize("seed", seeds(20))
def test_any_history_keeps_the_books_and_ends(seed):
    """Floods of tier 1, liars and honest chats, aborts in between: each request ends once, nobody is taken back more
    than three times, and the books agree with what the engine did."""
    random, one = Random(seed), admission(quantum=40)
    pool, sent, ended = Pool(one), 0, 0
    extended = emitted = 0
    preemption = one.preemption
    for step in range(2000):
        pool.now_s = step * 0.1
        one.tick(pool.now_s)
        if step < 250:  # after that, whoever waits is served
            for client in "abc":
                if random.random() < 0.2:
                    sent += 1
                    slack_s = random.choice([0.001, 0.5, 2.0, 50.0])
                    due_s = None if client == "a" else pool.now_s + slack_s
                    one.arrive(Job(f"{sent}", client, random.randint(1, 20), random.randint(1, 30),
                                   tier=int(client == "a"), deadline_s=due_s, expected_output_tokens=99))  # fmt: skip
        one.begin_pass(0)
        job = one.queue.next()
        if job is not None and need(job) > pool.free():
            held = [Runner(other, need(other)) for other in one.queue.running()]
            for other in preemption.choose(job, Missing(need(job) - pool.free()), held, pool.now_s):
                one.evict(other, job)
        batch = []
        for job in one.candidates():
            if need(job) > pool.free():
                break
            cached = random.randint(0, job.prompt_tokens + job.output_tokens - 1) if job.repeating else 0
            extend = job.prompt_tokens + job.output_tokens - cached
            one.admit(job, extend_tokens=extend, cached_tokens=cached)
            extended += extend
            batch.append(job)
        one.end_pass(None)
        one.computed(batch)
        for job in list(one.queue.running()):
            one.queue.account.emit(job, 1)
            emitted += 1
            if job.output_tokens >= job.max_output_tokens or random.random() < 0.01:
                one.finish(job)
                ended += 1
        one.step(0.1, {"x": 1} if batch else None, decoded=int(not batch))
        if random.random() < 0.05 and (waiting := list(one.queue.waiting())):
            one.leave(random.choice(waiting))
            ended += 1
        assert all(preemption.times(job) <= MOST_EVICTIONS for job in one.queue.running())
    ledger = one.queue.account.ledger
    ledger.engine_counted(extend=extended, output=emitted)
    assert ledger.check()
    assert ended == sent
    assert not preemption._times
    assert preemption.evictions > 0
