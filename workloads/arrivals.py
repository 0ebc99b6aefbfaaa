"""When programs arrive: a renewal process with Gamma-distributed gaps, drawn from a client's own seed.

The shape is 1/cv² and the mean 1/rate: cv = 1 is a Poisson process, cv = 0 evenly spaced, cv > 1 bursty.
Arrivals are decided before a run begins, so every scheduler is offered the same load at the same times.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from random import Random


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
        """One gap between arrivals, in seconds."""
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
