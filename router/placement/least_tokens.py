"""Least tokens: the worker that has the least to compute still, at the price of each token.

What a worker owes is w_e x the prompt tokens it has still to prefill + w_q x the output tokens it has still to
make, per unit of capacity. Prefill leaves out what the router believes to be cached there, and counts until
the request's first output is reported; output is what the client's past answers let expect.

Unit of fairness: none. Trade-off: sees length, where counting requests does not, and is as good as the
expected lengths; it does not follow caches, but a worker that happens to hold a prefix looks less busy after.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from router.placement.contract import Memoryless, Request, WorkerView, least
from router.radix import Match


@dataclass
class LeastTokens(Memoryless):
    """The two weights are the prices of a prompt and of an output token."""

    extend_weight: float = 1.0
    output_weight: float = 2.0

    def __post_init__(self) -> None:
        check_prices(self.extend_weight, self.output_weight)

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        """Who owes least; ties as in `least`."""
        return least(workers, owed(workers, self.extend_weight, self.output_weight)).name


def check_prices(extend_weight: float, output_weight: float) -> None:
    """Raises ValueError unless both prices are finite and not negative."""
    if not (0 <= extend_weight < math.inf and 0 <= output_weight < math.inf):
        raise ValueError("extend_weight and output_weight are finite and not negative")


def owed(workers: Sequence[WorkerView], extend_weight: float, output_weight: float) -> list[float]:
    """What each of `workers` has still to compute, in units of service per unit of capacity."""
    return [
        (extend_weight * worker.prefill_tokens + output_weight * worker.decode_tokens) / worker.capacity
        for worker in workers
    ]
