"""What there is room for, shared by clients, so that one that floods it leaves room to the others.

Rule. A client may take as much again as leaves it with no more than what was free before (Choudhury and Hahne
1998, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", with α = 1).
Unit: whatever is counted, requests or bytes. Bound: a client alone holds half at most and leaves the other half;
n that take all they can come to 1 / (n + 1) each, and as much stays free for whoever comes next. What becomes free
goes first to those who hold least. Knobs: the size. Leaks: weights do not count, for here is no service but only
the right to wait for it; and nothing is taken back from those who came before the others.
"""

from collections import Counter


class Room:
    """So much room, and who holds how much of it. Nothing is kept of a client that holds nothing."""

    def __init__(self, size: int) -> None:
        """`size` is what all may hold together."""
        self.size = size
        self.taken = 0
        self._held: Counter[str] = Counter()

    def take(self, client: str, amount: int = 1) -> bool:
        """Whether `client` now holds so much more; if not, nothing has changed."""
        if not amount:
            return True
        if self._held[client] + amount > self.size - self.taken:
            return False
        self._held[client] += amount
        self.taken += amount
        return True

    def give(self, client: str, amount: int = 1) -> None:
        """`client` gives so much back that it has taken."""
        self._held[client] -= amount
        self.taken -= amount
        if not self._held[client]:
            del self._held[client]

    def held(self, client: str) -> int:
        """What `client` holds."""
        return self._held[client]

    def most(self, count: int) -> dict[str, int]:
        """The clients that hold most, and how much."""
        return dict(self._held.most_common(count))
