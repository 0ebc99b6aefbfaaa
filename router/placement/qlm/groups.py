"""Groups of requests that are planned as one (QLM, Algorithm 1, without its clustering by lengths).

    group     requests of one model, class and tier, first come, first served. Those that are late already are of a kind
              of their own, of all classes
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import NamedTuple

from sglang_fair.core.heap import LazyHeap

MOST_MARGIN = 0.25
"""Of a request's own time, that is kept for a worker's first token."""

Key = tuple[int, float, int]
"""Place in line: 0 for one that was taken back, when it or its interaction began, and a number that is its own."""


@dataclass(frozen=True, slots=True)
class Entry:
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
    exclude: tuple[str, ...] = ()
    """Workers that must not get it."""

    def __post_init__(self) -> None:
        sizes = self.prompt_tokens, self.expected_output_tokens, self.output_variance
        if not all(0 <= one < inf for one in sizes):
            raise ValueError(f"request {self.id!r:.80}: tokens are finite and not negative, not {sizes}")
        if not (isfinite(self.since_s) and isfinite(self.deadline_s)):
            raise ValueError(f"request {self.id!r:.80}: {self.since_s} and {self.deadline_s} are no times")


class Kind(NamedTuple):
    """What the requests of a group have in common."""

    model: str
    slo_class: str
    tier: int
    exclude: tuple[str, ...] = ()
    late: bool = False
    """Their deadlines are missed."""

    @property
    def rank(self) -> int:
        """Which goes before which: within their share before ahead of it; in time before late."""
        return 2 * self.tier + self.late


@dataclass(slots=True, eq=False)
class Group:
    """Requests that are planned as one; the sums are of those that wait."""

    number: int
    kind: Kind
    since: Key
    """Requests of its kind from this key on are its own, up to the next group's."""
    line: list[tuple[Key, Entry]] = field(default_factory=list)
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
    def is_bound(self) -> bool:
        """It may not stand before a group of tier 0."""
        return self.kind.tier == 1 and self.begun_on is None

    @property
    def urgency(self) -> tuple[int, bool, float, int]:
        """Less goes first: tier, those in time, deadline (of late ones, since when). IndexError if none waits."""
        return self.kind.tier, self.kind.late, self.span_s[0], self.number

    @property
    def span_s(self) -> tuple[float, float]:
        """Deadlines, or of late ones since when they wait, of the first and the last."""
        if self.kind.late:
            return self.line[0][1].since_s, self.line[-1][1].since_s
        return self.deadlines[0], self.deadlines[-1]

    def is_in_danger(self, now_s: float, part: float) -> bool:
        """Whether its first has less than this part of its time left; not if it is late already."""
        first = self.line[0][1]
        return not self.kind.late and self.deadlines[0] - now_s < part * (first.deadline_s - first.since_s)

    def promised(self) -> tuple[float, float]:
        """Within how long those in line should have begun of which that is shortest, and which part of all was promised
        that or twice as long. O(size)."""
        spans = [max(0.0, one.deadline_s - one.since_s) for _, one in self.line]
        shortest = min(spans)
        return shortest, sum(span <= 2 * shortest for span in spans) / len(spans)

    def count(self, request: Entry, sign: int) -> None:
        """One of them waits from now on (1), or does not (-1)."""
        self.prompt_tokens += sign * request.prompt_tokens
        self.output_tokens += sign * request.expected_output_tokens
        self.output_variance += sign * request.output_variance
        if sign > 0:
            insort(self.deadlines, request.deadline_s)
        else:
            del self.deadlines[bisect_left(self.deadlines, request.deadline_s)]
            if not self.deadlines:  # drop what rounding has left over
                self.output_tokens = self.output_variance = 0.0

    def __len__(self) -> int:
        """How many wait."""
        return len(self.deadlines)


@dataclass(slots=True, eq=False)
class _Member:
    """A request that waits or runs."""

    key: Key
    request: Entry
    group: Group
    waits: bool = True


class Groups:
    """All groups. ValueError for a `delta` or a batch that is no positive number."""

    def __init__(self, delta: float = 4.0, batch: float = 64.0) -> None:
        """`batch`: requests that a worker runs at a time, until `set_batch` says what was measured."""
        if not (0 < delta < inf and 0 < batch < inf):
            raise ValueError(f"delta and batch are numbers above 0, not {delta!r} and {batch!r}")
        self._delta, self._batch = delta, batch
        self._batches: dict[str, float] = {}
        self._groups: dict[int, Group] = {}
        self._of_kind: dict[Kind, list[Group]] = {}
        """Each list in order of `since`."""
        self._members: dict[str, _Member] = {}
        self._heads: dict[tuple[str, int], LazyHeap[Group]] = {}
        """By model and rank, the groups in which some wait, by urgency."""
        self._born: list[tuple[Group, Group | None]] = []
        self._numbers = self._arrivals = 0
        self.missed: list[str] = []
        """Requests that were found to be late; for others to empty."""

    # -- requests

    def add(self, request: Entry, tier: int) -> Group:
        """`request` waits. The group it is in; that of the first one if its id is here already."""
        known = self._members.get(request.id)
        if known is not None:
            return known.group
        self._arrivals += 1
        kind = Kind(request.model, request.slo_class, tier, request.exclude)
        return self._enter(kind, request, (1, request.since_s, self._arrivals))

    def take(self, group: Group, worker: str, *, lends: bool = False) -> Entry:
        """`worker` serves the next of a group, which begins there if it has not; with `lends` the group stays as it is.
        IndexError if none of it waits, ValueError if it has begun elsewhere."""
        if not lends:
            if group.begun_on not in (None, worker):
                raise ValueError(f"group {group.number} has begun on {group.begun_on}, not on {worker}")
            group.begun_on = worker
        _, request = group.line.pop(0)
        group.running += 1
        group.count(request, -1)
        self._rank(group)
        self._members[request.id].waits = False
        return request

    def put_back(self, request_id: str) -> None:
        """A request that ran was taken back: it waits in front of its group."""
        member = self._members.get(request_id)
        if member is not None and not member.waits:
            member.key, member.waits = (0, *member.key[1:]), True
            member.group.running -= 1
            self._wait(member)

    def remove(self, request_id: str) -> Group | None:
        """A request is over or was given up. Returns its group; None if the id is not here."""
        member = self._members.pop(request_id, None)
        if member is None:
            return None
        if member.waits:
            self._leave(member)
        else:
            member.group.running -= 1
        self._end_if_over(member.group)
        return member.group

    def judge(self, request_id: str, tier: int) -> None:
        """A request is of this tier: if it waits it goes into another group, at its place there."""
        member = self._members.get(request_id)
        if member is not None and member.waits and member.group.kind.tier != tier:
            self._move(member, member.group.kind._replace(tier=tier))

    def miss(self, group: Group, now_s: float, first_token_s: float, most: int) -> bool:
        """The first in line that cannot be in time any more, at most `most`, go to a group of late ones. Whether there
        was one. A worker takes `first_token_s` to a first token; of that at most `MOST_MARGIN` of a request's own time
        is believed, so that a bad moment of a worker does not make all late."""
        moved = 0
        while moved < most and len(group):
            first = group.line[0][1]
            own_s = MOST_MARGIN * (first.deadline_s - first.since_s)
            if first.deadline_s >= now_s + min(first_token_s, own_s):
                break
            self._move(self._members[first.id], group.kind._replace(slo_class="", late=True))
            self.missed.append(first.id)
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
        for group in list(self._groups.values()):
            if group.begun_on == worker:
                group.begun_on = None
                self._split(group)

    def set_batch(self, model: str, requests: float) -> None:
        """A worker runs so many requests of this model at a time. Groups that are too large by that are split."""
        if not 0 < requests < inf:
            raise ValueError(f"batch must be a number above 0, not {requests!r}")
        self._batches[model] = requests
        for group in list(self._groups.values()):
            if group.kind.model == model:
                self._split(group)

    def batch(self, model: str) -> float:
        """Requests that a worker runs at a time, as was said last."""
        return self._batches.get(model, self._batch)

    def limit(self, model: str) -> int:
        """Requests of a group at most, until it has begun."""
        return max(1, int(self._delta * self.batch(model)))

    # -- what is here

    def most_urgent(self, model: str, rank: int, worker: str) -> Group | None:
        """Of this model and rank that `worker` may have, the group that goes first. None if none waits."""
        heap = self._heads.get((model, rank))
        group = None if heap is None else heap.first()
        if group is None or worker not in group.kind.exclude:
            return group
        may = (one for one in heap or () if worker not in one.kind.exclude)
        return min(may, key=lambda one: one.urgency, default=None)

    def of(self, request_id: str) -> Group | None:
        """The group of a request that waits or runs."""
        member = self._members.get(request_id)
        return None if member is None else member.group

    def drain_born(self) -> list[tuple[Group, Group | None]]:
        """The groups that are new since the last call and are not over, each with the one whose newer half it is."""
        born, self._born = self._born, []
        return [one for one in born if one[0].number in self._groups]

    @property
    def by_number(self) -> Mapping[int, Group]:
        """All groups, the oldest first. Not to be written to."""
        return self._groups

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    # -- inside

    def _enter(self, kind: Kind, request: Entry, key: Key) -> Group:
        group = self._open(kind, key)
        group.joined += 1
        member = self._members[request.id] = _Member(key, request, group)
        self._wait(member)
        return member.group

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
        group = self._groups[self._numbers] = Group(self._numbers, kind, since)
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
        newer = self._create(group.kind, line[0][0], group)
        newer.joined = len(line)
        group.joined -= len(line)
        del group.line[middle:]
        newer.line = line
        for key, request in line:
            del key
            group.count(request, -1)
            newer.count(request, 1)
            self._members[request.id].group = newer
        self._rank(group)
        self._rank(newer)
        return newer

    def _move(self, member: _Member, kind: Kind) -> None:
        del self._members[member.request.id]
        self._leave(member)
        self._end_if_over(member.group)
        self._enter(kind, member.request, member.key)

    def _wait(self, member: _Member) -> None:
        insort(member.group.line, (member.key, member.request), key=lambda one: one[0])
        member.group.count(member.request, 1)
        self._rank(member.group)
        self._split(member.group)

    def _leave(self, member: _Member) -> None:
        del member.group.line[bisect_left(member.group.line, member.key, key=lambda one: one[0])]
        member.group.count(member.request, -1)
        self._rank(member.group)

    def _rank(self, group: Group) -> None:
        """Some of it have come or gone: its place among all follows."""
        place = group.kind.model, group.kind.rank
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
        if group.running or len(group) or group.number not in self._groups:
            return
        del self._groups[group.number]
        groups = self._of_kind[group.kind]
        groups.remove(group)
        if not groups:
            del self._of_kind[group.kind]
