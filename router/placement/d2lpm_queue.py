"""D2LPM by queues: who may go where follows from what the client has at each worker, not from used-up credit.

For client i and worker w, in units of service (w_e · prompt tokens that are not cached + w_q · output tokens; of a
request in flight, as expected) per weight of the client and capacity of the worker:

    B[i,w]   of its requests in flight
    S[i,w]   sent to w so far; when a request is over, corrected to what it was
    P[i,w]   expected to follow the prefixes that it has begun at w; 0 where B[i,w] is 0

A request of L prompt tokens, of which m_w are cached at w and at most m* anywhere, may go to the workers with

    B[i,w] <= Q^w + the least B[i,v] of all                            (rule 1)
    S[i,w] <= Q^w + the least S[i,v] of those that rule 1 allows       (rule 2)

Of these it goes where T_w + (1 + `delayed` · n_w) · w_e · (m* - m_w) + `delayed` · n'_w · w_e · (L - m_w) is least:
what w serves until it has served B[i,w], P[i,w] and this request if it serves clients in turns (`queues`), and what it
costs the n_w requests in flight there, of which each client counts up to eight (n'_w). For a client with nothing in
flight the worker of its last request costs half, if no other has more of the prompt: there steps are kept short for it.

Bound: with a fair policy at every worker, clients that wait at every worker differ by at most 2·|W|·(U + Q^u). The
proof, what each term is for and the trade-offs are in docs/policies.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from router.placement.contract import Ended, Placement, Request, WorkerView, least
from router.placement.least import check_prices
from router.placement.queues import Account, Queues
from router.radix import Match
from sglang_fair.common.weights import Weights

_HOME = 0.5
"""What the worker of its last request costs a client with nothing in flight."""
_PREFIXES_KNOWN = 5
"""From this prefix of a client on, what one brings is expected of the next."""
_PREFIXES_COUNTED = 64
"""Beyond, the older half counts half."""


@dataclass
class D2lpmQueue(Placement):
    """`worker_quantum` is Q^w in units of service; the two weights are the prices of a prompt token and of an output
    token. `delayed` is how many requests a prompt delays, for each one that is in flight at its worker.
    `client_weights` are 1 unless given. The accounts of `max_clients` clients are kept."""

    uses_progress: ClassVar[bool] = False

    worker_quantum: float = 250_000.0
    extend_weight: float = 1.0
    output_weight: float = 2.0
    delayed: float = 0.25
    client_weights: Mapping[str, float] = field(default_factory=dict)
    max_clients: int = 50_000

    _queues: Queues = field(init=False, repr=False)
    _weighed: Sequence[float] = field(default=(), init=False, repr=False)
    """Costs of the workers, for the last request."""

    def __post_init__(self) -> None:
        check_prices(self.extend_weight, self.output_weight)
        if not self.worker_quantum > 0:
            raise ValueError(f"worker_quantum is {self.worker_quantum}: it must be positive, and may be inf")
        if not 0 <= self.delayed < np.inf:
            raise ValueError(f"delayed is {self.delayed}: it is finite and not negative")
        self._queues = Queues(Weights(self.client_weights), self.max_clients)

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        queues, account = self._queues, self._queues.of(request.client)
        columns, price = queues.columns, self.extend_weight
        held = np.zeros(len(columns))
        for name, tokens in match.lengths.items():
            held[columns[name]] = tokens
        at = None if len(workers) == len(columns) else [columns[worker.name] for worker in workers]

        prompt = price * (request.input_tokens - held)
        added = (prompt + self._output_price(request)) * queues.paces
        costs = queues.delays(account, queues.queue(account) + added)
        costs += added
        prompt *= self.delayed * queues.crowds
        costs += prompt
        if match.tokens:
            longest = match.tokens if at is None else held[at].max()
            costs += (1.0 + self.delayed * queues.in_flight) * (price * (longest - held))

        home = None if account.in_flight else columns.get(account.home)
        if home is not None and held[home] >= match.tokens:
            costs[home] *= _HOME

        reach = self.worker_quantum * account.weight
        if at is None:
            weighed = costs.tolist()
            self._weighed = weighed
            chosen = least(workers, weighed).name
            if queues.may_have(account, columns[chosen], reach):
                return chosen
            at = list(range(len(columns)))
        else:
            queues.leave_out(account, at)
        weighed = np.where(queues.allowed(account, at, reach), costs[at], np.inf).tolist()
        self._weighed = weighed
        return least(workers, weighed).name

    def costs(self) -> Sequence[float]:
        return self._weighed

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        queues, account = self._queues, self._queues.of(request.client)
        held, column = match.of(worker), queues.columns[worker]
        pace, price = float(queues.paces[column]), self._price(request, held)
        outstanding, _, queue = queues.at(account, column)
        brings = self._brings(account, price, self._begins(request, held, match))
        account.home = worker
        queues.begin(account, column, price * pace, max(0.0, queue - outstanding + brings * pace))

    def done(self, ended: Ended, now_s: float) -> None:
        request, column = ended.request, self._queues.columns[ended.worker]
        more = self.output_weight * ended.output_tokens - self._output_price(request)
        if ended.outcome == "failed":
            more -= self.extend_weight * (request.input_tokens - ended.matched_tokens)
        pace, expected = float(self._queues.paces[column]), self._price(request, ended.matched_tokens)
        self._queues.end(request.client, column, expected * pace, more * pace)

    def worker_up(self, worker: str, capacity: float = 1.0) -> None:
        self._queues.worker_up(worker, capacity)

    def worker_changed(self, worker: str, capacity: float) -> None:
        self._queues.worker_changed(worker, capacity)

    def worker_down(self, worker: str) -> None:
        self._queues.worker_down(worker)

    @property
    def weights(self) -> Weights:
        return self._queues.weights

    def reweighed(self, client: str) -> None:
        self._queues.reweighed(client)

    def credits(self, limit: int) -> dict[str, dict[str, float]]:
        queues, found = self._queues, dict[str, dict[str, float]]()
        for account in queues.latest(limit):
            sent = queues.sent(account)
            left = (self.worker_quantum * account.weight + sent.min(initial=np.inf) - sent) / queues.paces
            found[account.client] = dict(zip(queues.columns, left.tolist(), strict=True))
        return found

    def _brings(self, account: Account, units: float, begins: bool) -> float:
        """How many more units are expected to follow once a request of `units` has begun a prefix, or follows one."""
        account.units += units
        if not begins:
            return -units
        account.prefixes += 1
        if account.prefixes > _PREFIXES_COUNTED:
            account.prefixes //= 2
            account.units /= 2
        known = account.prefixes >= _PREFIXES_KNOWN
        return max(0.0, account.units / account.prefixes - units) if known else 0.0

    def _begins(self, request: Request, held: int, match: Match) -> bool:
        """Whether less than half of the prompt is cached, apart from what every worker has."""
        everywhere = min(match.lengths.values()) if len(match.lengths) == len(self._queues.columns) else 0
        return held - everywhere < (request.input_tokens - everywhere) / 2

    def _price(self, request: Request, held: int) -> float:
        """Units at a worker that holds so many tokens of the prompt."""
        return self.extend_weight * (request.input_tokens - held) + self._output_price(request)

    def _output_price(self, request: Request) -> float:
        return self.output_weight * request.expected_output_tokens
