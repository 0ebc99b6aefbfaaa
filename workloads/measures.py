"""From the records of runs to their numbers: throughput, fairness, latency; medians and ratios of several.

Definitions (DLPM §7, VTC §5.1), all from records alone:

- The *window* is from the run's start to the end of arrivals (to the run's end, if that is earlier).
- A request's prompt counts when its first token comes, output tokens count when they come: a client cannot see
  when its prompt was computed, only that it was computed by then. *Client-side* service is the full prompt and the
  output, weighted; *actual* service has extend tokens in place of the prompt.
- *Jain's index* is of the clients' service rates in the interval in which all are active, inside the
  window. A client is active from its first arrival on; where the number of its programs is limited, until
  its last answer, else as long as programs arrive.
- *Latency* of a program is from its arrival to its last answer; P50 and P99 are taken per well-behaved
  client (nearest rank) and averaged over them. A program that the run's end cut off counts with the time
  it had taken; a percentile that this can have lowered is marked as a lower bound. Failed programs have no
  latency and are counted.
- The *service difference* is the largest between two clients over times when both are backlogged. A client is
  *backlogged* while it has a waiting request at every replica at every instant, which is what DLPM's proofs for a
  cluster assume. A client that runs dry for a moment loses what it is owed, and its difference to others is no longer
  bounded; so a doubtful moment ends an interval. Service is what the replicas have charged by their samples. A client
  is backlogged from one round of samples to the next if every replica reports a waiting request of the client in both,
  and its queue was not empty in between: `backlog` is a number that changes each time the client begins to wait.
- The bound is the replicas' own, summed over them: 2·|workers|·(U + Q^u) for DLPM (Theorem 5.1).

What was not measured is None.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, median, pstdev
from typing import TypeAlias

import numpy as np

from sglang_fair.core.cost import Linear
from sglang_fair.core.fairness import Curve, Interval, jain, service_difference, service_lag
from workloads.programs import Outcome
from workloads.records import Run, Sample
from workloads.table import Latencies, Percentile, Requests, latencies

TOKENS = Linear(1.0, 1.0)
"""Every token is a unit."""


@dataclass(frozen=True, slots=True)
class ClientSummary:
    """One client of one run. Rates are of the whole window, in units a second."""

    well_behaved: bool
    programs: int
    finished: int
    requests: int
    service_rate: float | None
    actual_rate: float | None
    hit_rate: float | None
    p50: Percentile | None
    p99: Percentile | None
    program_mean: Percentile | None
    ttft_p50: Percentile | None
    ttft_p99: Percentile | None


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers; see the module for what each means."""

    scheduler: str
    workload: str
    repeat: int
    window_s: float
    throughput_tokens_per_s: float | None
    service_rate: float | None
    actual_rate: float | None
    jain: float | None
    jain_actual: float | None
    active_s: float | None
    """Length of the interval over which Jain's index is taken."""
    well_behaved_p50_s: float | None
    well_behaved_p99_s: float | None
    p50_at_least: bool
    """The P50 above is a lower bound: the run's end cut off programs that could have raised it."""
    p99_at_least: bool
    program_mean_s: float | None
    program_mean_at_least: bool
    program_spread: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    hit_rate: float | None
    service_difference: float | None
    service_lag: float | None
    backlog_s: float | None
    """How long at least two clients were backlogged together. None if that cannot be seen."""
    bound: float | None
    ok: int
    failed: int
    cancelled: int
    clients: Mapping[str, ClientSummary] = field(default_factory=dict)


def summarize(run: Run) -> Summary:
    """All measures of one run. Raises ValueError for a run that was cut off: its window is unknown."""
    manifest = run.manifest
    if run.end is None:
        raise ValueError(f"the run of {manifest.scheduler} on {manifest.workload} was cut off: it has no end")
    table = Requests(run)
    window: Interval = (0.0, min(manifest.duration_s, run.end.t_s))
    tokens, client_side = table.curves(TOKENS), table.curves(prices(run))
    actual = table.curves(prices(run), "actual")
    active = _active(table, window)
    clients = {name: _client(table, name, client_side, actual, window) for name in table.clients}
    good = [client for client in clients.values() if client.well_behaved]
    p50, p99 = _average([client.p50 for client in good]), _average([client.p99 for client in good])
    means = [client.program_mean for client in good if client.program_mean is not None]
    program = _average(means)
    ttft50 = _average([client.ttft_p50 for client in good])
    ttft99 = _average([client.ttft_p99 for client in good])
    ok, failed = int(table.ok.sum()), int(table.failed.sum())
    return Summary(
        scheduler=manifest.scheduler,
        workload=manifest.workload,
        repeat=manifest.repeat,
        window_s=window[1],
        throughput_tokens_per_s=_rate(tokens, table.clients, window),
        service_rate=_rate(client_side, table.clients, window),
        actual_rate=_rate(actual, table.clients, window),
        jain=_jain(client_side, active),
        jain_actual=_jain(actual, active),
        active_s=None if active is None else active[1] - active[0],
        well_behaved_p50_s=None if p50 is None else p50.value_s,
        well_behaved_p99_s=None if p99 is None else p99.value_s,
        p50_at_least=p50 is not None and p50.at_least,
        p99_at_least=p99 is not None and p99.at_least,
        program_mean_s=None if program is None else program.value_s,
        program_mean_at_least=program is not None and program.at_least,
        program_spread=_spread([one.value_s for one in means]),
        ttft_p50_s=None if ttft50 is None else ttft50.value_s,
        ttft_p99_s=None if ttft99 is None else ttft99.value_s,
        hit_rate=table.hit_rate(table.first <= window[1]),
        **_backlog(run, table.clients),
        ok=ok,
        failed=failed,
        cancelled=len(run.requests) - ok - failed,
        clients=clients,
    )


def is_well_behaved(run: Run, client: str) -> bool:
    return bool(run.manifest.clients.get(client, {}).get("well_behaved", True))


def prices(run: Run) -> Linear:
    return Linear(run.manifest.extend_weight, run.manifest.output_weight)


Curves = Mapping[str, Curve] | None


def _rate(curves: Curves, names: Sequence[str], span: Interval) -> float | None:
    """Units a second of `names` together, the start of `span` included."""
    if curves is None or span[1] <= span[0]:
        return None
    before_s = float(np.nextafter(span[0], -np.inf))
    return sum(curves[name].between(before_s, span[1]) for name in names) / (span[1] - span[0])


def _jain(curves: Curves, active: Interval | None) -> float | None:
    if curves is None or active is None:
        return None
    rates = [_rate(curves, [name], active) for name in curves]
    return jain([rate for rate in rates if rate is not None])


def _active(table: Requests, window: Interval) -> Interval | None:
    """The part of the window in which every client has begun and none has ended. None if there is none."""
    start, end = window
    for mine in table.of.values():
        if not mine.any():
            return None
        start = max(start, float(table.sent[mine].min()))
        if table.run.manifest.programs_per_client is not None:
            end = min(end, float(table.done[mine].max()))
    return (start, end) if start < end else None


def _client(
    table: Requests, name: str, client_side: Curves, actual: Curves, window: Interval
) -> ClientSummary:
    run, mine = table.run, table.of[name]
    assert run.end is not None
    programs = [program for program in run.programs if program.client == name]
    waited, ttfts = latencies(programs, run.end.t_s), table.ttfts(mine)
    return ClientSummary(
        well_behaved=is_well_behaved(run, name),
        programs=len(programs),
        finished=sum(program.outcome == Outcome.OK for program in programs),
        requests=int(mine.sum()),
        service_rate=_rate(client_side, [name], window),
        actual_rate=_rate(actual, [name], window),
        hit_rate=table.hit_rate(mine & (table.first <= window[1])),
        p50=Percentile.of(waited, 50),
        p99=Percentile.of(waited, 99),
        program_mean=_mean(waited),
        ttft_p50=Percentile.of(ttfts, 50),
        ttft_p99=Percentile.of(ttfts, 99),
    )


def _mean(waited: Latencies) -> Percentile | None:
    """A lower bound if any is."""
    if not waited:
        return None
    return Percentile(mean(value_s for value_s, _ in waited), any(cut for _, cut in waited))


def _spread(values: Sequence[float]) -> float | None:
    """Standard deviation over the mean; None of fewer than two."""
    return pstdev(values) / mean(values) if len(values) > 1 and mean(values) else None


def _average(percentiles: Sequence[Percentile | None]) -> Percentile | None:
    known = [percentile for percentile in percentiles if percentile is not None]
    if not known:
        return None
    return Percentile(mean(p.value_s for p in known), any(p.at_least for p in known))


# ---- when clients were backlogged, and how far their services differed meanwhile


def _backlog(run: Run, names: Sequence[str]) -> dict[str, float | None]:
    """Service difference and lag while clients were backlogged."""
    if not run.samples:
        return dict.fromkeys(("service_difference", "service_lag", "backlog_s", "bound"))
    curves, waiting = _from_samples(run, names)
    return {
        "service_difference": service_difference(curves, waiting),
        "service_lag": service_lag(curves, waiting),
        "backlog_s": _together_s(waiting),
        "bound": _sampled_bound(run),
    }


def _together_s(waiting: Mapping[str, Sequence[Interval]]) -> float:
    """For how long at least two clients were backlogged."""
    edges = sorted(
        edge for spans in waiting.values() for start, end in spans for edge in ((start, 1), (end, -1))
    )
    total_s, depth, since_s = 0.0, 0, 0.0
    for time_s, change in edges:
        if depth >= 2:
            total_s += time_s - since_s
        depth, since_s = depth + change, time_s
    return total_s


def _from_samples(
    run: Run, names: Sequence[str]
) -> tuple[Mapping[str, Curve], Mapping[str, Sequence[Interval]]]:
    """Charged service at each complete round of samples, and the times from round to round with backlog."""
    rounds: dict[int, list[Sample]] = defaultdict(list)
    for sample in run.samples:
        rounds[sample.round].append(sample)
    workers = run.manifest.workers or len({sample.worker for sample in run.samples})
    complete = [
        (max(sample.t_s for sample in samples), {sample.worker: sample.clients for sample in samples})
        for _, samples in sorted(rounds.items())
        if len(samples) == workers
    ]
    curves: dict[str, Curve] = {}
    waiting: dict[str, list[Interval]] = {}
    for name in names:
        accounts_at = [
            (time_s, {worker: clients.get(name, {}) for worker, clients in accounts.items()})
            for time_s, accounts in complete
        ]
        totals = [
            sum(account.get("service", 0.0) for account in accounts.values()) for _, accounts in accounts_at
        ]
        curves[name] = Curve(tuple(time_s for time_s, _ in accounts_at), tuple(totals))
        waiting[name] = [
            # The end is included: the round that confirms the backlog is part of it.
            (start_s, math.nextafter(end_s, math.inf))
            for (start_s, before), (end_s, after) in pairwise(accounts_at)
            if all(_waits(before[worker], after[worker]) for worker in before)
        ]
    return curves, waiting


def _waits(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    """Whether a client waited at a replica from one round to the next."""
    waited = before.get("waiting", 0) > 0 and after.get("waiting", 0) > 0
    return waited and "backlog" in before and before["backlog"] == after.get("backlog")


def _sampled_bound(run: Run) -> float | None:
    """The sum of the largest that each replica stated: what it states holds for intervals that end then. None if one
    states nothing."""
    largest: dict[str, float | None] = {}
    for sample in run.samples:
        known = [bound for bound in (largest.get(sample.worker), sample.bound) if bound is not None]
        largest[sample.worker] = max(known, default=None)
    bounds = [bound for bound in largest.values() if bound is not None]
    if not largest or len(bounds) < max(len(largest), run.manifest.workers or 0):
        return None
    return sum(bounds)


# ---- several runs side by side

METRICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "throughput_tokens_per_s": max,
    "service_rate": max,
    "jain": max,
    "well_behaved_p50_s": min,
    "well_behaved_p99_s": min,
    "hit_rate": max,
    "service_difference": min,
}
"""The comparison's measures, each with the function that picks the better value."""

EXTRA = (
    "actual_rate", "jain_actual", "program_mean_s", "program_spread", "ttft_p50_s", "ttft_p99_s", "service_lag",
    "backlog_s", "active_s",
)  # fmt: skip
LINE = ("scheduler", "workload", *METRICS, "bound")
"""What the commands' line of JSON has of each row."""

ComparisonRow: TypeAlias = dict[str, str | float | None]


def rows(summaries: Sequence[Summary]) -> list[ComparisonRow]:
    """One row for each (scheduler, workload), in order of appearance: medians over repeats, and counts.

    A repeat in which a measure is None does not take part in its median.
    """
    groups: dict[tuple[str, str], list[Summary]] = defaultdict(list)
    for summary in summaries:
        groups[summary.scheduler, summary.workload].append(summary)
    return [
        {
            "scheduler": scheduler,
            "workload": workload,
            **{measure: _median(group, measure) for measure in (*METRICS, "bound", *EXTRA)},
            "p50_at_least": float(any(one.p50_at_least for one in group)),
            "p99_at_least": float(any(one.p99_at_least for one in group)),
            "program_mean_at_least": float(any(one.program_mean_at_least for one in group)),
            "failed": float(sum(one.failed for one in group)),
        }
        for (scheduler, workload), group in groups.items()
    ]


def _median(group: Sequence[Summary], measure: str) -> float | None:
    values = [value for summary in group if (value := getattr(summary, measure)) is not None]
    return median(values) if values else None


def ratios(table: Sequence[ComparisonRow], scheduler: str) -> dict[str, dict[str, float | None]]:
    """By workload and measure: `scheduler`'s value over the others' best.

    None where one is missing, or where `scheduler`'s own is only a lower bound. Where a rival's latency is
    a lower bound, the ratio is an upper one.
    """
    found: dict[str, dict[str, float | None]] = {}
    for row in (one for one in table if one["scheduler"] == scheduler):
        rivals = [one for one in table if one["workload"] == row["workload"] and one is not row]
        mine = found[str(row["workload"])] = dict[str, float | None]()
        for measure, better in METRICS.items():
            others = [value for rival in rivals if isinstance(value := rival[measure], float | int)]
            best, own = better(others) if others else None, row[measure]
            is_open = row.get(measure.removeprefix("well_behaved_").removesuffix("_s") + "_at_least")
            known = isinstance(own, float | int) and best and not is_open
            mine[measure] = float(own) / best if known and best and own is not None else None
    return found
