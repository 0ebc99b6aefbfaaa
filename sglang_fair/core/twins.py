"""Which prompts are being computed, and which requests wait for the result: their next tokens are the same.

One step later these are a cache hit. A request does not wait for a second computation of the same prefix if the first
did not lengthen what the cache has: then the cache does not keep it.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from sglang_fair.core.job import Job
from sglang_fair.core.listener import Listener


@dataclass(slots=True, eq=False)
class Computation:
    """A step of the engine that computes `job`'s prompt from some block on."""

    job: Job


class Twins(Listener):
    """What is being computed, by its first block. `waits`: requests wait for it (`Policy.waits_for_prefixes`)."""

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._computing: dict[Hashable, Computation] = {}

    def is_being_computed(self, job: Job) -> bool:
        """Whether to wait for another request's prefill that starts with the tokens which `job` needs next."""
        if job.block is None or not self._waits:
            return False
        computation = self._computing.get(job.block)
        if computation is None or computation.job is job:
            return False
        return computation is job.waited_for or job.prefix_tokens > job.waited_at_tokens

    def defer(self, job: Job) -> None:
        """`job` waits for what is being computed."""
        if job.block is not None and (computation := self._computing.get(job.block)) is not job.waited_for:
            job.waited_for, job.waited_at_tokens = computation, job.prefix_tokens

    def will_wait(self, job: Job, block: Hashable | None) -> bool:
        """Whether `job` will wait once the engine computes `block`."""
        return self._waits and block is not None and job.block == block

    def admit(self, job: Job) -> None:
        """An engine may compute the same block for two requests; the first one counts."""
        if job.block is not None:
            self._computing.setdefault(job.block, Computation(job))

    def cached(self, job: Job) -> None:
        if job.block is not None:
            computation = self._computing.get(job.block)
            if computation is not None and computation.job is job:
                del self._computing[job.block]

    def retract(self, job: Job) -> None:
        self.cached(job)

    def evict(self, job: Job, urgent: Job) -> None:
        self.cached(job)

    def finish(self, job: Job, outcome: str) -> None:
        self.cached(job)

    def __len__(self) -> int:
        return len(self._computing)
