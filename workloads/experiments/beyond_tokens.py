"""All eleven placements over DLPM: which one is best?"""

from collections.abc import Mapping, Sequence
from math import exp, log
from statistics import fmean
from typing import TYPE_CHECKING

from workloads.clients import SCENARIOS, Client
from workloads.experiments import beyond_production, dlpm_fig7_setting, style
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Simulated, Size, TrafficSpec
from workloads.experiments.dlpm_fig7_setting import KINDS, MAX_RUNNING
from workloads.records import Run
from workloads.simulation import Site

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

REPLICAS = 4
PRODUCTION = "production"
LENGTHS_S: Mapping[str, tuple[float, float]] = {
    "qa-s1": (80.0, 0.0),
    "judge-s1": (50.0, 10.0),
    PRODUCTION: (120.0, 20.0),
    "tot-s1": (45.0, 0.0),
}
"""Seconds of arrivals by workload, in full and quick; 0 where a workload is left out."""

PLACEMENTS = (
    "d2lpm",
    "d2lpm-tokens",
    "d2lpm-time",
    "round_robin",
    "client_round_robin",
    "least_requests",
    "least_tokens",
    "power_of_two",
    "cache_aware",
    "preble",
    "centralized_dlpm",
)
"""What was there to compare D2LPM with; `beyond-placement` compares what came of it."""

DEFAULT, CENTRAL = "d2lpm", "centralized_dlpm"
FAIR = ("d2lpm", "d2lpm-tokens", "d2lpm-time", "client_round_robin", CENTRAL)
"""Placements that bound the difference between the services of clients."""


def site(placement: str, workload: str, replicas: int = REPLICAS) -> Site:
    """A100s with quanta by the rule of Figure 7."""
    if workload == PRODUCTION:
        quantum, worker_quantum = beyond_production.QUANTUM, beyond_production.WORKER_QUANTUM
    else:
        kind = KINDS[SCENARIOS[workload].app]
        quantum, worker_quantum = kind.quantum, kind.worker_quantum
    return Site(
        replicas=replicas,
        placement=placement,
        policy="dlpm",
        quantum=quantum,
        worker_quantum=worker_quantum,
        max_running=MAX_RUNNING,
        stall_ms=0.0,
    )


def first_tokens(workload: str) -> bool:
    """Whether its latency is a first token's, not a program's."""
    return workload == PRODUCTION or SCENARIOS[workload].app == "qa"


def latency(workload: str, percent: int) -> str:
    """The field with the latency of the well-behaved clients."""
    return f"{'ttft_' if first_tokens(workload) else ''}p{percent}_s"


class Placements(Simulated):
    id = "beyond-tokens"
    version = 2

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        replicas = REPLICAS if full else 2
        found = []
        for workload, lengths_s in LENGTHS_S.items():
            length_s = lengths_s[0 if full else 1]
            if not length_s:
                continue
            if workload == PRODUCTION:
                traffic = beyond_production.traffic(replicas, length_s, 200 if full else 40)
                plan = beyond_production.plan(length_s)
            else:
                rate = KINDS[SCENARIOS[workload].app].rate_per_s(replicas)
                traffic = TrafficSpec(workload, {"rate_per_s": rate})
                plan = dlpm_fig7_setting.plan(length_s)
            for placement in PLACEMENTS:
                chosen = site(placement, workload, replicas)
                seeds = SEEDS if full and placement != CENTRAL else SEEDS[:1]
                found.append(Cell(f"{workload}.{placement}", chosen, traffic, plan, seeds, placement))
        return found

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        if cell.traffic.name == PRODUCTION:
            return beyond_production.clients(cell.traffic, seed)
        return dlpm_fig7_setting.clients(cell, seed)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return beyond_production.observe_mix(run)

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        speed, last, middle = (
            {placement: _against_default(results, placement, what) for placement in PLACEMENTS}
            for what in ("tokens_per_s", "p99_s", "p50_s")
        )
        family = [placement for placement in FAIR if placement != CENTRAL]
        unfair = [placement for placement in PLACEMENTS if placement not in FAIR]

        def by_seconds(what: str) -> dict[str, float]:
            return {one: _ratio(results, "d2lpm-time", one, what) for one in _workloads(results)}

        rates, waits = by_seconds("tokens_per_s"), by_seconds("p99_s")
        slowest, latest = min(rates, key=rates.__getitem__), max(waits, key=waits.__getitem__)
        return {
            "speed": speed,
            "last": last,
            "fastest": max(family, key=lambda one: (speed[one], one)),
            "quickest": min(family, key=lambda one: (last[one], one)),
            "anywhere": max(unfair, key=lambda one: (speed[one], one)),
            "slowest": slowest,
            "drop": rates[slowest],
            "latest": latest,
            "delay": waits[latest],
            "means": [
                {
                    "placement": placement,
                    "bound": "yes" if placement in FAIR else "no",
                    **{
                        name: f"{found[placement]:.2f}×"
                        for name, found in (("rate", speed), ("p50", middle), ("p99", last))
                    },
                }
                for placement in PLACEMENTS
            ],
            "workloads": {
                workload: [
                    {
                        "cell": f"{workload}.{placement}",
                        "p50": latency(workload, 50),
                        "p99": latency(workload, 99),
                    }
                    for placement in PLACEMENTS
                ]
                for workload in _workloads(results)
            },
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {"placements": Drawing(lambda canvas: _draw(canvas, results), (9.0, 6.4))}


def _workloads(results: Mapping[str, Result]) -> list[str]:
    return [workload for workload in LENGTHS_S if f"{workload}.{DEFAULT}" in results]


def _ratio(results: Mapping[str, Result], placement: str, workload: str, what: str) -> float:
    path = (
        what if what == "tokens_per_s" else latency(workload, int(what.removeprefix("p").removesuffix("_s")))
    )
    mine, default = (results[f"{workload}.{name}"].number(path) for name in (placement, DEFAULT))
    return mine / default


def _against_default(results: Mapping[str, Result], placement: str, what: str) -> float:
    return exp(fmean(log(_ratio(results, placement, workload, what)) for workload in _workloads(results)))


def _draw(canvas: "Canvas", results: Mapping[str, Result]) -> None:
    upper, lower = canvas.subplots(2, 1, sharex=True)
    workloads = _workloads(results)
    colours = {workload: style.client_colour(place) for place, workload in enumerate(workloads)}
    for axes, what, unit in ((upper, "tokens_per_s", "tokens/s, × D2LPM"), (lower, "p99_s", "P99, × D2LPM")):
        heights = {
            workload: [_ratio(results, placement, workload, what) for placement in PLACEMENTS]
            for workload in workloads
        }
        style.bars(axes, list(PLACEMENTS), heights, unit=unit, colours=colours, legend=False)
        axes.axhline(1.0, color="black", linewidth=0.8)
    upper.legend(fontsize=8, ncols=len(workloads))
    lower.set_xticks(range(len(PLACEMENTS)), list(PLACEMENTS), rotation=25, ha="right", fontsize=8)
