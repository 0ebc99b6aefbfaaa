"""A request as the queues see it: by when it is due, its class, and what it shares with others.

class     what it was promised, and how often that time is doubled: requests that were promised unlike times are of
          unlike classes
prefix    of what is cached of its prompt, the part up to where others left it last; where nothing is cached, its
          first `HEAD_TOKENS` tokens, so that prompts that nobody has cached are told apart
"""

from dataclasses import dataclass
from hashlib import blake2b
from math import ceil, log2

from router.placement.contract import Request
from router.queues.line import Queued
from router.radix import Match
from sglang_fair.common.deadlines import Promise

HEAD_TOKENS = 256
_TOKEN_BYTES = 4


@dataclass(slots=True)
class Waiting:
    """One that waits since `arrived_s`."""

    request: Request
    queued: Queued
    arrived_s: float


@dataclass(slots=True)
class Sent:
    """One that is at a worker."""

    worker: str
    tier: int
    at_s: float


def due_s(request: Request, slo_s: float, now_s: float) -> float:
    """When its first token is due; `slo_s` from `now_s` if it was promised nothing."""
    return now_s + slo_s if request.promise is None else request.promise.due_s


def as_queued(request: Request, match: Match, slo_s: float, now_s: float) -> Queued:
    """`slo_s`: of one that was promised nothing. ValueError for numbers that no request has."""
    promise = request.promise or Promise("", slo_s, now_s + slo_s)
    prefix, tokens = cached_prefix(request, match)
    if prefix is None:
        tokens = min(HEAD_TOKENS, request.input_tokens)
        prefix = _digest(request.namespace, request.tokens[: tokens * _TOKEN_BYTES])
    return Queued(
        id=request.id,
        client=request.client,
        model=request.model,
        slo_class=f"{promise.slo_class}~{ceil(2 * log2(promise.slo_s))}",
        prompt_tokens=request.input_tokens,
        expected_output_tokens=request.expected_output_tokens,
        since_s=promise.due_s - promise.slo_s,
        deadline_s=promise.due_s,
        output_variance=request.expected_output_tokens**2,
        prefix=prefix,
        prefix_tokens=tokens,
        exclude=request.exclude,
    )


def cached_prefix(request: Request, match: Match) -> tuple[bytes | None, int]:
    """What is cached of a prompt, up to where others left it last, and its tokens; None: nothing is."""
    tokens = match.branches[-1] if match.branches else match.tokens
    if not tokens:
        return None, 0
    return _digest(request.namespace, request.tokens[: tokens * _TOKEN_BYTES]), tokens


def _digest(namespace: str, tokens: bytes) -> bytes:
    """Nobody can send two prompts that are taken for one."""
    made = blake2b(tokens, digest_size=12)
    made.update(namespace.encode())
    return made.digest()
