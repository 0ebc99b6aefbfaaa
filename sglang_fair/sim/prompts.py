"""The prefill half of a simulated replica: forming the extend batch, as SGLang's admission loop does, and its end."""

from functools import cached_property

from sglang_fair.core.waits import BATCH, MEMORY, PROMPTS
from sglang_fair.sim.budget import Budget, Verdict
from sglang_fair.sim.cache import Node
from sglang_fair.sim.decoding import Decoding
from sglang_fair.sim.events import Event, Finished, Progress
from sglang_fair.sim.evictions import Evictions
from sglang_fair.sim.pool import Task


class Prompts(Decoding):
    """`Decoding`, and prompts that are computed before or between its steps."""

    @cached_property
    def evictions(self) -> Evictions:
        return Evictions(self)

    def _form(self, now_s: float) -> list[Task]:
        """The extend batch of the next step, empty if none can be admitted.

        SGLang's admission loop: the prompt that was cut last goes on first, then candidates are taken until one does
        not fit. All in the batch are charged, have locked their prefix and hold their pages.
        """
        if self._chunked is not None and self._chunked.aborted:
            self._events.append(self._drop_chunked(self._chunked, now_s))
        queue, pool, settings, chunked = self.queue, self.pool, self.settings, self._chunked
        if not self.decoding or (self._is_full and self._may_take_back()):
            self._is_full = False
        if chunked is None:
            if self._is_full or not len(queue):
                return []
            if len(self.decoding) >= settings.max_running:
                self._is_full = True
                self.admission.end_pass(BATCH)
                return []
        self.admission.tick(now_s)
        self.admission.begin_pass(self.cache.tokens, self._can_decode)
        rows, pages = self._beside()
        budget = Budget(
            settings,
            self.decoding.reservable_tokens() * self.ratio.now,
            self.admission.chunk_tokens(None if chunked is None else chunked.job),
            rows,
            pages * settings.page_tokens,
        )
        batch: list[Task] = []
        stopped: str | None = None
        if chunked is not None and self.admission.goes_on(chunked.job):
            rest = chunked.length - chunked.computed
            block = chunked.block(chunked.computed)
            most_tokens = self.admission.chunk_of(chunked.job, budget.chunk_tokens, block)
            self._compute(chunked, budget.next_chunk(rest, pool.room_tokens(), most_tokens), budget)
            self._continued(chunked)
            batch.append(chunked)
        elif chunked is not None:
            self._keep_for(chunked, budget)
        for job in self.admission.candidates():
            task = self._tasks[job.id]
            if budget.verdict(pool.room_tokens()) is Verdict.FULL:
                stopped = PROMPTS
                break
            if len(batch) >= settings.max_running - len(self.decoding):
                self._is_full = True
            if self._is_full:
                stopped = BATCH
                break
            node = self._match(task)
            if not self.admission.confirm(job, node.end, task.block(node.end)):
                continue
            verdict = self._verdict(task, node, budget, first=not batch)
            if verdict is Verdict.NO_MEMORY and self.evictions.make_room(task, node, budget, now_s):
                node = self._match(task)
                verdict = self._verdict(task, node, budget, first=not batch)
            if not isinstance(verdict, Verdict):
                self.cache.use(job.client, node)
                self.cache.lock(node)
                task.node, task.computed = node, node.end
                self._compute(task, verdict, budget, self._loaded(task, node))
                self.evictions.host.drop(job.id)
                self._admitted(task)
                batch.append(task)
                verdict = budget.verdict(pool.room_tokens())
            if verdict is not Verdict.GO_ON:
                stopped = PROMPTS
                if verdict is Verdict.NO_MEMORY:
                    stopped = MEMORY
                    self._is_full = bool(batch or self.decoding)
                break
        self.admission.end_pass(stopped)
        if batch:
            pool.take(batch)
            self._mixed = rows > 0 and pool.make_free_pages(pages)
            extend_tokens = sum(task.computed - task.start - task.loaded for task in batch)
            self.meters.extend_tokens += extend_tokens
            queue.account.ledger.engine_counted(extend=extend_tokens)
            queue.account.ledger.check()
        return batch

    def _beside(self) -> tuple[int, int]:
        """How many running requests get a token in the next batch of prompts, and the new pages for that."""
        if not self.settings.mixed_chunk or (self._chunked is not None and not self._can_decode()):
            return 0, 0
        return len(self.decoding), self.decoding.pages_for_step()

    def _may_take_back(self) -> bool:
        """A request waits for which others may be taken back. O(waiting), if the policy has that."""
        preemption = self.admission.preemption
        return preemption is not None and any(preemption.may_take_back(job) for job in self.queue.jobs())

    def _loaded(self, task: Task, node: Node) -> int:
        """Tokens behind its cached prefix that come from the host: whole pages."""
        page_tokens = self.settings.page_tokens
        return max(0, self.evictions.host.of(task.request.id) // page_tokens * page_tokens - node.end)

    def _verdict(self, task: Task, node: Node, budget: Budget, *, first: bool) -> int | Verdict:
        """Whether a candidate fits whose cached prefix ends there."""
        return budget.admit(
            node.end,
            task.length,
            task.job.max_output_tokens - task.output,
            self.room(node),
            first=first,
            cut=self._chunked is None,
            loaded_tokens=self._loaded(task, node),
        )

    def _can_decode(self) -> bool:
        """A decode step is possible without taking memory from a request, or what the rest of a cut prompt needs."""
        if not self.decoding:
            return False
        pages = self.pool.free_pages + self.cache.evictable_tokens // self.settings.page_tokens
        if (cut := self._chunked) is not None:
            pages -= self.settings.pages_of(cut.length - cut.computed)
        return pages >= self.decoding.pages_for_step()

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
        """No other request is admitted to what the rest of a cut prompt and its output will take."""
        budget.keep(cut.length - cut.computed, cut.job.max_output_tokens - cut.output)

    def _computed(self, t_s: float) -> None:
        """The extend batch is done: its requests have a first token, except one whose prompt was cut."""
        batch, self._batch = self._batch, []
        if self._mixed:
            self._write(self.decoding.step + 1)
        was_empty, left = not self.decoding or self._mixed, self._chunked is not None
        joining: list[Task] = []
        events: list[Event] = []
        tokens = 0
        self.admission.computed([task.job for task in batch])
        extended: dict[str, int] = {}
        for task in batch:
            tokens_computed = task.computed - task.start - task.loaded
            extended[task.request.client] = extended.get(task.request.client, 0) + tokens_computed
        self.admission.step(self._batch_s, extended, decoded=int(self._mixed))
        for task in batch:
            if task is self._chunked:
                continue
            self.queue.account.emit(task.job, 1)
            tokens += 1
            task.output += 1
            events.append(Progress(task.request.id, t_s, task.output))
            if task.output < task.output_limit:
                self.pool.keep(task, task.computed)
                joining.append(task)
            else:
                left = True
                self.pool.release(task, task.computed, task.output, keep=True)
                self.admission.finish(task.job)
                events.append(self._finished(task, task.output, t_s))
        if self._mixed:
            self.decoding.join_before(joining)
        else:
            for task in joining:
                self.decoding.join(task)
        if self._chunked is not None:
            if self._chunked.aborted:
                events.append(self._drop_chunked(self._chunked, t_s))
            else:
                self.pool.keep(self._chunked, self._chunked.computed)
        if was_empty or left:
            self._is_full = False
        self._count_output(tokens)
        self.queue.account.ledger.check()
        self.drain(t_s)
        self._events += events
        if self._mixed:
            self._mixed = False
            self._decoded(t_s)

    def _drop_chunked(self, task: Task, t_s: float) -> Finished:
        """An aborted request ends inside its prompt. What the last chunk computed is not cached."""
        self._chunked = None
        self.pool.release(task, task.computed, task.output, keep=False)
        self.admission.finish(task.job, "aborted")
        return self._finished(task, task.output, t_s)

    def _admitted(self, task: Task) -> None:
        path = self.admission.path(("", None), task.prompt)
        there = task.start + task.loaded
        self.admission.admit(task.job, extend_tokens=task.computed - there, cached_tokens=there, path=path)
        self.meters.cached_tokens += task.start

    def _continued(self, task: Task) -> None:
        self.admission.extend(task.job, task.computed - task.start, task.block(task.start))
