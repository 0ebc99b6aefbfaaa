"""How long things took, counted in the buckets of a Prometheus histogram."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper ends of the buckets of every histogram of ours; one more has no end."""


class Histogram:
    """Seconds. `observe` costs O(log buckets)."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum_s += seconds

    def plain(self) -> Mapping[str, Any]:
        return {"counts": list(self.counts), "sum_s": self.sum_s}


def cumulative(counts: Sequence[int]) -> list[tuple[str, float]]:
    """As Prometheus has them: (upper end, how many up to there)."""
    total, found = 0, []
    for end, count in zip((*map(str, SECONDS), "+Inf"), counts, strict=True):
        total += count
        found.append((end, float(total)))
    return found
