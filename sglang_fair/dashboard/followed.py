"""One scheduler of a replica, from look to look: what was gained between two of them, and who waits. Pure.

Rule. A replica's totals only grow, so totals that fell are a replica that was restarted: everything that it counts is
new. Its first report is where we begin. Of each report

    sum of the named clients' gains + the others' gain = the gain of the totals,      none of them negative.

`others` are the clients that the report does not name, and `(others)`, those that the replica's ledger has dropped. A
client that was not named before came from there if there were any; how much of its count is new is unknown then, and
taken to be the others'. The ledger may also drop a client that comes back later: its count fell, and is new.
"""

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np

from sglang_fair.dashboard.history import ADMITTED, SERVICE, TOKENS, WAITED_S, Amounts, amounts
from sglang_fair.dashboard.reading import OTHERS, SYSTEM, ClientReading, ReplicaReport, Totals
from sglang_fair.metrics.differences import Differences, Waiting


class Gain(NamedTuple):
    """What one replica gave between two looks, by named client. `WAITED_S` is not set."""

    clients: dict[str, Amounts]
    others: Amounts
    restarted: bool


class Counters:
    """Follows one replica's counters."""

    def __init__(self) -> None:
        self._totals: Amounts | None = None
        self._clients: dict[str, Amounts] = {}
        self._names_all = True

    def take(self, report: ReplicaReport) -> Gain | None:
        """The gain since the report before; None for the first one."""
        named = {name: _of(row) for name, row in report.clients.items() if name != OTHERS}
        totals, before, gain = _of(report.totals), self._totals, None
        if before is not None:
            restarted = bool((totals[TOKENS] < before[TOKENS]).any())
            if restarted:
                before, self._clients, self._names_all = amounts(), {}, True
            left = np.maximum(0.0, totals - before)
            left[ADMITTED] = inf  # totals do not count requests
            gain = self._gain(named, left, restarted)
        self._totals, self._clients = totals, named
        of_named = sum(row[TOKENS].sum() for row in named.values())
        self._names_all = OTHERS not in report.clients and of_named >= totals[TOKENS].sum()
        return gain

    def _gain(self, named: dict[str, Amounts], left: Amounts, restarted: bool) -> Gain:
        """`left` is the gain of all."""
        clients = dict[str, Amounts]()
        for name, row in named.items():
            old, gained = self._clients.get(name), row
            if old is None:
                if not self._names_all:
                    gained = amounts()
            elif row[SERVICE] >= old[SERVICE] and row[ADMITTED] >= old[ADMITTED]:
                gained = np.maximum(0.0, row - old)
            clients[name] = gained = np.minimum(gained, left)
            left = left - gained
        left[ADMITTED] = 0.0
        return Gain(clients, left, restarted)


@dataclass(slots=True)
class Followed:
    """One scheduler, over time."""

    counters: Counters = field(default_factory=Counters)
    differences: Differences = field(default_factory=Differences)
    waits_since: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The number of each waiting client's backlog, and when it was first seen."""
    report: ReplicaReport | None = None
    """Its last one; None while its state is another than "ok"."""
    state: str = "silent"
    answered_s: float = -inf
    named_s: float = -inf
    restarted_s: float = -inf

    @property
    def clients(self) -> dict[str, ClientReading]:
        """Those that it names now."""
        rows = self.report.clients if self.report is not None else {}
        return {name: row for name, row in rows.items() if name not in (SYSTEM, OTHERS)}

    def take(self, report: ReplicaReport, now_s: float) -> Gain | None:
        """What its clients gained and waited since its report before; None: this is the first."""
        self.report = report
        gain = self.counters.take(report)
        if gain is not None and gain.restarted:
            self.restarted_s = now_s
        self.note_waits(now_s, restarted=gain is not None and gain.restarted)
        if gain is not None:
            for name, row in self.clients.items():
                gain.clients[name][WAITED_S] = row.waiting * (now_s - self.answered_s)
        self.answered_s = now_s
        return gain

    def note_waits(self, now_s: float, *, restarted: bool = False) -> None:
        """Notes the clients that wait in its last report. `restarted`: nothing from before counts."""
        if restarted:
            self.differences, self.waits_since = Differences(), {}
        waiting = {
            name: Waiting(row.backlog, (row.service + row.transferred_units) / row.weight, row.weight)
            for name, row in self.clients.items()
            if row.backlog is not None
        }
        self.differences.read(now_s, waiting)
        before, self.waits_since = self.waits_since, {}
        for name, one in waiting.items():
            backlog, since_s = before.get(name, (None, now_s))
            self.waits_since[name] = one.backlog, since_s if backlog == one.backlog else now_s

    @property
    def difference(self) -> float | None:
        """In units of charges by weight, between two clients that wait there; None: no two have, for two looks."""
        return self.differences.difference if self.report is not None else None

    @property
    def difference_over_bound(self) -> float | None:
        """None also where the policy has no bound."""
        difference = self.difference
        if difference is None or self.report is None or not self.report.bound:
            return None
        return difference / self.report.bound

    def lasting(self, since_s: float) -> list[str]:
        """The clients that have waited there without a break since then or longer."""
        if self.report is None:
            return []
        return [name for name, (_, began_s) in self.waits_since.items() if began_s <= since_s]


def _of(row: Totals) -> Amounts:
    requests = row.requests if isinstance(row, ClientReading) else 0
    return np.array((row.extend_tokens, row.cached_tokens, row.output_tokens, row.service, requests, 0.0))
