"""What placements have in common in which requests wait within their clients' shares: `deadline` and `qlm`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar, Protocol

from router.placement.contract import Request, WorkerView
from router.placement.shares import OUTPUT_PRICE, Shares
from router.radix import Match
from sglang_fair.common.deadlines import DEFAULT_CLASSES
from sglang_fair.common.weights import Weights

AHEAD_PART = 0.25
"""Of the smallest KV cache."""
RECOMPUTED = 4.0
"""A prompt token that is not cached at a worker, in tokens that wait there: computing it again is lost to all. Chosen
among 1, 4 and 16 by the throughput of simulated trees and judges (one seed)."""


class Equipped(Protocol):
    """A worker as far as shares depend on it."""

    @property
    def loaded(self) -> str | None:
        """Its model."""
        ...

    @property
    def swap_s(self) -> Mapping[str, float]:
        """The models that it can load."""
        ...

    @property
    def kv_tokens(self) -> int:
        """Of its KV cache."""
        ...


@dataclass
class WithinShares:
    """The parameters, and how clients are charged. ValueError for a parameter that is none."""

    uses_caches: ClassVar[bool] = True
    uses_progress: ClassVar[bool] = True

    ahead: float | None = None
    tiers: bool = True
    evicts: bool = False
    kv_tokens: int = 65_536
    chunk_tokens: int = 8_192
    slo_s: float = DEFAULT_CLASSES["interactive"]
    client_weights: Mapping[str, float] = field(default_factory=dict)
    max_clients: int = 50_000

    shares: Shares = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not (self.kv_tokens > 0 and self.chunk_tokens >= 0):
            raise ValueError("kv_tokens is above 0, and chunk_tokens not negative")
        if not 0 < self.slo_s < inf:
            raise ValueError(f"slo_s is {self.slo_s}: it is a number of seconds above 0")
        if self.max_clients < 1:
            raise ValueError(f"max_clients is {self.max_clients}: at least one is needed")
        if not isinstance(self.client_weights, Mapping):
            raise ValueError(f"client_weights is {self.client_weights!r}: it maps clients to weights")
        first = self.kv_tokens * AHEAD_PART if self.ahead is None else self.ahead
        self.shares = Shares(first, Weights(self.client_weights), most_owing=self.max_clients)

    def worker_changed(self, worker: str, capacity: float) -> None:
        """Nothing changes: how fast it is is measured."""

    @property
    def weights(self) -> Weights:
        """The clients' shares."""
        return self.shares.weights

    def reweighed(self, client: str) -> None:
        """What it sends from now on is charged by its weight."""

    def credits(self, limit: int) -> dict[str, dict[str, float]]:
        """Empty: a client's lead is over all workers."""
        return {}

    def _due_s(self, request: Request, now_s: float) -> float:
        return now_s + self.slo_s if request.promise is None else request.promise.due_s

    def _arrive(self, request: Request, match: Match, due_s: float) -> int:
        """It waits for its client's turn. Its tier."""
        uncached, expected = request.input_tokens - match.tokens, request.expected_output_tokens
        return self.shares.arrive(request.id, request.client, request.model, uncached, expected, due_s)

    def _serve(self, workers: Iterable[Equipped]) -> None:
        """These are the workers: what a client may be ahead, and whose requests count, follows from them."""
        workers = list(workers)
        if self.ahead is None and workers:
            self.shares.ahead = AHEAD_PART * min(one.kv_tokens for one in workers)
        self.shares.serve({m for one in workers for m in (*one.swap_s, one.loaded) if m is not None})


def left_to_do(view: WorkerView, uncached_tokens: float) -> float:
    """At a worker, with a request of which so many tokens are not cached there: in tokens, by its capacity."""
    left = RECOMPUTED * uncached_tokens + view.prefill_tokens + OUTPUT_PRICE * view.decode_tokens
    return left / view.capacity
