"""Least tokens: the worker with the least work left, in tokens weighted by their prices.

The work of a worker is w_e x the prompt tokens that it has still to prefill + w_q x the output tokens that it has
still to decode, per unit of capacity. Prompt tokens that the router believes to be cached there do not count, the
others until the request's first output is reported. Output tokens are estimated from each client's past answers.

Unit of fairness: none. Trade-off: it sees the length of requests, and is as good as the expected lengths. It does not
follow caches, but a worker that happens to hold the prefix of a request looks less busy afterwards.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from router.placement.contract import Placement, Request, WorkerView, least
from router.radix import Match


@dataclass
class LeastTokens(Placement):
    """The two weights are the prices of a prompt token and of an output token."""

    extend_weight: float = 1.0
    output_weight: float = 2.0

    def __post_init__(self) -> None:
        check_prices(self.extend_weight, self.output_weight)

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        """The worker with the least work. Ties as in `least`."""
        work = [
            (self.extend_weight * worker.prefill_tokens + self.output_weight * worker.decode_tokens)
            / worker.capacity
            for worker in workers
        ]
        return least(workers, work).name


def check_prices(extend_weight: float, output_weight: float) -> None:
    """Raises ValueError unless both prices are finite and not negative."""
    if not (0 <= extend_weight < math.inf and 0 <= output_weight < math.inf):
        raise ValueError("extend_weight and output_weight are finite and not negative")
