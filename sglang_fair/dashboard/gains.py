"""From counters to what was gained between two looks.

Rule. A replica's totals only grow, so totals that fell are a replica that was restarted: everything that it counts is
new. Its first report is where we begin. Of each report

    sum of the named clients' gains + the others' gain = the gain of the totals,      none of them negative.

`others` are the clients that the report does not name, and `(others)`, those that the replica's ledger has dropped. A
client that was not named before came from there if there were any; how much of its count is new is unknown then, and
taken to be the others'. The ledger may also drop a client that comes back later: its count fell, and is new.
"""

from typing import NamedTuple

from sglang_fair.dashboard.reading import OTHERS, ClientReading, ReplicaReport, Totals


class Amounts(NamedTuple):
    """Tokens and units of service."""

    extend_tokens: float = 0
    cached_tokens: float = 0
    output_tokens: float = 0
    service: float = 0.0

    def less(self, other: "Amounts") -> "Amounts":
        """The difference, where it is positive."""
        return Amounts(
            max(0, self[0] - other[0]),
            max(0, self[1] - other[1]),
            max(0, self[2] - other[2]),
            max(0, self[3] - other[3]),
        )

    def at_most(self, other: "Amounts") -> "Amounts":
        """The smaller one of each."""
        return Amounts(
            min(self[0], other[0]), min(self[1], other[1]), min(self[2], other[2]), min(self[3], other[3])
        )


class Gain(NamedTuple):
    """What one replica gave between two looks."""

    clients: dict[str, Amounts]
    others: Amounts
    admitted: dict[str, int]
    """Requests, by named client."""
    restarted: bool


class Counters:
    """Follows one replica's counters."""

    def __init__(self) -> None:
        self._totals: Amounts | None = None
        self._clients: dict[str, ClientReading] = {}
        self._names_all = True

    def take(self, report: ReplicaReport) -> Gain | None:
        """The gain since the report before; None for the first one."""
        totals, before = _of(report.totals), self._totals
        gain = None
        if before is not None:
            restarted = any(new < old for new, old in zip(totals[:3], before[:3], strict=True))
            if restarted:
                before, self._clients, self._names_all = Amounts(), {}, True
            gain = self._gain(report, totals.less(before), restarted)
        named = {name: row for name, row in report.clients.items() if name != OTHERS}
        self._totals, self._clients = totals, named
        of_named = sum(sum(_of(row)[:3]) for row in named.values())
        self._names_all = OTHERS not in report.clients and of_named >= sum(totals[:3])
        return gain

    def _gain(self, report: ReplicaReport, left: Amounts, restarted: bool) -> Gain:
        """`left` is the gain of all."""
        clients, admitted = dict[str, Amounts](), dict[str, int]()
        for name, row in report.clients.items():
            if name == OTHERS:
                continue
            old, gained, requests = self._clients.get(name), _of(row), row.requests
            if old is None:
                if not self._names_all:
                    gained, requests = Amounts(), 0
            elif row.service >= old.service and row.requests >= old.requests:
                gained, requests = gained.less(_of(old)), requests - old.requests
            gained = gained.at_most(left)
            left = left.less(gained)
            clients[name], admitted[name] = gained, requests
        return Gain(clients, left, admitted, restarted)


def _of(row: ClientReading | Totals) -> Amounts:
    return Amounts(row.extend_tokens, row.cached_tokens, row.output_tokens, row.service)
