"""Who is within its share: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) gives requests their tier.

    cost    uncached prompt tokens + 2 · expected output tokens, at least 1, over the client's weight
    start   of a client that begins to wait: max(virtual time, its start); with each request that goes, and by what it
            took more or less than expected when it is over, it moves on by the cost
    tag     of a request: its client's start + the cost of what that client has waiting before it, in the order of the
            client's own deadlines (`fronts`)
    virtual time
            the least start of the clients that wait; if nobody waits, that of the last one that went. It never falls
    tier    1 if the tag is more than `ahead` beyond virtual time, else 0. It changes as time passes, and when the same
            client sends something more urgent

Deadlines say who goes first within a tier. So they cannot be bought by flooding: who has been served `ahead` beyond
virtual time waits behind all that have not, whatever deadlines it claims.

What is promised, if no request of tier 1 goes while one of tier 0 waits. As long as a request of a client waits, each
other client is served at most `ahead` and one request's cost, per weight, beyond that client's start; then it is in
tier 1. So no client starves, and two that wait all the time differ by at most `ahead` and a request of each. A client
that asks for no more than it is served is always in tier 0. Which of its requests go is the client's own affair.

    leaving      a client that owes keeps its start until virtual time has come to it: nothing is gained by pausing,
                 nor does an idle client save anything up
    withdrawing  costs nothing
    lying        when a request is over, what it cost more or less than expected moves its client's start
    names        k invented names are k clients. Costs are not below 1, so requests without end are not free

Requests of a model that no worker can serve would hold virtual time up: `serve` says which models count.

An arrival, a request that goes and a tier that changes cost O(log waiting). Kept are the requests that are not over,
and the clients that have one or owe; of those without requests at most `most_owing`, who owe most.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from router.placement.fronts import Front, Key
from sglang_fair.common.weights import Weights
from sglang_fair.core.heap import LazyHeap

OUTPUT_PRICE = 2.0
LEAST_COST = 1.0
_SETTLED = 4
"""Clients whose tiers are brought up to date with one event."""


@dataclass(slots=True)
class _Client:
    name: str
    start: float
    requests: int = 0
    """Waiting or running."""
    waiting: float = 0.0
    """Cost of those that wait."""
    in_time: Front = field(default_factory=Front)
    late: Front = field(default_factory=Front)
    models: dict[str, int] = field(default_factory=dict)
    """How many wait, by model."""

    @property
    def next_tag(self) -> float | None:
        """The least tag, less the start, of those beyond its share; None if nobody is."""
        first, other = self.in_time.next_tag, self.late.next_tag
        if first is None or other is None:
            return other if first is None else first
        return min(first, other)


@dataclass(slots=True)
class _Tagged:
    client: str
    model: str
    key: Key
    cost: float
    """Per weight, still to be charged when it goes."""
    charged: float
    """Per weight, so far."""
    weight: float
    is_late: bool = False
    waits: bool = True
    tier: int = 1
    told: int = 1


class Shares:
    """Tiers for the requests of all clients. ValueError unless `ahead`, in units, is a positive number or inf."""

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
        self._requests: dict[str, _Tagged] = {}
        self._starts: dict[str, LazyHeap[str]] = {}
        """By model, the clients that wait for it, by start."""
        self._coming: LazyHeap[str] = LazyHeap()
        """Clients of whom a request waits beyond their share, by the virtual time at which it comes within."""
        self._unsettled: dict[str, None] = {}
        self._changed: dict[str, None] = {}
        """Requests of another tier than was told."""
        self._served: frozenset[str] | None = None
        self._arrivals = 0

    # -- requests

    def arrive(
        self,
        request_id: str,
        client: str,
        model: str,
        uncached_tokens: float,
        expected_output_tokens: float,
        deadline_s: float = 0.0,
    ) -> int:
        """A request waits. Its tier; that of the first one if the id is here already, which costs nothing."""
        known = self._requests.get(request_id)
        if known is not None:
            return known.tier
        account = self._clients.get(client)
        if account is None:
            account = self._clients[client] = _Client(client, self.virtual)
        account.requests += 1
        self._owing.discard(client)
        weight = self.weights.of(client)
        cost = _cost(uncached_tokens, expected_output_tokens) / weight
        self._arrivals += 1
        key = deadline_s, self._arrivals, request_id
        tagged = self._requests[request_id] = _Tagged(client, model, key, cost, 0.0, weight)
        self._wait(account, tagged)
        tagged.told = tagged.tier
        self._changed.pop(request_id, None)
        return tagged.tier

    def standing(self, client: str) -> int | None:
        """The tier that a request of this client has if nothing else of it waits; None if something does."""
        account = self._clients.get(client)
        if account is None:
            return 0
        return None if account.models else int(account.start > self.virtual + self.ahead)

    def pass_by(
        self, request_id: str, client: str, model: str, uncached_tokens: float, expected_output_tokens: float
    ) -> None:
        """A request of a client of whom nothing waits goes at once: as `arrive` and `go`."""
        if request_id in self._requests:
            return
        account = self._clients.get(client)
        if account is None:
            account = self._clients[client] = _Client(client, self.virtual)
        assert not account.models, client
        account.requests += 1
        self._owing.discard(client)
        weight = self.weights.of(client)
        cost = _cost(uncached_tokens, expected_output_tokens) / weight
        start = max(account.start, self.virtual)
        account.start = start + cost
        tier = int(start > self.virtual + self.ahead)
        key = 0.0, 0, request_id
        self._requests[request_id] = _Tagged(client, model, key, 0.0, cost, weight, False, False, tier, tier)
        if not self._starts:
            self._go_on(start)

    def go(self, request_id: str) -> None:
        """A request that waited is served now, and charged. Nothing happens for an unknown id."""
        tagged = self._requests.get(request_id)
        if tagged is None or not tagged.waits:
            return
        account, start = self._clients[tagged.client], self._clients[tagged.client].start
        self._leave(account, tagged)
        account.start += tagged.cost
        tagged.charged += tagged.cost
        tagged.cost = 0.0
        self._moved(account)
        self._go_on(start)

    def miss(self, request_id: str) -> None:
        """A request that waits is late: it stands among its client's late ones."""
        tagged = self._requests.get(request_id)
        if tagged is None or not tagged.waits or tagged.is_late:
            return
        account = self._clients[tagged.client]
        account.in_time.remove(tagged.key)
        tagged.is_late = True
        self._stand(account, tagged)
        self._settle(account)

    def withdraw(self, request_id: str) -> None:
        """A request that waits is given up: it costs nothing."""
        tagged = self._requests.get(request_id)
        if tagged is None or not tagged.waits:
            return
        account = self._clients[tagged.client]
        self._leave(account, tagged)
        self._settle(account)
        self._end(request_id, tagged, 0.0)

    def end(self, request_id: str, uncached_tokens: float, output_tokens: float) -> None:
        """A request that was served is over, and was of this cost. One that still waits was served elsewhere."""
        tagged = self._requests.get(request_id)
        if tagged is None:
            return
        if tagged.waits:
            account = self._clients[tagged.client]
            self._leave(account, tagged)
            self._settle(account)
        self._end(request_id, tagged, _cost(uncached_tokens, output_tokens) / tagged.weight - tagged.charged)

    def tier(self, request_id: str) -> int | None:
        """As it is judged now, or was when it went; None for an unknown id."""
        tagged = self._requests.get(request_id)
        return None if tagged is None else tagged.tier

    def drain_changed(self, most: int = 1 << 30) -> list[tuple[str, int]]:
        """The requests that wait and are of another tier than was told, with that tier; at most `most`, and the others
        the next time. A few for each one that goes are enough."""
        self._settle_some()
        found: list[tuple[str, int]] = []
        while self._changed and len(found) < most:
            name = next(iter(self._changed))
            del self._changed[name]
            tagged = self._requests.get(name)
            if tagged is not None and tagged.waits and tagged.tier != tagged.told:
                tagged.told = tagged.tier
                found.append((name, tagged.tier))
        return found

    # -- what the system can serve

    def serve(self, models: Collection[str] | None) -> None:
        """Only requests of these models hold virtual time back; None: of all. O(models)."""
        self._served = None if models is None else frozenset(models)
        self._go_on()

    # -- what is here

    def lead(self, client: str) -> float:
        """How far a client is beyond virtual time with all that it has waiting, in units per weight."""
        account = self._clients.get(client)
        return 0.0 if account is None else max(0.0, account.start + account.waiting - self.virtual)

    @property
    def clients(self) -> int:
        """How many are remembered."""
        return len(self._clients)

    def __len__(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    # -- inside

    def _wait(self, account: _Client, tagged: _Tagged) -> None:
        """It waits from now on."""
        if not account.models:
            account.start = max(account.start, self.virtual)
        account.models[tagged.model] = account.models.get(tagged.model, 0) + 1
        account.waiting += tagged.cost
        self._stand(account, tagged)
        self._moved(account)
        self._go_on()

    def _stand(self, account: _Client, tagged: _Tagged) -> None:
        """It has its place among those of its client."""
        front = account.late if tagged.is_late else account.in_time
        self._set(tagged.key[2], 0 if front.put(tagged.key, tagged.cost) else 1)

    def _leave(self, account: _Client, tagged: _Tagged) -> None:
        tagged.waits = False
        (account.late if tagged.is_late else account.in_time).remove(tagged.key)
        count = account.models.pop(tagged.model)
        if count > 1:
            account.models[tagged.model] = count - 1
        else:
            heap = self._starts[tagged.model]
            heap.discard(account.name)
            if not len(heap):
                del self._starts[tagged.model]
        account.waiting = account.waiting - tagged.cost if account.models else 0.0

    def _moved(self, account: _Client) -> None:
        """Its start is another one, or it waits for another model."""
        for model in account.models:
            heap = self._starts.get(model)
            if heap is None:
                heap = self._starts[model] = LazyHeap()
            heap.put(account.name, (account.start, account.name))
        self._settle(account)

    def _settle(self, account: _Client) -> None:
        """Which of its requests are within its share, a few at a time."""
        limit = self.virtual + self.ahead - account.start
        is_unsettled = False
        for front in (account.in_time, account.late):
            if not front.keys:
                continue
            come, go, more = front.settle(limit)
            is_unsettled |= more
            for name in come:
                self._set(name, 0)
            for name in go:
                self._set(name, 1)
        if is_unsettled:
            self._unsettled[account.name] = None
        tag = account.next_tag
        if tag is not None:
            self._coming.put(account.name, (account.start + tag - self.ahead, account.name))
        else:
            self._coming.discard(account.name)

    def _set(self, request_id: str, tier: int) -> None:
        tagged = self._requests[request_id]
        tagged.tier = tier
        if tier != tagged.told:
            self._changed[request_id] = None

    def _settle_some(self) -> None:
        """A few of those that are not up to date."""
        for _ in range(_SETTLED):
            name = next(iter(self._unsettled), None)
            if name is None:
                name = self._coming.first()
                if name is None:
                    return
                first = self._clients[name]
                tag = first.next_tag
                if tag is None or first.start + tag - self.ahead > self.virtual:
                    return
            self._unsettled.pop(name, None)
            account = self._clients.get(name)
            if account is not None:
                self._settle(account)

    def _go_on(self, gone: float | None = None) -> None:
        """Virtual time comes to the first start, or to that of the one that went, if nobody is left. Clients that owe
        nothing any more are forgotten."""
        first: float | None = None
        for model, heap in self._starts.items():
            if self._served is None or model in self._served:
                name = heap.first()
                assert name is not None
                start = self._clients[name].start
                first = start if first is None else min(first, start)
        if first is None:
            first = gone
        if first is not None:
            self.virtual = max(self.virtual, first)
        self._settle_some()
        while (client := self._owing.first()) is not None and self._clients[client].start <= self.virtual:
            self._owing.discard(client)
            del self._clients[client]

    def _end(self, request_id: str, tagged: _Tagged, more: float) -> None:
        del self._requests[request_id]
        self._changed.pop(request_id, None)
        account = self._clients[tagged.client]
        account.start += more
        account.requests -= 1
        if account.models:
            account.start = max(account.start, self.virtual)
            self._moved(account)
        if not account.requests:
            self._unsettled.pop(account.name, None)
            self._owing.put(account.name, (account.start, account.name))
            if len(self._owing) > self._most_owing and (least := self._owing.first()) is not None:
                self._owing.discard(least)
                del self._clients[least]
        if self._starts or len(self._owing):
            self._go_on()


def _cost(uncached_tokens: float, output_tokens: float) -> float:
    return max(LEAST_COST, uncached_tokens + OUTPUT_PRICE * output_tokens)
