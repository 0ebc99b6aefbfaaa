"""The worker of least cost; the costs differ. None of them is fair to clients. Ties go to the worker that was sent
fewer tokens so far, then by name.

    least_requests  the requests in flight, per capacity: neither the length of requests nor caches count
    power_of_two    the same, of two workers drawn at random: nearly as even, and routers that do not know of each other
                    do not all choose the same worker
    least_tokens    the work left: w_e x the prompt tokens still to prefill + w_q x the output tokens still to decode,
                    per capacity. Prompt tokens that are believed to be cached do not count. As good as the expected
                    lengths
    lmetric         (arXiv 2603.15202) the request's own prompt tokens that are not cached there, times the requests in
                    flight there and one more: a worker that is twice as busy must have half as much to compute. The
                    product is small where either factor is, so a request that is cached nearly whole goes to its holder
                    however long the queue there. Here the requests in flight are divided by the capacity, and a prompt
                    that is cached whole counts as one token, because an engine always computes the last one
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

from router.placement.contract import Placement, Request, WorkerView, least, least_loaded
from router.radix import Match


@dataclass
class LeastRequests(Placement):
    """It has no parameters."""

    uses_caches: ClassVar[bool] = False
    uses_progress: ClassVar[bool] = False

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        return least_loaded(workers)


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
        return least_loaded(self._random.sample(workers, min(2, len(workers))))


@dataclass
class LeastTokens(Placement):
    """The two weights are the prices of a prompt token and of an output token."""

    extend_weight: float = 1.0
    output_weight: float = 2.0

    def __post_init__(self) -> None:
        check_prices(self.extend_weight, self.output_weight)

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        prompt, output = self.extend_weight, self.output_weight
        work = [
            (prompt * worker.prefill_tokens + output * worker.decode_tokens) / worker.capacity
            for worker in workers
        ]
        return least(workers, work).name


@dataclass
class LMetric(Placement):
    """It has no parameters."""

    uses_progress: ClassVar[bool] = False

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        held, tokens = match.lengths.get, request.input_tokens
        costs = [max(1, tokens - held(worker.name, 0)) * (worker.load + 1) for worker in workers]
        return least(workers, costs).name


def check_prices(extend_weight: float, output_weight: float) -> None:
    """Raises ValueError unless both prices are finite and not negative."""
    if not (0 <= extend_weight < math.inf and 0 <= output_weight < math.inf):
        raise ValueError("extend_weight and output_weight are finite and not negative")
