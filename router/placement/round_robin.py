"""Round robin over requests: each worker in turn, whoever asks. SGLang's own default.

Unit of fairness: none; a client gets as much of a worker as it sends. Trade-off: even in the number of
requests, blind to their length and to caches. With a local LPM queue it is the baseline "RR + LPM" of
the DLPM paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from router.placement.contract import Memoryless, Request, WorkerView
from router.radix import Match


@dataclass
class RoundRobin(Memoryless):
    """One pointer for all: the next worker by name after the last one chosen."""

    uses_caches: ClassVar[bool] = False
    uses_progress: ClassVar[bool] = False

    _last: str = field(default="", init=False, repr=False)

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        """The worker after the last one, in the order of names."""
        return after(self._last, workers)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        """Moves the pointer."""
        self._last = worker


def after(last: str, workers: Sequence[WorkerView]) -> str:
    """The first name greater than `last`, or the first of all; `workers` are in the order of names."""
    return next((worker.name for worker in workers if worker.name > last), workers[0].name)
