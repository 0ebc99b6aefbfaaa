"""The fair queue of one SGLang scheduler: its requests as jobs, its counters as charges.

Everything here runs on the scheduler's thread. What is decided, is decided in `FairQueue`; this file only
translates. SGLang's own `waiting_queue` stays the truth about who waits: requests join it in one place, which
is hooked, and leave it in more ways than one would hook (aborts, time-outs, a full queue), so each pass
compares and follows.

After each batch that was formed, and each whose result was processed, the books are compared with the engine's
own counts (`counts.py`): O(batch), always.
"""

import logging
import time
from collections.abc import Hashable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.mem_cache.common import match_kv_cache

from sglang_fair.common.identity import ANONYMOUS
from sglang_fair.core.job import Job
from sglang_fair.core.ledger import SYSTEM
from sglang_fair.core.lookups import LookUps
from sglang_fair.core.options import shown
from sglang_fair.core.payers import make_payers, path_of
from sglang_fair.core.queue import FairQueue
from sglang_fair.overlay.config import Config

logger = logging.getLogger(__name__)

CUSTOM_PARAMS_KEY = "fair"
"""Where a request carries its client inside `sampling_params.custom_params`."""

CORRECTIONS_PER_PASS = 16
"""Candidates that may turn out worse than thought, and are put back, in one pass."""

BLOCK_TOKENS = 32
"""Two requests that agree on this many uncached tokens are taken to share them; SGLang's own threshold."""


class ReplicaFairness:
    """`orders`: our policy decides who is admitted. Otherwise SGLang's own does, and we keep the books.

    `generates`: the model puts out tokens; the one that SGLang notes for an embedding is none.
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
        self._look_ups = LookUps()
        self._tree_tokens = 0
        self._corrections_left = 0
        self._dealt_with: Job | None = None
        """The candidate that `may_admit` put back or held itself."""
        self._armed = False

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change clients' weights from the next charge on; what was counted stays. ValueError for a bad one."""
        self.config = self.config.with_weights(weights)
        self.queue.set_weights(weights)

    # ---- who waits

    def refuses(self, request: Any) -> str | None:
        """Why a request that is about to join the waiting queue may not, in the policy's words. One that SGLang
        itself has found invalid may: it says so itself, and one that was taken back from the batch is no new one."""
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
            job = job_of(request)
            self.queue.arrive(job)
            self._look_ups.arrive(job)
        elif not self.queue.is_waiting(request.rid):
            self._emit(request, job)
            self.queue.retract(job)
            self._look_ups.arrive(job)

    def begin_pass(self, waiting: list[Any]) -> None:
        """A batch is about to be formed from `waiting`."""
        self.follow(waiting)
        self.queue.tick(time.monotonic())
        if self.orders:
            self._look_up_prefixes()
        self.queue.begin_pass()
        self._corrections_left = CORRECTIONS_PER_PASS
        self._dealt_with = None

    def only_waits(self) -> bool:
        """Nothing runs, though somebody waits: the policy lets nobody go yet."""
        return self.orders and len(self.queue) > 0 and not self.queue.running()

    def follow(self, waiting: list[Any]) -> None:
        """Take note of who has gone since the last look.

        Every arrival was reported by a hook, so the jobs are a superset of `waiting`, and equal in number
        only when they are the same. A running request is gone when the engine dropped it without a result:
        aborted between two chunks, or in the batch when memory ran out.
        """
        if len(self.queue) != len(waiting):
            present = {request.rid for request in waiting}
            for job in [job for job in self.queue.waiting() if job.id not in present]:
                self.queue.leave(job.id)
                self._look_ups.leave(job)
                self._forget(job.id)
            assert len(self.queue) == len(waiting), "a request joined the queue unseen"
        for job in list(self.queue.running()):
            request = self._requests[job.id]
            if request.finished() or not request.kv.holds_kv:
                self._finish(request, job)

    def _look_up_prefixes(self) -> None:
        """Bounded work, spent on those whose prefix may be another one now."""
        tokens = self._tree_cache.evictable_size() + self._tree_cache.protected_size()
        if tokens != self._tree_tokens:
            self._tree_tokens = tokens
            self._look_ups.changed()
        for job in self._look_ups.due():
            request = self._requests[job.id]
            prompt = request.origin_input_ids
            known = prompt + request.output_ids if request.output_ids else prompt
            match_kv_cache(
                request, self._tree_cache, known, max_prefix_len=request._compute_max_prefix_len(len(known))
            )
            self._looked_up(request, job)

    def _looked_up(self, request: Any, job: Job) -> None:
        """The engine matched `request` against its cache."""
        block = self._block(request, request.prefix_len)
        self.queue.rematch(job, request.num_matched_prefix_tokens, block)
        self._look_ups.looked_up(job)

    # ---- who goes next

    def arm(self) -> None:
        """The next iteration over the waiting queue is SGLang's admission loop."""
        self._armed = self.orders

    def disarm(self) -> bool:
        armed, self._armed = self._armed, False
        return armed

    def offers(self) -> Iterator[Any]:
        """Candidates in the policy's order, each chosen after the one before was charged or passed over."""
        while (job := self.queue.next()) is not None:
            yield self._requests[job.id]
            if self._dealt_with is job:
                self._dealt_with = None
            elif self.queue.is_waiting(job.id):
                self.queue.hold(job)

    def may_admit(self, request: Any) -> bool:
        """After the engine's own look-up, which decides: False if the tokens that it would compute are being
        computed already, or if it has lost cached tokens and is no longer the one to go next."""
        job = self.queue.find(request.rid)
        assert job is not None, f"{request.rid} is not in the books"
        if not self.orders:
            return True
        believed_tokens = job.prefix_tokens
        self._looked_up(request, job)
        if self.queue.is_being_computed(job):
            self.queue.defer(job)
            self._dealt_with = job
            return False
        if job.prefix_tokens < believed_tokens and self._corrections_left:
            self._corrections_left -= 1
            if self.queue.next() is not job:
                self._dealt_with = job
                return False
        return True

    # ---- what they got

    def admitted(self, request: Any) -> None:
        job = self.queue.find(request.rid)
        assert job is not None, f"{request.rid} is not in the books"
        if (payers := self.queue.payers) is not None:
            root = (request.extra_key, request.cache_salt)
            job.path = path_of(root, memoryview(request.origin_input_ids), payers.block_tokens)
        self.queue.admit(
            job, extend_tokens=request.extend_end - request.prefix_len, cached_tokens=request.prefix_len
        )
        self._look_ups.leave(job)

    def continued(self, request: Any) -> None:
        """One more chunk of a prompt."""
        job = self.queue.find(request.rid)
        assert job is not None, f"{request.rid} is not in the books"
        tokens = request.extend_end - request.prefix_len
        if job.block is not None:
            self._look_ups.inserted(job.block)  # the chunk before this one is in the cache
        self.queue.extend(job, tokens, self._block(request, request.prefix_len) if self.orders else None)

    def computed(self, tokens: int) -> None:
        """An extend batch was formed; the engine's own word on how many prompt tokens it computes."""
        self.queue.ledger.engine_counted(extend=tokens)
        self._check("a batch was formed")

    def processed(self, batch: Any, tokens: int) -> None:
        """A batch's results are in: charge what came out, end what has ended. `tokens` is the engine's own word
        on how many output tokens there were."""
        is_extend = batch.forward_mode.is_extend()
        if is_extend:
            self._look_ups.changed()
        for request in batch.reqs:
            job = self.queue.find(request.rid)
            if job is None or self.queue.is_waiting(request.rid):
                continue
            if is_extend:
                if job.block is not None:
                    self._look_ups.inserted(job.block)
                self.queue.prefilled(job)
            if request.finished():
                self._finish(request, job)
            else:
                self._emit(request, job)
        if self.generates:
            self.queue.ledger.engine_counted(output=tokens)
        self._check("a result was processed")

    def _check(self, when: str) -> None:
        ledger = self.queue.ledger
        if not ledger.check() and ledger.mismatches == 1:
            logger.error(
                "sglang-fair: charges and the engine's counters differ after %s: %s",
                when,
                ledger.first_mismatch,
            )

    def _emit(self, request: Any, job: Job) -> None:
        """Charge what came out since the last look. Speculation may run past the end of the answer, which its
        sender does not see: that is the server's."""
        if not self.generates:
            return
        unbooked = len(request.output_ids) - job.output_tokens - job.unasked_tokens
        end = len(request.output_ids) if request.finished_len is None else request.finished_len
        past_end = min(unbooked, len(request.output_ids) - end)
        self.queue.emit(job, unbooked - past_end)
        if past_end > 0:
            job.unasked_tokens += past_end
            self.queue.ledger.record(SYSTEM, output=past_end)

    def _finish(self, request: Any, job: Job) -> None:
        self._emit(request, job)
        self.queue.finish(job.id)
        self._forget(job.id)

    def _forget(self, request_id: str) -> None:
        del self._requests[request_id]

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
        """A digest of the first uncached tokens and of samples of the prefix; equal where the same would be
        computed."""
        if self._tree_cache.disable:
            return None
        tokens = request.origin_input_ids
        end = prefix_tokens + BLOCK_TOKENS
        if len(tokens) < end:
            return None
        view, middle = memoryview(tokens), prefix_tokens // 2
        digest = blake2b(view[prefix_tokens:end], digest_size=16)
        digest.update(view[:BLOCK_TOKENS])
        digest.update(view[middle : middle + BLOCK_TOKENS])
        return prefix_tokens, request.extra_key, request.cache_salt, digest.digest()


def job_of(request: Any) -> Job:
    """A new request as the policy sees it, with what the HTTP side wrote into it."""
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
