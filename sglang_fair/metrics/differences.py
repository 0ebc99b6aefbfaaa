"""How far apart the service of clients that wait has come, from readings of a replica's accounts.

A reading has, of each client that waits, the number of its backlog (`core.queue.Presence`) and what it was charged
divided by its weight; that is its service, where nobody else pays for it. Two readings with the same number say that
the client was backlogged all the time between, which is what the policies' bounds are about: they hold for every
interval that ends with the latest reading and in which both clients wait throughout. Here the intervals are those that
begin with one of the kept readings.

A client whose weight changes counts as one that begins to wait. O(readings · clients) for each reading.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_fair.core.fairness import jain

WINDOW_S = 60.0
"""Readings are kept for so long."""

MOST_READINGS = 64


@dataclass(frozen=True, slots=True)
class Waiting:
    """A client that waits, as one reading found it."""

    backlog: int
    service: float
    """In all, divided by its weight."""
    weight: float = 1.0

    def since(self, before: "Waiting | None") -> float | None:
        """What it was served since `before`, if it was backlogged all the time."""
        if before is None or (before.backlog, before.weight) != (self.backlog, self.weight):
            return None
        return self.service - before.service


class Differences:
    """Takes readings, and has two measures of the latest."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Mapping[str, Waiting]]] = deque()
        self.difference: float | None = None
        """Largest difference of two clients' service, by weight, over the intervals; None: no two have waited."""
        self.jain: float | None = None
        """Jain's index of what those got that waited for as long as readings are kept; None below two of them."""

    def read(self, now_s: float, waiting: Mapping[str, Waiting]) -> None:
        while self._readings and self._readings[0][0] < now_s - WINDOW_S:
            self._readings.popleft()
        self.difference = self.jain = None
        for _, before in self._readings:  # the longest interval first
            found = {client: one.since(before.get(client)) for client, one in waiting.items()}
            served = [service for service in found.values() if service is not None]
            if len(served) < 2:
                continue
            if self.jain is None:
                self.jain = jain(served)
            self.difference = max(self.difference or 0.0, max(served) - min(served))
        # Of many readings in a short time the first is kept: it begins the longest interval.
        if self._readings and now_s - self._readings[-1][0] < WINDOW_S / MOST_READINGS:
            return
        self._readings.append((now_s, dict(waiting)))
