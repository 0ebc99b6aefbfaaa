"""SGLang's scheduler as `Admission` and `Account` see it: requests become jobs, counters become charges.

Nothing is decided here. Everything runs on the scheduler's thread. SGLang's own `waiting_queue` remains the truth about
who waits: requests join it in one place, which is hooked, and leave it in too many places to hook (aborts, time-outs,
a full queue), so each pass compares the two and drops who has left.

After each batch that was formed, and each whose result was processed, the ledger is compared with the engine's own
counts (`counts.py`): O(batch), always.
"""

import logging
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.mem_cache.common import match_kv_cache

from sglang_fair.common.identity import ANONYMOUS
from sglang_fair.core.admission import BLOCK_TOKENS, Admission, Match, samples
from sglang_fair.core.job import Job
from sglang_fair.core.options import shown
from sglang_fair.core.payers import make_payers, path_of
from sglang_fair.core.queue import FairQueue
from sglang_fair.overlay.config import Config

logger = logging.getLogger(__name__)

CUSTOM_PARAMS_KEY = "fair"
"""Where a request carries its client inside `sampling_params.custom_params`."""


class ReplicaFairness:
    """The fairness of one SGLang scheduler.

    `orders`: our policy decides who is admitted; otherwise SGLang's own does, and only the books are kept.
    `generates`: the model emits tokens. An embedding model does not, though SGLang notes one for each request.
    """

    def __init__(
        self, config: Config, policy: str, *, orders: bool, tree_cache: Any, generates: bool = True
    ) -> None:
        self.config = config
        self.orders = orders
        self.generates = generates
        self.policy_name = policy if orders else f"sglang:{policy}"
        self.queue = FairQueue(
            config.policy(policy if orders else "fcfs"), config.cost, payers=make_payers(config.payer)
        )
        self._tree_cache = tree_cache
        self._requests: dict[str, Any] = {}
        self._refused = 0
        self._admission = Admission(self.queue, self._match)
        self._armed = False

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change clients' weights from the next charge on; what was counted stays. ValueError for a bad one."""
        self.config = self.config.with_weights(weights)
        self.queue.account.set_weights(weights)

    # ---- who waits

    def refuses(self, request: Any) -> str | None:
        """Why a request that is about to join the waiting queue may not, in the policy's words; None: it may.

        Nobody is asked about a request that SGLang has found invalid, for SGLang ends it itself, nor about one that
        was taken back from the batch, which is not new.
        """
        if not self.orders or request.to_finish or self.queue.find(request.rid) is not None:
            return None
        self.queue.tick(time.monotonic())
        reason = self.queue.refuses(job_of(request))
        self._refused += reason is not None
        return reason

    def arrive(self, request: Any) -> None:
        """A request was appended to the waiting queue: new, or taken back from the batch."""
        self.queue.tick(time.monotonic())
        job = self.queue.find(request.rid)
        if job is None:
            self._requests[request.rid] = request
            self._admission.arrive(job_of(request))
        elif not self.queue.is_waiting(request.rid):
            self._emit(request, job)
            self._admission.retract(job)

    def begin_pass(self, waiting: list[Any]) -> None:
        """A batch is about to be formed from `waiting`."""
        self.follow(waiting)
        self.queue.tick(time.monotonic())
        if self.orders:
            self._admission.begin_pass(self._tree_cache.evictable_size() + self._tree_cache.protected_size())

    def only_waits(self) -> bool:
        """Nothing runs although requests wait: the policy lets none of them go yet."""
        return self.orders and len(self.queue) > 0 and not self.queue.running()

    def follow(self, waiting: list[Any]) -> None:
        """Drop the requests that have left since the last call.

        Every arrival was reported by a hook, so the jobs are a superset of `waiting`, and the two are the same if they
        are equal in number. A running request has left if the engine dropped it without a result: aborted between two
        chunks, or in the batch when memory ran out.
        """
        if len(self.queue) != len(waiting):
            present = {request.rid for request in waiting}
            for job in [job for job in self.queue.waiting() if job.id not in present]:
                self._admission.leave(job)
                self._forget(job.id)
            assert len(self.queue) == len(waiting), "a request joined the queue unseen"
        for job in list(self.queue.running()):
            request = self._requests[job.id]
            if request.finished() or not request.kv.holds_kv:
                self._finish(request, job)

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

    def arm(self) -> None:
        """The next iteration over the waiting queue is SGLang's admission loop."""
        self._armed = self.orders

    def disarm(self) -> bool:
        armed, self._armed = self._armed, False
        return armed

    def offers(self) -> Iterator[Any]:
        """Candidates in the policy's order."""
        return (self._requests[job.id] for job in self._admission.candidates())

    def may_admit(self, request: Any) -> bool:
        """Whether `request`, which the engine has just matched against its cache, is to be admitted if it fits."""
        return not self.orders or self._admission.confirm(self._job(request), *self._matched(request))

    # ---- what they got

    def admitted(self, request: Any) -> None:
        """`request` is in the batch."""
        path: Sequence[Hashable] = ()
        if (payers := self.queue.account.payers) is not None:
            root = (request.extra_key, request.cache_salt)
            path = path_of(root, memoryview(request.origin_input_ids), payers.block_tokens)
        self._admission.admit(
            self._job(request),
            extend_tokens=request.extend_end - request.prefix_len,
            cached_tokens=request.prefix_len,
            path=path,
        )

    def continued(self, request: Any) -> None:
        """One more chunk of a prompt is in the batch; the chunk before it is in the cache."""
        block = self._block(request, request.prefix_len) if self.orders else None
        self._admission.extend(self._job(request), request.extend_end - request.prefix_len, block)

    def computed(self, tokens: int) -> None:
        """An extend batch was formed, which by the engine's own count computes `tokens` prompt tokens."""
        self.queue.account.ledger.engine_counted(extend=tokens)
        self._check("a batch was formed")

    def processed(self, batch: Any, tokens: int) -> None:
        """A batch's results are in: charge the output, end what has ended. `tokens` is the engine's own count of the
        output tokens."""
        running = [
            (request, job)
            for request in batch.reqs
            if (job := self.queue.find(request.rid)) is not None and not self.queue.is_waiting(request.rid)
        ]
        if batch.forward_mode.is_extend():
            self._admission.computed(job for _, job in running)
        for request, job in running:
            if request.finished():
                self._finish(request, job)
            else:
                self._emit(request, job)
        if self.generates:
            self.queue.account.ledger.engine_counted(output=tokens)
        self._check("a result was processed")

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
        unbooked = len(request.output_ids) - job.output_tokens - job.unasked_tokens
        end = len(request.output_ids) if request.finished_len is None else request.finished_len
        past_end = min(unbooked, len(request.output_ids) - end)
        self.queue.account.emit(job, unbooked - past_end, unasked_tokens=past_end)

    def _finish(self, request: Any, job: Job) -> None:
        self._emit(request, job)
        self._admission.finish(job)
        self._forget(job.id)

    def _forget(self, request_id: str) -> None:
        del self._requests[request_id]

    def _job(self, request: Any) -> Job:
        job = self.queue.find(request.rid)
        assert job is not None, f"{request.rid} is not in the books"
        return job

    # ---- what people read

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
            },
            "refills": getattr(policy, "refills", None),
            "refused": self._refused,
            **self.queue.status(),
        }

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


def job_of(request: Any) -> Job:
    """A new request as a job, with what the HTTP side noted about its sender."""
    carried = (request.sampling_params.custom_params or {}).get(CUSTOM_PARAMS_KEY)
    said = carried if isinstance(carried, dict) else {}
    return Job(
        id=request.rid,
        client=said.get("client", ANONYMOUS),
        prompt_tokens=len(request.origin_input_ids),
        max_output_tokens=request.sampling_params.max_new_tokens or 0,
        system=request.rid.startswith(HEALTH_CHECK_RID_PREFIX),
        expected_output_tokens=said.get("expected_output_tokens"),
        unblocks=said.get("unblocks", 0),
    )
