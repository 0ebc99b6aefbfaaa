"""What a gateway counts, for Prometheus and `/status`. With several processes each page has the sum of all.

Requests are counted as they end, by client (`Counted`). What can be read at any time is read when a page is asked for;
with several processes also every `COPY_S`, because a page is made from what each of them has last written into files
that they share (prometheus-client's multiprocess mode).
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
    multiprocess,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

from router.batches.model import ClientTotals
from router.gateway.record import Exchange
from sglang_fair.common.deadlines import ATTAINED
from sglang_fair.metrics import table
from sglang_fair.metrics.labels import OTHER, Counted
from sglang_fair.metrics.table import SECONDS

__all__ = ["CONTENT_TYPE", "COPY_S", "FOLDER_VARIABLE", "GatewayMetrics"]

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Prometheus-client's own: the folder of those files. It must be set before that is imported."""

COPY_S = 1.0

_LEAST = (
    "gateway_router_up",
    "gateway_routers_up",
    "gateway_tenants_ok",
    "gateway_certificate_end_timestamp_seconds",
)
"""Of several processes the least counts; of other gauges the sum."""

_SAME = ("batch_items",)
"""All processes say the same, unless one is late."""

BATCH_STATES = ("left", "running", "completed", "failed")

_LABELS = {metric.name: metric.labels for metric in table.METRICS}

Counts = dict[tuple[str, ...], float]
"""By labels."""

Count = Callable[..., None]
"""Counts one more in a metric of the table: its name, and its labels in their order (`GatewayMetrics.count`)."""


class _Series(NamedTuple):
    """Those of one label; to find them anew would take longer than to count."""

    ends: Mapping[str, Counter]
    durations: Histogram
    first_tokens: Histogram


class GatewayMetrics:
    """One process's. Belongs to one event loop."""

    def __init__(
        self,
        most_clients: int,
        gauges: Callable[[], Mapping[str, float]],
        *,
        shared: bool,
    ) -> None:
        """`gauges` reads them, by name. `shared`: other processes count too, and `FOLDER_VARIABLE` is set."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._counted = Counted(most_clients)
        self._read_gauges = gauges
        self._shared = shared
        self._series: dict[str, _Series] = {}
        self._batch_labels: set[tuple[str, str]] = set()
        self.classes_of_tenants: dict[str, Counts] = {}
        """Of each tenant, what has been attained in this process, by class and `ATTAINED`."""
        self._series_of: dict[tuple[str, ...], Counter] = {}
        self._counts = {one.name: Counter(one.full_name, one.help, one.labels, registry=self._registry)
                        for one in _of("counter")}  # fmt: skip
        self._gauges = {
            one.name: Gauge(one.full_name, one.help, one.labels, registry=self._registry,
                            multiprocess_mode=_mode(one.name))
            for one in _of("gauge")
        }  # fmt: skip
        self._times = {
            one.name: Histogram(one.full_name, one.help, one.labels, registry=self._registry, buckets=SECONDS)
            for one in _of("histogram")
        }
        for metric in _of("counter"):
            if not metric.labels:
                self._counts[metric.name].inc(0)

    def count(self, name: str, *labels: str) -> None:
        series = self._series_of.get((name, *labels))
        if series is None:
            metric = self._counts[name]
            series = self._series_of[name, *labels] = metric.labels(*labels) if labels else metric
        series.inc()

    def ended(self, exchange: Exchange) -> None:
        label = OTHER  # of those whom nobody knows
        if exchange.is_entered:
            tokens = (exchange.input_tokens or 0) + exchange.output_tokens
            label = self._counted.count(exchange.client, tokens, is_tenant=exchange.is_tenant)
        series = self._series.get(label)
        if series is None:
            series = self._series[label] = _Series(
                {one: self._counts["requests_total"].labels(label, one) for one in table.OUTCOMES},
                self._times["request_seconds"].labels(label),
                self._times["ttft_seconds"].labels(label),
            )
        series.ends[exchange.outcome].inc()
        if exchange.outcome == "ok" and exchange.ended_s is not None:
            series.durations.observe(exchange.ended_s - exchange.came_s)
        if (first_s := exchange.first_s) is not None:
            series.first_tokens.observe(first_s - exchange.came_s)
        if exchange.served_model is not None:
            self.count("model_requests_total", exchange.served_model, exchange.outcome)
        if exchange.promise is not None:
            attained = exchange.promise.slo_class, exchange.attained
            self.count("slo_requests_total", *attained)
            if exchange.is_tenant:
                of = self.classes_of_tenants.setdefault(exchange.client, {})
                of[attained] = of.get(attained, 0) + 1

    def batches(self, totals: Mapping[str, ClientTotals]) -> None:
        """How many items of batches each client has in each of `BATCH_STATES`."""
        found: dict[tuple[str, str], int] = dict.fromkeys(self._batch_labels, 0)
        for client, counts in totals.items():
            label = client if client in self._counted.labels else OTHER
            for state in BATCH_STATES:
                found[label, state] = found.get((label, state), 0) + getattr(counts, state)
        for labels, count in found.items():
            self._gauges["batch_items"].labels(*labels).set(count)
        self._batch_labels = set(found)

    async def run(self) -> None:
        """With several processes: writes what the others cannot see, until it is cancelled."""
        while self._shared:
            self._copy()
            await asyncio.sleep(COPY_S)

    async def page(self) -> bytes:
        """All of it, of all processes. Made in a thread."""
        self._copy()
        return await asyncio.to_thread(self._page)

    def status(self) -> dict[str, object]:
        """What `/status` shows, of all processes: what was counted, and what is open now."""
        self._copy()
        found: dict[str, Counts] = {}
        own = (*self._counts.values(), *self._gauges.values())  # of histograms there are thousands of numbers
        everybody = (self._everybody(),) if self._shared else own
        for family in chain.from_iterable(one.collect() for one in everybody):
            for sample in family.samples:
                if not isfinite(sample.value):  # a time that never comes
                    continue
                name = sample.name.removeprefix(table.PREFIX)
                labels = tuple(sample.labels[label] for label in _LABELS.get(name, ()))
                of = found.setdefault(name, {})
                of[labels] = of.get(labels, 0) + int(sample.value)

        def total(name: str) -> float:
            return sum(found.get(name, {}).values())

        def by_label(name: str) -> dict[str, float]:
            return {key: count for (key, *_), count in sorted(found.get(name, {}).items())}

        ends, in_flight = by_outcome(found.get("requests_total", {})), total("gateway_requests_in_flight")
        return {
            "refusals": by_label("refusals_total"),
            "ignored headers": by_label("ignored_headers_total"),
            "requests": sum(ends.values()) + in_flight,
            "retried": total("retries_total"),
            "resumed": total("resumes_total"),
            "cut": total("cuts_total"),
            "placed in fallback": total("fallback_placements_total"),
            **{outcome: ends.get(outcome, 0) for outcome in ("failed", "left", "refused")},
            "in_flight": in_flight,
            "held_bytes": total("gateway_held_bytes"),
            "connections": total("gateway_connections"),
            "models": by_model(found.get("model_requests_total", {})),
            "classes": by_class(found.get("slo_requests_total", {})),
        }

    def _page(self) -> bytes:
        return generate_latest(self._everybody())

    def _everybody(self) -> CollectorRegistry:
        if not self._shared:
            return self._registry
        folder = Path(os.environ[FOLDER_VARIABLE])
        _forget_dead(folder)
        everybody = CollectorRegistry()
        multiprocess.MultiProcessCollector(everybody, str(folder))  # type: ignore[no-untyped-call]
        return everybody

    def _copy(self) -> None:
        for name, value in self._read_gauges().items():
            self._gauges[name].set(value)


def by_outcome(counts: Counts) -> dict[str, float]:
    found: dict[str, float] = {}
    for (_, outcome), count in counts.items():
        found[outcome] = found.get(outcome, 0) + count
    return found


def by_model(counts: Counts) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for (model, outcome), count in sorted(counts.items()):
        found.setdefault(model, {})[outcome] = count
    return found


def by_class(counts: Counts) -> dict[str, dict[str, float]]:
    """Class -> requests that have ended, and of these those that met and missed their time; the others did neither."""
    found: dict[str, dict[str, float]] = {}
    for slo_class in sorted({slo_class for slo_class, _ in counts}):
        of = {attained: counts.get((slo_class, attained), 0) for attained in ATTAINED}
        found[slo_class] = {"requests": sum(of.values()), "met": of["met"], "missed": of["missed"]}
    return found


def _mode(name: str) -> Literal["livemin", "livemax", "livesum"]:
    """What several processes say together."""
    return "livemin" if name in _LEAST else "livemax" if name in _SAME else "livesum"


def _of(kind: table.Kind) -> Iterable[table.Metric]:
    return (one for one in table.of("gateway") if one.kind == kind)


def _forget_dead(folder: Path) -> None:
    """The gauges of processes that are gone. What they have counted stays."""
    for file in folder.glob("gauge_live*_*.db"):
        pid = int(file.stem.rpartition("_")[2])
        if not psutil.pid_exists(pid):
            with contextlib.suppress(FileNotFoundError):
                multiprocess.mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]
