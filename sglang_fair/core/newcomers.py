"""What clients that a replica does not know yet may be served, under DLPM (ours).

The paper starts a client at 0, so that it waits until the others have used up their quanta, which takes long if they
are many. Here it starts with a quantum, within an allowance; beyond that at 0, so that a flood of new names starves no
client.

    a client is             until                                           what it gets
    new, welcomed           it has been charged, a round has paid it a      counts against the allowance
    new, started at 0       quantum, and a request of it was admitted       counts neither way: its rounds paid for it
    known                   it is forgotten                                 raises the allowance `share`-fold

A client that leaves before a refill does not raise the allowance, even while its last answer is still being generated.
Bound: in any time, those that were welcomed get at most share·W + 65·Q^u + Z, W what known clients get in that time, Z
what earlier ones still had set aside at its begin and what those that run may exceed their quantum by. Beside names
that start at 0, k of them waiting with c units each, a known client that always waits keeps 1/(1 + share + k·c/Q^u) of
the service in the long run. docs/policies.md has the proof.
"""

from dataclasses import dataclass

AT_ONCE = 64
"""Quanta that may accumulate for new clients that come at the same time."""


@dataclass(slots=True)
class Standing:
    """How far a client is known."""

    charged: bool = False
    refilled: bool = False
    """A round has paid a quantum since its first charge."""
    known: bool = False
    """It is one of those whose service lets new clients in."""
    welcome: float = 0.0
    """Service that was set aside for it when it came; 0 if it started at 0, or is known."""
    drawn: float = 0.0
    """A new client's charges so far. Of a known one: refunds (negative) that its later charges have not made up for."""

    @property
    def goes_first(self) -> bool:
        """It was welcomed and not served yet."""
        return self.welcome > 0 and not self.charged


class Newcomers:
    """The allowance: `left` service units for new clients, `share` for each unit that known clients get. Negative if
    the last ones took more than their quanta."""

    def __init__(self, share: float, quantum: float) -> None:
        self._share, self._quantum = share, quantum
        self._most = AT_ONCE * quantum if share else 0.0
        self.left = self._most

    def welcome(self, client: Standing, weight: float) -> bool:
        """An unknown client came. Whether a quantum is set aside, with which it starts or with less."""
        if self.left <= 0:
            return False
        client.welcome = self._quantum * weight
        self.left -= client.welcome
        return True

    def charge(self, client: Standing, units: float) -> None:
        """Charges and refunds that cancel out change nothing, even at the allowance's limit: what was given back to a
        known client counts only when it is charged again."""
        before, after = client.drawn, client.drawn + units
        if client.known:
            client.drawn = min(0.0, after)
            self._raise(self._share * max(0.0, after))
        elif client.welcome:
            client.drawn = after
            self._raise(max(client.welcome, before) - max(client.welcome, after))

    def admit(self, client: Standing, *, refilled: bool) -> None:
        """A request was admitted; `refilled`: after a round that has paid its client since it was first charged."""
        if not client.known and refilled:
            client.known, client.welcome, client.drawn = True, 0.0, 0.0

    def forget(self, client: Standing) -> None:
        """What was set aside for it and not used is free for others."""
        if not client.known and client.drawn < client.welcome:
            self._raise(client.welcome - client.drawn)

    def _raise(self, units: float) -> None:
        self.left = min(self.left + units, self._most)
