"""D2LPM: follow the longest cached prefix for as long as the client has credit at a worker that holds it.

For every client i and worker w there is a credit q[i,w] (DLPM paper, Algorithm 2; `credit` keeps the accounts). A
request goes to the least loaded of the workers that hold its longest prefix and at which its client has credit left;
if there is none, to the least loaded of all at which the client has credit. There it pays for its whole prompt when
it is sent, cached or not, so that a client with one long prefix spreads too, and for its output when it is done. A
client without credit anywhere gets one quantum at every worker, as many times as it takes.

Bound: with a fair scheduler at every worker, clients that are backlogged everywhere differ by at most 2 |W| (U + Qu)
(Theorem 5.1), for any finite Qw; with Qw infinite nothing is bounded (Theorem A.5).

Choices that the paper leaves open: quanta and loads are in proportion to the worker's capacity, quanta to the client's
weight. A failed request gets its prompt's charge back. `cache_threshold`: as printed, any match makes its holders the
only candidates, so behind a system prompt that all share a client stays with one worker for a whole Qw. A match is
followed if it is more than that part of the prompt; 0 is the paper's algorithm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from router.placement.contract import Ended, Placement, Request, WorkerView, least_loaded
from router.placement.credit import Credits
from router.placement.least import check_prices
from router.radix import Match
from sglang_fair.common.weights import Weights


@dataclass
class D2lpm(Placement):
    """`worker_quantum` is Qw in units of service; the two weights are the prices of a prompt token and of an output
    token. `charge` "full" charges the whole prompt, as the paper does; "extend" only what the worker is not believed
    to hold. `client_weights` are 1 unless given. The accounts of `max_clients` clients are kept exactly.
    `cache_threshold` is the part of a prompt, from 0 to 1, beyond which a match is followed.
    """

    uses_progress: ClassVar[bool] = False

    worker_quantum: float = 20_000.0
    extend_weight: float = 1.0
    output_weight: float = 2.0
    charge: Literal["full", "extend"] = "full"
    client_weights: Mapping[str, float] = field(default_factory=dict)
    max_clients: int = 50_000
    cache_threshold: float = 0.0

    _credits: Credits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.charge not in ("full", "extend"):
            raise ValueError(f"charge is {self.charge!r}: it is 'full' or 'extend'")
        check_prices(self.extend_weight, self.output_weight)
        if not 0 <= self.cache_threshold <= 1:
            raise ValueError(f"cache_threshold is {self.cache_threshold}: it is a share, from 0 to 1")
        self._credits = Credits(self.worker_quantum, Weights(self.client_weights), self.max_clients)

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        client, credits = request.client, self._credits
        holders: list[WorkerView] = []
        if match.tokens > self.cache_threshold * request.input_tokens:
            named = match.holders
            holders = [worker for worker in workers if worker.name in named]
        candidates = credits.usable(client, holders)
        if not candidates:
            available = credits.available(client, workers)  # this may refill
            candidates = credits.usable(client, holders) or available
        return least_loaded(candidates)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        self._credits.begin(request.client, worker, self._price(request, match.of(worker)))

    def done(self, ended: Ended, now_s: float) -> None:
        refund = self._price(ended.request, ended.matched_tokens) if ended.outcome == "failed" else 0.0
        units = self.output_weight * ended.output_tokens
        self._credits.end(ended.request.client, ended.worker, units, refund)

    def worker_up(self, worker: str, capacity: float = 1.0) -> None:
        self._credits.worker_up(worker, capacity)

    def worker_changed(self, worker: str, capacity: float) -> None:
        self._credits.worker_changed(worker, capacity)

    def worker_down(self, worker: str) -> None:
        self._credits.worker_down(worker)

    @property
    def weights(self) -> Weights:
        return self._credits.weights

    def reweighed(self, client: str) -> None:
        self._credits.reweighed(client)

    def credits(self, limit: int) -> dict[str, dict[str, float]]:
        return self._credits.latest(limit)

    def _price(self, request: Request, matched_tokens: int) -> float:
        tokens = request.input_tokens - (matched_tokens if self.charge == "extend" else 0)
        return self.extend_weight * tokens
