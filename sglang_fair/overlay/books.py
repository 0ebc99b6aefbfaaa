"""The books of one SGLang scheduler: requests become jobs of `Admission`, counters become charges of `Account`.

Nothing is decided here. Everything runs on the scheduler's thread. SGLang's own `waiting_queue` remains the truth about
who waits: requests join it in one place, which is hooked, and SGLang tells the sender of each one that it drops from
there, or from its batch, in another (`ended`): O(1) for each, whether a batch is formed or not. Each pass compares the
two in number, for what left unseen. Where SGLang divides prefill and decode among servers, requests join unseen as
well, and with their prompts computed elsewhere: they are entered when they are found.

After each batch that was formed, and each whose result was processed, the ledger is compared with the engine's own
counts (`batch`): O(batch), always.

The books never end the scheduler. Whatever they do not expect is logged once and counted, and they go on with what
SGLang says (`guarded`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.common import match_kv_cache

from sglang_fair.core.admission import Admission, Match, block_of
from sglang_fair.core.interactions import Interaction, Interactions
from sglang_fair.core.job import Job
from sglang_fair.core.ledger import SYSTEM
from sglang_fair.core.payers import make_payers
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.record import Outcome, Record
from sglang_fair.core.steps import make_steps
from sglang_fair.metrics.replica import ReplicaCounts
from sglang_fair.overlay import tree_core
from sglang_fair.overlay.batch import Row, Step, StepTimes
from sglang_fair.overlay.config import Config
from sglang_fair.overlay.identity import carried_by, job_of
from sglang_fair.overlay.waiting import Expiring, Waiting

logger = logging.getLogger(__name__)

JOB_ATTRIBUTE = "sglang_fair_job"
"""Attribute of SGLang's request: its job. SGLang's id of a request is not unique for as long as the request is here."""

P = ParamSpec("P")
R = TypeVar("R")


def guarded(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R | None]:
    """An error in `method` does not reach SGLang: the books begin anew, and the result is None."""

    @wraps(method)
    def call(books: Any, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(books, *args, **kwargs)
        except Exception:
            books.begin_anew(method.__name__)
            return None

    return call


@dataclass(frozen=True)
class Loop:
    """SGLang's scheduling loop."""

    steps_in_order: bool = True
    """One step is computed after the other, so that each one's time can be told. Otherwise prompts go first, whoever
    runs."""
    overlaps: bool = False
    """A step is formed before the results of the last one are in."""
    mixes: bool = False
    """Those that run get a token in steps for prompts too (--enable-mixed-chunk)."""


class Books:
    """What waits and runs in one SGLang scheduler, and what it was charged.

    `orders`: our policy decides who is admitted; otherwise SGLang's own does, and only the books are kept.
    `generates`: the model emits tokens. An embedding model does not, though SGLang notes one for each request.
    `sees_all`: every request joins the waiting queue by way of `arrive`.
    """

    def __init__(
        self,
        config: Config,
        policy: str,
        *,
        orders: bool,
        tree_cache: Any,
        generates: bool = True,
        sees_all: bool = True,
        loop: Loop = Loop(),
    ) -> None:
        self.config = config
        self._apps = config.read_apps()
        self.orders = orders
        self.generates = generates
        self.policy_name = policy if orders else f"sglang:{policy}"
        self.corrections = 0
        """How often the books were corrected because they did not agree with SGLang."""
        self._policy = policy if orders else "fcfs"
        self._sees_all = sees_all
        self._tree_cache = tree_cache
        self._refused = 0
        self._loop = loop
        self._stall_ms = config.stall_ms if orders and loop.steps_in_order else 0.0
        self._target_tpot_ms = config.target_tpot_ms if self._stall_ms else 0.0
        if config.stall_ms and orders and not loop.steps_in_order:
            logger.info(
                "sglang-fair: with pipeline parallelism or multiplexing --stall-ms and --target-tpot-ms "
                "have no effect"
            )
        self._counts = ReplicaCounts(config.metrics_clients)
        self._begin()
        self.now_s = 0.0
        """The time of this iteration (`clock.Clock`); whatever is decided in it, is decided by this."""
        self._times = StepTimes()

    def _begin(self) -> None:
        """Empty books."""
        policy = self.config.make_policy(self._policy)
        self.queue = FairQueue(policy, self.config.charges, payers=make_payers(self.config.payer))
        bounds = self._stall_ms, self._target_tpot_ms
        steps = make_steps(policy, *bounds, unseen=int(self._loop.overlaps), mixes=self._loop.mixes)
        self._admission = Admission(self.queue, self._match, steps)
        tree_core.follow(self._tree_cache, policy.weights)
        self.queue.reweighed.append(partial(tree_core.reweigh, self._tree_cache))
        self._interactions = Interactions()
        """Of calls that no gateway has numbered."""
        self._waiting = Waiting()
        self._expiring = Expiring()
        for listener in (self._waiting, self._expiring):
            self._admission.listeners.add(listener)
        self._draft: Job | None = None
        """Of the last request that could have been refused."""
        self._taken_back: dict[str, Job] = {}
        """Ids of the jobs of running requests that were taken back and do not wait yet, and for which one each."""

    def begin_anew(self, where: str) -> None:
        """Give the books up after an error in `where`, which is being handled. What was charged stays in the ledger;
        the policy starts as at the start of the server, and every request is entered when it is next seen."""
        self._corrected("%s failed, and the books begin anew", where, trace=True)
        ledger = self.queue.account.ledger
        self._begin()
        self.queue.account.ledger = ledger

    def _corrected(self, what: str, *args: object, trace: bool = False) -> None:
        self.corrections += 1
        if self.corrections == 1:
            logger.error("sglang-fair: %s; GET /fair counts such corrections", what % args, exc_info=trace)

    @guarded
    def tick(self, now_s: float) -> None:
        """An iteration of the scheduler begins."""
        for step, duration_s in self._times.tick(now_s):
            self._admission.step(duration_s, step.extended, decoded=int(step.decoded), requests=step.requests)
        self.now_s = now_s
        self._admission.tick(now_s)
        self._interactions.tick(now_s)

    def runs(self) -> None:
        """A batch is launched."""
        self._times.launched()

    def is_busy(self) -> bool:
        """Whether a request waits or runs."""
        return len(self.queue) > 0 or bool(self.queue.running())

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change clients' weights from the next charge on; what was counted stays, and a weight by the tenants' file,
        which requests bring along, holds beside it. ValueError for a bad one."""
        self.config = self.config.with_weights(weights)
        self.queue.set_weights(weights)

    # ---- what waits

    def job(self, request: Any) -> Job | None:
        """The job of `request`; None if it is not in the books."""
        job: Job | None = getattr(request, JOB_ATTRIBUTE, None)
        return job if job is not None and self.queue.find(job.id) is job else None

    @guarded
    def refuses(self, request: Any) -> str | None:
        """Why a request that is about to join the waiting queue may not, in the policy's words; None: it may.

        None for a request that SGLang has found invalid, for SGLang ends it itself, and for one that
        was taken back from the batch, which is not new.
        """
        if not self.orders or not self.queue.policy.may_refuse:
            return None
        if request.to_finish or self.job(request) is not None:
            return None
        self._draft = job_of(request, self._apps, self.now_s)
        reason = self._admission.refuses(self._draft)
        self._refused += reason is not None
        return reason

    @guarded
    def arrive(self, request: Any) -> None:
        """A request was appended to the waiting queue: new, or taken back from the batch."""
        self._enter(request)

    @guarded
    def ended(self, request: Any) -> None:
        """SGLang has ended `request` without a result of a batch: aborted while it waited or between two chunks, or
        dropped because the queue or the memory is full. One that is not in the books is ignored."""
        job = self.job(request)
        if job is None:
            return
        if self.queue.is_waiting(job.id):
            self._leave(job)
        else:
            self._taken_back.pop(job.id, None)
            self._finish(request, job)

    @guarded
    def follow(self, waiting: list[Any]) -> None:
        """Drop the requests that have left since the last call, and enter those that joined unseen."""
        self._follow(waiting)

    def _follow(self, waiting: list[Any]) -> None:
        """If every arrival was reported by a hook, the jobs are a superset of `waiting`, and the two are the same if
        they are equal in number. A running request has left if the engine dropped it without a result: aborted between
        two chunks, or in the batch when memory ran out.
        """
        if len(self.queue) != len(waiting) or not self._sees_all:
            present = {id(request) for request in waiting}
            for job in list(self.queue.jobs()):
                if id(job.request) not in present:
                    self._leave(job)
            if len(self.queue) != len(waiting):
                if self._sees_all:
                    self._corrected("a request joined the waiting queue unseen")
                for request in waiting:
                    if not self._waits(request):
                        self._enter(request)
        for job in list(self.queue.running()):
            request = job.request
            if job.id not in self._taken_back and (request.finished() or not request.kv.holds_kv):
                self._finish(request, job)

    def _enter(self, request: Any) -> Job:
        """`request` waits from now on."""
        job = self.job(request)
        if job is None:
            job = self._make_job(request)
            self._counts.arrived(job, self.queue)
            self._admission.arrive(job)
        elif not self.queue.is_waiting(job.id):
            self._emit(job)
            if (urgent := self._taken_back.pop(job.id, None)) is None:
                self._admission.retract(job)
            else:
                self._admission.evict(job, urgent)
        return job

    def _make_job(self, request: Any) -> Job:
        job, self._draft = self._draft, None
        if job is None or job.request is not request:
            job = job_of(request, self._apps, self.now_s)
        number = 1
        while self.queue.find(job.id) is not None:
            number += 1
            job.id = f"{request.rid} ({number})"
        if not job.call:
            job.call = self._interactions.accept(_interaction(job)) if job.interaction else 1
        setattr(request, JOB_ATTRIBUTE, job)
        return job

    def _waits(self, request: Any) -> bool:
        job = self.job(request)
        return job is not None and self.queue.is_waiting(job.id)

    def _leave(self, job: Job) -> None:
        """A request that waits was given up."""
        self._admission.leave(job)
        self._gone(job)

    def _gone(self, job: Job) -> None:
        request, job.request = job.request, None
        carried = carried_by(request)
        if not carried.get("call"):
            is_answered = carried.get("is_last") is True and outcome_of(request) == "finished"
            self._interactions.end(_interaction(job), is_answered=is_answered)

    def _match(self, job: Job) -> Match:
        """Admission's look-up of a waiting request."""
        request = job.request
        prompt = request.origin_input_ids
        known = prompt + request.output_ids if request.output_ids else prompt
        match_kv_cache(
            request, self._tree_cache, known, max_prefix_len=request._compute_max_prefix_len(len(known))
        )
        return self._matched(request)

    def _matched(self, request: Any) -> Match:
        """What the engine's last look-up of `request`, which waits, found."""
        self._waiting.looked_up(request)
        return request.num_matched_prefix_tokens, self._block(request, request.prefix_len)

    # ---- what they got

    @guarded
    def admitted(self, request: Any) -> None:
        """`request` is in the batch."""
        root = request.extra_key, request.cache_salt
        job = self._enter(request)
        tree_core.served(self._tree_cache, request, job)
        if not job.retractions:
            self._counts.admitted(job, self.now_s - job.arrived_s)
        self._admission.admit(
            job,
            extend_tokens=request.extend_end - request.prefix_len,
            cached_tokens=request.prefix_len,
            path=self._admission.path(root, memoryview(request.origin_input_ids)),
        )

    @guarded
    def continued(self, request: Any) -> None:
        """One more chunk of a prompt is in the batch; the chunk before it is in the cache."""
        job = self.job(request)
        if job is None or self.queue.is_waiting(job.id):
            self._corrected("a prompt goes on that was not known to run")
            self.admitted(request)
            return
        block = self._block(request, request.prefix_len) if self.orders else None
        self._admission.extend(job, request.extend_end - request.prefix_len, block)

    @guarded
    def computed(self, tokens: int) -> None:
        """An extend batch was formed, which by the engine's own count computes `tokens` prompt tokens."""
        self._compare("a batch was formed", extend=tokens)

    @property
    def record(self) -> Record:
        """The last requests; another object after `begin_anew`."""
        return self._admission.record

    def note_time(self, now_s: float) -> None:
        """It is `now_s` for what is recorded; decisions go by `tick`."""
        self.record.tick(now_s)

    @guarded
    def processed(self, batch: Any, tokens: int, before: Sequence[Row]) -> None:
        """A batch's results are in: charge the output, end what has ended. `tokens` is the engine's own count of the
        output tokens, `before` what `batch.rows` said before."""
        running, known = [], self.queue.account.running
        for request, _, outputs in before:
            job: Job | None = getattr(request, JOB_ATTRIBUTE, None)
            if job is None or known.get(job.id) is not job:
                if len(request.output_ids) <= outputs:
                    continue
                job = self._found_running(request, outputs)
            running.append((request, job))
        if batch.forward_mode.is_extend():
            self._admission.computed(job for _, job in running)
        self._times.done(self._step(batch))
        for request, job in running:
            if request.finished():
                self._finish(request, job)
            else:
                self._emit(job)
        self._compare("a result was processed", output=tokens if self.generates else 0)

    def _step(self, batch: Any) -> Step:
        """What a batch was, whose results are in."""
        mode = batch.forward_mode
        if not mode.is_extend():
            return Step(decoded=mode.is_decode(), requests=len(batch.reqs))
        mixed = len(batch.decoding_reqs or ())
        extended: Counter[str] = Counter()
        for request, tokens in zip(batch.reqs[: len(batch.reqs) - mixed], batch.extend_lens, strict=False):
            job = self.job(request)
            extended[SYSTEM if job is None or job.system else job.client] += tokens
        return Step(extended, decoded=mixed > 0)

    def _found_running(self, request: Any, outputs: int) -> Job:
        """A request runs that no batch of ours admitted: another server has computed its prompt."""
        if self._sees_all:
            self._corrected("a request ran that was not known to be admitted")
        job = self._enter(request)
        job.given_tokens = outputs
        self._admission.admit(job, extend_tokens=0, cached_tokens=job.prompt_tokens)
        self._admission.computed([job])
        return job

    def _compare(self, when: str, *, extend: int = 0, output: int = 0) -> None:
        """The engine counted these tokens itself."""
        ledger = self.queue.account.ledger
        ledger.engine_counted(extend=extend, output=output)
        if not ledger.check() and ledger.mismatches == 1:
            logger.error(
                "sglang-fair: charges and the engine's counters differ after %s: %s",
                when,
                ledger.first_mismatch,
            )

    def _emit(self, job: Job) -> None:
        """Charge the output since the last call. What speculation wrote past the end of the answer its sender neither
        sees nor pays for."""
        if self.generates:
            request = job.request
            written = len(request.output_ids)
            unbooked = written - job.given_tokens - job.output_tokens - job.unasked_tokens
            end = written if request.finished_len is None else request.finished_len
            past_end = min(unbooked, written - end)
            self.queue.account.emit(job, unbooked - past_end, unasked_tokens=past_end)

    def _finish(self, request: Any, job: Job) -> None:
        self._emit(job)
        self._admission.finish(job, outcome_of(request))
        self._gone(job)

    def _block(self, request: Any, prefix_tokens: int) -> Hashable | None:
        """Names what would be computed of a prompt behind so much of it."""
        if self._tree_cache.disable:
            return None
        tokens = memoryview(request.origin_input_ids)
        return block_of(tokens, prefix_tokens, request.extra_key, request.cache_salt)


def outcome_of(request: Any) -> Outcome:
    """How a request ended."""
    reason = request.finished_reason
    return "aborted" if reason is None or isinstance(reason, FINISH_ABORT) else "finished"


def is_over(request: Any) -> bool:
    """Whether it has ended, or will before it gets another token."""
    return bool(request.finished() or request.to_finish or not request.kv.holds_kv)


def _interaction(job: Job) -> Interaction:
    return Interaction(job.client, job.app, job.interaction)
