"""DLPM, Figure 10: what Q^w, the stretch for which a client may stick to a worker, does to throughput and fairness."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from workloads.clients import Client
from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments import style
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
    verdict,
)
from workloads.experiments.dlpm_fig7_setting import SCHEDULERS, observe
from workloads.experiments.dlpm_fig9 import REPLICAS, trees
from workloads.experiments.program_senders import clients_of
from workloads.records import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

QUANTA = (2_000, 5_000, 10_000, 20_000, 40_000)
"""Q^w of the paper, units."""
LARGER = (200_000, 1_000_000)
"""One tree here costs 219,000 units, prompts counted in full."""
OTHERS = ("rr", "preble", "vtc", "cache-aware")
SIDES = {"a": "one misbehaving client", "b": "all well-behaved"}


class Figure10(Simulated):
    id = "dlpm-fig10"
    title = "Q^w: throughput and Jain's index"
    source = "DLPM, Figures 10a and 10b"
    about = (
        "Figure 9's clients on four A10G for 160 s: (a) client 0's questions are ten times as long, (b) all alike. "
        "Q^u is what one tree is charged. Beside the paper's Q^w, 2,000 to 40,000, larger ones: a tree costs 219,000."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        replicas, length_s = (REPLICAS, 160.0) if full else (2, 40.0)
        seeds = ("0", "1", "2") if full else ("0",)
        found = []
        for side in SIDES if full else ("a",):
            sent = trees(replicas, factor=10 if side == "a" else 1)
            for quantum in (*QUANTA, *LARGER) if full else (QUANTA[0], QUANTA[-1]):
                quanta = dlpm.TOT3.quanta | {"worker_quantum": float(quantum)}
                site = dlpm.a10g("d2lpm", replicas, **quanta)
                found.append(
                    Cell(
                        f"{side}.{quantum}",
                        site,
                        sent,
                        dlpm.plan(length_s),
                        seeds if side == "a" else seeds[:1],
                    )
                )
            for name in OTHERS:
                site = dlpm.a10g(name, replicas, **dlpm.TOT3.quanta)
                found.append(Cell(f"{side}.{name}", site, sent, dlpm.plan(length_s), seeds[:1]))
        return found

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        return clients_of(cell.traffic, seed)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return observe(run)

    def report(self, results: Mapping[str, Result]) -> Report:
        first, last = f"a.{QUANTA[0]}", f"a.{QUANTA[-1]}"
        speed = {name: result.number("tokens_per_s") for name, result in results.items()}
        jain = {name: result.number("jain") for name, result in results.items()}
        swept = [int(name[2:]) for name in results if name.startswith("a.") and name[2:].isdigit()]
        best_other = max(speed[f"a.{name}"] for name in OTHERS)
        reached = max(speed[f"a.{quantum}"] for quantum in swept)
        alike = [value for name, value in jain.items() if name.startswith("b.") and name[2:].isdigit()]
        gain = speed[last] / speed[first]
        claims = [
            Claim(
                "Throughput rises with Q^w, then stays",
                "rises and saturates from 2,000 to 40,000",
                f"{gain:.2f}× at 40,000, {reached / speed[first]:.2f}× at the best of larger ones",
                verdict(gain >= 1.02, partly=reached / speed[first] >= 1.02),
                "A tree costs 219,000 units here: with 40,000 a client still changes workers within each tree.",
            ),
            Claim(
                "Then it surpasses all other schedulers",
                "surpasses all",
                f"{reached / best_other:.2f}× the best other (at 40,000 {speed[last] / best_other:.2f}×)",
                verdict(reached >= best_other, partly=reached >= 0.95 * best_other),
                "The scheduler with more throughput is not fair: it keeps one client's prefixes hot.",
            ),
            Claim(
                "Jain's index of the client-side service falls a little as Q^w grows",
                "0.855 to 0.83",
                f"{jain[first]:.3f} to {jain[last]:.3f}",
                verdict(0 <= jain[first] - jain[last] <= 0.1, partly=abs(jain[first] - jain[last]) <= 0.1),
                "The index moves by less than runs with other seeds differ.",
            ),
        ]
        if alike:
            claims.append(
                Claim(
                    "Where all behave well, the index is 1 for every Q^w",
                    "consistently 1",
                    f"at least {min(alike):.3f}",
                    verdict(min(alike) >= 0.98, partly=min(alike) >= 0.95),
                    "Few large trees arrive in a run, not the same number of each client's.",
                )
            )
        return Report(
            claims=claims,
            tables=[
                Table(
                    f"({side}) {title}",
                    (
                        "Q^w, units, or scheduler",
                        "tokens/s",
                        "Jain's index",
                        "of actual service",
                        "hit rate",
                        "imbalance",
                    ),
                    [
                        (
                            SCHEDULERS[name[2:]].label if name[2:] in SCHEDULERS else f"{int(name[2:]):,}",
                            result.shown("tokens_per_s"),
                            result.shown("jain"),
                            result.shown("jain_actual"),
                            result.shown("hit_rate"),
                            result.shown("imbalance"),
                        )
                        for name, result in results.items()
                        if name.startswith(f"{side}.")
                    ],
                )
                for side, title in SIDES.items()
                if f"{side}.rr" in results
            ],
            figures=[
                Figure(
                    "quantum",
                    "Throughput (solid) and Jain's index (dashed) over Q^w; horizontal lines are the other schedulers.",
                    lambda canvas: _draw(canvas, results),
                    (9.0, 3.8),
                )
            ],
        )


def _draw(canvas: "Canvas", results: Mapping[str, Result]) -> None:
    sides = [side for side in SIDES if f"{side}.rr" in results]
    for axes, side in zip(style.panels(canvas, len(sides), share_y=True), sides, strict=True):
        swept = [name for name in results if name.startswith(f"{side}.") and name[2:].isdigit()]
        quanta = [int(name[2:]) for name in swept]
        axes.semilogx(
            quanta,
            [results[name].number("tokens_per_s") for name in swept],
            "o-",
            color=style.scheduler_colour("D2LPM"),
            label="D2LPM",
        )
        for name in OTHERS:
            label = SCHEDULERS[name].label
            axes.axhline(
                results[f"{side}.{name}"].number("tokens_per_s"),
                color=style.scheduler_colour(label),
                linewidth=1.2,
                label=label,
            )
        style.label(
            axes,
            "Q^w, units",
            "tokens/s" if side == sides[0] else "",
            f"({side}) {SIDES[side]}",
            legend=side == "a",
        )
        index = axes.twinx()
        index.semilogx(
            quanta, [results[name].number("jain") for name in swept], "s--", color="#555555", markersize=4
        )
        index.set_ylim(0, 1.05)
        index.set_ylabel("Jain's index")
