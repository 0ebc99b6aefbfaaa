"""Cache-aware, the rule of sglang-router: follow the cached prefix until the loads are out of balance.

For each request, with load the number of requests in flight:

* If the loads are *out of balance*, that is max - min > `balance_abs` and max > `balance_rel` x min: the least loaded
  worker.
* Else, if more than `cache_threshold` of the prompt is cached somewhere: the first worker that holds the longest
  match.
* Else the least loaded worker. Ties go to the worker that was sent fewer requests, then by name.

Unit of fairness: none. Known leaks, kept because they are the rule: both conditions of the imbalance must hold, so
64 requests of skew per worker are tolerated; affinity and balance switch as a whole; of several holders one gets
everything; every request counts as one, whatever its length.

Differences: sglang-router guesses from what it once routed, in a tree of its own; here, as for all placements, the
match comes from the shared tree that follows the replicas' own events, and loads are per unit of capacity. It
replaces an unhealthy holder by the first healthy worker; here excluded workers are left out beforehand, so another
holder is taken, or the first worker if there is none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from router.placement.contract import Placement, Request, WorkerView, least
from router.radix import Match


@dataclass
class CacheAware(Placement):
    """The thresholds have sglang-router's names and defaults."""

    uses_progress: ClassVar[bool] = False

    cache_threshold: float = 0.3
    balance_abs: float = 64
    balance_rel: float = 1.5

    def __post_init__(self) -> None:
        if not 0 <= self.cache_threshold <= 1:
            raise ValueError(f"cache_threshold is {self.cache_threshold}: it is a share, from 0 to 1")
        if not (0 <= self.balance_abs < math.inf and 1 <= self.balance_rel < math.inf):
            raise ValueError("balance_abs is at least 0, balance_rel a ratio of at least 1, both finite")

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        loads = [worker.load for worker in workers]
        most, fewest = max(loads), min(loads)
        out_of_balance = most - fewest > self.balance_abs and most > self.balance_rel * fewest
        if not out_of_balance and match.tokens > self.cache_threshold * request.input_tokens:
            for worker in workers:
                if worker.name in match.holders:
                    return worker.name
            return workers[0].name
        return least(workers, loads, "dispatched").name
