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
from collections import defaultdict
from collections.abc import Iterable, Sequence
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


def totals(run: Run, names: Iterable[str]) -> dict[str, Any]:
    """Of these users' interactions. `interactions` are those that ended, tokens and `ttft_s`, a mean, are of answered
    calls, and `delayed` has the part of the users whose requests waited so long by the seconds of `DELAYS_S`."""
    users = set(names)
    begun = {(one.client, one.program): one.outcome for one in run.programs if one.client in users}
    calls: dict[tuple[str, int], list[RequestRecord]] = defaultdict(list)
    for one in run.requests:
        if (name := (one.client, one.program)) in begun:
            calls[name].append(one)
    every = [one for some in calls.values() for one in some]
    answered = [one for one in every if one.outcome == Outcome.OK]
    ttfts = [one.t_first_token_s - one.t_intended_s for one in answered if one.t_first_token_s is not None]
    waits: dict[str, list[float]] = defaultdict(list)
    for one in every:
        if one.waited_s is not None:
            waits[one.client].append(one.waited_s)
    means = [mean(values) for values in waits.values()]
    ended = {name: begun[name] for name in calls if begun[name] != Outcome.CANCELLED}
    final = [name for name, outcome in ended.items() if outcome == Outcome.OK]
    lost: dict[str, list[list[RequestRecord]]] = {"throttled": [], "timed out": [], "": []}
    for name, outcome in ended.items():
        if outcome != Outcome.OK:
            lost[_cause(calls[name])].append(calls[name])
    heard, served = ({client for client, _ in some} for some in (ended, final))
    refused = sum(one.status == REFUSED for one in every)
    return {
        "users": len(users),
        "interactions": len(ended),
        "answered": len(final),
        "throttled": len(lost["throttled"]),
        "cut": sum(map(_is_cut, lost["throttled"])),
        "timed_out": len(lost["timed out"]),
        "wasted": {cause: _spent(lost[cause]) for cause in ("throttled", "timed out")},
        "served_users": len(served),
        "heard_users": len(heard),
        "delayed": {
            f"{limit_s:g}": sum(one > limit_s for one in means) / len(means) if means else 0.0
            for limit_s in DELAYS_S
        },
        "prompt_tokens": sum(one.prompt_tokens or 0 for one in answered),
        "output_tokens": sum(one.output_tokens for one in answered),
        "ttft_s": mean(ttfts) if ttfts else None,
        "calls": len(every),
        "refused": refused,
        "served_part": len(served) / len(heard) if heard else None,
        "provided_part": len(final) / len(ended) if ended else None,
        "refused_part": refused / len(every) if every else None,
    }


def _cause(lost: Sequence[RequestRecord]) -> str:
    if any(one.status == REFUSED for one in lost):
        return "throttled"
    return "timed out" if any(one.error == TIMED_OUT for one in lost) else ""


def _is_cut(calls: Sequence[RequestRecord]) -> bool:
    first_s = min(one.t_intended_s for one in calls if one.status == REFUSED)
    return any(one.outcome == Outcome.OK and one.t_done_s <= first_s for one in calls)


def _spent(lost: Iterable[Sequence[RequestRecord]]) -> int:
    return sum((one.extend_tokens or 0) + one.output_tokens for calls in lost for one in calls)


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
