"""Service, demand and response time of each client over time: the measures of VTC §5.1, from records alone.

    service rate at t       W(t - T, t + T) / 2T, W in units of a cost function; 2T = 60 s in the paper
    requested rate at t     the same of what the client's requests sent in [t - T, t + T) ask for
    response time at t      mean time to first token of the requests sent in that window
    accumulated difference  max W_i(0, t) - W_j(0, t) over pairs of clients
    service difference      Σ_i min(s_max - s_i, |r_i - s_i|) of the rates at t against the most-served client;
                            a table has its maximum, mean and variance over sample times (VTC Tables 2 to 6)

There are two methods to date service. With `events` it comes as `table` says; what a failed request received counts
too. `spread` is the method of the paper's artifact: the cost of a whole request is spread evenly from its first token
to its end, and failed requests do not count.

A request that the run's end cut off asks for its full prompt and its maximum of output tokens; one that failed asks for
nothing, as in the artifact. Unknown values are None: a client's service, if the prompt length of a request that ended
well is missing; its requested rate in a window with a request of unknown length. A request that broke off before its
prompt length was known is left out of service and counted in `left_out`.

Windows are half-open, [t - T, t + T). Times are seconds since the run's start.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance
from typing import Literal

import numpy as np

from sglang_fair.core.cost import Cost, Linear
from sglang_fair.core.fairness import unmet_difference
from workloads.records import Run
from workloads.table import Column, Mask, Requests, Side, in_order

Method = Literal["events", "spread"]
Values = tuple[float | None, ...]

WINDOW_S = 60.0
"""VTC's 2T."""


def sample_times(until_s: float, *, warm_up_s: float = 30.0) -> tuple[float, ...]:
    """The sample times of VTC's tables: 19 times that divide the run after its warm-up into equal parts.

    Of 600 s these are 58.5, 87, ..., 571.5: 19 times, 28.5 s apart.
    """
    if not 0 <= warm_up_s < until_s:
        raise ValueError(f"a warm-up of {warm_up_s!r} s leaves nothing of {until_s!r} s")
    step_s = (until_s - warm_up_s) / 20
    return tuple(warm_up_s + step_s * k for k in range(1, 20))


def regular_times(
    until_s: float, *, step_s: float = 5.0, since_s: float = 0.0, window_s: float = WINDOW_S
) -> tuple[float, ...]:
    """Times `step_s` apart whose windows lie inside [since, until]. Empty if that is shorter than a window."""
    if step_s <= 0 or window_s <= 0:
        raise ValueError(f"step and window must be positive: {step_s!r}, {window_s!r}")
    first_s = since_s + window_s / 2
    count = math.floor((until_s - since_s - window_s) / step_s + 1e-9) + 1
    return tuple(first_s + step_s * k for k in range(max(0, count)))


@dataclass(frozen=True, slots=True)
class DifferenceTable:
    """The service difference over sample times: a row of VTC's tables. None where one sample is not known."""

    maximum: float | None
    mean: float | None
    variance: float | None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "DifferenceTable":
        """The variance is that of the population."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return cls(None, None, None)
        return cls(max(known), fmean(known), pvariance(known))


class Windows:
    """The measures of one run under one cost function.

    `weights` are clients' shares, 1 where not given: service and demand are divided by them, so equal
    values are fair (VTC §4.3). `cost` defaults to the linear one with the manifest's prices.
    """

    def __init__(
        self,
        run: Run | Requests,
        *,
        cost: Cost | None = None,
        side: Side = "client",
        method: Method = "events",
        weights: Mapping[str, float] | None = None,
        window_s: float = WINDOW_S,
    ) -> None:
        table = run if isinstance(run, Requests) else Requests(run)
        manifest = table.run.manifest
        self.clients = table.clients
        self._window_s = window_s
        self._accounts = {
            name: _Account(
                table,
                table.of[name],
                cost or Linear(manifest.extend_weight, manifest.output_weight),
                side,
                method,
                (weights or {}).get(name, 1.0),
            )
            for name in self.clients
        }

    @property
    def left_out(self) -> Mapping[str, int]:
        """Requests that broke off without saying how long their prompt was, by client; their service is not
        counted."""
        return {name: account.left_out for name, account in self._accounts.items()}

    def service(self, start_s: float, end_s: float) -> dict[str, float | None]:
        return {name: values[0] for name, values in self.accumulated([end_s], start_s).items()}

    def requested(self, start_s: float, end_s: float) -> dict[str, float | None]:
        """Units that each client's requests sent in [start, end) ask for."""
        start, end = np.array([start_s]), np.array([end_s])
        return {name: found[0] for name, found in self._each(lambda one: one.asked(start, end)).items()}

    def service_rate(self, times_s: Sequence[float]) -> dict[str, Values]:
        """W(t - T, t + T) / 2T of each client, in units a second."""
        start, end = self._edges(times_s)
        return self._each(lambda one: (one.received(end) - one.received(start)) / self._window_s)

    def requested_rate(self, times_s: Sequence[float]) -> dict[str, Values]:
        """What each client asked for in the window, in units a second."""
        start, end = self._edges(times_s)
        return self._each(lambda one: one.asked(start, end) / self._window_s)

    def response_time(self, times_s: Sequence[float]) -> dict[str, Values]:
        """Mean seconds from when a request could have been sent to its first token, of those sent in each window.

        Requests that never had one do not count; None where no other was sent.
        """
        start, end = self._edges(times_s)
        return self._each(lambda one: one.responses(start, end))

    def accumulated(self, times_s: Sequence[float], since_s: float = 0.0) -> dict[str, Values]:
        edges = np.array([since_s, *times_s])
        return self._each(lambda one: (got := one.received(edges))[1:] - got[0])

    def accumulated_difference(self, times_s: Sequence[float], since_s: float = 0.0) -> Values:
        """Largest W_i(since, t) - W_j(since, t) over all pairs, backlogged or not. None below two clients."""
        columns = zip(*self.accumulated(times_s, since_s).values(), strict=True)
        if len(self.clients) < 2:
            return (None,) * len(times_s)
        return tuple(None if None in column else max(column) - min(column) for column in columns)

    def service_difference(self, times_s: Sequence[float]) -> Values:
        """What clients missed against the most-served one at each time, summed over clients, in units a
        second; see the module. None below two clients."""
        received, requested = self.service_rate(times_s), self.requested_rate(times_s)
        found: list[float | None] = []
        for k in range(len(times_s)):
            got, asked = ({name: rates[name][k] for name in self.clients} for rates in (received, requested))
            unknown = None in got.values() or None in asked.values()
            found.append(None if unknown else unmet_difference(got, asked))  # type: ignore[arg-type]
        return tuple(found)

    def difference_table(self, times_s: Sequence[float]) -> DifferenceTable:
        """The service difference over these times, usually `sample_times`."""
        return DifferenceTable.of(self.service_difference(times_s))

    def _each(self, measure: "Callable[[_Account], Column]") -> dict[str, Values]:
        return {name: _known(measure(account)) for name, account in self._accounts.items()}

    def _edges(self, times_s: Sequence[float]) -> tuple[Column, Column]:
        times = np.asarray(times_s, float)
        return times - self._window_s / 2, times + self._window_s / 2


def throughput(run: Run) -> float | None:
    """Input and output tokens a second over the whole run, to its very end, as VTC's tables have it.

    Prompts count in full, once their first token has come. None for a run without an end, or if a request
    that ended well does not say how long its prompt was.
    """
    if run.end is None or run.end.t_s <= 0:
        return None
    tokens = Windows(run, cost=Linear(1.0, 1.0)).service(0.0, math.inf).values()
    known = [count for count in tokens if count is not None]
    return sum(known) / run.end.t_s if len(known) == len(tokens) else None


class _Account:
    """One client's requests. What is not known is NaN."""

    def __init__(
        self, table: Requests, mine: Mask, cost: Cost, side: Side, method: Method, weight: float
    ) -> None:
        self._method, self._weight = method, weight
        counts = mine & table.answered & ~(table.failed if method == "spread" else np.zeros_like(mine))
        unknown = counts & np.isnan(table.input(side))
        self.left_out = int((unknown & ~table.ok).sum())
        self._known = not (unknown & table.ok).any()
        served = np.flatnonzero(counts & ~unknown)
        if method == "spread":
            self._first, self._last = table.first[served], table.done[served]
            self._units = table.units(cost, side, table.output, counts)[served]
        else:
            _, times, units = table.events(cost, side, counts)
            order = np.argsort(times, kind="stable")
            self._times, self._totals = times[order], in_order(units[order])
        asking = np.flatnonzero(mine & ~table.failed)
        asking = asking[np.argsort(table.sent[asking], kind="stable")]
        wanted = np.where(table.ok, table.output, table.most_output)
        self._sent, self._wanted = table.sent[asking], table.units(cost, side, wanted, mine)[asking]
        timed = np.flatnonzero(mine & table.answered & ~table.failed)
        timed = timed[np.argsort(table.sent[timed], kind="stable")]
        self._timed = table.sent[timed]
        self._waits = in_order(table.first[timed] - self._timed)

    def received(self, edges: Column) -> Column:
        """Units received before each of `edges`."""
        if not self._known:
            return np.full(len(edges), math.nan)
        if self._method == "events":
            return self._totals[np.searchsorted(self._times, edges)] / self._weight
        found = np.empty(len(edges))
        length = np.maximum(self._last - self._first, np.finfo(float).tiny)
        for place, edge in enumerate(edges):
            parts = np.where(edge > self._last, 1.0, np.clip((edge - self._first) / length, 0.0, 1.0))
            found[place] = (self._units * np.where(edge > self._first, parts, 0.0)).sum()
        return found / self._weight

    def asked(self, start: Column, end: Column) -> Column:
        """Units that the requests sent in each [start, end) ask for; unknown where one's length is."""
        unknown = np.isnan(self._wanted)
        totals, gaps = in_order(np.where(unknown, 0.0, self._wanted)), in_order(unknown)
        low, high = np.searchsorted(self._sent, start), np.searchsorted(self._sent, end)
        return np.where(gaps[high] > gaps[low], math.nan, (totals[high] - totals[low]) / self._weight)

    def responses(self, start: Column, end: Column) -> Column:
        """Mean time to first token of the requests in each [start, end)."""
        low, high = np.searchsorted(self._timed, start), np.searchsorted(self._timed, end)
        counts = high - low
        return np.where(counts > 0, (self._waits[high] - self._waits[low]) / np.maximum(counts, 1), math.nan)


def _known(values: Column) -> Values:
    return tuple(None if math.isnan(value) else value for value in values.tolist())
