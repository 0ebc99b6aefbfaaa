"""What clients got at one replica while all of them waited there."""

from collections.abc import Mapping
from typing import Any


class Shares:
    """Sums up service over the stretches in which all of `weights` waited at a replica without a break.

    A stretch ends when somebody has nothing waiting, which happens now and then where a router holds requests, and more
    often on a busy machine. In each the differences, by weight, must be inside the bound that the replica reports.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.stretches = 0
        """Until now, the one under way included."""
        self._begin: dict[str, tuple[float, int | None]] = {}
        self._before = self._stretch = dict.fromkeys(weights, 0.0)

    def see(self, book: Mapping[str, Any]) -> dict[str, float]:
        """A further GET /fair of the replica; what each got until now. AssertionError beyond the bound."""
        clients = book["clients"]
        now = {
            name: (clients[name]["service"], clients[name]["backlog"])
            for name in self._weights
            if name in clients
        }
        if not self._begin or any(
            now.get(name, (0, None))[1] != begin[1] for name, begin in self._begin.items()
        ):
            self._before = self.got
            self._stretch = dict.fromkeys(self._weights, 0.0)
            waits = len(now) == len(self._weights) and all(backlog is not None for _, backlog in now.values())
            self._begin = now if waits else {}
            self.stretches += waits
        if self._begin:
            self._stretch = {name: now[name][0] - begin for name, (begin, _) in self._begin.items()}
            by_weight = [service / self._weights[name] for name, service in self._stretch.items()]
            assert max(by_weight) - min(by_weight) <= book["bound"], (self._stretch, book["bound"])
        return self.got

    @property
    def got(self) -> dict[str, float]:
        """Service by client, in all stretches."""
        return {name: before + self._stretch[name] for name, before in self._before.items()}
