"""Requests that a simulated replica takes back for a candidate that is due, and the memory of its host beside the GPU.

Their context is cached, and goes to the memory of the host if there is room for all of it, from where it comes back
when they are admitted; otherwise what is not cached any more is computed again. One link carries copies both ways, one
after the other, while the GPU computes. A copy out begins when its request is taken back; its pages are free in the
books at once, and a step waits only if it needs them before they have left. A copy in begins with the step that admits
the request again, which lasts at least as long.
"""

from collections import deque
from collections.abc import Iterable

from sglang_fair.core.job import Job
from sglang_fair.core.preemption import Missing, Runner
from sglang_fair.sim.budget import LONGEST_RESERVATION, Budget, Settings
from sglang_fair.sim.cache import Node
from sglang_fair.sim.decoding import Decoding
from sglang_fair.sim.pool import Task

HOST_BYTES_PER_S = 25e9
"""One way over PCIe 4.0 with 16 lanes, as copies of keys and values reach it."""


class HostPool:
    """At most `tokens` of contexts, each of which takes `token_s` on the link."""

    def __init__(self, tokens: int = 0, token_s: float = 0.0) -> None:
        self.tokens = tokens
        self.used_tokens = 0
        self._token_s = token_s
        self._kept: dict[str, int] = {}
        self._free_s = 0.0
        """When the link has carried all."""
        self._leaving: deque[tuple[float, int]] = deque()
        """When each copy out ends, and its tokens."""

    def keep(self, request_id: str, tokens: int, now_s: float) -> bool:
        """Copy a context out from `now_s` on. Whether there was room."""
        if tokens <= 0 or self.used_tokens + tokens > self.tokens:
            return False
        self.drop(request_id)
        self._kept[request_id] = tokens
        self.used_tokens += tokens
        self._free_s = max(self._free_s, now_s) + tokens * self._token_s
        self._leaving.append((self._free_s, tokens))
        return True

    def of(self, request_id: str) -> int:
        return self._kept.get(request_id, 0)

    def drop(self, request_id: str) -> None:
        self.used_tokens -= self._kept.pop(request_id, 0)

    def load_s(self, tokens: int, now_s: float) -> float:
        """How long it takes from `now_s` until so many tokens are on the GPU again."""
        self._free_s = max(self._free_s, now_s) + tokens * self._token_s
        return self._free_s - now_s

    def wait_s(self, room_tokens: int, now_s: float) -> float:
        """How long a step waits that leaves `room_tokens` of the GPU's memory unused: until what has not left fits
        there."""
        while self._leaving and self._leaving[0][0] <= now_s:
            self._leaving.popleft()
        outside = sum(tokens for _, tokens in self._leaving)
        wait_s = 0.0
        for ends_s, tokens in self._leaving:
            if outside <= room_tokens:
                break
            outside -= tokens
            wait_s = ends_s - now_s
        return wait_s


class Evictions:
    """Of one replica, with the memory of its host."""

    def __init__(self, replica: Decoding) -> None:
        self._replica = replica
        self._for: list[tuple[Task, Job]] = []
        """Those that left it for the batch that is being formed, each with the job that is due."""
        self.load(replica.settings)

    def load(self, settings: Settings) -> None:
        """Another model: nothing is kept."""
        self.host = HostPool(settings.host_tokens, settings.host_token_s)

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

    def queue_again(self) -> None:
        """A batch was formed, or none: those that made room wait again."""
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
