"""When programs arrive, drawn from a client's own seed.

Arrivals are decided before a run begins, so every scheduler is offered the same load at the same times. The basic
process is a renewal process: its gaps are drawn one by one from a Gamma distribution with shape 1/cv² and mean
1/rate. So cv = 1 is a Poisson process, cv = 0 is evenly spaced, cv > 1 is bursty. The others are built on it: ON and
OFF phases, a rate that changes, one process after another. `GivenArrivals` takes times from a trace.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from math import sqrt
from random import Random
from typing import Protocol


class Arrivals(Protocol):
    """When the programs of one client arrive."""

    def schedule(self, rng: Random, *, until_s: float, most: int | None = None) -> tuple[float, ...]:
        """The arrivals before `until_s`, in seconds from the start of the run, in order; at most `most`.

        Equal states of `rng` give equal times, and a shorter schedule is the beginning of a longer one.
        """


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """`rate_per_s` programs a second in the long run, with coefficient of variation `cv` of the gaps."""

    rate_per_s: float
    cv: float = 1.0
    first_s: float | None = None
    """When the first program arrives. None: the run starts inside a gap, so after a uniform part of one."""

    def __post_init__(self) -> None:
        if not 0 < self.rate_per_s < float("inf"):
            raise ValueError(f"an arrival rate must be a positive number, not {self.rate_per_s!r}")
        if not 0 <= self.cv < float("inf"):
            raise ValueError(f"a coefficient of variation must be at least 0, not {self.cv!r}")
        if self.first_s is not None and not 0 <= self.first_s < float("inf"):
            raise ValueError(f"the first arrival must be at 0 s or later, not {self.first_s!r}")

    def gap(self, rng: Random) -> float:
        mean_s = 1 / self.rate_per_s
        if self.cv == 0:
            return mean_s
        shape = 1 / self.cv**2
        return rng.gammavariate(shape, mean_s / shape)

    def times(self, rng: Random) -> Iterator[float]:
        """Arrival times in seconds from the start of the run, without end."""
        now_s = self.gap(rng) * rng.random() if self.first_s is None else self.first_s
        while True:
            yield now_s
            now_s += self.gap(rng)

    def schedule(self, rng: Random, *, until_s: float, most: int | None = None) -> tuple[float, ...]:
        """The arrivals before `until_s`, at most `most` of them."""
        return tuple(islice(takewhile(lambda time_s: time_s < until_s, self.times(rng)), most))


@dataclass(frozen=True, slots=True)
class EvenArrivals(GammaArrivals):
    """Equal gaps: the VTC paper's "uniform" arrivals. Without `first_s` clients are out of step."""

    cv: float = 0.0


@dataclass(frozen=True, slots=True)
class OnOffArrivals:
    """`arrivals` in ON phases, which take turns with OFF phases in which nothing arrives.

    The clock of `arrivals` stands still while OFF, so an OFF phase postpones arrivals and drops none.
    """

    arrivals: Arrivals
    on_s: float = 60.0
    off_s: float = 60.0

    def schedule(self, rng: Random, *, until_s: float, most: int | None = None) -> tuple[float, ...]:
        if until_s == float("inf"):
            on_until_s = until_s
        else:
            whole, part_s = divmod(until_s, self.on_s + self.off_s)
            on_until_s = whole * self.on_s + min(part_s, self.on_s)
        on_times = self.arrivals.schedule(rng, until_s=on_until_s, most=most)
        times = (time_s + time_s // self.on_s * self.off_s for time_s in on_times)
        return tuple(time_s for time_s in times if time_s < until_s)


@dataclass(frozen=True, slots=True)
class RampArrivals:
    """A rate that changes linearly from one value to another within `over_s`, and stays there.

    Its arrivals are those of a process of one program per second, evenly spaced, on a stretched time axis.
    """

    start_per_s: float
    end_per_s: float
    over_s: float

    def schedule(self, rng: Random, *, until_s: float, most: int | None = None) -> tuple[float, ...]:
        times = (self._time_s(expected) for expected in GammaArrivals(1.0, 0.0).times(rng))
        return tuple(islice(takewhile(lambda time_s: time_s < until_s, times), most))

    def _time_s(self, expected: float) -> float:
        """The time by which this number of programs is expected."""
        start, end = self.start_per_s, self.end_per_s
        ramp = (start + end) / 2 * self.over_s
        if expected >= ramp:
            return self.over_s + (expected - ramp) / end if end else float("inf")
        slope = (end - start) / self.over_s
        return 2 * expected / (start + sqrt(max(0.0, start**2 + 2 * slope * expected)))


@dataclass(frozen=True, slots=True)
class PhasedArrivals:
    """One process after another: each of `phases` is a process and its length in seconds.

    Every phase starts from its own random numbers, so a change to one leaves the others alone. Nothing arrives after
    the last.
    """

    phases: Sequence[tuple[Arrivals, float]]

    def schedule(self, rng: Random, *, until_s: float, most: int | None = None) -> tuple[float, ...]:
        times: list[float] = []
        start_s = 0.0
        for arrivals, duration_s in self.phases:
            if start_s >= until_s:
                break
            phase = arrivals.schedule(
                Random(rng.getrandbits(64)),
                until_s=min(duration_s, until_s - start_s),
                most=None if most is None else most - len(times),
            )
            times += [start_s + time_s for time_s in phase if start_s + time_s < until_s]
            start_s += duration_s
        return tuple(times)


@dataclass(frozen=True, slots=True)
class GivenArrivals:
    """Arrivals at these times, as a trace has them."""

    times_s: Sequence[float]

    def schedule(self, rng: Random, *, until_s: float, most: int | None = None) -> tuple[float, ...]:
        return tuple(islice(takewhile(lambda time_s: time_s < until_s, self.times_s), most))
