"""Centralised DLPM, the strawman of the DLPM paper (§5.1): one queue for all workers, in the router; workers pull.

A worker with fewer than `slots` requests per unit of capacity takes the next one. DLPM (`sglang_fair.core.dlpm`)
chooses it as if all workers were one: of the clients with a positive deficit, the request with the longest prefix at
that worker. So every waiting request is matched again for every pull. A client pays for the tokens that the worker
is not believed to hold when its request is sent, and for its output when it is done; a failed request gives the
first charge back.

Bound: across all workers, two clients that both have requests waiting differ by at most 2·(U + Q^u), with U as for one
replica that runs all requests of the cluster. In return each placement matches the whole queue, and a freed slot stays
empty for a round trip: D2LPM exists because of this; it is kept for comparison. A slot should be a request that the
worker can run; the default is a compromise.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from router.placement.contract import Ended, May, Placement, Request, WorkerView, least_loaded
from router.placement.least import check_prices
from router.radix import Match
from sglang_fair.common.weights import Weights
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.job import Job


@dataclass
class CentralizedDlpm(Placement):
    """`quantum` is Q^u, of a client across all workers. `slots` limits a worker's requests in flight, per unit of
    capacity. The two weights are the prices of a prompt token and of an output token."""

    uses_progress: ClassVar[bool] = False
    holds: ClassVar[bool] = True

    quantum: float = 2_000.0
    slots: int = 64
    extend_weight: float = 1.0
    output_weight: float = 2.0
    client_weights: Mapping[str, float] = field(default_factory=dict)
    remembered_clients: int = 10_000

    _dlpm: Dlpm = field(init=False, repr=False)
    _waiting: dict[str, tuple[Request, Job]] = field(default_factory=dict, init=False, repr=False)
    _requests: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    """How many each client has waiting or in flight."""
    _pulled: dict[str, Job] = field(default_factory=dict, init=False, repr=False)
    """Requests that `next` has returned and `placed` has not confirmed."""
    _arrivals: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_prices(self.extend_weight, self.output_weight)
        if self.slots < 1:
            raise ValueError(f"slots is {self.slots}: a worker takes at least one request")
        self._dlpm = Dlpm(
            self.quantum, Weights(self.client_weights), remembered_clients=self.remembered_clients
        )

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> None:
        self._arrivals += 1
        job = Job(
            request.id, request.client, request.input_tokens, session=request.session, arrival=self._arrivals
        )
        self._waiting[request.id] = request, job
        self._requests[request.client] += 1
        self._dlpm.arrive(job)

    def next(
        self, workers: Sequence[WorkerView], match: Callable[[Request], Match], may: May, now_s: float
    ) -> tuple[Request, str] | None:
        roomy = [worker for worker in workers if worker.load < self.slots]
        while roomy:
            name = least_loaded(roomy)
            request = self._pull(name, match, may)
            if request is not None:
                return request, name
            roomy = [worker for worker in roomy if worker.name != name]
        return None

    def give_up(self, request: Request) -> None:
        self._leave(request)
        self._ended(request.client)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        job, units = self._pulled.pop(request.id, None), self._price(request, match.of(worker))
        self._dlpm.charge(request.client, units)
        if job is not None:
            self._dlpm.admitted(job)
        else:  # it did not wait here
            self._requests[request.client] += 1

    def done(self, ended: Ended, now_s: float) -> None:
        client = ended.request.client
        self._dlpm.charge(client, self.output_weight * ended.output_tokens)
        if ended.outcome == "failed":
            self._dlpm.charge(client, -self._price(ended.request, ended.matched_tokens))
        self._ended(client)

    @property
    def weights(self) -> Weights:
        return self._dlpm.weights

    def _pull(self, worker: str, match: Callable[[Request], Match], may: May) -> Request | None:
        for request, job in self._waiting.values():
            prefix_tokens = match(request).of(worker)
            if prefix_tokens != job.prefix_tokens:
                job.prefix_tokens = prefix_tokens
                self._dlpm.rematch(job)
        self._dlpm.release()
        while (picked := self._dlpm.pick()) is not None:
            request, job = self._waiting[picked.id]
            if may(request, worker):
                self._leave(request)
                self._pulled[request.id] = job
                return request
            self._dlpm.hold(job)
        return None

    def _leave(self, request: Request) -> None:
        _, job = self._waiting.pop(request.id)
        self._dlpm.leave(job)

    def _ended(self, client: str) -> None:
        self._requests[client] -= 1
        if not self._requests[client]:
            del self._requests[client]
            self._dlpm.idle(client)

    def _price(self, request: Request, matched_tokens: int) -> float:
        return self.extend_weight * (request.input_tokens - matched_tokens)
