"""Centralised DLPM, the strawman of the DLPM paper (§5.1): one queue for all workers, here, and they pull from it.

A worker that has fewer than `slots` requests per unit of capacity takes the next one. Which one is DLPM's choice
(`sglang_fair.core.dlpm`), as if all workers were one: of the clients with a positive deficit the request with the
longest prefix at that worker. For that every waiting request is matched again for every pull. A client pays for
the tokens that the worker is not believed to hold when its request is sent, and for its output when it is done;
what failed is given back.

Unit of fairness: service units, across all workers: two clients that both have requests waiting differ by at most
2·(U + Q^u), with U as for one replica that runs all requests of the cluster. Trade-off: the bound does not grow
with the number of workers, and nobody idles while anybody waits; in return each placement costs a match of the
whole queue, and a freed slot stays empty for a round trip. This is why D2LPM exists: keep it to compare.

A slot should be a request that the worker can run: with fewer slots its batch is small, with more the queue, and
with it the choice, moves to the worker. How many it can run depends on their length, so the default is a compromise:
with 16 it had 0.4 of D2LPM's throughput on four A100s (documents, judges, trees, a production mix) and 1.5 times its
P99, with 64 0.6 and 1.2 times, with 256 0.65 and 1.6 times.

Debts are kept of every client that owes, as DLPM does; of those that do not, `remembered_clients`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from router.placement.contract import Ended, Memoryless, Request, WorkerView, least_loaded
from router.placement.least_tokens import check_prices
from router.radix import Match
from sglang_fair.common.weights import Weights
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.job import Job


@dataclass
class CentralizedDlpm(Memoryless):
    """`quantum` is Q^u, for a client across all workers; `slots` are a worker's requests at a time, per unit of
    capacity; the two weights are prices of tokens."""

    uses_progress: ClassVar[bool] = False

    quantum: float = 2_000.0
    slots: int = 64
    extend_weight: float = 1.0
    output_weight: float = 2.0
    client_weights: Mapping[str, float] = field(default_factory=dict)
    remembered_clients: int = 10_000

    _dlpm: Dlpm = field(init=False, repr=False)
    _waiting: dict[str, tuple[Request, Job]] = field(default_factory=dict, init=False, repr=False)
    _requests: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    """By client: those that wait and those in flight."""
    _pulled: set[str] = field(default_factory=set, init=False, repr=False)
    """Those on their way from here to their worker."""
    _arrivals: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_prices(self.extend_weight, self.output_weight)
        if self.slots < 1:
            raise ValueError(f"slots is {self.slots}: a worker takes at least one request")
        self._dlpm = Dlpm(
            self.quantum, Weights(self.client_weights), remembered_clients=self.remembered_clients
        )

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> None:
        """The request waits."""
        self._arrivals += 1
        job = Job(request.id, request.client, request.input_tokens, arrival=self._arrivals)
        self._waiting[request.id] = request, job
        self._requests[request.client] += 1
        self._dlpm.arrive(job)

    def next(
        self, workers: Sequence[WorkerView], match: Callable[[Request], Match]
    ) -> tuple[Request, str] | None:
        """What the least loaded worker that has room and is not refused by all pulls."""
        roomy = [worker for worker in workers if worker.load < self.slots]
        while roomy:
            name = least_loaded(roomy)
            request = self._pull(name, match)
            if request is not None:
                return request, name
            roomy = [worker for worker in roomy if worker.name != name]
        return None

    def give_up(self, request: Request) -> None:
        """It leaves the queue and costs nothing."""
        self._leave(request)
        self._ended(request.client)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        """Charges what is not cached."""
        if request.id in self._pulled:
            self._pulled.remove(request.id)
        else:  # it did not wait here
            self._requests[request.client] += 1
        self._dlpm.charge(request.client, self._price(request, match.of(worker)))

    def done(self, ended: Ended, now_s: float) -> None:
        """Charges the output; a failed dispatch gives the first charge back."""
        client = ended.request.client
        self._dlpm.charge(client, self.output_weight * ended.output_tokens)
        if ended.outcome == "failed":
            self._dlpm.charge(client, -self._price(ended.request, ended.matched_tokens))
        self._ended(client)

    def _pull(self, worker: str, match: Callable[[Request], Match]) -> Request | None:
        for request, job in self._waiting.values():
            prefix_tokens = match(request).of(worker)
            if prefix_tokens != job.prefix_tokens:
                job.prefix_tokens = prefix_tokens
                self._dlpm.rematch(job)
        self._dlpm.release()
        while (picked := self._dlpm.pick()) is not None:
            request, job = self._waiting[picked.id]
            if worker not in request.exclude:
                self._leave(request)
                self._pulled.add(request.id)
                return request
            self._dlpm.hold(job)
        return None

    def _leave(self, request: Request) -> None:
        _, job = self._waiting.pop(request.id)
        self._dlpm.leave(job)

    def _ended(self, client: str) -> None:
        """One of the client's requests waits no more, or runs no more."""
        self._requests[client] -= 1
        if not self._requests[client]:
            del self._requests[client]
            self._dlpm.idle(client)

    def _price(self, request: Request, matched_tokens: int) -> float:
        return self.extend_weight * (request.input_tokens - matched_tokens)
