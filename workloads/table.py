"""The requests of one run as columns, from which all measures are taken.

Rows are in the order of the records. What was not measured is NaN. Service is dated by what a client can see: a prompt
counts with the first token, output tokens when they came. *Client-side* service is the cost of the whole prompt and the
output; for *actual* service cached tokens are free.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sglang_fair.bench import percentile
from sglang_fair.core.cost import Cost, Linear
from sglang_fair.core.fairness import Curve
from workloads.programs import Outcome
from workloads.records import ProgramRecord, Run

Side = Literal["client", "actual"]
Column = NDArray[np.float64]
Mask = NDArray[np.bool_]
Latencies = Sequence[tuple[float, bool]]
"""Seconds, and whether the run's end cut it off there."""


@dataclass(frozen=True, slots=True)
class Percentile:
    """`value_s`, or more than that if `at_least`."""

    value_s: float
    at_least: bool = False

    @classmethod
    def of(cls, latencies: Latencies, percent: float) -> "Percentile | None":
        """By nearest rank. None if there is nothing to rank."""
        if not latencies:
            return None
        value = percentile(latencies, percent)
        return cls(value[0], any(one[1] for one in latencies if one <= value))


class Requests:
    """The columns. Arguments called `which` are masks over the rows."""

    def __init__(self, run: Run) -> None:
        records = run.requests
        self.run = run
        self.clients: tuple[str, ...] = tuple(
            sorted({*run.manifest.clients, *(one.client for one in records)})
        )
        places = {name: place for place, name in enumerate(self.clients)}
        self.client = np.array([places[one.client] for one in records], np.intp)
        self.sent = _column(one.t_intended_s for one in records)
        self.first = _column(one.t_first_token_s for one in records)
        """NaN: no token came."""
        self.done = _column(one.t_done_s for one in records)
        self.prompt = _column(one.prompt_tokens for one in records)
        self.cached = _column(one.cached_tokens for one in records)
        self.extend = self.prompt - self.cached
        self.output = _column(one.output_tokens for one in records)
        self.most_output = _column(one.max_output_tokens for one in records)
        outcomes = [one.outcome for one in records]
        self.ok, self.failed = (
            np.array([one == outcome for one in outcomes], bool) for outcome in (Outcome.OK, Outcome.FAILED)
        )
        self.answered = ~np.isnan(self.first)

    @cached_property
    def of(self) -> Mapping[str, Mask]:
        return {name: self.client == place for place, name in enumerate(self.clients)}

    def sent_in(self, start_s: float, end_s: float) -> Mask:
        """Those that could be sent in [start, end)."""
        return (start_s <= self.sent) & (self.sent < end_s)

    def input(self, side: Side) -> Column:
        return self.prompt if side == "client" else self.extend

    def units(self, cost: Cost, side: Side, output: Column, which: Mask) -> Column:
        """What these cost with so much output; NaN where the length of the prompt is not known."""
        found = np.full(len(self.client), math.nan)
        rows = np.flatnonzero(which & ~np.isnan(self.input(side)))
        found[rows] = _priced(cost, self.input(side)[rows], output[rows], self._ahead(side)[rows])
        return found

    @cached_property
    def _tokens(self) -> tuple[NDArray[np.intp], Column, Column]:
        """Row, time, and how many of its tokens had come by then: at first none, then all events that brought some. The
        last one has all of them; where none was seen they came with the end."""
        answered = np.flatnonzero(self.answered)
        records = [self.run.requests[row] for row in answered]
        times = [
            ((one.t_first_token_s, 0), *(one.token_times or ((one.t_done_s, one.output_tokens),)))
            for one in records
        ]
        lengths = np.array([len(one) for one in times], np.intp)
        rows = np.repeat(answered, lengths)
        flat = np.array(list(chain.from_iterable(times)), float).reshape(-1, 2)
        counts = np.minimum(flat[:, 1], self.output[rows])
        counts[np.cumsum(lengths) - 1] = self.output[answered]
        return rows, flat[:, 0], counts

    def events(self, cost: Cost, side: Side, which: Mask) -> tuple[NDArray[np.intp], Column, Column]:
        """Row, time and units of all that these received, whose prompts' lengths are known. By row, in order of
        time."""
        rows, times, counts = self._tokens
        kept = (which & ~np.isnan(self.input(side)))[rows]
        rows, times, counts = rows[kept], times[kept], counts[kept]
        totals = _priced(cost, self.input(side)[rows], counts, self._ahead(side)[rows])
        begins = np.diff(rows, prepend=-1) > 0
        return rows, times, np.where(begins, totals, np.diff(totals, prepend=0.0))

    def curves(self, cost: Cost, side: Side = "client") -> Mapping[str, Curve] | None:
        """Each client's service over time. None if an answer does not say what it would take to know."""
        if np.isnan(self.input(side)[self.answered]).any():
            return None
        rows, times, units = self.events(cost, side, self.answered)
        clients = self.client[rows]
        return {
            name: Curve.of(zip(times[clients == k].tolist(), units[clients == k].tolist(), strict=True))
            for k, name in enumerate(self.clients)
        }

    def ttfts(self, which: Mask) -> Latencies:
        """Seconds from when a request could have been sent to its first token. Failed ones have none."""
        which = which & ~self.failed
        ends = np.where(self.answered, self.first, self.done)
        return list(zip((ends - self.sent)[which].tolist(), (~self.answered)[which].tolist(), strict=True))

    def hit_rate(self, which: Mask) -> float | None:
        """Cached share of these prompts. None if a count is missing."""
        cached, prompts = self.cached[which].sum(), self.prompt[which].sum()
        return float(cached / prompts) if prompts > 0 and not math.isnan(cached) else None

    def _ahead(self, side: Side) -> Column:
        return np.zeros(len(self.client)) if side == "client" else self.cached


def latencies(programs: Iterable[ProgramRecord], end_s: float) -> Latencies:
    """Seconds from arrival to last answer; a program that the run's end cut off counts with the time it had taken.
    Failed ones have none."""
    return [
        ((end_s if one.t_done_s is None else one.t_done_s) - one.t_intended_s, one.t_done_s is None)
        for one in programs
        if one.outcome != Outcome.FAILED
    ]


def in_order(values: Column) -> Column:
    """Sums of the first 0, 1, 2, ... values."""
    return np.concatenate([[0.0], np.cumsum(values)])


def _priced(cost: Cost, inputs: Column, outputs: Column, ahead: Column) -> Column:
    if isinstance(cost, Linear):
        return cost.extend_weight * inputs + cost.output_weight * outputs
    rows = zip(inputs.tolist(), outputs.tolist(), ahead.tolist(), strict=True)
    return np.array([cost(int(extend), int(output), int(cached)) for extend, output, cached in rows], float)


def _column(values: Iterable[float | None]) -> Column:
    return np.array(list(values), float)  # None becomes NaN
