"""A production mix on eight A100: hundreds of clients after ServeGen's profiles, prefixes after Mooncake's trace."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from workloads.clients import Client
from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Simulated, Size, TrafficSpec
from workloads.experiments.dlpm_setting import MAX_RUNNING, SCHEDULERS, observe
from workloads.experiments.plots import Panel, drawing
from workloads.programs import PackedCodec
from workloads.records import Run
from workloads.session import Plan
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
"""D2LPM follows a match only if it is longer than this part of the prompt."""


@dataclass(frozen=True, slots=True)
class MixScheduler:
    """A scheduler of the mix: one that is compared, or one that shows where a difference comes from."""

    label: str
    placement: str
    policy: str = "dlpm"
    quantum: float = QUANTUM
    worker_quantum: float = WORKER_QUANTUM
    options: Mapping[str, float] = field(default_factory=dict)
    """Options of the placement."""
    policy_options: str = ""


BESIDE = {
    "d2lpm.printed": MixScheduler("D2LPM, new clients as printed", "d2lpm", policy_options="newcomers=0"),
    "d2lpm.small": MixScheduler("D2LPM, Q^u = 1,000", "d2lpm", quantum=SMALL_QUANTUM),
    "d2lpm.vtc": MixScheduler("D2LPM over VTC", "d2lpm", "vtc"),
    "d2lpm.threshold": MixScheduler("D2LPM, matches above 0.3", "d2lpm", options=THRESHOLD),
    "d2lpm.large": MixScheduler("D2LPM, Q^w = 1,000,000", "d2lpm", worker_quantum=LARGE_WORKER_QUANTUM),
    "d2lpm.large.threshold": MixScheduler(
        "D2LPM, Q^w = 1,000,000, matches above 0.3",
        "d2lpm",
        worker_quantum=LARGE_WORKER_QUANTUM,
        options=THRESHOLD,
    ),
    "cache-aware.dlpm": MixScheduler(
        "cache_aware over DLPM, Q^u = 1,000", "cache_aware", quantum=SMALL_QUANTUM
    ),
}


def traffic(replicas: int, duration_s: float, clients: int) -> TrafficSpec:
    """Clients that ask for `LOAD` times what `replicas` replicas complete."""
    rate = float(f"{LOAD * CAPACITY_PER_S * replicas:.4g}")
    return TrafficSpec("production", {"rate_per_s": rate, "duration_s": duration_s, "clients": clients})


def clients(spec: TrafficSpec, seed: str) -> list[Client]:
    """The mix, made from a seed in place of the traces' files, so that it is the same everywhere. A client is
    well-behaved if it asks for less than an equal share of what the cluster does."""
    arguments = spec.arguments
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
    """As for Figure 7, with the numbers of clients in place of what is kept of each."""
    found = observe(run)
    good = [client for client in run.manifest.clients.values() if client["well_behaved"]]
    del found["clients"]
    return found | {"good_clients": len(good), "all_clients": len(run.manifest.clients)}


class Production(Simulated):
    id = "beyond-production"
    version = 2

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        replicas, length_s, count = (8, 180.0, 400) if full else (2, 60.0, 60)
        runs = {
            name: MixScheduler(scheduler.label, scheduler.placement, scheduler.policy)
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
                    stall_ms=0.0,
                ),
                traffic(replicas, length_s, count),
                plan(length_s),
                SEEDS if full else SEEDS[:1],
                run.label,
            )
            for name, run in (runs | BESIDE).items()
        ]

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        return clients(cell.traffic, seed)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return observe_mix(run)

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        unfair = [results[name] for name in SCHEDULERS if name not in ("d2lpm", "vtc")]
        return {
            "p50": {name: result.number("ttft_p50_s") for name, result in results.items()},
            "p99": {name: result.number("ttft_p99_s") for name, result in results.items()},
            "speed": {name: result.number("tokens_per_s") for name, result in results.items()},
            "best": {
                what: best(result.number(what) for result in unfair)
                for what, best in (("ttft_p50_s", min), ("ttft_p99_s", min), ("tokens_per_s", max))
            },
            "gaps": {name: results[name].median("difference") for name in ("d2lpm", "vtc", "rr")},
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        panels = [
            Panel(
                y=unit,
                groups=groups,
                bars={
                    one.label: [results[name].number(path) for path in paths]
                    for name, one in SCHEDULERS.items()
                },
            )
            for unit, groups, paths in (
                ("TTFT of small clients, s", ("P50", "P99"), ("ttft_p50_s", "ttft_p99_s")),
                ("tokens/s", ("throughput",), ("tokens_per_s",)),
            )
        ]
        return {"latency": drawing(panels)}
