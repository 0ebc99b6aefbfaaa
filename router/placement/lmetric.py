"""LMetric (arXiv 2603.15202): the least product of the tokens that the request needs there and the requests there.

For each worker the cost is the request's own prompt tokens that are not cached there, times the requests in flight
there and one more. So it weighs locality and load without a parameter: a worker that is twice as busy must have half
as much to compute.

Unit of fairness: none. Trade-off: the product is small where either factor is, so a request that is cached nearly
whole goes to its holder however long the queue there is.

Differences: the requests in flight are divided by the capacity. A prompt that is cached whole counts as one token,
because an engine always computes the last one; so among several such workers the least busy is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from router.placement.contract import Placement, Request, WorkerView, least
from router.radix import Match


@dataclass
class LMetric(Placement):
    """It has no parameters."""

    uses_progress: ClassVar[bool] = False

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        """The worker of least cost. Ties as in `least`."""
        held, tokens = match.lengths.get, request.input_tokens
        return least(
            workers, [max(1, tokens - held(worker.name, 0)) * (worker.load + 1) for worker in workers]
        ).name
