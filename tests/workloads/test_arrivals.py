"""Arrivals: the stated mean and variation, the same times for the same seed, and what each kind adds."""

from itertools import islice, pairwise
from random import Random
from statistics import mean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.arrivals import (
    EvenArrivals,
    GammaArrivals,
    GivenArrivals,
    OnOffArrivals,
    PhasedArrivals,
    RampArrivals,
)


def gaps(arrivals: GammaArrivals, count: int) -> list[float]:
    times = list(islice(arrivals.times(Random("gaps")), count + 1))
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_mean_and_variation_are_as_stated(cv):
    drawn = gaps(GammaArrivals(rate_per_s=4.0, cv=cv), 20_000)
    assert mean(drawn) == pytest.approx(0.25, rel=0.05)
    assert pstdev(drawn) / mean(drawn) == pytest.approx(cv, rel=0.05)


POSITIVE = st.floats(0.05, 20.0)
RENEWALS = st.one_of(
    st.builds(GammaArrivals, POSITIVE, st.floats(0.0, 3.0)),
    st.builds(EvenArrivals, POSITIVE, first_s=st.one_of(st.none(), st.floats(0.0, 5.0))),
    st.builds(RampArrivals, st.floats(0.0, 5.0), POSITIVE, POSITIVE),
    st.builds(GivenArrivals, st.lists(st.floats(0.0, 50.0), max_size=20).map(sorted)),
)
ARRIVALS = st.recursive(
    RENEWALS,
    lambda inner: st.one_of(
        st.builds(OnOffArrivals, inner, POSITIVE, st.floats(0.0, 20.0)),
        st.builds(PhasedArrivals, st.lists(st.tuples(inner, POSITIVE), min_size=1, max_size=3)),
    ),
    max_leaves=4,
)


@given(ARRIVALS, st.integers(0, 99), st.floats(0.1, 40.0), st.floats(0.0, 1.0), st.integers(0, 30))
def test_every_schedule_is_in_order_in_time_and_the_beginning_of_a_longer_one(
    arrivals, seed, until_s, part, most
):
    times = arrivals.schedule(Random(seed), until_s=until_s)
    assert list(times) == sorted(times)
    assert all(0 <= time_s < until_s for time_s in times)
    assert times == arrivals.schedule(Random(seed), until_s=until_s)
    assert arrivals.schedule(Random(seed), until_s=until_s, most=most) == times[:most]
    shorter = arrivals.schedule(Random(seed), until_s=until_s * part)
    assert shorter == times[: len(shorter)]
    assert all(time_s >= until_s * part for time_s in times[len(shorter) :])


def test_even_arrivals_have_equal_gaps_and_are_out_of_step_unless_told():
    times = EvenArrivals(1.5).schedule(Random(1), until_s=60.0)
    assert len(times) == 90
    assert [b - a for a, b in pairwise(times)] == pytest.approx([2 / 3] * 89)
    assert times[0] != EvenArrivals(1.5).schedule(Random(2), until_s=60.0)[0]
    assert EvenArrivals(0.5, first_s=1.0).schedule(Random(1), until_s=6.0) == (1.0, 3.0, 5.0)


@given(st.integers(0, 99), POSITIVE, st.floats(0.1, 20.0))
def test_nothing_arrives_in_an_off_phase_and_all_of_the_rate_in_the_others(seed, on_s, off_s):
    times = OnOffArrivals(GammaArrivals(30.0), on_s, off_s).schedule(Random(seed), until_s=100.0)
    assert all(time_s % (on_s + off_s) <= on_s * (1 + 1e-9) for time_s in times)
    clock = [time_s - time_s // (on_s + off_s) * off_s for time_s in times]
    whole, part_s = divmod(100.0, on_s + off_s)
    inner = GammaArrivals(30.0).schedule(Random(seed), until_s=whole * on_s + min(part_s, on_s))
    assert clock == pytest.approx(inner[: len(clock)], abs=1e-6)
    assert len(inner) - len(clock) <= 1


def test_a_ramp_gains_speed_evenly_and_then_keeps_it():
    times = RampArrivals(0.2, 2.0, over_s=600.0).schedule(Random(1), until_s=1200.0)
    for minute in range(20):
        expected = 60 * min(0.2 + 1.8 * (minute + 0.5) / 10, 2.0)
        assert sum(60 * minute <= time_s < 60 * minute + 60 for time_s in times) == pytest.approx(
            expected, abs=1
        )


def test_phases_follow_each_other_and_do_not_touch_each_other():
    def shift(first_rate: float) -> PhasedArrivals:
        return PhasedArrivals(
            [
                (OnOffArrivals(GammaArrivals(first_rate)), 300.0),
                (GammaArrivals(1.0), 300.0),
                (GammaArrivals(1.5), 300.0),
            ]
        )

    times = shift(0.5).schedule(Random(1), until_s=2000.0)
    counts = [sum(start <= time_s < start + 300 for time_s in times) for start in (0, 300, 600, 900)]
    assert counts == pytest.approx([90, 300, 450, 0], rel=0.2)
    other = shift(5.0).schedule(Random(1), until_s=2000.0)
    assert [t for t in times if t >= 300] == [t for t in other if t >= 300]


@pytest.mark.parametrize(
    "make",
    [
        lambda: EvenArrivals(0.0),
        lambda: EvenArrivals(1.0, first_s=-1.0),
        lambda: GammaArrivals(1.0, cv=-1.0),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make):
    with pytest.raises(ValueError) as error:
        make()
    assert "\n" not in str(error.value)
