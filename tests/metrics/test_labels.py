"""Who has a label, attacked by whoever invents names: series stay few, no counter falls, nothing counts twice."""

from collections import Counter
from math import log2
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.metrics.labels import MOST_TENANTS, OTHER, Counted, Labels, Tallies


def most_labels(most: int, largest: float) -> float:
    """The bound in the head of the module."""
    return most * (1 + log2(max(1.0, largest)))


SERVICES = st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1e6)), max_size=200)


@given(SERVICES, st.integers(0, 5))
def test_labels_are_few_and_kept(charges: list[tuple[int, float]], most: int) -> None:
    labels, had, known = Labels(most), Counter[str](), set[str]()
    for number, units in charges:
        client = f"c{number}"
        had[client] += units  # type: ignore[assignment]
        got = labels.offer(client, had[client])
        assert got == (client in labels) == (labels.of(client) == client)
        assert known <= set(labels), "a label is kept"
        known = set(labels)
        assert len(labels) == len(known) <= most_labels(most, max(had.values()))


@given(SERVICES, st.integers(1, 5))
def test_who_gets_most_by_far_has_a_label(charges: list[tuple[int, float]], most: int) -> None:
    """Whatever names came before it: nobody can take all places."""
    labels, had = Labels(most), Counter[str]()
    for number, units in charges:
        had[f"c{number}"] += units  # type: ignore[assignment]
        labels.offer(f"c{number}", had[f"c{number}"])
    assert labels.offer("large", max(1.0, 2 * max(had.values(), default=0.0)))


@pytest.mark.parametrize("grows", [1.0, 1.01, 2.0])
def test_ten_thousand_invented_names(grows: float) -> None:
    """Each with one request, of equal size or of sizes made to earn as many labels as they can."""
    counted, sizes, labels = Counted(20), Random(7), set()
    size, largest, total, series = 100.0, 0.0, 0.0, Counter[str]()
    for number in range(10_000):
        size = min(size * grows, 1e9) if number % 20 == 19 else size
        tokens = size * sizes.uniform(1.0, 1.0 if grows == 1.0 else grows)
        label = counted.count(f"invented-{number}", tokens)
        before = series.copy()
        series[label] += tokens  # type: ignore[assignment]
        total, largest = total + tokens, max(largest, tokens)
        assert all(series[one] >= count for one, count in before.items()) or number % 100
        labels.add(label)
    assert len(labels - {OTHER}) <= most_labels(20, largest)
    if grows == 1.0:
        assert len(labels) == 21
    assert sum(series.values()) == pytest.approx(total), "nothing counts twice"
    assert counted.count("real", 4 * largest) == "real"
    assert counted.count("real", 1) == "real"


def test_tenants_have_theirs_and_cannot_be_invented_without_end() -> None:
    labels = Labels(0)
    assert all(labels.admit(f"t{number}") for number in range(MOST_TENANTS))
    assert not labels.admit("one more")
    assert labels.admit("t0")
    assert len(labels) == MOST_TENANTS
    assert not labels.offer("rich", 1e9)


def test_a_tenant_keeps_its_label_when_it_leaves_the_file_and_a_client_when_it_comes_in() -> None:
    counted = Counted(1)
    assert counted.count("a", 10) == "a"
    assert counted.count("a", 10, is_tenant=True) == "a"
    assert counted.count("b", 1, is_tenant=True) == "b"
    assert counted.count("b", 1) == "b"
    for is_tenant in (False, True):
        assert counted.count(OTHER, 1e6, is_tenant=is_tenant) == OTHER, "a client of that name is one of them"
    assert set(counted.labels) == {"a", "b"}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 1000)), max_size=400))
def test_tallies_are_never_too_much_and_little_too_small(charges: list[tuple[int, int]]) -> None:
    tallies, truth, total = Tallies(10), Counter[int](), 0
    for client, amount in charges:
        truth[client] += amount
        total += amount
        had = tallies.add(str(client), amount)
        assert truth[client] - total / 10 <= had <= truth[client]
        assert len(tallies) <= 20
