"""Where SGLang and the emulated GPU meet: launching a step, waiting for its end, and giving its tokens."""

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.plugins.hook_registry import HookType

from sglang_fair.common.files import read_json
from sglang_fair.engines import cpu, emulated
from sglang_fair.overlay import Hook
from sglang_fair.sim.answers import answer
from sglang_fair.sim.emulation import Emulation
from sglang_fair.sim.gpu_clock import GpuClock

logger = logging.getLogger(__name__)

FILLER_TOKEN = ord("a")
"""The token that nobody reads: in the middle of a prompt, and behind the end of an answer, where an overlapped
scheduler computes one more."""

FIRST_ANSWER_TOKENS = 256
"""Tokens of an answer that are drawn at first. More are drawn when they are needed, because a request without a limit
may get an answer as long as the context."""


class EmulatedGpu:
    """Stands in for the model in a scheduler's process."""

    def __init__(self, emulation: Emulation, vocabulary: int) -> None:
        """`vocabulary`: how many token ids there are."""
        self.emulation = emulation
        self._vocabulary = vocabulary
        self.cost = emulation.make_cost(read_json)
        self.clock = GpuClock()
        self.last: StepEnd | None = None

    def run(self, batch: Any) -> GenerationBatchResult:
        """Launches a step. The result's `copy_done` waits for its end. Raises IndexError for token ids that there are
        not, as a model's table of embeddings does: such a request ends the scheduler."""
        lengths = batch.seq_lens_cpu.tolist()
        if batch.forward_mode.is_extend():
            if (
                len(batch.input_ids)
                and not 0 <= batch.input_ids.min() <= batch.input_ids.max() < self._vocabulary
            ):
                raise IndexError("index out of range in self")
            takes_s = self.cost.prefill_s(list(zip(batch.extend_lens, batch.prefix_lens, strict=True)))
        else:
            takes_s = self.cost.decode_s(len(lengths), sum(lengths))
        end_s = self.clock.launch(
            takes_s, now_s=time.monotonic(), cpu_s=time.process_time(), after_idle=batch.after_idle_gap
        )
        self.last = StepEnd(self.clock, end_s)
        tokens = [_next_token(req, length) for req, length in zip(batch.reqs, lengths, strict=True)]
        result: Any = GenerationBatchResult(
            next_token_ids=torch.tensor(tokens, dtype=torch.int64),
            can_run_cuda_graph=True,
            copy_done=self.last,
        )
        result.emulated = self.last
        return result

    def report(self) -> dict[str, Any]:
        """What is emulated and how true its timing is, for /server_info and /fair."""
        return {**self.emulation.describe(read_json), **self.clock.report()}


class StepEnd:
    """The end of a step, with those methods of a CUDA event that the scheduler uses."""

    def __init__(self, clock: GpuClock, end_s: float) -> None:
        self._clock = clock
        self._end_s = end_s

    def synchronize(self) -> None:
        """Blocks until the step has ended."""
        while (left_s := self._end_s - time.monotonic()) > 0:
            time.sleep(left_s)
        self._clock.ended(self._end_s, now_s=time.monotonic())


def _next_token(req: Any, length: int) -> int:
    """The token behind the first `length` tokens of a request's prompt and answer."""
    at, most = length - len(req.origin_input_ids), req.sampling_params.max_new_tokens
    if not 0 <= at < most:
        return FILLER_TOKEN
    drawn = getattr(req, "emulated_answer", ())
    if at >= len(drawn):
        prompt = np.asarray(req.origin_input_ids, dtype="<u4").tobytes()
        tokens = min(most, max(FIRST_ANSWER_TOKENS, 2 * at))
        drawn = req.emulated_answer = np.frombuffer(answer(prompt, tokens), dtype="<u4")
    return int(drawn[at])


def worker_started(result: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
    worker.emulated = EmulatedGpu(emulated.read(os.environ), worker.model_config.vocab_size)
    logger.warning("sglang-fair: this is no real GPU: %s; its words mean nothing", worker.emulated.emulation)


def forward_batch_generation(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> GenerationBatchResult:
    return worker.emulated.run(batch)


def copy_to_cpu(original: Callable[..., None], result: Any, *args: Any, **kwargs: Any) -> None:
    """With overlap SGLang replaces our event by one of its own; this puts ours back."""
    result.copy_done = result.emulated


def get_internal_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    report = scheduler.tp_worker.emulated.report()
    result.internal_state["emulated"] = report
    result.internal_state.setdefault("fair", {})["emulated"] = report


def validate_one_request(result: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    wanted = {
        "logprobs": getattr(obj, "return_logprob", False),
        "a sampling mask": getattr(obj, "return_sampling_mask", False),
        "beam search": ((obj.sampling_params or {}).get("beam_width") or 1) > 1,
    }
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise ValueError(f"{name} cannot be given: this replica emulates a GPU and has no logits")


def request_table_made(result: Any, pool: Any, *args: Any, **kwargs: Any) -> None:
    """Makes the table anew in memory that the kernel gives zeroed at first use; torch.zeros writes all of it."""
    shape = tuple(pool.req_to_token.shape)
    pool.req_to_token = torch.from_numpy(np.zeros(shape, dtype=np.int32))


_WORKER = "sglang.srt.managers.tp_worker.TpModelWorker."
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."

HOOKS: tuple[Hook, ...] = (
    Hook(_WORKER + "__init__", worker_started, HookType.AFTER),
    Hook(_WORKER + "forward_batch_generation", forward_batch_generation, HookType.REPLACE),
    Hook("sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu", copy_to_cpu, HookType.AROUND),
    Hook(_SCHEDULER + "get_internal_state", get_internal_state, HookType.AFTER),
    Hook("sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
         validate_one_request, HookType.AFTER),
    Hook("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.__init__", request_table_made, HookType.AFTER),
    Hook(cpu.START_METHOD_SET, cpu.fork_subprocesses, HookType.AFTER),
)  # fmt: skip
