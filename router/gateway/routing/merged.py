"""What several routers say, as one: for `/status`, `/workers` and `/limits`. Pure.

Each router counts what came through it, so its counts are added. All follow the same replicas' caches and loads, so of
what they say about those the first one's word is taken, or the larger number.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from router.events import Workers

ADDED = ("in_flight", "waiting", "decisions", "hits", "counts")
"""Of a snapshot."""

ADDED_OF_WORKERS = (
    "in_flight",
    "prefill_tokens",
    "decode_tokens",
    "dispatched",
    "dispatched_tokens",
    "placed",
)

WORST = ("up", "draining", "sick", "swapping")
"""A worker's state is the last of these that any router says."""

NEAREST = 10
"""Clients that are nearest their limits, of all routers together."""


def merged(snapshots: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Several routers' snapshots, at least one."""
    first, *others = snapshots
    made: dict[str, Any] = dict(first)
    if not others:
        return made
    for name in ADDED:
        made[name] = added([one.get(name, 0) for one in snapshots])
    names = sorted({name for one in snapshots for name in one["workers"]})
    made["workers"] = {
        name: _worker([one["workers"][name] for one in snapshots if name in one["workers"]]) for name in names
    }
    made["deficits"] = {
        client: added([one["deficits"][client] for one in snapshots if client in one["deficits"]])
        for client in dict.fromkeys(client for one in snapshots for client in one["deficits"])
    }
    made["swaps"] = {
        name: row for one in reversed(snapshots) for name, row in one.get("swaps", {}).items() if row["agent"]
    }
    made["queues"] = next(
        (one["queues"] for one in snapshots if one.get("queues")), None
    )  # one has any at most
    made["suspects"] = _suspects([one["suspects"] for one in snapshots])
    made["throttle"] = _throttle([one["throttle"] for one in snapshots])
    return made


def merged_workers(lists: Sequence[Workers]) -> Workers:
    """Several routers' lists, at least one: a worker drains or is sick if any says so."""
    first, *others = lists
    if not others:
        return first
    ups = {up.worker: up for one in reversed(lists) for up in one.workers}
    return Workers(
        first.id,
        tuple(up for _, up in sorted(ups.items())),
        draining=tuple(sorted({name for one in lists for name in one.draining})),
        sick=tuple(sorted({name for one in lists for name in one.sick})),
    )


def added(values: Sequence[Any]) -> Any:
    """The sum of numbers, or of maps of them. None, which is infinity, stays None."""
    if any(value is None for value in values):
        return None
    if not any(isinstance(value, Mapping) for value in values):
        return sum(values)
    maps = [value for value in values if isinstance(value, Mapping)]
    names = dict.fromkeys(name for one in maps for name in one)
    return {name: added([one[name] for one in maps if name in one]) for name in names}


def _worker(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One worker, as several routers see it."""
    made = dict(rows[0])
    for name in ADDED_OF_WORKERS:
        made[name] = added([row[name] for row in rows])
    made["tree_tokens"] = max(row["tree_tokens"] for row in rows)
    made["state"] = max((row["state"] for row in rows), key=WORST.index)
    return made


def _suspects(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A client's requests are judged by one router at a time."""
    made = {name: added([row[name] for row in rows]) for name in ("clients", "waiting", "counts")}
    made["newcomers"] = any(row["newcomers"] for row in rows)
    for name in ("quarantine", "trials"):
        made[name] = {key: value for row in reversed(rows) for key, value in row[name].items()}
    return made


def _throttle(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A client's calls are counted by one router at a time."""
    made = dict(rows[0])
    for name in ("open_interactions", "refused", "bad_loads"):
        made[name] = added([row[name] for row in rows])
    made["pressure"] = max(row["pressure"] for row in rows)
    nearest = [one for row in rows for one in row["nearest"]]
    made["nearest"] = sorted(nearest, key=lambda one: one["calls"] / (one["limit"] or inf), reverse=True)[
        :NEAREST
    ]
    return made
