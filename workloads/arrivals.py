"""When programs arrive, drawn from a client's own seed.

Arrivals are decided before a run begins, so every scheduler is offered the same load at the same times. The basic
process is a renewal process: its gaps are drawn one by one from a Gamma distribution with shape 1/cv² and mean
1/rate. So cv = 1 is a Poisson process, cv = 0 is evenly spaced, cv > 1 is bursty. The others are built on it: ON and
OFF phases, a rate that changes, one process after another. `GivenArrivals` takes times from a trace.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from math import sqrt
from random import Random


class Arrivals(ABC):
    """When the programs of one client arrive."""

    @abstractmethod
    def times(self, rng: Random) -> Iterator[float]:
        """All arrivals, in seconds from the start of the run, in order. Equal states of `rng` give equal times."""

    def schedule(self, rng: Random, *, until_s: float, most: int | None = None) -> tuple[float, ...]:
        """The arrivals before `until_s`; at most `most`."""
        return tuple(islice(takewhile(lambda time_s: time_s < until_s, self.times(rng)), most))


@dataclass(frozen=True, slots=True)
class GammaArrivals(Arrivals):
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
        now_s = self.gap(rng) * rng.random() if self.first_s is None else self.first_s
        while True:
            yield now_s
            now_s += self.gap(rng)


@dataclass(frozen=True, slots=True)
class EvenArrivals(GammaArrivals):
    """Equal gaps: the VTC paper's "uniform" arrivals. Without `first_s` clients are out of step."""

    cv: float = 0.0


@dataclass(frozen=True, slots=True)
class OnOffArrivals(Arrivals):
    """`arrivals` in ON phases, which take turns with OFF phases in which nothing arrives.

    The clock of `arrivals` stands still while OFF, so an OFF phase postpones arrivals and drops none.
    """

    arrivals: Arrivals
    on_s: float = 60.0
    off_s: float = 60.0

    def times(self, rng: Random) -> Iterator[float]:
        return (time_s + time_s // self.on_s * self.off_s for time_s in self.arrivals.times(rng))


@dataclass(frozen=True, slots=True)
class RampArrivals(Arrivals):
    """A rate that changes linearly from one value to another within `over_s`, and stays there.

    Its arrivals are those of a process of one program per second, evenly spaced, on a stretched time axis.
    """

    start_per_s: float
    end_per_s: float
    over_s: float

    def times(self, rng: Random) -> Iterator[float]:
        return map(self._time_s, GammaArrivals(1.0, 0.0).times(rng))

    def _time_s(self, expected: float) -> float:
        """The time by which this number of programs is expected."""
        start, end = self.start_per_s, self.end_per_s
        ramp = (start + end) / 2 * self.over_s
        if expected >= ramp:
            return self.over_s + (expected - ramp) / end if end else float("inf")
        slope = (end - start) / self.over_s
        return 2 * expected / (start + sqrt(max(0.0, start**2 + 2 * slope * expected)))


@dataclass(frozen=True, slots=True)
class PhasedArrivals(Arrivals):
    """One process after another: each of `phases` is a process and its length in seconds.

    Every phase starts from its own random numbers, so a change to one leaves the others alone. Nothing arrives after
    the last.
    """

    phases: Sequence[tuple[Arrivals, float]]

    def times(self, rng: Random) -> Iterator[float]:
        start_s = 0.0
        for arrivals, duration_s in self.phases:
            for time_s in arrivals.times(Random(rng.getrandbits(64))):
                if time_s >= duration_s:
                    break
                yield start_s + time_s
            start_s += duration_s


@dataclass(frozen=True, slots=True)
class GivenArrivals(Arrivals):
    """Arrivals at these times, as a trace has them."""

    times_s: Sequence[float]

    def times(self, rng: Random) -> Iterator[float]:
        return iter(self.times_s)
