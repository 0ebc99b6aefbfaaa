"""From measured times to a cost model: non-negative least squares of `Fitted`'s coefficients.

A measurement is the time that one batch took, from the start of its prefill to the end of its last decode step. It is
linear in the coefficients, so the fit is a linear problem. Errors are relative to the measured time; otherwise the long
measurements alone would decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from sglang_fair.sim.cost_model import CostModel, Fitted


@dataclass(frozen=True, slots=True)
class Measurement:
    """One batch of requests: what was asked of the engine, and how long it took."""

    extends: tuple[tuple[int, int], ...]
    """Of each request, the tokens computed and the tokens found in the cache."""
    steps: int
    """Decode steps after the prefill: each request got 1 + `steps` tokens."""
    seconds: float

    def __post_init__(self) -> None:
        if not (self.extends and self.steps >= 0 and self.seconds > 0):
            raise ValueError(f"not a measurement: {self}")

    def predicted_s(self, model: CostModel) -> float:
        """How long the batch takes according to `model`. The prefill gives each request its first token."""
        context = sum(extend + cached + 1 for extend, cached in self.extends)
        return model.prefill_s(self.extends) + model.decode_s(len(self.extends), context, self.steps)


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of a model, |predicted - measured| / measured, over some measurements."""

    median: float
    p90: float
    worst: float


def fit(measurements: Sequence[Measurement]) -> Fitted:
    """The non-negative coefficients with the least sum of squared relative errors.

    ValueError if the measurements do not determine them.
    """
    count = len(fields(Fitted))
    units = [Fitted(*unit) for unit in np.eye(count).tolist()]
    features = np.array([[each.predicted_s(unit) for unit in units] for each in measurements])
    scale = np.maximum(np.linalg.norm(features, axis=0), np.finfo(float).tiny)
    if len(measurements) < count or np.linalg.matrix_rank(features / scale) < count:
        raise ValueError(
            f"{len(measurements)} measurements do not tell {count} coefficients apart: vary prompts, cached "
            "prefixes, batch sizes and contexts"
        )
    relative = features / np.array([[each.seconds] for each in measurements])
    return Fitted(*(float(value) for value in non_negative(relative, np.ones(len(measurements)))))


def errors(model: CostModel, measurements: Sequence[Measurement]) -> Errors:
    """How far `model` is from `measurements`. ValueError if there are none."""
    if not measurements:
        raise ValueError("nothing was measured")
    off = [abs(each.predicted_s(model) / each.seconds - 1) for each in measurements]
    return Errors(float(np.median(off)), float(np.quantile(off, 0.9)), max(off))


def non_negative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """x ≥ 0 with the least |matrix · x - target|, for a matrix of few columns and full rank.

    The solution is the ordinary one of the columns that it uses, so trying all sets of columns finds it.
    """
    scale = np.linalg.norm(matrix, axis=0)
    best, least = np.zeros(matrix.shape[1]), float(np.linalg.norm(target))
    for size in range(matrix.shape[1], 0, -1):
        for columns in map(list, combinations(range(matrix.shape[1]), size)):
            found = np.linalg.lstsq(matrix[:, columns] / scale[columns], target, rcond=None)[0]
            rest = float(np.linalg.norm(matrix[:, columns] / scale[columns] @ found - target))
            if found.min() >= 0 and rest < least:
                best, least = np.zeros(matrix.shape[1]), rest
                best[columns] = found / scale[columns]
    return best
