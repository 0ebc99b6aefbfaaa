"""Whose work is next, where clients have more of it than is done at once: round robin.

Rule. Clients that have work wait in a ring; the first of them has a turn with its first piece of work and goes to
the end of the ring. Work that takes several turns goes on before what its client brought later. Unit: turns.
Bound: between two turns of one client every other client that has work all the while has one. So what a client
waits for its turn grows with the number of clients, not with what any of them brings. Leaks: a turn counts the same
however long it takes, and weights do not count.
"""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

Work = TypeVar("Work")


class Turns(Generic[Work]):
    """The order. Nothing is kept of a client that has no work here."""

    def __init__(self) -> None:
        self._ring: OrderedDict[str, deque[Work]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._ring.values()))

    def __bool__(self) -> bool:
        return bool(self._ring)

    def add(self, client: str, work: Work) -> None:
        """Work that comes after all that `client` has here."""
        self._ring.setdefault(client, deque()).append(work)

    def again(self, client: str, work: Work) -> None:
        """Work that has had its turn and needs another: the first of `client`, whose place is at the end."""
        self._ring.setdefault(client, deque()).appendleft(work)

    def next(self) -> tuple[str, Work] | None:
        """Whose turn it is and with what, which is here no more; None when nobody has work."""
        if not self._ring:
            return None
        client, its = self._ring.popitem(last=False)
        work = its.popleft()
        if its:
            self._ring[client] = its
        return client, work

    def remove(self, client: str, work: Work) -> bool:
        """Whether `work` was here, where it is no more."""
        its = self._ring.get(client, deque())
        if work not in its:
            return False
        its.remove(work)
        if not its:
            del self._ring[client]
        return True
