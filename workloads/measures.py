"""From the records of one run to its numbers: throughput, fairness, latency.

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
- The *service difference* is the largest between two clients over times when both are backlogged; see
  `backlog` for how that is decided from records.

What was not measured is None.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

from sglang_fair.core.fairness import Curve, Interval, jain
from workloads.backlog import Backlog
from workloads.programs import Outcome
from workloads.records import ProgramRecord, RequestRecord, Run


@dataclass(frozen=True, slots=True)
class Percentile:
    """`value_s`, or more than that if `at_least`."""

    value_s: float
    at_least: bool = False

    @classmethod
    def of(cls, latencies: Sequence[tuple[float, bool]], percent: float) -> "Percentile | None":
        """Nearest rank among pairs of seconds and whether it was cut off there. None if there is no pair."""
        if not latencies:
            return None
        ordered = sorted(latencies)
        rank = max(1, math.ceil(len(ordered) * percent / 100))
        return cls(ordered[rank - 1][0], any(cut for _, cut in ordered[:rank]))


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
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    hit_rate: float | None
    service_difference: float | None
    service_lag: float | None
    backlog_s: float | None
    """How long at least two clients were backlogged together. None if that cannot be seen."""
    bound: float | None
    measured_by: str | None
    """Where backlog and difference come from: `replicas` (samples) or `records`."""
    ok: int
    failed: int
    cancelled: int
    clients: Mapping[str, ClientSummary] = field(default_factory=dict)


def summarize(run: Run) -> Summary:
    """All measures of one run. Raises ValueError for a run that was cut off: its window is unknown."""
    manifest = run.manifest
    if run.end is None:
        raise ValueError(f"the run of {manifest.scheduler} on {manifest.workload} was cut off: it has no end")
    names = sorted(manifest.clients) or sorted({record.client for record in run.requests})
    window: Interval = (0.0, min(manifest.duration_s, run.end.t_s))
    meters = Meters.of(run, names)
    active = _active(run, names, window)
    backlog = Backlog.of(run, names, meters.actual)
    clients = {name: _client(run, name, meters, window) for name in names}
    good = [client for client in clients.values() if client.well_behaved]
    p50, p99 = _average([client.p50 for client in good]), _average([client.p99 for client in good])
    ttft50 = _average([client.ttft_p50 for client in good])
    ttft99 = _average([client.ttft_p99 for client in good])
    outcomes = [record.outcome for record in run.requests]
    return Summary(
        scheduler=manifest.scheduler,
        workload=manifest.workload,
        repeat=manifest.repeat,
        window_s=window[1],
        throughput_tokens_per_s=_rate(meters.tokens, names, window),
        service_rate=_rate(meters.client_side, names, window),
        actual_rate=_rate(meters.actual, names, window),
        jain=_jain(meters.client_side, names, active),
        jain_actual=_jain(meters.actual, names, active),
        active_s=None if active is None else active[1] - active[0],
        well_behaved_p50_s=None if p50 is None else p50.value_s,
        well_behaved_p99_s=None if p99 is None else p99.value_s,
        p50_at_least=p50 is not None and p50.at_least,
        p99_at_least=p99 is not None and p99.at_least,
        ttft_p50_s=None if ttft50 is None else ttft50.value_s,
        ttft_p99_s=None if ttft99 is None else ttft99.value_s,
        hit_rate=_hit_rate(run.requests, window),
        service_difference=backlog.difference,
        service_lag=backlog.lag,
        backlog_s=backlog.together_s,
        bound=backlog.bound if backlog.bound is not None else manifest.bound,
        measured_by=backlog.measured_by,
        ok=outcomes.count(Outcome.OK),
        failed=outcomes.count(Outcome.FAILED),
        cancelled=outcomes.count(Outcome.CANCELLED),
        clients=clients,
    )


# ---- service over time


@dataclass(frozen=True, slots=True)
class Meters:
    """Each client's service over time, in three units. None for a unit that some request lacks the counts for."""

    tokens: Mapping[str, Curve] | None
    client_side: Mapping[str, Curve] | None
    actual: Mapping[str, Curve] | None

    @classmethod
    def of(cls, run: Run, names: Sequence[str]) -> "Meters":
        extend, output = run.manifest.extend_weight, run.manifest.output_weight
        return cls(
            tokens=_curves(run, names, lambda record: record.prompt_tokens, 1.0, 1.0),
            client_side=_curves(run, names, lambda record: record.prompt_tokens, extend, output),
            actual=_curves(run, names, lambda record: record.extend_tokens, extend, output),
        )


def _curves(
    run: Run,
    names: Sequence[str],
    input_tokens: Callable[[RequestRecord], int | None],
    input_weight: float,
    output_weight: float,
) -> Mapping[str, Curve] | None:
    events: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for record in run.requests:
        if record.t_first_token_s is None:
            continue
        tokens = input_tokens(record)
        if tokens is None:
            return None
        received = events[record.client]
        received.append((record.t_first_token_s, input_weight * tokens))
        before = 0
        for time_s, count in record.token_times:
            received.append((time_s, output_weight * (count - before)))
            before = count
    return {name: Curve.of(received) for name, received in events.items()}


def _rate(curves: Mapping[str, Curve] | None, names: Sequence[str], span: Interval) -> float | None:
    """Units a second of `names` together, the start of `span` included."""
    if curves is None or span[1] <= span[0]:
        return None
    before_s = math.nextafter(span[0], -math.inf)
    return sum(curves[name].between(before_s, span[1]) for name in names) / (span[1] - span[0])


def _jain(curves: Mapping[str, Curve] | None, names: Sequence[str], active: Interval | None) -> float | None:
    if curves is None or active is None:
        return None
    rates = [_rate(curves, [name], active) for name in names]
    return jain([rate for rate in rates if rate is not None])


def _active(run: Run, names: Sequence[str], window: Interval) -> Interval | None:
    """The part of the window in which every client has begun and none has ended. None if there is none."""
    start, end = window
    for name in names:
        requests = [record for record in run.requests if record.client == name]
        if not requests:
            return None
        start = max(start, min(record.t_intended_s for record in requests))
        if run.manifest.programs_per_client is not None:
            end = min(end, max(record.t_done_s for record in requests))
    return (start, end) if start < end else None


# ---- latency and the rest


def _client(run: Run, name: str, meters: Meters, window: Interval) -> ClientSummary:
    assert run.end is not None
    end_s = run.end.t_s
    programs = [program for program in run.programs if program.client == name]
    requests = [record for record in run.requests if record.client == name]
    latencies, ttfts = program_latencies(programs, end_s), times_to_first_token(requests)
    facts = run.manifest.clients.get(name, {})
    return ClientSummary(
        well_behaved=bool(facts.get("well_behaved", True)),
        programs=len(programs),
        finished=sum(program.outcome == Outcome.OK for program in programs),
        requests=len(requests),
        service_rate=_rate(meters.client_side, [name], window),
        actual_rate=_rate(meters.actual, [name], window),
        hit_rate=_hit_rate(requests, window),
        p50=Percentile.of(latencies, 50),
        p99=Percentile.of(latencies, 99),
        ttft_p50=Percentile.of(ttfts, 50),
        ttft_p99=Percentile.of(ttfts, 99),
    )


def program_latencies(programs: Iterable[ProgramRecord], end_s: float) -> list[tuple[float, bool]]:
    """Seconds from arrival to last answer, and whether the run's end cut the program off: it then counts with the time
    it had taken. Failed programs have no latency."""
    return [
        ((end_s if one.t_done_s is None else one.t_done_s) - one.t_intended_s, one.t_done_s is None)
        for one in programs
        if one.outcome != Outcome.FAILED
    ]


def times_to_first_token(requests: Iterable[RequestRecord]) -> list[tuple[float, bool]]:
    """The same from when a request could have been sent to its first token."""
    return [
        (
            (one.t_done_s if one.t_first_token_s is None else one.t_first_token_s) - one.t_intended_s,
            one.t_first_token_s is None,
        )
        for one in requests
        if one.outcome != Outcome.FAILED
    ]


def hit_rate(answered: Sequence[RequestRecord]) -> float | None:
    """Cached share of these requests' prompts. None if a record lacks a count."""
    cached = [record.cached_tokens for record in answered if record.cached_tokens is not None]
    prompts = [record.prompt_tokens for record in answered if record.prompt_tokens is not None]
    if len(cached) < len(answered) or len(prompts) < len(answered) or not sum(prompts):
        return None
    return sum(cached) / sum(prompts)


def _average(percentiles: Sequence[Percentile | None]) -> Percentile | None:
    known = [percentile for percentile in percentiles if percentile is not None]
    if not known:
        return None
    return Percentile(mean(p.value_s for p in known), any(p.at_least for p in known))


def _hit_rate(requests: Sequence[RequestRecord], window: Interval) -> float | None:
    """Of the prompts that were answered inside the window."""
    return hit_rate([r for r in requests if r.t_first_token_s is not None and r.t_first_token_s <= window[1]])
