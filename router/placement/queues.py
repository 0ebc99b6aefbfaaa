"""What clients have at workers, and how long each would wait there for its turn.

A fair worker serves its clients in turns. So a client that has m units there waits for at most m units of any other
client, however much that one has: it is done after

    m + the sum over all others of min(what they have, m)

units, weights apart. To know this sum without a look at each client, a worker's queues are kept in buckets by powers
of two, each with the units and the weights of the clients in it. min(its units, its weights · m) is exact for a bucket
that m does not fall into, and for the one that it does at most twice as much. So a delay costs the same for ten
clients and for ten thousand.

All units here are per capacity of the worker, so a delay is in units of a worker of capacity 1. They lie in matrices
with one column for each worker, in the order of names. Beyond `max_clients`, the clients without requests in flight
that have been idle longest are forgotten.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_fair.common.weights import Weights

Floats = NDArray[np.float64]

OUTSTANDING, SENT, QUEUE = range(3)
"""What an account has of each worker: units of the requests in flight; sent so far, of which only differences have a
meaning; those in flight and what is expected to follow them, 0 where nothing is in flight."""

_BUCKETS = 32
"""Bucket b is of the clients with 2^(b-1) to 2^b units per weight; the first and the last are of all beyond."""
_COUNTED = 8
"""Requests of one client that are part of a worker's crowd: more are its own affair."""
_ROWS = 64
"""Of the matrix, to begin with; it doubles."""


@dataclass(slots=True, eq=False)
class Account:
    """One client. `prefixes` it has begun, and the `units` of all its requests: what one prefix brings is the mean."""

    client: str
    row: int
    weight: float
    in_flight: int = 0
    prefixes: int = 0
    units: float = 0.0
    home: str = ""
    """The worker of its last request."""
    least_sent: float = 0.0
    """No worker was sent less, per capacity."""


class Queues:
    """All clients' units at all workers."""

    def __init__(self, weights: Weights, max_clients: int) -> None:
        if max_clients < 1:
            raise ValueError(f"max_clients is {max_clients}: at least one is needed")
        self.columns: dict[str, int] = {}
        """By worker, in the order of names."""
        self.in_flight: Floats = np.zeros(0)
        """Requests per capacity, by column."""
        self.crowds: Floats = np.zeros(0)
        """The same, of each client at most `_COUNTED`."""
        self.paces: Floats = np.zeros(0)
        """One over the capacity, by column."""
        self.weights = weights
        self._max_clients = max_clients
        self._accounts: dict[str, Account] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        """Clients without requests in flight, the longest idle first."""
        self._free = list(range(_ROWS))
        self._state: Floats = np.zeros((_ROWS, 3, 0))
        self._requests = np.zeros((_ROWS, 0), np.int64)
        """In flight."""
        self._units: Floats = np.zeros((_BUCKETS, 0))
        self._shares: Floats = np.zeros((_BUCKETS, 0))
        self._clients = np.zeros((_BUCKETS, 0), np.int64)
        """Of each bucket: units, weights of the clients, and how many they are."""

    # -- clients and workers

    def of(self, client: str) -> Account:
        """The account of `client`, a new one if it is not known."""
        account = self._accounts.get(client)
        if account is None:
            if not self._free:
                rows = len(self._state)
                self._state = np.concatenate([self._state, np.zeros_like(self._state)])
                self._requests = np.concatenate([self._requests, np.zeros_like(self._requests)])
                self._free = list(range(rows, 2 * rows))
            account = self._accounts[client] = Account(client, self._free.pop(), self.weights.of(client))
            self._idle[client] = None
        return account

    def queue(self, account: Account) -> Floats:
        """Row `QUEUE` of a client. Not to be written to."""
        found: Floats = self._state[account.row, QUEUE]
        return found

    def at(self, account: Account, column: int) -> list[float]:
        """What a client has at one worker, in the order of `OUTSTANDING`, `SENT` and `QUEUE`."""
        found: list[float] = self._state[account.row, :, column].tolist()
        return found

    def sent(self, account: Account) -> Floats:
        """Row `SENT` of a client. Not to be written to."""
        found: Floats = self._state[account.row, SENT]
        return found

    def worker_up(self, worker: str, capacity: float) -> None:
        """Nobody has anything there, and each client has been sent as much as to the worker where that was least."""
        names = sorted([*self.columns, worker])
        column = names.index(worker)
        least = self._state[:, SENT].min(axis=1) if self.columns else 0.0
        self._change_columns(lambda matrix: np.insert(matrix, column, 0, axis=-1))
        self._state[:, SENT, column] = least
        self.paces[column] = 1 / capacity
        self.columns = {name: number for number, name in enumerate(names)}

    def worker_changed(self, worker: str, capacity: float) -> None:
        column = self.columns[worker]
        factor = 1 / (capacity * float(self.paces[column]))
        self.paces[column] = 1 / capacity
        self.in_flight[column] *= factor
        self.crowds[column] *= factor
        for account in self._accounts.values():
            outstanding, _, queue = self._state[account.row, :, column].tolist()
            if queue:
                self._set(account, column, factor * outstanding, factor * (queue - outstanding))

    def worker_down(self, worker: str) -> None:
        """It is gone; nothing is in flight there."""
        column = self.columns[worker]
        self._change_columns(lambda matrix: np.delete(matrix, column, axis=-1))
        self.columns = {name: number for number, name in enumerate(n for n in self.columns if n != worker)}

    def reweighed(self, client: str) -> None:
        """Its weight has changed: its queues go to other buckets. O(workers)."""
        account = self._accounts.get(client)
        if account is None:
            return
        queues = [(column, units) for column, units in enumerate(self.queue(account).tolist()) if units]
        for column, units in queues:
            self._count(account.weight, column, units, -1)
        account.weight = self.weights.of(client)
        for column, units in queues:
            self._count(account.weight, column, units, 1)

    def latest(self, limit: int) -> list[Account]:
        """At most `limit` clients, those with requests in flight first, then the latest."""
        busy = [client for client in reversed(self._accounts) if client not in self._idle]
        return [self._accounts[client] for client in (busy + list(reversed(self._idle)))[:limit]]

    # -- requests

    def delays(self, account: Account, units: Floats) -> Floats:
        """How many units each worker serves before it has served `units` of this client, those in its queue included
        and those that it adds to it left out.

        `units` is the client's `QUEUE` and what it adds. The client's own queue is in the buckets like all others.
        """
        shares = self._shares * (units if account.weight == 1.0 else units / account.weight)
        delays: Floats = np.add.reduce(np.minimum(self._units, shares, out=shares), axis=0)
        return delays

    def begin(self, account: Account, column: int, units: float, following: float) -> None:
        """A request of `units` was sent to a worker, where `following` units are expected after it."""
        row, state = account.row, self._state
        if not account.in_flight:
            self._idle.pop(account.client, None)
        account.in_flight += 1
        pace = self.paces[column]
        self.in_flight[column] += pace
        if self._requests[row, column] < _COUNTED:
            self.crowds[column] += pace
        self._requests[row, column] += 1
        state[row, SENT, column] = state.item(row, SENT, column) + units
        self._set(account, column, state.item(row, OUTSTANDING, column) + units, following)

    def end(self, client: str, column: int, units: float, more: float) -> None:
        """A request that was begun with `units` is over; it took `more` than that, or less if negative."""
        account = self._accounts[client]
        outstanding, sent, queue = self._state[account.row, :, column].tolist()
        self._state[account.row, SENT, column] = sent + more
        account.least_sent = min(account.least_sent, sent + more)
        pace = self.paces[column]
        self.in_flight[column] -= pace
        self._requests[account.row, column] -= 1
        if self._requests[account.row, column] < _COUNTED:
            self.crowds[column] -= pace
        if self._requests[account.row, column]:
            self._set(account, column, max(0.0, outstanding - units), queue - outstanding)
        else:
            self._set(account, column, 0.0, 0.0)
        account.in_flight -= 1
        if not account.in_flight:
            self._idle[client] = None
            self._forget()

    def may_have(self, account: Account, column: int, reach: float) -> bool:
        """True only if `allowed` says so of this worker where all can be used; that is found out mostly without a look
        at all of them."""
        outstanding, sent, _ = self._state[account.row, :, column].tolist()
        if sent > account.least_sent + reach:
            account.least_sent = float(np.minimum.reduce(self._state[account.row, SENT]))
            if sent > account.least_sent + reach:
                return False
        most = (
            reach
            if outstanding <= reach
            else reach + np.minimum.reduce(self._state[account.row, OUTSTANDING])
        )
        return bool(outstanding <= most)

    def allowed(self, account: Account, at: Sequence[int], reach: float) -> NDArray[np.bool_]:
        """Which of the workers `at` may get a request: those where the client has in flight at most `reach` more than
        at any other and, of these, those that it was sent at most `reach` more than any other of these."""
        outstanding, sent = self._state[account.row, : SENT + 1, at].T
        short: NDArray[np.bool_] = outstanding <= outstanding.min() + reach
        even: NDArray[np.bool_] = sent <= sent[short].min() + reach
        return short & even

    def leave_out(self, account: Account, at: Sequence[int]) -> None:
        """Only the workers `at` can be used now: what the others are not sent meanwhile need not be made up for."""
        sent = self._state[account.row, SENT]
        least = sent[at].min()
        others = np.delete(np.arange(len(sent)), at)
        sent[others] = np.maximum(sent[others], least)

    def _set(self, account: Account, column: int, outstanding: float, following: float) -> None:
        row, after = account.row, outstanding + following
        before = self._state.item(row, QUEUE, column)
        self._state[row, OUTSTANDING, column] = outstanding
        self._state[row, QUEUE, column] = after
        if before:
            self._count(account.weight, column, before, -1)
        if after:
            self._count(account.weight, column, after, 1)

    def _count(self, weight: float, column: int, units: float, sign: int) -> None:
        """A client with so many units comes into its bucket (`sign` 1) or leaves it (-1)."""
        bucket = min(max(0, frexp(units / weight)[1]), _BUCKETS - 1)
        self._clients[bucket, column] += sign
        if self._clients[bucket, column]:
            self._units[bucket, column] += sign * units
            self._shares[bucket, column] += sign * weight
        else:  # drop what rounding has left over
            self._units[bucket, column] = self._shares[bucket, column] = 0.0

    def _forget(self) -> None:
        while len(self._accounts) > self._max_clients and self._idle:
            client, _ = self._idle.popitem(last=False)
            row = self._accounts.pop(client).row
            self._state[row] = 0.0
            self._free.append(row)

    def _change_columns(self, change: Any) -> None:
        for name in ("_state", "_requests", "in_flight", "crowds", "paces", "_units", "_shares", "_clients"):
            setattr(self, name, change(getattr(self, name)))
