"""What the waiting requests of a replica wait for, how long, and by how many later ones each is overtaken.

Every moment of a wait has one cause (`CAUSES`). The first five are states of the replica, of which all that wait share
one; the next three are states of a client, the last two of a request. A request's state comes before its client's, and
that before the replica's. All change in a pass, during which no time is counted, and last until the next one. If no
waiting client is eligible, the wait is attributed to the replica's state, not to the policy.

Time is counted once per pass, in `Clock`s: of clients that are eligible, of those that are not, and of each state of a
client or a request. A client follows one of them, a request its client or the clock of its own state, so a pass costs
O(what changed in it). Time is in whole nanoseconds: the causes of a wait sum to it exactly.
"""

from bisect import bisect, insort
from collections.abc import Hashable, Iterable, Mapping
from operator import add, sub
from typing import Generic, NamedTuple, TypeVar

from sglang_fair.core.job import Job

STEP, RUNNING, PROMPTS, BATCH, MEMORY = "step", "running", "prompts", "batch", "memory"
DEFICIT, RATE, TARGET = "deficit", "rate", "target"
PREFIX, ENGINE = "prefix", "engine"

CAUSES: Mapping[str, str] = {
    STEP: "a step that was under way",
    RUNNING: "those that run, whose turn it was",
    PROMPTS: "room among the prompts of a step",
    BATCH: "a place among those that run",
    MEMORY: "memory in the KV cache",
    DEFICIT: "its client's turn: the client had used up what it was due",
    RATE: "its client's next minute: its requests of this one were used up",
    TARGET: "its client's share: it had more of those that run, and tokens took too long, or room was short",
    PREFIX: "a prefix that another request was computing",
    ENGINE: "SGLang, which passed it over for a reason of its own",
}
"""What a request waits for, in words."""

_PLACES = {cause: place for place, cause in enumerate(CAUSES)}

Reading = tuple[int, ...]
"""Nanoseconds, by cause in the order of `CAUSES`."""

_ZERO: Reading = (0,) * len(CAUSES)

FIRST = ""
"""The client of requests that go before all others: retracted ones. No client has this name."""


class Clock:
    """Time by cause; all that passes is for one cause, until `turn`."""

    __slots__ = ("_place", "_since_ns", "_spent")

    def __init__(self, cause: str) -> None:
        self._spent, self._place, self._since_ns = _ZERO, _PLACES[cause], 0

    def read(self, now_ns: int) -> Reading:
        spent = list(self._spent)
        spent[self._place] += now_ns - self._since_ns
        return tuple(spent)

    def turn(self, cause: str, now_ns: int) -> None:
        if (place := _PLACES[cause]) != self._place:
            self._spent, self._place, self._since_ns = self.read(now_ns), place, now_ns


class Wait:
    """Time by cause that passes as that of what it follows: a request's wait, or a client's since it first waited."""

    __slots__ = ("_offset", "client", "source")

    def __init__(self, client: str) -> None:
        self.client = client
        self.source: Clock | Wait | None = None
        """None: the wait is over."""
        self._offset = _ZERO

    def read(self, now_ns: int) -> Reading:
        if self.source is None:
            return self._offset
        return tuple(map(add, self._offset, self.source.read(now_ns)))

    def follow(self, source: "Clock | Wait | None", now_ns: int) -> None:
        if source is not self.source:
            spent = self.read(now_ns)
            self._offset = spent if source is None else tuple(map(sub, spent, source.read(now_ns)))
            self.source = source


class _Client(Wait):
    """A client with waiting requests, which follow it."""

    __slots__ = ("has_turn", "waiting")

    def __init__(self, client: str) -> None:
        super().__init__(client)
        self.waiting = 0
        self.has_turn = True


class Waits:
    """Which requests wait, and what for. `now_ns` is the caller's to set; it never goes back."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._cause, self._turn_cause = STEP, STEP
        """Of the replica; and what clients wait for that are not eligible."""
        self._eligible, self._others = Clock(STEP), Clock(STEP)
        self._own = {cause: Clock(cause) for cause in (TARGET, PREFIX, ENGINE)}
        self._clients: dict[str, _Client] = {}
        self._waits: dict[Job, Wait] = {}
        self._passes = 0
        self._held: dict[Job, int] = {}
        self._aside: dict[str, int] = {}
        """Requests and clients that were passed over for states of their own, and the latest such pass."""

    # ---- which requests wait

    def begin(self, job: Job, *, first: bool = False) -> Wait:
        """`job` waits. `first`: it goes before all others, whatever its client had."""
        name = FIRST if first else job.client
        if (client := self._clients.get(name)) is None:
            client = self._clients[name] = _Client(name)
            client.follow(self._eligible, self.now_ns)
        client.waiting += 1
        wait = self._waits[job] = Wait(name)
        wait.follow(client, self.now_ns)
        return wait

    def end(self, job: Job) -> None:
        """`job` waits no more."""
        wait = self._waits.pop(job)
        wait.follow(None, self.now_ns)
        self._held.pop(job, None)
        client = self._clients[wait.client]
        client.waiting -= 1
        if not client.waiting:
            del self._clients[wait.client]
            self._aside.pop(wait.client, None)

    def spent_ns(self, wait: Wait) -> dict[str, int]:
        """By cause, until its end or until now; without causes that there were none of. The sum is the wait."""
        return {cause: spent for cause, spent in zip(CAUSES, wait.read(self.now_ns), strict=True) if spent}

    def has_turn(self, client: str) -> bool:
        """Whether `client` was eligible when the last pass ended."""
        return client not in self._clients or self._clients[client].has_turn

    def __len__(self) -> int:
        return len(self._waits)

    # ---- a pass

    def hold(self, job: Job, cause: str) -> None:
        """This pass has passed `job` over for a state of its own."""
        if (wait := self._waits.get(job)) is not None:
            self._held[job] = self._passes
            wait.follow(self._own[cause], self.now_ns)

    def set_aside(self, clients: Iterable[str]) -> None:
        """This pass has passed `clients` over for the target, or for places."""
        clock = self._own[TARGET]
        for client in clients:
            if (found := self._clients.get(client)) is not None:
                self._aside[client] = self._passes
                if found.source is not clock:
                    found.follow(clock, self.now_ns)

    def stop(self, cause: str) -> None:
        """Between two passes it turned out that the replica's state is `cause`."""
        self._turn(cause, cause if self._turn_cause == self._cause else self._turn_cause)

    def end_pass(self, cause: str, turns: Mapping[str, bool], turn_cause: str | None) -> None:
        """A pass is over. `cause` is why nothing else was admitted. `turns`: the clients that have become eligible, or
        are so no more. `turn_cause`: what those that are not wait for; None: another one's turn is not why."""
        self._turn(*((cause, turn_cause or cause) if self._waits else (STEP, STEP)))
        for name in [*turns, *(name for name, latest in self._aside.items() if latest < self._passes)]:
            if (client := self._clients.get(name)) is None:
                continue
            client.has_turn = turns.get(name, client.has_turn)
            if self._aside.get(name) != self._passes:
                self._aside.pop(name, None)
                client.follow(self._eligible if client.has_turn else self._others, self.now_ns)
        for job in [job for job, latest in self._held.items() if latest < self._passes]:
            del self._held[job]
            self._waits[job].follow(self._clients[self._waits[job].client], self.now_ns)
        self._passes += 1

    def _turn(self, cause: str, turn_cause: str) -> None:
        self._cause, self._turn_cause = cause, turn_cause
        self._eligible.turn(cause, self.now_ns)
        self._others.turn(turn_cause, self.now_ns)


Item = TypeVar("Item", bound=Hashable)

LEAST_NOTED = 64


class Overtaken(NamedTuple):
    """By `requests` later ones, in `batches`."""

    requests: int
    batches: int


BY_NONE = Overtaken(0, 0)


class Overtakes(Generic[Item]):
    """By how many later ones each waiting item was overtaken, and in how many batches; items `arrive` once each.

    An item is overtaken by every one that came later and was admitted in an earlier batch, and by a batch if its latest
    arrival is such a one. So two sorted lists answer: of the numbers of those that were admitted, and of the latest of
    each batch. When they are longer than the queue, each waiting item notes its counts, and they begin anew: O(log
    waiting) for an admission, amortised, beside what an insertion moves; O(waiting) memory.
    """

    def __init__(self) -> None:
        self._numbers: dict[Item, int] = {}
        """Of those that wait, in order of arrival."""
        self._noted: dict[Item, Overtaken] = {}
        self._arrived = 0
        self._batch: list[int] = []
        self._admitted: list[int] = []
        self._latest: list[int] = []

    def arrive(self, item: Item) -> None:
        """`item` waits; it came after all others."""
        self._numbers[item] = self._arrived
        self._arrived += 1

    def leave(self, item: Item) -> None:
        """`item` waits no more and was not admitted."""
        self._numbers.pop(item, None)
        self._noted.pop(item, None)

    def admit(self, item: Item) -> Overtaken:
        """`item` is in the batch that is being formed. Returns what overtook it."""
        found = self.of(item)
        self._batch.append(self._numbers.pop(item))
        self._noted.pop(item, None)
        return found

    def of(self, item: Item) -> Overtaken:
        """What has overtaken `item`, which waits, so far."""
        number, noted = self._numbers[item], self._noted.get(item, BY_NONE)
        counts = (len(later) - bisect(later, number) for later in (self._admitted, self._latest))
        return Overtaken(*map(add, noted, counts))

    def end_batch(self) -> None:
        """A batch was formed: what it admitted has overtaken those that came before and still wait."""
        if not self._batch:
            return
        for number in self._batch:
            insort(self._admitted, number)
        insort(self._latest, max(self._batch))
        self._batch.clear()
        if len(self._admitted) > max(LEAST_NOTED, 2 * len(self._numbers)):
            self._noted = {item: noted for item in self._numbers if any(noted := self.of(item))}
            self._admitted.clear()
            self._latest.clear()

    def __len__(self) -> int:
        return len(self._numbers)
