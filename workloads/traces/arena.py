"""The VTC paper's real trace: Chatbot Arena, where each model is a client (VTC §5.3, Figures 11 and 20).

A file is JSON lines of `arrival_s`, `client`, `input_tokens` and `output_tokens`. The authors' is in
https://github.com/Ying1123/VTC-artifact, drawn from https://huggingface.co/datasets/lmsys.
"""

from math import exp
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec

from workloads.arrivals import GammaArrivals
from workloads.programs.prose import seeded
from workloads.traces.trace import Trace, TraceRequest, read_lines

NAME = "arena"

_CLIENTS = 27
_DURATION_S = 600.0
_RATE_PER_S = 3.5
_RANKS_PER_E = 5.0
"""The k-th most active client sends exp(-k/5) times what the first sends, which fits the artifact's counts."""


def arena(path: Path | None = None, *, seed: str = "0") -> Trace:
    """The trace of a file; without one, a stand-in with the paper's statistics.

    The stand-in: 210 requests a minute for 10 minutes from 27 clients, few of which send most, each a Poisson
    process; prompts from 2 to 1,021 tokens, 136 on average (log-normal with the artifact's median of 40),
    answers from 2 to 977, 256 on average (Gamma with the artifact's variation of 0.8). Raises ValueError,
    with file and line number, for a line that is no such request.
    """
    return Trace.of(NAME, read_lines(path, _Line, _Line.request)) if path is not None else _stand_in(seed)


class _Line(msgspec.Struct):
    arrival_s: float
    client: Annotated[str, msgspec.Meta(min_length=1)]
    input_tokens: int
    output_tokens: int

    def request(self) -> TraceRequest:
        return TraceRequest(self.arrival_s, self.client, self.input_tokens, self.output_tokens)


def _stand_in(seed: str) -> Trace:
    shares = [exp(-rank / _RANKS_PER_E) for rank in range(_CLIENTS)]
    requests: list[TraceRequest] = []
    for rank, share in enumerate(shares):
        rng = seeded(seed, NAME, rank)
        arrivals = GammaArrivals(_RATE_PER_S * share / sum(shares))
        requests += [
            TraceRequest(time_s, f"client-{rank}", _input_tokens(rng), _output_tokens(rng))
            for time_s in arrivals.schedule(rng, until_s=_DURATION_S)
        ]
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(NAME, requests, _DURATION_S)


def _input_tokens(rng: Random) -> int:
    return min(max(2, round(40 * exp(rng.gauss(0.0, 1.8)))), 1021)


def _output_tokens(rng: Random) -> int:
    """The average is a little less than the distribution's, whose tail is cut."""
    while not 2 <= (tokens := round(rng.gammavariate(1.5, 266 / 1.5))) <= 977:
        pass
    return tokens
