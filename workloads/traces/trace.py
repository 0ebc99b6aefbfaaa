"""A trace: requests with their arrivals and lengths, and the clients that replay it.

Traces hold no text, so prompts are made up, of the stated lengths and unlike each other. Where a trace says
which blocks of 512 tokens a prompt consists of, equal blocks hold equal tokens: two prompts share exactly
the blocks that the trace says.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import floor
from pathlib import Path
from typing import TypeVar

import msgspec

from workloads.arrivals import GivenArrivals
from workloads.clients import Client
from workloads.programs.call import Program, Prompt
from workloads.programs.codec import Codec
from workloads.programs.kinds import Single
from workloads.programs.prose import filler

BLOCK_TOKENS = 512

_BLOCKS_KEPT = 1024


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `blocks` are the ids of its prompt's blocks, the last one in part; or it has none."""

    arrival_s: float
    client: str
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.arrival_s < float("inf"):
            raise ValueError(f"a request must arrive at 0 s or later, not {self.arrival_s!r}")
        if self.input_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"lengths must be at least 1: {self.input_tokens!r}, {self.output_tokens!r}")
        if self.blocks and len(self.blocks) != -(-self.input_tokens // BLOCK_TOKENS):
            raise ValueError(f"{len(self.blocks)} blocks cannot hold exactly {self.input_tokens} tokens")


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, from the trace's start to `duration_s`."""

    name: str
    requests: Sequence[TraceRequest]
    duration_s: float

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError(f"{self.name}: there is no request in the trace, or in this part of it")
        if self.requests[-1].arrival_s >= self.duration_s:
            raise ValueError(f"{self.name}: requests must arrive before {self.duration_s} s")
        if any(later.arrival_s < earlier.arrival_s for earlier, later in pairwise(self.requests)):
            raise ValueError(f"{self.name}: requests must be in order of arrival")

    @classmethod
    def of(cls, name: str, requests: Iterable[TraceRequest]) -> "Trace":
        """These requests, put in order, up to the whole second after the last."""
        ordered = sorted(requests, key=lambda request: request.arrival_s)
        return cls(name, ordered, floor(ordered[-1].arrival_s) + 1.0 if ordered else 0.0)

    @property
    def rate_per_s(self) -> float:
        return len(self.requests) / self.duration_s

    def between(self, start_s: float, until_s: float) -> "Trace":
        """What arrives from `start_s` to `until_s`, which becomes a trace from 0 s on."""
        if not 0 <= start_s < until_s:
            raise ValueError(
                f"{self.name}: a part goes from 0 s or later to a later time: {start_s}, {until_s}"
            )
        until_s = min(until_s, self.duration_s)
        kept = [
            replace(request, arrival_s=request.arrival_s - start_s)
            for request in self.requests
            if start_s <= request.arrival_s < until_s
        ]
        return replace(self, requests=kept, duration_s=until_s - start_s)

    def at_rate(self, rate_per_s: float) -> "Trace":
        """All requests, in the same order and proportions, but so many a second on average."""
        if not 0 < rate_per_s < float("inf"):
            raise ValueError(f"{self.name}: a rate must be a positive number, not {rate_per_s!r}")
        factor = self.rate_per_s / rate_per_s
        stretched = [replace(request, arrival_s=request.arrival_s * factor) for request in self.requests]
        return replace(self, requests=stretched, duration_s=self.duration_s * factor)

    def clients(self, codec: Codec, *, seed: str = "0") -> tuple[Client, ...]:
        """Clients that send these requests at these times, in the order in which they first do."""
        by_name: dict[str, list[TraceRequest]] = {}
        for request in self.requests:
            by_name.setdefault(request.client, []).append(request)
        prompts = _Prompts(f"{seed}/{self.name}", codec)

        def client(name: str, requests: Sequence[TraceRequest]) -> Client:
            def program(index: int) -> Program:
                """They begin again where more are asked for."""
                request = requests[index % len(requests)]
                return Single(request.output_tokens).program(prompts.of(request, name, index))

            arrivals = GivenArrivals(tuple(request.arrival_s for request in requests))
            return Client(name, program, arrivals, seed, self.name, requests=1)

        return tuple(client(name, requests) for name, requests in by_name.items())


LineT = TypeVar("LineT")


def read_lines(path: Path, kind: type[LineT], convert: Callable[[LineT], TraceRequest]) -> list[TraceRequest]:
    """The requests of a file of JSON lines. ValueError names file and line."""
    requests = []
    with path.open("rb") as lines:
        for place, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    requests.append(convert(msgspec.json.decode(line, type=kind, strict=False)))
                except ValueError as error:
                    raise ValueError(f"{path}:{place}: {error}") from error
    return requests


class _Prompts:
    """Prompts of given lengths, or of given blocks. The blocks used last are kept."""

    def __init__(self, seed: str, codec: Codec) -> None:
        self._seed = seed
        self._codec = codec
        self._block = lru_cache(_BLOCKS_KEPT)(self._make_block)

    def of(self, request: TraceRequest, client: str, index: int) -> Prompt:
        if not request.blocks:
            return filler(f"{self._seed}/{client}/{index}", self._codec, request.input_tokens)
        *whole, last = request.blocks
        rest = request.input_tokens - BLOCK_TOKENS * len(whole)
        return self._codec.join(*(self._block(block) for block in whole), self._make_block(last, rest))

    def _make_block(self, block: int, tokens: int = BLOCK_TOKENS) -> Prompt:
        return filler(f"{self._seed}//{block}", self._codec, tokens)
