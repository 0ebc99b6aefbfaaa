"""Clients' shares: how much more one client is entitled to than another.

A weight is *set* by the settings or by hand, or *told* by a request, which carries what the newest tenants' file says
of its client. What was told wins. Of two tellings the one with the later version wins, in whatever order they come, so
it does not matter which gateway was the first to read a new file.
"""

from collections.abc import Callable, Mapping
from math import inf

MOST_WEIGHT = 1e6
"""Largest weight of a client, and one over the smallest: farther apart, the smaller share is none."""

KEPT = 1024
"""So many clients' tellings are kept before those that nobody needs are dropped."""


class Weights:
    """A weight per client, 1.0 unless set or told. Service is divided by it before clients are compared.

    A bound on that needs the smallest divisor of all charges that still count, so a weight that a client has no more is
    remembered until `settle` is told that it does not matter any longer.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        if not isinstance(weights, Mapping | None):
            raise ValueError(f"client_weights is {weights!r}: it maps clients to weights")
        self._set: dict[str, float] = {}
        self._told: dict[str, tuple[float, int]] = {}
        """Weight and version."""
        self._many = KEPT
        self._least: float | None = 1.0
        """Of those in force; None: to be looked up."""
        self._former: dict[str, float] = {}
        """The smallest weight of each client that had one below 1 and below its present one."""
        self._ended = self._ended_before = inf
        """The smallest of what was in `_former`: since everybody waited anew, and in the time before that."""
        self._least_ever = 1.0
        for client, weight in (weights or {}).items():
            self.set(client, weight)

    def set(self, client: str, weight: float) -> None:
        """Raises ValueError unless `weight` is a positive finite number."""
        weight, before = _checked(client, weight), self.of(client)
        self._set[client] = weight
        self._changed(client, before)

    def is_news(self, client: str, weight: float, version: int) -> bool:
        """Whether `tell` would note anything. O(1)."""
        told = self._told.get(client)
        return told is None or (told[1] <= version and told != (weight, version))

    def tell(self, client: str, weight: float, version: int = 0) -> bool:
        """A request says that its client has `weight`, by the `version` of the tenants' file. Returns whether that
        changes the client's weight. O(1). Raises ValueError as `set`."""
        if not self.is_news(client, weight, version):
            return False
        weight, before = _checked(client, weight), self.of(client)
        self._told[client] = weight, version
        return self._changed(client, before)

    def of(self, client: str) -> float:
        told = self._told.get(client)
        return self._set.get(client, 1.0) if told is None else told[0]

    def smallest(self) -> float:
        """The smallest weight by which a charge that still counts may have been divided."""
        if self._least is None:
            self._least = min((self.of(client) for client in (*self._set, *self._told)), default=1.0)
        return min(1.0, self._least, self._ended, self._ended_before, *self._former.values())

    def smallest_ever(self) -> float:
        """The same of all charges since the start."""
        return self._least_ever

    def items(self) -> Mapping[str, float]:
        """The weights that were set or told; every other client's is 1.0."""
        return {client: self.of(client) for client in (*self._set, *self._told)}

    # ---- memory

    @property
    def are_many(self) -> bool:
        """Whether to call `forget`."""
        return len(self._told) > self._many

    def forget(self, is_needed: Callable[[str], bool]) -> None:
        """Drop what was told of clients that are not needed: the next request of one tells it again. Amortised O(1) for
        each client that is told, if it is called when they `are_many`."""
        for client in [client for client in self._told if not is_needed(client)]:
            del self._told[client]
        self._end_former(is_needed)
        self._many = max(KEPT, 2 * len(self._told))
        self._least = None

    def settle(self, matters: Callable[[str], bool], anew: bool) -> None:
        """`matters`: whether a client runs or owes. `anew`: everybody who waits has begun to since it was last True."""
        self._end_former(matters)
        if anew:
            self._ended_before, self._ended = self._ended, inf

    # ---- inside

    def _end_former(self, matters: Callable[[str], bool]) -> None:
        for client in [client for client in self._former if not matters(client)]:
            self._ended = min(self._ended, self._former.pop(client))

    def _changed(self, client: str, before: float) -> bool:
        """The weight of `client` was `before`. Whether it is another one now."""
        weight = self.of(client)
        if weight == before:
            return False
        self._least_ever = min(self._least_ever, weight)
        if self._least is not None and weight <= self._least:
            self._least = weight
        elif before == self._least:
            self._least = None
        if before < min(1.0, weight):
            self._former[client] = min(before, self._former.get(client, inf))
        return True


def _checked(client: str, weight: float) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < inf:
        raise ValueError(f"weight of client {client!r} must be a positive number, not {weight!r}")
    return float(weight)
