"""D2LPM whose queue size counts what is still to be computed, not requests.

As `d2lpm` in all else: the least loaded worker is the one that owes least, w_e x tokens to prefill +
w_q x tokens to decode, per unit of capacity (`least_tokens`). A worker with one long prompt is then not taken
for less busy than one with three short questions.

Unit of fairness and guarantee: those of `d2lpm`, whose proof does not ask what load is. Trade-off: leans on the
expected lengths of answers, and so is as even as they are right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from router.placement.contract import WorkerView, least
from router.placement.d2lpm import D2lpm
from router.placement.least_tokens import owed


@dataclass
class D2lpmTokens(D2lpm):
    """The two weights are prices in the charges and in the loads alike."""

    uses_progress: ClassVar[bool] = True

    def _least_loaded(self, workers: Sequence[WorkerView]) -> str:
        return least(workers, owed(workers, self.extend_weight, self.output_weight)).name
