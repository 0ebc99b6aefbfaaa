"""Clients' shares: how much more one client is entitled to than another."""

from collections.abc import Mapping
from math import inf


class Weights:
    """A weight per client, 1.0 unless set. Service is divided by it before clients are compared."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights: dict[str, float] = {}
        for client, weight in (weights or {}).items():
            self.set(client, weight)

    def set(self, client: str, weight: float) -> None:
        """Raises ValueError unless `weight` is a positive finite number."""
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < inf:
            raise ValueError(f"weight of client {client!r} must be a positive number, not {weight!r}")
        self._weights[client] = float(weight)

    def of(self, client: str) -> float:
        return self._weights.get(client, 1.0)

    def smallest(self) -> float:
        return min([1.0, *self._weights.values()])

    def items(self) -> Mapping[str, float]:
        """The weights that were set; every other client's is 1.0."""
        return self._weights
