"""The latest placements: which worker, why that one, what the next best would have been, and what was waited for.

    why       the worker that was chosen
    told      had the request already: another router, or a gateway without one, placed it
    others    as `core.placement_reason` says

Of the two workers the figures are kept by which they can be compared. No prompt is in it, and no other client.
Bounded: the last `most` requests. O(workers) for a placement.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from operator import attrgetter
from typing import Any

from router.placement.contract import Request, WorkerView
from router.radix import Match
from sglang_fair.common.deadlines import Promise

MOST = 4096
MOST_FOUND = 16
"""Placements that are shown of one name."""
MOST_NAME = 128
"""Characters of a name that a client may have chosen."""

Figures = dict[str, Any]


@dataclass(slots=True)
class Placed:
    """What is known of one placement. Times are by the router's clock."""

    id: str
    name: str
    """What its gateway, or its client, calls the request; several attempts at one share it."""
    client: str
    input_tokens: int
    came_s: float
    model: str = ""
    promise: Promise | None = None
    decided_s: float | None = None
    why: str = ""
    worker: Figures | None = None
    next_best: Figures | None = None
    candidates: int = 0
    excluded: tuple[str, ...] = ()
    held: str = ""
    """Why it had to wait here; "": it did not."""
    standing: Mapping[str, object] | None = None
    """Where it stood when it came, if it waited in a group."""
    refused: str = ""
    outcome: str = ""
    cached_tokens: int | None = None
    ended_s: float | None = None


@dataclass
class PlacementRecord:
    """Is told what becomes of requests, and tells it again."""

    most: int = MOST
    _by_id: OrderedDict[str, Placed] = field(default_factory=OrderedDict, init=False, repr=False)
    _by_name: dict[str, dict[str, None]] = field(default_factory=dict, init=False, repr=False)

    def came(self, request: Request, name: str, now_s: float) -> None:
        """A gateway asks for a worker."""
        known = self._by_id.get(request.id)
        if known is not None:
            return
        placed = Placed(request.id, name[:MOST_NAME], request.client, request.input_tokens, now_s)
        placed.model, placed.promise = request.model, request.promise
        placed.excluded = request.exclude
        self._by_id[request.id] = placed
        if placed.name:
            self._by_name.setdefault(placed.name, {})[request.id] = None
        while len(self._by_id) > self.most:
            self._forget()

    def held(self, request_id: str, why: str, standing: Mapping[str, object] | None = None) -> None:
        """It waits here. `standing`: in which group, and behind what."""
        if (placed := self._by_id.get(request_id)) is not None:
            placed.held, placed.standing = why, standing

    def refused(self, request_id: str, reason: str, now_s: float) -> None:
        """It gets no worker."""
        if (placed := self._by_id.get(request_id)) is not None:
            placed.decided_s = placed.ended_s = now_s
            placed.refused, placed.outcome = reason, "refused"

    def placed(
        self,
        request: Request,
        chosen: WorkerView,
        why: str,
        match: Match,
        workers: Sequence[WorkerView],
        costs: Mapping[str, float] | None,
        now_s: float,
    ) -> None:
        """It goes to `chosen`, one of `workers`, because of `why`. `costs`: what the placement weighed, less is
        better; None: it has no such number."""
        placed = self._by_id.get(request.id)
        if placed is None:
            return
        placed.decided_s = now_s
        placed.candidates = len(workers)
        placed.why = why
        placed.worker = _figures(chosen, match, costs)
        others = [worker for worker in workers if worker is not chosen]
        placed.next_best = _figures(_best(others, match, costs), match, costs) if others else None

    def told(self, request: Request, worker: WorkerView, match: Match, now_s: float) -> None:
        """It was placed elsewhere, at `worker`."""
        self.came(request, "", now_s)
        placed = self._by_id[request.id]
        placed.decided_s, placed.why, placed.worker = now_s, "told", _figures(worker, match, None)

    def ended(self, request_id: str, outcome: str, cached_tokens: int | None, now_s: float) -> None:
        """It is over at its worker."""
        if (placed := self._by_id.get(request_id)) is not None and not placed.outcome:
            placed.outcome, placed.cached_tokens, placed.ended_s = outcome, cached_tokens, now_s

    def find(self, name: str, client: str | None, now_s: float) -> tuple[dict[str, Any], ...]:
        """The placements of this id, or of requests of this name, the latest first; of `client` only, if one is
        given."""
        ids = [name, *reversed(self._by_name.get(name[:MOST_NAME], {}))]
        found = (self._by_id[one] for one in dict.fromkeys(ids) if one in self._by_id)
        shown = [_shown(placed, now_s) for placed in found if client in (None, placed.client)]
        return tuple(shown[:MOST_FOUND])

    def __len__(self) -> int:
        return len(self._by_id)

    def _forget(self) -> None:
        request_id, placed = self._by_id.popitem(last=False)
        if placed.name:
            same = self._by_name[placed.name]
            del same[request_id]
            if not same:
                del self._by_name[placed.name]


_by_load = attrgetter("load", "name")


def _best(workers: Sequence[WorkerView], match: Match, costs: Mapping[str, float] | None) -> WorkerView:
    """Of these the one with the least cost, the longest match, the least load, in this order."""
    held = match.lengths
    if costs is None:  # those that hold nothing are looked at only if all are such
        holding = [worker for worker in workers if worker.name in held] if held else []
        if not holding:
            return min(workers, key=_by_load)
        return min(holding, key=lambda worker: (-held[worker.name], worker.load, worker.name))
    return min(
        workers,
        key=lambda worker: (costs.get(worker.name, 0.0), -match.of(worker.name), worker.load, worker.name),
    )


def _figures(worker: WorkerView, match: Match, costs: Mapping[str, float] | None) -> Figures:
    figures: Figures = {
        "worker": worker.name,
        "matched_tokens": match.of(worker.name),
        "load": round(worker.load, 3),
        "prefill_tokens": round(worker.prefill_tokens),
        "decode_tokens": round(worker.decode_tokens),
    }
    if costs is not None:
        cost = costs.get(worker.name)
        # None: the placement's rules ruled it out
        figures["cost"] = None if cost is None or not isfinite(cost) else round(cost, 1)
    return figures


def _shown(placed: Placed, now_s: float) -> dict[str, Any]:
    decided_s = now_s if placed.decided_s is None else placed.decided_s
    return {
        "id": placed.id,
        "request": placed.name,
        "client": placed.client,
        "came_s_ago": now_s - placed.came_s,
        "input_tokens": placed.input_tokens,
        "model": placed.model,
        "slo": None
        if placed.promise is None
        else {
            "class": placed.promise.slo_class,
            "slo_s": placed.promise.slo_s,
            "left_s": placed.promise.due_s - decided_s,  # when it was placed, or now
        },
        "waited_s": decided_s - placed.came_s,
        "waited_for": placed.held,
        "standing": placed.standing,
        "why": placed.why,
        "worker": placed.worker,
        "next_best": placed.next_best,
        "candidates": placed.candidates,
        "excluded": list(placed.excluded),
        "refused": placed.refused,
        "outcome": placed.outcome or None,
        "cached_tokens": placed.cached_tokens,
    }
