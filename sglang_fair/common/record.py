"""The latest requests of a process, found by their names: what a gateway and a replica remember them in.

Names may be anything, and come again: a look-up finds all requests that had one, and can be limited to one client.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

MOST_ENDED = 4096
"""Requests that are remembered after their end."""

MOST_NAME = 128
"""Characters of a name that a client may have chosen."""

MOST_FOUND = 16
"""Requests of one name that are shown."""


class _Entry(Protocol):
    client: str


Entry = TypeVar("Entry", bound=_Entry)


class Recent(Generic[Entry]):
    """Entries, compared by identity: all that have not ended, and the last `most` of those that have."""

    def __init__(self, most: int = MOST_ENDED) -> None:
        self._most = most
        self._names: dict[Entry, tuple[str, ...]] = {}
        """In order of arrival."""
        self._by_name: dict[str, list[Entry]] = {}
        self._ended: deque[Entry] = deque()

    def add(self, entry: Entry, *names: str) -> None:
        self._names[entry] = ()
        for name in names:
            self.name(entry, name)

    def name(self, entry: Entry, name: str) -> None:
        """`entry` is found by this name as well."""
        name = name[:MOST_NAME]
        if name and name not in self._names[entry]:
            self._names[entry] += (name,)
            self._by_name.setdefault(name, []).append(entry)

    def end(self, entry: Entry) -> None:
        """`entry` has ended. Of more than are kept, the one that ended longest ago is forgotten."""
        self._ended.append(entry)
        if len(self._ended) <= self._most:
            return
        oldest = self._ended.popleft()
        for name in self._names.pop(oldest):
            same = self._by_name[name]
            same.remove(oldest)
            if not same:
                del self._by_name[name]

    def find(self, name: str, client: str | None = None) -> list[Entry]:
        """Those of this name, the latest first, `MOST_FOUND` at most; of `client` only, if one is given."""
        return _some(reversed(self._by_name.get(name[:MOST_NAME], ())), client, MOST_FOUND)

    def latest(self, client: str | None, most: int) -> list[Entry]:
        """Those that came last, the latest first; of `client` only, if one is given."""
        return _some(reversed(self._names), client, most)

    def __len__(self) -> int:
        return len(self._names)


def _some(entries: Iterator[Entry], client: str | None, most: int) -> list[Entry]:
    return list(islice((entry for entry in entries if client in (None, entry.client)), most))
