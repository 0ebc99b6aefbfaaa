"""The last minute: sums over the looks in it. Pure.

What a client wanted, on which its fair share depends: without limit, if it has waited without a break for half of the
time; those are told. Else what it got, and what waited on average, at what its requests cost on average.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from math import inf

Amount = defaultdict[str, float]
"""By client."""


def amount() -> Amount:
    """Nothing yet."""
    return defaultdict(float)


def add(sums: Amount, more: Mapping[str, float]) -> None:
    """Adds each client's."""
    for client, units in more.items():
        sums[client] += units


@dataclass(slots=True)
class Look:
    """What all replicas together gave since the look before, and who waits. By client, where nothing else is said."""

    at_s: float
    lasted_s: float
    service: Amount = field(default_factory=amount)
    others: float = 0.0
    """Service of clients that nobody names."""
    admitted: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)
    prompt_tokens: Amount = field(default_factory=amount)
    cached_tokens: Amount = field(default_factory=amount)
    by_replica: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Service, prompt tokens, cached tokens."""


class Window:
    """The looks of the last `length_s` seconds."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._looks: deque[Look] = deque()

    def add(self, look: Look) -> None:
        self._looks.append(look)

    def pass_to(self, now_s: float) -> None:
        """Drops what is too old."""
        while self._looks and self._looks[0].at_s <= now_s - self._length_s:
            self._looks.popleft()

    def sums(self) -> "Sums":
        """What there was."""
        return Sums(self._looks)


class Sums(Look):
    """All looks of a window together."""

    def __init__(self, looks: "deque[Look]") -> None:
        super().__init__(looks[-1].at_s if looks else 0.0, sum(look.lasted_s for look in looks))
        self._waiting_s = amount()
        """Seconds, times the requests that waited."""
        for look in looks:
            self.others += look.others
            self.admitted.update(look.admitted)
            add(self.service, look.service)
            add(self.prompt_tokens, look.prompt_tokens)
            add(self.cached_tokens, look.cached_tokens)
            for client, count in look.waiting.items():
                if count:
                    self._waiting_s[client] += count * look.lasted_s
            for replica, amounts in look.by_replica.items():
                before = self.by_replica.get(replica, (0.0, 0.0, 0.0))
                units, prompt, cached = (one + two for one, two in zip(before, amounts, strict=True))
                self.by_replica[replica] = units, prompt, cached

    def wanted(self, hungry: Container[str]) -> dict[str, float]:
        """The service that each client could have used; inf: any, as those who are `hungry`."""
        wanted = dict[str, float]()
        for client in {*self.service, *self._waiting_s}:
            waiting_s, admitted = self._waiting_s[client], self.admitted[client]
            if client in hungry or (waiting_s and not admitted):
                wanted[client] = inf
            else:
                requests = waiting_s / self.lasted_s if self.lasted_s else 0.0
                wanted[client] = self.service[client] * (1 + requests / max(1, admitted))
        return wanted

    def rate(self, units: float) -> float:
        """Units a second."""
        return units / self.lasted_s if self.lasted_s else 0.0

    def wait_s(self, client: str) -> tuple[float | None, bool]:
        """Mean time that a request of `client` waited; and whether it is longer, because nobody was admitted.

        Little's law: requests that waited, on average, divided by requests that were admitted a second.
        """
        waiting_s, admitted = self._waiting_s[client], self.admitted[client]
        if admitted:
            return waiting_s / admitted, False
        return (self.lasted_s, True) if waiting_s else (None, False)
