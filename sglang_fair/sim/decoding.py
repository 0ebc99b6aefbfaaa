"""The decode half of a simulated replica: its memory, the run of decode steps under way, and retraction."""

from dataclasses import dataclass
from math import inf

from sglang_fair.core.admission import Admission, Match
from sglang_fair.core.eviction import FairEviction, LeastRecentlyUsed
from sglang_fair.core.job import Job
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.steps import Steps
from sglang_fair.sim.answers import TOKEN_BYTES
from sglang_fair.sim.budget import RETRACT_STEPS, NewTokenRatio, Settings
from sglang_fair.sim.cache import Node, PrefixCache
from sglang_fair.sim.cost_model import CostModel
from sglang_fair.sim.decode_batch import DecodeBatch
from sglang_fair.sim.events import OF_JOB, Event, Finished, Meters, Progress, SimRequest
from sglang_fair.sim.pool import Pool, Task

WARM_UP_STEPS, WARM_UP_TOKENS = 8, 8
"""SGLang's server answers a short request of its own before the first client's: its decode steps, and its prompt."""


@dataclass(slots=True)
class Run:
    """Decode steps of an unchanged batch, the first one after step number `step`, which ended at `t_s`."""

    t_s: float
    step: int
    requests: int
    context_tokens: int


class Decoding:
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
        self.pool = Pool(settings, self.cache)
        self.admission = Admission(queue, self._match_waiting, steps)
        warm_up_s = WARM_UP_STEPS * cost.decode_s(1, WARM_UP_TOKENS)
        self.admission.step(warm_up_s, decoded=WARM_UP_STEPS, requests=1)
        self._tasks: dict[str, Task] = {}
        self._events: list[Event] = []
        self._next_s = inf
        self._is_full = False
        """A candidate did not fit and no request has left since."""
        self.ratio = NewTokenRatio(settings)
        self.decoding = DecodeBatch(settings.page_tokens)
        self._batch: list[Task] = []
        """The prompts that are being computed, while the run, if any, pauses; empty while decoding."""
        self._mixed = False
        """Those that run get a token in the same step."""
        self._batch_s = 0.0
        """How long that takes."""
        self._chunked: Task | None = None
        """The request whose prompt continues in the next batch."""
        self._run: Run | None = None
        self._stop = 0
        """The step after which the run under way ends."""

    # ---- decoding

    def _plan(self, stop: int | None) -> None:
        """Set the step after which the run ends: `stop`, or if None the first one after which something may change."""
        if stop is None:
            every, decoding = self.settings.progress_steps, self.decoding
            stop = min(decoding.first_end(), (decoding.step // every + 1) * every)
            pages = self.pool.free_pages + self.cache.evictable_tokens // self.settings.page_tokens
            stop = decoding.last_step_within(pages, stop)
        self._stop = stop
        self._next_s = self._ends_at(stop)

    def _ends_at(self, step: int) -> float:
        """When decode step number `step` of the current run ends."""
        run = self._run
        assert run is not None
        return run.t_s + self.cost.decode_s(run.requests, run.context_tokens, step - run.step)

    def break_run(self, t_s: float) -> None:
        """End the current run, if any: the decode batch changes or pauses."""
        if self._run is not None:
            self.meters.decode_s += t_s - self._run.t_s
            self._run = None

    def _decode_until(self, now_s: float) -> None:
        """Carry out the steps of the current run that have ended by `now_s`, except its last one."""
        step = self.decoding.step
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
        steps = to - self.decoding.step
        if steps:
            length_s = self._ends_at(to) - self._ends_at(self.decoding.step)
            self.admission.step(length_s, decoded=steps, requests=len(self.decoding))
            self.ratio.decoded(steps)
            self._write(to)

    def _write(self, to: int) -> None:
        """All that run write the tokens up to step number `to`."""
        decoding, pool = self.decoding, self.pool
        steps, count = to - decoding.step, len(decoding)
        page_tokens, new_pages = self.settings.page_tokens, decoding.new_pages
        for step in range(decoding.step, to):
            if pool.free_pages < count and self.cache.evictable_tokens:
                pool.make_free(count * page_tokens)  # SGLang frees a page for each request
            if self.cache.changed and self._run is not None:
                self.drain(self._ends_at(step + 1))
            pool.free_pages -= new_pages[step % page_tokens]
        assert pool.free_pages >= 0
        decoding.advance(steps)
        self.queue.account.emit_each(decoding.jobs.values(), steps)
        self.meters.decode_steps += steps
        self._count_output(count * steps)

    def _decoded(self, t_s: float) -> None:
        """The run is over: end the requests that have written all of their answer."""
        decoding = self.decoding
        ended, events = decoding.ended(), list[Event]()
        for task in ended:
            written = task.written(decoding.step)
            decoding.leave(task)
            self.pool.release(task, task.held(decoding.step), written, keep=True)
            self.admission.finish(task.job, "aborted" if task.aborted else "finished")
            events.append(self._finished(task, written, t_s))
        if ended:
            self._is_full = False
            self.break_run(t_s)
        if decoding.step % self.settings.progress_steps == 0:
            self._events += [
                Progress(task.request.id, t_s, task.written(decoding.step))
                for task in decoding.tasks.values()
            ]
        self.drain(t_s)
        self._events += events
        self.queue.account.ledger.check()

    def room(self, node: Node) -> int:
        """Free tokens. Locking the prefix takes what of it was evictable out of the room."""
        return self.pool.room_tokens() - self.cache.unlocked_tokens(node)

    def drain(self, t_s: float) -> None:
        """What the cache has stored and removed until `t_s` is reported."""
        self._events += self.cache.drain(t_s)

    # ---- retraction

    def _retract(self, t_s: float) -> None:
        """The next decode step does not fit: take requests back until it does. At least one goes and one stays."""
        decoding, pool = self.decoding, self.pool
        step = decoding.step
        kept = sorted(
            decoding.tasks.values(),
            key=lambda task: (-task.written(step), task.prompt_tokens, task.place),
        )
        self.break_run(t_s)
        self.admission.tick(t_s)
        while len(kept) > 1:
            task = kept.pop()
            written = task.written(step)
            decoding.leave(task)
            pool.release(task, task.held(step), written, keep=False)
            pool.make_free(len(kept) * RETRACT_STEPS)
            task.take_back(written)
            self.admission.retract(task.job)
            self.meters.retractions += 1
            if pool.make_free_pages(decoding.pages_for_step()):
                break
        decoding.reorder(kept)
        assert pool.make_free_pages(decoding.pages_for_step()), "one request alone is longer than the pool"
        self._is_full = False
        self.ratio.retracted(
            len(kept),
            sum(task.written(step) for task in kept),
            sum(task.job.max_output_tokens for task in kept),
        )

    # ---- what admission and the account need to know

    def _match_waiting(self, job: Job) -> Match:
        task = self._tasks[job.id]
        node = self._match(task)
        return node.end, task.block(node.end)

    def _match(self, task: Task) -> Node:
        """The end of its cached prefix, which leaves at least its last token to compute."""
        node = task.found = self.cache.match(task.tokens, task.length - 1, task.found)
        return node

    def _count_output(self, tokens: int) -> None:
        self.meters.output_tokens += tokens
        self.queue.account.ledger.engine_counted(output=tokens)

    # ---- requests

    def _task(self, request: SimRequest, now_s: float) -> Task:
        """A request that comes now. Its output limit is cut to what the pool holds, so that it always fits when it is
        alone; `output_limit` 0 means that its prompt does not fit at all."""
        prompt_tokens = len(request.tokens) // TOKEN_BYTES
        pool_tokens = self.settings.pages * self.settings.page_tokens
        most = max(
            0, min(request.max_output_tokens, pool_tokens - prompt_tokens - self.settings.page_tokens - 1)
        )
        fits = prompt_tokens + max(1, most) + self.settings.page_tokens < pool_tokens
        job = Job(
            prompt_tokens=prompt_tokens,
            max_output_tokens=most,
            arrived_s=now_s,
            **{name: getattr(request, name) for name in OF_JOB},
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
