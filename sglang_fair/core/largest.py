"""The largest requests of late: what the theorems' bounds are made of.

Two clients that both wait during [s, t] differ by the change of the difference of their counters. So a bound needs to
know how far apart counters could be at s and at t, and nothing of what was paid back before s. A request matters

    from its admission                              it is charged, or owed, from then on
    while its client has requests running, or owes  `Policy.owes`: the debt may lie anywhere in between
    and as long as anybody still waits who          that client's interval may begin where the debt was deepest
    waited then

`recent` has the largest of those that matter, or a little more: it is put right by `settle`, and what has ended is
dropped in two generations. The bound made of it holds for every interval that ends when it is read. `ever` has the
largest since the start. So one huge `max_tokens` loosens the bound until its debt is paid and everybody who waited
meanwhile has stopped waiting once.

O(1) for each admission, amortised: `settle` costs O(clients that owe or run), and is due after as many admissions.
"""

from collections.abc import Callable
from dataclasses import dataclass

SETTLE_AFTER = 64
"""Admissions after which `settle` is due, and one more for each client that owed or ran at the last time."""

FEW = 1000
"""Clients that `settle` may look at for each reading."""

EARLY = 16
"""A reading that would look at more waits for one admission for so many of them, and has more than it should until
then."""


@dataclass(slots=True)
class Extremes:
    """The largest numbers of some requests, each for itself."""

    input_tokens: int = 0
    """Extend tokens charged to one request: L_input of the theorems."""
    prompt_tokens: float = 0
    """Extend and cached tokens of one request. A cost may depend on a token's position in the prompt. This and what
    follows is times the request's scale."""
    input_units: float = 0.0
    """Cost of one prompt."""
    output_tokens: float = 0
    """Output limit of one request."""
    owed_tokens: float = 0
    """Output owed at once to one client's running requests: M of the theorems."""

    def include(self, other: "Extremes") -> None:
        # `max` in each line would take three times as long, in each admission
        if other.input_tokens > self.input_tokens:
            self.input_tokens = other.input_tokens
        if other.prompt_tokens > self.prompt_tokens:
            self.prompt_tokens = other.prompt_tokens
        if other.input_units > self.input_units:
            self.input_units = other.input_units
        if other.output_tokens > self.output_tokens:
            self.output_tokens = other.output_tokens
        if other.owed_tokens > self.owed_tokens:
            self.owed_tokens = other.owed_tokens


class Largest:
    """Keeps `ever` and `recent`. Backlogs are numbered in the order in which they begin."""

    def __init__(self) -> None:
        self.ever = Extremes()
        self.recent = Extremes()
        self._alive: dict[str, Extremes] = {}
        """Of clients that run or owe, since they last did neither."""
        self._ended = Extremes()
        self._former = Extremes()
        """What had ended when backlog `_closed` was the latest."""
        self._closed = 0
        self._admissions = 0
        """Since the last call of `settle`, which left `_left` clients."""
        self._left = 0

    def admitted(self, client: str, found: Extremes, *, owes: bool) -> None:
        """A request of `client` was admitted; `owes`: what was charged to it before is not paid back yet."""
        if not owes and (old := self._alive.pop(client, None)) is not None:
            self._ended.include(old)
        self._admissions += 1
        self.include(client, found)

    def include(self, client: str, found: Extremes) -> None:
        """More is known of a request of `client` that was admitted."""
        for one in (self.ever, self.recent, self._alive.setdefault(client, Extremes())):
            one.include(found)

    def is_due(self) -> bool:
        """Whether to call `settle`, so that memory stays bounded."""
        return self._admissions > SETTLE_AFTER + self._left

    def is_cheap(self) -> bool:
        """Whether a reading may call `settle`, which would cost it O(1) for each admission, or little."""
        return self._left <= FEW or EARLY * self._admissions >= self._left

    def settle(self, matters: Callable[[str], bool], oldest: int, latest: int) -> bool:
        """Forget what matters no more. `matters`: whether a client runs or owes. `oldest` is the oldest backlog that
        lasts, `latest` + 1 if there is none, and `latest` the latest that has begun.

        Returns whether no client waits any more that waited when it last returned True.
        """
        self._admissions = 0
        for client in [client for client in self._alive if not matters(client)]:
            self._ended.include(self._alive.pop(client))
        self._left = len(self._alive)
        passed = oldest > self._closed
        if passed:
            self._former, self._ended, self._closed = self._ended, Extremes(), latest
        self.recent = Extremes()
        for one in (self._former, self._ended, *self._alive.values()):
            self.recent.include(one)
        return passed
