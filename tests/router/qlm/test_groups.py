"""Groups: who is with whom, their sums, and that one which has begun stays and ends."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.placement.contract import Request
from router.placement.qlm.groups import Group, Groups
from sglang_fair.common.deadlines import Promise
from tests.support.budget import examples


def add(
    groups: Groups,
    name: str,
    *,
    model: str = "m",
    slo_class: str = "k",
    tokens: int = 10,
    output: float = 10.0,
    since_s: float = 0.0,
    slo_s: float = 20.0,
) -> Group:
    request = Request(name, "c", b"", tokens, 0, output, model=model)
    return groups.add(request, Promise(slo_class, slo_s, since_s + slo_s))


def waiting(group: Group) -> list[str]:
    return [entry.request.id for entry in group.line]


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(st.integers(0, 2**32), st.sampled_from([1.0, 4.0]), st.sampled_from([1.0, 3.0]))
def test_qlm_p1_each_request_is_in_one_pure_group_of_limited_size_in_order(
    seed: int, delta: float, batch: float
) -> None:
    """Whatever comes, goes, is taken back, is late or gives up; and the sums are those of the members."""
    rng, groups = Random(seed), Groups(delta, batch)
    kinds: dict[str, tuple[str, str]] = {}
    running: set[str] = set()
    for number in range(120):
        step, name = rng.random(), str(number)
        if step < 0.6:
            kinds[name] = rng.choice("ab"), rng.choice("kl")
            add(
                groups, name, model=kinds[name][0], slo_class=kinds[name][1], tokens=rng.randrange(10, 5000),
                output=rng.uniform(1, 500), since_s=number - rng.choice([0, 0, 0, 30]), slo_s=rng.choice([5, 50]),
            )  # fmt: skip
        elif step < 0.75 and len(groups):
            group = rng.choice(list(groups))
            worker = group.begun_on or rng.choice(["v", "w"])
            if len(group):
                running.add(groups.take(group, worker).request.id)
        elif step < 0.8 and len(groups):
            groups.miss(rng.choice(list(groups)), float(number), 1.0, 3)
        elif step < 0.95 and kinds:
            name = rng.choice(list(kinds))
            groups.remove(name)
            del kinds[name]
            running.discard(name)
        else:
            groups.worker_down(rng.choice(["v", "w"]))
        check(groups, kinds, running)


def check(groups: Groups, kinds: dict[str, tuple[str, str]], running: set[str]) -> None:
    seen = Counter(name for group in groups for name in waiting(group))
    assert seen == Counter(name for name in kinds if name not in running)
    assert sum(group.running for group in groups) == len(running)
    for group in groups:
        own = [entry.request for entry in group.line]
        assert own or group.running, "a group that is over is gone"
        for request in own:
            model, slo_class = kinds[request.id]
            assert model == group.kind.model
            assert group.kind.late or slo_class == group.kind.slo_class.partition("~")[0]
        assert len(group) <= groups.limit(group.kind.model)
        keys = [entry.key for entry in group.line]
        assert keys == sorted(keys)
        assert group.prompt_tokens == sum(one.input_tokens for one in own)
        assert group.output_tokens == pytest.approx(sum(one.expected_output_tokens for one in own))
        assert group.output_variance == pytest.approx(sum(one.expected_output_tokens**2 for one in own))
        if own:
            assert group.deadlines[0] == min(entry.promise.due_s for entry in group.line)


def test_halves_keep_the_order_and_the_place_of_the_older_one() -> None:
    groups = Groups(delta=2, batch=2)
    for number in range(5):
        add(groups, str(number), since_s=number)
    older, newer = groups
    assert (waiting(older), waiting(newer)) == (["0", "1", "2"], ["3", "4"])
    assert groups.drain_born() == [(older, None), (newer, older)]
    add(groups, "an old interaction's", since_s=0.5)
    assert waiting(older) == ["0", "an old interaction's", "1", "2"]


def test_a_group_that_has_begun_stays_where_it_is_and_ends_whoever_keeps_sending() -> None:
    """A flood of calls that all claim to be of an interaction that began at 0: the group is not theirs for ever."""
    groups = Groups(delta=1, batch=10)
    begun = add(groups, "first")
    assert groups.take(begun, "w").request.id == "first"
    with pytest.raises(ValueError, match="has begun on w"):
        groups.take(begun, "v")
    for number in range(1000):
        add(groups, str(number))
        if len(begun):
            groups.remove(groups.take(begun, "w").request.id)
    groups.remove("first")
    assert groups.by_number.get(begun.number) is None
    assert begun.joined == 10
    assert sum(len(group) for group in groups) == 1000 - 9


def test_a_batch_that_was_measured_splits_what_is_too_large_now() -> None:
    groups = Groups(delta=4, batch=100)
    for number in range(100):
        add(groups, str(number), since_s=number)
    assert len(groups) == 1
    groups.set_batch("m", 5)
    assert max(len(group) for group in groups) <= 20
    assert [name for group in sorted(groups, key=lambda one: one.since) for name in waiting(group)] == [
        str(number) for number in range(100)
    ]
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="above 0"):
            groups.set_batch("m", bad)
