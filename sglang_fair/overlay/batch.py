"""What one batch of SGLang's was, by the engine's own numbers: its tokens, from others than those that are charged, and
how long it took.

              charged to the clients                     counted here
    input     each request's chunk at its admission      the token ids that the batch hands to the model
    output    the growth of a request's list of          the tokens in the model's result, without the rows whose
              outputs                                    request is finished, taken back, or inside its prompt

Rows that the engine may drop after the model has answered (sampling masks, beams, diffusion blocks) are counted by
the growth of their lists. In a mixed step each decoding row makes one token, with speculative decoding too: SGLang
0.5.23 drafts and verifies in steps that only decode (`mix_with_running`, `process_batch_result_prefill`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

Row = tuple[Any, bool, int]
"""A request of a batch before its result is processed, whether the engine will keep its output, and the outputs that it
had."""


def input_tokens(batch: Any) -> int:
    """Prompt tokens that the model computes in an extend batch; the decoding rows behind them bring one each."""
    computed: int = batch.extend_num_tokens
    return computed - len(batch.decoding_reqs or ())


def rows(batch: Any) -> list[Row]:
    """The rows of a batch. Call it before the result is processed, which ends requests."""
    in_prompt = batch.forward_mode.is_extend()
    return [
        (
            request,
            not (
                request.finished()
                or request.is_retracted
                or (in_prompt and (request.inflight_middle_chunks > 0 or request.discard_output_reason))
            ),
            len(request.output_ids),
        )
        for request in batch.reqs
    ]


def output_tokens(batch: Any, result: Any, before: list[Row]) -> int:
    """Output tokens of the batch, after its result was processed. `before` is what `rows` returned."""
    if batch.is_dllm():
        return sum(len(request.output_ids) - outputs for request, _, outputs in before)
    return sum(
        len(request.output_ids) - outputs
        if request.return_sampling_mask or request.beam_group is not None
        else _row_tokens(batch, result, at)
        for at, (request, takes, outputs) in enumerate(before)
        if takes
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


@dataclass(frozen=True, slots=True)
class Step:
    """What a step was: prompt tokens by client, and whether those that run got a token."""

    extended: Mapping[str, int] | None = None
    decoded: bool = False
    requests: int = 0
    """That were decoded; 0: how long it took says nothing about such steps."""


class StepTimes:
    """How long each step took, by a clock that is read once in each iteration of the engine's loop.

    A step that was done in an iteration took as long as that; in an overlapped loop, where it was launched in an
    earlier one, as long as the iteration that waited for its end, and those before in which none was done. An iteration
    without any step is the engine's rest, and counts for nothing. Where none was launched, an overlapped loop only
    waited for the end of one that was counted in part before.
    """

    def __init__(self) -> None:
        self._now_s: float | None = None
        self._since_s = 0.0
        """Time of iterations in which steps were launched and none was done."""
        self._launched = False
        self._done: list[Step] = []

    def launched(self) -> None:
        self._launched = True

    def done(self, step: Step) -> None:
        self._done.append(step)

    def tick(self, now_s: float) -> list[tuple[Step, float]]:
        """The next iteration begins. Returns the steps that were done in the last one, and their seconds."""
        elapsed_s = 0.0 if self._now_s is None else max(0.0, now_s - self._now_s)
        self._now_s = now_s
        steps, self._done = self._done, []
        launched, self._launched = self._launched, False
        if steps:
            each_s = (self._since_s + elapsed_s) / len(steps)
            self._since_s = 0.0
            return [(step if launched else replace(step, requests=0), each_s) for step in steps]
        self._since_s = self._since_s + elapsed_s if launched else 0.0
        return []
