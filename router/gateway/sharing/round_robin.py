"""A round-robin queue: clients with work waiting take turns.

Rule. Clients that have work wait in a ring. The first one gets a turn for its oldest piece of work and goes to the end
of the ring. Work that needs several turns goes on before anything that its client brought later. Unit: turns.
Bound: between two turns of one client, every other client that has work all the while gets exactly one. So the wait
for a turn grows with the number of clients, not with how much any of them brings. Leaks: a turn counts the same
however long it takes, and weights do not count.
"""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

Work = TypeVar("Work")


class RoundRobin(Generic[Work]):
    """The queue. A client without work costs no memory."""

    def __init__(self) -> None:
        self._ring: OrderedDict[str, deque[Work]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._ring.values()))

    def __bool__(self) -> bool:
        return bool(self._ring)

    def add(self, client: str, work: Work) -> None:
        self._ring.setdefault(client, deque()).append(work)

    def again(self, client: str, work: Work) -> None:
        """Queue work that had a turn and needs another: the client's first, the client last in the ring."""
        self._ring.setdefault(client, deque()).appendleft(work)

    def next(self) -> tuple[str, Work] | None:
        """Remove and return the work whose turn it is, and its client; None if there is no work."""
        if not self._ring:
            return None
        client, queue = self._ring.popitem(last=False)
        work = queue.popleft()
        if queue:
            self._ring[client] = queue
        return client, work

    def remove(self, client: str, work: Work) -> bool:
        queue = self._ring.get(client, deque())
        if work not in queue:
            return False
        queue.remove(work)
        if not queue:
            del self._ring[client]
        return True
