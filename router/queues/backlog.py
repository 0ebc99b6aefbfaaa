"""How batches stand in the queues beside real requests: a few stand-ins for each row of a feeder's backlog.

    stand-in   a request of the row's client, model and deadline, of its mean lengths, that has no prompt. It waits, is
               tagged, grouped and planned as any other
    pulling    a worker that gets a stand-in has room for an item: the feeder is asked for one (`Pull`), and the
               stand-in keeps the room until it arrives, at most `PATIENCE_S`
    how many   for each row as many as it has items to send, at most `STAND_INS`, and all rows together `MOST`: those
               that are due first. So 400,000 items are as many rows here as they have clients, models and windows

What the feeder says is as old as its last message: items that were asked for or have come since are counted off.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_fair.common.deadlines import Promise

STAND_INS = 64
MOST = 4096
PATIENCE_S = 15.0

Key = tuple[bytes, str]
"""A row: the peer that has it, and its name there."""


class Row(NamedTuple):
    """Items of batches of one client, model and window, of which `waiting` can be sent; lengths are means."""

    group: str
    client: str
    model: str
    waiting: int
    prompt_tokens: float
    output_tokens: float
    promise: Promise


class StandIn(NamedTuple):
    """One of a row."""

    id: str
    key: Key
    row: Row


class Pulled(NamedTuple):
    """One for which a worker has room."""

    key: Key
    worker: str
    until_s: float


@dataclass(slots=True)
class _Known:
    row: Row
    waiting: dict[str, None] = field(default_factory=dict)
    """Its stand-ins."""
    come: int = 0
    """Items that were asked for, and have come since it was told."""


class Rows:
    """The rows of all feeders. It says which stand-ins there should be; whoever asks puts them into queues."""

    def __init__(self) -> None:
        self._rows: dict[Key, _Known] = {}
        self._pulled: dict[str, Pulled] = {}
        self._counts: Counter[Key] = Counter()
        """Of `_pulled`, by row."""
        self._keys: dict[str, Key] = {}
        self._numbers = 0

    def told(self, peer: bytes, rows: Iterable[Row]) -> list[str]:
        """All rows of this peer, in place of those before. The stand-ins that are too many by that."""
        kept: set[Key] = set()
        for row in rows:
            key = peer, row.group
            kept.add(key)
            known = self._rows.setdefault(key, _Known(row))
            known.row, known.come = row, 0
        gone: list[str] = []
        for key in [key for key in self._rows if key[0] == peer and key not in kept]:
            gone += self._rows.pop(key).waiting
        for key in kept:
            known = self._rows[key]
            gone += list(known.waiting)[max(0, self._room(key, known)) :]
        for name in gone:
            self.left(name)
        return gone

    def lacking(self) -> Iterator[StandIn]:
        """The stand-ins that there should be besides: they are waiting when they have been taken from here."""
        total = sum(len(known.waiting) for known in self._rows.values())
        for key, known in sorted(self._rows.items(), key=lambda pair: (pair[1].row.promise.due_s, pair[0])):
            more = min(STAND_INS, self._room(key, known)) - len(known.waiting)
            for _ in range(min(more, MOST - total)):
                self._numbers += 1
                name = f"stand-in {self._numbers}"
                known.waiting[name] = None
                self._keys[name] = key
                total += 1
                yield StandIn(name, key, known.row)

    def left(self, name: str) -> None:
        """A stand-in waits no more, and no item is asked for."""
        key = self._keys.pop(name, None)
        row = None if key is None else self._rows.get(key)
        if row is not None:
            row.waiting.pop(name, None)

    def pull(self, name: str, worker: str, now_s: float) -> Key:
        """A worker has room for an item of a stand-in that waits; of which row. KeyError if it does not wait."""
        key = self._keys[name]
        self.left(name)
        self._keys[name] = key
        self._pulled[name] = Pulled(key, worker, now_s + PATIENCE_S)
        self._counts[key] += 1
        return key

    def come(self, name: str) -> Pulled | None:
        """The item of a stand-in has come, or will not; None if it was not asked for, or that is too long ago."""
        found = self._pulled.pop(name, None)
        if found is None:
            return None
        del self._keys[name]
        self._counts[found.key] -= 1
        if not self._counts[found.key]:
            del self._counts[found.key]
        row = self._rows.get(found.key)
        if row is not None:
            row.come += 1
        return found

    def overdue(self, now_s: float) -> list[str]:
        """Those whose items should have come. O(1) if there are none."""
        found = []
        for name, one in self._pulled.items():  # in the order in which they were asked for
            if one.until_s > now_s:
                break
            found.append(name)
        return found

    def at(self, worker: str) -> list[str]:
        """Those for which this worker keeps room."""
        return [name for name, one in self._pulled.items() if one.worker == worker]

    def of(self, model: str) -> list[str]:
        """Stand-ins that wait for this model."""
        return [name for row in self._rows.values() if row.row.model == model for name in row.waiting]

    def models(self) -> set[str]:
        """Of which something waits."""
        return {row.row.model for row in self._rows.values() if row.waiting}

    def waits(self, name: str) -> bool:
        """Whether it is a stand-in that waits."""
        return name in self._keys and name not in self._pulled

    @property
    def waiting(self) -> int:
        """How many stand-ins wait."""
        return len(self._keys) - len(self._pulled)

    @property
    def asked(self) -> int:
        """Items that were asked for and have not come."""
        return len(self._pulled)

    def _room(self, key: Key, known: _Known) -> int:
        return known.row.waiting - self._counts[key] - known.come
