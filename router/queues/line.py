"""The order inside a group: first come, first served, but those that share a prefix go together.

When the first in line goes, those that share its prefix follow, in their own order. Nobody is overtaken more than
`most_overtakes` times: whoever would overtake somebody once more waits for its turn.

Not everybody's overtakes are counted. Kept is an upper bound for each, and such bounds that they never grow towards
the end of the line; so the first has the largest, and one comparison is enough. It is stored as differences: `steps[i]`
is the bound of i less that of i + 1. If j leaves out of turn, all before it are overtaken once: one more for
`steps[j - 1]`, which takes j's own step over. Who comes into the middle of the line gets the bound of the one behind.

Everything costs O(log n) comparisons and moves a part of a list, in which a group's few hundred entries are a few
kilobytes.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from math import inf, isfinite

MOST_OVERTAKES = 128

Key = tuple[int, float, int]
"""Place in line: 0 for one that was taken back, when it or its interaction began, and a number that nobody shares."""


@dataclass(frozen=True, slots=True)
class Queued:
    """One request that waits. `since_s`: when it came; of a later call, when its interaction began. ValueError for
    numbers that no request has: one of them would spoil the sums and the order of all others."""

    id: str
    client: str
    model: str
    slo_class: str
    prompt_tokens: int
    expected_output_tokens: float
    since_s: float
    deadline_s: float
    output_variance: float = 0.0
    """Tokens squared, of its output about the expected one."""
    prefix: Hashable | None = None
    """Equal for requests whose first `prefix_tokens` tokens are the same; None: it shares none."""
    prefix_tokens: int = 0
    exclude: tuple[str, ...] = ()
    """Workers that must not get it."""

    def of_model(self, model: str) -> "Queued":
        """The same, for another model."""
        return replace(self, model=model)

    def __post_init__(self) -> None:
        if not (
            0 <= self.prompt_tokens < inf
            and 0 <= self.expected_output_tokens < inf
            and 0 <= self.output_variance < inf
            and 0 <= self.prefix_tokens < inf
        ):
            sizes = self.prompt_tokens, self.expected_output_tokens, self.output_variance, self.prefix_tokens
            raise ValueError(f"request {self.id!r:.80}: tokens are finite and not negative, not {sizes}")
        if not (isfinite(self.since_s) and isfinite(self.deadline_s)):
            raise ValueError(f"request {self.id!r:.80}: {self.since_s} and {self.deadline_s} are no times")


@dataclass(slots=True, eq=False)
class Entry:
    """A request and its place in line."""

    key: Key
    request: Queued


class Line:
    """Entries in order of their keys. With `most_overtakes` 0 nobody overtakes anybody."""

    def __init__(self, most_overtakes: int = MOST_OVERTAKES) -> None:
        if most_overtakes < 0:
            raise ValueError(f"most_overtakes is {most_overtakes}: it is at least 0")
        self._most = most_overtakes
        self._keys: list[Key] = []
        self._entries: list[Entry] = []
        self._steps: list[int] = []
        self._overtaken = 0
        """The bound of the first: the sum of the steps."""
        self._sharing: dict[Hashable, list[Key]] = {}
        """Keys by prefix, each list in order."""
        self._prefix: Hashable | None = None
        """Of the request that went last."""

    def put(self, entry: Entry) -> None:
        """`entry` waits. Its key is nobody else's."""
        at = bisect_left(self._keys, entry.key)
        self._keys.insert(at, entry.key)
        self._entries.insert(at, entry)
        self._steps.insert(at, 0)
        if self._most and entry.request.prefix is not None:
            insort(self._sharing.setdefault(entry.request.prefix, []), entry.key)

    def take(self) -> Entry | None:
        """The next one leaves the line to be served; None if nobody waits."""
        if not self._keys:
            return None
        at = self._follower()
        entry = self._leave(at)
        if at:
            self._steps[at - 1] += 1
            self._overtaken += 1
        self._prefix = entry.request.prefix
        return entry

    def remove(self, entry: Entry) -> None:
        """`entry`, which waits, leaves the line and overtakes nobody."""
        at = bisect_left(self._keys, entry.key)
        assert self._entries[at] is entry
        self._leave(at)

    def split(self) -> "Line":
        """The newer half goes into a line of its own, which is returned; this one keeps the older half."""
        middle = (len(self._keys) + 1) // 2
        newer = Line(self._most)
        newer._keys, newer._entries = self._keys[middle:], self._entries[middle:]
        newer._steps = self._steps[middle:]
        newer._overtaken = sum(newer._steps)
        del self._keys[middle:], self._entries[middle:], self._steps[middle:]
        self._steps[-1] += newer._overtaken
        for line in (self, newer):
            line._share()
        return newer

    def first(self) -> Queued:
        """The oldest; IndexError if nobody waits."""
        return self._entries[0].request

    def last(self) -> Queued:
        """The newest; IndexError if nobody waits."""
        return self._entries[-1].request

    def _follower(self) -> int:
        """The place of the one that goes next: who shares the prefix of the last one if it may, else the first."""
        sharing = self._sharing.get(self._prefix) if self._prefix is not None else None
        if not sharing or self._overtaken >= self._most:
            return 0
        return bisect_left(self._keys, sharing[0])

    def _leave(self, at: int) -> Entry:
        """Whoever is at this place goes. Its step is then that of the one before, if there is one."""
        del self._keys[at]
        entry, step = self._entries.pop(at), self._steps.pop(at)
        if at:
            self._steps[at - 1] += step
        else:
            self._overtaken -= step
        sharing = self._sharing.get(entry.request.prefix) if entry.request.prefix is not None else None
        if sharing:
            del sharing[bisect_left(sharing, entry.key)]
            if not sharing:
                del self._sharing[entry.request.prefix]
        return entry

    def _share(self) -> None:
        self._sharing = {}
        if self._most:
            for entry in self._entries:
                if entry.request.prefix is not None:
                    self._sharing.setdefault(entry.request.prefix, []).append(entry.key)

    def __iter__(self) -> Iterator[Entry]:
        """In order of their keys."""
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._keys)
