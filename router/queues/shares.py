"""Who is within its share: start-time fair queueing tags (Goyal, Vin and Cheng, SIGCOMM 1996) give requests their tier.

    cost    uncached prompt tokens + 2 · expected output tokens, at least 1, over the client's weight
    tag     start = max(virtual time, the client's finish);  finish = start + cost
    virtual time
            the least start tag of those that wait; if nobody waits, that of the last one that went. It never falls
    tier    1 if the tag is more than `ahead` beyond virtual time, else 0. Virtual time goes on, so a request of tier 1
            comes into tier 0 some time, and stays there

Deadlines say who goes first within a tier. So they cannot be bought by flooding: who has sent more than `ahead` beyond
its share waits behind all that have not, whatever deadlines it claims.

What is promised, if no request of tier 1 goes while one of tier 0 waits. As long as a request waits, each other client
is served at most `ahead` and one request's cost, per weight, beyond that request's tag; then it is in tier 1. So nobody
starves, and two clients that wait all the time differ by at most `ahead` and a request of each. A client that asks for
no more than it is served is always in tier 0.

    leaving      a client that owes keeps its finish until virtual time has come to it: nothing is gained by pausing,
                 nor does an idle client save anything up
    withdrawing  gives the cost back to what the client sends later; the tags of what waits stay
    lying        when a request is over, what it cost more or less than expected is added to its client's finish
    names        k invented names are k clients. Costs are not below 1, so requests without end are not free

Requests of a model that no worker can serve would hold virtual time up: `serve` says which models count.

An arrival, a request that goes and one that comes into tier 0 cost O(log waiting). Kept are the requests that are not
over, and the clients that have one or owe; of those without requests at most `most_owing`, who owe most.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from sglang_fair.common.weights import Weights
from sglang_fair.core.heap import LazyHeap

OUTPUT_PRICE = 2.0
LEAST_COST = 1.0
DROPPED = 4
"""Entries of requests that wait no more, dropped with one event: there are many if others went first. Until they are,
virtual time is a little behind."""


@dataclass(slots=True)
class _Client:
    finish: float
    requests: int = 0
    """Waiting or running."""


@dataclass(slots=True)
class _Tagged:
    client: str
    model: str
    start: float
    cost: float
    """Per weight."""
    weight: float
    waits: bool = True


class Shares:
    """Tags for the requests of all clients. ValueError unless `ahead`, in units, is a positive number or inf."""

    def __init__(
        self,
        ahead: float = 250_000.0,
        weights: Weights | None = None,
        *,
        dropped: int = DROPPED,
        most_owing: int = 50_000,
    ) -> None:
        if not ahead > 0:
            raise ValueError(f"ahead must be a number above 0, not {ahead!r}")
        self.ahead, self._dropped, self._most_owing = ahead, dropped, most_owing
        self.weights = weights if weights is not None else Weights()
        self.virtual = 0.0
        self._clients: dict[str, _Client] = {}
        self._owing: LazyHeap[str] = LazyHeap()
        """Clients without requests, by finish."""
        self._requests: dict[str, _Tagged] = {}
        self._waiting: dict[str, LazyHeap[str]] = {}
        """By model, those that wait, by start tag."""
        self._ahead: LazyHeap[str] = LazyHeap()
        """Those that wait and of which nobody was told that they are in tier 0, by start tag."""
        self._served: frozenset[str] | None = None

    # -- requests

    def arrive(
        self, request_id: str, client: str, model: str, uncached_tokens: float, expected_output_tokens: float
    ) -> int:
        """A request waits. Its tier; that of the first one if the id is here already, which costs nothing."""
        known = self._requests.get(request_id)
        if known is not None:
            return self._judged(known)
        account = self._clients.setdefault(client, _Client(self.virtual))
        account.requests += 1
        self._owing.discard(client)
        weight = self.weights.of(client)
        start = max(self.virtual, account.finish)
        cost = _cost(uncached_tokens, expected_output_tokens) / weight
        account.finish = start + cost
        tagged = self._requests[request_id] = _Tagged(client, model, start, cost, weight)
        return self._wait(request_id, tagged)

    def go(self, request_id: str) -> None:
        """A request that waited is served now. Nothing happens for an unknown id."""
        tagged = self._requests.get(request_id)
        if tagged is None or not tagged.waits:
            return
        self._leave(request_id, tagged)
        self._go_on(tagged.start)

    def come_back(self, request_id: str) -> int | None:
        """A request that was served was taken back and waits again, with its tag and its tier: what it has had is not
        to be paid twice. Returns the tier; None if it does not run."""
        tagged = self._requests.get(request_id)
        if tagged is None or tagged.waits:
            return None
        tagged.waits = True
        return self._wait(request_id, tagged)

    def withdraw(self, request_id: str) -> None:
        """A request that waits is given up: it costs nothing."""
        tagged = self._requests.get(request_id)
        if tagged is None or not tagged.waits:
            return
        self._leave(request_id, tagged)
        self._end(request_id, tagged, -tagged.cost)

    def end(self, request_id: str, uncached_tokens: float, output_tokens: float) -> None:
        """A request that was served is over, and was of this cost. One that still waits was served elsewhere."""
        tagged = self._requests.get(request_id)
        if tagged is None:
            return
        if tagged.waits:
            self._leave(request_id, tagged)
        self._end(request_id, tagged, _cost(uncached_tokens, output_tokens) / tagged.weight - tagged.cost)

    def tier(self, request_id: str) -> int | None:
        """As it is judged now; None for an unknown id."""
        tagged = self._requests.get(request_id)
        return None if tagged is None else self._judged(tagged)

    def drain_promoted(self, most: int = 1 << 30) -> list[str]:
        """The requests that have come into tier 0 and still wait, in order of their tags, each once; at most `most`,
        and the others the next time. Each request comes once at most, so a few for each one that goes are enough."""
        found: list[str] = []
        for _ in range(most):
            first = self._ahead.floor(self._dropped)
            if first is None or first[0] > self.virtual + self.ahead:
                break
            if first[1] in self._ahead and self._ahead.key(first[1]) == first:
                self._ahead.discard(first[1])
                found.append(first[1])
        return found

    # -- what the system can serve

    def serve(self, models: Collection[str] | None) -> None:
        """Only requests of these models hold virtual time back; None: of all. O(models)."""
        self._served = None if models is None else frozenset(models)
        self._go_on()

    # -- what is here

    def lead(self, client: str) -> float:
        """How far a client's next request would be beyond virtual time, in units per weight: 0 within its share."""
        account = self._clients.get(client)
        return 0.0 if account is None else max(0.0, account.finish - self.virtual)

    @property
    def clients(self) -> int:
        """How many are remembered."""
        return len(self._clients)

    def __len__(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    # -- inside

    def _judged(self, tagged: _Tagged) -> int:
        """Its tier. Virtual time never falls, so whoever is in tier 0 stays there."""
        return int(tagged.start > self.virtual + self.ahead)

    def _wait(self, request_id: str, tagged: _Tagged) -> int:
        """It waits from now on. Its tier."""
        heap = self._waiting.get(tagged.model)
        if heap is None:
            heap = self._waiting[tagged.model] = LazyHeap()
        heap.put(request_id, (tagged.start, request_id))
        self._go_on()
        tier = self._judged(tagged)
        if tier:
            self._ahead.put(request_id, (tagged.start, request_id))
        return tier

    def _leave(self, request_id: str, tagged: _Tagged) -> None:
        tagged.waits = False
        heap = self._waiting[tagged.model]
        heap.discard(request_id)
        if not len(heap):
            del self._waiting[tagged.model]
        self._ahead.discard(request_id)

    def _first(self) -> float | None:
        """The least start tag of those that wait and can be served, or a little less: of each model at most `dropped`
        that wait no more are left out at a time. None if nobody waits."""
        served, least = self._served, inf
        for model, heap in self._waiting.items():
            if served is None or model in served:
                least = min(least, heap.floor(self._dropped)[0])
        return None if least == inf else least

    def _go_on(self, gone: float | None = None) -> None:
        """Virtual time comes to the first tag, or to that of the one that went, if nobody is left. Clients that owe
        nothing any more are forgotten."""
        first = self._first()
        if first is None:
            first = gone
        if first is not None:
            self.virtual = max(self.virtual, first)
        while (client := self._owing.first()) is not None and self._clients[client].finish <= self.virtual:
            self._owing.discard(client)
            del self._clients[client]

    def _end(self, request_id: str, tagged: _Tagged, more: float) -> None:
        del self._requests[request_id]
        account = self._clients[tagged.client]
        account.finish += more
        account.requests -= 1
        if not account.requests:
            self._owing.put(tagged.client, (account.finish, tagged.client))
            if len(self._owing) > self._most_owing and (least := self._owing.first()) is not None:
                self._owing.discard(least)
                del self._clients[least]
        self._go_on()


def _cost(uncached_tokens: float, output_tokens: float) -> float:
    return max(LEAST_COST, uncached_tokens + OUTPUT_PRICE * output_tokens)
