"""Round robin over requests: each worker in turn, whoever asks. SGLang's own default.

Unit of fairness: none; a client gets service in proportion to what it sends. Trade-off: every worker gets the same
number of requests; neither their length nor caches count. With a local LPM queue it is the baseline "RR + LPM" of the
DLPM paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from router.placement.contract import Placement, Request, WorkerView
from router.radix import Match


@dataclass
class RoundRobin(Placement):
    """Remembers the last worker; the next one by name is next."""

    uses_caches: ClassVar[bool] = False
    uses_progress: ClassVar[bool] = False

    _last: str = field(default="", init=False, repr=False)

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        """The worker after the last one, in the order of names."""
        return after(self._last, workers)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        """Remembers the worker."""
        self._last = worker


def after(last: str, workers: Sequence[WorkerView]) -> str:
    """The first name greater than `last`, or the first of all. `workers` are in the order of names."""
    return next((worker.name for worker in workers if worker.name > last), workers[0].name)
