"""D2LPM that measures load in tokens still to be computed instead of requests.

All else is as in `d2lpm`. The least loaded worker is the one with the least w_e x tokens to prefill + w_q x tokens to
decode, per unit of capacity (`least_tokens`). So a worker with one long prompt does not pass for less busy than one
with three short questions.

Unit of fairness and guarantee: those of `d2lpm`, whose proof does not depend on what load is. Trade-off: the loads are
as right as the expected lengths of the answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from router.placement.contract import WorkerView, least
from router.placement.d2lpm import D2lpm
from router.placement.least_tokens import work_left


@dataclass
class D2lpmTokens(D2lpm):
    """The two weights are the prices both in the charges and in the loads."""

    uses_progress: ClassVar[bool] = True

    def _least_loaded(self, workers: Sequence[WorkerView]) -> str:
        return least(workers, work_left(workers, self.extend_weight, self.output_weight)).name
