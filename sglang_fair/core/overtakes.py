"""By how many later ones each waiting request was overtaken, and in how many batches.

A request is overtaken by every one that came later and was admitted in an earlier batch. Each waiting request has a
slot, in order of arrival. A Fenwick tree counts at each slot who was admitted from it, so whoever came later than slot
s and was admitted is a sum over the slots behind s. Batches are counted in the same tree, above the requests' bits,
each at the slot of the latest arrival that it admitted: it overtook exactly those who came before that one.

Slots are given out in order; when they are used up, those of requests that are gone are dropped, and what they count
goes to the last slot before them that is still in use. Nobody between the two would be asked about it.

Cost: O(log waiting) for an admission, O(1) for an arrival, amortised. Memory is O(waiting).
"""

from collections.abc import Hashable
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item", bound=Hashable)

LEAST_SLOTS = 64


REQUEST_BITS = 40
"""Of a sum; those above count batches."""
REQUEST, BATCH = 1, 1 << REQUEST_BITS


class Overtaken(NamedTuple):
    """By `requests` later ones, in `batches`."""

    requests: int
    batches: int


class _Tree:
    """Counts at slots from 0 on, and sums over those from some slot on (Fenwick 1994)."""

    __slots__ = ("_sums", "_total")

    def __init__(self, counts: list[int]) -> None:
        sums = [0, *counts]
        for at in range(1, len(sums)):
            above = at + (at & -at)
            if above < len(sums):
                sums[above] += sums[at]
        self._sums, self._total = sums, sum(counts)

    def add(self, slot: int, amount: int) -> None:
        sums, at, size = self._sums, slot + 1, len(self._sums)
        self._total += amount
        while at < size:
            sums[at] += amount
            at += at & -at

    def before(self, slot: int) -> int:
        """The sum of the slots below `slot`."""
        sums, found = self._sums, 0
        while slot:
            found += sums[slot]
            slot &= slot - 1
        return found

    def since(self, slot: int) -> int:
        return self._total - self.before(slot) if self._total else 0

    def __len__(self) -> int:
        return len(self._sums) - 1


class Overtakes(Generic[Item]):
    """Items `arrive` once each, and are admitted or leave."""

    def __init__(self) -> None:
        self._slots: dict[Item, int] = {}
        """Of those that wait, in order of arrival."""
        self._next = 0
        self._tree = _Tree([0] * LEAST_SLOTS)
        self._admitted: list[int] = []
        """The slots of those whom this batch has admitted."""

    def arrive(self, item: Item) -> None:
        """`item` waits; it came after all others."""
        if self._next == len(self._tree):
            self._drop_unused()
        self._slots[item] = self._next
        self._next += 1

    def leave(self, item: Item) -> None:
        """`item` waits no more and was not admitted."""
        self._slots.pop(item, None)

    def admit(self, item: Item) -> Overtaken:
        """`item` is in the batch that is being formed. Returns what overtook it."""
        slot = self._slots.pop(item)
        self._admitted.append(slot)
        return self._behind(slot)

    def of(self, item: Item) -> Overtaken:
        """What has overtaken `item`, which waits, so far."""
        return self._behind(self._slots[item])

    def end_batch(self) -> None:
        """A batch was formed: whom it admitted has overtaken those who came before and still wait."""
        if self._admitted:
            latest = max(self._admitted)
            for slot in self._admitted:
                self._tree.add(slot, REQUEST | BATCH if slot == latest else REQUEST)
            self._admitted.clear()

    def _behind(self, slot: int) -> Overtaken:
        found = self._tree.since(slot)
        return Overtaken(found & (BATCH - 1), found >> REQUEST_BITS)

    def _drop_unused(self) -> None:
        kept = list(self._slots.values())
        size = max(LEAST_SLOTS, 2 * (len(kept) + len(self._admitted)))
        # Slots of the batch that is being formed are counted when it ends: until then they are in use.
        used = sorted([*kept, *self._admitted]) if self._admitted else kept
        places = {slot: place for place, slot in enumerate(used)}
        self._tree = _Tree(_moved(self._tree, used, self._next, size))
        self._slots = {item: places[slot] for item, slot in self._slots.items()}
        self._admitted = [places[slot] for slot in self._admitted]
        self._next = len(used)

    def __len__(self) -> int:
        return len(self._slots)


def _moved(tree: _Tree, used: list[int], end: int, size: int) -> list[int]:
    """The counts of `tree` at the slots in `used`, each with those of the unused ones behind it."""
    bounds = [tree.before(slot) for slot in [*used, end]]
    counts = [after - before for before, after in pairwise(bounds)]
    return counts + [0] * (size - len(counts))
