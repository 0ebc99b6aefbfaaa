"""One replica in virtual time: SGLang's scheduler loop around a `FairQueue`, with a cost model for a GPU.

A step is SGLang's normal loop. Requests that can be admitted go first: an extend batch is formed by asking the queue
for one candidate after another, and the running requests wait while it is computed. Otherwise all running requests
decode one token. Modelled after SGLang 0.5.23 and our overlay (`overlay/replica.py`):

    cache         radix tree of whole pages (`cache`): look-ups refresh it, running requests lock their path, a
                  prompt is inserted after each chunk and with its output at the end; its last token is always
                  computed
    admission     `budget`: reservation by new_token_ratio, chunks, `max_running`; once a candidate did not fit
                  nobody is asked again until a request has left
    pool          whole pages; decoding takes a page when the last one is full; cache is evicted when none is free
    retraction    when nothing is left to evict: those with the least output go first, the longest prompts among
                  them; their pages are freed and not cached, and they wait first in line with what they have written
    the overlay   bounded look-ups, deferral of prompts whose prefix is being computed, corrections, charges,
                  conservation after each batch

Not modelled: the overlap of CPU and GPU (a step's result is known when it ends, and the scheduler itself takes no
time), mixed batches, priorities and preemption, host caches, speculative decoding, LoRA, sliding windows, sessions.

A run of decode steps in which nothing can change is taken at once: until a request ends, memory has to be taken
back, progress is due, or somebody who came may be admitted. Times within a run are counted from its start, so where it
is cut does not matter. Nothing here reads a clock: the owner calls `advance` at `next_s`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from sglang_fair.core.admission import DELAYED_POLL_S, Admission, Match, samples
from sglang_fair.core.job import Job
from sglang_fair.core.payers import path_of
from sglang_fair.core.queue import FairQueue
from sglang_fair.sim.answers import TOKEN_BYTES, answer
from sglang_fair.sim.budget import LONGEST_RESERVATION, Budget, NewTokenRatio, Settings, Verdict
from sglang_fair.sim.cache import Node, PrefixCache, Removed, Stored
from sglang_fair.sim.cost_model import CostModel

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


class SimRequest(NamedTuple):
    """One request. Its answer has `output_tokens` tokens, which only the model knows before."""

    id: str
    client: str
    tokens: bytes
    output_tokens: int
    max_output_tokens: int
    expected_output_tokens: int | None = None
    unblocks: int = 0
    namespace: str = ""


class Progress(NamedTuple):
    """The request has so many output tokens so far. The first one comes with the first token."""

    id: str
    t_s: float
    output_tokens: int


class Finished(NamedTuple):
    """The request is over. `aborted`: not by itself. `answer` is what the model said, packed."""

    id: str
    t_s: float
    output_tokens: int
    cached_tokens: int
    prompt_tokens: int
    aborted: bool = False
    answer: bytes = b""


class Refused(NamedTuple):
    """The request was not let in."""

    id: str
    t_s: float
    reason: str


Event = Progress | Finished | Refused | Stored | Removed


@dataclass(slots=True)
class Meters:
    """What the replica did, by its own count."""

    extend_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that an admission found in the cache, those of repeated ones included."""
    output_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    retractions: int = 0

    @property
    def steps(self) -> int:
        return self.prefill_steps + self.decode_steps

    @property
    def busy_s(self) -> float:
        return self.prefill_s + self.decode_s


@dataclass(slots=True, eq=False)
class _Task:
    """A request from its arrival to its end."""

    request: SimRequest
    job: Job
    prompt_tokens: int
    output_limit: int
    """Tokens of its answer."""
    tokens: bytes
    """What has to be in the cache before it decodes: its prompt, after a retraction with its output so far."""
    length: int
    """Of `tokens`, in tokens."""
    node: Node | None = None
    """The end of what it has locked in the cache."""
    start: int = 0
    computed: int = 0
    """`tokens` from `start` to `computed` are computed in the step under way; before them all is there."""
    output: int = 0
    """Tokens that it had written when it joined the decode batch, at step number `joined`."""
    joined: int = 0
    place: int = 0
    """In the decode batch."""
    last_step: int = 0
    """The decode step after which it ends."""
    answer: bytes | None = None
    """All of it; None before it is asked for."""
    found: Node | None = None
    """The end of its cached prefix as last looked up."""
    aborted: bool = False

    def written(self, step: int) -> int:
        """Output tokens after decode step number `step`."""
        return self.output + step - self.joined

    def held(self, step: int) -> int:
        """Tokens of its context in the pool after that step: the last one written is not."""
        return self.length + step - self.joined


@dataclass(slots=True)
class _Run:
    """Decode steps of one batch, from step number `step` at `t_s`."""

    t_s: float
    step: int
    requests: int
    context_tokens: int


class Replica:
    """Owns the queue's requests. `events`: what the cache stores and removes is among the events, and replica number
    `place` of `places` names no block as another one does."""

    def __init__(
        self,
        queue: FairQueue,
        cost: CostModel,
        settings: Settings,
        *,
        events: bool = True,
        place: int = 0,
        places: int = 1,
    ) -> None:
        self.queue = queue
        self.cost = cost
        self.settings = settings
        self.meters = Meters()
        self.cache = PrefixCache(settings.page_tokens, events=events, place=place, places=places)
        self.free_pages = settings.pages
        self._admission = Admission(queue, self._match_waiting)
        self._tasks: dict[str, _Task] = {}
        self._told: list[Event] = []
        self._next_s = inf
        self._batch: list[_Task] = []
        """Being computed now; empty while decoding."""
        self._cut: _Task | None = None
        """The one whose prompt goes on in the next batch."""
        self._is_full = False
        """A candidate did not fit and nobody has left since."""
        self._ratio = NewTokenRatio(settings)

        # The decode batch, in SGLang's order. What grows with each step is kept as of step number `_step`.
        self._decoding: dict[str, _Task] = {}
        self._jobs: dict[str, Job] = {}
        self._step = 0
        self._joins = 0
        self._ends: list[tuple[int, int, _Task]] = []
        """Heap of (last step, place, task); out of date where the task's own numbers differ."""
        self._new_pages = [0] * settings.page_tokens
        """How many requests need a new page at the step whose number is i modulo the page size."""
        self._held_tokens = 0
        self._owed_tokens = 0
        """Output that they may still make."""
        self._clipped = 0
        """How many may make more than is reserved for one."""
        self._run: _Run | None = None
        self._stop = 0
        """The step after which the run under way ends."""

    # ---- what its owner does

    def arrive(self, request: SimRequest, now_s: float) -> list[Event]:
        """A request comes: what has happened until now, and `Refused` if the policy or the pool's size says so.

        It is considered when the step under way ends; those that come to an idle replica at the same time are
        considered together, in the next call of `advance`. ValueError when its id is already here.
        """
        self._catch_up(now_s)
        self.queue.tick(now_s)
        task = self._task(request)
        reason = self.queue.refuses(task.job) if task.output_limit else "longer than the KV cache"
        if reason is not None:
            self._told.append(Refused(request.id, now_s, reason))
            return self._take_told()
        self._admission.arrive(task.job)
        self._tasks[request.id] = task
        self._may_admit_from(now_s)
        return self._take_told()

    def abort(self, request_id: str, now_s: float) -> list[Event]:
        """A request is given up: what has happened until now. One that waits is over at once, one that runs after
        its next decode step, one inside its prompt when the chunk under way is done. None with this id: nothing."""
        self._catch_up(now_s)
        task = self._tasks.get(request_id)
        if task is None:
            return self._take_told()
        if self.queue.is_waiting(request_id):
            self._admission.leave(task.job)
            task.aborted = True
            self._told.append(self._finished(task, task.output, now_s))
        elif request_id in self._decoding:
            under_way = self._run is not None and not self._batch
            self._give_up(task, self._step + (2 if under_way else 1))
            if under_way and task.last_step < self._stop:
                self._plan(task.last_step)
        else:
            task.aborted = True
        return self._take_told()

    @property
    def next_s(self) -> float:
        """When it wants `advance`; inf when nothing runs and nobody waits."""
        return self._next_s

    def advance(self, now_s: float) -> list[Event]:
        """All that has happened until `now_s` and was not told yet, in order of time."""
        while self._next_s <= now_s:
            t_s = self._next_s
            self._complete(t_s)
            self._begin(t_s)
        self._decode_until(now_s)
        return self._take_told()

    def check_pool(self) -> None:
        """AssertionError unless every page of the pool is free, cached, or a running request's own. O(running)."""
        page_tokens, own = self.settings.page_tokens, 0
        running = [(task, task.held(self._step)) for task in self._decoding.values()]
        prompts = self._batch if self._cut is None or self._cut in self._batch else [*self._batch, self._cut]
        for task, held in [*running, *((task, task.computed) for task in prompts)]:
            assert task.node is not None
            own += self.settings.pages_of(held) - task.node.end // page_tokens
        assert self.free_pages >= 0
        assert self.free_pages + self.cache.tokens // page_tokens + own == self.settings.pages

    # ---- time

    def _catch_up(self, now_s: float) -> None:
        """`advance`, but what an idle replica begins at `now_s` is not begun yet: others may come at the same time."""
        while self._next_s < now_s or (self._next_s == now_s and (self._batch or self._run is not None)):
            t_s = self._next_s
            self._complete(t_s)
            self._begin(t_s)
        self._decode_until(now_s)

    def _complete(self, t_s: float) -> None:
        """What was under way has ended."""
        if self._batch:
            self._computed(t_s)
        elif self._run is not None:
            self._decode(self._stop)
            self._decoded(t_s)

    def _begin(self, t_s: float) -> None:
        """The next step: an extend batch if there is one, else decoding, else nothing."""
        self._batch = self._form(t_s)
        if self._batch:
            self._break_run(t_s)
            duration_s = self.cost.prefill_s(
                [(task.computed - task.start, task.start) for task in self._batch]
            )
            self.meters.prefill_steps += 1
            self.meters.prefill_s += duration_s
            self._next_s = t_s + duration_s
            return
        if self._decoding and not self._room_for_step():
            self._retract(t_s)
        if self._decoding:
            if self._run is None:
                context_tokens = self._held_tokens + len(self._decoding)
                self._run = _Run(t_s, self._step, len(self._decoding), context_tokens)
            self._plan(self._step + 1 if self._may_admit() else None)
        elif len(self.queue):
            self._next_s = t_s + DELAYED_POLL_S
        else:
            self._next_s = inf
            self._ratio.reset()

    def _may_admit_from(self, now_s: float) -> None:
        """Somebody new waits: who can be admitted is asked at the end of the step under way."""
        if self._batch:
            return
        if self._run is None:
            self._next_s = now_s
        elif self._may_admit():
            self._plan(self._step + 1)

    def _may_admit(self) -> bool:
        """Somebody waits and would be asked."""
        return len(self.queue) > 0 and not self._is_full and len(self._decoding) < self.settings.max_running

    # ---- decoding

    def _plan(self, stop: int | None) -> None:
        """Set the step after which the run ends: `stop`, or the last one before anything can change."""
        if stop is None:
            while (
                self._ends[0][2].last_step != self._ends[0][0] or self._ends[0][2].place != self._ends[0][1]
            ):
                heappop(self._ends)
            every = self.settings.progress_steps
            stop = min(self._ends[0][0], (self._step // every + 1) * every)
            room = self.free_pages + self.cache.evictable_tokens // self.settings.page_tokens
            if room < len(self._decoding) * (1 + (stop - self._step) // self.settings.page_tokens):
                for step in range(self._step, stop):
                    room -= self._new_pages[step % self.settings.page_tokens]
                    if room < 0:
                        stop = step
                        break
        self._stop = stop
        self._next_s = self._ends_at(stop)

    def _ends_at(self, step: int) -> float:
        """When decode step number `step` of the run under way ends."""
        run = self._run
        assert run is not None
        return run.t_s + self.cost.decode_run_s(run.requests, run.context_tokens, step - run.step)

    def _break_run(self, t_s: float) -> None:
        """The decode batch changes or pauses."""
        if self._run is not None:
            self.meters.decode_s += t_s - self._run.t_s
            self._run = None

    def _decode_until(self, now_s: float) -> None:
        """Take the whole steps of the run under way that have ended by `now_s`, before its last."""
        if (
            self._run is None
            or self._batch
            or self._step + 1 >= self._stop
            or self._ends_at(self._step + 1) > now_s
        ):
            return
        done, later = self._step + 1, self._stop
        while later - done > 1:
            middle = (done + later) // 2
            if self._ends_at(middle) <= now_s:
                done = middle
            else:
                later = middle
        self._decode(done)

    def _decode(self, to: int) -> None:
        """All steps of the run up to number `to` are over."""
        steps, count = to - self._step, len(self._decoding)
        if not steps:
            return
        page_tokens, new_pages = self.settings.page_tokens, self._new_pages
        for step in range(self._step, to):
            if self.free_pages < count and self.cache.evictable_tokens:
                self._make_free(count * page_tokens)  # SGLang frees a page for each request
            if self.cache.changed:
                self._told += self.cache.drain(self._ends_at(step + 1))
            self.free_pages -= new_pages[step % page_tokens]
        assert self.free_pages >= 0
        self._step = to
        self._held_tokens += count * steps
        self._owed_tokens -= count * steps
        self._ratio.decoded(steps)
        self.queue.account.emit_each(self._jobs.values(), steps)
        self.meters.decode_steps += steps
        self._count_output(count * steps)

    def _decoded(self, t_s: float) -> None:
        """The run has ended: so have some requests, perhaps."""
        ended: list[_Task] = []
        while self._ends and self._ends[0][0] <= self._step:
            last_step, place, task = heappop(self._ends)
            if (task.last_step, task.place) == (last_step, place):
                ended.append(task)
        told: list[Event] = []
        for task in ended:
            written = task.written(self._step)
            self._leave_decoding(task)
            self._release(task, task.held(self._step), written, keep=True)
            self._admission.finish(task.job)
            told.append(self._finished(task, written, t_s))
        if ended:
            self._is_full = False
            self._break_run(t_s)
        if self._step % self.settings.progress_steps == 0:
            self._told += [
                Progress(task.request.id, t_s, task.written(self._step)) for task in self._decoding.values()
            ]
        self._told += self.cache.drain(t_s)
        self._told += told
        self.queue.account.ledger.check()

    def _join_decoding(self, task: _Task) -> None:
        self._joins += 1
        task.place, task.joined = self._joins, self._step
        task.last_step = self._step + 1 if task.aborted else self._step + task.output_limit - task.output
        heappush(self._ends, (task.last_step, task.place, task))
        self._decoding[task.request.id] = task
        self._jobs[task.request.id] = task.job
        self._new_pages[(task.joined - task.length) % self.settings.page_tokens] += 1
        self._held_tokens += task.length
        self._owed_tokens += task.job.max_output_tokens - task.output
        self._clipped += task.job.max_output_tokens > LONGEST_RESERVATION

    def _leave_decoding(self, task: _Task) -> None:
        del self._decoding[task.request.id], self._jobs[task.request.id]
        self._new_pages[(task.joined - task.length) % self.settings.page_tokens] -= 1
        self._held_tokens -= task.held(self._step)
        self._owed_tokens -= task.job.max_output_tokens - task.written(self._step)
        self._clipped -= task.job.max_output_tokens > LONGEST_RESERVATION
        task.place = 0

    def _give_up(self, task: _Task, last_step: int) -> None:
        if last_step < task.last_step:
            task.aborted, task.last_step = True, last_step
            heappush(self._ends, (last_step, task.place, task))

    def _reserved_tokens(self) -> float:
        owed = self._owed_tokens
        if self._clipped:
            owed = sum(
                min(task.job.max_output_tokens - task.written(self._step), LONGEST_RESERVATION)
                for task in self._decoding.values()
            )
        return owed * self._ratio.now

    # ---- prompts

    def _form(self, now_s: float) -> list[_Task]:
        """Ask the queue who goes next, until nobody fits. Charges and locks; takes the pages."""
        queue, settings, cut = self.queue, self.settings, self._cut
        if not self._decoding:
            self._is_full = False
        if cut is None:
            if self._is_full or not len(queue):
                return []
            if len(self._decoding) >= settings.max_running:
                self._is_full = True
                return []
        queue.tick(now_s)
        self._admission.begin_pass(self.cache.tokens)
        budget = Budget(settings, self._reserved_tokens())
        batch: list[_Task] = []
        if cut is not None:
            self._compute(cut, budget.go_on(cut.length - cut.computed, self._room()), budget)
            self._continued(cut)
            batch.append(cut)
        for job in self._admission.candidates():
            task = self._tasks[job.id]
            if budget.verdict(self._room()) is Verdict.FULL:
                break
            if len(batch) >= settings.max_running - len(self._decoding):
                self._is_full = True
            if self._is_full:
                break
            node = self._match(task)
            if not self._admission.confirm(job, node.end, _block(task.request, node.end)):
                continue
            verdict = budget.admit(
                node.end,
                task.length,
                job.max_output_tokens - task.output,
                self._room() - self.cache.unlocked_tokens(node),
                first=not batch,
            )
            if not isinstance(verdict, Verdict):
                self.cache.lock(node)
                task.node, task.computed = node, node.end
                self._compute(task, verdict, budget)
                self._admitted(task)
                batch.append(task)
                verdict = budget.verdict(self._room())
            if verdict is not Verdict.GO_ON:
                if verdict is Verdict.NO_MEMORY:
                    self._is_full = bool(batch or self._decoding)
                break
        if batch:
            self._take_pages(batch)
            extend_tokens = sum(task.computed - task.start for task in batch)
            self.meters.extend_tokens += extend_tokens
            queue.account.ledger.engine_counted(extend=extend_tokens)
            queue.account.ledger.check()
        return batch

    def _compute(self, task: _Task, tokens: int, budget: Budget) -> None:
        """The next `tokens` of a prompt are computed in this step."""
        task.start, task.computed = task.computed, task.computed + tokens
        if task.computed < task.length:
            self._cut = task
        elif self._cut is task:
            self._cut = None
        budget.take(tokens, 0 if self._cut is task else task.job.max_output_tokens)

    def _computed(self, t_s: float) -> None:
        """The extend batch is done: its requests have a first token, except one that was cut."""
        batch, self._batch = self._batch, []
        was_empty, left = not self._decoding, self._cut is not None
        told: list[Event] = []
        tokens = 0
        self._admission.computed([task.job for task in batch])
        for task in batch:
            if task is self._cut:
                continue
            self.queue.account.emit(task.job, 1)
            tokens += 1
            task.output += 1
            told.append(Progress(task.request.id, t_s, task.output))
            if task.output < task.output_limit:
                self._keep(task, task.computed)
                self._join_decoding(task)
            else:
                left = True
                self._release(task, task.computed, task.output, keep=True)
                self._admission.finish(task.job)
                told.append(self._finished(task, task.output, t_s))
        if self._cut is not None:
            if self._cut.aborted:
                told.append(self._drop_cut(self._cut, t_s))
            else:
                self._keep(self._cut, self._cut.computed)
        if was_empty or left:
            self._is_full = False
        self._count_output(tokens)
        self.queue.account.ledger.check()
        self._told += self.cache.drain(t_s)
        self._told += told

    def _drop_cut(self, task: _Task, t_s: float) -> Finished:
        """A request ends inside its prompt; what the last chunk computed is not cached."""
        self._cut = None
        self._release(task, task.computed, task.output, keep=False)
        self._admission.finish(task.job)
        return self._finished(task, task.output, t_s)

    # ---- memory

    def _room(self) -> int:
        """Tokens that are free or could be."""
        return self.free_pages * self.settings.page_tokens + self.cache.evictable_tokens

    def _evict(self, tokens: int) -> None:
        self.free_pages += self.cache.evict(tokens) // self.settings.page_tokens

    def _make_free(self, tokens: int) -> None:
        """Evict until so much is free, or nothing is left to evict."""
        shortfall = tokens - self.free_pages * self.settings.page_tokens
        if shortfall > 0:
            self._evict(shortfall)

    def _take_pages(self, batch: Sequence[_Task]) -> None:
        """SGLang frees a page for each request beyond the tokens, whether it needs it or not."""
        settings = self.settings
        tokens = sum(task.computed - task.start for task in batch)
        self._make_free(tokens + len(batch) * settings.page_tokens)
        self.free_pages -= sum(
            settings.pages_of(task.computed) - settings.pages_of(task.start) for task in batch
        )
        assert self.free_pages >= 0, "a prefill batch was admitted that does not fit the pool"

    def _room_for_step(self, needed_pages: int | None = None) -> bool:
        """Make the pages free that the next decode step, or one that needs so many, takes; False if there are not
        enough."""
        if needed_pages is None:
            needed_pages = self._new_pages[self._step % self.settings.page_tokens]
        self._make_free(needed_pages * self.settings.page_tokens)
        return needed_pages <= self.free_pages

    def _keep(self, task: _Task, held: int) -> None:
        """Cache the whole pages of what is computed of `task.tokens`, and lock them. Copies of what another request
        has cached meanwhile are freed."""
        assert task.node is not None
        page_tokens = self.settings.page_tokens
        end = held // page_tokens * page_tokens
        node, there = self.cache.insert(task.tokens, end, task.node)
        self._divide_at_prompt(task, node)
        self.free_pages += (there - task.node.end) // page_tokens
        self.cache.lock(node, above=task.node)
        task.node = node

    def _release(self, task: _Task, held: int, written: int, *, keep: bool) -> None:
        """Give up the pages of a request that holds `held` tokens; `keep`: the cache takes what it can."""
        assert task.node is not None
        page_tokens = self.settings.page_tokens
        end = task.node.end
        if keep:
            end = held // page_tokens * page_tokens
            known = self._known(task, written) if end > task.node.end else b""
            node, there = self.cache.insert(known, end, task.node)
            self._divide_at_prompt(task, node)
            self.free_pages += (there - task.node.end) // page_tokens
        self.free_pages += self.settings.pages_of(held) - end // page_tokens
        self.cache.unlock(task.node)
        task.node = None

    def _divide_at_prompt(self, task: _Task, node: Node) -> None:
        """Let a node end with the prompt, so that the output can be evicted without it."""
        end = task.prompt_tokens // self.settings.page_tokens * self.settings.page_tokens
        if 0 < end < node.end:
            self.cache.divide(node, end)

    def _known(self, task: _Task, written: int) -> bytes:
        """Its prompt and what it has written."""
        return task.request.tokens + self._said(task, written)

    def _said(self, task: _Task, written: int) -> bytes:
        """What it has written."""
        if not written:
            return b""
        if task.answer is None:
            task.answer = answer(task.request.tokens, task.output_limit)
        return task.answer[: written * TOKEN_BYTES]

    def _retract(self, t_s: float) -> None:
        """The next decode step does not fit: take requests back until it does. One at least goes; one at least
        stays, if it fits at all."""
        kept = sorted(
            self._decoding.values(),
            key=lambda task: (task.written(self._step), -task.prompt_tokens),
            reverse=True,
        )
        self._break_run(t_s)
        self.queue.tick(t_s)
        while len(kept) > 1:
            task = kept.pop()
            written = task.written(self._step)
            self._leave_decoding(task)
            self._release(task, task.held(self._step), written, keep=False)
            self._make_free(len(kept) * self.settings.retract_steps)
            task.output = written
            task.tokens, task.found = self._known(task, written), None
            task.length = task.prompt_tokens + written
            self._admission.retract(task.job)
            self.meters.retractions += 1
            if self._room_for_step():
                break
        assert self._room_for_step(), "one request alone is longer than the pool"
        self._is_full = False
        self._ratio.retracted(
            len(kept),
            sum(task.written(self._step) for task in kept),
            sum(task.job.max_output_tokens for task in kept),
        )

    # ---- what the overlay does

    def _match_waiting(self, job: Job) -> Match:
        """Admission's look-up of a waiting request."""
        task = self._tasks[job.id]
        node = self._match(task)
        return node.end, _block(task.request, node.end)

    def _match(self, task: _Task) -> Node:
        """The end of its cached prefix. Its last token is always computed."""
        node = task.found = self.cache.match(task.tokens, task.length - 1, task.request.namespace, task.found)
        return node

    def _admitted(self, task: _Task) -> None:
        path: Sequence[Hashable] = ()
        if (payers := self.queue.account.payers) is not None:
            view = memoryview(task.request.tokens).cast("I")
            path = path_of((task.request.namespace, None), view, payers.block_tokens)
        self._admission.admit(
            task.job, extend_tokens=task.computed - task.start, cached_tokens=task.start, path=path
        )
        self.meters.cached_tokens += task.start

    def _continued(self, task: _Task) -> None:
        """One more chunk of a prompt."""
        self._admission.extend(task.job, task.computed - task.start, _block(task.request, task.start))

    def _count_output(self, tokens: int) -> None:
        self.meters.output_tokens += tokens
        self.queue.account.ledger.engine_counted(output=tokens)

    # ---- requests

    def _task(self, request: SimRequest) -> _Task:
        """Its limits are those that the pool allows: a request always fits when it is alone."""
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
        )
        limit = max(1, min(request.output_tokens, most)) if fits else 0
        return _Task(request, job, prompt_tokens, limit, request.tokens, prompt_tokens)

    def _finished(self, task: _Task, written: int, t_s: float) -> Finished:
        del self._tasks[task.request.id]
        return Finished(
            task.request.id,
            t_s,
            written,
            task.job.cached_tokens,
            task.prompt_tokens,
            task.aborted,
            self._said(task, written),
        )

    def _take_told(self) -> list[Event]:
        told, self._told = self._told, []
        return told


def _block(request: SimRequest, prefix_tokens: int) -> Hashable | None:
    """Equal for two requests that would compute the same behind their cached prefix."""
    tokens, size = request.tokens, TOKEN_BYTES
    parts = samples(prefix_tokens, len(tokens) // size)
    if parts is None:
        return None
    ahead, head, middle = parts
    return (
        prefix_tokens,
        request.namespace,
        tokens[ahead.start * size : ahead.stop * size],
        tokens[head.start * size : head.stop * size],
        tokens[middle.start * size : middle.stop * size],
    )
