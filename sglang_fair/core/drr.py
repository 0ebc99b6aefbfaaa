"""DRR, deficit round robin adapted to unknown output lengths (VTC, appendix C.2).

Rule: the clients stand in a ring and are visited in turn. Each has a credit. A visited client whose credit is
not positive gets one quantum Q^d; it is then served until its credit is used up or it has nothing left that
waits. Extend and output tokens are charged as they come, so the credit may fall many quanta below zero, and
then that many visits pass without service. A client that waits for nothing is refilled up to zero only: it
cannot save credit, and rejoins with at most the credit that it left with.

Visits are counted, not made. A visit is a pair (round, place in the ring); a client's credit says at which of
its visits it is positive again, so the next client to serve is the smallest visit in a heap: O(log clients),
however deep the debts. Who joins takes the last place in the ring and is visited from the next round on: a
flood of new names cannot stretch a round.

Unit of fairness: service units. Two clients that both have requests waiting are visited, and refilled, equally
often but for one visit, and a credit stays within (-U, Q^d], U = w_e·L_input + w_q·M: they never differ by more
than 2·(U + Q^d) + Q^d. The paper states no bound.
Knobs: `quantum` Q^d. Towards 0, below the cost of one prompt, the client that is owed most goes next: VTC with
c = -credit. Large: long bursts of one client, in order of arrival. Weights divide the charges.
Trade-offs: no locality beyond a burst. Known leak: credit of at most Q^d is dropped when a client is gone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, floor
from typing import ClassVar

from sglang_fair.common.weights import Weights
from sglang_fair.core.clients import ClientQueues
from sglang_fair.core.heap import LazyHeap
from sglang_fair.core.job import Job
from sglang_fair.core.policy import Policy, checked_quantum

Visit = tuple[int, int]
"""A round, and a place in the ring."""


@dataclass(slots=True)
class Credit:
    """One client's place in the ring, and its credit after its visit in round `settled`."""

    place: int
    units: float
    settled: int


@dataclass
class Drr(Policy):
    """Round robin by credit, FIFO within a client. ValueError for a quantum below `LEAST_QUANTUM`."""

    name: ClassVar[str] = "drr"
    quantum: float = 2000.0
    weights: Weights = field(default_factory=Weights)

    _visit: Visit = field(default=(0, 0), init=False, repr=False)
    """The visit in progress: every earlier one is over."""
    _places: int = field(default=0, init=False, repr=False)
    _credits: dict[str, Credit] = field(default_factory=dict, init=False, repr=False)
    _queues: ClientQueues = field(init=False, repr=False)
    _turn: LazyHeap[str] = field(default_factory=LazyHeap, init=False, repr=False)
    """Clients with an offer, by the visit at which they may be served."""
    _rich: LazyHeap[str] = field(default_factory=LazyHeap, init=False, repr=False)
    """Those of them whose credit is positive before that visit."""
    _passed_over: LazyHeap[str] = field(default_factory=LazyHeap, init=False, repr=False)
    """Clients that wait and have no offer: all that waits is held."""
    _idle: LazyHeap[str] = field(default_factory=LazyHeap, init=False, repr=False)

    def __post_init__(self) -> None:
        self.quantum = checked_quantum(self.quantum)
        self._queues = ClientQueues()

    def arrive(self, job: Job) -> None:
        self._idle.discard(job.client)
        self._settle(job.client)
        self._queues.put(job)
        self._seat(job.client)

    def leave(self, job: Job) -> None:
        self._settle(job.client)
        self._queues.leave(job)
        self._seat(job.client)

    def pick(self) -> Job | None:
        """While a client whose visit comes first is passed over, the ring stands still: only who has credit
        left is offered."""
        client, waits = self._turn.first(), self._passed_over.first()
        if client is not None and waits is not None and self._turn.key(client) > self._passed_over.key(waits):
            client = self._rich.first()
        elif client is not None:
            self._visit = self._turn.key(client)
        return None if client is None else self._queues.head(client)

    def hold(self, job: Job) -> None:
        self._queues.hold(job)
        self._seat(job.client)

    def release(self) -> None:
        for client in self._queues.release():
            self._seat(client)

    def charge(self, client: str, units: float) -> None:
        self._settle(client).units -= units / self.weights.of(client)
        self._seat(client)

    def idle(self, client: str) -> None:
        """Forgotten once it owes nothing: that drops credit, at most Q^d, and never a debt."""
        if client in self._credits and client not in self._queues:
            credit, due = self._settle(client), self._refills_due(client)
            self._idle.put(client, (credit.settled + due if due else -1, credit.place))
        while (gone := self._idle.first()) is not None and self._idle.key(gone) <= self._visit:
            self._idle.discard(gone)
            del self._credits[gone]

    def counters(self) -> Mapping[str, float]:
        return {client: self._units(client) for client in self._credits}

    def bound(self, input_units: float, output_units: float) -> float | None:
        """(2·(U + Q^d) + Q^d) / min weight."""
        return (2 * (input_units + output_units) + 3 * self.quantum) / self.weights.smallest()

    def _visits(self, client: str) -> int:
        """The round of `client`'s last visit."""
        credit, (now, place) = self._credits[client], self._visit
        return max(credit.settled, now if credit.place <= place else now - 1)

    def _refills_due(self, client: str) -> int:
        """Visits at which it is refilled, from its settlement on: to above 0 if it waits, else to 0."""
        units = self._credits[client].units
        if client in self._queues:
            return 0 if units > 0 else floor(-units / self.quantum) + 1
        return max(0, ceil(-units / self.quantum))

    def _units(self, client: str) -> float:
        credit = self._credits[client]
        refills = min(self._visits(client) - credit.settled, self._refills_due(client))
        return credit.units + self.quantum * refills

    def _settle(self, client: str) -> Credit:
        """Its account with the visits up to this one entered; the last place in the ring for a new client."""
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
