"""Measures of fairness, as functions of what each client received and when.

A client's service is a right-continuous step function of time, `Curve`: units received until then. The
units are the caller's choice of meter (DLPM §7): *client-side* service counts the full prompt, *actual*
service only the tokens that were computed. Times are seconds on any one clock; intervals are half-open,
[start, end). A measure that is undefined on its input is None, never 0.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, permutations

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """Cumulative service: `totals[k]` units had been received from `times_s[k]` on, 0 before the first."""

    times_s: tuple[float, ...]
    totals: tuple[float, ...]

    @classmethod
    def of(cls, events: Iterable[tuple[float, float]]) -> "Curve":
        """The curve of (time, units received at that time) in any order."""
        ordered = sorted(events)
        return cls(tuple(time_s for time_s, _ in ordered), tuple(accumulate(units for _, units in ordered)))

    def at(self, time_s: float) -> float:
        """Units received until `time_s`, that instant included."""
        count = bisect_right(self.times_s, time_s)
        return self.totals[count - 1] if count else 0.0

    def between(self, start_s: float, end_s: float) -> float:
        """W(start, end): units received after `start_s` and until `end_s`."""
        return self.at(end_s) - self.at(start_s)


def jain(values: Sequence[float]) -> float | None:
    """Jain's index (Σx)² / (n·Σx²): 1 when all are equal, 1/n when one has all. None if nobody got any."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def unmet_difference(received: Mapping[str, float], requested: Mapping[str, float]) -> float | None:
    """The service difference of VTC's tables at one time, from rates in units a second.

    Against the most-served client, each other client i misses min(s_max - s_i, |r_i - s_i|): what it
    received less does not count as far as it did not ask for it. The sum over clients; None below two.
    """
    if len(received) < 2:
        return None
    most = max(received.values())
    return sum(min(most - rate, abs(requested[client] - rate)) for client, rate in received.items())


def common(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The times in both sets; each set is a union of intervals, in any order."""
    left, right = merge(first), merge(second)
    shared: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            shared.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return shared


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as disjoint, ordered intervals; touching ones are joined, empty ones dropped."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def service_difference(
    curves: Mapping[str, Curve], backlogged: Mapping[str, Sequence[Interval]]
) -> float | None:
    """Largest |W_f(t1, t2) - W_g(t1, t2)| over pairs of clients and t1 < t2 with both backlogged throughout.

    This is the quantity that DLPM's Theorems 4.1 and 5.1 bound. None if no two clients were ever
    backlogged at the same time.
    """
    spreads = [
        _spread(curves[f], curves[g], interval)
        for f, g in combinations(sorted(curves), 2)
        for interval in common(backlogged.get(f, ()), backlogged.get(g, ()))
    ]
    return max(spreads, default=None)


def service_lag(curves: Mapping[str, Curve], backlogged: Mapping[str, Sequence[Interval]]) -> float | None:
    """Largest W_g(t1, t2) - W_f(t1, t2) with f backlogged throughout and g any other client.

    What DLPM's Theorems 4.2 and 5.2 bound: how far a client that had work waiting fell behind another.
    None if no client was ever backlogged, or there is only one.
    """
    lags = [
        _rise(curves[g], curves[f], interval)
        for f, g in permutations(sorted(curves), 2)
        for interval in merge(backlogged.get(f, ()))
    ]
    return max(lags, default=None)


def _differences(ahead: Curve, behind: Curve, interval: Interval) -> list[float]:
    """W_ahead - W_behind at the interval's start and after each later event inside it, in order of time."""
    start, end = interval
    times = {start}
    for curve in (ahead, behind):
        first, last = bisect_right(curve.times_s, start), bisect_right(curve.times_s, end)
        times.update(time_s for time_s in curve.times_s[first:last] if time_s < end)
    return [ahead.at(time_s) - behind.at(time_s) for time_s in sorted(times)]


def _spread(first: Curve, second: Curve, interval: Interval) -> float:
    differences = _differences(first, second, interval)
    return max(differences) - min(differences)


def _rise(ahead: Curve, behind: Curve, interval: Interval) -> float:
    """Largest later value minus earlier value: one pass with the smallest value so far."""
    largest, smallest = 0.0, float("inf")
    for difference in _differences(ahead, behind, interval):
        smallest = min(smallest, difference)
        largest = max(largest, difference - smallest)
    return largest
