"""Weights that requests tell: which one wins, what they cost, and what is left of them."""

from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.common.weights import KEPT, Weights
from tests.support.budget import examples

WEIGHT = st.sampled_from([0.001, 0.5, 1.0, 3.0, 1000.0])
TELLINGS = st.lists(st.tuples(st.sampled_from("abc"), WEIGHT, st.integers(0, 5)), max_size=30)


@settings(max_examples=examples(200))
@given(tellings=TELLINGS, by_hand=st.dictionaries(st.sampled_from("abcd"), WEIGHT))
def test_the_latest_version_wins_in_whatever_order_requests_come(tellings, by_hand):
    weights, latest = Weights(by_hand), dict[str, tuple[int, float]]()
    for client, weight, version in tellings:
        before = weights.of(client)
        changed = weights.tell(client, weight, version)
        if client not in latest or version >= latest[client][0]:
            latest[client] = version, weight
        assert changed == (weights.of(client) != before)
        for name in "abcd":
            assert weights.of(name) == (latest[name][1] if name in latest else by_hand.get(name, 1.0))
        assert not weights.is_news(client, latest[client][1], latest[client][0])
        in_force = [1.0, *map(weights.of, "abcd")]
        assert weights.smallest_ever() <= weights.smallest() <= min(in_force)


@settings(max_examples=examples(200))
@given(tellings=TELLINGS, owing=st.sets(st.sampled_from("abc")))
def test_a_weight_that_was_counts_until_nobody_is_left_whom_it_concerns(tellings, owing):
    weights = Weights()
    had: dict[str, list[float]] = {name: [1.0] for name in "abc"}
    for number, (client, weight, _) in enumerate(tellings):
        weights.tell(client, weight, number)
        had[client].append(weight)
    least = min([1.0, *(weight for each in had.values() for weight in each)])
    assert weights.smallest() == weights.smallest_ever() == least
    now = [weights.of(name) for name in "abc"]
    weights.settle(owing.__contains__, True)
    assert weights.smallest() == least, "who waits now may have waited then"
    for _ in range(2):
        weights.settle(owing.__contains__, True)
    assert weights.smallest() == min([1.0, *now, *(weight for name in owing for weight in had[name])])
    assert weights.smallest_ever() == least


def test_by_hand_holds_where_no_request_tells_otherwise():
    weights = Weights({"a": 2.0})
    weights.tell("a", 5.0, 1)
    weights.set("a", 7.0)
    assert weights.of("a") == 5.0
    weights.set("b", 7.0)
    assert weights.items() == {"a": 5.0, "b": 7.0}


@pytest.mark.parametrize("weight", [0, -1, inf, nan, True, "3", None])
def test_what_is_no_weight_changes_nothing(weight):
    weights = Weights()
    for change in (lambda: weights.set("a", weight), lambda: weights.tell("a", weight, 1)):
        with pytest.raises(ValueError, match="must be a positive number"):
            change()
    assert weights.items() == {}


@pytest.mark.slow
def test_names_with_weights_do_not_stay_for_ever():
    weights, forgets = Weights({"set": 0.5}), 0
    needed = {f"{number}" for number in range(100)}
    for number in range(10_000):
        weights.tell(f"{number}", 0.01 if number == 5_000 else 2.0, number)
        if weights.are_many:
            weights.forget(needed.__contains__)
            forgets += 1
        assert len(weights.items()) <= KEPT + 2
    assert forgets <= 10_000 / (KEPT - len(needed)) + 1
    assert all(weights.of(name) == 2.0 for name in needed)
    assert weights.of("set") == 0.5
    weights.forget(needed.__contains__)
    assert weights.smallest() == 0.5
    assert weights.smallest_ever() == 0.01
    assert weights.tell("9999", 3.0, 1), (
        "of who is forgotten, nothing is known: the next request tells it again"
    )
