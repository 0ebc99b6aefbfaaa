"""What became of interactions in one run, by its records: refused, cut, wasted, delayed, served (FairServe, section 5).

    throttled    an interaction of which a call was refused (status 429)
    cut          one of which a call was refused after an earlier one was answered
    wasted       extend and output tokens of interactions whose user got no final answer, by cause: throttled, timed out
    delayed      a user whose requests waited longer than so many seconds on average, before they were admitted
    served       of the users who heard of the end of an interaction: those that got a final answer
    provided     of the interactions that ended: those that got one

Interactions that the run's end cut off count nowhere.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import numpy as np

from sglang_fair.settings.commands import Argument, Mistake, Option, run
from workloads.programs import Outcome
from workloads.records import RequestRecord, Run, read
from workloads.session import TIMED_OUT
from workloads.table import Column, Percentile, Requests

DELAYS_S = (1.0, 5.0, 20.0)
REFUSED = 429


@dataclass(slots=True)
class Totals:
    """Of some users."""

    users: int = 0
    interactions: int = 0
    """That ended."""
    answered: int = 0
    throttled: int = 0
    cut: int = 0
    timed_out: int = 0
    wasted: dict[str, int] = field(default_factory=lambda: {"throttled": 0, "timed out": 0})
    served_users: int = 0
    heard_users: int = 0
    delayed: dict[str, float] = field(default_factory=dict)
    """Part of the users whose requests waited, by the seconds of `DELAYS_S`."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Of answered calls."""
    ttft_s: float | None = None
    """Mean over answered calls."""
    calls: int = 0
    refused: int = 0

    def to_json(self) -> dict[str, Any]:
        """With the parts that experiments compare."""
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "served_part": self.served_users / self.heard_users if self.heard_users else None,
            "provided_part": self.answered / self.interactions if self.interactions else None,
            "refused_part": self.refused / self.calls if self.calls else None,
        }


def totals(run: Run, names: Iterable[str]) -> Totals:
    """Of these users' interactions."""
    wanted = set(names)
    by_name: dict[tuple[str, int], list[RequestRecord]] = {}
    for record in run.requests:
        if record.client in wanted:
            by_name.setdefault((record.client, record.program), []).append(record)
    begun = {(one.client, one.program): one for one in run.programs if one.client in wanted}
    found, ttfts = Totals(users=len(wanted)), list[float]()
    heard: set[str] = set()
    served: set[str] = set()
    waits: dict[str, list[float]] = {}
    for name, records in by_name.items():
        program = begun.get(name)
        if program is None:
            continue
        for record in records:
            found.calls += 1
            found.refused += record.status == REFUSED
            if record.waited_s is not None:
                waits.setdefault(record.client, []).append(record.waited_s)
            if record.outcome == Outcome.OK:
                found.prompt_tokens += record.prompt_tokens or 0
                found.output_tokens += record.output_tokens
                if record.t_first_token_s is not None:
                    ttfts.append(record.t_first_token_s - record.t_intended_s)
        if program.outcome == Outcome.CANCELLED:
            continue
        found.interactions += 1
        heard.add(name[0])
        if program.outcome == Outcome.OK:
            found.answered += 1
            served.add(name[0])
        else:
            _count_loss(found, records)
    found.heard_users, found.served_users = len(heard), len(served)
    found.ttft_s = mean(ttfts) if ttfts else None
    means = [mean(values) for values in waits.values()]
    found.delayed = {
        f"{limit_s:g}": sum(one > limit_s for one in means) / len(means) if means else 0.0
        for limit_s in DELAYS_S
    }
    return found


def _count_loss(found: Totals, records: list[RequestRecord]) -> None:
    """An interaction has ended without an answer."""
    refused = [record for record in records if record.status == REFUSED]
    spent = sum((record.extend_tokens or 0) + record.output_tokens for record in records)
    if refused:
        found.throttled += 1
        first_s = min(record.t_intended_s for record in refused)
        found.cut += any(record.outcome == Outcome.OK and record.t_done_s <= first_s for record in records)
        found.wasted["throttled"] += spent
    elif any(record.error == TIMED_OUT for record in records):
        found.timed_out += 1
        found.wasted["timed out"] += spent


def busiest_minute(times_s: Column) -> int:
    """Most calls in any 60 seconds."""
    ordered = np.sort(times_s)
    gone = np.searchsorted(ordered, ordered - 60, side="right")
    return int((np.arange(len(ordered)) - gone).max()) + 1


def limits_of(run: Run, percentile: float) -> dict[str, Any]:
    """Limits below which so many of a hundred users stayed in their busiest minute, over all and for each application,
    as `--limits` has them. ValueError for a run without calls, and a percentile that is none."""
    if not 0 < percentile <= 100:
        raise ValueError(f"a percentile lies above 0, up to 100, not {percentile:g}")
    table = Requests(run)
    busiest = {name: busiest_minute(table.sent[mine]) for name, mine in table.of.items() if mine.any()}
    if not busiest:
        raise ValueError("there are no calls in these records")
    by_app: dict[str, list[int]] = {}
    for client, most in busiest.items():
        by_app.setdefault(str(run.manifest.clients.get(client, {}).get("app", "")), []).append(most)
    apps = {app: _rank(values, percentile) for app, values in sorted(by_app.items()) if app}
    return {"user": _rank(busiest.values(), percentile), "apps": apps}


def _rank(values: Iterable[int], percent: float) -> int:
    found = Percentile.of([(value, False) for value in values], percent)
    assert found is not None
    return int(found.value_s)


# ---- `sglang-fair limits`: limits for the throttle, from what users did in a run without one

NAME = "sglang-fair limits"


def main(
    path: Annotated[
        Path, Argument(metavar="RECORDS.jsonl", help="A run's records, as --records writes them.")
    ],
    percentile: Annotated[
        float, Option(help="So many of a hundred users stay below the limit in their busiest minute.")
    ] = 99.0,
) -> None:
    """Print a file for --limits: what all but a few users need in their busiest minute."""
    try:
        print(json.dumps(limits_of(read(path), percentile), indent=2))
    except OSError as error:
        raise Mistake(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise Mistake(str(error)) from None


if __name__ == "__main__":
    sys.exit(run(main, NAME))
