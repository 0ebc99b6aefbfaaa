"""The decode batch of a simulated replica: every request in it writes one token in each decode step.

Steps are numbered through. What grows with each of them (tokens held, output owed, pages needed) is kept as sums, so
that many steps cost as much as one.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from sglang_fair.core.job import Job
from sglang_fair.sim.budget import LONGEST_RESERVATION
from sglang_fair.sim.pool import Task


class DecodeBatch:
    """The requests as of step number `step`. SGLang's order is that of their places."""

    def __init__(self, page_tokens: int) -> None:
        self.step = 0
        self.tasks: dict[str, Task] = {}
        self.jobs: dict[str, Job] = {}
        self.held_tokens = 0
        """In the pool: all contexts, each without its last token."""
        self.new_pages = [0] * page_tokens
        """How many requests need a new page at the step whose number is i modulo the page size."""
        self._page_tokens = page_tokens
        self._joins = 0
        self._before = 0
        """Places before all others that were given."""
        self._ends: list[tuple[int, int, Task]] = []
        """Heap of (last step, place, task). An entry is out of date where the task's own numbers differ."""
        self._owed_tokens = 0
        """Output that the requests may still write."""
        self._clipped = 0
        """Requests that may write more than is reserved for one."""

    def __len__(self) -> int:
        return len(self.tasks)

    def join(self, task: Task) -> None:
        self._joins += 1
        self._enter(task, self._joins)

    def join_before(self, tasks: Sequence[Task]) -> None:
        """In this order before all others: SGLang merges those that ran into a mixed batch."""
        self._before -= len(tasks)
        for place, task in enumerate(tasks, self._before):
            self._enter(task, place)

    def _enter(self, task: Task, place: int) -> None:
        task.place, task.joined = place, self.step
        task.last_step = self.step + 1 if task.aborted else self.step + task.output_limit - task.output
        heappush(self._ends, (task.last_step, task.place, task))
        self.tasks[task.request.id] = task
        self.jobs[task.request.id] = task.job
        self.new_pages[(task.joined - task.length) % self._page_tokens] += 1
        self.held_tokens += task.length
        self._owed_tokens += task.job.max_output_tokens - task.output
        self._clipped += task.job.max_output_tokens > LONGEST_RESERVATION

    def reorder(self, tasks: Sequence[Task]) -> None:
        """All of it, in this order."""
        for task in tasks:
            self._joins += 1
            task.place = self._joins
            heappush(self._ends, (task.last_step, task.place, task))

    def leave(self, task: Task) -> None:
        del self.tasks[task.request.id], self.jobs[task.request.id]
        self.new_pages[(task.joined - task.length) % self._page_tokens] -= 1
        self.held_tokens -= task.held(self.step)
        self._owed_tokens -= task.job.max_output_tokens - task.written(self.step)
        self._clipped -= task.job.max_output_tokens > LONGEST_RESERVATION
        task.place = 0

    def give_up(self, task: Task, last_step: int) -> None:
        """End an aborted request after `last_step`, unless it ends before."""
        if last_step < task.last_step:
            task.aborted, task.last_step = True, last_step
            heappush(self._ends, (last_step, task.place, task))

    def advance(self, steps: int) -> None:
        count = len(self.tasks)
        self.step += steps
        self.held_tokens += count * steps
        self._owed_tokens -= count * steps

    def first_end(self) -> int:
        """The step after which the first request ends. The batch is not empty."""
        while True:
            last_step, place, task = self._ends[0]
            if (task.last_step, task.place) == (last_step, place):
                return last_step
            heappop(self._ends)

    def ended(self) -> list[Task]:
        """The requests that end after the current step; each is returned once, and leaves by `leave`."""
        ended: list[Task] = []
        while self._ends and self._ends[0][0] <= self.step:
            last_step, place, task = heappop(self._ends)
            if (task.last_step, task.place) == (last_step, place):
                ended.append(task)
        return ended

    def last_step_within(self, pages: int, stop: int) -> int:
        """The last step up to `stop` that can be made with so many more pages."""
        if pages < len(self.tasks) * (1 + (stop - self.step) // self._page_tokens):
            for step in range(self.step, stop):
                pages -= self.new_pages[step % self._page_tokens]
                if pages < 0:
                    return step
        return stop

    def pages_for_step(self) -> int:
        return self.new_pages[self.step % self._page_tokens]

    def reservable_tokens(self) -> int:
        """Output that the requests may still write, of each at most `LONGEST_RESERVATION`."""
        if not self._clipped:
            return self._owed_tokens
        return sum(
            min(task.job.max_output_tokens - task.written(self.step), LONGEST_RESERVATION)
            for task in self.tasks.values()
        )
