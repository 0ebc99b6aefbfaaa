"""The functions of SGLang that the overlay hooks, in one table. A hook has a few lines and decides nothing."""

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from math import lcm
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    GenerateReqInput,
    GetInternalStateReqOutput,
    SetInternalStateReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_disagg, get_parallel

from sglang_fair.common.deadlines import BadDeadline
from sglang_fair.common.fields import Wrong
from sglang_fair.core.admission import DELAYED_POLL_S
from sglang_fair.core.cost import describe
from sglang_fair.core.waits import MEMORY, PROMPTS
from sglang_fair.overlay import (
    Hook,
    application,
    config,
    heartbeat,
    kv_events,
    metrics,
    model_gate,
    preempt,
    ranks,
    refusal,
    releases,
    room,
    shared_file,
    status,
    token_ids,
    tree_core,
    watchdog,
    wire,
)
from sglang_fair.overlay.batch import input_tokens, output_tokens, rows
from sglang_fair.overlay.books import JOB_ATTRIBUTE, Loop
from sglang_fair.overlay.clock import Clock, TimedReceiver
from sglang_fair.overlay.identity import carry_client, judge_request
from sglang_fair.overlay.replica import ReplicaFairness
from sglang_fair.overlay.waiting import Candidates

logger = logging.getLogger(__name__)

DELAYED_POLL_MS = round(1000 * DELAYED_POLL_S)
"""A new request wakes the engine at once."""

FROM_CLIENTS = (
    TokenizedGenerateReqInput,
    TokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    BatchTokenizedEmbeddingReqInput,
    AbortReq,
)
"""What a scheduler receives besides orders, which take as long as they take."""


class FairSchedulePolicy(SchedulePolicy):
    """Stands where SGLang orders its queue, and leaves it as it is: `Candidates` asks for one request at a time."""

    fair: ReplicaFairness
    cut: Callable[[], Any]
    """The prompt that was cut, if there is one."""

    def calc_priority(
        self, waiting_queue: list[Any], running_batch: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        self.fair.begin_pass(waiting_queue, lambda: room.can_decode(running_batch, self.cut()))

    def shortest_prefill_chunk_limit(
        self, chunked_req: Any, waiting_queue: list[Any], budget: int, page_size: int
    ) -> int | None:
        """SGLang asks how much of the step the prompt that was cut may have. It is cut where it can be, by
        `FairPrefillAdder`."""
        return self.fair.chunk_of(chunked_req, budget)

    def _determine_active_policy(self, waiting_queue: list[Any]) -> Any:
        return self.policy


class BookkeepingPolicy(SchedulePolicy):
    """SGLang's own order, with our books kept beside it."""

    fair: ReplicaFairness

    def calc_priority(self, waiting_queue: list[Any], *args: Any, **kwargs: Any) -> None:
        self.fair.begin_pass(waiting_queue)
        super().calc_priority(waiting_queue, *args, **kwargs)


class FairPrefillAdder(PrefillAdder):
    """Asks before a request is admitted, and reports what was admitted with the engine's own numbers."""

    def __init__(
        self,
        *args: Any,
        fair: ReplicaFairness,
        cut_tokens: int,
        cut: Any = None,
        mixes: bool = False,
        looks: int = 0,
        **kwargs: Any,
    ) -> None:
        """`cut_tokens`: a prompt is cut at multiples of it; `cut`: one that was. `mixes`: those that run get a token in
        the same step. `looks`: how often SGLang iterates over its queue before it tries the first request."""
        super().__init__(*args, **kwargs)
        self.fair = fair
        self._cut_tokens = cut_tokens
        self._beside_cut = False
        self._parked: Any = None
        """The prompt that was cut before and gets no chunk in this batch."""
        if (most := fair.chunk_tokens(cut)) is not None:
            budget: Any = self
            most = max(most // cut_tokens, 1) * cut_tokens
            budget.rem_input_tokens = min(budget.rem_input_tokens, most)
            if budget.rem_chunk_tokens is not None:
                budget.rem_chunk_tokens = min(budget.rem_chunk_tokens, most)
        if mixes and fair.orders and not self.running_batch.is_empty():
            self.memory_budget.total_offset += self.running_batch.new_tokens_required_next_decode()
        fair.arm(looks)

    def add_one_req(self, req: Any, has_chunked_req: bool, *args: Any, **kwargs: Any) -> AddReqResult:
        if not self.fair.may_admit(req):
            self._give_back(req)
            return AddReqResult.CONTINUE
        before = len(self.can_run_list)
        self._beside_cut = has_chunked_req
        verdict = super().add_one_req(req, has_chunked_req, *args, **kwargs)
        if len(self.can_run_list) > before:
            if not before and self._parked is not None:
                # SGLang counts a chunk of the cut prompt in flight with each batch of prompts. One that is not in the
                # batch has no result there: its count would never be 0 again, its first token would be lost, and if it
                # is aborted, its memory.
                self._parked.inflight_middle_chunks -= 1
            self.fair.chosen += self.can_run_list[before:]
            self.fair.admitted(req)
            if self.new_chunked_req is req:
                self._keep_for(req)
        if verdict is not AddReqResult.CONTINUE:
            self.fair.stopped(MEMORY if verdict is AddReqResult.NO_TOKEN else PROMPTS)
        return verdict

    def _give_back(self, req: Any) -> None:
        """What the look-up of a Mamba model's request took, as SGLang does for the last candidate of a pass."""
        kv = req.kv
        kv.mamba_cow_src_index, kv.mamba_needs_clear = None, False
        if kv.holds_mamba and not req.session:
            self.tree_cache.req_to_token_pool.mamba_allocator.free(kv.mamba_pool_idx.unsqueeze(-1))
            kv.mamba_pool_idx = None

    def add_one_req_ignore_eos(self, req: Any) -> AddReqResult:
        """SGLang's rule without a cache."""
        limit = self.rem_chunk_tokens
        if (
            self._beside_cut
            and limit is not None
            and len(req.full_untruncated_fill_ids) - req.prefix_len > limit
        ):
            return AddReqResult.OTHER
        return super().add_one_req_ignore_eos(req)

    def _select_prefill_admission(self, req: Any, *args: Any, **kwargs: Any) -> Any:
        """SGLang has room for one cut prompt, and sees to it by giving that all that is left of a step. We leave room
        beside it (`Admission.chunk_of`), for prompts that fit whole."""
        verdict = super()._select_prefill_admission(req, *args, **kwargs)
        return AddReqResult.OTHER if self._beside_cut and getattr(verdict, "is_chunked", False) else verdict

    def add_chunked_req(self, req: Any) -> Any:
        unfinished = req
        if self.fair.goes_on(req) is not False and self._bound_chunk(req):
            before = len(self.can_run_list)
            unfinished = super().add_chunked_req(req)
            if len(self.can_run_list) > before:
                self.fair.continued(req)
        if unfinished is not None:
            self._parked = None if unfinished in self.can_run_list else unfinished
            self._keep_for(unfinished)
        return unfinished  # a parked one stays where it is, as where SGLang itself finds no room for its next chunk

    def _bound_chunk(self, req: Any) -> bool:
        """Bounds the next chunk of a cut prompt by what there is. Whether that is anything."""
        budget: Any = self
        whole = budget.chunked_req_limit
        limit = None if whole is None else whole // self._cut_tokens * self._cut_tokens or None
        if self.fair.orders:
            free = room.free_tokens(self.token_to_kv_pool_allocator, self.tree_cache)
            if len(req.full_untruncated_fill_ids) - req.prefix_len > free:
                most = free // self._cut_tokens * self._cut_tokens
                limit = most if limit is None else min(limit, most)
        budget.chunked_req_limit = limit
        return limit != 0

    def _keep_for(self, cut: Any) -> None:
        """Its whole rest and its output are taken."""
        if self.fair.orders:
            self.memory_budget.total_offset += room.kept_for(cut, self.page_size)
            self.memory_budget.current_offset += room.rest_of(cut, self.page_size)


def init_schedule_policy(original: Callable[..., None], scheduler: Any) -> None:
    hooks = [hook.target for hook in HOOKS if releases.has(hook.since)]
    missing = [target for target in hooks if target not in HookRegistry._patched]
    if missing:
        raise SystemExit(f"sglang-fair: SGLang did not apply the hooks on {', '.join(missing)}")
    name = scheduler.schedule_policy
    ours = config.SERVER_POLICIES.get(name)
    if ours is not None:
        scheduler.schedule_policy = "lpm"
        if config.read().cache_share == "on" and not releases.has(tree_core.SINCE):
            logger.warning(
                "sglang-fair: the cache is not shared out fairly before SGLang %s", tree_core.SINCE
            )
    original(scheduler)
    scheduler.fair = ReplicaFairness(
        config.read(),
        ours or name,
        orders=ours is not None,
        tree_cache=scheduler.tree_cache,
        generates=scheduler.is_generation,
        sees_all=get_disagg().disaggregation_mode == DisaggregationMode.NULL.value,
        loop=Loop(
            steps_in_order=get_parallel().pp_size == 1 and not scheduler.enable_pdmux,
            overlaps=scheduler.enable_overlap,
            mixes=scheduler.is_mixed_chunk,
        ),
    )
    scheduler.policy = (FairSchedulePolicy if ours is not None else BookkeepingPolicy)(
        scheduler.schedule_policy,
        scheduler.tree_cache,
        scheduler.enable_hierarchical_cache,
        scheduler.enable_priority_scheduling,
        scheduler.schedule_low_priority_values_first,
    )
    scheduler.policy.fair = scheduler.fair
    scheduler.policy.cut = lambda: scheduler.chunked_req
    scheduler.preempt = None
    kv_events.attach()
    parallel = get_parallel()
    together = parallel.pp_size * parallel.attn_tp_size * parallel.attn_cp_size
    # SGLang's own policies decide nothing by our clock.
    scheduler.clock = Clock(is_shared=together > 1 and ours is not None)
    scheduler.heartbeat = heartbeat.attach((parallel.dp_rank or 0) if _leads(parallel) else None)
    watchdog.show_stacks_when_asked()


def _leads(ranks: Any) -> bool:
    """Whether this rank receives the requests; the others of its group do what it does."""
    return bool(ranks.pp_rank == ranks.attn_tp_rank == ranks.attn_cp_rank == 0)


def init_load_inquirer(result: None, scheduler: Any) -> None:
    """It runs behind `init_schedule_policy`."""
    scheduler.load_inquirer = replace(scheduler.load_inquirer, get_waiting_queue=lambda: _summed(scheduler))


def _summed(scheduler: Any) -> Any:
    """What SGLang adds up in place of its waiting queue. With a storage of prompts it subtracts what that has of each
    request; requests of a diffusion model leave the queue by other ways."""
    queue = scheduler.waiting_queue
    if scheduler.enable_hicache_storage or scheduler.enable_lmcache or scheduler.dllm_config is not None:
        return queue
    return scheduler.fair.summed(queue)


def init_request_receiver(result: None, scheduler: Any) -> None:
    """It runs behind `init_schedule_policy`."""
    if scheduler.clock.is_shared:
        scheduler.request_receiver = TimedReceiver.of(
            scheduler.request_receiver,
            scheduler.clock,
            leads=_leads(get_parallel()),
            is_busy=scheduler.fair.is_busy,
        )


def process_input_requests(original: Callable[..., None], scheduler: Any, received: list[Any]) -> None:
    """Every one of SGLang's loops calls it once per iteration. `received` goes on to the next pipeline stage as it is,
    with the time in it."""
    scheduler.heartbeat.passed()
    requests = scheduler.clock.advance(received)
    scheduler.fair.tick(scheduler.clock.now_s)
    if all(isinstance(each, FROM_CLIENTS) for each in requests):
        original(scheduler, requests)
    else:  # the loop stands still while it carries out an order, as the loading of weights
        scheduler.heartbeat.computes()
        original(scheduler, requests)
        scheduler.heartbeat.passed()
    for request in scheduler.fair.expired() or ():
        refusal.drop(scheduler, request)


def run_batch(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    scheduler.heartbeat.computes()
    scheduler.fair.runs()


def get_prefill_adder_class(result: type[PrefillAdder], scheduler: Any) -> Any:
    if result is not PrefillAdder:
        raise SystemExit(f"sglang-fair: another plugin replaced the prefill adder by {result.__name__}")
    cut_tokens = lcm(scheduler.page_size, scheduler.truncation_align_size or 1)
    return partial(
        FairPrefillAdder,
        fair=scheduler.fair,
        cut_tokens=cut_tokens,
        cut=scheduler.chunked_req,
        mixes=scheduler.is_mixed_chunk,
        looks=1 if scheduler.enable_lora and scheduler.lora_drainer else 0,
    )


def form_prefill_batch(
    original: Callable[..., Any],
    scheduler: Any,
    prefill_delayer_single_pass: Any,
    running_batch: Any,
) -> Any:
    if scheduler.preempt is None:  # when the policy was made, not all of the scheduler was there
        scheduler.preempt = preempt.Preempt(scheduler)
    taken = scheduler.preempt.make_room(running_batch)
    queue = scheduler.waiting_queue = Candidates(scheduler.waiting_queue, scheduler.fair)
    was_full, mixes, cut = running_batch.batch_is_full, scheduler.is_mixed_chunk, scheduler.chunked_req
    if mixes and cut is not None and scheduler.fair.orders:
        scheduler.is_mixed_chunk = room.can_decode(running_batch, cut)
    try:
        batch, running_batch = original(scheduler, prefill_delayer_single_pass, running_batch)
        scheduler.fair.end_pass(is_full=running_batch.batch_is_full, was_full=was_full)
        if batch is not None:
            scheduler.fair.computed(input_tokens(batch))
        return batch, running_batch
    finally:
        scheduler.is_mixed_chunk = mixes
        if scheduler.waiting_queue is queue:
            scheduler.waiting_queue = queue.waiting
        scheduler.waiting_queue = scheduler.fair.put_back(scheduler.waiting_queue)
        scheduler.preempt.queue_again(taken)


def abort_on_queued_limit(result: bool, scheduler: Any, req: Any) -> bool:
    """SGLang's last question before a request joins the queue; True: it was ended instead."""
    if result:
        return result
    if (reason := room.never_fits(scheduler, req)) is not None:
        refusal.refuse(scheduler, req, reason, HTTPStatus.BAD_REQUEST)
    elif (reason := scheduler.fair.refuses(req)) is not None:
        refusal.refuse(scheduler, req, reason)
    return reason is not None


def add_request_to_queue(result: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    if scheduler.waiting_queue and scheduler.waiting_queue[-1] is req:
        scheduler.fair.arrive(req)


def send_abort_output(result: None, scheduler: Any, output: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """Whatever SGLang ends outside a batch's result, its sender is told of here."""
    scheduler.fair.ended(req)


def on_idle(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang does not sleep while a request waits, as none does for long in an idle engine of its own."""
    if scheduler.idle_sleeper is not None and scheduler.fair.only_waits():
        scheduler.idle_sleeper.poller.poll(DELAYED_POLL_MS)


def process_batch_result(
    original: Callable[..., None], scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> None:
    before = rows(batch)
    scheduler.heartbeat.computes()
    original(scheduler, batch, result, *args, **kwargs)
    scheduler.fair.note_time(scheduler.clock.latest())
    scheduler.fair.processed(batch, output_tokens(batch, result, before), before)
    # Stock publishes only every --decode-log-interval steps; a router wants to know now.
    scheduler.kv_events_publisher.publish_kv_events()


def checkpoint_into_tree(result: None, cache: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    tree_core.served(cache, request, getattr(request, JOB_ATTRIBUTE, None))


def get_internal_state(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    if (about := status.question(request.rid)) is not None:
        return GetInternalStateReqOutput(
            internal_state={status.EXPLAINED: scheduler.fair.explain(*about) or []}
        )
    result = original(scheduler, request)
    state = scheduler.fair.status(scheduler.waiting_queue)
    state["config"]["cost"] = describe(scheduler.fair.config.charges)
    if (refused := wire.refused()) is not None:
        state["refused_peers"] = refused
    result.internal_state["fair"] = state
    result.internal_state[metrics.STATE] = scheduler.fair.metrics(state)
    return result


def set_internal_state(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    weights, others = status.from_settings(request.server_args)
    result = original(scheduler, SetInternalStateReq(server_args=others))
    try:
        if result.updated:
            scheduler.fair.set_weights(weights)
    except ValueError as error:
        logger.warning("sglang-fair: %s", error)
        result.updated = False
    return result


def add_cli_args(result: Any, parser: Any, *args: Any, **kwargs: Any) -> None:
    config.add_arguments(parser)


def from_cli_args(original: Callable[..., Any], cls: type, args: Any) -> Any:
    config.adopt_arguments(args)
    heartbeat.share()
    shared_file.share(shared_file.LOAD_VARIABLE, 0)  # the scheduler that opens it first gives it its size
    ranks.connect_here(args)
    return original(cls, args)


def generate_request(original: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> Any:
    try:
        judge_request(manager, obj, request)
        carry_client(obj, request)
    except (Wrong, BadDeadline) as wrong:
        return _refused(str(wrong))
    if not manager.is_generation and isinstance(obj, GenerateReqInput):
        return _refused("this model makes embeddings: it cannot generate")
    outputs = original(manager, obj, request)
    if token_ids.are_wanted(request):
        outputs = token_ids.noted(outputs, are_new=manager.incremental_streaming_output)
    may_refuse = refusal.may_refuse(manager.server_args.schedule_policy)
    if request is None or not (may_refuse or refusal.expires(request.scope["headers"])):
        return outputs
    return refusal.noted(outputs, request, stream=bool(getattr(obj, "stream", False)))


async def _refused(reason: str) -> AsyncIterator[Any]:
    """What SGLang answers 400 to. It checks requests for embeddings so, but no others: one for text would end the
    scheduler of a model that makes embeddings."""
    raise ValueError(reason)
    yield


def tokenizer_manager_started(result: Any, manager: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    watchdog.start(manager, config.read().hang_timeout_s)
    http = application.server()
    if http is None or any(getattr(route, "path", None) == "/fair" for route in http.app.routes):
        return  # an in-process `Engine` has no application
    status.add_routes(http.app, manager)
    model_gate.add_gate(http.app, manager)
    token_ids.attach()
    of_all = refusal.may_refuse(server_args.schedule_policy)
    application.wrap(http.app, refusal.Refusals, of_all=of_all)


CONNECTIONS_S = 5
"""Time for connections to end when nothing is left to be answered."""


def configure_server(original: Callable[..., None], uvicorn: Any, *args: Any, **kwargs: Any) -> None:
    """At SIGTERM SGLang answers the requests that it has, ends its schedulers, and then has its HTTP server stop, which
    waits for its connections without end: a client that sends half a request would keep the process alive."""
    original(uvicorn, *args, **({"timeout_graceful_shutdown": CONNECTIONS_S} | kwargs))


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_ARGUMENTS = "sglang.srt.server_args.ServerArgs."
_RECORDER = "sglang.srt.mem_cache.events.KVCacheEventRecorder."
_CACHE = "sglang.srt.mem_cache.unified_cache."
_RADIX = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache."
_LOAD_FILE = "sglang.srt.managers.load_snapshot."
_LOAD = "sglang.srt.managers.scheduler_components.load_publisher."
_MEETING = "sglang.srt.distributed.bootstrap._resolve_dist_init_method"

HOOKS: tuple[Hook, ...] = (
    Hook(_ARGUMENTS + "add_cli_args", add_cli_args, HookType.AFTER),
    Hook(_ARGUMENTS + "from_cli_args", from_cli_args, HookType.AROUND),
    Hook(_TOKENIZER + "__init__", tokenizer_manager_started, HookType.AFTER),
    Hook(_TOKENIZER + "generate_request", generate_request, HookType.AROUND),
    Hook(_LOAD_FILE + "shm_path_for", shared_file.shm_path_for, HookType.AFTER),
    Hook(_LOAD + "_open_pub_socket", wire.open_load_socket, HookType.AROUND),
    Hook(_LOAD + "resolve_load_pub_range", wire.beside_kv_events, HookType.AFTER),
    Hook(_MEETING, ranks.meet_here, HookType.AFTER),
    Hook("torch.distributed.rendezvous._create_c10d_store", ranks.make_store, HookType.AROUND),
    Hook("uvicorn.config.Config.__init__", configure_server, HookType.AROUND),
    Hook(_SCHEDULER + "init_schedule_policy", init_schedule_policy, HookType.AROUND),
    Hook(_SCHEDULER + "init_load_inquirer", init_load_inquirer, HookType.AFTER),
    Hook(_SCHEDULER + "init_request_receiver", init_request_receiver, HookType.AFTER),
    Hook(_SCHEDULER + "process_input_requests", process_input_requests, HookType.AROUND),
    Hook(_SCHEDULER + "run_batch", run_batch, HookType.BEFORE),
    Hook(_SCHEDULER + "_abort_on_queued_limit", abort_on_queued_limit, HookType.AFTER),
    Hook(_SCHEDULER + "_add_request_to_queue", add_request_to_queue, HookType.AFTER),
    Hook(_SCHEDULER + "send_abort_output", send_abort_output, HookType.AFTER),
    Hook(_SCHEDULER + "_get_new_batch_prefill_raw", form_prefill_batch, HookType.AROUND),
    Hook(_SCHEDULER + "get_prefill_adder_class", get_prefill_adder_class, HookType.AFTER),
    Hook(_SCHEDULER + "process_batch_result", process_batch_result, HookType.AROUND),
    Hook(_RECORDER + "_namespace_seed", kv_events.namespace_seed, HookType.AFTER, "0.5.22"),
    Hook(_RECORDER + "record_store", kv_events.record_store, HookType.AROUND, "0.5.22"),
    Hook(_CACHE + "tree_core_registry.select_tree_core_backend", tree_core.select_tree_core_backend, HookType.AFTER,
         tree_core.SINCE),
    Hook(_RADIX + "checkpoint_into_tree", checkpoint_into_tree, HookType.AFTER, tree_core.SINCE),
    Hook(_SCHEDULER + "on_idle", on_idle, HookType.AFTER),
    Hook(_SCHEDULER + "get_internal_state", get_internal_state, HookType.AROUND),
    Hook(_SCHEDULER + "set_internal_state", set_internal_state, HookType.AROUND),
)  # fmt: skip
