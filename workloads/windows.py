"""Service, demand and response time of each client over time: the measures of VTC §5.1, from records alone.

    service rate at t       W(t - T, t + T) / 2T, W in units of a cost function; 2T = 60 s in the paper
    requested rate at t     the same of what the client's requests sent in [t - T, t + T) ask for
    response time at t      mean time to first token of the requests sent in that window
    accumulated difference  max W_i(0, t) - W_j(0, t) over pairs of clients
    service difference      Σ_i min(s_max - s_i, |r_i - s_i|) of the rates at t against the most-served client;
                            a table has its maximum, mean and variance over sample times (VTC Tables 2 to 6)

There are two methods to date service. With `events`, output tokens count when they came and the prompt counts with
the first of them (records do not show when a request was admitted). `spread` is the method of the paper's artifact:
the cost of a whole request is spread evenly from its first token to its end. Failed requests do not count there; with
`events` the part that they received does.

*Client-side* service is the cost of the whole prompt and the output; for *actual* service cached tokens are free. A
request that the run's end cut off asks for its full prompt and its maximum of output tokens; one that failed asks for
nothing, as in the artifact. Unknown values are None: a client's service, if the prompt length of a request that ended
well is missing; its requested rate in a window with a request of unknown length. A request that broke off before its
prompt length was known is left out of service and counted in `left_out`.

Windows are half-open, [t - T, t + T). Times are seconds since the run's start.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from statistics import fmean, pvariance
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sglang_fair.core.cost import Cost, Linear
from sglang_fair.core.fairness import unmet_difference
from workloads.programs import Outcome
from workloads.records import RequestRecord, Run

Method = Literal["events", "spread"]
Side = Literal["client", "actual"]
Values = tuple[float | None, ...]
"""One for each sample time."""

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
    """The measures of one run under one cost function. Built in O(requests); asking costs O(requests + times).

    `weights` are clients' shares, 1 where not given: service and demand are divided by them, so equal
    values are fair (VTC §4.3). `cost` defaults to the linear one with the manifest's prices.
    """

    def __init__(
        self,
        run: Run,
        *,
        cost: Cost | None = None,
        side: Side = "client",
        method: Method = "events",
        weights: Mapping[str, float] | None = None,
        window_s: float = WINDOW_S,
    ) -> None:
        if window_s <= 0 or any(weight <= 0 for weight in (weights or {}).values()):
            raise ValueError(f"window and weights must be positive: {window_s!r}, {dict(weights or {})}")
        manifest = run.manifest
        self._cost = cost or Linear(manifest.extend_weight, manifest.output_weight)
        self._window_s = window_s
        requests: dict[str, list[RequestRecord]] = {name: [] for name in manifest.clients}
        for record in run.requests:
            requests.setdefault(record.client, []).append(record)
        self.clients: tuple[str, ...] = tuple(sorted(requests))
        self._accounts = {
            name: _Account(requests[name], self._cost, side, method, (weights or {}).get(name, 1.0))
            for name in self.clients
        }

    @property
    def left_out(self) -> Mapping[str, int]:
        """Requests that broke off without saying how long their prompt was, by client; their service is not
        counted."""
        return {name: account.left_out for name, account in self._accounts.items()}

    def service(self, start_s: float, end_s: float) -> dict[str, float | None]:
        """Units that each client received in [start, end)."""
        edges = np.array([start_s, end_s])
        found = {name: account.received(edges) for name, account in self._accounts.items()}
        return {name: None if got is None else float(got[1] - got[0]) for name, got in found.items()}

    def requested(self, start_s: float, end_s: float) -> dict[str, float | None]:
        """Units that each client's requests sent in [start, end) ask for."""
        start, end = np.array([start_s]), np.array([end_s])
        return {name: account.asked(start, end)[0] for name, account in self._accounts.items()}

    def service_rate(self, times_s: Sequence[float]) -> dict[str, Values | None]:
        """W(t - T, t + T) / 2T of each client, in units a second."""
        edges, starts, ends = self._windows(times_s)
        rates: dict[str, Values | None] = {}
        for name, account in self._accounts.items():
            received = account.received(edges)
            rates[name] = (
                None
                if received is None
                else tuple(((received[ends] - received[starts]) / self._window_s).tolist())
            )
        return rates

    def requested_rate(self, times_s: Sequence[float]) -> dict[str, Values]:
        """What each client asked for in the window, in units a second."""
        times = np.asarray(times_s, float)
        start, end = times - self._window_s / 2, times + self._window_s / 2
        return {
            name: tuple(
                None if units is None else units / self._window_s for units in account.asked(start, end)
            )
            for name, account in self._accounts.items()
        }

    def response_time(
        self, times_s: Sequence[float], by: Literal["sent", "first-token"] = "sent"
    ) -> dict[str, Values]:
        """Mean seconds from when a request could have been sent to its first token.

        A window has the requests that were sent in it (VTC §5.1), or those that had their first token in it
        (the artifact). Requests that never had one do not count; None where no other was sent.
        """
        times = np.asarray(times_s, float)
        start, end = times - self._window_s / 2, times + self._window_s / 2
        return {name: account.responses(by, start, end) for name, account in self._accounts.items()}

    def accumulated(self, times_s: Sequence[float], since_s: float = 0.0) -> dict[str, Values | None]:
        """W(since, t) of each client; `times_s` in ascending order."""
        edges = np.array([since_s, *times_s])
        found = {name: account.received(edges) for name, account in self._accounts.items()}
        return {
            name: None if got is None else tuple((got[1:] - got[0]).tolist()) for name, got in found.items()
        }

    def accumulated_difference(self, times_s: Sequence[float], since_s: float = 0.0) -> Values:
        """Largest W_i(since, t) - W_j(since, t) over all pairs, backlogged or not. None below two clients."""
        totals = self.accumulated(times_s, since_s)
        columns = [_column(totals, k) for k in range(len(times_s))]
        return tuple(
            None if column is None or len(column) < 2 else max(column.values()) - min(column.values())
            for column in columns
        )

    def service_difference(self, times_s: Sequence[float]) -> Values:
        """What clients missed against the most-served one at each time, summed over clients, in units a
        second; see the module. None below two clients."""
        received, requested = self.service_rate(times_s), self.requested_rate(times_s)
        found: list[float | None] = []
        for k in range(len(times_s)):
            got, asked = _column(received, k), _column(requested, k)
            found.append(None if got is None or asked is None else unmet_difference(got, asked))
        return tuple(found)

    def difference_table(self, times_s: Sequence[float]) -> DifferenceTable:
        """The service difference over these times, usually `sample_times`."""
        return DifferenceTable.of(self.service_difference(times_s))

    def _windows(
        self, times_s: Sequence[float]
    ) -> tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.intp]]:
        """All edges of the windows in order, and which of them each window begins and ends with."""
        times = np.asarray(times_s, float)
        start, end = times - self._window_s / 2, times + self._window_s / 2
        edges = np.unique(np.concatenate([start, end]))
        return edges, np.searchsorted(edges, start), np.searchsorted(edges, end)


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
    """One client's requests, as arrays over requests."""

    def __init__(
        self, records: Sequence[RequestRecord], cost: Cost, side: Side, method: Method, weight: float
    ) -> None:
        self._records = records
        self._cost = cost
        self._side = side
        self._method = method
        self._weight = weight
        answered = [
            record
            for record in records
            if record.t_first_token_s is not None
            and not (method == "spread" and record.outcome == Outcome.FAILED)
        ]
        self._served = [record for record in answered if self._input(record) is not None]
        unknown = [record for record in answered if self._input(record) is None]
        self.left_out = sum(record.outcome != Outcome.OK for record in unknown)
        self._known = self.left_out == len(unknown)

    def received(self, edges: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Units received before each of `edges`, which are in ascending order. None if not known."""
        if not self._known:
            return None
        first, last, units = self._spans
        begun = np.searchsorted(edges, first, side="right")
        ended = np.searchsorted(edges, last, side="right")
        found = np.bincount(ended, weights=units, minlength=len(edges) + 1)[: len(edges)].cumsum()
        for place in np.flatnonzero(begun < ended).tolist():  # under way at an edge
            for edge in range(begun[place], ended[place]):
                found[edge] += self._part(place, float(edges[edge]))
        return found / self._weight

    def asked(self, start: NDArray[np.float64], end: NDArray[np.float64]) -> Values:
        """Units that the requests sent in each [start, end) ask for; None where one's length is not known."""
        sent, units = self._demand
        known = ~np.isnan(units)
        totals = _running(np.where(known, units, 0.0))
        unknown = _running((~known).astype(float))
        low, high = np.searchsorted(sent, start), np.searchsorted(sent, end)
        asked = (totals[high] - totals[low]) / self._weight
        missing = unknown[high] > unknown[low]
        return tuple(
            None if gap else value for value, gap in zip(asked.tolist(), missing.tolist(), strict=True)
        )

    def responses(
        self,
        by: Literal["sent", "first-token"],
        start: NDArray[np.float64],
        end: NDArray[np.float64],
    ) -> Values:
        """Mean time to first token of the requests in each [start, end)."""
        at, waits = self._waits[by]
        totals = _running(waits)
        low, high = np.searchsorted(at, start), np.searchsorted(at, end)
        return tuple(
            float(total) / count if count else None
            for total, count in zip(totals[high] - totals[low], (high - low).tolist(), strict=True)
        )

    @cached_property
    def _spans(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """First and last instant of each served request's service, and all of its units."""
        return (
            _array(record.t_first_token_s for record in self._served),
            _array(self._last_s(record) for record in self._served),
            _array(self._units(record, record.output_tokens) for record in self._served),
        )

    @cached_property
    def _demand(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """When each request was sent, in order, and what it asks for; NaN where that is not known."""
        asking = sorted(
            (record for record in self._records if record.outcome != Outcome.FAILED),
            key=lambda record: record.t_intended_s,
        )
        units = []
        for record in asking:
            done = record.outcome == Outcome.OK
            output_tokens = record.output_tokens if done else record.max_output_tokens
            known = self._input(record) is not None
            units.append(self._units(record, output_tokens) if known else math.nan)
        return _array(record.t_intended_s for record in asking), _array(units)

    @cached_property
    def _waits(self) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Times to first token, ordered by when the request was sent and by when the token came."""
        found = [
            (record.t_intended_s, record.t_first_token_s)
            for record in self._records
            if record.t_first_token_s is not None and record.outcome != Outcome.FAILED
        ]
        sent, first = _array(sent for sent, _ in found), _array(first for _, first in found)
        waits, by_sent, by_first = (
            first - sent,
            np.argsort(sent, kind="stable"),
            np.argsort(first, kind="stable"),
        )
        return {"sent": (sent[by_sent], waits[by_sent]), "first-token": (first[by_first], waits[by_first])}

    def _input(self, record: RequestRecord) -> int | None:
        """Input tokens that count."""
        return record.prompt_tokens if self._side == "client" else record.extend_tokens

    def _units(self, record: RequestRecord, output_tokens: int) -> float:
        input_tokens = self._input(record)
        assert input_tokens is not None
        cached_tokens = 0 if self._side == "client" else record.cached_tokens
        return self._cost(input_tokens, output_tokens, cached_tokens or 0)

    def _last_s(self, record: RequestRecord) -> float:
        if self._method == "spread" or not record.token_times:
            return record.t_done_s
        return record.token_times[-1][0]

    def _part(self, place: int, until_s: float) -> float:
        """Units of the request at `place` that were received before `until_s`, which is inside its span."""
        record = self._served[place]
        if self._method == "spread":
            first, last, units = self._spans
            return float(units[place] * (until_s - first[place]) / (last[place] - first[place]))
        events = bisect_left(record.token_times, until_s, key=itemgetter(0))
        tokens = record.token_times[events - 1][1] if events else 0
        return self._units(record, min(tokens, record.output_tokens))


def _array(values: Iterable[float | None]) -> NDArray[np.float64]:
    return np.array([math.nan if value is None else value for value in values], float)


def _running(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of the first 0, 1, 2, ... values."""
    return np.concatenate([[0.0], np.cumsum(values)])


def _column(rows: Mapping[str, Values | None], place: int) -> dict[str, float] | None:
    """Every client's value at one time. None if one is not known."""
    found: dict[str, float] = {}
    for name, values in rows.items():
        value = None if values is None else values[place]
        if value is None:
            return None
        found[name] = value
    return found
