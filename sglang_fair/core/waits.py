"""What the waiting requests of a replica wait for, and how long.

Every moment of a wait has one cause (`CAUSES`). The first five are states of the replica, of which all that wait share
one; the next three are states of a client, the last two of a request. A request's state comes before its client's, and
that before the replica's. All change in a pass, during which no time is counted, and last until the next one. If no
waiting client is eligible, the wait is attributed to the replica's state, not to the policy.

Time is counted once per pass: a request's `Clock` follows its client's, and that the clock of all clients that are
eligible, or of those that are not, each of which follows the cause of the pass. So a pass costs O(what changed in it).
Time is in whole nanoseconds: the causes of a wait sum to it exactly.
"""

from collections.abc import Iterable, Mapping
from operator import sub

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
    """Time by cause, which passes as that of what it follows: a cause, by its place in `CAUSES`, or another clock. Its
    first reading is 0."""

    __slots__ = ("_at_ns", "_behind", "_reading", "client", "home", "source", "waiting")

    def __init__(self, client: str, source: "Clock | int", now_ns: int) -> None:
        self.client = client
        self.source: Clock | int | None = source
        """None: it stands still."""
        self.home: Clock | int | None = source
        """What it follows while it has no state of its own."""
        self.waiting = 0
        """Requests whose clock's home it is."""
        self._behind = _reading(source, now_ns)
        """By so much its source is ahead."""
        self._at_ns, self._reading = now_ns, _ZERO
        """When it was last read."""

    def read(self, now_ns: int) -> Reading:
        if now_ns != self._at_ns and self.source is not None:
            self._at_ns = now_ns
            self._reading = tuple(map(sub, _reading(self.source, now_ns), self._behind))
        return self._reading

    def follow(self, source: "Clock | int | None", now_ns: int) -> None:
        if source is self.source:
            return
        spent = self.read(now_ns)
        self.source = source
        if source is not None:
            self._at_ns, self._behind = now_ns, tuple(map(sub, _reading(source, now_ns), spent))


def _reading(source: Clock | int, now_ns: int) -> Reading:
    return (
        source.read(now_ns) if isinstance(source, Clock) else (*_ZERO[:source], now_ns, *_ZERO[source + 1 :])
    )


class Waits:
    """Which requests wait, and what for. `now_ns` is the caller's to set; it never goes back."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.waiting = 0
        """Requests that wait."""
        self._eligible, self._others = Clock("", _PLACES[STEP], 0), Clock("", _PLACES[STEP], 0)
        """Of clients that are, and of those that are not."""
        self._clients: dict[str, Clock] = {}
        self._passes = 0
        self._apart: dict[Clock, int] = {}
        """Those of requests and clients that were passed over for states of their own, and the latest such pass."""

    # ---- which requests wait

    def begin(self, name: str) -> Clock:
        """A request waits, of a client of this `name`, or `FIRST`."""
        if (client := self._clients.get(name)) is None:
            client = self._clients[name] = Clock(name, self._eligible, self.now_ns)
        client.waiting += 1
        self.waiting += 1
        return Clock(name, client, self.now_ns)

    def end(self, wait: Clock) -> None:
        """It is over."""
        client, wait.home = wait.home, None
        assert isinstance(client, Clock)
        wait.follow(None, self.now_ns)
        self._apart.pop(wait, None)
        self.waiting -= 1
        client.waiting -= 1
        if not client.waiting:
            self._apart.pop(self._clients.pop(client.client), None)

    def spent_ns(self, wait: Clock) -> dict[str, int]:
        """By cause, until its end or until now; without causes that there were none of. The sum is the wait."""
        return {cause: spent for cause, spent in zip(CAUSES, wait.read(self.now_ns), strict=True) if spent}

    def has_turn(self, client: str) -> bool:
        """Whether `client` was eligible when the last pass ended."""
        return client not in self._clients or self._clients[client].home is self._eligible

    # ---- a pass

    def hold(self, wait: Clock, cause: str) -> None:
        """This pass has passed the request over for a state of its own."""
        self._apart[wait] = self._passes
        wait.follow(_PLACES[cause], self.now_ns)

    def set_aside(self, clients: Iterable[str]) -> None:
        """This pass has passed `clients` over for the target, or for places."""
        for name in clients:
            if (client := self._clients.get(name)) is not None:
                self._apart[client] = self._passes
                client.follow(_PLACES[TARGET], self.now_ns)

    def stop(self, cause: str) -> None:
        """Between two passes it turned out that the replica's state is `cause`."""
        shared = self._others.source == self._eligible.source
        self._turn(cause, cause if shared else None)

    def end_pass(self, cause: str, turns: Mapping[str, bool], turn_cause: str | None) -> None:
        """A pass is over. `cause` is why nothing else was admitted. `turns`: the clients that have become eligible, or
        are so no more. `turn_cause`: what those that are not wait for; None: another one's turn is not why."""
        self._turn(*((cause, turn_cause or cause) if self.waiting else (STEP, STEP)))
        for name, is_eligible in turns.items():
            if (client := self._clients.get(name)) is not None:
                client.home = self._eligible if is_eligible else self._others
                if client not in self._apart:
                    client.follow(client.home, self.now_ns)
        for clock in [clock for clock, latest in self._apart.items() if latest < self._passes]:
            del self._apart[clock]
            clock.follow(clock.home, self.now_ns)
        self._passes += 1

    def _turn(self, cause: str, turn_cause: str | None) -> None:
        """The replica's state is `cause`; those that are not eligible wait for `turn_cause`, or for the same as
        before."""
        self._eligible.follow(_PLACES[cause], self.now_ns)
        if turn_cause is not None:
            self._others.follow(_PLACES[turn_cause], self.now_ns)
