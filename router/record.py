"""The latest placements: which worker, why that one, what the next best would have been, and what was waited for.

    why       the worker that was chosen
    told      had the request already: another router, or a gateway without one, placed it
    others    as `placement_reason` says

Of the two workers the figures are kept by which they can be compared. No prompt is in it, and no other client. What is
kept of a placement is compact, and formatted when it is shown. Bounded: the last `most` requests.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import msgspec

from router.placement.contract import Request, WorkerView
from router.radix import Match
from sglang_fair.common.deadlines import Promise

MOST = 4096
MOST_FOUND = 16
"""Placements that are shown of one name."""
MOST_NAME = 128
"""Characters of a name that a client may have chosen."""

Figures = tuple[str, int, float, float, float, float | None]
"""A worker, what of the prompt it held, its load, prefill and decode tokens left, and what the placement weighed."""


class Placed(msgspec.Struct, gc=False):
    """What is known of one placement. Times are by the router's clock."""

    id: str
    name: str
    """What its gateway, or its client, calls the request; several attempts at one share it."""
    client: str
    input_tokens: int
    came_s: float
    model: str = ""
    promise: Promise | None = None
    excluded: tuple[str, ...] = ()
    decided_s: float | None = None
    why: str = ""
    worker: Figures | None = None
    next_best: Figures | None = None
    has_costs: bool = False
    candidates: int = 0
    held: str = ""
    """Why it had to wait here; "": it did not."""
    standing: Mapping[str, object] | None = None
    """Where it stood when it came, if it waited in a group."""
    refused: str = ""
    outcome: str = ""
    cached_tokens: int | None = None


@dataclass
class PlacementRecord:
    """What became of the latest requests."""

    most: int = MOST
    _order: deque[Placed] = field(default_factory=deque, init=False, repr=False)
    _by_id: dict[str, Placed] = field(default_factory=dict, init=False, repr=False)
    _by_name: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False, repr=False)

    def came(self, request: Request, name: str, now_s: float) -> None:
        """A gateway asks for a worker."""
        if request.id in self._by_id:
            return
        name = name[:MOST_NAME]
        placed = Placed(
            request.id, name, request.client, request.input_tokens, now_s, request.model, request.promise,
            request.exclude,
        )  # fmt: skip
        self._by_id[request.id] = placed
        self._order.append(placed)
        if name:
            self._by_name[name] = (*self._by_name.get(name, ()), request.id)
        if len(self._order) > self.most:
            self._forget(self._order.popleft())

    def held(self, request_id: str, why: str, standing: Mapping[str, object] | None = None) -> None:
        """It waits here. `standing`: in which group, and behind what."""
        if (placed := self._by_id.get(request_id)) is not None:
            placed.held, placed.standing = why, standing

    def refused(self, request_id: str, reason: str, now_s: float) -> None:
        """It gets no worker."""
        if (placed := self._by_id.get(request_id)) is not None:
            placed.decided_s, placed.refused, placed.outcome = now_s, reason, "refused"

    def placed(
        self,
        request: Request,
        chosen: WorkerView,
        why: str,
        match: Match,
        workers: Sequence[WorkerView],
        costs: Sequence[float] | None,
        by_name: Mapping[str, WorkerView],
        now_s: float,
    ) -> None:
        """It goes to `chosen`, one of `workers`, because of `why`. `costs`: what the placement weighed of each, less is
        better; None: it has no such number. `by_name` are all workers."""
        placed = self._by_id.get(request.id)
        if placed is None:
            return
        placed.decided_s, placed.why, placed.candidates = now_s, why, len(workers)
        placed.has_costs = costs is not None
        if costs is None:
            placed.worker = _figures(chosen, match, None)
            if len(workers) > 1:
                placed.next_best = _figures(_next_best(workers, chosen, match, by_name), match, None)
            return
        at = workers.index(chosen)
        placed.worker = _figures(chosen, match, costs[at])
        if len(workers) > 1:
            others = [*costs]
            del others[at]
            second = others.index(min(others))
            second += second >= at
            placed.next_best = _figures(workers[second], match, costs[second])

    def told(self, request: Request, worker: WorkerView, match: Match, now_s: float) -> None:
        """It was placed elsewhere, at `worker`."""
        self.came(request, "", now_s)
        placed = self._by_id[request.id]
        placed.decided_s, placed.why, placed.worker = now_s, "told", _figures(worker, match, None)

    def ended(self, request_id: str, outcome: str, cached_tokens: int | None) -> None:
        """It is over at its worker."""
        placed = self._by_id.get(request_id)
        if placed is not None and not placed.outcome:
            placed.outcome, placed.cached_tokens = outcome, cached_tokens

    def find(self, name: str, client: str | None, now_s: float) -> tuple[dict[str, Any], ...]:
        """The placements of this id, or of requests of this name, the latest first; of `client` only, if one is
        given."""
        ids = [name, *reversed(self._by_name.get(name[:MOST_NAME], ()))]
        found = (self._by_id[one] for one in dict.fromkeys(ids) if one in self._by_id)
        shown = [_shown(placed, now_s) for placed in found if client in (None, placed.client)]
        return tuple(shown[:MOST_FOUND])

    def __len__(self) -> int:
        return len(self._by_id)

    def _forget(self, placed: Placed) -> None:
        del self._by_id[placed.id]
        if placed.name:
            same = self._by_name[placed.name][1:]  # the first of a name came first
            if same:
                self._by_name[placed.name] = same
            else:
                del self._by_name[placed.name]


def placement_reason(
    request: Request, worker: WorkerView, match: Match, allowed: Sequence[WorkerView]
) -> str:
    """Why `request` goes to `worker`, in a word; `allowed` are those that it could have gone to.

    retry: a replica failed it before. only: there was no other. prefix: none of them has more of its prompt. new: none
    has any of it. load: another one has more of it, but the placement preferred this one.
    """
    if request.exclude:
        return "retry"
    if len(allowed) == 1:
        return "only"
    held = match.lengths
    if not held:
        return "new"
    own = held.get(worker.name, 0)
    if own == match.tokens:
        return "prefix"
    longest = max([held.get(one.name, 0) for one in allowed])
    if not longest:
        return "new"
    return "prefix" if own == longest else "load"


def _next_best(
    workers: Sequence[WorkerView], chosen: WorkerView, match: Match, by_name: Mapping[str, WorkerView]
) -> WorkerView:
    """Of the workers beside `chosen` one with the longest match, of these the one of least load. Only those that hold
    something are looked at, if there are any."""
    lengths = match.lengths
    names = [name for name in lengths if name != chosen.name]
    if names:
        longest = max([lengths[name] for name in names])
        holders = [by_name[name] for name in names if lengths[name] == longest]
        others = [worker for worker in holders if worker in workers]
    if not names or not others:
        others = [worker for worker in workers if worker is not chosen]
    loads = [worker.load for worker in others]
    return others[loads.index(min(loads))]


def _figures(worker: WorkerView, match: Match, cost: float | None) -> Figures:
    name = worker.name
    return (
        name, match.lengths.get(name, 0), worker.load, worker.prefill_tokens, worker.decode_tokens, cost
    )  # fmt: skip


def _shown_figures(figures: Figures | None, has_costs: bool) -> dict[str, Any] | None:
    if figures is None:
        return None
    name, matched_tokens, load, prefill_tokens, decode_tokens, cost = figures
    shown: dict[str, Any] = {
        "worker": name,
        "matched_tokens": matched_tokens,
        "load": round(load, 3),
        "prefill_tokens": round(prefill_tokens),
        "decode_tokens": round(decode_tokens),
    }
    if has_costs:  # None: the placement's rules ruled it out
        shown["cost"] = None if cost is None or not isfinite(cost) else round(cost, 1)
    return shown


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
        "worker": _shown_figures(placed.worker, placed.has_costs),
        "next_best": _shown_figures(placed.next_best, placed.has_costs),
        "candidates": placed.candidates,
        "excluded": list(placed.excluded),
        "refused": placed.refused,
        "outcome": placed.outcome or None,
        "cached_tokens": placed.cached_tokens,
    }
