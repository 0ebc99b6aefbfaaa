"""Which group's next request a worker gets that has room.

    pulling     a worker that has room (`worker`) gets a request of its first groups of the model that is loaded, up to
                the first of another model, which waits for the swap. Of these groups: within its share before ahead of
                it, what can be in time before what is late already, then the earliest deadline
    lending     a worker that has room serves requests of other queues, of its model, that come before its own in tier
                and lateness, or have less than `DANGER` of their time left and are more urgent than its own. So with
                one model and no time to lose, the order is that of a single queue: without it, in a trial, up to 40
                points of attainment were lost to EDF by request, because urgent requests waited in one queue while
                another worker served its own, which had time
    stealing    a worker whose queue is empty takes, from the longest other queue, a whole group of its model that has
                not begun if that queue keeps another one, else the newer half. So nobody waits whom a worker could
                serve that has room and the model, unless it is to load another one
    late        who cannot be in time any more goes behind all of its tier who can. But every `OVERDUE_EVERY`th pull of
                a worker is of who is late longest, within its share before ahead of it, so nobody starves. (The paper
                counts seconds of lateness: one who is late by a minute is worth as much as sixty by a second)

O(log groups), where a queue has one model and no request may be sent beyond the window; else O(groups of the queue).
"""

from collections.abc import Sequence
from itertools import dropwhile, takewhile
from operator import attrgetter

from router.queues.group import Group
from router.queues.groups import Groups
from router.queues.heads import Urgency
from router.queues.outlook import Outlook
from router.queues.standing import Standing
from router.queues.worker import Worker

OVERDUE_EVERY = 8
"""Of so many pulls one is of who is late longest."""
DANGER = 0.75
"""Who has less than this part of its time left is served by any worker that has room."""
_MOST_MISSED = 32
"""Requests that are found to be late with one pull."""
_RANKS, _OVERDUE_RANKS = (0, 1, 2, 3), (1, 0, 3, 2)
"""In the order in which they go: mostly, and when it is the turn of who is late."""
_OF_TIER_0 = 2
"""How many of these are within their share."""


class Pulls:
    """The next group of a worker. Groups are born and stolen meanwhile."""

    def __init__(self, groups: Groups, standing: Standing, outlook: Outlook) -> None:
        self._groups, self._standing, self._outlook = groups, standing, outlook

    def next(self, worker: Worker, now_s: float) -> Group | None:
        """None if nobody may go there now. It may be in another queue: then its request is lent."""
        own = self._own(worker, now_s)
        if own is not None and not own:
            return None
        while True:
            chosen = self._most_urgent(worker, own, now_s)
            if chosen is None or chosen.kind.late:
                return chosen
            if not self._groups.miss(chosen, now_s, worker.first_token_s, _MOST_MISSED):
                return chosen
            self._missed(chosen, worker)
            own = self._own(worker, now_s)

    def _own(self, worker: Worker, now_s: float) -> list[Group] | None:
        """The first groups of the model that is loaded, up to one of another model; None for the whole queue. Empty if
        it is to load another model first."""
        model = worker.loaded
        if worker.heads.are_of(model):
            return None
        waiting = self._standing.waiting(worker)
        if waiting[0].kind.model != model and not (
            worker.is_fresh or self._outlook.stays(worker, waiting, now_s)
        ):
            return []
        behind = dropwhile(lambda group: group.kind.model != model, waiting)
        return list(takewhile(lambda group: group.kind.model == model, behind))

    def _most_urgent(self, worker: Worker, own: Sequence[Group] | None, now_s: float) -> Group | None:
        """Of its own groups the most urgent one; one of another queue if it comes before that in tier and lateness, or
        is in danger there and more urgent, or if there is none."""
        model = worker.loaded
        if model is None:
            return None
        is_overdue_s_turn = not (worker.pulls + 1) % OVERDUE_EVERY
        order: tuple[int, ...] = _OVERDUE_RANKS if is_overdue_s_turn else _RANKS
        if not worker.has_room(1):
            order = order[:_OF_TIER_0]
        mine = self._first(worker, model, own, is_overdue_s_turn)
        for rank in order:
            is_same = mine is not None and mine.kind.rank == rank
            other = self._groups.most_urgent(model, rank, worker.name)
            if other is not None and _has_room(worker, other):
                if mine is None and not worker.groups:
                    return self._steal(worker, model, rank) or other
                if not is_same:
                    return other
                if mine is not None and other.urgency < mine.urgency and other.is_in_danger(now_s, DANGER):
                    return other
            if is_same:
                break
        return mine

    def _first(
        self, worker: Worker, model: str, own: Sequence[Group] | None, is_overdue_s_turn: bool
    ) -> Group | None:
        """Of its own groups the most urgent one that may be sent there."""
        if own is None and worker.has_room(0):
            ranks = _OVERDUE_RANKS if is_overdue_s_turn else _RANKS
            return worker.heads.first(model, ranks if worker.has_room(1) else ranks[:_OF_TIER_0])
        may = [one for one in (worker.heads if own is None else own) if _has_room(worker, one)]
        return min(may, key=_overdue_first if is_overdue_s_turn else _by_urgency, default=None)

    def _missed(self, group: Group, worker: Worker) -> None:
        """Some of a group are late now. If that made a new group it comes into this worker's queue."""
        self._standing.drop_if_over(group)
        for born, _ in self._groups.drain_born():
            self._standing.put(worker, born.number)

    def _steal(self, worker: Worker, model: str, rank: int) -> Group | None:
        """A group of this model and rank comes from the longest of the other queues."""
        found: dict[str, Group] = {}
        for group in self._groups.of_rank(model, rank):
            owner = self._standing.where(group.number)
            if owner is None or owner is worker or worker.name in group.kind.exclude:
                continue
            known = found.get(owner.name)
            if known is None or (group.begun_on is not None, group.number) < (
                known.begun_on is not None,
                known.number,
            ):
                found[owner.name] = group
        if not found:
            return None
        name = max(found, key=lambda name: (self._queued_tokens(name), name))
        group, other = found[name], self._standing.workers[name]
        is_last = len(self._standing.waiting(other)) == 1
        if group.begun_on is None and (len(group) == 1 or not is_last):
            self._standing.take_out(other, group.number)
        else:
            stem = group
            group = self._groups.cut(group)
            self._groups.drain_born()
            self._standing.drop_if_over(stem)
        self._standing.put(worker, group.number)
        return group

    def _queued_tokens(self, name: str) -> float:
        """Prompts and outputs that wait in a queue."""
        waiting = self._standing.waiting(self._standing.workers[name])
        return sum(one.prompt_tokens + one.output_tokens for one in waiting)


def _has_room(worker: Worker, group: Group) -> bool:
    """Whether the next of a group may be sent there."""
    return worker.has_room(group.kind.tier, None if group.kind.late else group.deadline_s)


_by_urgency = attrgetter("urgency")


def _overdue_first(group: Group) -> Urgency:
    """Of its tier, who is late goes first."""
    tier, late, urgent_s, number = group.urgency
    return tier, not late, urgent_s, number
