"""Measurements of this package's own cost, on SGLang's real data structures."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from sglang_fair.common.provenance import machine, versions
from sglang_fair.settings.commands import Mistake, Option, command

Show = Callable[[str], None]
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What every bench takes."""

    json: Annotated[Path | None, Option(metavar="FILE", help="Write the last line to FILE too.")] = None
    quick: Annotated[bool, Option("--quick", help="Less of everything: under two minutes.")] = False
    seed: Annotated[int, Option(help="Of what is drawn.")] = 1


OptionsT = TypeVar("OptionsT", bound=BenchOptions)


def bench_command(
    options: type[OptionsT], run: Callable[[OptionsT, Show], dict[str, Any]]
) -> Callable[..., int | None]:
    """The command for `commands.run` that carries out `run`, whose docstring is its help."""

    def act(given: OptionsT) -> None:
        carry_out(partial(run, given), given.json)

    act.__doc__ = f"{run.__doc__}\n\nProgress goes to stderr. The result is the last line of stdout, as JSON."
    return command(options, act)


def carry_out(
    run: Callable[[Show], dict[str, Any]],
    file: Path | None,
    refused: tuple[type[Exception], ...] = (ValueError, OSError),
) -> dict[str, Any]:
    """Run a bench: what it shows goes to stderr, its result is the last line of stdout, and of `file`.

    Raises Mistake in place of one of `refused`, and where `file` cannot be written: the result has been printed then.
    """
    try:
        result = run(lambda text: print(text, file=sys.stderr, flush=True))
        print_line(result, file)
    except refused as error:
        raise Mistake(str(error)) from None
    return result


def print_line(result: Mapping[str, Any], file: Path | None) -> None:
    """A result for programs: the last line of stdout, and of `file`."""
    line = json.dumps(result, separators=(",", ":"), default=str)
    print(line, flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(line + "\n", encoding="utf-8")


def percentile(values: Sequence[ValueT], percent: float) -> ValueT:
    """By nearest rank: the least value that so many of a hundred do not exceed. Raises ValueError where is none."""
    if not values:
        raise ValueError("nothing has no percentile")
    ordered = sorted(values)  # type: ignore[type-var]  # what has an order
    return ordered[max(1, math.ceil(len(ordered) * percent / 100)) - 1]


def choose(names: str | None, known: Iterable[str], what: str) -> tuple[str, ...]:
    """These comma-separated names, or all. Raises ValueError for an unknown one."""
    there = tuple(known)
    wanted = tuple(names.split(",")) if names else there
    if unknown := [name for name in wanted if name not in there]:
        raise ValueError(f"unknown {what} {', '.join(unknown)}; there are {', '.join(there)}")
    return wanted


def conditions(seed: int) -> dict[str, Any]:
    """What a reader needs to repeat a measurement and to judge it."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"seed": seed, "versions": versions(), "machine": machine(), "at": at}


def grid(
    rows: Sequence[Mapping[str, Any]],
    label: str,
    columns: Sequence[str],
    cell: Callable[[Mapping[str, Any]], str],
) -> str:
    """A line for each `label` of the rows, and a column for each combination of their numbers `columns`."""
    heads = sorted({tuple(row[name] for name in columns) for row in rows})
    lines = [
        f"{name.replace('_', ' '):18}" + "".join(f"{head[place]:>24,}" for head in heads)
        for place, name in enumerate(columns)
    ]
    for value in dict.fromkeys(row[label] for row in rows):
        found = {tuple(row[name] for name in columns): row for row in rows if row[label] == value}
        cells = (cell(found[head]) if head in found else "-" for head in heads)
        lines.append(f"{value:18}" + "".join(f"{text:>24}" for text in cells))
    return "\n".join(lines)
