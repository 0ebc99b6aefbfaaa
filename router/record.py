"""The latest placements: which worker, why that one, what the next best would have been, and what was waited for.

Of the two workers the figures are kept by which they can be compared. No prompt is in it, and no other client. What is
kept of a placement is compact, and formatted when it is shown.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice
from math import inf, isfinite
from typing import Any

import msgspec

from router.placement.contract import Request, WorkerView
from router.radix import Match
from sglang_fair.common.deadlines import Promise
from sglang_fair.common.record import MOST_ENDED, MOST_FOUND, MOST_NAME

AS_IS = (
    "id", "client", "input_tokens", "model", "waited_for", "standing", "why", "candidates", "refused", "cached_tokens"
)  # fmt: skip
"""What is shown of a placement without more ado."""

Figures = tuple[str, int, float, float, float, float | None]
"""A worker, what of the prompt it held, its load, prefill and decode tokens left, and what the placement weighed."""


class Placed(msgspec.Struct, gc=False, eq=False):
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
    """The worker was chosen (`placement_reason`); "told": another router, or a gateway without one, placed it."""
    worker: Figures | None = None
    next_best: Figures | None = None
    has_costs: bool = False
    candidates: int = 0
    waited_for: str = ""
    """Why it had to wait here; "": it did not."""
    standing: Mapping[str, object] | None = None
    """Where it stood when it came, if it waited in a group."""
    refused: str = ""
    outcome: str = ""
    cached_tokens: int | None = None


class PlacementRecord:
    """What became of the latest `most` requests. A request has a `name` besides its id: what its gateway, or its
    client, calls it. It is written down once: when it is placed or refused, or begins to wait."""

    def __init__(self, most: int = MOST_ENDED) -> None:
        self._most = most
        self._by_id: OrderedDict[str, Placed] = OrderedDict()
        """In order of arrival."""

    def _of(self, request: Request, name: str, now_s: float) -> Placed:
        placed = self._by_id.get(request.id)
        if placed is None:
            placed = self._by_id[request.id] = Placed(
                request.id, name[:MOST_NAME], request.client, request.input_tokens, now_s, request.model,
                request.promise, request.exclude,
            )  # fmt: skip
            if len(self._by_id) > self._most:
                self._by_id.popitem(last=False)
        return placed

    def note(self, request: Request, name: str, now_s: float, **known: object) -> None:
        """These fields are known of a request that waits here, gets no worker, or was placed elsewhere."""
        placed = self._of(request, name, now_s)
        for field, value in known.items():
            setattr(placed, field, value)

    def placed(
        self,
        request: Request,
        name: str,
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
        placed = self._of(request, name, now_s)
        placed.decided_s, placed.why, placed.candidates = now_s, why, len(workers)
        if costs is None:
            placed.worker = figures(chosen, match, None)
            if len(workers) > 1:
                placed.next_best = figures(_next_best(workers, chosen, match, by_name), match, None)
            return
        placed.has_costs = True
        at = workers.index(chosen)
        placed.worker = figures(chosen, match, costs[at])
        if len(workers) > 1:
            others = [*costs]
            others[at] = inf
            second = others.index(min(others))
            if second == at:  # each other one is out of the question
                second = int(not at)
            placed.next_best = figures(workers[second], match, costs[second])

    def ended(self, request_id: str, outcome: str, cached_tokens: int | None) -> None:
        """It is over at its worker."""
        placed = self._by_id.get(request_id)
        if placed is not None and not placed.outcome:
            placed.outcome, placed.cached_tokens = outcome, cached_tokens

    def find(self, name: str, client: str | None, now_s: float) -> tuple[dict[str, Any], ...]:
        """The placements of this id, or of requests of this name, the latest first; of `client` only, if one is given.
        JSON-ready."""
        name = name[:MOST_NAME]
        found = (
            placed
            for placed in reversed(self._by_id.values())
            if name in (placed.id[:MOST_NAME], placed.name) and client in (None, placed.client)
        )
        return tuple(_shown(placed, now_s) for placed in islice(found, MOST_FOUND))

    def __len__(self) -> int:
        return len(self._by_id)


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
    if worker.name in match.holders:
        return "prefix"
    longest = max([held[one.name] for one in allowed if one.name in held], default=0)
    if not longest:
        return "new"
    return "prefix" if held.get(worker.name, 0) == longest else "load"


def _next_best(
    workers: Sequence[WorkerView], chosen: WorkerView, match: Match, by_name: Mapping[str, WorkerView]
) -> WorkerView:
    """Of the workers beside `chosen` one with the longest match, of these the one of least load. Only those that hold
    something are looked at, if there are any."""
    found, longest, least, own = chosen, 0, inf, chosen.name
    for name, tokens in match.lengths.items():
        if tokens >= longest and name != own:
            worker = by_name[name]
            load = worker.load
            if (tokens > longest or load < least) and worker in workers:
                found, longest, least = worker, tokens, load
    if found is not chosen:
        return found
    others = [worker for worker in workers if worker is not chosen]
    loads = [worker.load for worker in others]
    return others[loads.index(min(loads))]


def figures(worker: WorkerView, match: Match, cost: float | None) -> Figures:
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
    promise = placed.promise
    return {
        **{name: getattr(placed, name) for name in AS_IS},
        "request": placed.name,
        "came_s_ago": now_s - placed.came_s,
        "slo": None
        if promise is None
        else {
            "class": promise.slo_class,
            "slo_s": promise.slo_s,
            "left_s": promise.due_s - decided_s,  # when it was placed, or now
        },
        "waited_s": decided_s - placed.came_s,
        "worker": _shown_figures(placed.worker, placed.has_costs),
        "next_best": _shown_figures(placed.next_best, placed.has_costs),
        "excluded": list(placed.excluded),
        "outcome": placed.outcome or None,
    }
