"""DRR, deficit round robin adapted to unknown output lengths (VTC, appendix C.2).

Rule: the clients stand in a ring and are visited in turn. Each has a credit. A visited client whose credit is not
positive gets one quantum Q^d; it is then served until its credit is used up or none of its requests waits. Extend and
output tokens are charged as they come, so the credit may fall many quanta below zero; then that many visits pass
without service. A client with nothing waiting is refilled to zero at most: it cannot save credit, and rejoins with no
more credit than it left with.

Visits are counted, not made. A visit is a pair (round, place in the ring). A client's credit determines at which of its
visits it is positive again, so the next client to serve is the smallest visit in a heap: O(log clients), however deep
the debts. A client that joins takes the last place in the ring and is visited from the next round on, so a flood of new
names cannot stretch a round.

Unit of fairness: service units. Two clients that both wait are visited and refilled equally often, up to one visit, and
a credit stays within (-U, Q^d], U = w_e·L_input + w_q·M. So they never differ by more than 2·(U + Q^d) + Q^d. The paper
states no bound.
Knobs: `quantum` Q^d. If it is small, below the cost of one prompt, the client that is owed most goes next, as in VTC
with c = -credit. If it is large, there are long bursts of one client, in order of arrival. Weights divide the charges.
Trade-offs: no locality beyond a burst. Known leak: credit of at most Q^d is dropped when a client is gone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, floor
from typing import ClassVar

from sglang_fair.common.weights import Weights
from sglang_fair.core.clients import OneTurn
from sglang_fair.core.heap import LazyHeap
from sglang_fair.core.job import Job
from sglang_fair.core.policy import DEFAULT_QUANTUM, checked_quantum
from sglang_fair.core.waits import DEFICIT

Visit = tuple[int, int]
"""(round, place in the ring)."""


@dataclass(slots=True)
class Credit:
    """One client's place in the ring, and its credit after its visit in round `settled`."""

    place: int
    units: float
    settled: int


@dataclass
class Drr(OneTurn):
    """Round robin by credit, FIFO within a client. ValueError for a quantum below `LEAST_QUANTUM`."""

    name: ClassVar[str] = "drr"
    turn_cause: ClassVar[str] = DEFICIT
    shares_steps: ClassVar[bool] = True
    keeps_places: ClassVar[bool] = True
    quantum: float = DEFAULT_QUANTUM
    weights: Weights = field(default_factory=Weights)

    _visit: Visit = field(default=(0, 0), init=False, repr=False)
    """The visit in progress; all smaller ones are over."""
    _places: int = field(default=0, init=False, repr=False)
    _credits: dict[str, Credit] = field(default_factory=dict, init=False, repr=False)
    _turn: LazyHeap[str] = field(default_factory=LazyHeap, init=False, repr=False)
    """Clients with a request that is not held, by the visit at which they may be served."""
    _rich: LazyHeap[str] = field(default_factory=LazyHeap, init=False, repr=False)
    """Those of them whose credit is positive now, by the same visit."""
    _passed_over: LazyHeap[str] = field(default_factory=LazyHeap, init=False, repr=False)
    """Clients all of whose waiting requests are held, by the visit at which they may be served."""
    _idle: LazyHeap[str] = field(default_factory=LazyHeap, init=False, repr=False)

    def __post_init__(self) -> None:
        self.quantum = checked_quantum(self.quantum)

    def arrive(self, job: Job) -> None:
        self._idle.discard(job.client)
        self._settle(job.client)
        if job.client not in self._queues:
            self._turns[job.client] = False
        self._queues.put(job)
        self._seat(job.client)

    def leave(self, job: Job) -> None:
        self._settle(job.client)
        self._queues.leave(job)
        if job.client not in self._queues:
            self._turns.pop(job.client, None)
        self._seat(job.client)

    def pick(self) -> Job | None:
        """The first request of the client with the smallest visit. While all requests of the client whose visit comes
        first are held, the ring stands still: only clients with credit left are offered."""
        client, waits = self._turn.first(), self._passed_over.first()
        if client is not None and waits is not None and self._turn.key(client) > self._passed_over.key(waits):
            client = self._rich.first()
        elif client is not None:
            self._visit = self._turn.key(client)
        return None if client is None else self._queues.head(client)

    def charge(self, client: str, units: float) -> None:
        self._settle(client).units -= units / self.weights.of(client)
        self._seat(client)

    def idle(self, client: str) -> None:
        """A client is forgotten as soon as it owes nothing. That drops credit of at most Q^d, and never a debt."""
        if client in self._credits and client not in self._queues:
            credit, due = self._settle(client), self._refills_due(client)
            self._idle.put(client, (credit.settled + due if due else -1, credit.place))
        while (gone := self._idle.first()) is not None and self._idle.key(gone) <= self._visit:
            self._idle.discard(gone)
            del self._credits[gone]

    def counters(self) -> Mapping[str, float]:
        return {client: self._units(client) for client in self._credits}

    def counter(self, client: str) -> float | None:
        return self._units(client) if client in self._credits else None

    def _next(self) -> str | None:
        return self._turn.first()

    def bound(self, input_units: float, output_units: float, weight: float = 1.0) -> float | None:
        """(2·(U + Q^d) + Q^d) / min weight."""
        return (2 * (input_units + output_units) + 3 * self.quantum) / weight

    def owes(self, client: str) -> bool:
        return client in self._credits and self._units(client) < 0

    def _visits(self, client: str) -> int:
        """The round in which `client` was last visited."""
        credit, (now, place) = self._credits[client], self._visit
        return max(credit.settled, now if credit.place <= place else now - 1)

    def _refills_due(self, client: str) -> int:
        """How many visits after `settled` refill it: until it is above 0 if it waits, else until it is 0."""
        units = self._credits[client].units
        if client in self._queues:
            return 0 if units > 0 else floor(-units / self.quantum) + 1
        return max(0, ceil(-units / self.quantum))

    def _units(self, client: str) -> float:
        credit = self._credits[client]
        refills = min(self._visits(client) - credit.settled, self._refills_due(client))
        return credit.units + self.quantum * refills

    def _settle(self, client: str) -> Credit:
        """The credit of `client` with all refills up to this visit. A new client gets the last place in the ring."""
        credit = self._credits.get(client)
        if credit is None:
            self._places += 1
            credit = self._credits[client] = Credit(self._places, 0.0, self._visit[0])
        else:
            credit.units, credit.settled = self._units(client), self._visits(client)
        return credit

    def _seat(self, client: str) -> None:
        """Put `client` where `pick` looks for it."""
        for heap in (self._turn, self._rich, self._passed_over):
            heap.discard(client)
        if client not in self._queues:
            return
        credit, visit, rich = self._credits[client], self._visit, self._units(client) > 0
        if not rich:
            visit = (credit.settled + self._refills_due(client), credit.place)
        elif credit.place != self._visit[1]:
            visit = (self._visits(client) + 1, credit.place)
        if self._queues.head(client) is None:
            self._passed_over.put(client, visit)
            return
        self._turn.put(client, visit)
        if rich:
            self._rich.put(client, visit)
