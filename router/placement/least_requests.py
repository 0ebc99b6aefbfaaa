"""Least requests: the worker with the fewest requests in flight, per unit of capacity.

Unit of fairness: none. Trade-off: at any moment the workers have equal numbers of requests, so a slow one gets fewer;
neither the length of requests nor caches count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from router.placement.contract import Placement, Request, WorkerView, least_loaded
from router.radix import Match


@dataclass
class LeastRequests(Placement):
    """Ties go to the worker that was sent fewer tokens so far, then by name."""

    uses_caches: ClassVar[bool] = False
    uses_progress: ClassVar[bool] = False

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        """The least loaded worker."""
        return least_loaded(workers)
