"""Numbers of a curve over time. A curve without values has no number, so that no claim holds for lack of data."""

from collections.abc import Sequence
from math import inf
from statistics import fmean, pstdev
from typing import TypeAlias

Line: TypeAlias = tuple[Sequence[float], Sequence[float | None]]
"""Times, and values; None where the value is unknown."""


def between(line: Line, start: float = -inf, end: float = inf) -> list[float]:
    """The known values at times in [start, end]."""
    times, values = line
    return [
        value for time, value in zip(times, values, strict=True) if value is not None and start <= time <= end
    ]


def average(line: Line, start: float = -inf, end: float = inf) -> float:
    """The mean value in [start, end]. Raises ValueError if no value is known."""
    return fmean(_some(line, start, end))


def largest(line: Line, start: float = -inf, end: float = inf) -> float:
    """The largest value in [start, end]. Raises ValueError if no value is known."""
    return max(_some(line, start, end))


def variation(line: Line, start: float = -inf, end: float = inf) -> float:
    """The standard deviation over the mean. Raises ValueError if no value is known, or the mean is 0."""
    values = _some(line, start, end)
    if not (mean := fmean(values)):
        raise ValueError("the mean of a curve is 0: it has no variation")
    return pstdev(values) / mean


def _some(line: Line, start: float, end: float) -> list[float]:
    if not (values := between(line, start, end)):
        raise ValueError(f"a curve has no value from {start:g} to {end:g}")
    return values
