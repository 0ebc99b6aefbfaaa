"""Power of two choices: of two workers drawn at random, the less loaded.

Unit of fairness: none. Trade-off: nearly as even as a choice among all workers, and routers that do not know of each
other do not all choose the same worker; caches do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

from router.placement.contract import Placement, Request, WorkerView, least_loaded
from router.radix import Match


@dataclass
class PowerOfTwo(Placement):
    """The draws follow from `seed`. Give each router its own."""

    uses_caches: ClassVar[bool] = False
    uses_progress: ClassVar[bool] = False

    seed: int = 0

    _random: Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        """The less loaded of two different workers. If there is only one worker, that one."""
        return least_loaded(self._random.sample(workers, min(2, len(workers))))
