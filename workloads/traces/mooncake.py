"""Mooncake's conversation trace (Qin et al., FAST 2025): long prompts and which of them share what.

A file is JSON lines of `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, the ids of the
prompt's blocks of 512 tokens, the last one in part. A block's id stands for all up to its end, so prompts
share exactly their leading equal ids. Files are in https://github.com/kvcache-ai/Mooncake,
`FAST25-release/traces`.

Mooncake does not tell whose a request is. A conversation is what agrees in its first two blocks (the first
is the system prompt), and each belongs to one of 100 clients by a Zipf draw: the k-th client has 1/k of the
first one's conversations.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from math import exp, log
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec

from workloads.arrivals import GammaArrivals
from workloads.programs.prose import seeded
from workloads.traces.trace import BLOCK_TOKENS, Trace, TraceRequest, read_lines

NAME = "mooncake"

_CLIENTS = 100
_DURATION_S = 3600.0
_REQUESTS_PER_S = 3.4
_TURNS = 1.63
_TURN_GAP_S = 215.0
_SHORTEST, _LONGEST = 891, 126_195


def conversation_of(request: TraceRequest) -> tuple[int, ...]:
    """Which conversation a request belongs to: its first two blocks."""
    return request.blocks[:2]


def mooncake(path: Path | None = None, *, seed: str = "0") -> Trace:
    """The trace of a file; without one, a stand-in with its statistics.

    The stand-in: an hour of 3.4 requests a second; conversations of 1.63 turns on average, 215 s apart, with
    one system prompt; first prompts of 10,800 tokens on average (log-normal, median 5,300), each turn 1,200
    longer than the one before (median 450), answers of 343. In the file, prompts are 12,035 tokens on average
    and 37 % of them had been seen before. Raises ValueError, with file and line number, for a line that is no
    such request.
    """
    trace = Trace.of(NAME, read_lines(path, _Line, _Line.request)) if path is not None else _stand_in(seed)
    weights = [1 / rank for rank in range(1, _CLIENTS + 1)]
    names = [f"{NAME}-{rank}" for rank in range(1, _CLIENTS + 1)]
    owners: dict[tuple[int, ...], str] = {}
    for request in trace.requests:
        conversation = conversation_of(request)
        if conversation not in owners:
            owners[conversation] = seeded(seed, "owner", *conversation).choices(names, weights)[0]
    return replace(
        trace,
        requests=[replace(request, client=owners[conversation_of(request)]) for request in trace.requests],
    )


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]

    def request(self) -> TraceRequest:
        return TraceRequest(self.timestamp / 1000, NAME, self.input_length, self.output_length, self.hash_ids)


def _stand_in(seed: str) -> Trace:
    """Conversations begin up to an hour earlier, so that the trace begins in the midst of some."""
    rng = seeded(seed, NAME)
    fresh = count(1)
    starts = GammaArrivals(_REQUESTS_PER_S / _TURNS).schedule(rng, until_s=2 * _DURATION_S)
    requests = [request for start_s in starts for request in _conversation(rng, start_s - _DURATION_S, fresh)]
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(NAME, requests, _DURATION_S)


def _conversation(rng: Random, start_s: float, fresh: Iterator[int]) -> list[TraceRequest]:
    turns = 1 + int(log(1 - rng.random()) / log(1 - 1 / _TURNS))
    time_s, tokens = start_s, _first_tokens(rng)
    blocks: Sequence[int] = (0,)
    requests: list[TraceRequest] = []
    for _ in range(turns):
        if time_s >= _DURATION_S or tokens > _LONGEST:
            break
        new = -(-tokens // BLOCK_TOKENS) - len(blocks)
        prompt = (*blocks, *(next(fresh) for _ in range(new)))
        if time_s >= 0:
            requests.append(TraceRequest(time_s, NAME, tokens, _output_tokens(rng), prompt))
        blocks = prompt[: tokens // BLOCK_TOKENS]
        time_s += rng.expovariate(1 / _TURN_GAP_S)
        tokens += 1 + round(450 * exp(rng.gauss(0.0, 1.4)))
    return requests


def _first_tokens(rng: Random) -> int:
    while not _SHORTEST <= (tokens := round(5300 * exp(rng.gauss(0.0, 1.2)))) <= _LONGEST:
        pass
    return tokens


def _output_tokens(rng: Random) -> int:
    return min(1 + round(rng.gammavariate(2.0, 343 / 2.0)), 2000)


# ---- a production mix: who sends and when from one trace, what is sent from another

OPEN_CONVERSATIONS = 4
"""How many a client holds at once."""


def production(senders: Trace, content: Trace, *, seed: str = "0") -> Trace:
    """`senders`' clients and arrivals with the lengths and blocks of `content`'s conversations.

    ServeGen knows clients but not what their prompts share, Mooncake what prompts share but not whose they are.

    A client has up to four conversations open and goes on with one of them at random, turn by turn; one that
    has ended makes room for the next, in the order of `content`. When `content` is used up it begins again
    with blocks that are new. Raises ValueError where `content` does not tell blocks.
    """
    if not all(request.blocks for request in content.requests):
        raise ValueError(f"{content.name}: does not tell which blocks its prompts consist of")
    conversations = _grouped(content.requests)
    queues: dict[str, list[list[TraceRequest]]] = {}
    requests: list[TraceRequest] = []
    for sent in senders.requests:
        rng = seeded(seed, "production", len(requests))
        said = _next_turn(queues.setdefault(sent.client, []), conversations, rng)
        requests.append(replace(said, arrival_s=sent.arrival_s, client=sent.client))
    return Trace("production", requests, senders.duration_s)


def _next_turn(
    queue: list[list[TraceRequest]], conversations: Iterator[list[TraceRequest]], rng: Random
) -> TraceRequest:
    """The next turn of one of a client's conversations; each is kept with its next turn last."""
    while len(queue) < OPEN_CONVERSATIONS:
        queue.append(next(conversations))
    place = rng.randrange(len(queue))
    turn = queue[place].pop()
    if not queue[place]:
        del queue[place]
    return turn


def _grouped(requests: Sequence[TraceRequest]) -> Iterator[list[TraceRequest]]:
    """All conversations in order of their first turn, each from the last turn to the first; without end."""
    grouped: dict[tuple[int, ...], list[TraceRequest]] = {}
    for request in requests:
        grouped.setdefault(conversation_of(request), []).append(request)
    several = max(max(request.blocks) for request in requests) + 1
    for again in count():
        for conversation in grouped.values():
            yield [
                replace(request, blocks=tuple(block + several * again for block in request.blocks))
                for request in reversed(conversation)
            ]
