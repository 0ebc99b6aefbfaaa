"""What schedulers gave, from look to look (`Followed`), and over time, in buckets of equal length (`History`). Pure.

Rule. A replica's totals only grow, so totals that fell are a replica that was restarted: everything that it counts is
new. Its first report is where we begin. Of each report

    sum of the named clients' gains + the others' gain = the gain of the totals,      none of them negative.

`others` are the clients that the report does not name, and `(others)`, those that the replica's ledger has dropped. A
client that was not named before came from there if there were any; how much of its count is new is unknown then, and
taken to be the others'. The ledger may also drop a client that comes back later: its count fell, and is new.

What was gained between two looks is spread evenly over the time between them, so nothing is lost or counted twice
where a replica did not answer for a while; a bucket in which no replica answered says so (`looks` 0). The newest
`whole` buckets name all clients, older ones the `MOST_NAMED` that got most: the rest is `OTHERS`.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_fair.dashboard.reading import OTHERS, SYSTEM, ClientReading, ReplicaReport, Totals
from sglang_fair.metrics.differences import Differences, Waiting

MOST_NAMED = 100

Amounts: TypeAlias = NDArray[np.float64]
"""Of one client: tokens computed, cached and made, units of service, requests admitted, and seconds times requests that
waited."""
EXTEND, CACHED, OUTPUT, SERVICE, ADMITTED, WAITED_S = range(6)
TOKENS = slice(EXTEND, SERVICE)


def amounts() -> Amounts:
    return np.zeros(WAITED_S + 1)


def add(sums: dict[str, Amounts], more: Mapping[str, Amounts], part: float = 1.0) -> None:
    """Adds this part of it, by name."""
    for name, units in more.items():
        if name in sums:
            sums[name] += units * part
        elif units.any():
            sums[name] = units * part


@dataclass(slots=True)
class Bucket:
    """Begins at `number` times the step."""

    number: int
    looks: int = 0
    observed_s: float = 0.0
    """The part of it that lies between two looks."""
    clients: dict[str, Amounts] = field(default_factory=dict)
    """With `OTHERS`: clients without a name."""
    replicas: dict[str, Amounts] = field(default_factory=dict)
    of_bound: dict[str, float] = field(default_factory=dict)
    """By replica: the largest difference between two clients' service, divided by the bound."""

    def fold(self) -> None:
        if len(self.clients) > MOST_NAMED:
            others = self.clients.pop(OTHERS, amounts())
            kept = nlargest(MOST_NAMED, self.clients.items(), key=lambda item: (item[1][SERVICE], item[0]))
            named = dict(kept)
            rest = [units for name, units in self.clients.items() if name not in named]
            self.clients = named | {OTHERS: np.sum([others, *rest], axis=0)}


class History:
    """The last `length` buckets of `step_s` seconds. Times never go back."""

    def __init__(self, step_s: float, length: int, whole: int = 0) -> None:
        self.step_s = step_s
        self._length, self._whole = length, whole
        self._buckets: deque[Bucket] = deque(maxlen=length)

    def look(self, since_s: float, now_s: float, of_bound: Mapping[str, float]) -> None:
        """A replica answered at `now_s`, and before that at `since_s`."""
        newest = self._at(now_s)
        newest.looks += 1
        for name, part in of_bound.items():
            newest.of_bound[name] = max(part, newest.of_bound.get(name, 0.0))
        for bucket, part in self._parts(since_s, now_s):
            bucket.observed_s += (now_s - since_s) * part

    def gained(self, since_s: float, now_s: float, replica: str, clients: Mapping[str, Amounts]) -> None:
        """A replica gave this between two looks at it."""
        self._at(now_s)
        total = {replica: np.sum([*clients.values()], axis=0)} if clients else {}
        for bucket, part in self._parts(since_s, now_s):
            add(bucket.clients, clients, part)
            add(bucket.replicas, total, part)
            if bucket.number <= self._buckets[-1].number - self._whole:
                bucket.fold()

    def buckets(self) -> list[Bucket]:
        """The oldest first, without gaps."""
        return list(self._buckets)

    def _at(self, now_s: float) -> Bucket:
        """The bucket of `now_s`, after empty ones for the time since the last."""
        number = int(now_s // self.step_s)
        if not self._buckets:
            self._buckets.append(Bucket(number))
        for missing in range(max(self._buckets[-1].number + 1, number - self._length + 1), number + 1):
            self._buckets.append(Bucket(missing))
            if self._whole and len(self._buckets) > self._whole:
                self._buckets[-1 - self._whole].fold()
        return self._buckets[-1]

    def _parts(self, since_s: float, now_s: float) -> Iterator[tuple[Bucket, float]]:
        """The buckets of this time with the part of it that lies in each. What is older than all is the oldest's."""
        if now_s <= since_s:
            yield self._buckets[-1], 1.0
            return
        until_s = now_s
        for bucket in reversed(self._buckets):
            start_s = bucket.number * self.step_s
            is_oldest = bucket is self._buckets[0]
            begin_s = since_s if is_oldest else min(max(since_s, start_s), until_s)
            if until_s > begin_s:
                yield bucket, (until_s - begin_s) / (now_s - since_s)
            until_s = begin_s
            if until_s <= since_s:
                return


class Sums:
    """Some buckets together."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self.clients: dict[str, Amounts] = {}
        self.replicas: dict[str, Amounts] = {}
        self.observed_s = 0.0
        for bucket in buckets:
            self.observed_s += bucket.observed_s
            add(self.clients, bucket.clients)
            add(self.replicas, bucket.replicas)

    def of(self, client: str) -> Amounts:
        return self.clients.get(client, amounts())

    def rate(self, amount: float) -> float:
        return float(amount) / self.observed_s if self.observed_s else 0.0


@dataclass(slots=True)
class Followed:
    """One scheduler, over time."""

    differences: Differences = field(default_factory=Differences)
    waits_since: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The number of each waiting client's backlog, and when it was first seen."""
    report: ReplicaReport | None = None
    """Its last one; None while its state is another than "ok"."""
    state: str = "silent"
    answered_s: float = -inf
    named_s: float = -inf
    restarted_s: float = -inf
    totals: Amounts | None = None
    """Of its last report, as the rows of the clients that it named, and whether it named all."""
    rows: dict[str, Amounts] = field(default_factory=dict)
    names_all: bool = True

    @property
    def clients(self) -> dict[str, ClientReading]:
        """Those that it names now."""
        rows = self.report.clients if self.report is not None else {}
        return {name: row for name, row in rows.items() if name not in (SYSTEM, OTHERS)}

    def take(self, report: ReplicaReport, now_s: float) -> dict[str, Amounts] | None:
        """What its clients gained and waited since its report before, with `OTHERS`; None: this is the first."""
        self.report = report
        named = {name: _of(row) for name, row in report.clients.items() if name != OTHERS}
        totals, before, gained = _of(report.totals), self.totals, None
        restarted = before is not None and bool((totals[TOKENS] < before[TOKENS]).any())
        if restarted:
            before, self.rows, self.names_all, self.restarted_s = amounts(), {}, True, now_s
        if before is not None:
            left = np.maximum(0.0, totals - before)
            left[ADMITTED] = inf  # totals do not count requests
            gained = self._gained(named, left)
        self.totals, self.rows = totals, named
        of_named = sum(row[TOKENS].sum() for row in named.values())
        self.names_all = OTHERS not in report.clients and of_named >= totals[TOKENS].sum()
        self.note_waits(now_s, restarted=restarted)
        if gained is not None:
            for name, row in self.clients.items():
                gained[name][WAITED_S] = row.waiting * (now_s - self.answered_s)
        self.answered_s = now_s
        return gained

    def _gained(self, named: dict[str, Amounts], left: Amounts) -> dict[str, Amounts]:
        """`left` is the gain of all."""
        clients = dict[str, Amounts]()
        for name, row in named.items():
            old, gained = self.rows.get(name), row
            if old is None:
                if not self.names_all:
                    gained = amounts()
            elif row[SERVICE] >= old[SERVICE] and row[ADMITTED] >= old[ADMITTED]:
                gained = np.maximum(0.0, row - old)
            clients[name] = gained = np.minimum(gained, left)
            left = left - gained
        left[ADMITTED] = 0.0
        return clients | {OTHERS: left}

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
