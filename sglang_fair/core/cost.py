"""What service costs: from tokens to units.

A cost function maps the extend and output tokens of one request to units and grows in both. It is charged
incrementally, so that a request's charges always sum to the function of what it received (VTC §4.2).
"""

from dataclasses import dataclass
from typing import Protocol


class Cost(Protocol):
    def __call__(self, extend_tokens: int, output_tokens: int) -> float:
        """Units that a request with these totals has cost. Zero for (0, 0); non-decreasing in each."""


@dataclass(frozen=True, slots=True)
class Linear:
    """w_e · extend + w_q · output (DLPM §3, VTC §3.2). The papers' prices, 1 and 2, are the default."""

    extend_weight: float = 1.0
    output_weight: float = 2.0

    def __post_init__(self) -> None:
        for name, value in (("extend weight", self.extend_weight), ("output weight", self.output_weight)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a finite number, at least 0, not {value!r}")
        if self.extend_weight == 0 == self.output_weight:
            raise ValueError("extend weight and output weight cannot both be 0: nothing would be charged")

    def __call__(self, extend_tokens: int, output_tokens: int) -> float:
        return self.extend_weight * extend_tokens + self.output_weight * output_tokens
