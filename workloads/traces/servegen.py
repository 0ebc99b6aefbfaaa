"""ServeGen's profiles of production clients (Xiang et al., NSDI 2026), from files or made up.

A folder holds, for each client, `chunk-N-trace.csv`, a row of start (s), requests a second, CV, family of gaps
and its two parameters (shape first) for every 10 minutes, and `chunk-N-dataset.json`, distributions of input
and output lengths for every 6 hours. Folders for all models are in https://github.com/alibaba/ServeGen,
`data/language`.
"""

import csv
import json
from ast import literal_eval
from math import exp
from pathlib import Path
from random import Random

from workloads.programs.prose import seeded
from workloads.traces.profiles import LENGTHS_S, WINDOW_S, Lengths, Profile, Window

_DAY_WINDOWS = 144


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
    try:
        chunks = json.loads(path.read_text(encoding="utf-8"))
        periods = [chunks[f"{LENGTHS_S * place:.0f}"] for place in range(len(chunks))]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not lengths for every {LENGTHS_S:g} s: {error!r}") from error
    lengths: list[tuple[Lengths, Lengths] | None] = []
    for place, period in enumerate(periods):
        try:
            inputs, outputs = (_shares(period[name]) for name in ("input_tokens", "output_tokens"))
            lengths.append((Lengths.of(inputs), Lengths.of(outputs)) if inputs and outputs else None)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: period {LENGTHS_S * place:.0f}: {error}") from error
    return lengths


def _shares(text: str) -> list[tuple[int, float]]:
    """`{343: 0.25, 344: 0.75}` as pairs."""
    try:
        return [(int(tokens), float(share)) for tokens, share in literal_eval(text.strip()).items()]
    except (ValueError, SyntaxError, AttributeError, TypeError) as error:
        raise ValueError(f"not lengths and their shares: {text[:80]!r}") from error


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
    lengths = (Lengths.of([(k, 1.0) for k in inputs]), Lengths.of([(k, 1.0) for k in outputs]))
    return Profile(name, windows, [lengths] * int(_DAY_WINDOWS * WINDOW_S / LENGTHS_S))
