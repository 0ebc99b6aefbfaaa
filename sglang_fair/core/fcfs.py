"""FCFS: first come, first served, over all clients together. The simplest implementation of `Policy`.

Unit of fairness: none. A client gets service in proportion to what it sends, so one that floods the queue delays
everybody behind its backlog.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from sglang_fair.core.heap import LazyHeap
from sglang_fair.core.job import Job
from sglang_fair.core.policy import Policy


@dataclass
class Fcfs(Policy):
    """Jobs by arrival, one queue."""

    name: ClassVar[str] = "fcfs"
    _waiting: LazyHeap[Job] = field(default_factory=LazyHeap, init=False, repr=False)
    _held: dict[Job, None] = field(default_factory=dict, init=False, repr=False)

    def key(self, job: Job) -> Any:
        """The order of the queue, smallest first."""
        return job.arrival

    def arrive(self, job: Job) -> None:
        self._waiting.put(job, self.key(job))

    def leave(self, job: Job) -> None:
        self._waiting.discard(job)
        self._held.pop(job, None)

    def rematch(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.put(job, self.key(job))

    def pick(self) -> Job | None:
        return self._waiting.first()

    def hold(self, job: Job) -> None:
        self._waiting.discard(job)
        self._held[job] = None

    def release(self) -> None:
        for job in self._held:
            self._waiting.put(job, self.key(job))
        self._held.clear()
