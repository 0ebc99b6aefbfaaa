"""What the waiting requests of a replica wait for, and for how long: every moment of a wait has one cause.

    cause      a request waits because
    step       a step was under way when it came
    running    those that run have their turn (`steps`)
    prompts    the step has as many prompts, or tokens of prompts, as it may
    batch      as many requests run as may
    memory     the KV cache has no room for the one that is next
    deficit    its client has had what it is due: others who have not come first
    rate       its client has had its requests of this minute
    target     its client has more than its share of those that run, and a token takes longer than the target, or the
               places that are left are others'
    prefix     its next tokens are being computed for another request
    engine     the engine passed it over, for a reason of its own (an adapter, a look-up in a slower cache)

The first five are states of the replica: whoever waits, waits for that. `deficit`, `rate` and `target` are states of a
client, `prefix` and `engine` of a request; they come before those of the replica, a request's before its client's. All
change at the end of a pass, when it is known who was not admitted and why, and last until the end of the next one.
While no client that waits has its turn, nobody waits for it: then the replica's state is the cause.

No state is entered at the requests that it concerns. The replica's states are a clock with a hand for each cause, of
which one moves at a time. A client reads one of three such clocks, and what it has read stays with it when it changes
to another. So a wait is the difference of two readings, a pass costs O(what changed in it), and a stamp, from which a
reading can be made later, O(1). Time is counted in whole nanoseconds: the causes of a wait sum to it exactly.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import add, sub
from typing import NamedTuple

from sglang_fair.core.job import Job

STEP, RUNNING, PROMPTS, BATCH, MEMORY = "step", "running", "prompts", "batch", "memory"
DEFICIT, RATE, TARGET = "deficit", "rate", "target"
PREFIX, ENGINE = "prefix", "engine"
CAUSES = (STEP, RUNNING, PROMPTS, BATCH, MEMORY, DEFICIT, RATE, TARGET, PREFIX, ENGINE)

_HANDS = {cause: at for at, cause in enumerate(CAUSES)}

Reading = tuple[int, ...]
"""Nanoseconds, by cause in the order of `CAUSES`."""

_ZERO: Reading = (0,) * len(CAUSES)

FIRST = ""
"""Whose requests go before all others: retracted ones. No client has this name."""


class Hands(NamedTuple):
    """A clock: its reading at `since_ns`, from when on the hand `moving` moves."""

    reading: Reading
    moving: int
    since_ns: int

    def at(self, now_ns: int) -> list[int]:
        reading = list(self.reading)
        reading[self.moving] += now_ns - self.since_ns
        return reading

    def turned(self, cause: str, now_ns: int) -> "Hands":
        """Another hand moves from now on."""
        moving = _HANDS[cause]
        return self if moving == self.moving else Hands(tuple(self.at(now_ns)), moving, now_ns)


def _always(cause: str) -> Hands:
    return Hands(_ZERO, _HANDS[cause], 0)


Stamp = tuple[Reading, Hands, int]
"""A moment in a client's time: what to add to the reading of the clock that it reads, this clock, and when."""


def read(stamp: Stamp) -> list[int]:
    """The nanoseconds by cause until a stamp. Only the difference of two of one client has a meaning."""
    offset, hands, now_ns = stamp
    return [a + b for a, b in zip(offset, hands.at(now_ns), strict=True)]


@dataclass(slots=True)
class _Client:
    """A client with waiting requests. `clock` is the name of the one that it reads."""

    waiting: int = 0
    clock: str = ""
    offset: Reading = _ZERO
    has_turn: bool = True


@dataclass(slots=True, eq=False)
class Wait:
    """A request's wait until it is admitted."""

    client: str
    began: Stamp
    corrected: list[int] | None = None
    """What its own states change about its client's time."""
    held: tuple[str, Stamp] | None = None
    """Its own state, and since when."""
    ended: Stamp | None = None

    def by_cause(self, now: Stamp | None = None) -> dict[str, int]:
        """Nanoseconds, until the end or until `now`; without causes that there were none of."""
        end = self.ended or now
        assert end is not None
        found = [b - a for a, b in zip(read(self.began), read(end), strict=True)]
        if self.held is not None:
            found = [a + b for a, b in zip(found, _corrections(*self.held, end), strict=True)]
        if self.corrected is not None:
            found = [a + b for a, b in zip(found, self.corrected, strict=True)]
        return {cause: spent for cause, spent in zip(CAUSES, found, strict=True) if spent}

    def total(self, now: Stamp | None = None) -> int:
        """Nanoseconds."""
        end = self.ended or now
        assert end is not None
        return end[2] - self.began[2]


def _corrections(cause: str, since: Stamp, until: Stamp) -> list[int]:
    """What a request's own state `cause` changes, from `since` to `until`."""
    found = [a - b for a, b in zip(read(since), read(until), strict=True)]
    found[_HANDS[cause]] += until[2] - since[2]
    return found


_ANYBODY, _OTHERS = "anybody", "others"
"""Clocks: of those who have their turn, and of those who have not."""


@dataclass
class Waits:
    """Who waits, and what for. `now_ns` is the caller's to set; it never goes back. Whoever waits has a `Wait`."""

    now_ns: int = 0
    _clients: dict[str, _Client] = field(default_factory=dict, init=False, repr=False)
    _waits: dict[Job, Wait] = field(default_factory=dict, init=False, repr=False)
    _clocks: dict[str, Hands] = field(init=False, repr=False)
    _held: dict[Job, str] = field(default_factory=dict, init=False, repr=False)
    _held_before: dict[Job, str] = field(default_factory=dict, init=False, repr=False)
    """Requests that this pass has passed over for states of their own, and the one before."""
    _aside: dict[str, None] = field(default_factory=dict, init=False, repr=False)
    _aside_before: dict[str, None] = field(default_factory=dict, init=False, repr=False)
    """Clients likewise."""
    cause: str = STEP
    """Of the replica."""

    def __post_init__(self) -> None:
        self._clocks = {_ANYBODY: _always(STEP), _OTHERS: _always(STEP), TARGET: _always(TARGET)}
        self._clients[FIRST] = _Client(1, _ANYBODY)

    # ---- who waits

    def begin(self, job: Job, *, first: bool = False) -> Wait:
        """`job` waits. `first`: it goes before all others, whatever its client had."""
        name = FIRST if first else job.client
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(0, _ANYBODY)
        client.waiting += 1
        wait = self._waits[job] = Wait(name, (client.offset, self._clocks[client.clock], self.now_ns))
        return wait

    def end(self, job: Job) -> None:
        """`job` waits no more."""
        wait = self._waits.pop(job)
        client = self._clients[wait.client]
        wait.ended = client.offset, self._clocks[client.clock], self.now_ns
        if wait.held is not None:
            self._held_before.pop(job, None)
            self._release(wait)
        if self._held:
            self._held.pop(job, None)
        client.waiting -= 1
        if not client.waiting:
            del self._clients[wait.client]
            self._aside.pop(wait.client, None)
            self._aside_before.pop(wait.client, None)

    def stamp(self, wait: Wait) -> Stamp:
        """This moment, for a request that waits."""
        client = self._clients[wait.client]
        return client.offset, self._clocks[client.clock], self.now_ns

    def has_turn(self, client: str) -> bool:
        """Whether `client`, which waits, had its turn when the last pass ended."""
        return client not in self._clients or self._clients[client].has_turn

    # ---- a pass

    def hold(self, job: Job, cause: str) -> None:
        """This pass has passed `job` over for a state of its own."""
        if job in self._waits:
            self._held[job] = cause

    def set_aside(self, client: str) -> None:
        """This pass has passed `client` over for the target, or for places."""
        self._aside[client] = None

    def stop(self, cause: str) -> None:
        """Between two passes it turned out that the replica's state is `cause`."""
        clocks = self._clocks
        if clocks[_OTHERS].moving == clocks[_ANYBODY].moving:
            clocks[_OTHERS] = clocks[_OTHERS].turned(cause, self.now_ns)
        clocks[_ANYBODY] = clocks[_ANYBODY].turned(cause, self.now_ns)
        self.cause = cause

    def end_pass(self, cause: str, turns: Mapping[str, bool], turn_cause: str | None) -> None:
        """A pass is over. `cause` is why nobody else was admitted. `turns`: the clients whose turn has come, or is no
        more. `turn_cause`: what those wait for who have not their turn; None: somebody else's turn is not why."""
        now_ns, clocks = self.now_ns, self._clocks
        if not self._waits:
            cause, turn_cause = STEP, None
        self.cause = cause
        clocks[_ANYBODY] = clocks[_ANYBODY].turned(cause, now_ns)
        clocks[_OTHERS] = clocks[_OTHERS].turned(turn_cause or cause, now_ns)
        for name, has_turn in turns.items():
            if (client := self._clients.get(name)) is not None:
                client.has_turn = has_turn
        if self._aside or self._aside_before:
            self._sort({**self._aside, **self._aside_before, **turns})
            self._aside_before, self._aside = self._aside, {}
        elif turns:
            self._sort(turns)
        if self._held or self._held_before:
            self._hold_and_release()

    def _sort(self, names: Iterable[str]) -> None:
        """Has clients read the clocks that are theirs."""
        clocks, now_ns = self._clocks, self.now_ns
        changes: dict[tuple[str, str], Reading] = {}
        """Of a reading, from one clock to another."""
        for name in names:
            client = self._clients.get(name)
            if client is None:
                continue
            own = TARGET if name in self._aside else _ANYBODY if client.has_turn else _OTHERS
            if own == client.clock:
                continue
            changed = changes.get((client.clock, own))
            if changed is None:
                before, after = clocks[client.clock].at(now_ns), clocks[own].at(now_ns)
                changed = changes[client.clock, own] = tuple(map(sub, before, after))
            client.offset = tuple(map(add, client.offset, changed))
            client.clock = own

    def _hold_and_release(self) -> None:
        held, before = self._held, self._held_before
        for job in before:
            wait = self._waits[job]
            assert wait.held is not None
            if held.get(job) != wait.held[0]:
                self._release(wait)
        for job, cause in held.items():
            wait = self._waits[job]
            if wait.held is None:
                wait.held = cause, self.stamp(wait)
        self._held_before, self._held = held, {}

    def _release(self, wait: Wait) -> None:
        assert wait.held is not None
        changed = _corrections(*wait.held, wait.ended or self.stamp(wait))
        corrected = wait.corrected
        wait.corrected = (
            changed if corrected is None else [a + b for a, b in zip(corrected, changed, strict=True)]
        )
        wait.held = None

    def __len__(self) -> int:
        return len(self._waits)
