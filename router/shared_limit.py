"""A limit that clients share: a client that floods cannot use it up, so the others always find something left.

Rule. A client may hold as much as is free once it holds it (the dynamic threshold of Choudhury and Hahne 1998, "Dynamic
Queue Length Thresholds for Shared-Memory Packet Switches", with α = 1).
Unit: whatever is counted, requests or bytes. Bound: a single client holds at most half and leaves the other half;
n clients that take all they can get hold 1 / (n + 1) each, and as much stays free for the next one. What becomes
free goes first to those who hold least. Knobs: the size. Leaks: weights do not count, because this grants no
service, only the right to wait for it; and nothing is taken back from clients that came early.
"""

import contextlib
from collections import Counter
from collections.abc import Sequence
from ipaddress import IPv6Address
from typing import Any


class SharedLimit:
    """How much there is, and who holds how much of it. A client that holds nothing costs no memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self._held: Counter[str] = Counter()

    def take(self, client: str, amount: int = 1) -> bool:
        """Give `client` that much more. False, and no change, if that is more than its share."""
        if not amount:
            return True
        if self._held[client] + amount > self.size - self.taken:
            return False
        self._held[client] += amount
        self.taken += amount
        return True

    def give(self, client: str, amount: int = 1) -> None:
        self._held[client] -= amount
        self.taken -= amount
        if not self._held[client]:
            del self._held[client]

    def held(self, client: str) -> int:
        return self._held[client]

    def most(self, count: int) -> dict[str, int]:
        """The `count` clients that hold most, and how much."""
        return dict(self._held.most_common(count))


def address_share(peer: Sequence[Any] | None) -> str:
    """The name by which a request shares the limits while only its peer, (host, port), is known.

    No client can have such a name (`common.identity.bounded` escapes the parenthesis). IPv6 addresses of one /64 share
    one name, because a single site has that many addresses.
    """
    host = str(peer[0]) if peer else ""
    if ":" in host:
        with contextlib.suppress(ValueError):
            host = str(IPv6Address(int(IPv6Address(host)) >> 64 << 64))
    return f"({host})"
