"""A priority queue whose items can be moved and removed: `heapq` with lazy deletion.

Every order in the core comes out of one of these. To make every order total, a key has to end in something that no
other item shares (an arrival number, a client's name).
"""

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

SLACK = 64
"""The heap is rebuilt when it has this many dead entries more than live ones."""


class LazyHeap(Generic[Item]):
    """Smallest key first. `put`, `discard` and `first` cost O(log n) amortised; memory is O(live items)."""

    __slots__ = ("_entries", "_live", "hidden")

    def __init__(self) -> None:
        self._entries: list[tuple[Any, Item]] = []
        self._live: dict[Item, tuple[Any, Item]] = {}
        self.hidden: dict[Item, None] = {}
        """Items that are never first, until `show`."""

    def put(self, item: Item, key: Any) -> None:
        """Insert `item`, or move it to `key`."""
        old = self._live.get(item)
        if old is not None and old[0] == key:
            return
        entry = (key, item)
        self._live[item] = entry
        if self.hidden and item in self.hidden:
            return
        heappush(self._entries, entry)
        if len(self._entries) > 2 * len(self._live) + SLACK:
            self._bury()

    def discard(self, item: Item) -> None:
        """Remove `item` if it is there."""
        if self._live.pop(item, None) is not None and len(self._entries) > 2 * len(self._live) + SLACK:
            self._bury()

    def hide(self, test: Callable[[Item], bool]) -> list[Item]:
        """Hides the first item while `test` of it holds: until `show` it is not first, whatever its key becomes."""
        entries, live, found = self._entries, self._live, []
        while entries:
            entry = entries[0]
            item = entry[1]
            if live.get(item) is entry:
                if not test(item):
                    break
                found.append(item)
            heappop(entries)
        self.hidden.update(dict.fromkeys(found))
        return found

    def show(self) -> None:
        for item in self.hidden:
            if (entry := self._live.get(item)) is not None:
                heappush(self._entries, entry)
        self.hidden.clear()

    def first(self) -> Item | None:
        """The item with the smallest key that is not hidden, left in place; None if there is none."""
        entries, live = self._entries, self._live
        while entries:
            entry = entries[0]
            item = entry[1]
            if live.get(item) is entry:
                return item
            heappop(entries)
        return None

    def top(self, most: int) -> list[Item]:
        """The first item, and others of the first ones: those near the top of the heap, at most so many. O(most)."""
        first = self.first()
        return (
            [] if first is None else [one[1] for one in self._entries[:most] if self._live.get(one[1]) is one]
        )

    def key(self, item: Item) -> Any:
        """The key under which `item` was put; KeyError when it is not there."""
        return self._live[item][0]

    def _bury(self) -> None:
        """Rebuild the heap without its dead entries."""
        self._entries = [entry for item, entry in self._live.items() if item not in self.hidden]
        heapify(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._live

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Item]:
        """The items in the order in which they were first put, not by key."""
        return iter(self._live)
