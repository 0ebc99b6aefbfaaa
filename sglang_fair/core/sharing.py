"""The rule of steps (`steps`) as `Admission` has it: by jobs, and beside it the rule without shares."""

from collections.abc import Callable, Mapping

from sglang_fair.core.job import Job
from sglang_fair.core.ledger import SYSTEM
from sglang_fair.core.listener import Listener
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.steps import Steps
from sglang_fair.core.waits import BATCH, MEMORY


class PromptsFirst(Listener):
    """The rule without shares: prompts go first, whatever runs."""

    def chunk_tokens(self) -> int | None:
        """Most prompt tokens of the next step; None: as many as the engine will."""
        return None

    def may_prefill(self, job: Job) -> bool:
        """Whether a step may be formed for, or joined by, the prompt of `job`."""
        return True

    def holds_back(self, job: Job) -> bool:
        """Whether the prompt of `job`, none of the server's own, may not be admitted now, for the target."""
        return False

    def crowds_out(self, job: Job, waiting: int, could_run: Callable[[str], bool]) -> bool:
        """Whether it may not, because the places that are left are others'; see `Steps.crowds_out`."""
        return False

    def forced(self) -> None:
        """The next step is for prompts, for no decode step could be made."""

    def held(self) -> None:
        """Prompts were put off for a pass."""

    def held_back(self) -> None:
        """A client's prompts were, for the target or for places."""


class Sharing(PromptsFirst):
    """`steps` beside `queue`: what happens to jobs, by client. The server's own have no part in it."""

    def __init__(self, steps: Steps, queue: FairQueue) -> None:
        self._steps = steps
        queue.reweighed.append(steps.reweigh)

    def tick(self, now_s: float) -> None:
        self._steps.tick(now_s)

    def arrive(self, job: Job) -> None:
        if not job.system:
            self._steps.arrive(job.client)

    def leave(self, job: Job) -> None:
        if not job.system:
            self._steps.leave(job.client)

    def admit(self, job: Job) -> None:
        if not job.system:
            self._steps.admit(job.client)

    def computed(self, job: Job) -> None:
        if not job.system:
            job.decoding = True
            self._steps.decode(job.client)

    def retract(self, job: Job) -> None:
        if job.system:
            return
        if job.decoding:
            job.decoding = False
            self._steps.stop(job.client)
        self._steps.release(job.client)

    def evict(self, job: Job, urgent: Job) -> None:
        self.retract(job)

    def finish(self, job: Job, outcome: str) -> None:
        self.retract(job)
        self.leave(job)

    def step(self, duration_s: float, extended: Mapping[str, int], *, decoded: int, requests: int) -> None:
        self._steps.step(duration_s, extended, decoded=decoded, requests=requests)

    def end_pass(self, cause: str) -> None:
        if cause in (BATCH, MEMORY):
            self._steps.full()

    def chunk_tokens(self) -> int | None:
        return self._steps.chunk_tokens()

    def may_prefill(self, job: Job) -> bool:
        return self._steps.may_prefill(SYSTEM if job.system else job.client)

    def holds_back(self, job: Job) -> bool:
        return self._steps.holds_back(job.client)

    def crowds_out(self, job: Job, waiting: int, could_run: Callable[[str], bool]) -> bool:
        return self._steps.crowds_out(job.client, waiting, could_run)

    def forced(self) -> None:
        self._steps.forced()

    def held(self) -> None:
        self._steps.held += 1

    def held_back(self) -> None:
        self._steps.held_back += 1
