"""Measures of fairness on curves with known answers, and the two differences against brute force."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.core.fairness import (
    Curve,
    common,
    jain,
    merge,
    service_difference,
    service_lag,
    unmet_difference,
)

A = Curve.of([(1.0, 10.0), (3.0, 20.0)])
B = Curve.of([(2.0, 40.0)])


def test_jain_is_one_when_equal_and_one_in_n_when_one_has_all():
    assert jain([5.0, 5.0, 5.0]) == pytest.approx(1.0)
    assert jain([9.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert jain([7.0]) == pytest.approx(1.0)


def test_jain_is_undefined_when_nobody_got_anything():
    assert jain([]) is None
    assert jain([0.0, 0.0]) is None


def test_a_curve_is_right_continuous_and_takes_events_in_any_order():
    assert Curve.of([(3.0, 20.0), (1.0, 10.0)]) == A
    assert [A.at(time_s) for time_s in (0.0, 0.999, 1.0, 2.9, 3.0, 9.0)] == [0, 0, 10, 10, 30, 30]
    assert A.between(1.0, 3.0) == 20


def test_what_a_client_did_not_ask_for_is_no_difference():
    received = {"light": 2.0, "starved": 3.0, "most": 10.0}
    requested = {"light": 2.5, "starved": 20.0, "most": 30.0}
    assert unmet_difference(received, requested) == 0.5 + 7.0 + 0.0
    assert unmet_difference({"one": 1.0}, {"one": 1.0}) is None


def test_unions_and_intersections_of_intervals():
    assert merge([(4, 5), (0, 1), (1, 2), (3, 3)]) == [(0, 2), (4, 5)]
    assert common([(0, 2), (3, 6)], [(1, 4), (5, 7)]) == [(1, 2), (3, 4), (5, 6)]
    assert common([(0, 1)], [(1, 2)]) == []


def test_difference_counts_only_while_both_are_backlogged():
    curves = {"a": A, "b": B}
    assert service_difference(curves, {"a": [(0, 10)], "b": [(0, 10)]}) == 40
    assert service_difference(curves, {"a": [(0, 10)], "b": [(2.5, 10)]}) == 20
    assert service_difference(curves, {"a": [(0, 2)], "b": [(2, 10)]}) is None
    assert service_difference({"a": A}, {"a": [(0, 10)]}) is None


def test_lag_needs_only_the_client_behind_to_be_backlogged():
    curves = {"a": A, "b": B}
    assert service_lag(curves, {"a": [(0, 10)]}) == 40
    assert service_lag(curves, {"b": [(0, 10)]}) == 20
    assert service_lag(curves, {}) is None


EVENTS = st.lists(st.tuples(st.integers(0, 12).map(float), st.integers(1, 9).map(float)), max_size=8)
SPAN = st.tuples(st.integers(0, 6), st.integers(7, 13)).map(lambda pair: (float(pair[0]), float(pair[1])))


@given(EVENTS, EVENTS, SPAN)
def test_differences_equal_brute_force_over_all_pairs_of_times(first, second, span):
    f, g = Curve.of(first), Curve.of(second)
    times = [half / 2 for half in range(int(span[0] * 2), int(span[1] * 2))]
    gaps = [f.between(t1, t2) - g.between(t1, t2) for t1, t2 in combinations(times, 2)]
    both = {"f": [span], "g": [span]}
    assert service_difference({"f": f, "g": g}, both) == max(map(abs, gaps))
    assert service_lag({"f": f, "g": g}, {"g": [span]}) == max(0.0, *gaps)
