"""What the waiting requests of a replica wait for, and for how long: every moment of a wait has one cause.

    cause      a request waits because
    step       a step was under way when it came
    running    those that run have their turn (`steps`)
    prompts    the step has as many prompts, or tokens of prompts, as it may
    batch      as many requests run as may
    memory     the KV cache has no room for the one that is next
    deficit    its client has had what it is due: others that have not come first
    rate       its client has had its requests of this minute
    target     its client has more than its share of those that run, and a token takes longer than the target, or the
               places that are left are others'
    prefix     its next tokens are being computed for another request
    engine     the engine passed it over, for a reason of its own (an adapter, a look-up in a slower cache)

The first five are states of the replica, of which all that wait share one. `deficit`, `rate` and `target` are states of
a client, `prefix` and `engine` of a request; a request's state comes before its client's, and that before the
replica's. All change at the end of a pass and last until the end of the next one. If no waiting client is eligible, the
wait is attributed to the replica's state, not to the policy.

Time is counted once per pass, in three `Clock`s: of clients that are eligible, of those that are not, of those that are
set aside. A client reads one of them, and keeps what it has read when it changes to another, so a pass costs O(what
changed in it). Time is in whole nanoseconds: the causes of a wait sum to it exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import add, sub
from typing import NamedTuple

from sglang_fair.core.job import Job

STEP, RUNNING, PROMPTS, BATCH, MEMORY = "step", "running", "prompts", "batch", "memory"
DEFICIT, RATE, TARGET = "deficit", "rate", "target"
PREFIX, ENGINE = "prefix", "engine"
CAUSES = (STEP, RUNNING, PROMPTS, BATCH, MEMORY, DEFICIT, RATE, TARGET, PREFIX, ENGINE)

_PLACES = {cause: place for place, cause in enumerate(CAUSES)}

Reading = tuple[int, ...]
"""Nanoseconds, by cause in the order of `CAUSES`."""

_ZERO: Reading = (0,) * len(CAUSES)

FIRST = ""
"""The client of requests that go before all others: retracted ones. No client has this name."""


class Clock(NamedTuple):
    """`spent` until `since_ns`, and all time from then on for the cause at place `cause`."""

    spent: Reading
    cause: int
    since_ns: int

    def read(self, now_ns: int) -> Reading:
        spent = list(self.spent)
        spent[self.cause] += now_ns - self.since_ns
        return tuple(spent)

    def turned(self, cause: str, now_ns: int) -> "Clock":
        place = _PLACES[cause]
        return self if place == self.cause else Clock(self.read(now_ns), place, now_ns)


class Stamp(NamedTuple):
    """A moment in a client's time. Only the difference of two of one client has a meaning."""

    offset: Reading
    clock: Clock
    now_ns: int

    def read(self) -> Reading:
        return tuple(map(add, self.offset, self.clock.read(self.now_ns)))


_ELIGIBLE, _OTHERS = "eligible", "others"


@dataclass(slots=True)
class _Client:
    """A client with waiting requests: the clock that it reads, and what to add to the reading."""

    waiting: int = 0
    clock: str = _ELIGIBLE
    offset: Reading = _ZERO
    has_turn: bool = True


@dataclass(slots=True, eq=False)
class Wait:
    """A request's wait until it is admitted: spells, each in its client's time or in a state of its own, `held`."""

    client: str
    since: Stamp
    """When its last spell began."""
    held: str = ""
    spent: Reading = _ZERO
    """Until then."""
    ended: Stamp | None = None

    def read(self, now: Stamp) -> Reading:
        """Nanoseconds by cause until `now`."""
        if self.held:
            return Clock(self.spent, _PLACES[self.held], self.since.now_ns).read(now.now_ns)
        spell = map(sub, now.read(), self.since.read())
        return tuple(map(add, self.spent, spell))


class Waits:
    """Which requests wait, and what for. `now_ns` is the caller's to set; it never goes back."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.cause = STEP
        """Of the replica."""
        clocks = {_ELIGIBLE: STEP, _OTHERS: STEP, TARGET: TARGET}
        self._clocks = {name: Clock(_ZERO, _PLACES[cause], 0) for name, cause in clocks.items()}
        self._clients = {FIRST: _Client(1)}
        self._waits: dict[Job, Wait] = {}
        self._held: dict[Job, str] = {}
        self._held_before: dict[Job, str] = {}
        """Requests that this pass has passed over for states of their own, and the one before."""
        self._aside: dict[str, bool] = {}
        self._aside_before: dict[str, bool] = {}
        """Clients likewise."""

    # ---- which requests wait

    def begin(self, job: Job, *, first: bool = False) -> Wait:
        """`job` waits. `first`: it goes before all others, whatever its client had."""
        name = FIRST if first else job.client
        client = self._clients.setdefault(name, _Client())
        client.waiting += 1
        wait = self._waits[job] = Wait(name, self._stamp(client))
        return wait

    def end(self, job: Job) -> None:
        """`job` waits no more."""
        wait = self._waits.pop(job)
        client = self._clients[wait.client]
        wait.ended = self._stamp(client)
        if self._held or self._held_before:
            self._held.pop(job, None)
            self._held_before.pop(job, None)
        client.waiting -= 1
        if not client.waiting:
            del self._clients[wait.client]
            self._aside.pop(wait.client, None)
            self._aside_before.pop(wait.client, None)

    def spent_ns(self, wait: Wait) -> dict[str, int]:
        """By cause, until its end or until now; without causes that there were none of. The sum is the wait."""
        now = wait.ended or self._stamp(self._clients[wait.client])
        return {cause: spent for cause, spent in zip(CAUSES, wait.read(now), strict=True) if spent}

    def has_turn(self, client: str) -> bool:
        """Whether `client` was eligible when the last pass ended."""
        return client not in self._clients or self._clients[client].has_turn

    def __len__(self) -> int:
        return len(self._waits)

    # ---- a pass

    def hold(self, job: Job, cause: str) -> None:
        """This pass has passed `job` over for a state of its own."""
        if job in self._waits:
            self._held[job] = cause

    def set_aside(self, client: str) -> None:
        """This pass has passed `client` over for the target, or for places."""
        self._aside[client] = True

    def stop(self, cause: str) -> None:
        """Between two passes it turned out that the replica's state is `cause`."""
        clocks = self._clocks
        is_one_state = clocks[_OTHERS].cause == clocks[_ELIGIBLE].cause
        self._turn(cause, None if is_one_state else CAUSES[clocks[_OTHERS].cause])

    def end_pass(self, cause: str, turns: Mapping[str, bool], turn_cause: str | None) -> None:
        """A pass is over. `cause` is why nothing else was admitted. `turns`: the clients that have become eligible, or
        are so no more. `turn_cause`: what those that are not wait for; None: another one's turn is not why."""
        self._turn(*((cause, turn_cause) if self._waits else (STEP, None)))
        for name, has_turn in turns.items():
            if (client := self._clients.get(name)) is not None:
                client.has_turn = has_turn
        if turns or self._aside or self._aside_before:
            self._assign({**self._aside, **self._aside_before, **turns})
            self._aside_before, self._aside = self._aside, {}
        if self._held or self._held_before:
            for job in {**self._held_before, **self._held}:
                wait, held = self._waits[job], self._held.get(job, "")
                if wait.held != held:
                    now = self._stamp(self._clients[wait.client])
                    wait.spent, wait.since, wait.held = wait.read(now), now, held
            self._held_before, self._held = self._held, {}

    def _turn(self, cause: str, turn_cause: str | None) -> None:
        self.cause = cause
        for name, now in ((_ELIGIBLE, cause), (_OTHERS, turn_cause or cause)):
            self._clocks[name] = self._clocks[name].turned(now, self.now_ns)

    def _assign(self, names: Mapping[str, bool]) -> None:
        """Has each client read the clock that is its own."""
        clocks, now_ns = self._clocks, self.now_ns
        changes: dict[tuple[str, str], Reading] = {}
        """Of a reading, from one clock to another."""
        for name in names:
            client = self._clients.get(name)
            if client is None:
                continue
            own = TARGET if name in self._aside else _ELIGIBLE if client.has_turn else _OTHERS
            if own == client.clock:
                continue
            change = client.clock, own
            if change not in changes:
                before, after = (clocks[one].read(now_ns) for one in change)
                changes[change] = tuple(map(sub, before, after))
            client.offset, client.clock = tuple(map(add, client.offset, changes[change])), own

    def _stamp(self, client: _Client) -> Stamp:
        return Stamp(client.offset, self._clocks[client.clock], self.now_ns)
