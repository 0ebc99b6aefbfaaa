"""Who is ahead of its share: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), judged by client.

    cost    uncached prompt tokens + 2 · expected output tokens, at least 1, over the client's weight
    start   of a client: it moves on by the cost of each request that goes, and by what that took more or less than
            expected when it is over. A client that begins to wait starts at virtual time at least
    virtual time
            the least start of the clients that wait; if none waits, that of the last one that went. It never falls
    tier    1 if the client's start is more than `ahead` beyond virtual time, else 0. It is judged when one of its
            requests can go, so which of them goes is the client's own affair: its backlog does not delay its chat

What is promised, if no client of tier 1 is served while one of tier 0 waits: as long as a client waits, each other one
is served at most `ahead` and one request's cost, per weight, beyond that client's start. So no client starves, and two
that wait all the time differ by at most `ahead` and a request of each, whatever deadlines they claim. Nothing is gained
by pausing, and withdrawing costs nothing; k invented names are k clients.

Clients that wait only for models that no worker can serve (`serve`) do not hold virtual time up. Each call costs
O(log clients). Kept are clients that have requests, and of the others `most_owing`, who owe most.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from sglang_fair.common.weights import Weights
from sglang_fair.core.heap import LazyHeap

OUTPUT_PRICE = 2.0
LEAST_COST = 1.0


@dataclass(slots=True)
class _Client:
    name: str
    start: float
    requests: int = 0
    """Waiting or running."""
    waiting: float = 0.0
    """Cost of those that wait."""
    models: Counter[str] = field(default_factory=Counter)
    """How many wait, by model."""


class Shares:
    """Starts and tiers of all clients. ValueError unless `ahead`, in units, is a positive number or inf."""

    def __init__(
        self, ahead: float = 250_000.0, weights: Weights | None = None, *, most_owing: int = 50_000
    ) -> None:
        if not ahead > 0:
            raise ValueError(f"ahead must be a number above 0, not {ahead!r}")
        self.ahead, self._most_owing = ahead, most_owing
        self.weights = weights if weights is not None else Weights()
        self.virtual = 0.0
        self._clients: dict[str, _Client] = {}
        self._owing: LazyHeap[str] = LazyHeap()
        """Clients without requests, by start."""
        self._waiting: LazyHeap[str] = LazyHeap()
        """Those that wait for a model that is served, by start."""
        self._served: frozenset[str] | None = None

    def cost(self, client: str, uncached_tokens: float, output_tokens: float) -> float:
        """Of a request, over its client's weight."""
        return max(LEAST_COST, uncached_tokens + OUTPUT_PRICE * output_tokens) / self.weights.of(client)

    def start(self, client: str) -> float:
        """Of a client; of one that is not known virtual time."""
        account = self._clients.get(client)
        return self.virtual if account is None else account.start

    def is_ahead(self, client: str) -> bool:
        """Whether the next request of this client is ahead of its share."""
        account = self._clients.get(client)
        return account is not None and account.start > self.virtual + self.ahead

    def tier(self, client: str) -> int:
        """That one more request of this client has, behind all that it has waiting."""
        account = self._clients.get(client)
        return 0 if account is None else int(account.start + account.waiting > self.virtual + self.ahead)

    def models(self, client: str) -> Collection[str]:
        """Those that its requests wait for."""
        account = self._clients.get(client)
        return () if account is None else account.models.keys()

    def wait(self, client: str, model: str, cost: float) -> None:
        """A request waits."""
        account = self._open(client)
        account.models[model] += 1
        account.waiting += cost
        self._stand(account)
        self._go_on()

    def withdraw(self, client: str, model: str, cost: float) -> None:
        """A request that waits is given up: it costs nothing."""
        account = self._clients[client]
        self._leave(account, model, cost)
        self._close(account)

    def go(self, client: str, cost: float, model: str | None = None) -> None:
        """A request is served: it waited for `model`, or came just now."""
        if model is None:
            account = self._open(client)
        else:
            account = self._clients[client]
            self._leave(account, model, cost)
        start = account.start
        account.start = start + cost
        self._stand(account)
        self._go_on(start)

    def end(self, client: str, more: float) -> None:
        """A request that was served is over; it cost so much more than it was charged when it went, or less."""
        account = self._clients[client]
        account.start += more
        self._close(account)

    def serve(self, models: Collection[str] | None) -> None:
        """Only requests of these models hold virtual time back; None: of all. O(clients) if that changes."""
        served = None if models is None else frozenset(models)
        if served != self._served:
            self._served = served
            for account in self._clients.values():
                self._stand(account)
            self._go_on()

    def __len__(self) -> int:
        """Clients that are remembered."""
        return len(self._clients)

    def _open(self, client: str) -> _Client:
        account = self._clients.get(client)
        if account is None:
            account = self._clients[client] = _Client(client, self.virtual)
        elif not account.models:
            account.start = max(account.start, self.virtual)
            self._owing.discard(client)
        account.requests += 1
        return account

    def _leave(self, account: _Client, model: str, cost: float) -> None:
        account.models[model] -= 1
        if not account.models[model]:
            del account.models[model]
        account.waiting = account.waiting - cost if account.models else 0.0

    def _close(self, account: _Client) -> None:
        """One of its requests is over."""
        account.requests -= 1
        if account.models:
            account.start = max(account.start, self.virtual)
        self._stand(account)
        self._go_on()
        if not account.requests:
            self._owing.put(account.name, (account.start, account.name))
            least = self._owing.first()
            if least is not None and (
                len(self._owing) > self._most_owing or self._clients[least].start <= self.virtual
            ):
                self._owing.discard(least)
                del self._clients[least]

    def _stand(self, account: _Client) -> None:
        """Its start, or what it waits for, is another."""
        if account.models and (self._served is None or not self._served.isdisjoint(account.models)):
            self._waiting.put(account.name, (account.start, account.name))
        else:
            self._waiting.discard(account.name)

    def _go_on(self, gone: float | None = None) -> None:
        """Virtual time comes to the first start, or to that of the one that went, if none waits."""
        name = self._waiting.first()
        first = gone if name is None else self._clients[name].start
        if first is not None and first > self.virtual:
            self.virtual = first
