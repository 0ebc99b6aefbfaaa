"""Clients that wait for a round of DLPM, by the round that makes each of them eligible.

Those of one round stand in the order in which they will go, so a refill takes them over as they are: nobody is put into
an order at that time, however many wait.
"""

from typing import Any

from sglang_fair.core.heap import LazyHeap


class Parked:
    """`put`, `discard` and `first_round` cost O(log clients), amortised."""

    def __init__(self) -> None:
        self._rounds: dict[str, int] = {}
        self._heaps: dict[int, LazyHeap[str]] = {}
        self._order: LazyHeap[int] = LazyHeap()

    def put(self, client: str, due: int, key: Any) -> None:
        """`client` waits for the round `due`, or its key has changed."""
        if self._rounds.get(client) != due:
            self.discard(client)
            self._rounds[client] = due
            if due not in self._heaps:
                self._heaps[due] = LazyHeap()
                self._order.put(due, due)
        self._heaps[due].put(client, key)

    def discard(self, client: str) -> None:
        """`client` waits for none, if it did."""
        due = self._rounds.pop(client, None)
        if due is not None:
            self._heaps[due].discard(client)
            if not self._heaps[due]:
                self._pop(due)

    def first_round(self) -> int | None:
        """The first that anybody waits for."""
        return self._order.first()

    def take(self, due: int) -> LazyHeap[str]:
        """The clients that wait for round `due`, which wait for it no more."""
        if due not in self._heaps:
            return LazyHeap()
        heap = self._pop(due)
        for client in heap:
            del self._rounds[client]
        return heap

    def _pop(self, due: int) -> LazyHeap[str]:
        self._order.discard(due)
        return self._heaps.pop(due)

    def __contains__(self, client: str) -> bool:
        return client in self._rounds
