"""RPM(n), requests per minute: first come, first served, with a limit per client. A baseline of the VTC paper.

Rule: a client may have `limit` requests a minute. One more is refused when it comes (`excess` "refuse"; accepted
requests count), or waits until there is room (`excess` "delay"; admitted requests count). The rest is FCFS over all
clients, except that a request that unblocks others goes before the others of its client.

Unit of fairness: the request, however large. Bound: none on service. A client below its limit still waits behind what
all the others may send, and one with long requests gets more than one with short ones.
Knobs: `limit`; the weights, which multiply it (rounded half up, at least 1); `excess`. A limit that is raised while
requests are delayed takes effect with its client's next request, or when the window opens.
Trade-offs: capacity stays unused if requests are refused, or delayed while nobody else waits. Known leak: new names.

Operations cost O(log clients); memory is O(waiting requests + those that counted in the last minute).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, floor
from typing import ClassVar

from sglang_fair.common.weights import Weights
from sglang_fair.core.clients import ByClient
from sglang_fair.core.heap import LazyHeap
from sglang_fair.core.job import Job
from sglang_fair.core.waits import RATE
from sglang_fair.core.windows import Sliding

EXCESS = ("refuse", "delay")


@dataclass
class Rpm(ByClient):
    """`limit` requests a minute for a client of weight 1. ValueError for a limit below 1 and for unknown words."""

    name: ClassVar[str] = "rpm"
    may_refuse: ClassVar[bool] = True
    turn_cause: ClassVar[str] = RATE
    limit: int = 30
    excess: str = "refuse"
    weights: Weights = field(default_factory=Weights)

    _now_s: float = field(default=0.0, init=False, repr=False)
    _window: Sliding[str] = field(default_factory=Sliding, init=False, repr=False)
    _open: LazyHeap[str] = field(default_factory=LazyHeap, init=False, repr=False)
    """Clients that may be served, by the arrival of their first request."""
    _delayed: LazyHeap[str] = field(default_factory=LazyHeap, init=False, repr=False)
    """Clients at their limit, by when their window opens."""

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError(f"limit must be at least one request per minute, not {self.limit!r}")
        if self.excess not in EXCESS:
            raise ValueError(f"excess is one of {', '.join(EXCESS)}, not {self.excess!r}")

    def tick(self, now_s: float) -> None:
        self._now_s = now_s
        self._window.tick(now_s)
        while (client := self._delayed.first()) is not None and self._delayed.key(client)[0] <= now_s:
            self._seat(client)

    def refuses(self, job: Job) -> str | None:
        if self.excess == "delay" or (opens_s := self._opens_s(job.client)) <= self._now_s:
            return None
        return (
            f"client {job.client!r} has used up its {self._limit_of(job.client)} requests per minute; "
            f"try again in {ceil(opens_s - self._now_s)} s"
        )

    def arrive(self, job: Job) -> None:
        if self.excess == "refuse":
            self._window.count(job.client)
        self._queues.put(job)
        self._seat(job.client)

    def leave(self, job: Job) -> None:
        self._queues.leave(job)
        self._seat(job.client)

    def pick(self) -> Job | None:
        while (client := self._open.first()) is not None:
            if self._is_open(client):
                return self._queues.head(client)
            self._seat(client)  # it has reached its limit, or the limit was lowered
        return None

    def admitted(self, job: Job) -> None:
        if self.excess == "delay":
            self._window.count(job.client)

    def counters(self) -> Mapping[str, float]:
        """The requests of the last minute that counted."""
        return self._window.counts()

    def counter(self, client: str) -> float | None:
        return self._window.count_of(client) or None

    def _limit_of(self, client: str) -> int:
        return max(1, floor(self.limit * self.weights.of(client) + 0.5))

    def _opens_s(self, client: str) -> float:
        return self._window.opens_s(client, self._limit_of(client))

    def _is_open(self, client: str) -> bool:
        return self.excess == "refuse" or self._opens_s(client) <= self._now_s

    def _seat(self, client: str) -> None:
        """Put `client` where `pick` and `tick` look for it."""
        head = self._queues.head(client)
        self._open.discard(client)
        self._delayed.discard(client)
        if head is None:
            if client not in self._queues:
                self._turns.pop(client, None)
            return
        self._turns[client] = self._is_open(client)
        if self._turns[client]:
            self._open.put(client, head.arrival)
        else:
            self._delayed.put(client, (self._opens_s(client), head.arrival))
