"""How far the service of two clients that wait at one replica is apart: what the policy's `bound` bounds.

The bound holds for any interval in which both wait without a break, of service divided by weight. We see the ends of
intervals at our looks only. So what we find is what the bound says or less, never more.

Rule. A client's run begins with the first look at a backlog of it, and again when its weight changes, because we do
not know when between two looks that was. Two clients are compared since the younger run began. Runs that begin at one
look share a start. Of more than `MOST_STARTS` the oldest is moved to the next one, so a look costs at most
O(MOST_STARTS * clients that wait).
"""

from collections.abc import Mapping

from sglang_fair.dashboard.reading import ClientReading

MOST_STARTS = 32


class _Run:
    __slots__ = ("last", "since", "units", "waits_since_s")

    def __init__(self, last: ClientReading, since: int, waits_since_s: float) -> None:
        self.last = last
        self.waits_since_s = waits_since_s
        """Also under another weight."""
        self.since = since
        """The look that is its start."""
        self.units = 0.0
        """Service by weight since its own first look."""


class Backlogs:
    """Follows those who wait at one replica."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._starts: dict[int, dict[str, float]] = {}
        """By look, in order: the units that each run had then."""
        self._looks = 0

    def take(
        self, clients: Mapping[str, ClientReading], now_s: float = 0.0, *, restarted: bool = False
    ) -> None:
        """One look. `restarted`: nothing from before counts."""
        if restarted:
            self._runs.clear()
        self._looks += 1
        runs = dict[str, _Run]()
        for name, row in clients.items():
            if row.backlog is None:
                continue
            run = self._runs.get(name)
            if run is None or not _goes_on(run.last, row):
                is_same = run is not None and run.last.backlog == row.backlog
                run = _Run(row, self._looks, run.waits_since_s if run is not None and is_same else now_s)
            run.units += (row.service - run.last.service) / row.weight
            run.last = row
            runs[name] = run
        self._runs = runs
        if any(run.since == self._looks for run in runs.values()):
            self._starts[self._looks] = {name: run.units for name, run in runs.items()}
        used = {run.since for run in runs.values()}
        self._starts = {look: units for look, units in self._starts.items() if look in used}
        while len(self._starts) > MOST_STARTS:
            self._move_oldest()

    def lasting(self, since_s: float) -> list[str]:
        """Those who have waited without a break since then or longer."""
        return [name for name, run in self._runs.items() if run.waits_since_s <= since_s]

    def difference(self) -> float | None:
        """The largest between two that wait, in units of service by weight; None if fewer than two wait."""
        if len(self._runs) < 2:
            return None
        largest = 0.0
        for look, before in self._starts.items():
            all_units, new_units = [], []
            for name, run in self._runs.items():
                if run.since <= look:
                    units = run.units - before[name]
                    all_units.append(units)
                    if run.since == look:
                        new_units.append(units)
            largest = max(largest, max(all_units) - min(new_units), max(new_units) - min(all_units))
        return largest

    def _move_oldest(self) -> None:
        oldest, following, *_ = self._starts
        del self._starts[oldest]
        for run in self._runs.values():
            if run.since == oldest:
                run.since = following


def _goes_on(before: ClientReading, now: ClientReading) -> bool:
    return now.backlog == before.backlog and now.weight == before.weight and now.service >= before.service
