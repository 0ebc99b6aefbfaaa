"""A production mix on eight A100: hundreds of clients as ServeGen has them, prefixes as Mooncake has them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from workloads.clients import Client
from workloads.driver import Plan
from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments.contract import (
    Cell,
    Claim,
    Figure,
    Json,
    Report,
    Result,
    Simulated,
    Size,
    Table,
    Traffic,
    verdict,
)
from workloads.experiments.dlpm_fig7_setting import MAX_RUNNING, SCHEDULERS, observe
from workloads.programs import PackedCodec
from workloads.records import Run
from workloads.simulation import Site
from workloads.traces.mooncake import mooncake
from workloads.traces.production import production
from workloads.traces.profiles import mix
from workloads.traces.servegen import servegen

CAPACITY_PER_S = 0.75
"""Requests a second that one A100 completes of this mix, in overload and under D2LPM."""
LOAD = 1.3
QUANTUM = 12_000.0
"""One request's prompt and answer, units."""
WORKER_QUANTUM = 4 * QUANTUM
DRAIN_S = 120.0

SMALL_QUANTUM = 1_000.0
LARGE_WORKER_QUANTUM = 1_000_000.0
THRESHOLD = {"cache_threshold": 0.3}


@dataclass(frozen=True, slots=True)
class Beside:
    """A scheduler that tells where a difference comes from."""

    label: str
    placement: str
    policy: str = "dlpm"
    quantum: float = QUANTUM
    worker_quantum: float = WORKER_QUANTUM
    options: Mapping[str, float] = field(default_factory=dict)
    """Of the placement."""
    policy_options: str = ""


BESIDE = {
    "d2lpm.printed": Beside("D2LPM, new clients as printed", "d2lpm", policy_options="newcomers=0"),
    "d2lpm.small": Beside("D2LPM, Q^u = 1,000", "d2lpm", quantum=SMALL_QUANTUM),
    "d2lpm.vtc": Beside("D2LPM over VTC", "d2lpm", "vtc"),
    "d2lpm.threshold": Beside("D2LPM, matches above 0.3", "d2lpm", options=THRESHOLD),
    "d2lpm.large": Beside("D2LPM, Q^w = 1,000,000", "d2lpm", worker_quantum=LARGE_WORKER_QUANTUM),
    "d2lpm.large.threshold": Beside(
        "D2LPM, Q^w = 1,000,000, matches above 0.3",
        "d2lpm",
        worker_quantum=LARGE_WORKER_QUANTUM,
        options=THRESHOLD,
    ),
    "d2lpm-time.small": Beside("d2lpm-time, Q^u = 1,000", "d2lpm-time", quantum=SMALL_QUANTUM),
    "cache-aware.dlpm": Beside("cache_aware over DLPM, Q^u = 1,000", "cache_aware", quantum=SMALL_QUANTUM),
}


def traffic(replicas: int, duration_s: float, clients: int) -> Traffic:
    """`LOAD` times what so many replicas complete."""
    rate = float(f"{LOAD * CAPACITY_PER_S * replicas:.4g}")
    return Traffic("production", {"rate_per_s": rate, "duration_s": duration_s, "clients": clients})


def clients(told: Traffic, seed: str) -> list[Client]:
    """The mix, with stand-ins for the traces' files so that it is the same everywhere. Well-behaved is who asks
    for less than an equal share of what the cluster does."""
    arguments = told.arguments
    senders = mix(
        servegen(),
        clients=arguments["clients"],
        rate_per_s=arguments["rate_per_s"],
        duration_s=arguments["duration_s"],
        seed=seed,
    )
    trace = production(senders, mooncake(seed=seed), seed=seed)
    asked: Counter[str] = Counter()
    for request in trace.requests:
        asked[request.client] += request.input_tokens + 2 * request.output_tokens
    share = asked.total() / len(asked) / LOAD
    return [
        replace(client, well_behaved=asked[client.name] <= share)
        for client in trace.clients(PackedCodec(), seed=seed)
    ]


def plan(duration_s: float) -> Plan:
    """Requests arrive for that long; then the well-behaved clients' are waited for."""
    return replace(dlpm.plan(duration_s), drain_s=DRAIN_S, drain_for="well-behaved")


def observe_mix(run: Run) -> dict[str, Json]:
    """As for Figure 7, without what is kept of each client; and of how many clients that is."""
    found = observe(run)
    good = [client for client in run.manifest.clients.values() if client["well_behaved"]]
    del found["clients"]
    return found | {"good_clients": len(good), "all_clients": len(run.manifest.clients)}


class Production(Simulated):
    id = "beyond-production"
    title = "A production mix: hundreds of clients, most of them small"
    version = 2
    source = "beyond the papers; ServeGen's clients with Mooncake's prefixes"
    about = (
        "Llama-3.1-8B on eight A100. Clients, their rates and their bursts follow ServeGen's profiles, with Zipf's "
        f"shares; prompts and what they share follow Mooncake's conversations (stand-ins made from a seed, so that it "
        f"is the same everywhere). They ask for {LOAD:g} times what the cluster does under D2LPM. Well-behaved is a "
        "client that asks for less than an equal share of it."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        replicas, length_s, count = (8, 180.0, 400) if full else (2, 60.0, 60)
        runs = {
            name: Beside(scheduler.label, scheduler.placement, scheduler.policy)
            for name, scheduler in SCHEDULERS.items()
        }
        return [
            Cell(
                name,
                Site(
                    replicas=replicas,
                    placement=run.placement,
                    placement_options=run.options,
                    policy=run.policy,
                    policy_options=run.policy_options,
                    quantum=run.quantum,
                    worker_quantum=run.worker_quantum,
                    max_running=MAX_RUNNING,
                ),
                traffic(replicas, length_s, count),
                plan(length_s),
                ("0", "1", "2") if full else ("0",),
            )
            for name, run in (runs | BESIDE).items()
        ]

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        return clients(cell.traffic, seed)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return observe_mix(run)

    def report(self, results: Mapping[str, Result]) -> Report:
        fair = results["d2lpm"]
        labels = {name: scheduler.label for name, scheduler in SCHEDULERS.items()}
        shown = labels | {name: beside.label for name, beside in BESIDE.items()}
        unfair = [name for name in SCHEDULERS if name not in ("d2lpm", "vtc")]
        first, last = (
            {name: result.number(f"ttft_p{percent}_s") for name, result in results.items()}
            for percent in (50, 99)
        )
        best_first, best_last = (min(found[name] for name in unfair) for found in (first, last))
        speed = {name: result.number("tokens_per_s") for name, result in results.items()}
        best = max(speed[name] for name in unfair)
        return Report(
            claims=[
                Claim(
                    "Small clients' first tokens come sooner under D2LPM than under any scheduler that is not fair",
                    "our own question",
                    f"P50 {first['d2lpm']:.1f} s against {best_first:.1f} s at best, "
                    f"P99 {last['d2lpm']:.1f} s against {best_last:.1f} s",
                    verdict(
                        first["d2lpm"] <= best_first and last["d2lpm"] <= best_last,
                        partly=first["d2lpm"] <= best_first or last["d2lpm"] <= best_last,
                    ),
                    f"With VTC behind the same placement P50 is {first['d2lpm.vtc']:.1f} s. More hits finish "
                    "everybody's work sooner: cache_aware over DLPM with Q^u = 1,000 has "
                    f"{first['cache-aware.dlpm']:.1f} s.",
                ),
                Claim(
                    "A quantum for new clients shortens their wait: with DLPM as printed they wait until all others "
                    "have used up theirs",
                    "our own question",
                    f"P50 {first['d2lpm.printed']:.1f} s as printed, {first['d2lpm']:.1f} s with it; throughput "
                    f"{speed['d2lpm'] / speed['d2lpm.printed']:.2f}×",
                    verdict(
                        first["d2lpm"] <= 0.8 * first["d2lpm.printed"]
                        and speed["d2lpm"] >= 0.95 * speed["d2lpm.printed"],
                        partly=first["d2lpm"] < first["d2lpm.printed"],
                    ),
                    "New clients' cold prompts go before others' cached ones.",
                ),
                Claim(
                    "D2LPM has at least the throughput of VTC, and nearly that of schedulers that are not fair",
                    "our own question",
                    f"{speed['d2lpm'] / speed['vtc']:.2f}× VTC, {speed['d2lpm'] / best:.2f}× the best",
                    verdict(
                        speed["d2lpm"] >= 0.95 * best and speed["d2lpm"] >= speed["vtc"],
                        partly=speed["d2lpm"] >= 0.98 * speed["vtc"],
                    ),
                    "The difference is the placement's: cache_aware over DLPM has "
                    f"{speed['cache-aware.dlpm'] / best:.2f}×. All conversations begin with one system prompt, so for "
                    "a new one D2LPM's longest match says nothing, and a client without credit leaves its replica in "
                    f"the midst of a conversation. Without the first D2LPM has {speed['d2lpm.threshold'] / best:.2f}×, "
                    f"without both {speed['d2lpm.large.threshold'] / best:.2f}×.",
                ),
                Claim(
                    "Where all prompts begin alike, a large Q^w makes D2LPM crowd a replica, unless short matches are "
                    "left alone",
                    "our own question",
                    f"Q^w = {LARGE_WORKER_QUANTUM:,.0f}: {speed['d2lpm.large']:,.0f} tokens/s, following matches above "
                    f"0.3 of a prompt alone {speed['d2lpm.large.threshold']:,.0f}; Q^w = {WORKER_QUANTUM:,.0f}: "
                    f"{speed['d2lpm']:,.0f} and {speed['d2lpm.threshold']:,.0f}",
                    verdict(
                        speed["d2lpm.large"] <= 0.8 * speed["d2lpm"]
                        and speed["d2lpm.large.threshold"] >= speed["d2lpm"],
                        partly=speed["d2lpm.large"] < speed["d2lpm.large.threshold"],
                    ),
                    "Few requests match more than the common system prompt, or many of them do.",
                ),
                *_differences(
                    {name: results[name].median("difference") for name in ("d2lpm", "vtc", "rr")}, labels
                ),
            ],
            tables=[
                Table(
                    f"Medians over seeds; {fair.number('good_clients'):.0f} of {fair.number('all_clients'):.0f} "
                    "clients are small",
                    (
                        "scheduler",
                        "tokens/s",
                        "hit rate",
                        "small clients' TTFT P50, s",
                        "P99, s",
                        "difference, units",
                    ),
                    [
                        (
                            shown[name],
                            result.shown("tokens_per_s"),
                            result.shown("hit_rate"),
                            result.shown("ttft_p50_s"),
                            result.shown("ttft_p99_s"),
                            result.shown("difference"),
                        )
                        for name, result in results.items()
                    ],
                )
            ],
            figures=[
                Figure(
                    "latency",
                    "Time to first token of small clients, and throughput.",
                    lambda canvas: dlpm.draw_bars(
                        canvas,
                        {
                            ("TTFT of small clients, s", ("P50", "P99")): {
                                labels[name]: (first[name], last[name]) for name in labels
                            },
                            ("tokens/s", ("throughput",)): {labels[name]: (speed[name],) for name in labels},
                        },
                    ),
                    (8.0, 3.4),
                )
            ],
        )


def _differences(gaps: Mapping[str, float | None], labels: Mapping[str, str]) -> list[Claim]:
    """What is claimed of backlogged clients; nothing where two were never backlogged at one time."""
    known = {name: gap for name, gap in gaps.items() if gap is not None}
    if len(known) < len(gaps):
        return []
    return [
        Claim(
            "Backlogged clients' service differs less under D2LPM than under VTC or RR+LPM",
            "our own question",
            ", ".join(f"{labels[name]} {gap:,.0f}" for name, gap in known.items()) + " units",
            verdict(
                known["d2lpm"] <= min(known["vtc"], known["rr"]),
                partly=known["d2lpm"] <= max(known["vtc"], known["rr"]),
            ),
            "Hundreds of clients are seldom backlogged everywhere at once.",
        )
    ]
