"""Groups of requests that are planned as one (QLM, Algorithm 1, without its clustering by lengths).

    group     requests of one model and class, first come, first served. Those that are late already are of a kind of
              their own, of all classes
    size      a group that has not begun is split into an older and a newer half when it has more than `delta` average
              batches waiting
    begun     a worker has taken one of its requests: the group stays there and is no longer split, unless another
              worker idles (`cut`). It is joined until it has had `delta` batches in all, so it ends, whoever sends
    late      what cannot be in time any more leaves its group for one of late requests (`miss`)

A group is over when no request of it waits or runs. A worker that is gone leaves its groups as if they had not begun.
Each call costs O(log of the group's size) comparisons and moves a part of a list; a split costs O(size), once for that
many requests.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, inf, log2
from typing import NamedTuple

from router.placement.contract import Request
from sglang_fair.common.deadlines import Promise
from sglang_fair.core.heap import LazyHeap

MOST_MARGIN = 0.25
"""Of a request's own time, that is kept for a worker's first token."""

Key = tuple[float, int]
"""Place in line: when it or its interaction began, and a number that is its own."""


class Kind(NamedTuple):
    """What the requests of a group have in common."""

    model: str
    slo_class: str
    exclude: tuple[str, ...] = ()
    late: bool = False
    """Their deadlines are missed."""


@dataclass(slots=True, eq=False)
class Entry:
    """A request that waits or runs, with its promise."""

    request: Request
    promise: Promise
    key: Key
    group: "Group"
    waits: bool = True

    @property
    def work(self) -> tuple[int, float, float]:
        """Tokens of its prompt, expected of its output, and their variance."""
        expected = self.request.expected_output_tokens
        return self.request.input_tokens, expected, expected**2


@dataclass(slots=True, eq=False)
class Group:
    """Requests that are planned as one; the sums are of those that wait."""

    number: int
    kind: Kind
    since: Key
    """Requests of its kind from this key on are its own, up to the next group's."""
    line: list[Entry] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)
    """Of those that wait, the earliest first."""
    prompt_tokens: int = 0
    output_tokens: float = 0.0
    output_variance: float = 0.0
    running: int = 0
    joined: int = 0
    """How many have waited here so far."""
    begun_on: str | None = None

    @property
    def urgency(self) -> tuple[bool, float, int]:
        """Less goes first: those in time, then by deadline (of late ones, since when). IndexError if none waits."""
        first_s = self.line[0].key[0] if self.kind.late else self.deadlines[0]
        return self.kind.late, first_s, self.number

    def is_in_danger(self, now_s: float, part: float) -> bool:
        """Whether its first has less than this part of its time left; not if it is late already."""
        return not self.kind.late and self.deadlines[0] - now_s < part * self.line[0].promise.slo_s

    def count(self, entry: Entry, sign: int) -> None:
        """One of them waits from now on (1), or does not (-1)."""
        prompt_tokens, output_tokens, variance = entry.work
        self.prompt_tokens += sign * prompt_tokens
        self.output_tokens += sign * output_tokens
        self.output_variance += sign * variance
        if sign > 0:
            insort(self.deadlines, entry.promise.due_s)
        else:
            del self.deadlines[bisect_left(self.deadlines, entry.promise.due_s)]
            if not self.deadlines:  # drop what rounding has left over
                self.output_tokens = self.output_variance = 0.0

    def __len__(self) -> int:
        """How many wait."""
        return len(self.deadlines)


class Groups:
    """All groups. ValueError for a `delta` or a batch that is no positive number."""

    def __init__(self, delta: float = 4.0, batch: float = 64.0) -> None:
        """`batch`: requests that a worker runs at a time, until `set_batch` says what was measured."""
        if not (0 < delta < inf and 0 < batch < inf):
            raise ValueError(f"delta and batch are numbers above 0, not {delta!r} and {batch!r}")
        self._delta, self._batch = delta, batch
        self._batches: dict[str, float] = {}
        self.by_number: dict[int, Group] = {}
        """The oldest first. Not to be written to."""
        self.entries: dict[str, Entry] = {}
        """By request. Not to be written to."""
        self._of_kind: dict[Kind, list[Group]] = {}
        """Each list in order of `since`."""
        self._heads: dict[tuple[str, bool], LazyHeap[Group]] = {}
        """By model and whether they are late, the groups in which some wait, by urgency."""
        self._born: list[tuple[Group, Group | None]] = []
        self._numbers = self._arrivals = 0

    # -- requests

    def add(self, request: Request, promise: Promise) -> Group:
        """`request` waits. The group it is in."""
        self._arrivals += 1
        slo_class = f"{promise.slo_class}~{ceil(2 * log2(promise.slo_s))}"
        key = promise.due_s - promise.slo_s, self._arrivals
        return self._enter(Kind(request.model, slo_class, request.exclude), request, promise, key)

    def take(self, group: Group, worker: str, *, lends: bool = False) -> Entry:
        """`worker` serves the next of a group, which begins there if it has not; with `lends` the group stays as it is.
        IndexError if none of it waits, ValueError if it has begun elsewhere."""
        if not lends:
            if group.begun_on not in (None, worker):
                raise ValueError(f"group {group.number} has begun on {group.begun_on}, not on {worker}")
            group.begun_on = worker
        entry = group.line.pop(0)
        group.running += 1
        group.count(entry, -1)
        self._rank(group)
        entry.waits = False
        return entry

    def remove(self, request_id: str) -> Group | None:
        """A request is over or was given up. Returns its group; None if the id is not here."""
        entry = self.entries.pop(request_id, None)
        if entry is None:
            return None
        if entry.waits:
            self._leave(entry)
        else:
            entry.group.running -= 1
        self._end_if_over(entry.group)
        return entry.group

    def miss(self, group: Group, now_s: float, first_token_s: float, most: int) -> bool:
        """The first in line that cannot be in time any more, at most `most`, go to a group of late ones. Whether there
        was one. A worker takes `first_token_s` to a first token; of that at most `MOST_MARGIN` of a request's own time
        is believed, so that a bad moment of a worker does not make all late."""
        moved = 0
        while moved < most and len(group):
            entry = group.line[0]
            if entry.promise.due_s >= now_s + min(first_token_s, MOST_MARGIN * entry.promise.slo_s):
                break
            self._leave(entry)
            self._end_if_over(group)
            self._enter(group.kind._replace(slo_class="", late=True), entry.request, entry.promise, entry.key)
            moved += 1
        return moved > 0

    def cut(self, group: Group) -> Group:
        """The newer half of those that wait become a group of its own, which has not begun; all, if that is one."""
        newer = self._halve(group)
        self._end_if_over(group)
        return newer

    # -- workers

    def worker_down(self, worker: str) -> None:
        """The groups that have begun there may begin anywhere. O(groups)."""
        for group in list(self.by_number.values()):
            if group.begun_on == worker:
                group.begun_on = None
                self._split(group)

    def set_batch(self, model: str, requests: float) -> None:
        """A worker runs so many requests of this model at a time. Groups that are too large by that are split."""
        if not 0 < requests < inf:
            raise ValueError(f"batch must be a number above 0, not {requests!r}")
        self._batches[model] = requests
        for group in list(self.by_number.values()):
            if group.kind.model == model:
                self._split(group)

    def batch(self, model: str) -> float:
        """Requests that a worker runs at a time, as was said last."""
        return self._batches.get(model, self._batch)

    def limit(self, model: str) -> int:
        """Requests of a group at most, until it has begun."""
        return max(1, int(self._delta * self.batch(model)))

    # -- what is here

    def most_urgent(self, model: str, late: bool, worker: str) -> Group | None:
        """Of this model, late or not, the group that goes first of those that `worker` may have. None if none waits."""
        heap = self._heads.get((model, late))
        group = None if heap is None else heap.first()
        if group is None or worker not in group.kind.exclude:
            return group
        may = (one for one in heap or () if worker not in one.kind.exclude)
        return min(may, key=lambda one: one.urgency, default=None)

    def of(self, request_id: str) -> Group | None:
        """The group of a request that waits or runs."""
        entry = self.entries.get(request_id)
        return None if entry is None else entry.group

    def drain_born(self) -> list[tuple[Group, Group | None]]:
        """The groups that are new since the last call and are not over, each with the one whose newer half it is."""
        born, self._born = self._born, []
        return [one for one in born if one[0].number in self.by_number]

    def __iter__(self) -> Iterator[Group]:
        return iter(self.by_number.values())

    def __len__(self) -> int:
        return len(self.by_number)

    # -- inside

    def _enter(self, kind: Kind, request: Request, promise: Promise, key: Key) -> Group:
        group = self._open(kind, key)
        group.joined += 1
        entry = self.entries[request.id] = Entry(request, promise, key, group)
        self._wait(entry)
        return entry.group

    def _open(self, kind: Kind, key: Key) -> Group:
        """The group of this kind whose piece the key lies in, or the next that may still be joined, or a new one."""
        groups = self._of_kind.get(kind, [])
        first = max(0, bisect_right(groups, key, key=lambda group: group.since) - 1)
        for group in groups[first:]:
            if group.begun_on is None or group.joined < self.limit(kind.model):
                return group
        return self._create(kind, max(key, groups[-1].since) if groups else key, None)

    def _create(self, kind: Kind, since: Key, after: Group | None) -> Group:
        self._numbers += 1
        group = self.by_number[self._numbers] = Group(self._numbers, kind, since)
        insort(self._of_kind.setdefault(kind, []), group, key=lambda one: one.since)
        self._born.append((group, after))
        return group

    def _split(self, group: Group) -> None:
        """Cut a group that has not begun until no piece is above the limit."""
        if group.begun_on is None and len(group) > self.limit(group.kind.model):
            newer = self._halve(group)
            self._split(group)
            self._split(newer)

    def _halve(self, group: Group) -> Group:
        """The newer half of a group becomes one of its own; all, if that is one."""
        middle = len(group.line) // 2 + (len(group.line) > 1 and len(group.line) % 2)
        line = group.line[middle:]
        newer = self._create(group.kind, line[0].key, group)
        newer.joined = len(line)
        group.joined -= len(line)
        del group.line[middle:]
        newer.line = line
        for entry in line:
            prompt_tokens, output_tokens, variance = entry.work
            newer.prompt_tokens += prompt_tokens
            newer.output_tokens += output_tokens
            newer.output_variance += variance
            group.output_tokens -= output_tokens
            group.output_variance -= variance
            entry.group = newer
        group.prompt_tokens -= newer.prompt_tokens
        for one in (group, newer):
            one.deadlines = sorted([entry.promise.due_s for entry in one.line])
        if not group.line:  # drop what rounding has left over
            group.output_tokens = group.output_variance = 0.0
        self._rank(group)
        self._rank(newer)
        return newer

    def _wait(self, entry: Entry) -> None:
        insort(entry.group.line, entry, key=lambda one: one.key)
        entry.group.count(entry, 1)
        self._rank(entry.group)
        self._split(entry.group)

    def _leave(self, entry: Entry) -> None:
        group = entry.group
        del group.line[bisect_left(group.line, entry.key, key=lambda one: one.key)]
        group.count(entry, -1)
        self._rank(group)

    def _rank(self, group: Group) -> None:
        """Some of it have come or gone: its place among all follows."""
        place = group.kind.model, group.kind.late
        heap = self._heads.get(place)
        if group.deadlines:
            if heap is None:
                heap = self._heads[place] = LazyHeap()
            heap.put(group, group.urgency)
        elif heap is not None:
            heap.discard(group)
            if not len(heap):
                del self._heads[place]

    def _end_if_over(self, group: Group) -> None:
        if group.running or len(group) or group.number not in self.by_number:
            return
        del self.by_number[group.number]
        groups = self._of_kind[group.kind]
        groups.remove(group)
        if not groups:
            del self._of_kind[group.kind]
