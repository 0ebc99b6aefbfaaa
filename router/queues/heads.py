"""Which of some groups that somebody waits in goes first, by model and rank: kept in order, not looked for.

A group is put here again whenever somebody of it has come or gone, and dropped with the last one. O(log groups).
"""

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from sglang_fair.core.heap import LazyHeap

Item = TypeVar("Item", bound=Hashable)

Place = tuple[str, int]
"""A group's model and rank, which never change."""

Urgency = tuple[int, bool, float, int]
"""Less goes first: tier, who can be in time, deadline (of late ones, who waits longest), the group's number."""


class Heads(Generic[Item]):
    """Each group at most once, at the urgency that it had when it was put here."""

    __slots__ = ("_heaps",)

    def __init__(self) -> None:
        self._heaps: dict[Place, LazyHeap[Item]] = {}

    def put(self, group: Item, place: Place, urgency: Urgency) -> None:
        """Somebody waits in it."""
        heap = self._heaps.get(place)
        if heap is None:
            heap = self._heaps[place] = LazyHeap()
        heap.put(group, urgency)

    def drop(self, group: Item, place: Place) -> None:
        """Nobody waits in it, or it is somewhere else. Nothing happens if it is not here."""
        heap = self._heaps.get(place)
        if heap is not None:
            heap.discard(group)
            if not len(heap):
                del self._heaps[place]

    def first(self, model: str, ranks: Iterable[int]) -> Item | None:
        """The most urgent group of the first of these ranks that has one."""
        for rank in ranks:
            heap = self._heaps.get((model, rank))
            if heap is not None:
                return heap.first()
        return None

    def are_of(self, model: str | None) -> bool:
        """Whether there is no group of another model. O(models)."""
        return all(one == model for one, _ in self._heaps)

    def __iter__(self) -> Iterator[Item]:
        for heap in self._heaps.values():
            yield from heap
