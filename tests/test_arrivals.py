"""Gamma arrivals: the stated mean and variation, and the same times for the same seed."""

from itertools import islice, pairwise
from random import Random
from statistics import mean, pstdev

import pytest

from workloads.arrivals import GammaArrivals


def gaps(arrivals: GammaArrivals, count: int) -> list[float]:
    times = list(islice(arrivals.times(Random("gaps")), count + 1))
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_mean_and_variation_are_as_stated(cv):
    drawn = gaps(GammaArrivals(rate_per_s=4.0, cv=cv), 20_000)
    assert mean(drawn) == pytest.approx(0.25, rel=0.05)
    assert pstdev(drawn) / mean(drawn) == pytest.approx(cv, rel=0.05)


def test_without_variation_arrivals_are_evenly_spaced():
    assert gaps(GammaArrivals(rate_per_s=2.0, cv=0.0), 50) == pytest.approx([0.5] * 50)


def test_the_same_seed_gives_the_same_times_and_another_seed_others():
    arrivals = GammaArrivals(rate_per_s=3.0)
    assert arrivals.schedule(Random("a"), until_s=20) == arrivals.schedule(Random("a"), until_s=20)
    assert arrivals.schedule(Random("a"), until_s=20) != arrivals.schedule(Random("b"), until_s=20)


def test_a_schedule_ends_in_time_and_with_its_number():
    arrivals = GammaArrivals(rate_per_s=10.0)
    times = arrivals.schedule(Random(1), until_s=5.0)
    assert all(0 <= time_s < 5.0 for time_s in times)
    assert list(times) == sorted(times)
    assert arrivals.schedule(Random(1), until_s=5.0, most=3) == times[:3]


def test_the_first_arrival_can_be_given():
    assert GammaArrivals(rate_per_s=0.01, first_s=0.0).schedule(Random(1), until_s=1.0) == (0.0,)
    with pytest.raises(ValueError, match="must be at 0 s or later"):
        GammaArrivals(rate_per_s=1.0, first_s=-1.0)


@pytest.mark.parametrize(("rate", "cv"), [(0.0, 1.0), (-1.0, 1.0), (float("inf"), 1.0), (1.0, -0.5)])
def test_impossible_parameters_are_refused(rate, cv):
    with pytest.raises(ValueError, match="must be"):
        GammaArrivals(rate_per_s=rate, cv=cv)
