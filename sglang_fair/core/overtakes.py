"""By how many later ones each waiting request was overtaken, and in how many batches.

A request is overtaken by every one that came later and was admitted in an earlier batch. Each waiting request has a
slot, in order of arrival. A Fenwick tree (1994) counts at each slot what was admitted from it: what has overtaken the
request at slot s is the sum of the slots behind s. Batches are counted in the same tree, above the requests' bits, each
at the slot of the latest arrival that it admitted: it overtook exactly those that came before that one.

When the slots are used up, each waiting request notes what it was overtaken by so far, and gets a new slot in an empty
tree. O(log waiting) for an admission, O(1) for an arrival, amortised; O(waiting) memory.
"""

from bisect import bisect_left
from collections.abc import Hashable
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


class Overtakes(Generic[Item]):
    """Items `arrive` once each, and are admitted or leave."""

    def __init__(self) -> None:
        self._slots: dict[Item, int] = {}
        """Of those that wait, in order of arrival."""
        self._before: dict[Item, int] = {}
        """What overtook an item before it had this slot, if anything did."""
        self._next = 0
        self._sums = [0] * (LEAST_SLOTS + 1)
        self._total = 0
        self._admitted: list[int] = []
        """The slots of those that this batch has admitted."""

    def arrive(self, item: Item) -> None:
        """`item` waits; it came after all others."""
        if self._next == len(self._sums) - 1:
            self._renumber()
        self._slots[item] = self._next
        self._next += 1

    def leave(self, item: Item) -> None:
        """`item` waits no more and was not admitted."""
        self._slots.pop(item, None)
        self._before.pop(item, None)

    def admit(self, item: Item) -> Overtaken:
        """`item` is in the batch that is being formed. Returns what overtook it."""
        found = self.of(item)
        self._admitted.append(self._slots.pop(item))
        self._before.pop(item, None)
        return found

    def of(self, item: Item) -> Overtaken:
        """What has overtaken `item`, which waits, so far."""
        found = self._before.get(item, 0) + self._behind(self._slots[item])
        return Overtaken(found & (BATCH - 1), found >> REQUEST_BITS)

    def end_batch(self) -> None:
        """A batch was formed: what it admitted has overtaken those that came before and still wait."""
        if self._admitted:
            latest = self._admitted.index(max(self._admitted))
            for number, slot in enumerate(self._admitted):
                self._add(slot, REQUEST | BATCH if number == latest else REQUEST)
            self._admitted.clear()

    def _add(self, slot: int, amount: int) -> None:
        sums, at = self._sums, slot + 1
        self._total += amount
        while at < len(sums):
            sums[at] += amount
            at += at & -at

    def _behind(self, slot: int) -> int:
        """The sum of the slots behind `slot`."""
        if not self._total:
            return 0
        found, at = self._total, slot + 1
        while at:
            found -= self._sums[at]
            at &= at - 1
        return found

    def _renumber(self) -> None:
        used = list(self._slots.values())
        # What this batch has admitted goes before the first request that came after it.
        self._admitted = [bisect_left(used, slot) for slot in self._admitted]
        for item, slot in self._slots.items():
            if behind := self._behind(slot):
                self._before[item] = self._before.get(item, 0) + behind
        self._slots = {item: number for number, item in enumerate(self._slots)}
        self._next = len(used)
        self._sums, self._total = [0] * (max(LEAST_SLOTS, 2 * (len(used) + 1)) + 1), 0

    def __len__(self) -> int:
        return len(self._slots)
