"""All eleven placements over DLPM: which one should hand out requests?"""

from collections.abc import Mapping, Sequence
from math import exp, log
from statistics import fmean

from router.placement import PLACEMENTS
from workloads.clients import SCENARIOS, Client
from workloads.experiments import beyond_production, dlpm_fig7_setting, style
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
from workloads.experiments.dlpm_fig7_setting import KINDS, MAX_RUNNING
from workloads.records import Run
from workloads.simulation import Site

REPLICAS = 4
PRODUCTION = "production"
LENGTHS_S: Mapping[str, tuple[float, float]] = {
    "qa-s1": (80.0, 0.0),
    "judge-s1": (50.0, 10.0),
    PRODUCTION: (120.0, 20.0),
    "tot-s1": (45.0, 0.0),
}
"""Of arrivals, by workload: in full and quick; 0: not run."""

DEFAULT, CENTRAL = "d2lpm", "centralized_dlpm"
FAIR = ("d2lpm", "d2lpm-tokens", "d2lpm-time", "client_round_robin", CENTRAL)
"""Placements with a bound on what clients' services differ by."""


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
    )


def first_tokens(workload: str) -> bool:
    """Whether its latency is a first token's, not a program's."""
    return workload == PRODUCTION or SCENARIOS[workload].app == "qa"


def latency(workload: str, percent: int) -> str:
    """Where the latency of the well-behaved clients is kept."""
    return f"{'ttft_' if first_tokens(workload) else ''}p{percent}_s"


class Placements(Simulated):
    id = "beyond-tokens"
    title = "Eleven placements over DLPM"
    version = 2
    source = "beyond the papers; DLPM §5"
    about = (
        "Four A100 with Llama-3.1-8B, every replica under DLPM, one misbehaving client (Figure 7's S1 at its rates "
        "and quanta) or the production mix. What differs is who gets a request: D2LPM with load in requests, in "
        "tokens or in seconds, and eight others (the central queue with its 64 slots and one seed: it matches all that "
        "waits for every request that it sends). Latency is the well-behaved clients': a program's, a first token's "
        "for QA and for the production mix."
    )

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
                traffic = Traffic(workload, {"rate_per_s": rate})
                plan = dlpm_fig7_setting.plan(length_s)
            for placement in PLACEMENTS:
                chosen = site(placement, workload, replicas)
                seeds = ("0", "1", "2") if full and placement != CENTRAL else ("0",)
                found.append(Cell(f"{workload}.{placement}", chosen, traffic, plan, seeds))
        return found

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        if cell.traffic.name == PRODUCTION:
            return beyond_production.clients(cell.traffic, seed)
        return dlpm_fig7_setting.clients(cell, seed)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return beyond_production.observe_mix(run)

    def report(self, results: Mapping[str, Result]) -> Report:
        speed, last, hits = (
            {placement: _against_default(results, placement, what) for placement in PLACEMENTS}
            for what in ("tokens_per_s", "p99_s", "p50_s")
        )
        family = {place: speed[place] for place in FAIR if place != CENTRAL}
        fastest = max(family, key=lambda place: (family[place], place))
        quickest = min(family, key=lambda place: (last[place], place))
        unfair = [place for place in PLACEMENTS if place not in FAIR]
        anywhere = max(unfair, key=lambda place: (speed[place], place))
        tokens, seconds = "d2lpm-tokens", "d2lpm-time"
        slowest = min(_workloads(results), key=lambda one: _ratio(results, seconds, one, "tokens_per_s"))
        drop = _ratio(results, seconds, slowest, "tokens_per_s")
        latest = max(_workloads(results), key=lambda one: _ratio(results, seconds, one, "p99_s"))
        delay = _ratio(results, seconds, latest, "p99_s")
        return Report(
            claims=[
                Claim(
                    "Of the placements with a bound that scale, D2LPM with load in requests, the paper's, is the best",
                    "what the paper proposes",
                    f"throughput: {fastest} ({family[fastest]:.2f}×); well-behaved P99: {quickest} "
                    f"({last[quickest]:.2f}×)",
                    verdict(
                        fastest == quickest == DEFAULT,
                        partly=family[fastest] <= 1.02 and last[quickest] >= 0.8,
                    ),
                    "Requests differ by orders of magnitude in what they cost, and a replica with few of them may be "
                    f"the busiest: with load in tokens P99 is {last[tokens]:.2f}× and throughput {speed[tokens]:.2f}×, "
                    f"in seconds {last[seconds]:.2f}× and {speed[seconds]:.2f}×.",
                ),
                Claim(
                    "Load in seconds, a wait and everybody's delay weighed against saved prefill, is better still",
                    "our own idea",
                    f"throughput {speed[seconds]:.2f}×, at least {drop:.2f}× ({slowest}); P99 {last[seconds]:.2f}×, at "
                    f"most {delay:.2f}× ({latest})",
                    verdict(speed[seconds] >= 1.0 and last[seconds] <= 1.0, partly=speed[seconds] >= 0.95),
                    "It takes each replica to work in the order of arrival, and DLPM does not: what a client will wait "
                    "for is estimated from what all clients waited.",
                ),
                Claim(
                    "No placement without a bound has more throughput over DLPM",
                    "our own question",
                    f"{anywhere} {speed[anywhere]:.2f}× D2LPM's, P99 {last[anywhere]:.2f}×",
                    verdict(speed[anywhere] <= 1.0, partly=speed[anywhere] <= 1.1),
                    "Whoever does not limit how long a client may stay at a replica has a few more hits; with DLPM in "
                    "every replica that costs the others little.",
                ),
            ],
            tables=[
                Table(
                    "Each placement against D2LPM: geometric means over the workloads",
                    ("placement", "bound", "tokens/s", "P50 of good clients", "P99 of good clients"),
                    [
                        (
                            placement,
                            "yes" if placement in FAIR else "no",
                            f"{speed[placement]:.2f}×",
                            f"{hits[placement]:.2f}×",
                            f"{last[placement]:.2f}×",
                        )
                        for placement in PLACEMENTS
                    ],
                ),
                *(_table(results, workload) for workload in _workloads(results)),
            ],
            figures=[
                Figure(
                    "placements",
                    "Throughput and P99 of the well-behaved clients, each as a multiple of D2LPM's.",
                    lambda canvas: _draw(canvas, results),
                    (9.0, 6.4),
                )
            ],
        )


def _workloads(results: Mapping[str, Result]) -> list[str]:
    return [workload for workload in LENGTHS_S if f"{workload}.{DEFAULT}" in results]


def _table(results: Mapping[str, Result], workload: str) -> Table:
    columns = ("placement", "tokens/s", "hit rate", "P50, s", "P99, s", "difference, units", "imbalance")
    paths = (
        "tokens_per_s",
        "hit_rate",
        latency(workload, 50),
        latency(workload, 99),
        "difference",
        "imbalance",
    )
    rows = [
        (placement, *(results[f"{workload}.{placement}"].shown(path) for path in paths))
        for placement in PLACEMENTS
    ]
    return Table(f"{workload}, medians over seeds (lowest to highest)", columns, rows)


def _ratio(results: Mapping[str, Result], placement: str, workload: str, what: str) -> float:
    path = (
        what if what == "tokens_per_s" else latency(workload, int(what.removeprefix("p").removesuffix("_s")))
    )
    mine, default = (results[f"{workload}.{name}"].number(path) for name in (placement, DEFAULT))
    return mine / default


def _against_default(results: Mapping[str, Result], placement: str, what: str) -> float:
    return exp(fmean(log(_ratio(results, placement, workload, what)) for workload in _workloads(results)))


def _draw(canvas: object, results: Mapping[str, Result]) -> None:
    upper, lower = canvas.subplots(2, 1, sharex=True)  # type: ignore[attr-defined]
    workloads = _workloads(results)
    width = 0.8 / len(workloads)
    for axes, what, unit in ((upper, "tokens_per_s", "tokens/s, × D2LPM"), (lower, "p99_s", "P99, × D2LPM")):
        for place, workload in enumerate(workloads):
            offset = (place - (len(workloads) - 1) / 2) * width
            axes.bar(
                [k + offset for k in range(len(PLACEMENTS))],
                [_ratio(results, placement, workload, what) for placement in PLACEMENTS],
                width * 0.92,
                label=workload,
                color=style.client_colour(place),
            )
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_ylabel(unit)
        axes.grid(visible=True, axis="y", color="#e6e6e6", linewidth=0.6)
        axes.set_axisbelow(True)
    upper.legend(fontsize=8, ncols=len(workloads))
    lower.set_xticks(range(len(PLACEMENTS)), list(PLACEMENTS), rotation=25, ha="right", fontsize=8)
