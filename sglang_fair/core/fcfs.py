"""Orders over all clients together: FCFS, first come, first served, and LPM, longest prefix match first (SGLang's
RadixAttention order, without its cut-off at 128 requests). The simplest implementations of `Policy`.

Unit of fairness: none. A client gets service in proportion to what it sends, so one that floods the queue delays
everybody behind its backlog. LPM has the best hit rate; a client with a hot prefix can keep all others waiting for
ever, and one hot prefix of a client its other requests (DLPM §2, §3).
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


def longest_prefix(job: Job) -> Any:
    """Longest cached prefix first, then arrival order."""
    return (-job.prefix_tokens, job.arrival)


class Lpm(Fcfs):
    """Jobs by cached prefix, one queue."""

    name: ClassVar[str] = "lpm"
    waits_for_prefixes: ClassVar[bool] = True

    def key(self, job: Job) -> Any:
        return longest_prefix(job)
