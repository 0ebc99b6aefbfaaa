"""Forming a batch: the rules of one replica's admission, the same on SGLang's scheduler and in simulations.

An engine forms a batch by asking for one candidate after another until the next one does not fit. Memory and compute
are the engine's to judge. Everything else about a candidate is decided here:

    look-ups      which waiting requests are matched against the cache before the pass (`prefixes`)
    twins         a request whose next tokens are being computed for another one is passed over: one step later they
                  are a cache hit (`prefixes`)
    corrections   a candidate that lost cached tokens since its look-up is offered again only if it is still first
    steps         whether the step is for prompts at all, or for those that run, and how long it may be (`steps`)
    eviction      which running requests are taken back for a more urgent one, if the policy has that (`preemption`)
    target        all requests of a client above its share of those that run are passed over while these would take
                  longer than the target (`Steps.holds_back`); the server's own and retracted ones never are
    places        the same where the places that are left are others' (`places`), if none is due

The engine is reached through one function, `match`. It calls `refuses`, `arrive`, `leave`, `retract` and `evict` as
requests come and go; for each batch `begin_pass`, `chunk_tokens`, `goes_on` with `chunk_of` and `extend` for the prompt
that was cut, `confirm` and `admit` for each of `candidates`, and `end_pass`; then `computed`, `step` and `finish`.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_

from sglang_fair.core.job import Job
from sglang_fair.core.listener import Listeners
from sglang_fair.core.payers import path_of
from sglang_fair.core.places import Places
from sglang_fair.core.preemption import Preemption
from sglang_fair.core.prefixes import Prefixes
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.record import Outcome, Record
from sglang_fair.core.step_times import LEAST_CHUNK_TOKENS
from sglang_fair.core.steps import PromptsFirst, Steps
from sglang_fair.core.waits import ENGINE, PREFIX, RUNNING, STEP

Match = tuple[int, Hashable | None]
"""Cached tokens of a prompt, and a name for the tokens behind them (`Job.block`)."""

CORRECTIONS_PER_PASS = 16
"""Candidates per pass that may be put back because their cached prefix shrank. After that they are admitted in turn."""

DEFERRALS_PER_PASS = 64
"""Candidates per pass that may be passed over for a twin; one more ends the pass. They are the many that share a new
prefix, and all of them can go once it is cached."""

BLOCK_TOKENS = 32
"""Two prompts that agree on so many tokens behind the same prefix are taken to share them; SGLang's own threshold."""

DELAYED_POLL_S = 0.010
"""How often an idle engine asks again while requests wait that the policy does not let go yet."""


def block_of(tokens: memoryview, prefix_tokens: int, *root: Hashable) -> Hashable | None:
    """Names what would be computed of the prompt `tokens`, of one `root` in the cache, behind its cached prefix: by the
    first tokens that are not cached, and by two samples of the prefix.

    None if fewer than `BLOCK_TOKENS` are not: so few are not worth waiting for.
    """
    if len(tokens) < prefix_tokens + BLOCK_TOKENS:
        return None
    starts = (prefix_tokens, 0, prefix_tokens // 2)
    return prefix_tokens, *root, *(tokens[start : start + BLOCK_TOKENS].tobytes() for start in starts)


def _mixed_step(tokens: int) -> int:
    """Tokens of a mixed step that goes by the prompt of one client: with those of a cut prompt beside it, it hardly
    lasts longer."""
    return max(LEAST_CHUNK_TOKENS, tokens + tokens // 8) + 2 * BLOCK_TOKENS


class Admission:
    """Decides which requests of `queue` join the next batch. `match` looks a waiting request up in the cache.

    `steps` is the rule that shares the engine's time between prompts and those that run; None: prompts go first.
    """

    def __init__(self, queue: FairQueue, match: Callable[[Job], Match], steps: Steps | None = None) -> None:
        self.queue = queue
        self.steps = steps
        self.record = Record(queue.policy)
        most = queue.policy.evictions
        self.preemption = Preemption(most, queue.policy.owes) if most else None
        """What to take back for what. None: the policy takes nothing back."""
        self._match = match
        self._rule: PromptsFirst = steps or PromptsFirst()
        if steps is not None:
            queue.reweighed.append(steps.reweigh)
            queue.policy.idle_first = steps.mixes
        self._prefixes = Prefixes(waits=queue.policy.waits_for_prefixes)
        self.listeners = Listeners(self.record, self._prefixes, self._rule)
        if self.preemption is not None:
            self.listeners.add(self.preemption)
        self._places: Places | None = None
        if steps is not None and queue.policy.keeps_places:
            self._places = Places(queue.policy.weights, self.record.waits.has_turn)
            self.listeners.add(self._places)
            queue.reweighed.append(self._places.reweigh)
        self._cached_tokens = 0
        self._corrections_left = CORRECTIONS_PER_PASS
        self._deferrals_left = DEFERRALS_PER_PASS
        self._passed_over: Job | None = None
        """The last candidate, if `confirm` was False."""
        self._gave_way = False
        """The prompt that was cut did not go on in the last pass, for another one."""
        self._held = False
        """Those that run have their turn: this pass has no candidates."""
        self._can_decode: Callable[[], bool] = lambda: True

    # ---- which requests wait

    def tick(self, now_s: float) -> None:
        """It is `now_s`; see `FairQueue.tick`."""
        self.queue.tick(now_s)
        self.listeners.notify("tick", now_s)

    def refuses(self, job: Job) -> str | None:
        """Why a new request may not wait here, for its sender; None: it may, and `arrive` follows at once."""
        reason = self.queue.refuses(job)
        if reason is not None:
            self.listeners.notify("refused", job, reason)
        return reason

    def arrive(self, job: Job) -> None:
        """A request joined the queue. ValueError if its id is already here."""
        self.queue.arrive(job)
        self.listeners.notify("arrive", job)

    def leave(self, job: Job) -> None:
        """A waiting request was aborted."""
        self.queue.leave(job.id)
        self.listeners.notify("leave", job)

    def retract(self, job: Job) -> None:
        """The engine took a running request back: it waits, first in line."""
        self.queue.retract(job)
        self.listeners.notify("retract", job)

    def evict(self, job: Job, urgent: Job) -> None:
        """The engine took the running `job` back for `urgent` (`Preemption.choose`), and has kept what it computed: it
        waits by the policy. ValueError if the policy takes nothing back."""
        if self.preemption is None:
            raise ValueError(f"policy {self.queue.policy.name} takes no request back")
        self.queue.evict(job)
        self.listeners.notify("evict", job, urgent)

    def urgent(self) -> Job | None:
        """Between two passes: the request that is next by the policy, if running ones may be taken back for it and
        nothing but room keeps it from being admitted."""
        if self.preemption is None:
            return None
        self.queue.begin_pass()
        job = self.queue.next()
        if job is None or not self.preemption.may_take_back(job) or self.is_being_computed(job):
            return None
        return None if self._holds_back(job) else job

    # ---- one pass

    def begin_pass(self, cached_tokens: int, can_decode: Callable[[], bool] = lambda: True) -> None:
        """The engine starts to form a batch. Looks some waiting requests up; `cached_tokens` is the size of the cache,
        which shows that it has changed. `can_decode`: whether a decode step could be made in place of this one, without
        taking a request's memory; if not, those that run have to wait."""
        if cached_tokens != self._cached_tokens:
            self._cached_tokens = cached_tokens
            self._prefixes.changed()
        for job in self._prefixes.due():
            self.looked_up(job, *self._match(job))
        self.queue.begin_pass()
        self._corrections_left = CORRECTIONS_PER_PASS
        self._deferrals_left = DEFERRALS_PER_PASS
        self._held = False
        self._can_decode = can_decode

    def goes_on(self, job: Job) -> bool:
        """Whether the prompt that was cut goes on now. If not, those that run have their turn, or another client's
        prompt that is next and has room in this step only without it. Never twice in a row for that, and never where
        steps are mixed, which have room for both."""
        if not self._may_prefill(job):
            return False
        if (most := self.chunk_tokens(job)) is None:
            return True
        needed = self._needed_beside(job)
        if needed <= most and self._holds_back(job):  # a longer one would wait for the end of this one
            return False
        if self._rule.mixes:
            return True
        # If the other one is not admitted after all, the engine must have something else to do.
        self._gave_way = not self._gave_way and most // 2 < needed <= most and self._can_decode()
        return not self._gave_way

    def chunk_tokens(self, cut: Job | None = None) -> int | None:
        """Most prompt tokens of this step; None: as many as the engine will. `cut`: the prompt that was cut. Where
        steps are mixed, another client's that is next need not wait for its end: the step has room for all of it."""
        most = self._rule.chunk_tokens()
        if most is not None and cut is not None and self._rule.mixes:
            needed = self._needed_beside(cut)
            if 0 < needed <= self._rule.whole_tokens():
                return max(most, _mixed_step(needed))
        return most

    def chunk_of(self, job: Job, tokens: int, block: Hashable | None = None) -> int:
        """Of the `tokens` that the step may have, how many the prompt `job`, which was cut, may have from `block` on:
        all, or what is left beside the prompt that is next, if that is another client's and takes half of them at most.
        So a short prompt does not wait for the end of a long one, which has half of each step."""
        if self.chunk_tokens() is None:
            return tokens
        needed = self._needed_beside(job, block)
        if self._rule.mixes:
            fits = 0 < needed <= tokens - BLOCK_TOKENS
            return min(tokens, _mixed_step(needed)) - needed if fits else tokens
        return tokens - needed if needed <= tokens // 2 else tokens

    def candidates(self) -> Iterator[Job]:
        """The requests to try, in the policy's order. Each is chosen after the one before was admitted or passed over;
        one that was neither is passed over. None if those that run have their turn."""
        while not self._held and (job := self._next()) is not None and self._may_prefill(job):
            self._passed_over = None
            yield job
            if self._passed_over is not job and self.queue.is_waiting(job.id):
                self.record.hold(job, ENGINE)
                self.queue.hold(job)
                if self._places is not None and not job.system:
                    self._places.pass_over(job.client)

    def confirm(self, job: Job, prefix_tokens: int, block: Hashable | None) -> bool:
        """The engine matched the candidate `job` once more, and that decides: False if it must not be admitted now,
        because its next tokens are being computed already or because another one has become first."""
        believed_tokens = job.prefix_tokens
        self.looked_up(job, prefix_tokens, block)
        if self.is_being_computed(job):
            self._defer(job)
            self._passed_over = job
            return False
        if prefix_tokens < believed_tokens and self._corrections_left:
            self._corrections_left -= 1
            if self._next() is not job:
                self._passed_over = job
                return False
        return True

    def admit(
        self, job: Job, *, extend_tokens: int, cached_tokens: int, path: Sequence[Hashable] = ()
    ) -> None:
        """`job` is in the batch; the arguments are those of `Account.begin`."""
        self.listeners.notify("admit", job)
        self.queue.admit(job, extend_tokens=extend_tokens, cached_tokens=cached_tokens, path=path)

    def end_pass(self, cause: str | None) -> None:
        """A batch was formed, or could not be. `cause` is why the engine admitted no other request (`waits`); None:
        it was offered none."""
        found = cause or (RUNNING if self._held else STEP if self._deferrals_left else PREFIX)
        self.listeners.notify("end_pass", found, self.queue.policy.turns())

    # ---- prompts that are being computed

    def extend(self, job: Job, tokens: int, block: Hashable | None) -> None:
        """The batch computes `tokens` more of an admitted prompt, from `block` on."""
        self.listeners.notify("cached", job)
        if block is not None:
            job.block = block
            self._prefixes.computes(job)
        self.queue.account.extend(job, tokens)

    def computed(self, jobs: Iterable[Job]) -> None:
        """A batch of prompts is done: what it computed of `jobs`, the running requests in it, is in the cache."""
        self._prefixes.changed()
        for job in jobs:
            is_whole = not job.decoding and job.reached_tokens >= job.prompt_tokens
            self.listeners.notify("cached", job)
            if is_whole:
                self.listeners.notify("computed", job)

    def step(
        self,
        duration_s: float,
        extended: Mapping[str, int] | None = None,
        *,
        decoded: int = 0,
        requests: int = 0,
    ) -> None:
        """A step is over, `computed` included; the arguments are those of `Steps.step`."""
        self.listeners.notify("step", duration_s, extended or {}, decoded=decoded, requests=requests)

    def finish(self, job: Job, outcome: Outcome = "finished") -> None:
        """A running request ended, by itself or by abort."""
        self.queue.finish(job.id)
        self.listeners.notify("finish", job, outcome)

    # ---- the books

    def path(self, root: object, tokens: Sequence[int] | memoryview) -> Sequence[Hashable]:
        """The blocks of a prompt for `admit` (`payers.path_of`); none where clients do not share prices."""
        payers = self.queue.account.payers
        return () if payers is None else path_of(root, tokens, payers.block_tokens)

    # ---- what the rules are made of

    def looked_up(self, job: Job, prefix_tokens: int, block: Hashable | None) -> None:
        """The cache was searched for the prompt of a waiting request."""
        changed = prefix_tokens != job.prefix_tokens
        job.prefix_tokens, job.block = prefix_tokens, block
        if changed:
            self.queue.rematch(job)
        self._prefixes.looked_up(job)

    def is_being_computed(self, job: Job) -> bool:
        """Whether to wait for another request's prefill that starts with the tokens which `job` needs next."""
        return self._prefixes.is_being_computed(job)

    def _needed_beside(self, job: Job, block: Hashable | None = None) -> int:
        """Tokens of the prompt that is next, if it is another client's than that of `job` and may be computed beside it
        or in its place; else 0. `block`: what `job` is about to compute."""
        other = self._next()
        if other is None or other.client == job.client or not self._rule.may_prefill(other):
            return 0
        if self._prefixes.will_wait(other, block):
            return 0  # it will wait for what this very step computes
        return other.prompt_tokens + other.output_tokens - other.prefix_tokens

    def _may_prefill(self, job: Job) -> bool:
        if self._rule.may_prefill(job):
            return True
        if not self._held and not self._can_decode():
            self._rule.forced()
            return True
        if not self._held:
            self._held = True
            self._rule.put_off()
        return False

    def _next(self) -> Job | None:
        while self._deferrals_left:
            job = self.queue.next()
            if job is None:
                return None
            if self._crowds_out(job) and self._can_decode():
                self._rule.set_aside(self._set_aside(self._crowds_out))
            elif self._holds_back(job):
                self._set_aside(partial(is_, job))
            elif self.is_being_computed(job):
                self._defer(job)
            else:
                return job
        return None

    def _holds_back(self, job: Job) -> bool:
        if job.system or job.repeating or not self._rule.holds_back(job) or not self._can_decode():
            return False
        self._rule.set_aside()
        return True

    def _crowds_out(self, job: Job) -> bool:
        """What is left is others', and it is not due."""
        places, preemption = self._places, self.preemption
        if places is None or not places.crowds_out(job):
            return False
        return preemption is None or not preemption.may_take_back(job)

    def _set_aside(self, test: Callable[[Job], bool]) -> int:
        clients = self.queue.set_aside(test)
        self.record.waits.set_aside(clients)
        return len(clients)

    def _defer(self, job: Job) -> None:
        """Pass `job` over because its prefix is being computed."""
        self._prefixes.defer(job)
        self._deferrals_left -= 1
        self.record.hold(job, PREFIX)
        self.queue.hold(job)
