"""SGLang's requests as jobs: who sent each, what it is called here, what it had written before it was entered. And the
engine's own count of the tokens of one batch, from other numbers than those that are charged:

              charged to the clients                     counted here
    input     each request's chunk at its admission      the token ids that the batch hands to the model
    output    the growth of a request's list of          the tokens in the model's result, without the rows whose
              outputs                                    request is finished, taken back, or inside its prompt

Rows that the engine may drop after the model has answered (sampling masks, beams, diffusion blocks) are counted by
the growth of their lists. In a mixed step each decoding row makes one token, with speculative decoding too: SGLang
0.5.23 drafts and verifies in steps that only decode (`mix_with_running`, `process_batch_result_prefill`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_fair.common.identity import ANONYMOUS
from sglang_fair.common.interaction import Apps
from sglang_fair.core.interactions import Interaction, Interactions
from sglang_fair.core.job import Job
from sglang_fair.core.listener import Listener
from sglang_fair.core.record import Outcome

CUSTOM_PARAMS_KEY = "fair"
"""Where a request carries its client inside `sampling_params.custom_params`."""

JOB_ATTRIBUTE = "sglang_fair_job"
"""Attribute of SGLang's request: its job. SGLang's id of a request is not unique for as long as the request is here."""


class Requests(Listener):
    """The requests that wait or run, by the ids of their jobs. Calls that no gateway has numbered get their numbers
    here. `apps` says which applications a client may name."""

    def __init__(self, apps: Apps) -> None:
        self._apps = apps
        self._requests: dict[str, Any] = {}
        self._interactions = Interactions()
        self._numbered: set[str] = set()
        """Ids of the jobs of calls that were numbered here."""
        self._given_tokens: dict[str, int] = {}
        """Output that a request had when it was entered, by the id of its job."""

    def job(self, request: Any) -> Job | None:
        """The job of `request`; None if it is not in the books."""
        job: Job | None = getattr(request, JOB_ATTRIBUTE, None)
        return job if job is not None and self._requests.get(job.id) is request else None

    def of(self, job: Job) -> Any:
        """The request of `job`, which is here."""
        return self._requests[job.id]

    def enter(self, request: Any, now_s: float) -> Job:
        """The job of a request that is new here, as of `now_s`."""
        job = job_of(request, self._apps)
        job.id, job.arrived_s = self._free_id(request.rid), now_s
        carried = _carried(request)
        if (slack_s := carried.get("slack_s")) is not None:
            job.deadline_s = job.arrived_s + slack_s
        if salt := carried.get("salt"):  # SGLang's requests for embeddings carry none themselves
            request.cache_salt = salt
        if not job.call:
            self._numbered.add(job.id)
            job.call = self._interactions.accept(_interaction(job))
        self._requests[job.id] = request
        if request.output_ids:  # the books are younger than it is
            self._given_tokens[job.id] = len(request.output_ids)
        setattr(request, JOB_ATTRIBUTE, job)
        return job

    def begins_at(self, job: Job, outputs: int) -> None:
        """`job` had `outputs` tokens of output when it was entered."""
        self._given_tokens[job.id] = outputs

    def unbooked(self, job: Job) -> tuple[int, int]:
        """Output tokens that were not charged yet, and how many of them are past the end of the answer: speculation may
        run past it, and its sender neither sees nor pays for that part."""
        request = self._requests[job.id]
        written = len(request.output_ids)
        unbooked = written - self._given_tokens.get(job.id, 0) - job.output_tokens - job.unasked_tokens
        end = written if request.finished_len is None else request.finished_len
        return unbooked, min(unbooked, written - end)

    def tick(self, now_s: float) -> None:
        self._interactions.tick(now_s)

    def leave(self, job: Job) -> None:
        self._forget(job)

    def finish(self, job: Job, outcome: str) -> None:
        self._forget(job)

    def _forget(self, job: Job) -> None:
        request = self._requests.pop(job.id)
        self._given_tokens.pop(job.id, None)
        if job.id in self._numbered:
            self._numbered.remove(job.id)
            is_answered = _carried(request).get("is_last") is True and outcome_of(request) == "finished"
            self._interactions.end(_interaction(job), is_answered=is_answered)

    def _free_id(self, rid: str) -> str:
        """SGLang's id, if no other request here has it."""
        id, number = rid, 1
        while id in self._requests:
            number += 1
            id = f"{rid} ({number})"
        return id

    def __iter__(self) -> Iterator[Any]:
        return iter(self._requests.values())


def outcome_of(request: Any) -> Outcome:
    """How a request ended."""
    reason = request.finished_reason
    return "aborted" if reason is None or isinstance(reason, FINISH_ABORT) else "finished"


def is_over(request: Any) -> bool:
    """Whether it has ended, or will before it gets another token."""
    return bool(request.finished() or request.to_finish or not request.kv.holds_kv)


def job_of(request: Any, apps: Apps) -> Job:
    """A new request as a job, with what the HTTP side noted about its sender. `apps` says which applications it may
    name. `call` is 0 if no gateway has numbered it."""
    carried = _carried(request)
    client = carried.get("client", ANONYMOUS)
    return Job(
        id=request.rid,
        client=client,
        prompt_tokens=len(request.origin_input_ids),
        max_output_tokens=request.sampling_params.max_new_tokens or 0,
        system=carried.get("system") is True,
        expected_output_tokens=carried.get("expected_output_tokens"),
        unblocks=carried.get("unblocks", 0),
        weight=carried.get("weight"),
        weight_version=carried.get("weight_version", 0),
        attempt=carried.get("attempt", ""),
        app=apps.of(client, carried.get("app", "")),
        interaction=carried.get("interaction", ""),
        stage=carried.get("stage", ""),
        call=carried.get("call", 0),
        system_tokens=min(carried.get("system_tokens", 0), len(request.origin_input_ids)),
        slo_class=carried.get("slo_class", ""),
        tier=carried.get("tier", 0),
    )


def _carried(request: Any) -> dict[str, Any]:
    """What the HTTP side noted about its sender."""
    carried = (request.sampling_params.custom_params or {}).get(CUSTOM_PARAMS_KEY)
    return carried if isinstance(carried, dict) else {}


def _interaction(job: Job) -> Interaction:
    return Interaction(job.client, job.app, job.interaction)


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
