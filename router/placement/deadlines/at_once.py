"""Who is sent at once, if nobody waits before it: to which of the workers that have room.

To the one where least is to be done, the request's own tokens that are not cached there counted `RECOMPUTED` times. A
worker whose queue begins with another model is none of them.
"""

from collections.abc import Sequence
from math import inf
from operator import attrgetter

from router.placement.contract import Request, WorkerView
from router.queues.shares import OUTPUT_PRICE
from router.queues.virtual import VirtualQueues
from router.radix import Match

RECOMPUTED = 4.0
"""A prompt token that is not cached at a worker, in tokens that wait there: computing it again is lost to all. Chosen
among 1, 4 and 16 by the throughput of simulated trees and judges (one seed)."""


def at_once(
    request: Request,
    match: Match,
    views: Sequence[WorkerView],
    queues: VirtualQueues,
    tier: int,
    due_s: float,
    *,
    beyond: bool,
) -> str | None:
    """The worker's name; None if none of `views` has room. `beyond`: small requests of tier 0 may go beyond the window.
    Notes by how much answers are longer than expected."""
    best, least, tokens, held = None, inf, request.input_tokens, match.lengths.get
    workers, more = queues.workers, not tier
    for view in views:
        name = view.name
        worker = workers[name]
        worker.overrun_tokens = overrun = view.overrun_tokens
        left = RECOMPUTED * (tokens - held(name, 0)) + view.prefill_tokens + OUTPUT_PRICE * view.decode_tokens
        cost = left / view.capacity
        if cost > least or not worker.is_open:
            continue
        room = worker.kv_tokens - worker.in_flight_tokens - overrun
        if more:
            room += worker.chunk_tokens
        if (
            room <= 0
            and not (worker.evicts and worker.has_room(tier, due_s))
            and not (
                more and beyond and worker.is_small(request.client, tokens + request.expected_output_tokens)
            )
        ):
            continue
        if worker.groups and queues.wanted(name) not in (None, worker.loaded):
            continue
        if best is None or cost < least or _by_tokens(view) < _by_tokens(best):
            best, least = view, cost
    return None if best is None else best.name


_by_tokens = attrgetter("dispatched_tokens", "name")
