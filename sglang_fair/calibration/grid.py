"""What is measured: a grid of batches within a replica's limits, and a crowd. PURE."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any

from sglang_fair.core.cost import Linear
from sglang_fair.core.fcfs import Fcfs
from sglang_fair.core.queue import FairQueue
from sglang_fair.sim.cost_model import CostModel, Fitted
from sglang_fair.sim.fitting import Measurement
from sglang_fair.sim.replica import Replica as SimReplica
from sglang_fair.sim.replica import Settings, SimRequest


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """How large a batch of the replica can be."""

    chunk_tokens: int
    """Most tokens that one prefill batch computes."""
    pool_tokens: int
    running: int
    context_tokens: int
    page_tokens: int

    @classmethod
    def of_server(cls, info: Mapping[str, Any]) -> "ReplicaLimits":
        """The limits by an answer to GET /server_info, with defaults for what it leaves out."""

        def number(key: str, default: int) -> int:
            value = info.get(key)
            return value if isinstance(value, int) and value > 0 else default

        most = number("max_prefill_tokens", 16_384)
        return cls(
            chunk_tokens=min(number("chunked_prefill_size", most), most),
            pool_tokens=number("max_total_num_tokens", 65_536),
            running=number("max_running_requests", 64),
            context_tokens=number("context_length", number("max_req_input_len", 4096)),
            page_tokens=number("page_size", 1),
        )


@dataclass(frozen=True, slots=True)
class GridCell:
    """One batch of the grid: `requests` equal ones, each with tokens to compute behind cached ones, then decoded."""

    requests: int
    extend_tokens: int
    cached_tokens: int = 0
    steps: int = 0

    def __str__(self) -> str:
        behind = f" behind {self.cached_tokens} cached" if self.cached_tokens else ""
        decoding = f", {self.steps} steps" if self.steps else ""
        return f"{self.requests} x {self.extend_tokens} tokens{behind}{decoding}"


CROWD, CROWD_TOKENS = 4, 64
"""Requests of the crowd for each one that can run at once, and the tokens of each prompt."""

TAIL_TOKENS = 16
"""Tokens computed before decoding is measured; the rest of the context is cached."""


def grid(limits: ReplicaLimits, longest_tokens: int, *, quick: bool = False) -> list[GridCell]:
    """The cells to measure: prefills alone, then decoding, with up to `longest_tokens` of cached context.

    Every cell is one prefill batch and fits the pool. Leave out contexts that your traffic does not have: the model is
    linear, and a shorter range fits better.
    """
    sizes = (1, 8) if quick else (1, 4, 16)
    parts = (4, 1) if quick else (16, 4, 2, 1)
    longest = min(longest_tokens, limits.context_tokens * 3 // 4, limits.pool_tokens // 2)
    prefixes = (0, longest) if quick else (0, longest // 16, longest // 4, longest)
    contexts = (
        (longest // 32, longest // 2) if quick else (longest // 32, longest // 8, longest // 2, longest)
    )
    batches = (1, 16) if quick else (1, 4, 16, 64)
    cells = {
        GridCell(requests, limits.chunk_tokens // part // requests, prefix)
        for requests in sizes
        for part in parts
        for prefix in prefixes
    }
    cells |= {
        GridCell(requests, TAIL_TOKENS, context, 16 if quick else 32)
        for requests in {min(batch, limits.running) for batch in batches}
        for context in contexts
    }
    fitting = [cell for cell in cells if cell.extend_tokens > 0 and _fits(cell, limits)]
    return sorted(
        fitting, key=lambda cell: (cell.steps, cell.cached_tokens, cell.requests, cell.extend_tokens)
    )


def _fits(cell: GridCell, limits: ReplicaLimits) -> bool:
    length = cell.cached_tokens + cell.extend_tokens + 1 + cell.steps
    return (
        cell.requests * cell.extend_tokens <= limits.chunk_tokens
        and cell.requests <= limits.running
        and length <= limits.context_tokens - 1
        and cell.requests * (length + limits.page_tokens) <= limits.pool_tokens * 3 // 4
    )


@dataclass(frozen=True, slots=True)
class TimedCell:
    """A measured cell. The median of its tries counts."""

    cell: GridCell
    extends: tuple[tuple[int, int], ...]
    tries_s: tuple[float, ...]

    @property
    def measurement(self) -> Measurement:
        return Measurement(self.extends, self.cell.steps, median(self.tries_s))

    @property
    def spread(self) -> float:
        """The difference between the slowest try and the fastest, relative to the median."""
        return (max(self.tries_s) - min(self.tries_s)) / median(self.tries_s)


def simulated_crowd(crowd: GridCell, model: CostModel, limits: ReplicaLimits) -> tuple[float, int]:
    """The seconds and steps that the simulator takes for these requests when all arrive at once."""
    settings = Settings(
        kv_tokens=limits.pool_tokens,
        page_tokens=limits.page_tokens,
        max_running=limits.running,
        chunked_prefill_tokens=limits.chunk_tokens,
    )
    replica = SimReplica(FairQueue(Fcfs(), Linear()), model, settings, events=False)
    for place in range(crowd.requests):
        first, output = place * crowd.extend_tokens, 1 + crowd.steps
        prompt = array("I", range(first, first + crowd.extend_tokens)).tobytes()
        replica.arrive(SimRequest(str(place), "calibrate", prompt, output, output), 0.0)
    now_s = 0.0
    while replica.next_s < inf:
        now_s = replica.next_s
        replica.advance(now_s)
    return now_s, replica.meters.steps


def under_load(model: Fitted, scheduling_s: float) -> Fitted:
    """`model` with the scheduler's time added to each step."""
    return replace(
        model,
        prefill_base_s=model.prefill_base_s + scheduling_s,
        decode_base_s=model.decode_base_s + scheduling_s,
    )
