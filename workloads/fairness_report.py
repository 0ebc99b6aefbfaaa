"""Who got what of a server, from the records of one load: for each client and in all.

The *span* is from the end of the warm-up to the end of arrivals. Service and demand are of the span, in units of a
cost function; latencies are of the requests and programs that were due in it. A request's latency counts from when it
was due, not from when a connection was free, so a server that stalls cannot hide it (coordinated omission). In a closed
loop a request is due when the one before it has ended, so a slow server is asked less. Requests that the run's end cut
off count with the time they had taken, and a percentile that this may have lowered is a lower bound. Failed requests
have no latency and are counted by kind. Numbers that the endpoint did not report are None.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Group
from rich.text import Text

from sglang_fair.core.cost import Cost
from sglang_fair.core.fairness import jain
from workloads.measures import TOKENS
from workloads.programs import Outcome
from workloads.records import RequestRecord, Run
from workloads.report import DASH, number, shown, table_of
from workloads.table import Mask, Percentile, Requests, latencies
from workloads.windows import WINDOW_S, DifferenceTable, Windows, regular_times

SAMPLES = 20
"""Of the service difference, if the span allows."""


@dataclass(frozen=True, slots=True)
class ClientReport:
    """One client. Service is in units a second."""

    client: str
    weight: float
    requests: int
    ok: int
    failed: int
    cut_off: int
    requested_rate: float | None
    service_rate: float | None
    share: float | None
    fair_share: float
    """Its weight over the sum of all weights: its due share, if it asks for that much."""
    ttft_p50: Percentile | None
    ttft_p99: Percentile | None
    program_p50: Percentile | None
    program_p99: Percentile | None
    token_p50_s: float | None
    """Median over requests of the mean time between two output tokens."""
    hit_rate: float | None
    left_out: int
    """Requests that broke off before the length of their prompt was known. Their service is not counted."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One kind of failure, with the status where there was an answer."""

    kind: str
    status: int | None
    count: int
    clients: Mapping[str, int]
    example: str


@dataclass(frozen=True, slots=True)
class FairnessReport:
    """One load in numbers; see the module."""

    span_s: tuple[float, float]
    tokens_per_s: float | None
    """Input and output."""
    service_rate: float | None
    jain: float | None
    """Of service over weight: 1 where it is equal. A client that asks for less than its share lowers it."""
    accumulated_difference: float | None
    """Of service over weight, in the whole span, between the most and the least served client."""
    window_s: float
    service_difference: DifferenceTable
    """In windows of that length, in units a second: what clients asked for and did not get against the
    most-served one, by weight (VTC §5.1)."""
    clients: tuple[ClientReport, ...]
    failures: tuple[Failure, ...]

    @property
    def ok(self) -> int:
        return sum(client.ok for client in self.clients)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def fairness_report(
    run: Run,
    *,
    warm_up_s: float = 0.0,
    cost: Cost | None = None,
    weights: Mapping[str, float] | None = None,
) -> FairnessReport:
    """The report of a run. Raises ValueError where it has no end, or ended within the warm-up."""
    if run.end is None:
        raise ValueError("the run was cut off: it has no end")
    start_s, end_s = warm_up_s, min(run.manifest.duration_s, run.end.t_s)
    if end_s <= start_s:
        raise ValueError(f"the run ended within its warm-up of {warm_up_s:g} s: there is nothing to measure")
    window_s = min(WINDOW_S, (end_s - start_s) / 2)
    shares, table = weights or {}, Requests(run)
    plain = Windows(table, cost=cost)
    fair = Windows(table, cost=cost, weights=shares, window_s=window_s)
    service, requested = plain.service(start_s, end_s), plain.requested(start_s, end_s)
    total, span_s = _sum(service), end_s - start_s
    by_weight = [value for value in fair.service(start_s, end_s).values() if value is not None]
    step_s = max(span_s - window_s, 1e-3) / SAMPLES
    all_weights = sum(shares.get(name, 1.0) for name in table.clients)
    due = table.sent_in(start_s, end_s)
    return FairnessReport(
        span_s=(start_s, end_s),
        tokens_per_s=_over(_sum(Windows(table, cost=TOKENS).service(start_s, end_s)), span_s),
        service_rate=_over(total, span_s),
        jain=jain(by_weight) if total is not None else None,
        accumulated_difference=fair.accumulated_difference([end_s], since_s=start_s)[0],
        window_s=window_s,
        service_difference=fair.difference_table(
            regular_times(end_s, step_s=step_s, since_s=start_s, window_s=window_s)
        ),
        clients=tuple(
            _client(
                name,
                table,
                due & table.of[name],
                (start_s, end_s),
                weight=shares.get(name, 1.0),
                fair_share=shares.get(name, 1.0) / all_weights,
                requested_rate=_over(requested[name], span_s),
                service_rate=_over(service[name], span_s),
                share=_over(service[name], total),
                left_out=plain.left_out[name],
            )
            for name in table.clients
        ),
        failures=failures([run.requests[row] for row in due.nonzero()[0]]),
    )


def failures(requests: Sequence[RequestRecord]) -> tuple[Failure, ...]:
    """The failures by kind, the most frequent first."""
    found: dict[tuple[str, int | None], list[RequestRecord]] = {}
    for record in requests:
        if record.outcome == Outcome.FAILED:
            found.setdefault(_kind(record), []).append(record)
    made = [
        Failure(
            kind,
            status,
            len(records),
            dict(sorted(Counter(record.client for record in records).items())),
            (records[0].error or "")[:200],
        )
        for (kind, status), records in found.items()
    ]
    return tuple(sorted(made, key=lambda failure: (-failure.count, failure.kind, failure.status or 0)))


def _kind(record: RequestRecord) -> tuple[str, int | None]:
    """The kind of a failure, by its status and the driver's error."""
    error = record.error or ""
    if record.status is not None and record.status != 200:
        return "refused" if record.status in (429, 503, 529) else "HTTP error", record.status
    if error.startswith("no answer within"):
        return "time-out", record.status
    if record.status is None:
        return "no connection", None
    if re.match(r"the stream ended|Client\w*Error|ServerDisconnectedError|ConnectionResetError", error):
        return "broken off", record.status
    return "error in the answer", record.status


def _client(name: str, table: Requests, mine: Mask, span: tuple[float, float], **known: Any) -> ClientReport:
    run = table.run
    assert run.end is not None
    ttfts = table.ttfts(mine)
    programs = latencies(
        (p for p in run.programs if p.client == name and span[0] <= p.t_intended_s < span[1]), run.end.t_s
    )
    ok, failed = int((mine & table.ok).sum()), int((mine & table.failed).sum())
    return ClientReport(
        client=name,
        requests=int(mine.sum()),
        ok=ok,
        failed=failed,
        cut_off=int(mine.sum()) - ok - failed,
        ttft_p50=Percentile.of(ttfts, 50),
        ttft_p99=Percentile.of(ttfts, 99),
        program_p50=Percentile.of(programs, 50),
        program_p99=Percentile.of(programs, 99),
        token_p50_s=_token_s([run.requests[row] for row in (mine & table.ok).nonzero()[0]]),
        hit_rate=table.hit_rate(mine & table.ok),
        **known,
    )


def _token_s(answered: Sequence[RequestRecord]) -> float | None:
    gaps = [
        (r.token_times[-1][0] - r.token_times[0][0]) / (r.token_times[-1][1] - r.token_times[0][1])
        for r in answered
        if len(r.token_times) > 1
    ]
    return median(gaps) if gaps else None


def _sum(values: Mapping[str, float | None]) -> float | None:
    known = [value for value in values.values() if value is not None]
    return sum(known) if len(known) == len(values) else None


def _over(units: float | None, by: float | None) -> float | None:
    return None if units is None or not by else units / by


# ---- for people


def render(report: FairnessReport, *, closed_loop: bool) -> Group:
    start_s, end_s = report.span_s
    span = f"in {end_s - start_s:.3g} s behind a warm-up of {start_s:g} s"
    heads = "client|due|ok|failed|cut off|TTFT P50 s|TTFT P99 s|program P50 s|program P99 s|token P50 ms"
    latency = table_of(f"requests {span}", heads)
    service = table_of(f"service {span}", "client|weight|asked for/s|received/s|share|fair share|hit rate")
    for client in report.clients:
        service.add_row(
            client.client,
            f"{client.weight:g}",
            number(client.requested_rate),
            number(client.service_rate),
            number(client.share),
            number(client.fair_share),
            number(client.hit_rate),
        )
        latency.add_row(
            client.client,
            *(f"{count:,}" for count in (client.requests, client.ok, client.failed, client.cut_off)),
            *(shown(p) for p in (client.ttft_p50, client.ttft_p99, client.program_p50, client.program_p99)),
            number(None if client.token_p50_s is None else 1000 * client.token_p50_s),
        )
    lines = (*_lines(report), *_failure_lines(report), *_notes(report, closed_loop))
    return Group(service, latency, *(Text(line) for line in lines))


def _lines(report: FairnessReport) -> list[str]:
    table = report.service_difference
    return [
        f"{number(report.tokens_per_s)} tokens/s, {number(report.service_rate)} units of service a second",
        f"service by weight: Jain's index {number(report.jain)}, "
        f"most less least served {number(report.accumulated_difference)} units",
        f"asked for and missed against the most-served client, in windows of {report.window_s:.3g} s: "
        f"at most {number(table.maximum)}, on average {number(table.mean)} units/s, "
        f"variance {number(table.variance)}",
    ]


def _failure_lines(report: FairnessReport) -> list[str]:
    return [
        f"{failure.count:,} × {failure.kind}{'' if failure.status in (None, 200) else f' (HTTP {failure.status})'}: "
        + ", ".join(f"{client} {count:,}" for client, count in failure.clients.items())
        + f"; the first: {failure.example}"
        for failure in report.failures
    ]


def _notes(report: FairnessReport, closed_loop: bool) -> list[str]:
    notes = ["latencies count from when a request was due, whether or not it could be sent then"]
    if closed_loop:
        notes.append(
            "closed loop: a request is due when the one before it has ended, so a slow server is asked for less"
        )
    if any(client.service_rate is None for client in report.clients):
        notes.append(f"{DASH}: the endpoint did not say how long prompts were")
    elif any(client.requested_rate is None for client in report.clients):
        notes.append(
            f"{DASH}: the length of prompts without an answer is unknown; with --tokenizer they are sent as token ids"
        )
    if left_out := sum(client.left_out for client in report.clients):
        notes.append(
            f"{left_out:,} answers broke off before they gave their prompt's length: not counted as service"
        )
    return notes
