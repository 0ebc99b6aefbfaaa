"""Requests that a simulated replica takes back: for its owner between two steps, or for a candidate that is due.

Their context is cached, and goes to the memory of the host if there is room, from where it comes back when they are
admitted.
"""

from collections.abc import Iterable

from sglang_fair.core.job import Job
from sglang_fair.core.preemption import Missing, Runner
from sglang_fair.sim.budget import LONGEST_RESERVATION, Budget, Settings
from sglang_fair.sim.cache import Node
from sglang_fair.sim.decoding import Decoding
from sglang_fair.sim.host import HostPool
from sglang_fair.sim.task import Task


class Evictions:
    """Of one replica, with the memory of its host."""

    def __init__(self, replica: Decoding) -> None:
        self._replica = replica
        self._named: dict[str, None] = {}
        """Requests that leave the decode batch before the next step."""
        self._for: list[tuple[Task, Job]] = []
        """Those that left it for the batch that is being formed, each with the job that is due."""
        self.load(replica.settings)

    def load(self, settings: Settings) -> None:
        """Another model: nothing is kept."""
        self.host = HostPool(settings.host_tokens, settings.host_token_s)

    def name(self, request_ids: Iterable[str]) -> None:
        """These leave the decode batch before the next step."""
        self._named.update(dict.fromkeys(request_ids))

    def take_out(self, t_s: float) -> list[Task]:
        """Those that the owner named leave the decode batch, unless they have ended. They wait again, first in line,
        once the next batch is formed, which is not theirs."""
        tasks, (names, self._named) = self._replica.decoding.tasks, (self._named, {})
        evicted = [tasks[name] for name in names if name in tasks and not tasks[name].aborted]
        for task in evicted:
            self._take(task, t_s)
        return evicted

    def make_room(self, urgent: Task, node: Node, budget: Budget, t_s: float) -> bool:
        """Take back what the policy says for a candidate that has no memory. Whether anything was."""
        replica = self._replica
        preemption = replica.admission.preemption
        if preemption is None or not preemption.may_take_back(urgent.job):
            return False
        decoding, step = replica.decoding, replica.decoding.step
        output_tokens = urgent.job.max_output_tokens - urgent.output
        missing = Missing(budget.missing(node.end, urgent.length, output_tokens, replica.room(node)))
        reserved = {
            name: replica.ratio.now
            * min(task.job.max_output_tokens - task.written(step), LONGEST_RESERVATION)
            for name, task in decoding.tasks.items()
            if not task.aborted
        }
        running = [
            Runner(
                decoding.jobs[name],
                decoding.tasks[name].held(step) - decoding.jobs[name].cached_tokens + kept,
            )
            for name, kept in reserved.items()
        ]
        chosen = preemption.choose(urgent.job, missing, running, t_s)
        for job in chosen:
            budget.free(reserved[job.id])
            task = decoding.tasks[job.id]
            self._take(task, t_s)
            self._for.append((task, urgent.job))
        return bool(chosen)

    def queue_again(self, evicted: Iterable[Task]) -> None:
        """A batch was formed, or none: `evicted`, and those that made room, wait again."""
        for task in evicted:
            self._replica.admission.retract(task.job)
        for task, urgent in self._for:
            self._replica.admission.evict(task.job, urgent)
        self._for.clear()

    def wait_s(self, batch: Iterable[Task], t_s: float, duration_s: float) -> float:
        """How much longer a step takes because of copies: from the host for those in `batch`, which come while it
        computes; and before it begins, to the host, of what lies where it writes."""
        replica = self._replica
        wait_s = self.host.wait_s(replica.pool.room_tokens(), t_s)
        if loaded := sum(task.loaded for task in batch):
            replica.meters.loaded_tokens += loaded
            wait_s += max(0.0, self.host.load_s(loaded, t_s + wait_s) - duration_s)
        replica.meters.host_wait_s += wait_s
        return wait_s

    def _take(self, task: Task, t_s: float) -> None:
        """A request leaves the decode batch and its memory; its context is cached, and on the host if there is room."""
        replica, decoding = self._replica, self._replica.decoding
        replica.break_run(t_s)
        written, held = task.written(decoding.step), task.held(decoding.step)
        decoding.leave(task)
        self.host.keep(task.request.id, held, t_s)
        replica.pool.release(task, held, written, keep=True)
        task.take_back(written)
        replica.meters.evictions += 1
        replica.drain(t_s)
