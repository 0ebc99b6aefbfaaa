"""What service costs: from tokens to units.

A cost function maps what one request was given to units: `extend_tokens` computed behind `cached_tokens`
that it found in the cache, and `output_tokens`. It is zero before anything was computed and grows with
every token. It is charged incrementally, as the difference that the new tokens make, so a request's charges
sum to the function of what it received, however the work was cut into chunks and steps (VTC §4.2).
Fairness is relative to the function: equal service under one is unequal under another.
"""

from dataclasses import dataclass
from typing import Protocol


class Cost(Protocol):
    """Units of one request's service."""

    def __call__(self, extend_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        """Zero for (0, 0), whatever is cached; non-decreasing in extend and output tokens."""

    def dearest(self, input_tokens: int, output_tokens: int, owed_tokens: int) -> tuple[float, float]:
        """For the theorems' U: most units that one prompt of up to `input_tokens` can cost, and most that
        `owed_tokens` of output can cost when no prompt is longer than that and no output longer than
        `output_tokens` (VTC §4.2: the two parts of U for a general function)."""


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

    def __call__(self, extend_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        return self.extend_weight * extend_tokens + self.output_weight * output_tokens

    def dearest(self, input_tokens: int, output_tokens: int, owed_tokens: int) -> tuple[float, float]:
        return self.extend_weight * input_tokens, self.output_weight * owed_tokens
