"""A batch under the interactive load of a day: what of the spare capacity it uses, and what that costs the others."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import exp
from pathlib import Path

import numpy as np

from sglang_fair.core.options import shipped
from workloads.experiments.claims import Part, Table, at_least, at_most
from workloads.experiments.contract import (
    CURVES,
    SEEDS,
    Cell,
    Experiment,
    Json,
    Measured,
    Result,
    Row,
    TrafficSpec,
    medians,
)
from workloads.experiments.senders import CODEC, filler_tokens
from workloads.plots import Figure, Panel
from workloads.programs.prose import seeded
from workloads.records import Records, RequestRecord
from workloads.session import Plan
from workloads.simulation import Site, describe
from workloads.simulation.feeding import BATCH, Answered, Fed, Feed, Line
from workloads.traces import Trace, day, servegen

PROFILES = Path(__file__).parents[3] / "shared" / "data" / "servegen_m-mid"
DAY = 1
"""Of the profiles' fourteen, from 0: the first one on which four clients send, and the load falls by half."""
HOURS = 24
LASTING = 4
"""Times the lines are not over before the day, however fast they go."""
RATE_PER_S = 6.0
LINES, QUICK_LINES = 50_000, 4_000
INSTRUCTIONS, PROMPT_TOKENS, OUTPUT_TOKENS = 256, 512, 128
"""Of a line: what all have in common, the median of its own, and the mean of its answer."""
LONGEST_PROMPT, LONGEST_OUTPUT = 8_000, 1_000
OFF_PEAK = 6
"""Hours."""
BINS = 48
WITHIN = 1.05
FILLED = 0.9

TOKEN_MS = 12.0
OTHER_MS = (13.0, 16.0)
LIGHT = 0.1
STALL_MS = 30.0

PLAIN: Mapping[str, Json] = {
    "placement": "d2lpm",
    "policy": "dlpm",
    "target_tpot_ms": None,
    "ignore_eos": False,
}
ALTERNATING: Mapping[str, Json] = {"mixed_chunk": False}
SHORT: Mapping[str, Json] = {"stall_ms": STALL_MS}
STOCK: Mapping[str, Json] = {
    "policy": "fcfs",
    "placement": "cache_aware",
    "stall_ms": 0.0,
    "target_tpot_ms": 0.0,
}


class Lines(Sequence[Line]):
    """Each is made when it is asked for."""

    def __init__(self, many: int, seed: str) -> None:
        self._many, self._seed = many, seed

    def __len__(self) -> int:
        return self._many

    def __getitem__(self, place: int) -> Line:  # type: ignore[override]
        rng = seeded(self._seed, "line", place)
        tokens = min(max(16, round(PROMPT_TOKENS * exp(rng.gauss(0.0, 0.6)))), LONGEST_PROMPT)
        own = filler_tokens(f"{self._seed}/line/{place}", tokens)
        answer = min(1 + int(rng.expovariate(1 / OUTPUT_TOKENS)), LONGEST_OUTPUT)
        return Line(filler_tokens("instructions", INSTRUCTIONS) + own, answer)


class Batches(Experiment):
    id = "beyond-batches"
    title = "A batch under a day of interactive load"
    source = "beyond the papers; what operators ask of batches"
    about = f"""One A100 with Llama-3.1-8B. Interactive are four clients of production on one day (ServeGen, `m-mid`),
        at {RATE_PER_S:.0f} requests/s in the mean: as bursty as they were, each in its part of the load and at its
        times. A batch of {LINES:,} lines, {INSTRUCTIONS} tokens of instructions and {PROMPT_TOKENS} of its own in
        the median, {OUTPUT_TOKENS} of answer, is sent by the feeder's own code. The day lasts four hours, for
        a sixth of the computing: gaps between requests, which are what a queue feels, are those of that rate all the
        same. Where the feeder has no bound, and for the other rules, the batch is {LASTING} times as long, so that it
        lasts the day too. Strict priority without preemption is a weight of a millionth where prompts go first: no
        line is admitted while an interactive request waits, and none that runs is taken back. Idle is the time in
        which the engine has nothing to do, without the batch; spare capacity is what the batch gets where nothing
        holds it back."""

    lengths_s = (4 * 3600.0, 600.0)
    seeds = ("0",)

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        def row(
            name: str,
            label: str,
            fields: Mapping[str, Json],
            times: int = 1,
            lines: int | None = None,
            seeds: tuple[str, ...] | None = None,
            **feed: Json,
        ) -> Row:
            most = LINES if full else QUICK_LINES
            sent = {"lines": times * most if lines is None else lines, **feed}
            own = {**PLAIN, **fields}
            site = Site(**own, policy_options=shipped(own["policy"], ""))
            return Row(name, site, TrafficSpec("day", sent), label, seeds=seeds)

        several = SEEDS if full else None
        light = {"client_weights": {BATCH: LIGHT}}
        strict = {"client_weights": {BATCH: 1e-6}, "stall_ms": 0.0, "target_tpot_ms": 0.0}
        yield row("alone", "alone", {}, lines=0, seeds=several)
        yield row("alone.short", "alone, short steps", SHORT, lines=0, seeds=several)
        yield row("paced.short", "paced, short steps", SHORT, token_ms=TOKEN_MS, seeds=several)
        yield row("unbounded", "no bound", {}, times=LASTING)
        for token_ms in OTHER_MS:
            label = f"paced to {token_ms:g} ms, short steps"
            yield row(f"paced.short.{token_ms:g}", label, SHORT, times=2, token_ms=token_ms)
        lighter = f"paced, short steps, weight {LIGHT:g}"
        yield row("paced.short.light", lighter, {**SHORT, **light}, token_ms=TOKEN_MS)
        yield row("paced", "paced", {}, token_ms=TOKEN_MS)
        yield row("off-peak", f"no bound, the {OFF_PEAK} quietest hours", {}, hours=OFF_PEAK)
        yield row("alone.alternating", "alone, steps not mixed", ALTERNATING, lines=0)
        yield row("paced.alternating", "paced, steps not mixed", ALTERNATING, token_ms=TOKEN_MS)
        yield row("unbounded.alternating", "no bound, steps not mixed", ALTERNATING, times=LASTING)
        yield row("strict", "weight of a millionth, prompts first", strict, times=LASTING)
        yield row("stock", "FCFS, prompts first", STOCK, times=LASTING)

    def plan(self, length_s: float) -> Plan:
        return Plan(length_s, connections_per_client=1_000_000, sample_s=length_s, token_step_s=5.0)

    def run(self, cell: Cell, seed: str) -> Measured:
        sent, length_s = cell.traffic.arguments, cell.plan.duration_s
        trace = _day(length_s, seed)
        clients = trace.clients(CODEC, seed=seed)
        feed = None
        if sent["lines"]:
            token_ms = sent.get("token_ms")
            from_s, until_s = _quiet(trace, sent["hours"]) if "hours" in sent else (0.0, length_s)
            feed = Feed(
                Lines(sent["lines"], seed),
                token_s=None if token_ms is None else token_ms / 1000,
                from_s=from_s,
                until_s=until_s,
            )
        manifest = describe(cell.site, clients, cell.plan, seed=seed, workload=cell.traffic.name)
        with Records(None, manifest) as records:
            fed = Fed(cell.site, clients, cell.plan, records, seed=seed, feed=feed)
            fed.run()
        answered = fed.feeding.answered if fed.feeding else []
        busy_s = sum(replica.meters.busy_s for replica in fed.replicas)
        values = _measure(records.run.requests, answered, length_s)
        return Measured({**values, "busy": min(1.0, busy_s / length_s)}, fed.cluster.now_s)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        alone, ours, free = at["alone"], at["paced.short"], at["unbounded"]
        over = {name: _over(one, alone) for name, one in at.items()}
        idle = {name: _idle_filled(one, alone) for name, one in at.items()}
        spare = {name: one["lines"] / free["lines"] if one["lines"] else None for name, one in at.items()}
        (ttft, tpot), same, most = over["paced.short"], _over(ours, at["alone.short"]), over["unbounded"]
        filled, used = idle["paced.short"] or 0.0, spare["paced.short"] or 0.0
        median = free["tpot_p50_ms"] / alone["tpot_p50_ms"]
        yield at_most(max(ttft, tpot), WITHIN, 1.1).claim(f"""With a batch, short steps
            (`--stall-ms {STALL_MS:g}`) and `--batch-token-ms {TOKEN_MS:g}` interactive
            requests have the P99 that they have with the defaults and no batch, within 5 % | | TTFT {ttft:.2f}×,
            TPOT {tpot:.2f}× | Prompts of lines are computed in steps in which interactive ones wait.""")
        yield at_most(
            max(same), WITHIN, 1.1
        ).claim(f"""And that which they have with the same steps and no batch | |
            TTFT {same[0]:.2f}×, TPOT {same[1]:.2f}× | A burst of prompts finds a prompt of a line begun, which has a
            part of each step until it is computed: only the replica could put it off. Feeders learn of a burst when
            lines that ran through it are answered.""")
        yield at_least(
            filled, FILLED, 0.5
        ).claim(f"""At least 90 % of the idle time is filled | | {filled:.0%} of
            {1 - alone["busy"]:.1%} of the day | The feeder waits for answers before it sends more.""")
        yield at_least(
            used, FILLED, 0.5
        ).claim(f"""At least 90 % of the spare capacity is used | | {used:.0%} |
            An engine that decodes a few requests is busy and could decode many. More lines in flight make each of
            its steps longer, and with them TTFT and TPOT.""")
        yield at_most(
            max(most), WITHIN, 1.5
        ).claim(f"""Without a bound nobody notices the batch either | | TTFT P99
            {most[0]:.2f}×, TPOT P99 {most[1]:.2f}×, its median {median:.2f}× | A batch's client has its share of the
            engine as any other has, and interactive requests get their tokens in the same steps.""")
        yield _table(at, over, idle, spare)
        yield _figure(at)
        yield {"ttft_p99": ttft, "tpot_p99": tpot, "ttft_p99_same": same[0], "tpot_p99_same": same[1]}
        yield {"idle_filled": filled, "spare_used": used}


def _over(one: Result, alone: Result) -> tuple[float, float]:
    """TTFT and TPOT, their P99."""
    return one["ttft_p99_s"] / alone["ttft_p99_s"], one["tpot_p99_ms"] / alone["tpot_p99_ms"]


def _day(length_s: float, seed: str) -> Trace:
    """A day at the mean rate, in so many seconds. ValueError where the profiles are not there."""
    if not PROFILES.exists():
        raise ValueError(
            f"ServeGen's profiles (https://github.com/alibaba/ServeGen, m-mid) are not at {PROFILES}"
        )
    profiles = servegen(PROFILES)
    return day(profiles, DAY, rate_per_s=RATE_PER_S * length_s / 86_400.0, seed=seed).at_rate(RATE_PER_S)


def _quiet(trace: Trace, hours: int) -> tuple[float, float]:
    """From when to when in which so many hours of the day the least tokens are asked for."""
    hour_s = trace.duration_s / HOURS
    tokens = [0] * HOURS
    for one in trace.requests:
        tokens[int(one.arrival_s / hour_s)] += one.output_tokens
    first = min(range(HOURS - hours + 1), key=lambda hour: sum(tokens[hour : hour + hours]))
    return first * hour_s, (first + hours) * hour_s


def _measure(
    requests: Sequence[RequestRecord], answered: Sequence[Answered], length_s: float
) -> dict[str, Json]:
    served = [one for one in requests if one.outcome == "ok" and one.token_times]
    came_s = np.array([one.t_intended_s for one in served])
    ttft_s = np.array([one.token_times[0][0] - one.t_intended_s for one in served])
    tpot_ms = np.array([_tpot_ms(one) for one in served])
    edges = np.linspace(0.0, length_s, BINS + 1)
    which = np.digitize(came_s, edges) - 1
    interactive = np.histogram(came_s, edges, weights=[one.output_tokens for one in served])[0]
    done_s = [one.t_s for one in answered]
    batch = np.histogram(done_s, edges, weights=[one.output_tokens for one in answered])[0]
    last_s = min(length_s, max(done_s, default=0.0))
    found: dict[str, Json] = {
        "requests": len(requests),
        "failed": sum(one.outcome == "failed" for one in requests),
        "lines": len(answered),
        "lines_per_s": len(answered) / last_s if answered else 0.0,
        "lines_tokens": sum(one.prompt_tokens + 2 * one.output_tokens for one in answered) / length_s,
    }
    for name, values in (("ttft_{}_s", ttft_s), ("tpot_{}_ms", tpot_ms)):
        for part in (50, 99):
            found[name.format(f"p{part}")] = _percentile(values, part)
    found[CURVES] = {
        "hours": list((edges[:-1] + edges[1:]) / 2 * HOURS / length_s),
        "ttft_p99_s": [_percentile(ttft_s[which == place], 99) for place in range(BINS)],
        "tpot_p99_ms": [_percentile(tpot_ms[which == place], 99) for place in range(BINS)],
        "interactive": list(interactive * BINS / length_s),
        "batch": list(batch * BINS / length_s),
    }
    return found


def _tpot_ms(one: RequestRecord) -> float:
    """NaN for an answer of one token."""
    (first_s, _), (last_s, tokens) = one.token_times[0], one.token_times[-1]
    return 1000 * (last_s - first_s) / (tokens - 1) if tokens > 1 else float("nan")


def _percentile(values: "np.ndarray", part: int) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.percentile(known, part)) if len(known) else None


def _idle_filled(one: Result, alone: Result) -> float | None:
    """Of the time in which the engine had nothing to do."""
    idle = 1 - alone["busy"]
    return (one["busy"] - alone["busy"]) / idle if one["lines"] and idle > 0 else None


def _table(
    at: Mapping[str, Result],
    over: Mapping[str, tuple[float, float]],
    idle: Mapping[str, float | None],
    spare: Mapping[str, float | None],
) -> Table:
    columns = """with | TTFT P50 s = ttft_p50_s | P99 s = ttft_p99_s | over alone = ttft | TPOT P50 ms = tpot_p50_ms |
        P99 ms = tpot_p99_ms | over alone = tpot | lines = lines | idle time filled = idle |
        of spare capacity = spare"""
    ttft, tpot = ({name: two[place] for name, two in over.items()} for place in (0, 1))
    return medians("The day", columns, at.values(), ttft=ttft, tpot=tpot, idle=idle, spare=spare)


def _figure(at: Mapping[str, Result]) -> Figure:
    shown = {"alone": "alone", "paced.short": "with batch, paced", "unbounded": "with batch, no bound"}

    def lines(what: str) -> dict[str, tuple[Sequence[float], Sequence[float | None]]]:
        curves = {label: at[name].first[CURVES] for name, label in shown.items()}
        return {label: (found["hours"], found[what]) for label, found in curves.items()}

    paced, bare = (at[name].first[CURVES] for name in ("paced.short", "unbounded"))
    tokens = {
        "interactive": (paced["hours"], paced["interactive"]),
        "batch, paced": (paced["hours"], paced["batch"]),
        "batch, no bound": (bare["hours"], bare["batch"]),
    }
    panels = [
        Panel("TTFT P99, s", lines("ttft_p99_s"), x="hour of the day"),
        Panel("TPOT P99, ms", lines("tpot_p99_ms"), x="hour of the day"),
        Panel("output tokens/s", tokens, x="hour of the day"),
    ]
    caption = "Interactive requests by when they came, and output tokens of both, in half hours of the day."
    return Figure("day", caption, [[one] for one in panels])
