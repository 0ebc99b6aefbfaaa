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
class Waiting:
    """The waiting jobs of one client, or of one of its sessions. `ready` ones are in the policy's order, `held` ones
    are passed over until `release`.

    `numbers` has all of them in order of arrival, with their number in that order.
    """

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
class Sessions:
    """Whose turn it is among a client's sessions with waiting jobs, by name; "" is that of the jobs that name none."""

    queues: dict[str, Waiting] = field(default_factory=dict)
    ready: LazyHeap[str] = field(default_factory=LazyHeap)
    """Those with a job that is not held, by their turns."""
    turns: dict[str, int] = field(default_factory=dict)
    """The smallest goes first."""

    def seat(self, name: str) -> None:
        if len(self.queues[name].ready):
            self.ready.put(name, self.turns[name])
        else:
            self.ready.discard(name)


class ClientQueues:
    """The queues of all clients that wait. Each operation costs O(log of one client's queue), `release` the same for
    each held job.

    A client's sessions take turns: each time that a job of one leaves, its others have theirs first. Within a session
    the order is: the job that `patience` later ones have overtaken, then jobs that unblock others of their program,
    then by `key`. Neither has influence on other clients. Who names no session has one queue and nothing besides.
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
        self._queues: dict[str, Waiting | Sessions] = {}
        """By client: `Sessions` once one of its waiting jobs named one."""
        self._with_held: dict[str, dict[Job, None]] = {}
        self._aside: dict[str, None] = {}

    def put(self, job: Job) -> None:
        """`job` waits, or its key has changed. A held job remains held."""
        queue = self._queue(job)
        queue.arrive(job)
        if job not in queue.held:
            queue.ready.put(job, self._order(job))
            self._seat(job)

    def leave(self, job: Job) -> None:
        client = self._queues[job.client]
        queue = self._queue(job)
        queue.ready.discard(job)
        queue.held.pop(job, None)
        queue.numbers.pop(job, None)
        if (held := self._with_held.get(job.client)) is not None:
            held.pop(job, None)
            if not held:
                del self._with_held[job.client]
        if isinstance(client, Sessions):
            client.turns[job.session] = self._turn()
            client.seat(job.session)
            if not len(queue):
                del client.queues[job.session], client.turns[job.session]
        if not (client.queues if isinstance(client, Sessions) else len(client)):
            self._aside.pop(job.client, None)
            del self._queues[job.client]

    def hold(self, job: Job) -> None:
        queue = self._queue(job)
        queue.ready.discard(job)
        queue.held[job] = None
        self._seat(job)
        self._with_held.setdefault(job.client, {})[job] = None

    def set_aside(self, client: str) -> None:
        """`head` passes over the client until the next `release`."""
        self._aside[client] = None

    def release(self) -> list[str]:
        """Nothing is held or set aside any more. The clients for which that made a difference."""
        clients = list(self._with_held | self._aside)
        self._aside.clear()
        for jobs in self._with_held.values():
            for job in jobs:
                queue = self._queue(job)
                del queue.held[job]
                queue.ready.put(job, self._order(job))
                self._seat(job)
        self._with_held.clear()
        return clients

    def head(self, client: str) -> Job | None:
        """The client's first job that is not held, if any; None if it is set aside."""
        queue = self._queues.get(client)
        if queue is None or client in self._aside:
            return None
        if isinstance(queue, Sessions):
            if (name := queue.ready.first()) is None:
                return None
            queue = queue.queues[name]
        return queue.overdue(self._patience) or queue.ready.first()

    def _queue(self, job: Job) -> Waiting:
        """Where `job` waits, or is to wait."""
        client = self._queues.get(job.client)
        if job.session and self._takes_turns and not isinstance(client, Sessions):
            sessions = self._queues[job.client] = Sessions()
            if client is not None:
                sessions.queues[""], sessions.turns[""] = client, self._turn()
                sessions.seat("")
            client = sessions
        if isinstance(client, Sessions):
            if job.session not in client.queues:
                client.queues[job.session], client.turns[job.session] = Waiting(), self._turn()
            return client.queues[job.session]
        if client is None:
            client = self._queues[job.client] = Waiting()
        return client

    def _seat(self, job: Job) -> None:
        """The first that is ready in the job's session may be another."""
        if isinstance(client := self._queues[job.client], Sessions):
            client.seat(job.session)

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
