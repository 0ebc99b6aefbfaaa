"""VTC, the virtual token counter: the client that was served least goes next (VTC, Algorithm 2).

Every client has a counter of the service it was given, divided by its weight. A client that (re)joins the queue is
lifted to the smallest counter there, so that it cannot save credit while it is away; if the queue is empty, to the
counter of the client that left it last. A counter is never lowered.

Unit of fairness: service units (tokens by the cost function), whatever they were spent on. Two clients
that both have requests waiting never differ by more than 2·max(w_e·L_input, w_q·M) (Theorem 4.4).
Knobs: the weights. Trade-off: clients are interleaved without regard to the prefix cache, which costs hit rate.
Known leak: output is charged while it is made, so a client can start a pool full of long answers before the first of
them is charged (`predicted` charges ahead). And new names: each is lifted to the smallest counter of those who wait, so
while two of them wait, the next one comes in below every client that was served before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from sglang_fair.common.weights import Weights
from sglang_fair.core.clients import OneTurn
from sglang_fair.core.heap import LazyHeap
from sglang_fair.core.job import Job
from sglang_fair.core.predictor import Oracle, Predictor
from sglang_fair.core.waits import DEFICIT


@dataclass
class Vtc(OneTurn):
    """Smallest counter first, then the earliest head request; FIFO within a client."""

    name: ClassVar[str] = "vtc"
    turn_cause: ClassVar[str] = DEFICIT
    shares_steps: ClassVar[bool] = True
    weights: Weights = field(default_factory=Weights)
    predictor: Predictor | None = None

    _counter: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _turn: LazyHeap[str] = field(default_factory=LazyHeap, init=False, repr=False)
    _idle: LazyHeap[str] = field(default_factory=LazyHeap, init=False, repr=False)
    _left_last: str = field(default="", init=False, repr=False)
    _left_counter: float = field(default=0.0, init=False, repr=False)
    """Its counter, once it was forgotten."""

    def arrive(self, job: Job) -> None:
        client = job.client
        if client not in self._queues:
            self._idle.discard(client)
            self._counter[client] = max(self._counter.get(client, 0.0), self._floor())
            self._turns[client] = False
        self._queues.put(job)
        self._seat(client)

    def leave(self, job: Job) -> None:
        self._queues.leave(job)
        if job.client not in self._queues:
            self._left_last, self._left_counter = job.client, 0.0
            self._turns.pop(job.client, None)
        self._seat(job.client)

    def pick(self) -> Job | None:
        """The first request of the client with the smallest counter. While that is set aside, none is offered whose
        counter is larger: its own grows as its requests run."""
        client = self._turn.first()
        if client is None or self._counter[client] > min(
            (self._counter[other] for other in self._queues.aside()), default=inf
        ):
            return None
        return self._queues.head(client)

    def charge(self, client: str, units: float) -> None:
        self._counter[client] = self._counter.get(client, 0.0) + units / self.weights.of(client)
        self._seat(client)

    def idle(self, client: str) -> None:
        """A client is forgotten as soon as the lift would overwrite its counter, so the guarantee stays (VTC §4.1)."""
        if client in self._counter and client not in self._queues:
            self._idle.put(client, (self._counter[client], client))
        floor = self._floor()
        while (gone := self._idle.first()) is not None and self._counter[gone] <= floor:
            self._forget(gone)

    def counters(self) -> Mapping[str, float]:
        return self._counter

    def counter(self, client: str) -> float | None:
        return self._counter.get(client)

    def _next(self) -> str | None:
        return self._turn.first()

    def bound(self, input_units: float, output_units: float, weight: float = 1.0) -> float | None:
        """2·max(w_p·L_input, w_q·M) / min weight (Theorem 4.4), if an output token is not cheaper than an input token.

        Returned is the bound with the sum in place of the maximum, which also holds for w_q < w_p and for chunked
        prefill. None with a predictor that errs: a refund lowers a counter, and the theorem needs the smallest counter
        never to fall.
        """
        if not isinstance(self.predictor, Oracle | None):
            return None
        return 2 * (input_units + output_units) / weight

    def owes(self, client: str) -> bool:
        """Its counter is above the smallest of those who wait."""
        counter = self._counter.get(client)
        return counter is not None and counter > self._floor()

    def _floor(self) -> float:
        """The counter to which a client that joins the queue is lifted (Algorithm 2, lines 8-13)."""
        queued = [self._counter[client] for client in self._queues.held_clients()]
        first = self._turn.first()
        if first is not None:
            queued.append(self._counter[first])
        if queued:
            return min(queued)
        return self._counter.get(self._left_last, self._left_counter)

    def _forget(self, client: str) -> None:
        self._idle.discard(client)
        counter = self._counter.pop(client)
        if client == self._left_last:
            self._left_counter = counter

    def _seat(self, client: str) -> None:
        head = self._queues.head(client)
        if head is None:
            self._turn.discard(client)
        else:
            self._turn.put(client, (self._counter[client], head.arrival))


@dataclass
class Lcf(Vtc):
    """LCF, least counter first: VTC without the lift. The VTC paper's baseline that shows what the lift is for.

    A client that joins the queue keeps its counter; a new client starts at 0. Unit of fairness: service units in total
    since the server started. Bound: none between clients that wait, because a client that was away longer is owed more;
    one that comes late, or comes back late, is served alone until it has caught up.
    Knobs: the weights; `remembered_clients`, how many absent clients' counters are kept.
    Trade-offs: equal totals over a day suit a shared budget, not a shared queue. Known leak: a new name starts at 0,
    and so does an absent client beyond `remembered_clients`; the smallest counters, which gain least by it, are
    forgotten first.
    """

    name: ClassVar[str] = "lcf"
    shares_steps: ClassVar[bool] = False
    remembered_clients: int = 10_000

    def idle(self, client: str) -> None:
        super().idle(client)
        while len(self._idle) > self.remembered_clients and (poorest := self._idle.first()) is not None:
            self._forget(poorest)

    def bound(self, input_units: float, output_units: float, weight: float = 1.0) -> float | None:
        """None: there is no limit to what a client is owed for its absence."""
        return None

    def owes(self, client: str) -> bool:
        """False: there is no bound that would want to know."""
        return False

    def _floor(self) -> float:
        return 0.0
