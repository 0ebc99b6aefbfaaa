"""Groups: who is with whom, their sums, and that one which has begun stays and ends."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.placement.qlm.groups import Entry, Group, Groups
from tests.support.budget import examples


def queued(
    name: str,
    *,
    model: str = "m",
    slo_class: str = "k",
    tokens: int = 10,
    output: float = 10.0,
    since_s: float = 0.0,
    slo_s: float = 20.0,
) -> Entry:
    return Entry(name, "c", model, slo_class, tokens, output, since_s, since_s + slo_s, 25.0)


def waiting(group: Group) -> list[str]:
    return [request.id for _, request in group.line]


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(st.integers(0, 2**32), st.sampled_from([1.0, 4.0]), st.sampled_from([1.0, 3.0]))
def test_qlm_p1_each_request_is_in_one_pure_group_of_limited_size_in_order(
    seed: int, delta: float, batch: float
) -> None:
    """Whatever comes, goes, is judged anew, taken back or gives up; and the sums are those of the members."""
    rng, groups = Random(seed), Groups(delta, batch)
    requests: dict[str, Entry] = {}
    tiers: dict[str, int] = {}
    running: set[str] = set()
    for number in range(120):
        step, name = rng.random(), str(number)
        idle = [one for one in requests if one not in running]
        if step < 0.55:
            request = queued(
                name, model=rng.choice("ab"), slo_class=rng.choice("kl"), tokens=rng.randrange(10, 5000),
                output=rng.uniform(1, 500), since_s=number - rng.choice([0, 0, 0, 30]), slo_s=rng.choice([5, 50]),
            )  # fmt: skip
            requests[name], tiers[name] = request, rng.randrange(2)
            groups.add(request, tiers[name])
        elif step < 0.7 and len(groups):
            group = rng.choice(list(groups))
            worker = group.begun_on or rng.choice(["v", "w"])
            if len(group):
                running.add(groups.take(group, worker).id)
        elif step < 0.8 and idle:
            name = rng.choice(idle)
            group = groups.of(name)
            assert group is not None
            tiers[name] = 0
            groups.judge(name, 0)
        elif step < 0.85 and running:
            name = rng.choice(sorted(running))
            groups.put_back(name)
            running.discard(name)
            assert waiting(groups.of(name))[0] in requests  # type: ignore[arg-type]
        elif step < 0.95 and requests:
            name = rng.choice(list(requests))
            groups.remove(name)
            del requests[name], tiers[name]
            running.discard(name)
        else:
            groups.worker_down(rng.choice(["v", "w"]))
        check(groups, requests, tiers, running)


def check(groups: Groups, requests: dict[str, Entry], tiers: dict[str, int], running: set[str]) -> None:
    seen = Counter(name for group in groups for name in waiting(group))
    assert seen == Counter(name for name in requests if name not in running)
    assert sum(group.running for group in groups) == len(running)
    for group in groups:
        own = [requests[name] for name in waiting(group)]
        assert own or group.running, "a group that is over is gone"
        for request in own:
            assert (request.model, request.slo_class) == group.kind[:2]
            assert tiers[request.id] == group.kind.tier
        assert len(group) <= groups.limit(group.kind.model)
        keys = [key for key, _ in group.line]
        assert keys == sorted(keys)
        assert group.prompt_tokens == sum(one.prompt_tokens for one in own)
        assert group.output_tokens == pytest.approx(sum(one.expected_output_tokens for one in own))
        assert group.output_variance == pytest.approx(25.0 * len(own))
        if own:
            assert group.deadlines[0] == min(one.deadline_s for one in own)


def test_halves_keep_the_order_and_the_place_of_the_older_one() -> None:
    groups = Groups(delta=2, batch=2)
    for number in range(5):
        groups.add(queued(str(number), since_s=number), 0)
    older, newer = groups
    assert (waiting(older), waiting(newer)) == (["0", "1", "2"], ["3", "4"])
    assert groups.drain_born() == [(older, None), (newer, older)]
    groups.add(queued("an old interaction's", since_s=0.5), 0)
    assert waiting(older) == ["0", "an old interaction's", "1", "2"]


def test_a_group_that_has_begun_stays_where_it_is_and_ends_whoever_keeps_sending() -> None:
    """A flood of calls that all claim to be of an interaction that began at 0: the group is not theirs for ever."""
    groups = Groups(delta=1, batch=10)
    begun = groups.add(queued("first"), 0)
    assert groups.take(begun, "w").id == "first"
    with pytest.raises(ValueError, match="has begun on w"):
        groups.take(begun, "v")
    for number in range(1000):
        groups.add(queued(str(number)), 0)
        if len(begun):
            groups.remove(groups.take(begun, "w").id)
    groups.remove("first")
    assert groups.by_number.get(begun.number) is None
    assert begun.joined == 10
    assert sum(len(group) for group in groups) == 1000 - 9


def test_judging_moves_a_request_to_its_place_also_from_a_group_that_has_begun() -> None:
    groups = Groups()
    groups.add(queued("a", since_s=1), 0)
    ahead = groups.add(queued("b", since_s=0), 1)
    groups.judge("b", 0)
    assert groups.of("b") is groups.of("a")
    assert waiting(groups.of("a")) == ["b", "a"]  # type: ignore[arg-type]
    assert groups.by_number.get(ahead.number) is None
    begun = groups.add(queued("c"), 1)
    groups.add(queued("d"), 1)
    groups.take(begun, "w")
    groups.judge("c", 0)
    groups.judge("nobody", 0)
    assert groups.of("d") is groups.of("c") is begun
    groups.judge("d", 0)
    assert groups.of("d") is groups.of("a")


def test_an_id_that_comes_twice_is_there_once() -> None:
    groups = Groups()
    group = groups.add(queued("a"), 0)
    assert groups.add(queued("a", model="other"), 1) is group
    assert (len(group), len(groups), group.joined) == (1, 1, 1)
    groups.remove("a")
    assert groups.remove("a") is groups.of("a") is None
    assert len(groups) == 0


def test_what_was_taken_back_goes_before_what_never_ran() -> None:
    groups = Groups()
    group = groups.add(queued("a", since_s=1), 0)
    for name in "bc":
        groups.add(queued(name, since_s=2), 0)
    assert [groups.take(group, "w").id for _ in range(2)] == ["a", "b"]
    groups.add(queued("older", since_s=0), 0)
    groups.put_back("b")
    assert waiting(group) == ["b", "older", "c"]


def test_a_batch_that_was_measured_splits_what_is_too_large_now() -> None:
    groups = Groups(delta=4, batch=100)
    for number in range(100):
        groups.add(queued(str(number), since_s=number), 0)
    assert len(groups) == 1
    groups.set_batch("m", 5)
    assert max(len(group) for group in groups) <= 20
    assert [name for group in sorted(groups, key=lambda one: one.since) for name in waiting(group)] == [
        str(number) for number in range(100)
    ]
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="above 0"):
            groups.set_batch("m", bad)


@pytest.mark.parametrize(
    "odd", [{"tokens": -1}, {"output": float("nan")}, {"since_s": float("inf")}, {"slo_s": float("nan")}]
)
def test_numbers_that_no_request_has_are_refused(odd: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="request 'a'"):
        queued("a", **odd)  # type: ignore[arg-type]
