"""A client's sessions take turns: none waits for another's flood. Whatever they are called, other clients are served as
if there were none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.core import POLICIES, make_policy
from sglang_fair.core.clients import ByClient
from sglang_fair.core.job import Job
from sglang_fair.core.policy import Policy
from tests.support.budget import examples
from tests.support.twins import Script

SESSIONS = settings(max_examples=examples(40))
seeds = st.integers(0, 2**32)
TURNS = ("dlpm", "drr", "dlpm-predict", "vtc", "wsc-dlpm")
taking_turns = pytest.mark.parametrize("name", TURNS)


def send(policy: Policy, number: int, client: str, session: str, prefix_tokens: int = 0) -> Job:
    job = Job(f"{client}{number}", client, prefix_tokens + 2, session=session, arrival=number)
    job.prefix_tokens = prefix_tokens
    policy.arrive(job)
    return job


def admit(policy: Policy) -> Job | None:
    if (job := policy.pick()) is not None:
        policy.leave(job)
        policy.charge(job.client, 7)
        policy.admitted(job)
    return job


@taking_turns
@SESSIONS
@given(
    floods=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    prefixes=st.integers(0, 2**30),
    served=st.integers(0, 40),
    rival=st.integers(0, 30),
)
def test_one_request_waits_for_one_of_each_other_session(name, floods, prefixes, served, rival):
    """Whatever the others have in the cache, and however long they have waited."""
    policy, number = make_policy(name, quantum=20), 0
    for session, count in enumerate(floods):
        for _ in range(count):
            number += 1
            send(policy, number, "a", f"flood {session}", prefixes * number % 97)
    for _ in range(rival):
        number += 1
        send(policy, number, "b", "")
    for _ in range(min(served, number)):
        admit(policy)
    late = send(policy, number + 1, "a", "late")
    before = 0
    while (job := admit(policy)) is not late:
        assert job is not None
        before += job.client == "a"
    assert before <= len(floods)


@taking_turns
def test_a_flood_of_a_thousand_does_not_keep_one_waiting(name):
    policy = make_policy(name)
    for number in range(1000):
        send(policy, number, "a", "flood", 90)
    for _ in range(500):  # so that the oldest of the flood have been overtaken
        admit(policy)
    late = send(policy, 1000, "a", "late")
    assert late in (admit(policy), admit(policy))


@pytest.mark.parametrize("name", sorted(POLICIES))
@SESSIONS
@given(seed=seeds)
def test_one_session_changes_nothing(name, seed):
    plain = Script(make_policy(name, quantum=20), seed).run()
    named = Script(make_policy(name, quantum=20), seed, sessions=1).run()
    assert named.picks == plain.picks
    assert named.policy.counters() == plain.policy.counters()


@SESSIONS
@given(seed=seeds)
def test_deadlines_go_before_turns(seed):
    plain = Script(make_policy("slo", quantum=20), seed).run()
    assert Script(make_policy("slo", quantum=20), seed, sessions=3).run().picks == plain.picks


@pytest.mark.parametrize("name", ["dlpm", "vtc"])
def test_ten_thousand_names_gain_nothing_and_cost_no_more_than_their_requests(name):
    def served(sessions: int) -> list[str]:
        policy = make_policy(name, quantum=20)
        assert isinstance(policy, ByClient)
        for number in range(10_000):
            send(policy, number, "liar", str(number % sessions))
        for number in range(10_000, 10_040):
            send(policy, number, "b", "")
        assert len(policy._queues._queues["liar"].queues) == sessions
        order = [job.client for _ in range(10_040) if (job := admit(policy)) is not None]
        assert len(order) == 10_040
        assert not policy._queues._queues
        return order

    assert served(10_000) == served(1)
