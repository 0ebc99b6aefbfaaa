"""What differs between the releases of SGLang that the overlay runs in. Nothing else of the project knows of it.

The overlay is written against the newest release. `LACKS` says what the older ones have not, and `adapt`, which runs
before the hooks are attached, gives SGLang what it lacks under the name that it has in the newest. So an old release is
given up by the removal of its rows. `SIGNATURES` has what is hooked, overridden, called and read; `sources` looks it up
in a release, without an import of it.
"""

import functools
import json
import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any, NamedTuple

TESTED = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")
"""The releases in which the overlay's tests pass. The last is the one that `sglang-fair install` takes."""
NEWEST = TESTED[-1]

UNSUPPORTED = "SGLANG_FAIR_UNSUPPORTED_SGLANG"
"""The environment variable of --unsupported-sglang: 1, or the version that was looked through already."""


def is_tested(version: str) -> bool:
    """Whether SGLang's `version` is one of them; a mark that its builder put behind it, as +cu130, is not read."""
    return version.partition("+")[0] in TESTED


def number(version: str) -> tuple[int, ...]:
    """To compare releases by; what stands behind the numbers, as in 0.5.24rc1, is not read."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


@functools.cache
def found() -> str:
    """SGLang's version here."""
    return metadata.version("sglang")


def has(since: str) -> bool:
    """Whether SGLang here is as new as this release."""
    return number(found()) >= number(since)


class Lack(NamedTuple):
    """What releases before `since` have not."""

    since: str
    what: str
    instead: Callable[[], None] | None
    """Gives SGLang the same; None: it goes without."""


def lacking(version: str) -> list[Lack]:
    """What SGLang's `version` lacks, the latest first."""
    return [lack for lack in LACKS if number(version) < number(lack.since)]


@functools.cache
def adapt() -> None:
    """Give SGLang in this process what it lacks of the newest one's names; before `hooks` is imported."""
    for lack in reversed(lacking(found())):
        if lack.instead is not None:
            lack.instead()


def _module(name: str) -> Any:
    return import_module(f"sglang.srt.{name}")


SIGNATURES = """
server_args.ServerArgs
  add_cli_args(parser)
  from_cli_args(cls, args)
entrypoints.engine
  _set_envs_and_config(server_args)
entrypoints.openai.serving_chat.OpenAIServingChat
  _generate_stream_content(self, content, index, request, ...)
managers.tokenizer_manager.TokenizerManager
  __init__(self, server_args, port_args)
  generate_request(self, obj, request)
  _validate_one_request(self, obj, input_ids)
  auto_create_handle_loop(self)
  is_healthy(self)                                                           since 0.5.23
  .rid_to_state .server_status .gracefully_exit .model_config .is_generation
managers.scheduler.Scheduler
  init_schedule_policy(self)
  init_load_inquirer(self)
  init_request_receiver(self)
  process_input_requests(self, recv_reqs)
  run_batch(self, batch)
  on_idle(self)
  get_prefill_adder_class(self)                                              since 0.5.22
  _get_new_batch_prefill_raw(self, prefill_delayer_single_pass, running_batch)
  _add_request_to_queue(self, req, is_retracted)
  _abort_on_queued_limit(self, recv_req)
  _release_aborted_request(self, req)
  send_abort_output(self, abort_req, req)                                    since 0.5.23
  process_batch_result(self, batch, result)
  get_internal_state(self, recv_req)
  set_internal_state(self, recv_req)
  get_num_allocatable_reqs(self, running_bs)
  .waiting_queue .chunked_req .policy .schedule_policy .tree_cache .token_to_kv_pool_allocator .page_size
  .truncation_align_size .is_mixed_chunk .enable_overlap .load_inquirer .request_receiver .idle_sleeper
  .new_token_ratio_tracker .max_total_num_tokens .ipc_channels
  .ps                                                                        until 0.5.20
managers.schedule_policy
  match_prefix_for_req(tree_cache, req, token_ids, *, include_req)           until 0.5.21
managers.schedule_policy.SchedulePolicy
  __init__(self, policy, tree_cache, enable_hierarchical_cache, enable_priority_scheduling, ...)
  calc_priority(self, waiting_queue, running_batch)
  shortest_prefill_chunk_limit(self, chunked_req, waiting_queue, budget, page_size)  since 0.5.21
  _determine_active_policy(self, waiting_queue)
managers.schedule_policy.PrefillAdder
  add_one_req(self, req, has_chunked_req, truncation_align_size)
  add_one_req_ignore_eos(self, req)
  add_chunked_req(self, req)
  _select_prefill_admission(self, req, ...)
  .can_run_list .new_chunked_req .rem_input_tokens .rem_chunk_tokens .running_batch .page_size
  .memory_budget .chunked_req_limit                                          since 0.5.21
  .rem_total_token_offset .cur_rem_token_offset .rem_total_tokens            until 0.5.20
managers.schedule_batch.Req
  finished(self)
  reset_for_retract(self)
  _compute_max_prefix_len(self, input_len)
  .origin_input_ids .output_ids .sampling_params .kv .last_node .extra_key .cache_salt .num_matched_prefix_tokens
  .full_untruncated_fill_ids .inflight_middle_chunks .is_retracted .to_finish .finished_reason .finished_len .beam_group
  .prefix_len .extend_end .discard_output_reason                             since 0.5.22
  .prefix_indices .extend_range                                              until 0.5.21
managers.schedule_batch.ScheduleBatch
  check_decode_mem(self)
  new_tokens_required_next_decode(self)
  filter_batch(self, *, keep_indices)
  .reqs .forward_mode .extend_lens .extend_num_tokens .decoding_reqs .batch_is_full .is_prefill_only
managers.utils.GenerationBatchResult
  copy_to_cpu(self, return_logprob)
managers.tp_worker.TpModelWorker
  forward_batch_generation(self, batch)
managers.load_snapshot
  shm_path_for(ipc_name)
managers.scheduler_components.load_publisher
  _open_pub_socket(endpoint)
managers.scheduler_components.request_receiver.SchedulerRequestReceiver
  _broadcast_reqs_across_ranks(self, recv_reqs, local_reqs)
distributed.bootstrap
  _resolve_dist_init_method(*, dist_port)
disaggregation.kv_events.ZmqEventPublisher
  _socket_setup(self)
disaggregation.kv_events.EventPublisherFactory
  register_publisher(cls, name, ctor)
mem_cache.base_prefix_cache.BasePrefixCache
  lock(self, node)                                                           since 0.5.22
  unlock(self, lock)                                                         since 0.5.22
  inc_lock_ref(self, node)                                                   until 0.5.21
mem_cache.common
  match_kv_cache(req, tree_cache, token_ids, *, max_prefix_len)              since 0.5.22
  release_kv_cache(req, tree_cache, *, checkpoint)                           since 0.5.22
  release_kv_cache(req, tree_cache, is_insert)                               until 0.5.21
mem_cache.allocator.base.BaseTokenToKVPoolAllocator
  create_prefill_budget(self, tree_cache)                                    since 0.5.21
mem_cache.events.KVCacheEventRecorder
  _namespace_seed(self, node)                                                since 0.5.22
  record_store(self, node, medium)
mem_cache.rust_tree_core.adapter
  _kv_event_from_tagged(event, lora_names, dynamo_format)                    since 0.5.23
mem_cache.unified_cache.tree_core_registry
  register_tree_core_backend(name, factory)
  select_tree_core_backend(params)                                           since 0.5.21
mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore
  _new_node(self, priority)
  _split_node(self, key, child, split_len)
  _update_evictable_leaf_sets(self, node)
  _unregister_node(self, node)
  evict_device_start(self, component_type, request_cnt)
  evict_device_next_node(self, component_type, tracker)
  evict_device_end(self, component_type)
mem_cache.unified_radix_cache.UnifiedRadixCache
  checkpoint_into_tree(self, req, ...)                                        since 0.5.22
plugins.hook_registry.HookRegistry
  register(cls, target, hook, hook_type)
utils.auth
  auth_level(level)
"""
"""Below each module or class of sglang.srt its functions, each with the parameters that we know, further ones being
optional (but for `...`), and its attributes; behind them the releases that have them, where it is not all."""


# ---- before 0.5.23


def _tell_of_aborts() -> None:
    """`Scheduler.send_abort_output`: whatever the scheduler ends itself passes it, on the way to its sender."""
    scheduler, aborts = _module("managers.scheduler").Scheduler, _module("managers.io_struct").AbortReq
    requests, init = _module("managers.schedule_batch").Req, scheduler.init_schedule_policy

    @functools.wraps(init)
    def init_schedule_policy(self: Any) -> None:
        sender = self.ipc_channels.send_to_tokenizer
        if not hasattr(sender, "send_plain"):
            sender.send_plain = sender.send_output
            sender.send_output = send_output.__get__(self)
        init(self)

    def send_output(self: Any, output: Any, recv_obj: Any = None) -> None:
        if isinstance(output, aborts) and isinstance(recv_obj, requests):
            self.send_abort_output(output, recv_obj)
        else:
            self.ipc_channels.send_to_tokenizer.send_plain(output, recv_obj)

    def send_abort_output(self: Any, abort_req: Any, req: Any) -> None:
        self.ipc_channels.send_to_tokenizer.send_plain(abort_req, req)

    scheduler.init_schedule_policy, scheduler.send_abort_output = init_schedule_policy, send_abort_output


def _healthy() -> None:
    module = _module("managers.tokenizer_manager")

    def is_healthy(self: Any) -> bool:
        return not self.gracefully_exit and self.server_status == module.ServerStatus.Up

    module.TokenizerManager.is_healthy = is_healthy


# ---- before 0.5.22


def _fields_of_requests() -> None:
    """The prefix that was found, and the end of what is computed, as numbers."""
    request = _module("managers.schedule_batch").Req
    request.prefix_len = property(lambda self: len(self.prefix_indices))
    request.extend_end = property(lambda self: None if self.extend_range is None else self.extend_range.end)
    request.extend_len = property(lambda self: self.extend_range.length)
    request.discard_output_reason = None


def _cache_calls() -> None:
    common, cache = _module("mem_cache.common"), _module("mem_cache.base_prefix_cache").BasePrefixCache
    match, release = _module("managers.schedule_policy").match_prefix_for_req, common.release_kv_cache

    def match_kv_cache(req: Any, tree_cache: Any, token_ids: Any, *, max_prefix_len: int) -> Any:
        found = match(tree_cache, req, token_ids[:max_prefix_len], include_req=True)
        req.num_matched_prefix_tokens = min(req.prefix_len + req.host_hit_length, max_prefix_len)
        return found

    def release_kv_cache(
        req: Any, tree: Any, is_insert: bool = True, *, checkpoint: bool | None = None
    ) -> None:
        release(
            req, tree, is_insert=is_insert if checkpoint is None else checkpoint
        )  # SGLang imports it late, too

    def lock(self: Any, node: Any) -> Any:
        return node, self.inc_lock_ref(node).to_dec_params() if self.is_tree_cache() else None

    def unlock(self: Any, lock: Any) -> None:
        self.dec_lock_ref(*lock)

    common.match_kv_cache, common.release_kv_cache = match_kv_cache, release_kv_cache
    cache.lock, cache.unlock = lock, unlock


def _class_of_adder() -> None:
    """`Scheduler.get_prefill_adder_class`: SGLang has the class under a name of its module."""
    module = _module("managers.scheduler")
    stock, form = module.PrefillAdder, module.Scheduler._get_new_batch_prefill_raw

    @functools.wraps(form)
    def _get_new_batch_prefill_raw(self: Any, *args: Any, **kwargs: Any) -> Any:
        module.PrefillAdder = self.get_prefill_adder_class()
        try:
            return form(self, *args, **kwargs)
        finally:
            module.PrefillAdder = stock

    module.Scheduler._get_new_batch_prefill_raw = _get_new_batch_prefill_raw
    module.Scheduler.get_prefill_adder_class = lambda self: stock


def _bound_publisher() -> None:
    """`"bind": true` of --kv-events-config: KV events are published at an address of this machine."""
    module = _module("disaggregation.kv_events")
    publisher, factory = module.ZmqEventPublisher, module.EventPublisherFactory
    create, set_up = factory.create, publisher._socket_setup

    @functools.wraps(create)
    def bound(cls: Any, config: str | None, attn_dp_rank: int = 0) -> Any:
        publisher.binds = json.loads(config or "{}").get("bind") is True
        return create(config, attn_dp_rank)

    @functools.wraps(set_up)
    def _socket_setup(self: Any) -> None:
        if self.binds and self._pub is None:
            self._pub = self._ctx.socket(module.zmq.PUB)
            self._pub.set_hwm(self._hwm)
            self._pub.bind(self._endpoint)
        set_up(self)

    publisher.binds, publisher._socket_setup, factory.create = False, _socket_setup, classmethod(bound)


# ---- before 0.5.21


class _Offsets:
    """`PrefillAdder.memory_budget`, of which only what is taken was there, as the adder's own."""

    def __init__(self, adder: Any) -> None:
        object.__setattr__(self, "_adder", adder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adder, _OFFSETS[name])

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._adder, _OFFSETS[name], value)


_OFFSETS = {"total_offset": "rem_total_token_offset", "current_offset": "cur_rem_token_offset"}


def _memory() -> None:
    """SGLang's count of memory, and a request's part of the pool."""
    policy, allocators = _module("managers.schedule_policy"), _module("mem_cache.allocator.base")
    adder = policy.PrefillAdder
    adder.memory_budget = property(_Offsets)
    _module("managers.scheduler").Scheduler.kv_shard_widening = 1

    def create_prefill_budget(self: Any, tree_cache: Any) -> Any:
        view = SimpleNamespace(
            token_to_kv_pool_allocator=self,
            tree_cache=tree_cache,
            is_all_swa=isinstance(self, policy.PureSWATokenToKVPoolAllocator),
            is_hybrid_swa=isinstance(
                self,
                (policy.SWATokenToKVPoolAllocator, policy.DeepSeekV4HiSparseTokenToKVPoolAllocator),
            ),
            is_hybrid_ssm_cache=tree_cache.supports_mamba(),
            rem_total_token_offset=0,
        )
        return SimpleNamespace(remaining_total=adder.rem_total_tokens.fget(view))

    allocators.BaseTokenToKVPoolAllocator.create_prefill_budget = create_prefill_budget


def _names_of_scheduler() -> None:
    """`get_parallel().dp_rank`, and that there is no LMCache that the scheduler waits for."""
    scheduler, context = _module("managers.scheduler").Scheduler, _module("runtime_context").ParallelContext
    init = scheduler.init_schedule_policy

    @functools.wraps(init)
    def init_schedule_policy(self: Any) -> None:
        context.dp_rank = self.ps.dp_rank  # there is one scheduler in a process
        init(self)

    scheduler.init_schedule_policy, scheduler.enable_lmcache = init_schedule_policy, False


def _limit_of_chunks() -> None:
    """`PrefillAdder.chunked_req_limit`, for which SGLang asks its policy."""
    module, policy = _module("managers.scheduler"), _module("managers.schedule_policy")
    add, form = policy.PrefillAdder.add_chunked_req, module.Scheduler._get_new_batch_prefill_raw

    @functools.wraps(add)
    def add_chunked_req(self: Any, req: Any) -> Any:
        whole, limit = self.rem_chunk_tokens, self.chunked_req_limit
        if whole is None or limit is None or limit >= whole:
            return add(self, req)
        self.rem_chunk_tokens = limit
        unfinished = add(self, req)
        self.rem_chunk_tokens += whole - limit
        return unfinished

    @functools.wraps(form)
    def _get_new_batch_prefill_raw(self: Any, *args: Any, **kwargs: Any) -> Any:
        make = module.PrefillAdder

        def limited(*given: Any, **named: Any) -> Any:
            adder, cut = make(*given, **named), self.chunked_req
            if cut is not None:
                adder.chunked_req_limit = self.policy.shortest_prefill_chunk_limit(
                    cut, self.waiting_queue, adder.rem_chunk_tokens or 0, self.page_size
                )
            return adder

        module.PrefillAdder = limited
        return form(self, *args, **kwargs)

    policy.SchedulePolicy.shortest_prefill_chunk_limit = lambda *_: None
    policy.PrefillAdder.chunked_req_limit, policy.PrefillAdder.add_chunked_req = None, add_chunked_req
    module.Scheduler._get_new_batch_prefill_raw = _get_new_batch_prefill_raw


# ---- outside of its own processes


def make_scheduler(arguments: Any, ports: Any) -> Any:
    """A scheduler of one rank in this process, as SGLang makes it before its loop."""
    module = _module("managers.scheduler")
    if has("0.5.21"):
        module.publish(
            arguments, role="scheduler", ranks=module.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        )
        scheduler = module.Scheduler(arguments, ports)
    else:
        module.publish(arguments, role="scheduler")
        ranks = ("gpu_id", "tp_rank", "moe_ep_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank")
        scheduler = module.Scheduler(arguments, ports, **dict.fromkeys(ranks, 0), dp_rank=None)
    if not has("0.5.22"):
        scheduler.result_queue = deque()  # which its loop would make
    return scheduler


# ---- a machine without a GPU


def complete_platform(platform: Any) -> None:
    """Give `engines.cpu_platform` what SGLang before 0.5.22 asks of it: classes for the cache, of which that of the
    allocator has kernels alone."""
    if has("0.5.22"):
        return

    def pool(self: Any) -> Any:
        return _module("mem_cache.memory_pool").MHATokenToKVPool

    def allocator(self: Any) -> Any:
        paged = _module("mem_cache.allocator.paged")

        def extend(prefix: Any, lengths: Any, last: Any, free: Any, out: Any, _: int, page_size: int) -> None:
            with suppress(AssertionError):  # too few pages are free, which SGLang sees behind it
                paged.alloc_extend_naive(prefix, lengths, last, free, out, page_size, out.device)

        def decode(lengths: Any, last: Any, free: Any, out: Any, _: int, page_size: int) -> None:
            begins = (lengths - 1) % page_size == 0
            out.copy_(last + 1)
            pages = free[: int(begins.sum())]
            if len(pages) == int(begins.sum()):
                out[begins] = pages * page_size

        paged.alloc_extend_kernel, paged.alloc_decode_kernel = _Kernel(extend), _Kernel(decode)
        return paged.PagedTokenToKVPoolAllocator

    platform.get_mha_kv_pool_cls, platform.get_paged_allocator_cls = pool, allocator


class _Kernel:
    """A function that is launched as a kernel is."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.function


LACKS: tuple[Lack, ...] = (
    Lack("0.5.23", "Scheduler.send_abort_output", _tell_of_aborts),
    Lack("0.5.23", "TokenizerManager.is_healthy", _healthy),
    Lack("0.5.23", "extra keys in the KV events of the cache in Rust", None),
    Lack("0.5.22", "Req.prefix_len, Req.extend_end, Req.discard_output_reason", _fields_of_requests),
    Lack("0.5.22", "match_kv_cache, release_kv_cache(checkpoint=), lock, unlock", _cache_calls),
    Lack("0.5.22", "Scheduler.get_prefill_adder_class", _class_of_adder),
    Lack("0.5.22", '"bind" in --kv-events-config', _bound_publisher),
    Lack("0.5.22", "cache shares (--cache-share): it evicts as SGLang does", None),
    Lack("0.5.21", "allocator.create_prefill_budget, PrefillAdder.memory_budget", _memory),
    Lack("0.5.21", "get_parallel().dp_rank, Scheduler.enable_lmcache", _names_of_scheduler),
    Lack("0.5.21", "PrefillAdder.chunked_req_limit", _limit_of_chunks),
)
"""Latest first."""
