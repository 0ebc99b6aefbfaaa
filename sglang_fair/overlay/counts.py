"""The engine's own count of the tokens of one batch, from other numbers than those that are charged.

              charged to the clients                     counted here
    input     each request's chunk at its admission      the token ids that the batch hands to the model
    output    the growth of a request's list of          the tokens in the model's result, without the rows whose
              outputs                                    request is finished, taken back, or inside its prompt

Rows that the engine may drop after the model has answered (sampling masks, beams, diffusion blocks) are counted by
the growth of their lists. In a mixed step each decoding row makes one token, with speculative decoding too: SGLang
0.5.23 drafts and verifies in steps that only decode (`mix_with_running`, `process_batch_result_prefill`). O(rows of the
batch).
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request of a batch before its result is processed. `takes`: the engine will keep its output."""

    request: Any
    takes: bool
    outputs: int


def input_tokens(batch: Any) -> int:
    """Prompt tokens that the model computes in an extend batch; the decoding rows behind them bring one each."""
    computed: int = batch.extend_num_tokens
    return computed - len(batch.decoding_reqs or ())


def rows(batch: Any) -> list[BatchRow]:
    """The rows of a batch. Call it before the result is processed, which ends requests."""
    in_prompt = batch.forward_mode.is_extend()
    return [
        BatchRow(
            request,
            takes=not (
                request.finished()
                or request.is_retracted
                or (in_prompt and (request.inflight_middle_chunks > 0 or request.discard_output_reason))
            ),
            outputs=len(request.output_ids),
        )
        for request in batch.reqs
    ]


def output_tokens(batch: Any, result: Any, before: list[BatchRow]) -> int:
    """Output tokens of the batch, after its result was processed. `before` is what `rows` returned."""
    if batch.is_dllm():
        return sum(len(row.request.output_ids) - row.outputs for row in before)
    return sum(
        len(row.request.output_ids) - row.outputs
        if row.request.return_sampling_mask or row.request.beam_group is not None
        else _row_tokens(batch, result, at)
        for at, row in enumerate(before)
        if row.takes
    )


def _row_tokens(batch: Any, result: Any, at: int) -> int:
    """One token; with speculative decoding those that were accepted and that a grammar allowed."""
    accepted = getattr(result, "accept_lens", None)
    if accepted is None or not batch.forward_mode.is_decode():
        return 1
    retained = getattr(result, "grammar_retained_tokens", None)
    if retained is not None and retained[at] is not None:
        return len(retained[at])
    return int(accepted[at])
