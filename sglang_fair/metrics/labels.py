"""Which client has a label of its own on metrics; all others share `OTHER`.

Rule. A tenant of the tenants' file has its own label, the first `MOST_TENANTS` of them. Any other client gets one once
it has had `LEAST_SERVICE`, if fewer than K clients with a label have had more than half as much as it. A label is kept
for good. What a client was counted as before it had one stays with `OTHER`: no counter falls, nothing counts twice.

Bound. K·(1 + log2(S / `LEAST_SERVICE`)) labels where S is the most that one client has had, about 30·K in practice at
the very worst: of the clients that had between x and 2x when they got theirs, each one has more than half of what the
last of them has, so there are at most K of them. A flood of new names therefore gets no more labels than its largest
names earn, and a client that later gets more than they did has its own all the same.

Knobs: K. Leaks: a client that is among the K largest by less than a factor of 2 may stay in `OTHER`. A client that is
called like `OTHER` is counted there.
"""

from collections.abc import Iterator
from heapq import nlargest

OTHER = "other"
"""The label of everybody else."""

MOST_TENANTS = 1000

LEAST_SERVICE = 1.0

UNNAMED_TALLIES = 512
"""Clients without a label whose service is told apart."""


class Labels:
    """Who has a label. What "service" is, tokens or units, is the caller's choice; it never falls."""

    def __init__(self, most: int) -> None:
        """`most` is K; 0: only tenants have labels."""
        self._most = most
        self._earned: dict[str, float] = {}
        """Clients that have earned theirs, and their service."""
        self._tenants: set[str] = set()
        self._too_little = 0.0
        """So much service, or less, earns nothing. It only rises, because what the labelled ones had does."""

    def of(self, client: str) -> str:
        return client if client in self else OTHER

    def admit(self, tenant: str) -> bool:
        """`tenant` stands in the tenants' file; whether it has a label."""
        if tenant in self._tenants:
            return True
        if tenant == OTHER or len(self._tenants) >= MOST_TENANTS:
            return False
        self._tenants.add(tenant)
        return True

    def offer(self, client: str, service: float) -> bool:
        """`client` has had `service` in all; whether it has a label from now on."""
        if client in self._tenants:
            return True
        if client in self._earned:
            self._earned[client] = max(service, self._earned[client])
            return True
        if client == OTHER or service < LEAST_SERVICE or service <= self._too_little:
            return False
        if sum(2 * had > service for had in self._earned.values()) >= self._most:
            self._too_little = service
            return False
        self._earned[client] = service
        return True

    def __contains__(self, client: object) -> bool:
        return client in self._tenants or client in self._earned

    def __iter__(self) -> Iterator[str]:
        yield from self._tenants
        yield from (client for client in self._earned if client not in self._tenants)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Tallies:
    """What each of many clients had, never too much and in bounded memory (Misra and Gries 1982, "Finding repeated
    elements"): too little by at most the sum of all, divided by `size`."""

    def __init__(self, size: int = UNNAMED_TALLIES) -> None:
        self._size = size
        self._had: dict[str, float] = {}

    def add(self, client: str, amount: float) -> float:
        """`client` had `amount` more; what it had in all, at least. Amortized O(1)."""
        had = self._had[client] = self._had.get(client, 0.0) + amount
        if len(self._had) > 2 * self._size:
            cut = nlargest(self._size + 1, self._had.values())[-1]
            self._had = {name: most - cut for name, most in self._had.items() if most > cut}
        return had

    def forget(self, client: str) -> None:
        self._had.pop(client, None)

    def __len__(self) -> int:
        return len(self._had)


class Counted:
    """Labels for whoever counts one request after the other, of any number of clients."""

    def __init__(self, most: int) -> None:
        """`most` as in `Labels`."""
        self.labels = Labels(most)
        self._tallies = Tallies()
        self._totals: dict[str, float] = {}
        """Of those that have earned a label."""

    def count(self, client: str, service: float, *, is_tenant: bool = False) -> str:
        """`client` had `service` more; the label under which that is to be counted."""
        if is_tenant:
            self.labels.admit(client)
            return self.labels.of(client)
        if client in self._totals:
            self._totals[client] += service
            self.labels.offer(client, self._totals[client])
            return client
        had = self._tallies.add(client, service)
        if not self.labels.offer(client, had):
            return OTHER
        self._tallies.forget(client)
        self._totals[client] = had
        return client
