"""D2LPM's accounts: a credit q[i,w] for every client i and worker w, refilled by quanta.

Always q[i,w] <= Q[i,w] = quantum x weight of the client x capacity of the worker. It may fall far below zero, because
outputs are charged late. When a client has no credit at any worker that it may use, rounds pass until it has some: in
a round, every worker's credit grows by its quantum, in one step however many are due. A new worker, or one that came
back, starts at a full quantum for every client.

Memory is bounded without erasing debt. Beyond `max_clients`, the clients without requests in flight that have been
idle longest are forgotten. The row of a debtor goes into one of `_ESTATES` buckets, by a hash of its name, which keeps
the least credit per worker of all that went there; an unknown client starts with the row of its bucket. So a debtor
finds its debt or a larger one, and a stranger in its bucket is sent to other workers first, and loses nothing else.
"""

import math
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from router.placement.contract import WorkerView
from sglang_fair.common.weights import Weights

_ESTATES = 1024
"""Buckets for the debts of forgotten clients."""


@dataclass(slots=True)
class _Account:
    """One client: its requests in flight, and its credit per worker, a full quantum where there is no entry."""

    credit: dict[str, float]
    in_flight: int = 0


class Credits:
    """The credits of all clients; `quantum` is that of weight 1 and capacity 1, and may be infinite."""

    def __init__(self, quantum: float, weights: Weights, max_clients: int) -> None:
        if not quantum > 0:
            raise ValueError(f"worker_quantum is {quantum}: it must be positive, and may be inf")
        if max_clients < 1:
            raise ValueError(f"max_clients is {max_clients}: at least one is needed")
        self._quantum = quantum
        self.weights = weights
        self._max_clients = max_clients
        self._capacity: dict[str, float] = {}
        self._accounts: dict[str, _Account] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._estates: dict[int, dict[str, float]] = {}

    def usable(self, client: str, workers: Sequence[WorkerView]) -> list[WorkerView]:
        """Those of `workers` at which `client` has credit, without a refill."""
        left = self._account(client).credit.get
        return [worker for worker in workers if left(worker.name, 1.0) > 0]

    def available(self, client: str, workers: Sequence[WorkerView]) -> list[WorkerView]:
        """Those of `workers` at which `client` has credit; if there is none, refills first. At least one."""
        while not (found := self.usable(client, workers)):
            self._refill(client, self._account(client).credit, workers)
        return found

    def begin(self, client: str, worker: str, units: float) -> None:
        """A request of `client` was sent to `worker`: charges `units`."""
        account = self._account(client)
        account.in_flight += 1
        self._idle.pop(client, None)
        account.credit[worker] = self._of(client, account.credit, worker) - units

    def end(self, client: str, worker: str, units: float, refund: float = 0.0) -> None:
        """It is over: charges `units` more, and gives `refund` of the first charge back."""
        account = self._account(client)
        credit = self._of(client, account.credit, worker) - units
        if refund:
            credit = min(self._quantum_of(client, worker), credit + refund)
        account.credit[worker] = credit
        account.in_flight -= 1
        assert account.in_flight >= 0, client
        if not account.in_flight:
            self._idle[client] = None
            self._forget()

    def worker_up(self, worker: str, capacity: float) -> None:
        self._capacity[worker] = capacity

    def worker_changed(self, worker: str, capacity: float) -> None:
        """No credit is above the new quantum; debts stay."""
        self._capacity[worker] = capacity
        for client, account in self._accounts.items():
            if worker in account.credit:
                limit = self._quantum_of(client, worker)
                account.credit[worker] = min(limit, account.credit[worker])

    def reweighed(self, client: str) -> None:
        """Its weight has changed: no credit is above the new quantum; debts stay."""
        account = self._accounts.get(client)
        if account is not None:
            for worker, amount in account.credit.items():
                account.credit[worker] = min(self._quantum_of(client, worker), amount)

    def worker_down(self, worker: str) -> None:
        del self._capacity[worker]
        for account in self._accounts.values():
            account.credit.pop(worker, None)
        for row in self._estates.values():
            row.pop(worker, None)

    def latest(self, limit: int) -> dict[str, dict[str, float]]:
        """q[i,w] of the latest clients, those with requests in flight first."""
        busy = [client for client in reversed(self._accounts) if client not in self._idle]
        clients = (busy + list(reversed(self._idle)))[:limit]
        rows = {client: self._accounts[client].credit for client in clients}
        workers = sorted(self._capacity)
        return {client: {w: self._of(client, row, w) for w in workers} for client, row in rows.items()}

    def _quantum_of(self, client: str, worker: str) -> float:
        return self._quantum * self.weights.of(client) * self._capacity[worker]

    def _of(self, client: str, credit: dict[str, float], worker: str) -> float:
        known = credit.get(worker)
        return self._quantum_of(client, worker) if known is None else known

    def _refill(self, client: str, credit: dict[str, float], workers: Sequence[WorkerView]) -> None:
        """Applies as many rounds as make the credit at one of `workers` positive. It is positive at none of them."""
        unit = self._quantum * self.weights.of(client)
        quanta = {worker: unit * capacity for worker, capacity in self._capacity.items()}
        rounds = min(math.floor(-credit[worker.name] / quanta[worker.name]) + 1 for worker in workers)
        for worker, quantum in quanta.items():
            credit[worker] = min(quantum, credit.get(worker, quantum) + rounds * quantum)

    def _account(self, client: str) -> _Account:
        account = self._accounts.get(client)
        if account is None:
            estate = self._estates.get(_bucket(client), {})
            account = _Account({worker: min(0.0, estate.get(worker, 0.0)) for worker in self._capacity})
            self._accounts[client] = account
            self._idle[client] = None
        return account

    def _forget(self) -> None:
        while len(self._accounts) > self._max_clients and self._idle:
            client, _ = self._idle.popitem(last=False)
            credit = self._accounts.pop(client).credit
            if any(amount < 0 for amount in credit.values()):
                estate = self._estates.setdefault(_bucket(client), {})
                for worker, amount in credit.items():
                    estate[worker] = min(amount, estate.get(worker, 0.0))


def _bucket(client: str) -> int:
    return zlib.crc32(client.encode()) % _ESTATES
