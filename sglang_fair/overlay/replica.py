"""SGLang's scheduler as `Admission` and `Account` see it: requests become jobs, counters become charges.

Nothing is decided here. Everything runs on the scheduler's thread. SGLang's own `waiting_queue` remains the truth about
who waits: requests join it in one place, which is hooked, and SGLang tells the sender of each one that it drops from
there, or from its batch, in another (`ended`): O(1) for each, whether a batch is formed or not. Each pass compares the
two in number, for what left unseen. Where SGLang divides prefill and decode among servers, requests join unseen as
well, and with their prompts computed elsewhere: they are entered when they are found.

After each batch that was formed, and each whose result was processed, the ledger is compared with the engine's own
counts (`counts.py`): O(batch), always.

The books never end the scheduler. Whatever they do not expect is logged once and counted, and they go on with what
SGLang says (`guarded`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from hashlib import blake2b
from heapq import nlargest
from typing import Any, Concatenate, ParamSpec, TypeVar

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.common import match_kv_cache

from sglang_fair.common.identity import ANONYMOUS
from sglang_fair.common.interaction import Apps
from sglang_fair.core.admission import BLOCK_TOKENS, Admission, Match, samples
from sglang_fair.core.interactions import Interaction, Interactions
from sglang_fair.core.job import Job
from sglang_fair.core.ledger import SYSTEM
from sglang_fair.core.options import shown
from sglang_fair.core.payers import make_payers, path_of
from sglang_fair.core.policy import Learns
from sglang_fair.core.preemption import Missing, Preemption, Runner
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.record import Outcome, Record
from sglang_fair.core.step_times import Step, StepTimes
from sglang_fair.core.steps import make_steps
from sglang_fair.core.waits import BATCH, PROMPTS
from sglang_fair.metrics.replica import ReplicaCounts
from sglang_fair.overlay import normal, tree_core
from sglang_fair.overlay.config import Config
from sglang_fair.overlay.counts import BatchRow

logger = logging.getLogger(__name__)

CUSTOM_PARAMS_KEY = "fair"
"""Where a request carries its client inside `sampling_params.custom_params`."""

JOB_ATTRIBUTE = "sglang_fair_job"
"""Attribute of SGLang's request: its job. SGLang's id of a request is not unique for as long as the request is here."""

P = ParamSpec("P")
R = TypeVar("R")


def guarded(
    method: Callable[Concatenate["ReplicaFairness", P], R],
) -> Callable[Concatenate["ReplicaFairness", P], R | None]:
    """An error in `method` does not reach SGLang: the books begin anew, and the result is None."""

    @wraps(method)
    def call(fair: "ReplicaFairness", /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(fair, *args, **kwargs)
        except Exception:
            fair.begin_anew(method.__name__)
            return None

    return call


class ReplicaFairness:
    """The fairness of one SGLang scheduler.

    `orders`: our policy decides who is admitted; otherwise SGLang's own does, and only the books are kept.
    `generates`: the model emits tokens. An embedding model does not, though SGLang notes one for each request.
    `sees_all`: every request joins the waiting queue by way of `arrive`.
    `steps_in_order`: one step is computed after the other, so that each one's time can be told. Otherwise prompts go
    first, whoever runs. `overlaps`: a step is formed before the results of the last one are in. `leads`: of the ranks
    that decide the same, it is the one that writes what was learnt.
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
        steps_in_order: bool = True,
        overlaps: bool = False,
        leads: bool = True,
    ) -> None:
        self.config = config
        self.orders = orders
        self.generates = generates
        self.policy_name = policy if orders else f"sglang:{policy}"
        self.corrections = 0
        """How often the books were corrected because they did not agree with SGLang."""
        self._policy = policy if orders else "fcfs"
        self._sees_all = sees_all
        self._tree_cache = tree_cache
        self._refused = 0
        self._armed = False
        self._passes = False
        """SGLang forms a batch."""
        self._offered = False
        """It has been offered a request and has not tried it yet."""
        self._stopped: str | None = None
        """Why it tries no other one."""
        self._overlaps = overlaps
        self._stall_ms = config.stall_ms if orders and steps_in_order else 0.0
        self._target_tpot_ms = config.target_tpot_ms if self._stall_ms else 0.0
        if config.stall_ms and orders and not steps_in_order:
            logger.info(
                "sglang-fair: with pipeline parallelism or multiplexing --stall-ms and --target-tpot-ms "
                "have no effect"
            )
        self._counts = ReplicaCounts(config.metrics_clients)
        self._normal = normal.NormalFile(config.normal) if config.normal is not None and leads else None
        self._begin()
        if config.normal is not None:
            normal.restore(self.queue.policy, config.normal)
        self.now_s = 0.0
        """The time of this iteration (`clock.Clock`); whatever is decided in it, is decided by this."""
        self._times = StepTimes()

    def _begin(self) -> None:
        """Empty books."""
        policy = self.config.policy(self._policy)
        self.queue = FairQueue(policy, self.config.cost, payers=make_payers(self.config.payer))
        steps = make_steps(policy, self._stall_ms, self._target_tpot_ms, unseen=int(self._overlaps))
        self._admission = Admission(self.queue, self._match, steps)
        tree_core.follow(self._tree_cache, policy.weights)
        self.queue.reweighed.append(partial(tree_core.reweigh, self._tree_cache))
        self._requests: dict[str, Any] = {}
        """SGLang's requests, by the ids of their jobs."""
        self._interactions = Interactions()
        """Those whose calls no gateway has numbered."""
        self._numbered: set[str] = set()
        """Ids of the jobs of such calls."""
        self._taken_back: dict[str, Job] = {}
        """Ids of the jobs of running requests that were taken back and do not wait yet, and for whom."""
        self._given_tokens: dict[str, int] = {}
        """Output that a request had when it was entered, by the id of its job."""

    def begin_anew(self, where: str) -> None:
        """Give the books up after an error in `where`, which is being handled. What was charged stays in the ledger;
        the policy starts as at the start of the server, and every request is entered when it is next seen."""
        self._corrected("%s failed, and the books begin anew", where, trace=True)
        ledger, old = self.queue.account.ledger, self.queue.policy
        self._begin()
        self.queue.account.ledger = ledger
        with suppress(Exception):  # what was learnt may be what is broken
            if isinstance(old, Learns) and isinstance(self.queue.policy, Learns):
                self.queue.policy.recall(old.learnt())

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
        if self._normal is not None:
            self._normal.tick(self.queue.policy, now_s, is_busy=self.is_busy())

    @guarded
    def close(self) -> None:
        """The scheduler ends."""
        if self._normal is not None:
            self._normal.close(self.queue.policy)

    def runs(self) -> None:
        """A batch is launched."""
        self._times.launched()

    def is_busy(self) -> bool:
        """Whether anybody waits or runs."""
        return len(self.queue) > 0 or bool(self.queue.running())

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change clients' weights from the next charge on; what was counted stays, and a weight by the tenants' file,
        which requests bring along, holds beside it. ValueError for a bad one."""
        self.config = self.config.with_weights(weights)
        self.queue.set_weights(weights)

    # ---- who waits

    @guarded
    def refuses(self, request: Any) -> str | None:
        """Why a request that is about to join the waiting queue may not, in the policy's words; None: it may.

        Nobody is asked about a request that SGLang has found invalid, for SGLang ends it itself, nor about one that
        was taken back from the batch, which is not new.
        """
        if not self.orders or request.to_finish or self._job(request) is not None:
            return None
        reason = self._admission.refuses(job_of(request, self.config.apps))
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
        job = self._job(request)
        if job is None:
            return
        if self.queue.is_waiting(job.id):
            self._leave(job)
        else:
            self._taken_back.pop(job.id, None)
            self._finish(request, job)

    @guarded
    def begin_pass(self, waiting: list[Any], can_decode: Callable[[], bool] = lambda: False) -> None:
        """A batch is about to be formed from `waiting`; `can_decode` is that of `Admission.begin_pass`."""
        self._follow(waiting)
        self._passes, self._offered, self._stopped = True, False, None
        if self.orders:
            cached_tokens = self._tree_cache.evictable_size() + self._tree_cache.protected_size()
            self._admission.begin_pass(cached_tokens, can_decode)

    def only_waits(self) -> bool:
        """Nothing runs although requests wait: the policy lets none of them go yet."""
        return self.orders and len(self.queue) > 0 and not self.queue.running()

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
                if id(self._requests[job.id]) not in present:
                    self._leave(job)
            if len(self.queue) != len(waiting):
                if self._sees_all:
                    self._corrected("a request joined the waiting queue unseen")
                for request in waiting:
                    if not self._waits(request):
                        self._enter(request)
        for job in list(self.queue.running()):
            request = self._requests[job.id]
            if job.id not in self._taken_back and (request.finished() or not request.kv.holds_kv):
                self._finish(request, job)

    def _enter(self, request: Any) -> Job:
        """`request` waits from now on."""
        job = self._job(request)
        if job is None:
            job = job_of(request, self.config.apps)
            job.id, job.arrived_s = self._free_id(request.rid), self.now_s
            said = _said(request)
            slack_s = said.get("slack_s")
            if slack_s is not None:
                job.deadline_s = job.arrived_s + slack_s
            if salt := said.get("salt"):  # SGLang's requests for embeddings carry none themselves
                request.cache_salt = salt
            if not job.call:
                self._numbered.add(job.id)
                job.call = self._interactions.accept(_interaction(job))
            self._requests[job.id] = request
            if request.output_ids:  # the books are younger than it is
                self._given_tokens[job.id] = len(request.output_ids)
            setattr(request, JOB_ATTRIBUTE, job)
            self._counts.arrived(job, self.queue)
            self._admission.arrive(job)
        elif not self.queue.is_waiting(job.id):
            self._emit(request, job)
            if (urgent := self._taken_back.pop(job.id, None)) is None:
                self._admission.retract(job)
            else:
                self._admission.evict(job, urgent)
        return job

    def _free_id(self, rid: str) -> str:
        """SGLang's id, if no other request here has it."""
        id, number = rid, 1
        while id in self._requests:
            number += 1
            id = f"{rid} ({number})"
        return id

    def _waits(self, request: Any) -> bool:
        job = self._job(request)
        return job is not None and self.queue.is_waiting(job.id)

    def _match(self, job: Job) -> Match:
        """Admission's look-up of a waiting request."""
        request = self._requests[job.id]
        prompt = request.origin_input_ids
        known = prompt + request.output_ids if request.output_ids else prompt
        match_kv_cache(
            request, self._tree_cache, known, max_prefix_len=request._compute_max_prefix_len(len(known))
        )
        return self._matched(request)

    def _matched(self, request: Any) -> Match:
        """What the engine's last look-up of `request` found."""
        return request.num_matched_prefix_tokens, self._block(request, request.prefix_len)

    # ---- who goes next

    @guarded
    def chunk_tokens(self) -> int | None:
        """Most prompt tokens of the batch that is formed; None: as many as SGLang will."""
        return self._admission.chunk_tokens()

    @guarded
    def goes_on(self, request: Any) -> bool:
        """Whether the next chunk of `request`, whose prompt was cut, is computed now."""
        job = self._job(request)
        return job is None or self._admission.goes_on(job)

    @guarded
    def chunk_of(self, request: Any, tokens: int) -> int | None:
        """Most prompt tokens for the next chunk of `request`, if that is less than the batch may have."""
        job = self._job(request)
        if job is None:
            return None
        most = self._admission.chunk_of(job, tokens, self._block(request, request.prefix_len))
        return most if most < tokens else None

    def arm(self) -> None:
        """The next iteration over the waiting queue is SGLang's admission loop."""
        self._armed = self.orders

    def disarm(self) -> bool:
        armed, self._armed = self._armed, False
        return armed

    def offers(self) -> Iterator[Any]:
        """Candidates in the policy's order."""
        candidates = self._admission.candidates()
        while (request := self._next(candidates)) is not None:
            self._offered = True
            yield request
            self._offered = False

    @guarded
    def _next(self, candidates: Iterator[Job]) -> Any:
        job = next(candidates, None)
        return None if job is None else self._requests[job.id]

    @guarded
    def may_admit(self, request: Any) -> bool:
        """Whether `request`, which the engine has just matched against its cache, is to be admitted if it fits."""
        self._offered = False
        if not self.orders:
            return True
        job = self._job(request)
        return job is not None and self._admission.confirm(job, *self._matched(request))

    def stopped(self, cause: str) -> None:
        """The engine tries no other request in this pass, because of `cause`."""
        self._stopped = cause

    @guarded
    def end_pass(self, *, is_full: bool, was_full: bool) -> None:
        """The engine has formed a batch, or none. It tries nobody while its batch `is_full`: of requests, or for want
        of memory. If it came to that without a look at any of them, it is of requests."""
        passes, self._passes = self._passes, False
        if not passes:
            if is_full and not was_full:
                self._admission.end_pass(BATCH)
            return
        cause = self._stopped
        if cause is None and (self._offered or not self.orders):
            cause = BATCH if is_full else PROMPTS
        self._admission.end_pass(cause)

    # ---- who is taken back

    @property
    def preemption(self) -> Preemption | None:
        """None: the policy takes nobody back."""
        return self._admission.preemption if self.orders else None

    @guarded
    def urgent(self, waiting: list[Any]) -> Any:
        """Of those that wait, the request for which running ones may be taken back; None if it is not for such a one to
        be admitted next. It was just matched against the cache."""
        if self._admission.urgent() is None:
            return None
        self._follow(waiting)  # it may have left
        if (job := self._admission.urgent()) is None:
            return None
        self._admission.looked_up(job, *self._match(job))
        return self._requests[job.id]

    @guarded
    def to_take_back(
        self, request: Any, missing: Missing, running: Mapping[Any, tuple[float, bool]]
    ) -> list[Any]:
        """Whom of the `running` requests to take back for `request`, which `urgent` returned, in this order. Of each
        there are the tokens of memory that there would be more without it, and whether it could go."""
        preemption, urgent = self.preemption, self._job(request)
        if preemption is None or urgent is None:
            return []
        runners = [
            Runner(job, tokens, can_go)
            for one, (tokens, can_go) in running.items()
            if (job := self._job(one)) is not None and not self._is_over(one)
        ]
        return [self._requests[job.id] for job in preemption.choose(urgent, missing, runners, self.now_s)]

    @guarded
    def took_back(self, requests: Iterable[Any], urgent: Any) -> None:
        """The engine took these back, and will queue them again when it has formed a batch."""
        job = self._job(urgent)
        assert job is not None
        for request in requests:
            if (taken := self._job(request)) is not None:
                self._taken_back[taken.id] = job

    @guarded
    def queued_again(self) -> None:
        """They all wait, or have ended."""
        self._taken_back.clear()

    def found_tokens(self, request: Any) -> int:
        """Tokens of its prompt that its first admission found in the cache."""
        job = self._job(request)
        return 0 if job is None else job.cached_tokens

    @staticmethod
    def _is_over(request: Any) -> bool:
        return bool(request.finished() or request.to_finish or not request.kv.holds_kv)

    # ---- what they got

    @guarded
    def admitted(self, request: Any) -> None:
        """`request` is in the batch."""
        path: Sequence[Hashable] = ()
        if (payers := self.queue.account.payers) is not None:
            root = (request.extra_key, request.cache_salt)
            path = path_of(root, memoryview(request.origin_input_ids), payers.block_tokens)
        job = self._enter(request)
        tree_core.served(self._tree_cache, request, job)
        if not job.retractions:
            self._counts.admitted(job, self.now_s - job.arrived_s)
        self._admission.admit(
            job,
            extend_tokens=request.extend_end - request.prefix_len,
            cached_tokens=request.prefix_len,
            path=path,
        )

    @guarded
    def continued(self, request: Any) -> None:
        """One more chunk of a prompt is in the batch; the chunk before it is in the cache."""
        job = self._job(request)
        if job is None or self.queue.is_waiting(job.id):
            self._corrected("a prompt goes on that was not known to run")
            self.admitted(request)
            return
        block = self._block(request, request.prefix_len) if self.orders else None
        self._admission.extend(job, request.extend_end - request.prefix_len, block)

    @guarded
    def computed(self, tokens: int) -> None:
        """An extend batch was formed, which by the engine's own count computes `tokens` prompt tokens."""
        self.queue.account.ledger.engine_counted(extend=tokens)
        self._check("a batch was formed")

    @property
    def record(self) -> Record:
        """The last requests; another object after `begin_anew`."""
        return self._admission.record

    def note_time(self, now_s: float) -> None:
        """It is `now_s` for what is recorded; decisions go by `tick`."""
        self.record.tick(now_s)

    @guarded
    def processed(self, batch: Any, tokens: int, before: Sequence[BatchRow]) -> None:
        """A batch's results are in: charge the output, end what has ended. `tokens` is the engine's own count of the
        output tokens, `before` what `counts.rows` said before."""
        running = []
        for row in before:
            request, job = row.request, self._job(row.request)
            if (job is None or self.queue.is_waiting(job.id)) and len(request.output_ids) > row.outputs:
                job = self._found_running(row)
            if job is not None and not self.queue.is_waiting(job.id):
                running.append((request, job))
        if batch.forward_mode.is_extend():
            self._admission.computed(job for _, job in running)
        self._times.done(self._step(batch))
        for request, job in running:
            if request.finished():
                self._finish(request, job)
            else:
                self._emit(request, job)
        if self.generates:
            self.queue.account.ledger.engine_counted(output=tokens)
        self._check("a result was processed")

    def _step(self, batch: Any) -> Step:
        """What a batch was, whose results are in."""
        mode = batch.forward_mode
        if not mode.is_extend():
            return Step(decoded=mode.is_decode(), requests=len(batch.reqs))
        mixed = len(batch.decoding_reqs or ())
        extended: Counter[str] = Counter()
        for request, tokens in zip(batch.reqs[: len(batch.reqs) - mixed], batch.extend_lens, strict=False):
            job = self._job(request)
            extended[SYSTEM if job is None or job.system else job.client] += tokens
        return Step(extended, decoded=mixed > 0)

    def _found_running(self, row: BatchRow) -> Job:
        """A request runs that no batch of ours admitted: another server has computed its prompt."""
        if self._sees_all:
            self._corrected("a request ran that was not known to be admitted")
        job = self._enter(row.request)
        self._given_tokens[job.id] = row.outputs
        self._admission.admit(job, extend_tokens=0, cached_tokens=job.prompt_tokens)
        self._admission.computed([job])
        return job

    def _check(self, when: str) -> None:
        ledger = self.queue.account.ledger
        if not ledger.check() and ledger.mismatches == 1:
            logger.error(
                "sglang-fair: charges and the engine's counters differ after %s: %s",
                when,
                ledger.first_mismatch,
            )

    def _emit(self, request: Any, job: Job) -> None:
        """Charge the output since the last call. Speculation may run past the end of the answer; its sender does not
        see that part and does not pay for it."""
        if not self.generates:
            return
        given = self._given_tokens.get(job.id, 0)
        unbooked = len(request.output_ids) - given - job.output_tokens - job.unasked_tokens
        end = len(request.output_ids) if request.finished_len is None else request.finished_len
        past_end = min(unbooked, len(request.output_ids) - end)
        self.queue.account.emit(job, unbooked - past_end, unasked_tokens=past_end)

    def _leave(self, job: Job) -> None:
        self._admission.leave(job)
        self._forget(job)

    def _finish(self, request: Any, job: Job) -> None:
        self._emit(request, job)
        self._admission.finish(job, _outcome(request))
        self._forget(job)

    def _forget(self, job: Job) -> None:
        request = self._requests.pop(job.id)
        self._given_tokens.pop(job.id, None)
        if job.id in self._numbered:
            self._numbered.remove(job.id)
            is_answered = _said(request).get("is_last") is True and _outcome(request) == "finished"
            self._interactions.end(_interaction(job), is_answered=is_answered)

    def _job(self, request: Any) -> Job | None:
        """The job of `request`; None if it is not in the books."""
        job: Job | None = getattr(request, JOB_ATTRIBUTE, None)
        return job if job is not None and self._requests.get(job.id) is request else None

    # ---- what people read

    def metrics(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """What `GET /metrics` is made of, beside `status` of the same moment; JSON-ready."""
        same = {name: status[name] for name in ("bound", "refills", "refused", "evictions", "corrections")}
        return self._counts.read(self.queue) | same

    def status(self, waiting: list[Any]) -> dict[str, Any]:
        """JSON-ready; SGLang's /server_info and our /fair carry it."""
        self.follow(waiting)
        policy = self.queue.policy
        return {
            "policy": self.policy_name,
            "config": {
                "quantum": getattr(policy, "quantum", None),
                "options": dict(shown(policy)),
                "extend_weight": self.config.cost.extend_weight,
                "output_weight": self.config.cost.output_weight,
                "client_weights": dict(self.config.client_weights or {}),
                "stall_ms": self._stall_ms,
                "target_tpot_ms": self._target_tpot_ms,
            },
            "refills": getattr(policy, "refills", None),
            "refused": self._refused,
            "evictions": 0 if (preemption := self.preemption) is None else preemption.evictions,
            "cache_tokens": None if (of := tree_core.held(self._tree_cache)) is None else largest(of),
            "corrections": self.corrections,
            "steps": None if self._admission.steps is None else dict(self._admission.steps.status()),
            **self.queue.status(),
        }

    @guarded
    def explain(self, id: str, client: str | None) -> list[dict[str, Any]]:
        """The requests with this id that are remembered, of all clients if none is given; JSON-ready."""
        return self.record.find(id, client)

    def _block(self, request: Any, prefix_tokens: int) -> Hashable | None:
        """Equal for two requests that would compute the same behind their cached prefix."""
        if self._tree_cache.disable:
            return None
        tokens = request.origin_input_ids
        starts = samples(prefix_tokens, len(tokens))
        if starts is None:
            return None
        view, digest = memoryview(tokens), blake2b(digest_size=16)
        for start in starts:
            digest.update(view[start : start + BLOCK_TOKENS])
        return prefix_tokens, request.extra_key, request.cache_salt, digest.digest()


def _outcome(request: Any) -> Outcome:
    reason = request.finished_reason
    return "aborted" if reason is None or isinstance(reason, FINISH_ABORT) else "finished"


MOST_SHOWN = 100
"""Clients whose part of the cache the status has."""


def largest(held: Mapping[str, float]) -> dict[str, int]:
    """The clients that hold most of the cache, with their tokens."""
    return {client: round(held[client]) for client in nlargest(MOST_SHOWN, held, key=held.__getitem__)}


def job_of(request: Any, apps: Apps) -> Job:
    """A new request as a job, with what the HTTP side noted about its sender. `apps` says which applications it may
    name. `call` is 0 if no gateway has numbered it."""
    said = _said(request)
    client = said.get("client", ANONYMOUS)
    return Job(
        id=request.rid,
        client=client,
        prompt_tokens=len(request.origin_input_ids),
        max_output_tokens=request.sampling_params.max_new_tokens or 0,
        system=said.get("system") is True,
        expected_output_tokens=said.get("expected_output_tokens"),
        unblocks=said.get("unblocks", 0),
        weight=said.get("weight"),
        weight_version=said.get("weight_version", 0),
        attempt=said.get("attempt", ""),
        app=apps.of(client, said.get("app", "")),
        interaction=said.get("interaction", ""),
        stage=said.get("stage", ""),
        call=said.get("call", 0),
        system_tokens=min(said.get("system_tokens", 0), len(request.origin_input_ids)),
        slo_class=said.get("slo_class", ""),
        tier=said.get("tier", 0),
    )


def _said(request: Any) -> dict[str, Any]:
    """What the HTTP side noted about its sender."""
    carried = (request.sampling_params.custom_params or {}).get(CUSTOM_PARAMS_KEY)
    return carried if isinstance(carried, dict) else {}


def _interaction(job: Job) -> Interaction:
    return Interaction(job.client, job.app, job.interaction)
