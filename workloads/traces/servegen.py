"""ServeGen's clients of production (Xiang et al., NSDI 2026): how fast, how bursty, how long their requests are.

In every window of 10 minutes a client has a rate and a distribution of gaps, in every 6 hours distributions of input
and output lengths, drawn independently. A folder holds, for each client, `chunk-N-trace.csv`, a row of start (s),
requests a second, CV, family of gaps and its two parameters (shape first) for every window, and
`chunk-N-dataset.json`, the distributions. Folders for all models are in https://github.com/alibaba/ServeGen.
"""

import csv
import json
from ast import literal_eval
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, exp, gamma, inf
from pathlib import Path
from random import Random
from typing import TypeAlias

from workloads.programs.prose import seeded
from workloads.traces.trace import Trace, TraceRequest

NAME = "servegen"

WINDOW_S = 600.0
LENGTHS_S = 21_600.0
DAY_S = 86_400.0
_DAY_WINDOWS = 144

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


Lengths: TypeAlias = tuple[Sequence[int], Sequence[float]]
"""A distribution of tokens, at least 1, with the sums of their shares."""


def lengths_of(shares: Iterable[tuple[int, float]]) -> Lengths:
    """From (length, share) pairs. Raises ValueError if they are no distribution."""
    found = [(max(1, tokens), share) for tokens, share in shares if tokens >= 0 and 0 <= share < inf]
    sums = list(accumulate(share for _, share in found))
    if not sums or not sums[-1]:
        raise ValueError("lengths need shares above 0")
    return [tokens for tokens, _ in found], sums


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
    seed: str = "0",
) -> Trace:
    """Many clients made of few profiles, with `rate_per_s` requests a second in all.

    Client k follows profile k modulo their number, from one of its active windows on. Its share of the rate
    is Zipf's, 1/k of the first client's (in production few clients send most), over the whole trace: a
    profile decides when in that time it sends, how burstily and what. Raises ValueError where no request
    arrives at all.
    """
    weights = [1 / rank for rank in range(1, clients + 1)]
    requests: list[TraceRequest] = []
    for k, weight in enumerate(weights):
        rng = seeded(seed, NAME, k)
        expected = rate_per_s * duration_s * weight / sum(weights)
        profile = profiles[k % len(profiles)]
        parts = _parts(profile, rng.choice(profile.active), duration_s)
        requests += _requests(parts, f"{NAME}-{k + 1}", expected, rng)
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(NAME, requests, duration_s)


def day(profiles: Sequence[Profile], number: int, *, rate_per_s: float, seed: str = "0") -> Trace:
    """A day, from 0 on, of the profiles' clients as they sent side by side, each with its part of `rate_per_s` in all.
    Raises ValueError where nobody sends on that day."""
    first = number * _DAY_WINDOWS
    parts = {one.name: _parts(one, first, DAY_S) for one in profiles if first < len(one.windows)}
    sent = {name: _expected(some) for name, some in parts.items() if some}
    requests: list[TraceRequest] = []
    for name, count in sent.items():
        expected = rate_per_s * DAY_S * count / sum(sent.values())
        requests += _requests(parts[name], name, expected, seeded(seed, NAME, "day", number, name))
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(NAME, requests, DAY_S)


_Parts: TypeAlias = Sequence[tuple[float, float, Window, tuple[Lengths, Lengths]]]
"""Start, length and contents of windows."""


def _expected(parts: _Parts) -> float:
    """Requests, by the windows' own rates."""
    return sum(length_s * window.rate_per_s for _, length_s, window, _ in parts)


def _requests(parts: _Parts, client: str, expected: float, rng: Random) -> Iterator[TraceRequest]:
    """One client's requests. Time runs in gaps: a window lasts as many as requests are expected in it."""
    total = _expected(parts)
    gaps = parts[0][2].rest_of_gap(rng)
    for start_s, length_s, window, (inputs, outputs) in parts:
        per_s = window.rate_per_s * expected / total
        while gaps < per_s * length_s:
            (asked,) = rng.choices(inputs[0], cum_weights=inputs[1])
            (answered,) = rng.choices(outputs[0], cum_weights=outputs[1])
            yield TraceRequest(start_s + gaps / per_s, client, asked, answered)
            gaps += window.gap(rng)
        gaps -= per_s * length_s


def _parts(profile: Profile, first: int, duration_s: float) -> _Parts:
    """The active windows from `first` on; the last is followed by the first."""
    parts = []
    for step in range(ceil(duration_s / WINDOW_S)):
        place = (first + step) % len(profile.windows)
        window, lengths = profile.windows[place], profile.lengths_at(place)
        if window.rate_per_s > 0 and lengths is not None:
            start_s = step * WINDOW_S
            parts.append((start_s, min(WINDOW_S, duration_s - start_s), window, lengths))
    return parts


# ---- files and stand-ins


def servegen(path: Path | None = None, *, count: int = 24, seed: str = "0") -> tuple[Profile, ...]:
    """The profiles in a folder, in order of number; without one, `count` stand-ins for a day.

    A stand-in sends in all windows, faster by day than by night. The variation of its gaps is log-normal
    around 1.5 (the six files at hand have medians from 1 to 8), Gamma or Weibull; inputs are log-normal
    around a median from 150 to 4,000 tokens, outputs exponential with an average from 20 to 800. Raises
    ValueError, with file and line or period, for what is no profile.
    """
    if path is None:
        return tuple(_stand_in(seeded(seed, "profile", k), f"stand-in-{k}") for k in range(count))
    numbers = sorted(int(file.name.split("-")[1]) for file in path.glob("chunk-*-trace.csv"))
    if not numbers:
        raise ValueError(f"{path}: holds no chunk-N-trace.csv")
    return tuple(
        Profile(
            f"chunk-{number}",
            _windows(path / f"chunk-{number}-trace.csv"),
            _lengths(path / f"chunk-{number}-dataset.json"),
        )
        for number in numbers
    )


def _windows(path: Path) -> list[Window]:
    windows: list[Window] = []
    with path.open(encoding="utf-8", newline="") as rows:
        for line, row in enumerate(csv.reader(rows), start=1):
            try:
                start_s, rate, _, family, shape, _ = row
                if float(start_s) != WINDOW_S * len(windows):
                    raise ValueError(f"a window must start at {WINDOW_S * len(windows):g} s, not {start_s}")
                windows.append(Window(float(rate), family, float(shape)) if family else Window(float(rate)))
            except ValueError as error:
                raise ValueError(f"{path}:{line}: {error}") from error
    return windows


def _lengths(path: Path) -> list[tuple[Lengths, Lengths] | None]:
    lengths: list[tuple[Lengths, Lengths] | None] = []
    place = "not lengths"
    try:
        chunks = json.loads(path.read_text(encoding="utf-8"))
        for number in range(len(chunks)):
            place = f"period {LENGTHS_S * number:.0f}"
            period = chunks[f"{LENGTHS_S * number:.0f}"]
            inputs, outputs = (
                [(int(tokens), float(share)) for tokens, share in literal_eval(period[name].strip()).items()]
                for name in ("input_tokens", "output_tokens")
            )
            lengths.append((lengths_of(inputs), lengths_of(outputs)) if inputs and outputs else None)
    except (ValueError, SyntaxError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {place}: {error!r}") from error
    return lengths


def _stand_in(rng: Random, name: str) -> Profile:
    family = rng.choice(("Gamma", "Weibull"))
    cv = min(max(0.7, 1.5 * exp(rng.gauss(0.0, 0.5))), 5.0)
    shape = cv**-2 if family == "Gamma" else cv**-1
    by_day = rng.uniform(1.2, 3.0)
    windows = [
        Window(by_day if 9 <= place * 24 / _DAY_WINDOWS < 21 else 1.0, family, shape)
        for place in range(_DAY_WINDOWS)
    ]
    median = exp(rng.uniform(5.0, 8.3))
    inputs = sorted(min(max(1, round(median * exp(rng.gauss(0.0, 0.7)))), 32_000) for _ in range(500))
    average = exp(rng.uniform(3.0, 6.7))
    outputs = sorted(min(1 + round(rng.expovariate(1 / average)), 8000) for _ in range(500))
    lengths = (lengths_of([(k, 1.0) for k in inputs]), lengths_of([(k, 1.0) for k in outputs]))
    return Profile(name, windows, [lengths] * int(_DAY_WINDOWS * WINDOW_S / LENGTHS_S))
