"""What several routers say, as one: for `/status`, `/workers` and `/limits`. Pure.

Each router counts what came through it, so its counts are added. All follow the same replicas' caches and loads, so of
what they say about those the first one's word is taken, or the larger number. A client's requests are judged, and its
calls counted, by one router at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from router.events import Workers

NEAREST = 10
"""Clients that are nearest their limits, of all routers together."""

WORST = ("up", "draining", "sick", "swapping")
"""A worker's state is the last of these that any router says."""

Merge = Callable[[Sequence[Any]], Any]


def added(values: Sequence[Any]) -> Any:
    """The sum of numbers, or of maps of them. None, which is infinity, stays None."""
    if any(value is None for value in values):
        return None
    maps = [value for value in values if isinstance(value, Mapping)]
    return _each(added)(maps) if maps else sum(values)


def _union(maps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first one's word about each name."""
    return {name: value for one in reversed(maps) for name, value in one.items()}


def _each(merge: Merge) -> Merge:
    """Merges what several maps say of each name."""
    return lambda maps: {
        name: merge([one[name] for one in maps if name in one])
        for name in dict.fromkeys(name for one in maps for name in one)
    }


def _row(merges: Mapping[str, Merge]) -> Merge:
    """Merges objects: these fields in these ways, where there are any, and of all others the first one's."""

    def merged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        made = dict(rows[0])
        for name, merge in merges.items():
            if values := [row[name] for row in rows if name in row]:
                made[name] = merge(values)
        return made

    return merged


def _nearest(lists: Sequence[Sequence[Any]]) -> list[Any]:
    rows = [row for rows in lists for row in rows]
    return sorted(rows, key=lambda row: row["calls"] / (row["limit"] or inf), reverse=True)[:NEAREST]


WORKER: dict[str, Merge] = {
    **dict.fromkeys(
        ("in_flight", "prefill_tokens", "decode_tokens", "dispatched", "dispatched_tokens", "placed"), added
    ),
    "tree_tokens": max,
    "state": lambda states: max(states, key=WORST.index),
}
SUSPECTS: dict[str, Merge] = {
    **dict.fromkeys(("clients", "waiting", "counts"), added),
    "newcomers": any,
    **dict.fromkeys(("quarantine", "trials"), _union),
}
THROTTLE: dict[str, Merge] = {
    **dict.fromkeys(("open_interactions", "refused", "bad_loads"), added),
    "pressure": max,
    "nearest": _nearest,
}
SNAPSHOT: dict[str, Merge] = {
    **dict.fromkeys(("in_flight", "waiting", "decisions", "hits", "counts", "deficits"), added),
    "workers": lambda maps: dict(sorted(_each(_row(WORKER))(maps).items())),
    "swaps": lambda maps: _union([{name: row for name, row in one.items() if row["agent"]} for one in maps]),
    "queues": lambda queues: next(filter(None, queues), None),  # one router orders them at most
    "suspects": _row(SUSPECTS),
    "throttle": _row(THROTTLE),
}


def merged(snapshots: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Several routers' snapshots, at least one."""
    found: dict[str, object] = _row(SNAPSHOT)(snapshots) if len(snapshots) > 1 else dict(snapshots[0])
    return found


def merged_workers(lists: Sequence[Workers]) -> Workers:
    """Several routers' lists, at least one: a worker drains or is sick if any says so."""
    if len(lists) == 1:
        return lists[0]
    ups = {up.worker: up for one in reversed(lists) for up in one.workers}
    return Workers(
        lists[0].id,
        tuple(up for _, up in sorted(ups.items())),
        draining=tuple(sorted({name for one in lists for name in one.draining})),
        sick=tuple(sorted({name for one in lists for name in one.sick})),
    )
