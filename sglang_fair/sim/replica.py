"""One replica in virtual time: SGLang's scheduler loop, our real `FairQueue` and `Admission`, and a model of a GPU.

A step is one round of SGLang's loop. If requests can be admitted, it computes an extend batch of their prompts while
the running requests wait; otherwise every running request decodes one token. With `steps` that rule says when those
that run have their turn, and how long an extend batch may be. Modelled after SGLang 0.5.23:

    cache         radix tree of whole pages (`cache`). Look-ups refresh it and running requests lock their path. A
                  prompt is inserted after each chunk, and with its output at the end. Its last token is always computed
    budget        reservation by new_token_ratio, chunks, `max_running` (`budget`). Once a candidate did not fit,
                  nobody is asked until a request has left
    pool          whole pages (`pool`). Decoding takes a page when the last one is full; the cache is evicted if no
                  page is free
    retraction    if nothing is left to evict: the requests with the least output go first, among them those with the
                  longest prompts. Their pages are freed and not cached; they wait first in line and keep their output
    eviction      a candidate that does not fit may have running requests taken back, if the policy has that
                  (`core.preemption`), and so may the owner (`evict`), between two steps. They wait again with their
                  output. Their context is cached, and goes to the host's memory if there is room (`host`), from where
                  it comes back when they are admitted
    swap          `swap` loads another model: nobody is here, the cache is dropped, no step begins until it is there

Not modelled: the overlap of CPU and GPU (a step's result is known when it ends, and the scheduler itself takes no
time), mixed batches, host caches of prefixes, speculative decoding, LoRA, sliding windows, sessions.

Decode steps in which nothing can change are simulated at once, as one run. A run lasts until a request ends, memory has
to be taken back, progress is due, or a request that came may be admitted. Times within a run are computed from its
start, so it does not matter where it is interrupted. Nothing here reads a clock: the owner calls `advance` at `next_s`.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from sglang_fair.core.admission import BLOCK_TOKENS, DELAYED_POLL_S, Admission, Match, samples
from sglang_fair.core.eviction import FairEviction, LeastRecentlyUsed
from sglang_fair.core.job import Job
from sglang_fair.core.payers import path_of
from sglang_fair.core.preemption import Missing, Runner
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.record import Record
from sglang_fair.core.steps import Steps
from sglang_fair.core.waits import BATCH, MEMORY, PROMPTS
from sglang_fair.sim.answers import TOKEN_BYTES
from sglang_fair.sim.budget import LONGEST_RESERVATION, Budget, NewTokenRatio, Settings, Verdict
from sglang_fair.sim.cache import Node, PrefixCache, Removed, Stored
from sglang_fair.sim.cost_model import CostModel
from sglang_fair.sim.decode_batch import DecodeBatch
from sglang_fair.sim.events import Event, Finished, Meters, Progress, Refused, SimRequest
from sglang_fair.sim.host import HostPool
from sglang_fair.sim.pool import Pool
from sglang_fair.sim.task import Task

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
"""While somebody waits for whom others may be taken back, it is asked after so many decode steps whether they are."""

WARM_UP_STEPS, WARM_UP_TOKENS = 8, 8
"""SGLang's server answers a short request of its own before the first client's: its decode steps, and its prompt."""


@dataclass(slots=True)
class _Run:
    """Decode steps of an unchanged batch, the first one after step number `step`, which ended at `t_s`."""

    t_s: float
    step: int
    requests: int
    context_tokens: int


class Replica:
    """Serves the requests of `queue`; `cost` says how long a step takes.

    With `events` it also reports what its cache stores and removes. Replicas that are given different numbers `place`
    of `places` never give two blocks the same name.
    """

    def __init__(
        self,
        queue: FairQueue,
        cost: CostModel,
        settings: Settings,
        *,
        steps: Steps | None = None,
        events: bool = True,
        place: int = 0,
        places: int = 1,
    ) -> None:
        self.queue = queue
        self.cost = cost
        self.settings = settings
        self.meters = Meters()
        order = LeastRecentlyUsed()
        if settings.cache_share and queue.policy.weights is not None:
            order = fair = FairEviction(settings.pages * settings.page_tokens, queue.policy.weights)
            queue.reweighed.append(fair.reweigh)
        self.cache = PrefixCache(settings.page_tokens, order, events=events, place=place, places=places)
        self._pool = Pool(settings, self.cache)
        self._admission = Admission(queue, self._match_waiting, steps)
        warm_up_s = WARM_UP_STEPS * cost.decode_s(1, WARM_UP_TOKENS)
        self._admission.step(warm_up_s, decoded=WARM_UP_STEPS, requests=1)
        self._tasks: dict[str, Task] = {}
        self._events: list[Event] = []
        self._next_s = inf
        self._batch: list[Task] = []
        """The prompts that are being computed; empty while decoding."""
        self._batch_s = 0.0
        """How long that takes."""
        self._chunked: Task | None = None
        """The request whose prompt continues in the next batch."""
        self._is_full = False
        """A candidate did not fit and nobody has left since."""
        self._ratio = NewTokenRatio(settings)
        self.host = HostPool(settings.host_tokens, settings.host_token_s)
        self._evicting: dict[str, None] = {}
        """Requests that leave the decode batch before the next step."""
        self._taken_back: list[tuple[Task, Job]] = []
        """Those that left it for the batch that is being formed, each with the one for whom."""
        self._ready_s = 0.0
        """No step begins before: a model is being loaded."""

        self._decoding = DecodeBatch(settings.page_tokens)
        self._run: _Run | None = None
        self._stop = 0
        """The step after which the run under way ends."""

    # ---- what its owner does

    def arrive(self, request: SimRequest, now_s: float) -> list[Event]:
        """A request comes. Returns the events until now, with `Refused` if the policy or the pool's size forbids it.

        It is considered when the current step ends. Requests that come to an idle replica at the same time are
        considered together, in the next call of `advance`. ValueError if its id is already here.
        """
        self._catch_up(now_s)
        self._admission.tick(now_s)
        task = self._task(request)
        reason = self._admission.refuses(task.job) if task.output_limit else "longer than the KV cache"
        if reason is not None:
            self._events.append(Refused(request.id, now_s, reason))
            return self._take_events()
        self._admission.arrive(task.job)
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
            self._admission.leave(task.job)
            self.host.drop(request_id)
            task.aborted = True
            self._events.append(self._finished(task, task.output, now_s))
        elif request_id in self._decoding.tasks:
            under_way = self._run is not None and not self._batch
            self._decoding.give_up(task, self._decoding.step + (2 if under_way else 1))
            if under_way and task.last_step < self._stop:
                self._plan(task.last_step)
        else:
            task.aborted = True
        return self._take_events()

    def evict(self, request_ids: Sequence[str], now_s: float) -> list[Event]:
        """Take running requests back, after the decode step under way. Returns the events until now. Those that do not
        decode are ignored: who waits, whose prompt is being computed, who ends with that step."""
        self._catch_up(now_s)
        found = [name for name in request_ids if name in self._decoding.tasks]
        self._evicting.update(dict.fromkeys(found))
        if found and self._run is not None and not self._batch:
            self._plan(min(self._stop, self._decoding.step + 1))
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
        self._events += self.cache.drain(now_s)
        self.cost, self.settings = cost, settings
        self._pool, self._ratio = Pool(settings, self.cache), NewTokenRatio(settings)
        self.host = HostPool(settings.host_tokens, settings.host_token_s)
        self._decoding = DecodeBatch(settings.page_tokens)
        self._ready_s = now_s + takes_s
        self.meters.swaps += 1
        self.meters.swap_s += takes_s
        return self._take_events()

    @property
    def record(self) -> Record:
        """What its last requests waited for."""
        return self._admission.record

    def load(self) -> tuple[int, int, int]:
        """What SGLang reports of its load: tokens of the pool that requests use, uncached tokens that wait, and the
        pool's size. O(waiting)."""
        page_tokens = self.settings.page_tokens
        free = self._pool.free_pages + self.cache.evictable_tokens // page_tokens
        waiting = sum(max(0, job.prompt_tokens - job.prefix_tokens) for job in self.queue.jobs())
        if self._chunked is not None:
            waiting += self._chunked.length - self._chunked.computed
        return (self.settings.pages - free) * page_tokens, waiting, self.settings.pages * page_tokens

    @property
    def next_s(self) -> float:
        """When `advance` is to be called; inf while nothing runs and nobody waits."""
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
        self._pool.check(self._held())
        cut = self._chunked
        assert cut is None or cut.length - cut.computed <= self._pool.room_tokens()

    def _held(self) -> Iterator[tuple[Task, int]]:
        """Each running request with the tokens that it holds."""
        for task in self._decoding.tasks.values():
            yield task, task.held(self._decoding.step)
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
        """The batch or the run that was under way has ended."""
        self._admission.record.tick(t_s)
        if self._batch:
            self._computed(t_s)
        elif self._run is not None:
            self._decode(self._stop)
            self._decoded(t_s)

    def _begin(self, t_s: float) -> None:
        """Start the next step: an extend batch if one can be formed, else a run of decode steps, else nothing."""
        evicted = self._take_out(t_s)
        self._batch = self._form(t_s)
        for task in evicted:
            self._admission.retract(task.job)
        for task, urgent in self._taken_back:
            self._admission.evict(task.job, urgent)
        self._taken_back.clear()
        if self._batch:
            self._break_run(t_s)
            duration_s = self.cost.prefill_s(
                [(task.computed - task.start - task.loaded, task.start + task.loaded) for task in self._batch]
            )
            self.meters.prefill_steps += 1
            self.meters.prefill_s += duration_s
            self._batch_s = duration_s + self._host_wait_s(t_s, duration_s)
            self._next_s = t_s + self._batch_s
            return
        decoding = self._decoding
        if decoding and not self._pool.make_free_pages(decoding.pages_for_step()):
            self._retract(t_s)
        if decoding:
            if self._run is None:
                context_tokens = decoding.held_tokens + len(decoding)
                starts_s = t_s + self._host_wait_s(t_s, 0.0)
                self._run = _Run(starts_s, decoding.step, len(decoding), context_tokens)
            self._plan(decoding.step + 1 if self._may_admit() else None)
            if self._may_take_back() and self._stop > decoding.step + URGENT_STEPS:
                self._plan(decoding.step + URGENT_STEPS)
        elif len(self.queue):
            self._next_s = t_s + DELAYED_POLL_S
        else:
            self._next_s = inf
            self._ratio.reset()

    def _may_admit_from(self, now_s: float) -> None:
        """A new request waits: end the current run of decode steps after its current step, to admit it."""
        if self._batch:
            return
        if self._run is None:
            self._next_s = max(now_s, self._ready_s)
        elif self._may_admit() or self._may_take_back():
            self._plan(self._decoding.step + 1)

    def _may_admit(self) -> bool:
        """A prompt was cut, or a request waits, and a pass would consider it."""
        if self._chunked is not None:
            return True
        return len(self.queue) > 0 and not self._is_full and len(self._decoding) < self.settings.max_running

    def _may_take_back(self) -> bool:
        """Somebody waits for whom others may be taken back. O(waiting), if the policy has that."""
        preemption = self._admission.preemption
        return preemption is not None and any(preemption.may_take_back(job) for job in self.queue.jobs())

    # ---- decoding

    def _plan(self, stop: int | None) -> None:
        """Set the step after which the run ends: `stop`, or if None the first one after which something may change."""
        if stop is None:
            every, decoding = self.settings.progress_steps, self._decoding
            stop = min(decoding.first_end(), (decoding.step // every + 1) * every)
            pages = self._pool.free_pages + self.cache.evictable_tokens // self.settings.page_tokens
            stop = decoding.last_step_within(pages, stop)
        self._stop = stop
        self._next_s = self._ends_at(stop)

    def _ends_at(self, step: int) -> float:
        """When decode step number `step` of the current run ends."""
        run = self._run
        assert run is not None
        return run.t_s + self.cost.decode_run_s(run.requests, run.context_tokens, step - run.step)

    def _break_run(self, t_s: float) -> None:
        """End the current run, if any: the decode batch changes or pauses."""
        if self._run is not None:
            self.meters.decode_s += t_s - self._run.t_s
            self._run = None

    def _decode_until(self, now_s: float) -> None:
        """Carry out the steps of the current run that have ended by `now_s`, except its last one."""
        step = self._decoding.step
        if self._run is None or self._batch or step + 1 >= self._stop or self._ends_at(step + 1) > now_s:
            return
        done, later = step + 1, self._stop
        while later - done > 1:
            middle = (done + later) // 2
            if self._ends_at(middle) <= now_s:
                done = middle
            else:
                later = middle
        self._decode(done)

    def _decode(self, to: int) -> None:
        """Carry out the steps of the current run up to number `to`."""
        decoding, pool = self._decoding, self._pool
        steps, count = to - decoding.step, len(decoding)
        if not steps:
            return
        page_tokens, new_pages = self.settings.page_tokens, decoding.new_pages
        for step in range(decoding.step, to):
            if pool.free_pages < count and self.cache.evictable_tokens:
                pool.make_free(count * page_tokens)  # SGLang frees a page for each request
            if self.cache.changed:
                self._events += self.cache.drain(self._ends_at(step + 1))
            pool.free_pages -= new_pages[step % page_tokens]
        assert pool.free_pages >= 0
        length_s = self._ends_at(to) - self._ends_at(decoding.step)
        self._admission.step(length_s, decoded=steps, requests=count)
        decoding.advance(steps)
        self._ratio.decoded(steps)
        self.queue.account.emit_each(decoding.jobs.values(), steps)
        self.meters.decode_steps += steps
        self._count_output(count * steps)

    def _decoded(self, t_s: float) -> None:
        """The run is over: end the requests that have written all of their answer."""
        decoding = self._decoding
        ended, events = decoding.ended(), list[Event]()
        for task in ended:
            written = task.written(decoding.step)
            decoding.leave(task)
            self._pool.release(task, task.held(decoding.step), written, keep=True)
            self._admission.finish(task.job, "aborted" if task.aborted else "finished")
            events.append(self._finished(task, written, t_s))
        if ended:
            self._is_full = False
            self._break_run(t_s)
        if decoding.step % self.settings.progress_steps == 0:
            self._events += [
                Progress(task.request.id, t_s, task.written(decoding.step))
                for task in decoding.tasks.values()
            ]
        self._events += self.cache.drain(t_s)
        self._events += events
        self.queue.account.ledger.check()

    # ---- prompts

    def _form(self, now_s: float) -> list[Task]:
        """The extend batch of the next step, empty if nobody can be admitted.

        SGLang's admission loop: the prompt that was cut last goes on first, then candidates are taken until one does
        not fit. All in the batch are charged, have locked their prefix and hold their pages.
        """
        if self._chunked is not None and self._chunked.aborted:
            self._events.append(self._drop_chunked(self._chunked, now_s))
        queue, pool, settings, chunked = self.queue, self._pool, self.settings, self._chunked
        if not self._decoding or (self._is_full and self._may_take_back()):
            self._is_full = False
        if chunked is None:
            if self._is_full or not len(queue):
                return []
            if len(self._decoding) >= settings.max_running:
                self._is_full = True
                self._admission.end_pass(BATCH)
                return []
        self._admission.tick(now_s)
        self._admission.begin_pass(self.cache.tokens, self._can_decode)
        reserved_tokens = self._decoding.reservable_tokens() * self._ratio.now
        budget = Budget(settings, reserved_tokens, self._admission.chunk_tokens())
        batch: list[Task] = []
        stopped: str | None = None
        if chunked is not None and self._admission.goes_on(chunked.job):
            rest = chunked.length - chunked.computed
            block = _block(chunked.request, chunked.computed)
            most_tokens = self._admission.chunk_of(chunked.job, budget.chunk_tokens, block)
            self._compute(chunked, budget.next_chunk(rest, pool.room_tokens(), most_tokens), budget)
            self._continued(chunked)
            batch.append(chunked)
        elif chunked is not None:
            self._keep_for(chunked, budget)
        for job in self._admission.candidates():
            task = self._tasks[job.id]
            if budget.verdict(pool.room_tokens()) is Verdict.FULL:
                stopped = PROMPTS
                break
            if len(batch) >= settings.max_running - len(self._decoding):
                self._is_full = True
            if self._is_full:
                stopped = BATCH
                break
            node = self._match(task)
            if not self._admission.confirm(job, node.end, _block(task.request, node.end)):
                continue
            verdict = self._verdict(task, node, budget, first=not batch)
            if verdict is Verdict.NO_MEMORY and self._make_room(task, node, budget, now_s):
                node = self._match(task)
                verdict = self._verdict(task, node, budget, first=not batch)
            if not isinstance(verdict, Verdict):
                self.cache.use(job.client, node)
                self.cache.lock(node)
                task.node, task.computed = node, node.end
                self._compute(task, verdict, budget, self._loaded(task, node))
                self.host.drop(job.id)
                self._admitted(task)
                batch.append(task)
                verdict = budget.verdict(pool.room_tokens())
            if verdict is not Verdict.GO_ON:
                stopped = PROMPTS
                if verdict is Verdict.NO_MEMORY:
                    stopped = MEMORY
                    self._is_full = bool(batch or self._decoding)
                break
        self._admission.end_pass(stopped)
        if batch:
            pool.take(batch)
            extend_tokens = sum(task.computed - task.start - task.loaded for task in batch)
            self.meters.extend_tokens += extend_tokens
            self._admission.counted(extend=extend_tokens)
        return batch

    def _loaded(self, task: Task, node: Node) -> int:
        """Tokens behind its cached prefix that come from the host: whole pages."""
        page_tokens = self.settings.page_tokens
        return max(0, self.host.of(task.request.id) // page_tokens * page_tokens - node.end)

    def _room(self, node: Node) -> int:
        """Free tokens. Locking the prefix takes what of it was evictable out of the room."""
        return self._pool.room_tokens() - self.cache.unlocked_tokens(node)

    def _verdict(self, task: Task, node: Node, budget: Budget, *, first: bool) -> int | Verdict:
        """Whether a candidate fits whose cached prefix ends there."""
        return budget.admit(
            node.end,
            task.length,
            task.job.max_output_tokens - task.output,
            self._room(node),
            first=first,
            cut=self._chunked is None,
            loaded_tokens=self._loaded(task, node),
        )

    def _can_decode(self) -> bool:
        """A decode step is possible without taking anybody's memory, or what the rest of a cut prompt needs."""
        if not self._decoding:
            return False
        pages = self._pool.free_pages + self.cache.evictable_tokens // self.settings.page_tokens
        if (cut := self._chunked) is not None:
            pages -= self.settings.pages_of(cut.length - cut.computed)
        return pages >= self._decoding.pages_for_step()

    def _compute(self, task: Task, tokens: int, budget: Budget, loaded: int = 0) -> None:
        """The next `tokens` of a prompt are computed in this step, but the first `loaded`, which the host has."""
        task.start, task.computed, task.loaded = task.computed, task.computed + tokens, loaded
        if task.computed < task.length:
            self._chunked = task
        elif self._chunked is task:
            self._chunked = None
        budget.take(tokens, 0 if self._chunked is task else task.job.max_output_tokens, loaded)
        if self._chunked is task:
            self._keep_for(task, budget)

    def _keep_for(self, cut: Task, budget: Budget) -> None:
        """Nobody else is admitted to what the rest of a cut prompt and its output will take."""
        budget.keep(cut.length - cut.computed, cut.job.max_output_tokens - cut.output)

    def _computed(self, t_s: float) -> None:
        """The extend batch is done: its requests have a first token, except one whose prompt was cut."""
        batch, self._batch = self._batch, []
        was_empty, left = not self._decoding, self._chunked is not None
        events: list[Event] = []
        tokens = 0
        self._admission.computed([task.job for task in batch])
        extended: dict[str, int] = {}
        for task in batch:
            tokens_computed = task.computed - task.start - task.loaded
            extended[task.request.client] = extended.get(task.request.client, 0) + tokens_computed
        self._admission.step(self._batch_s, extended)
        for task in batch:
            if task is self._chunked:
                continue
            self.queue.account.emit(task.job, 1)
            tokens += 1
            task.output += 1
            events.append(Progress(task.request.id, t_s, task.output))
            if task.output < task.output_limit:
                self._pool.keep(task, task.computed)
                self._decoding.join(task)
            else:
                left = True
                self._pool.release(task, task.computed, task.output, keep=True)
                self._admission.finish(task.job)
                events.append(self._finished(task, task.output, t_s))
        if self._chunked is not None:
            if self._chunked.aborted:
                events.append(self._drop_chunked(self._chunked, t_s))
            else:
                self._pool.keep(self._chunked, self._chunked.computed)
        if was_empty or left:
            self._is_full = False
        self._count_output(tokens)
        self.queue.account.ledger.check()
        self._events += self.cache.drain(t_s)
        self._events += events

    def _drop_chunked(self, task: Task, t_s: float) -> Finished:
        """An aborted request ends inside its prompt. What the last chunk computed is not cached."""
        self._chunked = None
        self._pool.release(task, task.computed, task.output, keep=False)
        self._admission.finish(task.job, "aborted")
        return self._finished(task, task.output, t_s)

    # ---- retraction

    def _retract(self, t_s: float) -> None:
        """The next decode step does not fit: take requests back until it does. At least one goes and one stays."""
        decoding, pool = self._decoding, self._pool
        step = decoding.step
        kept = sorted(
            decoding.tasks.values(), key=lambda task: (task.written(step), -task.prompt_tokens), reverse=True
        )
        self._break_run(t_s)
        self._admission.tick(t_s)
        while len(kept) > 1:
            task = kept.pop()
            written = task.written(step)
            decoding.leave(task)
            pool.release(task, task.held(step), written, keep=False)
            pool.make_free(len(kept) * self.settings.retract_steps)
            task.output = written
            task.tokens, task.found = task.known(written), None
            task.length = task.prompt_tokens + written
            self._admission.retract(task.job)
            self.meters.retractions += 1
            if pool.make_free_pages(decoding.pages_for_step()):
                break
        assert pool.make_free_pages(decoding.pages_for_step()), "one request alone is longer than the pool"
        self._is_full = False
        self._ratio.retracted(
            len(kept),
            sum(task.written(step) for task in kept),
            sum(task.job.max_output_tokens for task in kept),
        )

    # ---- eviction

    def _take_out(self, t_s: float) -> list[Task]:
        """Those that the owner named leave the decode batch; who has ended meanwhile does not. They wait again, first
        in line, once the next batch is formed, which is not theirs."""
        names, self._evicting = self._evicting, {}
        found = [self._decoding.tasks[name] for name in names if name in self._decoding.tasks]
        evicted = [task for task in found if not task.aborted]
        for task in evicted:
            self._evict(task, t_s)
        if evicted:
            self._is_full = False
        return evicted

    def _make_room(self, urgent: Task, node: Node, budget: Budget, t_s: float) -> bool:
        """Take back whom the policy says for a candidate that has no memory. Whether somebody was."""
        preemption = self._admission.preemption
        if preemption is None or not preemption.may_take_back(urgent.job):
            return False
        decoding, step = self._decoding, self._decoding.step
        output_tokens = urgent.job.max_output_tokens - urgent.output
        missing = Missing(budget.missing(node.end, urgent.length, output_tokens, self._room(node)))
        reserved = {
            name: self._ratio.now * min(task.job.max_output_tokens - task.written(step), LONGEST_RESERVATION)
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
            self._evict(task, t_s)
            self._taken_back.append((task, urgent.job))
        return bool(chosen)

    def _evict(self, task: Task, t_s: float) -> None:
        """A request leaves the decode batch and its memory; its context is cached, and on the host if there is room."""
        decoding = self._decoding
        self._break_run(t_s)
        written, held = task.written(decoding.step), task.held(decoding.step)
        decoding.leave(task)
        self.host.keep(task.request.id, held, t_s)
        self._pool.release(task, held, written, keep=True)
        task.output = written
        task.tokens, task.found = task.known(written), None
        task.length = task.prompt_tokens + written
        self.meters.evictions += 1
        self._events += self.cache.drain(t_s)

    def _host_wait_s(self, t_s: float, duration_s: float) -> float:
        """How much longer a step takes because of copies: from the host for those in it, which come while it computes;
        and before it begins, to the host, of what lies where it writes."""
        wait_s = self.host.wait_s(self._pool.room_tokens(), t_s)
        if loaded := sum(task.loaded for task in self._batch):
            self.meters.loaded_tokens += loaded
            wait_s += max(0.0, self.host.load_s(loaded, t_s + wait_s) - duration_s)
        self.meters.host_wait_s += wait_s
        return wait_s

    # ---- what admission and the account need to know

    def _match_waiting(self, job: Job) -> Match:
        """Admission's look-up of a waiting request."""
        task = self._tasks[job.id]
        node = self._match(task)
        return node.end, _block(task.request, node.end)

    def _match(self, task: Task) -> Node:
        """The end of its cached prefix, which leaves at least its last token to compute."""
        node = task.found = self.cache.match(task.tokens, task.length - 1, task.request.namespace, task.found)
        return node

    def _admitted(self, task: Task) -> None:
        path: Sequence[Hashable] = ()
        if (payers := self.queue.account.payers) is not None:
            view = memoryview(task.request.tokens).cast("I")
            path = path_of((task.request.namespace, None), view, payers.block_tokens)
        there = task.start + task.loaded
        self._admission.admit(task.job, extend_tokens=task.computed - there, cached_tokens=there, path=path)
        self.meters.cached_tokens += task.start

    def _continued(self, task: Task) -> None:
        """One more chunk of a prompt is in the batch."""
        self._admission.extend(task.job, task.computed - task.start, _block(task.request, task.start))

    def _count_output(self, tokens: int) -> None:
        self.meters.output_tokens += tokens
        self.queue.account.ledger.engine_counted(output=tokens)

    # ---- requests

    def _task(self, request: SimRequest) -> Task:
        """A new request. Its output limit is cut to what the pool holds, so that it always fits when it is alone;
        `output_limit` 0 means that its prompt does not fit at all."""
        prompt_tokens = len(request.tokens) // TOKEN_BYTES
        pool_tokens = self.settings.pages * self.settings.page_tokens
        most = max(
            0, min(request.max_output_tokens, pool_tokens - prompt_tokens - self.settings.page_tokens - 1)
        )
        fits = prompt_tokens + max(1, most) + self.settings.page_tokens < pool_tokens
        job = Job(
            id=request.id,
            client=request.client,
            prompt_tokens=prompt_tokens,
            max_output_tokens=most,
            expected_output_tokens=request.expected_output_tokens,
            unblocks=request.unblocks,
            weight=request.weight,
            weight_version=request.weight_version,
            app=request.app,
            interaction=request.interaction,
            stage=request.stage,
            call=request.call,
            system_tokens=request.system_tokens,
            deadline_s=request.deadline_s,
            slo_class=request.slo_class,
            tier=request.tier,
        )
        limit = max(1, min(request.output_tokens, most)) if fits else 0
        return Task(request, job, prompt_tokens, limit, request.tokens, prompt_tokens)

    def _finished(self, task: Task, written: int, t_s: float) -> Finished:
        del self._tasks[task.request.id]
        return Finished(
            task.request.id,
            t_s,
            written,
            task.job.cached_tokens,
            task.prompt_tokens,
            task.aborted,
            task.said(written),
        )

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _block(request: SimRequest, prefix_tokens: int) -> Hashable | None:
    """Equal for two requests that would compute the same behind their cached prefix."""
    tokens = request.tokens
    starts = samples(prefix_tokens, len(tokens) // TOKEN_BYTES)
    if starts is None:
        return None
    ahead, head, middle = starts[0] * TOKEN_BYTES, starts[1] * TOKEN_BYTES, starts[2] * TOKEN_BYTES
    size = BLOCK_TOKENS * TOKEN_BYTES
    return (
        prefix_tokens,
        request.namespace,
        tokens[ahead : ahead + size],
        tokens[head : head + size],
        tokens[middle : middle + size],
    )
