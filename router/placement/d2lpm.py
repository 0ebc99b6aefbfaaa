"""D2LPM: follow the longest cached prefix for as long as the client has credit at a worker that holds it.

For every client i and worker w there is a credit q[i,w] (DLPM paper, Algorithm 2). A request goes to the
least loaded of the workers that hold its longest prefix and at which its client has credit left; if there
is none, to the least loaded of all at which it has credit. It pays there for its whole prompt when it is
sent, cached or not, so that a client with one long prefix spreads too, and for its output when it is done.
When a client has no credit anywhere, it gets one quantum at every worker, as many times as it takes: Qw is
the stretch for which a client may stick to one worker. What follows: q[i,w] <= Qw always; a credit may fall
far below zero, since outputs come late.

Unit of fairness: none by itself. With a fair scheduler at every worker, clients that are backlogged
everywhere differ by at most 2 |W| (U + Qu) in service (Theorem 5.1), whatever Qw is, as long as it is
finite; with Qw infinite a client never leaves its prefix and nothing is bounded (Theorem A.5).

Choices the paper leaves open. Loads are divided by the worker's capacity; ties go to the worker that was
sent fewer tokens so far, then by name. The loop over refills is one jump. A new worker, or one that came
back, starts at Qw for every known client: usable at once, its old debt gone with its queue. A request that
failed gives its prompt's charge back. A match shorter than one page is no match: the tree knows whole pages
only. When workers are excluded, only those that are left decide whether a refill is due, and the others
stop at Qw.

Memory is bounded without erasing debt. Of the clients that have nothing in flight the longest idle ones are
forgotten beyond `max_clients`. If no credit of theirs is negative that loses credit, never debt. Else their
row goes into one of `_ESTATES` buckets, picked by the client's name, which keeps the least credit per
worker of all that went there; whoever is not known starts with the row of its bucket, or with zeros. So a
debtor finds its debt or more of it, though not what credit it had left elsewhere; a stranger that shares
its bucket is sent to other workers first, and loses nothing else.
"""

import math
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from router.placement.contract import Ended, Request, WorkerView, least_loaded
from router.radix import Match

_ESTATES = 1024
"""Buckets for the debts of forgotten clients."""


@dataclass(slots=True)
class _Account:
    """One client: its credit per worker, and its requests in flight."""

    credit: dict[str, float]
    in_flight: int = 0


@dataclass
class D2lpm:
    """`worker_quantum` is Qw in units of service, which the two weights say for a prompt and an output token.

    `charge` "full" charges the whole prompt, as the paper does; "extend" only what the worker is not believed
    to hold. `max_clients` are remembered one by one.
    """

    worker_quantum: float = 20_000.0
    extend_weight: float = 1.0
    output_weight: float = 2.0
    charge: Literal["full", "extend"] = "full"
    max_clients: int = 50_000

    _accounts: dict[str, _Account] = field(default_factory=dict, init=False, repr=False)
    _idle: OrderedDict[str, None] = field(default_factory=OrderedDict, init=False, repr=False)
    _estates: dict[int, dict[str, float]] = field(default_factory=dict, init=False, repr=False)
    _workers: set[str] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.worker_quantum > 0:
            raise ValueError(f"worker_quantum is {self.worker_quantum}: it must be positive, and may be inf")
        if self.charge not in ("full", "extend"):
            raise ValueError(f"charge is {self.charge!r}: it is 'full' or 'extend'")
        if not (0 <= self.extend_weight < math.inf and 0 <= self.output_weight < math.inf):
            raise ValueError("extend_weight and output_weight are finite and not negative")
        if self.max_clients < 1:
            raise ValueError(f"max_clients is {self.max_clients}: at least one is needed")

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        """SelectWorker(G, i), with G the holders of the longest match."""
        credit = self._account(request.client).credit
        while not (available := [worker for worker in workers if self._of(credit, worker.name) > 0]):
            self._refill(credit, workers)
        holders = [worker for worker in available if worker.name in match.holders]
        return least_loaded(holders or available)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        """Charges the prompt."""
        account = self._account(request.client)
        account.in_flight += 1
        self._idle.pop(request.client, None)
        account.credit[worker] = self._of(account.credit, worker) - self._price(request, match.of(worker))

    def done(self, ended: Ended, now_s: float) -> None:
        """Charges the output; a failed dispatch gives the prompt's charge back."""
        client = ended.request.client
        account = self._account(client)
        credit = self._of(account.credit, ended.worker) - self.output_weight * ended.output_tokens
        if ended.outcome == "failed":
            credit = min(self.worker_quantum, credit + self._price(ended.request, ended.matched_tokens))
        account.credit[ended.worker] = credit
        account.in_flight -= 1
        assert account.in_flight >= 0, client
        if not account.in_flight:
            self._idle[client] = None
            self._forget()

    def worker_up(self, worker: str) -> None:
        """A worker that a row does not name has Qw there."""
        self._workers.add(worker)

    def worker_down(self, worker: str) -> None:
        """Its credits go with it."""
        self._workers.discard(worker)
        for account in self._accounts.values():
            account.credit.pop(worker, None)
        for row in self._estates.values():
            row.pop(worker, None)

    def credits(self, limit: int) -> dict[str, dict[str, float]]:
        """q[i,w] of the clients that came last."""
        busy = [client for client in reversed(self._accounts) if client not in self._idle]
        latest = (busy + list(reversed(self._idle)))[:limit]
        rows = {client: self._accounts[client].credit for client in latest}
        return {client: {w: self._of(row, w) for w in sorted(self._workers)} for client, row in rows.items()}

    def _of(self, credit: dict[str, float], worker: str) -> float:
        return credit.get(worker, self.worker_quantum)

    def _price(self, request: Request, matched_tokens: int) -> float:
        tokens = request.input_tokens - (matched_tokens if self.charge == "extend" else 0)
        return self.extend_weight * tokens

    def _refill(self, credit: dict[str, float], workers: Sequence[WorkerView]) -> None:
        """As many quanta at every worker as make one of `workers` positive; none of these is."""
        highest = max(self._of(credit, worker.name) for worker in workers)
        rounds = math.floor(-highest / self.worker_quantum) + 1
        for worker in self._workers:
            credit[worker] = min(self.worker_quantum, self._of(credit, worker) + rounds * self.worker_quantum)

    def _account(self, client: str) -> _Account:
        account = self._accounts.get(client)
        if account is None:
            estate = self._estates.get(_bucket(client), {})
            account = _Account({worker: min(0.0, estate.get(worker, 0.0)) for worker in self._workers})
            self._accounts[client] = account
            self._idle[client] = None
        return account

    def _forget(self) -> None:
        while len(self._accounts) > self.max_clients and self._idle:
            client, _ = self._idle.popitem(last=False)
            credit = self._accounts.pop(client).credit
            if any(amount < 0 for amount in credit.values()):
                estate = self._estates.setdefault(_bucket(client), {})
                for worker, amount in credit.items():
                    estate[worker] = min(amount, estate.get(worker, 0.0))


def _bucket(client: str) -> int:
    return zlib.crc32(client.encode()) % _ESTATES
