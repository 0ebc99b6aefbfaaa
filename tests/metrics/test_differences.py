"""Differences from readings, beside the same measure from the whole history; and never above it."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.core.fairness import Curve, service_difference
from sglang_fair.metrics.differences import MOST_READINGS, WINDOW_S, Differences, Waiting

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]), st.sampled_from(["charge", "come", "go", "read"]), st.floats(0, 100)
    ),
    max_size=120,
)


@given(STEPS)
def test_it_is_the_largest_of_intervals_that_begin_with_a_reading(
    steps: list[tuple[str, str, float]],
) -> None:
    """A client comes, is served, goes, comes again: only unbroken backlogs count, and the truth is never exceeded."""
    differences, now_s, backlogs = Differences(), 0.0, 0
    service, waiting = dict.fromkeys("abc", 0.0), dict[str, int]()
    events: dict[str, list[tuple[float, float]]] = {name: [] for name in "abc"}
    since: dict[str, float] = {}
    readings: list[tuple[float, dict[str, tuple[int, float]]]] = []
    for client, what, units in steps:
        now_s += WINDOW_S / MOST_READINGS / 4  # so that some readings are not kept
        if what == "charge":
            service[client] += units
            events[client].append((now_s, units))
        elif what == "come" and client not in waiting:
            backlogs += 1
            waiting[client], since[client] = backlogs, now_s
        elif what == "go":
            waiting.pop(client, None)
        elif what == "read":
            differences.read(now_s, {one: Waiting(number, service[one]) for one, number in waiting.items()})
            found = [
                abs((service[f] - before[f][1]) - (service[g] - before[g][1]))
                for at, before in readings
                if at >= now_s - WINDOW_S
                for f, g in combinations(sorted(waiting), 2)
                if before.get(f, (0,))[0] == waiting[f] and before.get(g, (0,))[0] == waiting[g]
            ]
            assert differences.difference == max(found, default=None)
            assert found or differences.jain is None
            if differences.difference is not None:
                curves = {one: Curve.of(events[one]) for one in waiting}
                lasts = {one: [(since[one], now_s + 1)] for one in waiting}
                truth = service_difference(curves, lasts)
                assert truth is not None
                assert differences.difference <= truth + 1e-9
            if not readings or now_s - readings[-1][0] >= WINDOW_S / MOST_READINGS:
                readings.append((now_s, {one: (number, service[one]) for one, number in waiting.items()}))


def test_a_new_weight_begins_anew() -> None:
    differences = Differences()
    differences.read(0, {"a": Waiting(1, 10), "b": Waiting(2, 10)})
    differences.read(5, {"a": Waiting(1, 30), "b": Waiting(2, 15)})
    assert (differences.difference, differences.jain) == (15, (25**2) / (2 * (400 + 25)))
    differences.read(10, {"a": Waiting(1, 20, 2.0), "b": Waiting(2, 15)})
    assert differences.difference is None


@pytest.mark.slow
def test_readings_are_bounded() -> None:
    differences = Differences()
    for at in range(10_000):
        differences.read(at / 100, {"a": Waiting(1, at), "b": Waiting(2, 0)})
    kept = [at for at, _ in differences._readings]
    assert len(kept) <= MOST_READINGS + 1
    assert all(later - earlier >= WINDOW_S / MOST_READINGS for earlier, later in pairwise(kept))
