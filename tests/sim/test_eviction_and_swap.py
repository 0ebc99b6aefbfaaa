"""The simulated replica gives requests back, goes on with them where they were, and loads other models."""

from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sglang_fair.core.slo import Slo
from sglang_fair.sim.answers import answer
from sglang_fair.sim.evictions import HostPool
from sglang_fair.sim.replica import Event, Finished, Progress, Removed, Replica, Settings, SimRequest
from tests.sim.test_replica import SMALL, STEP, Seconds, drain, finished, new, packed, request
from tests.support.budget import examples

HOST = replace(SMALL, host_tokens=2000, host_token_s=0.001)


def told_of(events: list[Event], name: str) -> list[int]:
    return [event.output_tokens for event in events if isinstance(event, Progress) and event.id == name]


# ---- eviction


def with_urgent(settings: Settings, written: int = 9, **fields) -> tuple[Replica, list[Event]]:
    """A request of 300 tokens has written so many of 60 when one of 800 comes, which is due and has no room beside."""
    settings = replace(settings, kv_tokens=1024, chunked_prefill_tokens=None, progress_steps=1)
    replica = new(settings, Slo(**fields), events=False)
    replica.arrive(request("old", 300, 60, tier=1), 0.0)
    events = drain(replica, written)
    due = request("new", 800, 20, client="b", deadline_s=written + 5.0)
    events += replica.arrive(due, written)
    events += drain(replica)
    replica.check_pool()
    assert (replica.meters.evictions, replica.meters.retractions) == (
        int(replica.queue.policy.evictions > 0),
        0,
    )
    return replica, events


@pytest.mark.parametrize("settings", [SMALL, HOST])
def test_an_evicted_request_goes_on_at_the_next_token(settings):
    _, events = with_urgent(settings)
    assert told_of(events, "old") == list(range(1, 60))
    assert finished(events)["old"].answer == answer(request("old", 300).tokens, 60)
    assert [event.id for event in events if isinstance(event, Finished)] == ["new", "old"]


def test_what_the_host_holds_is_not_computed_again():
    """The cache keeps nothing of it: the other one needs the whole pool meanwhile."""
    replica, _ = with_urgent(HOST)
    assert replica.meters.extend_tokens < 300 + 800 + 2 * replica.settings.page_tokens
    assert replica.meters.loaded_tokens > 0
    assert replica.evictions.host.used_tokens == 0


def test_without_a_host_it_is_computed_again_at_the_servers_expense():
    replica, _ = with_urgent(SMALL)
    ledger = replica.queue.account.ledger
    assert (ledger.usage("a").extend_tokens, ledger.usage("a").output_tokens) == (300, 60)
    assert replica.meters.extend_tokens > 2 * 300 + 800
    assert replica.meters.loaded_tokens == 0


def test_a_step_that_needs_what_has_not_left_yet_waits_for_the_link():
    replica, events = with_urgent(replace(HOST, host_token_s=1.0))
    assert replica.meters.host_wait_s > 100
    assert next(event.t_s for event in events if isinstance(event, Progress) and event.id == "new") > 300


def test_a_policy_without_evictions_takes_nothing_back():
    _, events = with_urgent(SMALL, evictions=0)
    assert [event.id for event in events if isinstance(event, Finished)] == ["old", "new"]


@pytest.mark.slow
@given(st.integers(0, 10_000), st.integers(0, 3000))
@hypothesis_settings(max_examples=examples(60))
def test_nothing_is_lost_or_said_twice_whatever_is_taken_back_when(seed, host_tokens):
    """Every request ends once, with all of its answer; tokens are told in order, once; the pool and the host add up."""
    rng = Random(seed)
    settings = replace(
        SMALL,
        kv_tokens=1024,
        progress_steps=1,
        host_tokens=host_tokens,
        host_token_s=rng.choice([0.0, 0.01, 0.5]),
    )
    replica = new(settings, Slo(evictions=16), cost=Seconds(0.5, 0.01, 0.0, 0.001), events=False)
    events: list[Event] = []
    now_s, asked = 0.0, dict[str, SimRequest]()
    while len(asked) < 40 or replica.next_s < inf:
        now_s += rng.expovariate(1.0)
        if len(asked) < 40 and rng.random() < 0.5:
            tier = rng.choice([0, 1, 1])
            one = request(
                f"r{len(asked)}", rng.randrange(1, 250), rng.randrange(1, 60), client=rng.choice("ab"), tier=tier,
                deadline_s=None if tier else now_s + rng.expovariate(0.1),
            )  # fmt: skip
            asked[one.id] = one
            events += replica.arrive(one, now_s)
        running = [job.id for job in replica.queue.running()]
        if running and rng.random() < 0.05:
            events += replica.abort(rng.choice(running), now_s)
        events += replica.advance(now_s)
        replica.check_pool()
        assert 0 <= replica.evictions.host.used_tokens <= host_tokens
    ends = [event for event in events if isinstance(event, Finished)]
    assert sorted(event.id for event in ends) == sorted(asked)
    for end in ends:
        told = told_of(events, end.id)
        assert told == sorted(set(told))
        assert end.aborted or end.output_tokens == asked[end.id].output_tokens
        assert (
            end.answer == answer(asked[end.id].tokens, asked[end.id].output_tokens)[: 4 * end.output_tokens]
        )
    assert replica.evictions.host.used_tokens == 0
    assert replica.queue.account.ledger.ok


# ---- the host's pool


def test_the_host_keeps_whole_contexts_and_never_more_than_it_holds():
    host = HostPool(100, 0.1)
    assert host.keep("a", 60, 0.0)
    assert not host.keep("b", 60, 0.0)
    assert (host.of("a"), host.of("b"), host.used_tokens) == (60, 0, 60)
    host.drop("a")
    assert host.keep("b", 60, 0.0)


def test_the_link_carries_one_copy_after_the_other():
    host = HostPool(1000, 0.1)
    host.keep("a", 100, 0.0)
    host.keep("b", 100, 0.0)
    assert host.wait_s(200, 0.0) == 0.0
    assert host.wait_s(100, 0.0) == pytest.approx(10.0)
    assert host.wait_s(0, 4.0) == pytest.approx(16.0)
    assert host.load_s(50, 4.0) == pytest.approx(21.0)
    assert host.wait_s(0, 20.0) == 0.0


# ---- swap


def test_a_swap_drops_the_cache_and_requests_wait_for_it():
    replica = new(SMALL, events=True)
    prompt = packed(*range(32))
    replica.arrive(request("a", prompt, 2), 0.0)
    drain(replica)
    assert replica.cache.tokens
    told = replica.swap(Seconds(2.0, 0.0, 0.0, 0.0), replace(SMALL, kv_tokens=2048), 30.0, 10.0)
    assert any(isinstance(event, Removed) for event in told)
    assert not replica.cache.tokens
    assert replica.next_s == inf
    replica.arrive(request("b", prompt, 2), 20.0)
    assert replica.next_s == 40.0
    events = drain(replica)
    assert [(event.id, event.t_s) for event in events if isinstance(event, Finished)] == [("b", 44.0)]
    assert finished(events)["b"].cached_tokens == 0
    assert (replica.meters.swaps, replica.meters.swap_s) == (1, 30.0)
    replica.check_pool()


def test_nobody_loses_a_request_to_a_swap():
    replica = new(SMALL, events=False)
    replica.arrive(request("r", 20, 7), 0.0)
    with pytest.raises(ValueError, match="1 requests are here"):
        replica.swap(STEP, SMALL, 5.0, 1.0)
    drain(replica)
    with pytest.raises(ValueError, match="keep their size"):
        replica.swap(STEP, replace(SMALL, page_tokens=8), 5.0, 100.0)
