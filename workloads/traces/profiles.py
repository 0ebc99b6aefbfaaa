"""Clients as production sees them: how fast, how bursty and how long each one's requests are, over time.

The model is ServeGen's (Xiang et al., NSDI 2026): in every window of 10 minutes a client has a rate and a
distribution of gaps, in every 6 hours distributions of input and output lengths, drawn independently.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, gamma
from random import Random

from workloads.programs.prose import seeded
from workloads.traces.trace import Trace, TraceRequest

WINDOW_S = 600.0
LENGTHS_S = 21_600.0

_SMALLEST_SHAPE = 0.01
"""With a smaller one, a single gap can outlast the trace."""


@dataclass(frozen=True, slots=True)
class Window:
    """Ten minutes of one client: Gamma or Weibull gaps of this shape (1: a Poisson process)."""

    rate_per_s: float
    family: str = "Gamma"
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.rate_per_s < float("inf"):
            raise ValueError(f"a rate must be at least 0, not {self.rate_per_s!r}")
        if self.family not in ("Gamma", "Weibull"):
            raise ValueError(f"gaps are Gamma or Weibull, not {self.family!r}")
        if not _SMALLEST_SHAPE <= self.shape < float("inf"):
            raise ValueError(f"a shape must be at least {_SMALLEST_SHAPE:g}, not {self.shape!r}")

    def gap(self, rng: Random) -> float:
        """A gap, in mean gaps."""
        if self.family == "Gamma":
            return rng.gammavariate(self.shape, 1 / self.shape)
        return rng.weibullvariate(1 / gamma(1 + 1 / self.shape), self.shape)

    def rest_of_gap(self, rng: Random) -> float:
        """What is left of the gap in which an onlooker arrives, who meets long gaps more often."""
        if self.family == "Gamma":
            met = rng.gammavariate(self.shape + 1, 1 / self.shape)
        else:
            met = rng.gammavariate(1 + 1 / self.shape, 1) ** (1 / self.shape) / gamma(1 + 1 / self.shape)
        return met * rng.random()


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens."""

    tokens: Sequence[int]
    cumulative: Sequence[float]

    @classmethod
    def of(cls, shares: Sequence[tuple[int, float]]) -> "Lengths":
        """From (length, share) pairs. Raises ValueError if they are no distribution."""
        if not shares or any(tokens < 0 or not 0 <= share < float("inf") for tokens, share in shares):
            raise ValueError("lengths need shares of at least 0, and one of them")
        total, cumulative = 0.0, []
        for _, share in shares:
            total += share
            cumulative.append(total)
        if not total:
            raise ValueError("lengths need a share above 0")
        return cls([tokens for tokens, _ in shares], cumulative)

    def draw(self, rng: Random) -> int:
        """A length, at least 1."""
        place = bisect_left(self.cumulative, rng.random() * self.cumulative[-1])
        return max(1, self.tokens[min(place, len(self.tokens) - 1)])


@dataclass(frozen=True, slots=True)
class Profile:
    """One client: its windows, one after another, and its input and output lengths for every 36 of them."""

    name: str
    windows: Sequence[Window]
    lengths: Sequence[tuple[Lengths, Lengths] | None]

    def __post_init__(self) -> None:
        if not self.active:
            raise ValueError(f"{self.name}: no window has both a rate and lengths")

    @property
    def active(self) -> list[int]:
        """Windows in which it sends."""
        return [
            place
            for place, window in enumerate(self.windows)
            if window.rate_per_s > 0 and self.lengths_at(place) is not None
        ]

    def lengths_at(self, place: int) -> tuple[Lengths, Lengths] | None:
        """Input and output lengths in window `place`; None where it has none."""
        period = int(place * WINDOW_S // LENGTHS_S)
        return self.lengths[period] if period < len(self.lengths) else None


def mix(
    profiles: Sequence[Profile],
    *,
    clients: int,
    rate_per_s: float,
    duration_s: float,
    skew: float = 1.0,
    seed: str = "0",
    name: str = "servegen",
) -> Trace:
    """Many clients made of few profiles, with `rate_per_s` requests a second in all.

    Client k follows profile k modulo their number, from one of its active windows on. Its share of the rate
    is Zipf's, 1/k^`skew` of the first client's (in production few clients send most), over the whole trace: a
    profile decides when in that time it sends, how burstily and what. Raises ValueError where no request
    arrives at all.
    """
    if not profiles or clients < 1 or not 0 <= skew < float("inf"):
        raise ValueError(f"a mix needs profiles, clients, and a skew of at least 0: {clients!r}, {skew!r}")
    if not (0 < rate_per_s < float("inf") and 0 < duration_s < float("inf")):
        raise ValueError(f"a mix needs a positive rate and duration: {rate_per_s!r}, {duration_s!r}")
    weights = [1 / rank**skew for rank in range(1, clients + 1)]
    requests: list[TraceRequest] = []
    for k, weight in enumerate(weights):
        rng = seeded(seed, name, k)
        expected = rate_per_s * duration_s * weight / sum(weights)
        requests += _requests(profiles[k % len(profiles)], f"{name}-{k + 1}", expected, duration_s, rng)
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(name, requests, duration_s)


def _requests(
    profile: Profile, client: str, expected: float, duration_s: float, rng: Random
) -> Iterator[TraceRequest]:
    """One client's requests. Time runs in gaps: a window lasts as many as requests are expected in it."""
    first = rng.choice(profile.active)
    parts = _parts(profile, first, duration_s)
    total = sum(length_s * window.rate_per_s for _, length_s, window, _ in parts)
    gaps = profile.windows[first].rest_of_gap(rng)
    for start_s, length_s, window, (inputs, outputs) in parts:
        per_s = window.rate_per_s * expected / total
        while gaps < per_s * length_s:
            yield TraceRequest(start_s + gaps / per_s, client, inputs.draw(rng), outputs.draw(rng))
            gaps += window.gap(rng)
        gaps -= per_s * length_s


def _parts(
    profile: Profile, first: int, duration_s: float
) -> list[tuple[float, float, Window, tuple[Lengths, Lengths]]]:
    """Start, length and contents of the active windows from `first` on; the last is followed by the first."""
    parts = []
    for step in range(ceil(duration_s / WINDOW_S)):
        place = (first + step) % len(profile.windows)
        window, lengths = profile.windows[place], profile.lengths_at(place)
        if window.rate_per_s > 0 and lengths is not None:
            start_s = step * WINDOW_S
            parts.append((start_s, min(WINDOW_S, duration_s - start_s), window, lengths))
    return parts
