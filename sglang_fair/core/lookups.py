"""Which waiting requests to look up in the cache before a pass: those whose cached prefix may have changed.

A look-up costs the engine about 10 µs, so 10,000 waiting requests cannot all be looked up before each batch.

    a new request           is looked up once, in order of arrival
    tokens were inserted    only a request whose first uncached tokens (`Job.block`) were just computed has a longer
                            prefix now; those are found by that block
    tokens were evicted     a prefix only gets shorter. The engine looks up each candidate anyway, so a request that
                            was overestimated is noticed when its turn comes
    anything else           a few more in each pass, in turn, until all were seen since the last change

Every operation is O(1), however many wait; memory is O(waiting requests).
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import islice

from sglang_fair.core.job import Job
from sglang_fair.core.listener import Listener

Group = dict[Job, None]
"""Requests whose next tokens are the same."""


@dataclass
class LookUps(Listener):
    """At most `most` look-ups per pass, of which `in_turn` are kept for requests that nothing points to."""

    most: int = 64
    in_turn: int = 4

    _new: OrderedDict[Job, None] = field(default_factory=OrderedDict, init=False, repr=False)
    _known: OrderedDict[Job, None] = field(default_factory=OrderedDict, init=False, repr=False)
    _groups: dict[Hashable, Group] = field(default_factory=dict, init=False, repr=False)
    _group_of: dict[Job, tuple[Hashable, Group]] = field(default_factory=dict, init=False, repr=False)
    _grown: list[Group] = field(default_factory=list, init=False, repr=False)
    _unseen: int = field(default=0, init=False, repr=False)

    def arrive(self, job: Job) -> None:
        self._new[job] = None

    def retract(self, job: Job) -> None:
        self.arrive(job)

    def evict(self, job: Job, urgent: Job) -> None:
        self.arrive(job)

    def leave(self, job: Job) -> None:
        self._new.pop(job, None)
        self._known.pop(job, None)
        self._ungroup(job)

    def admit(self, job: Job) -> None:
        self.leave(job)

    def cached(self, job: Job) -> None:
        if job.block is not None:
            self.inserted(job.block)

    def looked_up(self, job: Job) -> None:
        """`job` was looked up: its prefix and its block are up to date."""
        self._new.pop(job, None)
        self._known[job] = None
        self._known.move_to_end(job)
        self._ungroup(job)
        if job.block is not None:
            group = self._groups.setdefault(job.block, {})
            group[job] = None
            self._group_of[job] = (job.block, group)

    def inserted(self, block: Hashable) -> None:
        """The cache holds the tokens of `block` now."""
        group = self._groups.pop(block, None)
        if group:
            self._grown.append(group)

    def changed(self) -> None:
        """The cache changed in some way."""
        self._unseen = len(self._known)

    def due(self) -> list[Job]:
        """The requests to look up in this pass. The caller calls `looked_up` for each."""
        chosen: dict[Job, None] = {}
        for job in self._new:
            if len(chosen) == self.most - self.in_turn:
                break
            chosen[job] = None
        while self._grown and len(chosen) < self.most - self.in_turn:
            group = self._grown[-1]
            if not group:
                self._grown.pop()
                continue
            job, _ = group.popitem()
            del self._group_of[job]
            chosen[job] = None
        in_turn = min(self.in_turn, self._unseen)
        for job in islice(self._known, in_turn):
            chosen[job] = None
        self._unseen -= in_turn
        return list(chosen)

    def __len__(self) -> int:
        return len(self._new) + len(self._known)

    def _ungroup(self, job: Job) -> None:
        block, group = self._group_of.pop(job, (None, None))
        if group is None:
            return
        del group[job]
        if not group and self._groups.get(block) is group:
            del self._groups[block]
