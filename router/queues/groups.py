"""Groups of requests that are planned as one (QLM, Algorithm 1).

    group     requests of one model, class and tier, and of one kind of lengths. Inside: `line`
    kind      the nearest of at most `MOST_KINDS` centres by the logarithms of prompt tokens and expected output, which
              the planner finds (`centres`). New centres hold for requests that come; nobody is moved because of them
    size      a group that has not begun is split into an older and a newer half when it has more than `delta` average
              batches waiting; the groups of a kind are consecutive pieces of its line
    begun     a worker has taken one of its requests: the group stays there and is no longer split, unless another
              worker idles (`cut`). It is joined until it has had `delta` batches in all, so it ends, whoever keeps
              sending
    late      what cannot be in time any more leaves its group for one of late requests (`miss`), of all classes, first
              come, first served

A group is over when nobody of it waits or runs. A worker that is gone leaves its groups as if they had not begun.

Each call costs O(log of the group's size), a split O(size): once for that many requests. 400,000 requests in 400 groups
take about as long each as a hundred in one.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log1p
from typing import NamedTuple

from router.queues.group import Group, Kind
from router.queues.heads import Heads
from router.queues.line import Entry, Key, Line, Queued

MOST_KINDS = 4
MOST_MARGIN = 0.25

Centre = tuple[float, float]
"""log(1 + prompt tokens), log(1 + expected output tokens)."""


def lengths(request: Queued) -> Centre:
    """Where a request lies among the centres."""
    return log1p(request.prompt_tokens), log1p(request.expected_output_tokens)


def sample(requests: Iterable[Queued], most: int = 500) -> dict[tuple[str, str], list[Centre]]:
    """Where these lie, by model and class: of each at most so many, the first ones."""
    found: dict[tuple[str, str], list[Centre]] = {}
    for request in requests:
        of_kind = found.setdefault((request.model, request.slo_class), [])
        if len(of_kind) < most:
            of_kind.append(lengths(request))
    return found


class Born(NamedTuple):
    """A new group; the newer half of `after`, if it was split off."""

    group: Group
    after: Group | None


@dataclass(slots=True, eq=False)
class _Member:
    """A request that waits or runs."""

    entry: Entry
    group: Group
    waits: bool = True


class Groups:
    """All groups. ValueError for a `delta` or a batch that is no positive number."""

    def __init__(self, delta: float = 4.0, batch: float = 64.0, prefixes: bool = True) -> None:
        """`batch`: requests that a worker runs at a time, until `set_batch` says what was measured. Without `prefixes`
        the order inside is first come, first served, and nothing is saved by those that share one, as in the paper."""
        self._delta = _positive("delta", delta)
        self._batch = _positive("batch", batch)
        self._prefixes = prefixes
        self._batches: dict[str, float] = {}
        self._groups: dict[int, Group] = {}
        self._of_kind: dict[Kind, list[Group]] = {}
        """Each list in order of `since`."""
        self._members: dict[str, _Member] = {}
        self._centres: dict[tuple[str, str], tuple[int, Sequence[Centre]]] = {}
        self._born: list[Born] = []
        self._numbers = self._arrivals = 0
        self._heads: Heads[Group] = Heads()
        self.waiting: dict[tuple[str, int], int] = {}
        """How many wait, by model and rank. Not to be written to."""
        self.missed: list[str] = []
        """Requests that were found to be late and were not told yet (`VirtualQueues.drain_missed`)."""

    # -- requests

    def add(self, request: Queued, tier: int) -> Group:
        """`request` waits. The group it is in; that of the first one if its id is here already."""
        known = self._members.get(request.id)
        if known is not None:
            return known.group
        self._arrivals += 1
        if not self._prefixes:
            request = replace(request, prefix=None)
        return self._join(request, tier, (1, request.since_s, self._arrivals))

    def take(self, group: Group, worker: str) -> Queued | None:
        """`worker` serves the next of a group, which begins there if it has not; None if nobody of it waits.
        ValueError if it has begun elsewhere."""
        if group.begun_on not in (None, worker):
            raise ValueError(f"group {group.number} has begun on {group.begun_on}, not on {worker}")
        request = self.lend(group)
        if request is not None:
            group.begun_on = worker
        return request

    def lend(self, group: Group) -> Queued | None:
        """The next of a group is served by a worker that is not its own; the group stays as it is. None if nobody of
        it waits."""
        entry = group.line.take()
        if entry is None:
            return None
        group.running += 1
        self._count(group, entry.request, -1)
        self._members[entry.request.id].waits = False
        return entry.request

    def put_back(self, request_id: str) -> Group | None:
        """A request that ran was taken back: it waits in front of its group. None if it does not run."""
        member = self._members.get(request_id)
        if member is None or member.waits:
            return None
        group, entry = member.group, member.entry
        entry.key = (0, *entry.key[1:])
        group.running -= 1
        self._wait(member)
        self._split(group)
        return member.group

    def remove(self, request_id: str) -> Group | None:
        """A request is over or was given up. Returns its group; None if the id is not here."""
        member = self._members.pop(request_id, None)
        if member is None:
            return None
        group = member.group
        if member.waits:
            self._leave(member)
        else:
            group.running -= 1
        self._end_if_over(group)
        return group

    def judge(self, request_id: str, tier: int) -> Group | None:
        """A request is now of this tier: it goes into another group, at its place there. None if nothing changes, or it
        does not wait."""
        member = self._members.get(request_id)
        if member is None or not member.waits:
            return None
        group = member.group
        if group.kind.tier == tier:
            return None
        del self._members[request_id]
        self._leave(member)
        self._end_if_over(group)
        if group.kind.late:
            return self._enter(group.kind._replace(tier=tier), member.entry.request, member.entry.key)
        return self._join(member.entry.request, tier, member.entry.key)

    def miss(self, group: Group, now_s: float, first_token_s: float, most: int) -> bool:
        """The first in line who cannot be in time any more, at most `most`, go to a group of late ones. Whether there
        was one. A worker takes `first_token_s` to a first token; of that at most `MOST_MARGIN` of a request's own time
        is believed, so a bad moment of a worker does not make everybody late."""
        kind, moved = group.kind, 0
        while moved < most and len(group):
            first = next(iter(group.line))
            own_s = MOST_MARGIN * (first.request.deadline_s - first.request.since_s)
            if first.request.deadline_s >= now_s + min(first_token_s, own_s):
                break
            self._leave(self._members.pop(first.request.id))
            late = Kind(kind.model, "", kind.tier, exclude=kind.exclude, late=True)
            self._enter(late, first.request, first.key)
            self.missed.append(first.request.id)
            moved += 1
        if moved:
            self._end_if_over(group)
        return moved > 0

    def cut(self, group: Group) -> Group:
        """The newer half of those that wait become a group of its own, which has not begun; all, if that is one."""
        line = group.line.split() if len(group) > 1 else group.line
        if line is group.line:
            group.line = Line()
        newer = self._halve(group, line)
        for half in (group, newer):
            half.recount()
            half.rank(self._heads)
        self._end_if_over(group)
        return newer

    # -- workers and the planner

    def worker_down(self, worker: str) -> None:
        """The groups that have begun there may begin anywhere. O(groups)."""
        for group in list(self._groups.values()):
            if group.begun_on == worker:
                group.begun_on = None
                self._split(group)

    def set_batch(self, model: str, requests: float) -> None:
        """A worker runs so many requests of this model at a time. Groups that are now too large are split."""
        self._batches[model] = _positive("batch", requests)
        for group in list(self._groups.values()):
            if group.kind.model == model:
                self._split(group)

    def set_centres(self, model: str, slo_class: str, centres: Sequence[Centre]) -> None:
        """Requests that come are of the kind of the nearest of these. ValueError for more than `MOST_KINDS`."""
        if not 1 <= len(centres) <= MOST_KINDS:
            raise ValueError(f"{len(centres)} centres: there are 1 to {MOST_KINDS}")
        version, known = self._centres.get((model, slo_class), (0, ()))
        if tuple(centres) != known:
            self._centres[model, slo_class] = version + 1, tuple(centres)

    def drain_born(self) -> list[Born]:
        """The groups that are new since the last call and are not over."""
        born, self._born = self._born, []
        return [one for one in born if one.group.number in self._groups]

    def batch(self, model: str) -> float:
        """Requests that a worker runs at a time, as was said last."""
        return self._batches.get(model, self._batch)

    def limit(self, model: str) -> int:
        """Requests of a group at most, until it has begun."""
        return max(1, int(self._delta * self.batch(model)))

    # -- what is here

    def most_urgent(self, model: str, rank: int, worker: str) -> Group | None:
        """Of those of this model and rank that `worker` may have, the group whose deadline is the earliest; of late
        ones, that waits longest. None if nobody waits."""
        group = self._heads.first(model, (rank,))
        if group is None or worker not in group.kind.exclude:
            return group
        may = (one for one in self.of_rank(model, rank) if worker not in one.kind.exclude)
        return min(may, key=lambda one: (one.urgent_s, one.number), default=None)

    def of_rank(self, model: str, rank: int) -> Iterator[Group]:
        """The groups of this model and rank that somebody waits in. O(kinds and groups of them)."""
        for kind, groups in self._of_kind.items():
            if kind.model == model and kind.rank == rank:
                yield from (group for group in groups if len(group))

    def of(self, request_id: str) -> Group | None:
        """The group of a request that waits or runs."""
        member = self._members.get(request_id)
        return None if member is None else member.group

    def get(self, number: int) -> Group | None:
        """The group of this number, unless it is over or never was."""
        return self._groups.get(number)

    def by_number(self) -> Mapping[int, Group]:
        """All groups, the oldest first. Not to be written to."""
        return self._groups

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    # -- inside

    def _join(self, request: Queued, tier: int, key: Key) -> Group:
        return self._enter(self._kind(request, tier), request, key)

    def _enter(self, kind: Kind, request: Queued, key: Key) -> Group:
        group = self._open(kind, key)
        member = self._members[request.id] = _Member(Entry(key, request), group)
        group.joined += 1
        self._wait(member)
        self._split(group)
        return member.group

    def _kind(self, request: Queued, tier: int) -> Kind:
        version, centres = self._centres.get((request.model, request.slo_class), (0, ()))
        at = lengths(request)
        nearest = min(range(len(centres)), key=lambda one: _distance(centres[one], at), default=0)
        return Kind(request.model, request.slo_class, tier, version, nearest, request.exclude)

    def _open(self, kind: Kind, key: Key) -> Group:
        """The group of this kind whose piece the key lies in, or the next that may still be joined, or a new one."""
        groups = self._of_kind.get(kind, [])
        first = max(0, bisect_right(groups, key, key=lambda group: group.since) - 1)
        for group in groups[first:]:
            if group.begun_on is None or group.joined < self.limit(kind.model):
                return group
        since = max(key, groups[-1].since) if groups else key
        return self._create(kind, since, Line(), None)

    def _create(self, kind: Kind, since: Key, line: Line, after: Group | None) -> Group:
        self._numbers += 1
        group = Group(self._numbers, kind, since, line)
        self._groups[group.number] = group
        insort(self._of_kind.setdefault(kind, []), group, key=lambda one: one.since)
        self._born.append(Born(group, after))
        return group

    def _split(self, group: Group) -> None:
        """Cut a group that has not begun until no piece is above the limit."""
        most = self.limit(group.kind.model)
        if group.begun_on is not None or len(group) <= most:
            return
        newer = self._halve(group, group.line.split())
        for half in (group, newer):
            half.recount()
            half.rank(self._heads)
            self._split(half)

    def _halve(self, group: Group, line: Line) -> Group:
        """The newer half of a group, which is in `line`, becomes one of its own."""
        newer = self._create(group.kind, next(iter(line)).key, line, group)
        newer.joined = len(line)
        group.joined -= len(line)
        for entry in line:
            self._members[entry.request.id].group = newer
        return newer

    def _wait(self, member: _Member) -> None:
        member.waits = True
        member.group.line.put(member.entry)
        self._count(member.group, member.entry.request, 1)

    def _leave(self, member: _Member) -> None:
        member.group.line.remove(member.entry)
        self._count(member.group, member.entry.request, -1)

    def _count(self, group: Group, request: Queued, sign: int) -> None:
        """One more waits, or one fewer."""
        group.count(request, sign)
        group.rank(self._heads)
        key = group.kind.model, group.kind.rank
        count = self.waiting.get(key, 0) + sign
        if count:
            self.waiting[key] = count
        else:
            del self.waiting[key]

    def _end_if_over(self, group: Group) -> None:
        if group.running or len(group):
            return
        del self._groups[group.number]
        groups = self._of_kind[group.kind]
        groups.remove(group)
        if not groups:
            del self._of_kind[group.kind]


def _distance(one: Centre, other: Centre) -> float:
    return (one[0] - other[0]) ** 2 + (one[1] - other[1]) ** 2


def _positive(name: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a number above 0, not {value!r}")
    return value
