"""A production mix: who sends and when from one trace, what is sent from another.

ServeGen knows clients but not what their prompts share; Mooncake knows what prompts share but not whose they
are. Together they are hundreds of bursty clients, each with conversations of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from random import Random

from workloads.programs.prose import seeded
from workloads.traces.mooncake import conversation_of
from workloads.traces.trace import Trace, TraceRequest

OPEN_CONVERSATIONS = 4
"""How many a client holds at once."""


def production(senders: Trace, content: Trace, *, seed: str = "0") -> Trace:
    """`senders`' clients and arrivals with the lengths and blocks of `content`'s conversations.

    A client has up to four conversations open and goes on with one of them at random, turn by turn; one that
    has ended makes room for the next, in the order of `content`. When `content` is used up it begins again
    with blocks that are new. Raises ValueError where `content` does not tell blocks.
    """
    if not all(request.blocks for request in content.requests):
        raise ValueError(f"{content.name}: does not tell which blocks its prompts consist of")
    conversations = _conversations(content.requests)
    queues: dict[str, list[list[TraceRequest]]] = {}
    requests: list[TraceRequest] = []
    for sent in senders.requests:
        rng = seeded(seed, "production", len(requests))
        said = _next(queues.setdefault(sent.client, []), conversations, rng)
        requests.append(replace(said, arrival_s=sent.arrival_s, client=sent.client))
    return Trace("production", requests, senders.duration_s)


def _next(
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


def _conversations(requests: Sequence[TraceRequest]) -> Iterator[list[TraceRequest]]:
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
