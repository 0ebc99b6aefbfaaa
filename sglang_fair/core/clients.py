"""One queue of waiting jobs per client. Every policy that counts per client is built on it."""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sglang_fair.core.heap import LazyHeap
from sglang_fair.core.job import Job
from sglang_fair.core.policy import Policy

PATIENCE = 128
"""Default of how many later requests of its own client may overtake a request."""


def by_arrival(job: Job) -> Any:
    return job.arrival


@dataclass(slots=True)
class SessionQueue:
    """Waiting jobs of one of a client's sessions, or of none. `ready` ones are in the policy's order, `held` ones are
    passed over until `release`.

    `numbers` has all of them in order of arrival, with their number in that order.
    """

    turn: int
    """Of its client's sessions the one with the smallest goes first."""
    ready: LazyHeap[Job] = field(default_factory=LazyHeap)
    held: dict[Job, None] = field(default_factory=dict)
    numbers: OrderedDict[Job, int] = field(default_factory=OrderedDict)
    arrivals: int = 0

    def arrive(self, job: Job) -> None:
        if job not in self.numbers:
            self.arrivals += 1
            self.numbers[job] = self.arrivals

    def overdue(self, patience: int) -> Job | None:
        """The oldest job, if `patience` later ones have overtaken it and it is not held.

        All jobs after the oldest either wait or have overtaken it, so a subtraction counts them. A younger job has not
        been overtaken by more, so only the oldest has to be checked.
        """
        if self.arrivals - len(self.numbers) < patience or not self.numbers:
            return None
        oldest = next(iter(self.numbers))
        later = self.arrivals - self.numbers[oldest]
        overtaken = later - (len(self.numbers) - 1)
        return oldest if overtaken >= patience and oldest not in self.held else None

    def __len__(self) -> int:
        return len(self.ready) + len(self.held)


@dataclass(slots=True)
class ClientQueue:
    """One client's sessions with waiting jobs, by name; "" has the jobs that name none."""

    sessions: dict[str, SessionQueue] = field(default_factory=dict)
    ready: LazyHeap[str] = field(default_factory=LazyHeap)
    """Those with a job that is not held, by their turns."""
    held: dict[str, None] = field(default_factory=dict)
    """Those with a held job."""

    def seat(self, name: str) -> None:
        session = self.sessions[name]
        if len(session.ready):
            self.ready.put(name, session.turn)
        else:
            self.ready.discard(name)


class ClientQueues:
    """The queues of all clients that wait. Each operation costs O(log of one client's queue).

    A client's sessions take turns: each time that a job of one leaves, its others have theirs first. Within a session
    the order is: the job that `patience` later ones have overtaken, then jobs that unblock others of their program,
    then by `key`. Neither has influence on other clients.
    """

    def __init__(
        self, key: Callable[[Job], Any] = by_arrival, patience: int = PATIENCE, *, turns: bool = True
    ) -> None:
        """Without `turns` a client's jobs are all of one session."""
        if patience < 1:
            raise ValueError(f"patience must be at least one overtaking request, not {patience!r}")
        self._key = key
        self._patience = patience
        self._takes_turns = turns
        self._turns = 0
        """How many were given."""
        self._queues: dict[str, ClientQueue] = {}
        self._with_held: dict[str, None] = {}
        self._aside: dict[str, None] = {}

    def put(self, job: Job) -> None:
        """`job` waits, or its key has changed. A held job remains held."""
        client = self._queues.get(job.client)
        if client is None:
            client = self._queues[job.client] = ClientQueue()
        name = self._session(job)
        session = client.sessions.get(name)
        if session is None:
            session = client.sessions[name] = SessionQueue(self._turn())
        session.arrive(job)
        if job not in session.held:
            session.ready.put(job, self._order(job))
            client.seat(name)

    def leave(self, job: Job) -> None:
        client, name = self._queues[job.client], self._session(job)
        session = client.sessions[name]
        session.ready.discard(job)
        session.held.pop(job, None)
        session.numbers.pop(job, None)
        session.turn = self._turn()
        client.seat(name)
        if not session.held:
            client.held.pop(name, None)
        if not len(session):
            del client.sessions[name]
        if not client.held:
            self._with_held.pop(job.client, None)
        if not client.sessions:
            self._aside.pop(job.client, None)
            del self._queues[job.client]

    def hold(self, job: Job) -> None:
        client, name = self._queues[job.client], self._session(job)
        session = client.sessions[name]
        session.ready.discard(job)
        session.held[job] = None
        client.seat(name)
        client.held[name] = None
        self._with_held[job.client] = None

    def set_aside(self, client: str) -> None:
        """Skip this waiting client until `release`. O(1)."""
        self._aside[client] = None

    def release(self) -> Iterable[str]:
        """Held jobs may be picked again. Returns the clients that had held jobs, or were set aside."""
        clients = list(self._with_held | self._aside)
        self._aside.clear()
        for client in clients:
            queue = self._queues[client]
            for name in queue.held:
                session = queue.sessions[name]
                for job in session.held:
                    session.ready.put(job, self._order(job))
                session.held.clear()
                queue.seat(name)
            queue.held.clear()
        self._with_held.clear()
        return clients

    def head(self, client: str) -> Job | None:
        """The client's first job that is not held, if any; None if it is set aside."""
        queue = self._queues.get(client)
        if queue is None or client in self._aside or (name := queue.ready.first()) is None:
            return None
        session = queue.sessions[name]
        return session.overdue(self._patience) or session.ready.first()

    def _session(self, job: Job) -> str:
        return job.session if self._takes_turns else ""

    def _turn(self) -> int:
        """Behind all others."""
        self._turns += 1
        return self._turns

    def _order(self, job: Job) -> Any:
        return (-job.unblocks, self._key(job))

    def held_clients(self) -> Iterable[str]:
        """Clients with at least one held job, or set aside."""
        return self._with_held | self._aside

    def aside(self) -> Iterable[str]:
        """Clients that are set aside."""
        return self._aside

    def __contains__(self, client: str) -> bool:
        return client in self._queues

    def __iter__(self) -> Iterator[str]:
        return iter(self._queues)

    def __len__(self) -> int:
        return len(self._queues)


@dataclass
class ByClient(Policy):
    """A policy with a queue for each client, which `_seat` ranks. Some clients that wait have their turn, and the
    others wait for that."""

    turn_cause: ClassVar[str]
    _queues: ClientQueues = field(default_factory=ClientQueues, init=False, repr=False)
    _turns: dict[str, bool] = field(default_factory=dict, init=False, repr=False)
    """What the next call of `turns` says."""

    @abstractmethod
    def _seat(self, client: str) -> None:
        """Put `client`, whose queue or counter has changed, where `pick` looks for it."""

    def hold(self, job: Job) -> None:
        self._queues.hold(job)
        self._seat(job.client)

    def set_aside(self, test: Callable[[Job], bool]) -> Sequence[str]:
        found = []
        while (job := self.pick()) is not None and test(job):
            self._queues.set_aside(job.client)
            self._seat(job.client)
            found.append(job.client)
        return found

    def release(self) -> None:
        for client in self._queues.release():
            self._seat(client)

    def turns(self) -> Mapping[str, bool]:
        turns, self._turns = self._turns, {}
        return turns


@dataclass
class OneTurn(ByClient):
    """One client at a time has its turn: `_next`."""

    _had_turn: str | None = field(default=None, init=False, repr=False)
    """The client that had it at the last call of `turns`."""

    @abstractmethod
    def _next(self) -> str | None:
        """Whose request goes next."""

    def turns(self) -> Mapping[str, bool]:
        if self._had_turn is not None:
            self._turns[self._had_turn] = False
        self._had_turn = self._next()
        if self._had_turn is not None:
            self._turns[self._had_turn] = True
        return super().turns()
