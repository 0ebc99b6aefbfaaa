"""What one client has waiting, in its own order, and how much of that is within its share.

    order     by deadline; who is late already stands in a front of its own, by deadline too
    tag       the client's start + the cost of those before it in its front. The first of either front has the start
    within    those whose tag is at most a limit; they are always the first ones of a front

So more urgent work of a client goes before its other work, and pushes that out of its share: a backlog of batches does
not put the client's own chat behind others. And of those that are late one is always next, so none waits for ever
behind what its client goes on sending.

A change costs O(log) comparisons, moves a part of a list, and takes at most `STEPS` requests in or out of the share.
What is left to do is done with the next changes.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

STEPS = 32

Key = tuple[float, int, str]
"""Deadline, a number that nobody shares, id."""


@dataclass(slots=True)
class Front:
    """`within`: how many are within the share, and their `cost`."""

    keys: list[Key] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    within: int = 0
    cost: float = 0.0

    def put(self, key: Key, cost: float) -> bool:
        """One more waits. Whether it stands among those within."""
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.costs.insert(at, cost)
        if at < self.within:
            self.within += 1
            self.cost += cost
            return True
        return False

    def remove(self, key: Key) -> None:
        """It waits no more."""
        at = bisect_left(self.keys, key)
        assert self.keys[at] == key
        del self.keys[at]
        cost = self.costs.pop(at)
        if at < self.within:
            self.within -= 1
            self.cost = self.cost - cost if self.within else 0.0

    def settle(self, limit: float) -> tuple[list[str], list[str], bool]:
        """Who comes in and who goes out if those are within whose tag less the start is at most `limit`; and whether
        more is to be done."""
        come, go = list[str](), list[str]()
        for _ in range(STEPS):
            if self.within and self.cost - self.costs[self.within - 1] > limit:
                self.within -= 1
                self.cost = self.cost - self.costs[self.within] if self.within else 0.0
                go.append(self.keys[self.within][2])
            elif self.within < len(self.keys) and self.cost <= limit:
                self.cost += self.costs[self.within]
                come.append(self.keys[self.within][2])
                self.within += 1
            else:
                return come, go, False
        return come, go, True

    @property
    def next_tag(self) -> float | None:
        """The tag, less the start, of the first that is not within; None if all are."""
        return self.cost if self.within < len(self.keys) else None

    def __len__(self) -> int:
        return len(self.keys)
