"""Running requests are taken back for one that is due and does not fit (`core.preemption` says which).

    make_room      before a batch is formed: the memory of those that go is given up, but what they computed goes into
                   the prefix tree, from where it is evicted last (with `--enable-hierarchical-cache`, to the host).
                   They keep their outputs, and leave the running batch
    (SGLang)       forms the next batch
    queue_again    only then do they wait again. Admitted in this batch, they would take the result of the step that is
                   still under way, which is an old one, for their next token

SGLang's own retraction (`ScheduleBatch.retract_decode`) and preemption (`PrefillAdder.preempt_to_schedule`) are the
models; both give the computed tokens up. A request that goes on has the tokens of its prompt and of its output looked
up in the cache, and computes those that are not there any more, the last one at least.

Memory is counted as SGLang's admission counts it: what is free or may be evicted, without what is kept for the outputs
of those that run, and for the whole of the prompt that was cut (`room`).
"""

import logging
from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.runtime_context import get_disagg, get_parallel

from sglang_fair.core.preemption import Missing
from sglang_fair.overlay.replica import ReplicaFairness
from sglang_fair.overlay.room import free_tokens, kept_for, most_output

logger = logging.getLogger(__name__)


def why_not(scheduler: Any) -> str | None:
    """What this engine has with which running requests cannot be taken back and go on."""
    for present, what in (
        (scheduler.tree_cache.disable, "there is no prefix cache"),
        (scheduler.tree_cache.supports_mamba(), "the model has Mamba states"),
        (scheduler.is_hybrid_swa, "the model has sliding windows"),
        (not scheduler.spec_algorithm.is_none(), "speculative decoding"),
        (
            get_disagg().disaggregation_mode != DisaggregationMode.NULL.value,
            "prefill and decode on different servers",
        ),
        (get_parallel().pp_size > 1, "pipeline parallelism"),
        (scheduler.require_mlp_sync, "data-parallel attention"),
        (scheduler.enable_hisparse, "hierarchical sparse attention"),
    ):
        if present:
            return what
    return None


class Preempt:
    """Takes requests of one scheduler back."""

    def __init__(self, scheduler: Any) -> None:
        fair: ReplicaFairness = scheduler.fair
        self._scheduler = scheduler
        self._reason = why_not(scheduler) if fair.preemption is not None else "policy"
        if fair.preemption is not None and self._reason is not None:
            logger.warning("sglang-fair: no running request is taken back for another: %s", self._reason)

    def make_room(self, running_batch: Any) -> list[Any]:
        """Takes back what it must; returns them, and `queue_again` is to be called with them."""
        scheduler, fair = self._scheduler, self._scheduler.fair
        if self._reason is not None or running_batch.is_empty() or not scheduler.waiting_queue:
            return []
        request = fair.urgent(scheduler.waiting_queue)
        if request is None:
            return []
        missing = self._missing(request, running_batch.reqs)
        if missing.tokens <= 0 and missing.places <= 0:
            running_batch.batch_is_full = False  # SGLang tries no other one until a request has left
            return []
        held = {one: (self._held_tokens(one), _can_go_on(one)) for one in running_batch.reqs}
        chosen = fair.to_take_back(request, missing, held) or []
        most = scheduler.max_queued_requests
        if not chosen or (most is not None and len(scheduler.waiting_queue) + len(chosen) > most):
            return []
        taken: list[Any] = []
        for one in chosen:
            release_kv_cache(one, scheduler.tree_cache, checkpoint=True)
            one.reset_for_retract()
            taken.append(one)
            left = [other for other in running_batch.reqs if not any(other is gone for gone in taken)]
            missing = self._missing(request, left)
            if missing.tokens <= 0 and missing.places <= 0:
                break  # more of its tokens were its own than was thought
        gone = {id(one) for one in taken}
        kept = [at for at, one in enumerate(running_batch.reqs) if id(one) not in gone]
        running_batch.filter_batch(keep_indices=kept)
        running_batch.batch_is_full = False
        fair.took_back(taken, request)
        return taken

    def queue_again(self, taken: list[Any]) -> None:
        """A batch was formed, or none."""
        for one in taken:
            self._scheduler._add_request_to_queue(one, is_retracted=True)
        if taken:
            self._scheduler.fair.queued_again()

    def _missing(self, request: Any, running: list[Any]) -> Missing:
        """What `request`, which was just looked up, needs beside `running`."""
        scheduler = self._scheduler
        tree = scheduler.tree_cache
        lock = tree.lock(request.last_node)
        try:
            free = free_tokens(scheduler.token_to_kv_pool_allocator, tree)
        finally:
            tree.unlock(lock)
        kept = sum(self._reserved_tokens(one) for one in running) + kept_for(
            scheduler.chunked_req, scheduler.page_size
        )
        known = len(request.origin_input_ids) + len(request.output_ids)
        needed = known - request.prefix_len + most_output(request) + scheduler.page_size
        allocatable = scheduler.get_num_allocatable_reqs(len(running))
        return Missing(needed - (free - kept) + 1, max(0, 1 - allocatable))

    def _held_tokens(self, request: Any) -> float:
        """What there would be more without it; a prefix that it found in the cache may be others' too."""
        found: int = self._scheduler.fair.found_tokens(request)
        own = len(request.origin_input_ids) + len(request.output_ids) - found
        return max(0, own) + self._reserved_tokens(request)

    def _reserved_tokens(self, request: Any) -> float:
        """As SGLang's admission reckons."""
        reckons = SimpleNamespace(new_token_ratio=self._scheduler.new_token_ratio_tracker.current)
        return max(0.0, float(PrefillAdder._get_running_request_total_token_offset(reckons, request)))


def _can_go_on(request: Any) -> bool:
    """It has made a first token, and what it made is kept when it is taken back."""
    return bool(
        request.output_ids
        and request.beam_group is None
        and request.session is None
        and request.input_embeds is None
        and not request.skip_radix_cache_insert
    )
