"""SGLang's real scheduler in this process: no server, and a model that takes no time.

The scheduler, its requests, tree cache (`UnifiedRadixCache` on the Rust core), allocators and prefill adder are
SGLang's own, built as its scheduler process builds them. Only two things are replaced: the forward pass returns
token 0 at once, and results do not go to a detokenizer. A process holds one such engine. Its policy can be
changed, and the overlay's hooks can be removed to measure stock SGLang.
"""

import gc
import json
import os
import pkgutil
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from sglang_fair.core.job import Job
from sglang_fair.engines import cpu
from sglang_fair.models.catalog import find
from sglang_fair.overlay import releases

PAGE_TOKENS = 16
POOL_TOKENS = 600_000
CONTEXT_TOKENS = 16_384
MOST_RUNNING = 128
KNOWN_TOKENS = 20_000
"""Tokens that a client which is remembered was served: ten quanta, so that policies have something to remember."""

SMALLEST_MODEL = {
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
}
"""128 bytes of KV cache per token, so that a pool as large as a GPU's fits into a few megabytes."""


@dataclass(slots=True)
class Step:
    """One iteration of SGLang's normal event loop, and its call of `_get_new_batch_prefill_raw`, in milliseconds.

    Times are CPU time of the scheduler's thread, which does all the work of a step.
    """

    order_ms: float
    build_ms: float
    """From `ScheduleBatch.init_new` to SGLang's count of the waiting tokens. No policy takes part in it."""
    admitted: int
    prompt_tokens: int
    cached_tokens: int
    turn_ms: float = 0.0
    """All of the iteration."""


class Engine:
    """The scheduler with its queue. At most `admit_per_step` requests enter in a step, so that every policy does the
    same work. It is built for `policy`, which decides on the tree of its cache for good."""

    def __init__(
        self,
        admit_per_step: int,
        seed: int,
        *,
        policy: str = "fcfs",
        pool_tokens: int = POOL_TOKENS,
        arguments: Sequence[str] = (),
    ) -> None:
        """`arguments`: more of SGLang's, which win."""
        os.environ.update(cpu.environment())
        os.environ["OMP_NUM_THREADS"] = "1"
        from sglang.srt.plugins import load_plugins

        releases.adapt()
        from sglang_fair.overlay.hooks import HOOKS

        hooks = [hook for hook in HOOKS if releases.has(hook.since)]
        self._targets = [pkgutil.resolve_name(hook.target.rpartition(".")[0]) for hook in hooks]
        self._names = [hook.target.rpartition(".")[2] for hook in hooks]
        self._stock = [vars(owner)[name] for owner, name in zip(self._targets, self._names, strict=True)]
        load_plugins()
        self._ours = [vars(owner)[name] for owner, name in zip(self._targets, self._names, strict=True)]
        self._scheduler = _scheduler(admit_per_step, seed, policy, pool_tokens, arguments)
        self._step: Step | None = None
        self._ballast: Any = None
        self._watch()

    # ---- the state before a run

    def use(self, policy: str, *, overlay: bool, options: str = "", match_limit: int | None = None) -> None:
        """Starts anew with the `--schedule-policy` value `policy` and its `options`.

        Without `overlay` no hook is attached: stock SGLang. `match_limit` replaces SGLang's 128, the queue length
        above which its LPM falls back to FCFS.
        """
        from sglang.srt.managers import schedule_policy

        for owner, name, function in zip(
            self._targets, self._names, self._ours if overlay else self._stock, strict=True
        ):
            setattr(owner, name, function)
        schedule_policy.WAITING_QUEUE_PREFIX_MATCH_MAX = match_limit or 128
        self._reset()
        self._scheduler.schedule_policy = policy
        os.environ["SGLANG_FAIR_OPTIONS"] = options
        self._scheduler.init_schedule_policy()
        self._scheduler.init_load_inquirer()
        self._watch()

    def stop_clock(self) -> None:
        """For the overlay no time passes until the next `use`: no step takes long, and prompts always go first."""
        from sglang_fair.overlay.clock import Clock

        self._scheduler.clock = Clock(is_shared=False, read=lambda: 0.0)

    def remember(self, clients: int) -> None:
        """So many clients were served one prompt each, by the books of the overlay, and are gone."""
        queue = self._scheduler.fair.queue
        for number in range(clients):
            job = Job(f"known {number}", f"known-{number}", KNOWN_TOKENS, 1)
            queue.arrive(job)
            queue.admit(job, extend_tokens=KNOWN_TOKENS, cached_tokens=0)
            queue.finish(job.id)
        queue.account.ledger.engine_counted(extend=clients * KNOWN_TOKENS)

    def limit_pool(self, tokens: int) -> None:
        """Leaves `tokens` free in the pool and occupies the rest until the next `use`."""
        allocator = self._scheduler.token_to_kv_pool_allocator
        surplus = (allocator.available_size() - tokens) // PAGE_TOKENS * PAGE_TOKENS
        if surplus > 0:
            self._ballast = allocator.alloc(surplus)
            assert self._ballast is not None

    def _reset(self) -> None:
        scheduler = self._scheduler
        scheduler.waiting_queue = []
        scheduler.running_batch = type(scheduler.running_batch)(reqs=[], batch_is_full=False)
        scheduler.last_batch = None
        scheduler.chunked_req = None
        scheduler.tree_cache.reset()
        scheduler.req_to_token_pool.clear()
        scheduler.token_to_kv_pool_allocator.clear()
        self._ballast = None
        gc.unfreeze()
        gc.collect()

    # ---- requests and steps

    def request(self, name: str, client: str, prompt: "array[int]", output_tokens: int = 1) -> Any:
        """SGLang's request object, as its HTTP side would have sent it, due within a minute."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        parameters = SamplingParams(
            max_new_tokens=output_tokens,
            temperature=0,
            ignore_eos=True,
            custom_params={"fair": {"client": client, "slack_s": crc32(name.encode()) % 600 / 10}},
        )
        parameters.normalize(None)
        vocabulary = self._scheduler.model_config.vocab_size
        request = Req(name, "", prompt, parameters, eos_token_ids=set(), vocab_size=vocabulary)
        request.tokenizer = None
        return request

    def arrive(self, requests: Sequence[Any]) -> float:
        """Appends them to the waiting queue; returns the CPU time that this took, in milliseconds."""
        started = time.thread_time()
        for request in requests:
            self._scheduler._add_request_to_queue(request)
        return 1e3 * (time.thread_time() - started)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting_queue)

    def step(self) -> Step | None:
        """One iteration of SGLang's normal event loop. None when it formed no prefill batch."""
        scheduler = self._scheduler
        self._step = None
        started = time.thread_time()
        scheduler.process_input_requests([])
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch is not None:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch
        step: Step | None = self._step
        if step is not None:
            step.turn_ms = 1e3 * (time.thread_time() - started)
        return step

    def cache(self) -> tuple[str, str]:
        tree = self._scheduler.tree_cache
        return type(tree).__name__, type(tree.tree_core).__name__

    def _watch(self) -> None:
        """Wraps the call that forms a batch, so that each step is timed."""
        scheduler = self._scheduler
        form = type(scheduler)._get_new_batch_prefill_raw

        def timed(*args: Any, **kwargs: Any) -> Any:
            with _build_marks() as marks:
                started = time.thread_time()
                batch, running = form(scheduler, *args, **kwargs)
                elapsed = time.thread_time() - started
            built = marks[1] - marks[0] if len(marks) == 2 else 0.0
            requests = batch.reqs if batch is not None else []
            self._step = Step(
                order_ms=1e3 * (elapsed - built),
                build_ms=1e3 * built,
                admitted=len(requests),
                prompt_tokens=sum(len(request.origin_input_ids) for request in requests),
                cached_tokens=sum(request.cached_tokens for request in requests),
            )
            return batch, running

        scheduler._get_new_batch_prefill_raw = timed


@contextmanager
def _build_marks() -> Iterator[list[float]]:
    """When construction of the batch began and when its tensors were ready."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats

    marks: list[float] = []

    def marking(function: Any) -> Any:
        def marked(cls: Any, *args: Any, **kwargs: Any) -> Any:
            marks.append(time.thread_time())
            return function.__func__(cls, *args, **kwargs)

        return classmethod(marked)

    first, last = vars(ScheduleBatch)["init_new"], vars(PrefillStats)["from_adder"]
    ScheduleBatch.init_new, PrefillStats.from_adder = marking(first), marking(last)
    try:
        yield marks
    finally:
        ScheduleBatch.init_new, PrefillStats.from_adder = first, last


def _scheduler(admit_per_step: int, seed: int, policy: str, pool_tokens: int, more: Sequence[str]) -> Any:
    """Builds the scheduler as SGLang's `run_scheduler_process` does before its loop."""
    import torch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.server_args import PortArgs, prepare_server_args

    model = find("tiny")
    arguments = prepare_server_args([
        *cpu.SERVER_ARGUMENTS,
        "--model-path", model.path,
        "--load-format", "dummy",
        "--json-model-override-args", json.dumps(SMALLEST_MODEL),
        "--schedule-policy", policy,
        "--page-size", str(PAGE_TOKENS),
        "--max-total-tokens", str(pool_tokens),
        "--context-length", str(CONTEXT_TOKENS),
        "--max-running-requests", str(MOST_RUNNING),
        "--chunked-prefill-size", "-1",
        "--max-prefill-tokens", str(pool_tokens),
        "--prefill-max-requests", str(admit_per_step),
        "--random-seed", str(seed),
        "--log-level", "error",
        *more,
    ])  # fmt: skip
    scheduler = releases.make_scheduler(arguments, PortArgs.init_new(arguments))

    def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = torch.zeros(len(batch.reqs), dtype=torch.int64)
        return GenerationBatchResult(logits_output=None, next_token_ids=tokens, can_run_cuda_graph=False)

    scheduler.tp_worker.forward_batch_generation = forward
    type(scheduler.output_streamer).stream_output = lambda *args, **kwargs: None
    return scheduler
