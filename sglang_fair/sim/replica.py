"""One replica in virtual time: SGLang's scheduler loop, our real `FairQueue` and `Admission`, and a model of a GPU.

A step is one round of SGLang's loop (0.5.23): an extend batch of prompts if one can be admitted, while those that run
wait; else every running request decodes one token. `steps` says when those that run have their turn, and how long an
extend batch may be.

    cache         radix tree of whole pages (`cache`). A prompt is inserted after each chunk, with its output at the end
    budget        reservation, chunks, `max_running` (`budget`). Once a candidate did not fit, none is tried until a
                  request has left
    pool          whole pages (`pool`); the cache is evicted if no page is free
    retraction    if nothing is left to evict, those with the least output go first. They wait first in line
    eviction      a candidate that does not fit may have running requests taken back (`core.preemption`, `evictions`)
    swap          another model: no request is here, the cache is dropped, no step begins until it is there

Not modelled: the overlap of CPU and GPU, mixed batches, host caches of prefixes, speculative decoding, LoRA, sessions.

Decode steps in which nothing can change are one *run*, until a request ends, memory is taken back, progress is due, or
a request that came may be admitted. Times within it are computed from its start. The owner calls `advance` at `next_s`.
"""

from collections.abc import Iterator
from math import inf

from sglang_fair.core.admission import DELAYED_POLL_S
from sglang_fair.core.record import Record
from sglang_fair.sim.budget import NewTokenRatio, Settings
from sglang_fair.sim.cache import Removed, Stored
from sglang_fair.sim.cost_model import CostModel
from sglang_fair.sim.decode_batch import DecodeBatch
from sglang_fair.sim.decoding import Run
from sglang_fair.sim.events import Event, Finished, Meters, Progress, Refused, SimRequest
from sglang_fair.sim.pool import Pool, Task
from sglang_fair.sim.prompts import Prompts

__all__ = [
    "Event",
    "Finished",
    "Meters",
    "Progress",
    "Refused",
    "Removed",
    "Replica",
    "Settings",
    "SimRequest",
    "Stored",
]

URGENT_STEPS = 8
"""While a request waits for which others may be taken back, that is looked at after so many decode steps."""


class Replica(Prompts):
    """One replica, which its owner drives: `arrive`, `abort`, and `advance` at `next_s`."""

    _ready_s = 0.0
    """No step begins before: a model is being loaded."""

    # ---- what its owner does

    def arrive(self, request: SimRequest, now_s: float) -> list[Event]:
        """A request comes. Returns the events until now, with `Refused` if the policy or the pool's size forbids it.

        It is considered when the current step ends. Requests that come to an idle replica at the same time are
        considered together, in the next call of `advance`. ValueError if its id is already here.
        """
        self._catch_up(now_s)
        self.admission.tick(now_s)
        task = self._task(request, now_s)
        reason = self.admission.refuses(task.job) if task.output_limit else "longer than the KV cache"
        if reason is not None:
            self._events.append(Refused(request.id, now_s, reason))
            return self._take_events()
        self.admission.arrive(task.job)
        self._tasks[request.id] = task
        self._may_admit_from(now_s)
        return self._take_events()

    def abort(self, request_id: str, now_s: float) -> list[Event]:
        """A request is given up. Returns the events until now; an unknown id is ignored.

        If it waits it ends at once, if it decodes after its next step, if its prompt is being computed after the
        current chunk.
        """
        self._catch_up(now_s)
        task = self._tasks.get(request_id)
        if task is None:
            return self._take_events()
        if self.queue.is_waiting(request_id):
            self.admission.leave(task.job)
            self.evictions.host.drop(request_id)
            task.aborted = True
            self._events.append(self._finished(task, task.output, now_s))
        elif request_id in self.decoding.tasks:
            under_way = self._run is not None and not self._batch
            self.decoding.give_up(task, self.decoding.step + (2 if under_way else 1))
            if under_way and task.last_step < self._stop:
                self._plan(task.last_step)
        else:
            task.aborted = True
        return self._take_events()

    def swap(self, cost: CostModel, settings: Settings, takes_s: float, now_s: float) -> list[Event]:
        """Load another model, which takes so long; requests that come meanwhile wait. Returns the events until now,
        with the removal of all that was cached. ValueError if a request is here, or pages would have another size."""
        self._catch_up(now_s)
        if self._tasks:
            raise ValueError(f"{len(self._tasks)} requests are here: a model is swapped when there are none")
        if settings.page_tokens != self.settings.page_tokens:
            raise ValueError("a replica's pages keep their size")
        self.cache.evict(self.cache.evictable_tokens)
        self.drain(now_s)
        self.cost, self.settings = cost, settings
        self.pool, self.ratio = Pool(settings, self.cache), NewTokenRatio(settings)
        self.evictions.load(settings)
        self.decoding = DecodeBatch(settings.page_tokens)
        self._ready_s = now_s + takes_s
        self.meters.swaps += 1
        self.meters.swap_s += takes_s
        return self._take_events()

    @property
    def record(self) -> Record:
        return self.admission.record

    def load(self) -> tuple[int, int, int]:
        """What SGLang reports of its load: tokens of the pool that requests use, uncached tokens that wait, and the
        pool's size. O(waiting)."""
        page_tokens = self.settings.page_tokens
        free = self.pool.free_pages + self.cache.evictable_tokens // page_tokens
        waiting = sum(max(0, job.prompt_tokens - job.prefix_tokens) for job in self.queue.jobs())
        if self._chunked is not None:
            waiting += self._chunked.length - self._chunked.computed
        return (self.settings.pages - free) * page_tokens, waiting, self.settings.pages * page_tokens

    @property
    def next_s(self) -> float:
        """When `advance` is to be called; inf while nothing runs or waits."""
        return self._next_s

    def advance(self, now_s: float) -> list[Event]:
        """The events until `now_s` that were not returned yet, in order of time."""
        while self._next_s <= now_s:
            t_s = self._next_s
            self._complete(t_s)
            self._begin(t_s)
        self._decode_until(now_s)
        return self._take_events()

    def check_pool(self) -> None:
        """AssertionError unless every page of the pool is free, cached, or a running request's own, and the rest of a
        prompt that was cut has room. O(running)."""
        self.pool.check(self._held())
        cut = self._chunked
        assert cut is None or cut.length - cut.computed <= self.pool.room_tokens()

    def _held(self) -> Iterator[tuple[Task, int]]:
        for task in self.decoding.tasks.values():
            yield task, task.held(self.decoding.step)
        for task in (
            self._batch
            if self._chunked is None or self._chunked in self._batch
            else [*self._batch, self._chunked]
        ):
            yield task, task.computed

    # ---- time

    def _catch_up(self, now_s: float) -> None:
        """`advance`, except that an idle replica does not begin a step at `now_s`: more may come at the same time."""
        while self._next_s < now_s or (self._next_s == now_s and (self._batch or self._run is not None)):
            t_s = self._next_s
            self._complete(t_s)
            self._begin(t_s)
        self._decode_until(now_s)

    def _complete(self, t_s: float) -> None:
        self.admission.record.tick(t_s)
        if self._batch:
            self._computed(t_s)
        elif self._run is not None:
            self._decode(self._stop)
            self._decoded(t_s)

    def _begin(self, t_s: float) -> None:
        """Start the next step: an extend batch if one can be formed, else a run of decode steps, else nothing."""
        self._batch = self._form(t_s)
        self.evictions.queue_again()
        if self._batch:
            self.break_run(t_s)
            rows = len(self.decoding) if self._mixed else 0
            duration_s = self.cost.prefill_s(
                [
                    (task.computed - task.start - task.loaded, task.start + task.loaded)
                    for task in self._batch
                ],
                rows,
                self.decoding.held_tokens + rows if rows else 0,
            )
            self.meters.prefill_steps += 1
            self.meters.prefill_s += duration_s
            self._batch_s = duration_s + self.evictions.wait_s(self._batch, t_s, duration_s)
            self._next_s = t_s + self._batch_s
            return
        decoding = self.decoding
        if decoding and not self.pool.make_free_pages(decoding.pages_for_step()):
            self._retract(t_s)
        if decoding:
            if self._run is None:
                context_tokens = decoding.held_tokens + len(decoding)
                starts_s = t_s + self.evictions.wait_s((), t_s, 0.0)
                self._run = Run(starts_s, decoding.step, len(decoding), context_tokens)
            self._plan(decoding.step + 1 if self._may_admit() else None)
            if self._may_take_back() and self._stop > decoding.step + URGENT_STEPS:
                self._plan(decoding.step + URGENT_STEPS)
        elif len(self.queue):
            self._next_s = t_s + DELAYED_POLL_S
        else:
            self._next_s = inf
            self.ratio.reset()

    def _may_admit_from(self, now_s: float) -> None:
        """A new request waits: end the current run of decode steps after its current step, to admit it."""
        if self._batch:
            return
        if self._run is None:
            self._next_s = max(now_s, self._ready_s)
        elif self._may_admit() or self._may_take_back():
            self._plan(self.decoding.step + 1)

    def _may_admit(self) -> bool:
        """A prompt was cut, or a request waits, and a pass would consider it."""
        if self._chunked is not None:
            return True
        return len(self.queue) > 0 and not self._is_full and len(self.decoding) < self.settings.max_running
