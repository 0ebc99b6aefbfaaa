"""DLPM, Figure 1: throughput against fairness on one A10G, Q^u swept, with VTC and LPM as end points."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
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
    Traffic,
    verdict,
)
from workloads.experiments.dlpm_fig7_setting import observe
from workloads.experiments.program_senders import clients_of, sender, tot, traffic
from workloads.records import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

QUANTA = (100, 1_000, 5_000, 20_000, 100_000, 500_000)
LABELS = {"vtc": "VTC", "lpm": "LPM"}
LOAD = 2.0
"""What the three alike ask for, in parts of what the GPU does."""


def trees() -> Traffic:
    """Four clients at equal rates, three with trees of two branches and one with trees of four."""
    rate = float(f"{LOAD * dlpm.TOT2.capacity_per_s / 3:.4g}")
    return traffic(
        "tot",
        *(sender(f"client {k}", tot(2), rate) for k in range(3)),
        sender("client 3", tot(4), rate, well_behaved=False),
    )


class Figure1(Simulated):
    id = "dlpm-fig1"
    title = "Throughput against fairness: Q^u from small to large"
    source = "DLPM, Figure 1"
    about = (
        "Llama-3.2-3B on one A10G, 240 s. Four clients send trees of thoughts, three of two branches and one of four, "
        "all more than there is time for; the paper does not tell its workload. Unfairness is the largest difference "
        "of actual service between two clients that both wait."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        length_s, seeds = (240.0, ("0", "1", "2")) if full else (40.0, ("0",))
        quanta = QUANTA if full else QUANTA[1::2]
        runs: dict[str, tuple[str, float | None]] = {
            f"dlpm.{quantum}": ("dlpm", float(quantum)) for quantum in quanta
        }
        runs |= {"vtc": ("vtc", None), "lpm": ("lpm", None)}
        return [
            Cell(
                name,
                dlpm.a10g("rr", policy=policy, quantum=quantum),
                trees(),
                dlpm.plan(length_s),
                seeds,
            )
            for name, (policy, quantum) in runs.items()
        ]

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        return clients_of(cell.traffic, seed)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return observe(run)

    def report(self, results: Mapping[str, Result]) -> Report:
        speed = {name: result.number("tokens_per_s") for name, result in results.items()}
        gap = {name: result.median("difference") or 0.0 for name, result in results.items()}
        swept = [name for name in results if name.startswith("dlpm.")]
        between = gap["lpm"] - gap["vtc"]
        closed = {name: (gap["lpm"] - gap[name]) / between if between else 0.0 for name in swept}
        best = max(
            [name for name in swept if closed[name] >= 0.9] or swept, key=lambda name: (speed[name], name)
        )
        won = (
            (speed[best] - speed["vtc"]) / (speed["lpm"] - speed["vtc"])
            if speed["lpm"] != speed["vtc"]
            else 0.0
        )
        rises = sum(speed[later] >= 0.99 * speed[sooner] for sooner, later in pairwise(swept))
        widens = sum(gap[later] >= 0.95 * gap[sooner] for sooner, later in pairwise(swept))
        steps = len(swept) - 1
        return Report(
            claims=[
                Claim(
                    "Some Q^u has about LPM's throughput at close to VTC's fairness",
                    "a new Pareto frontier",
                    f"Q^u = {int(best[5:]):,}: {speed[best] / speed['lpm']:.0%} of LPM's throughput (VTC "
                    f"{speed['vtc'] / speed['lpm']:.0%}), {closed[best]:.0%} of the way from LPM's difference to VTC's",
                    verdict(
                        speed[best] >= 0.95 * speed["lpm"] and closed[best] >= 0.9,
                        partly=won >= 0.4 and closed[best] >= 0.8,
                    ),
                    "It is beyond the line from VTC to LPM by far, but a few percent of LPM's throughput come from "
                    "serving one client's largest tree alone, and those are not to be had fairly.",
                ),
                Claim(
                    "A larger Q^u raises throughput and loosens fairness",
                    "both",
                    f"throughput in {rises} of {steps} steps, difference in {widens} of {steps}",
                    verdict(rises == widens == steps, partly=rises + widens >= 1.5 * steps),
                    "Steps at the ends, where the quantum is far from what one program costs, change nothing.",
                ),
            ],
            tables=[
                Table(
                    "Medians over seeds (lowest to highest)",
                    (
                        "scheduler",
                        "tokens/s",
                        "hit rate",
                        "largest difference, units",
                        "bound, units",
                        "Jain, actual",
                    ),
                    [
                        (
                            LABELS.get(name) or f"DLPM, Q^u = {int(name[5:]):,}",
                            result.shown("tokens_per_s"),
                            result.shown("hit_rate"),
                            result.shown("difference"),
                            result.shown("bound"),
                            result.shown("jain_actual"),
                        )
                        for name, result in results.items()
                    ],
                )
            ],
            figures=[
                Figure(
                    "frontier",
                    "Throughput and the largest difference of service between clients that wait.",
                    lambda canvas: _draw(canvas, swept, speed, gap),
                    (6.4, 4.0),
                )
            ],
        )


def _draw(
    canvas: "Canvas", swept: Sequence[str], speed: Mapping[str, float], gap: Mapping[str, float]
) -> None:
    [axes] = style.panels(canvas, 1)
    axes.plot(
        [gap[name] for name in swept],
        [speed[name] for name in swept],
        "o-",
        color=style.scheduler_colour("DLPM"),
        label="DLPM",
    )
    for name in swept:
        axes.annotate(
            f"{int(name[5:]):,}", (gap[name], speed[name]), (5, -10), textcoords="offset points", fontsize=7
        )
    dlpm.points(axes, {label: (gap[name], speed[name]) for name, label in LABELS.items()})
    axes.set_xscale("log")
    style.label(axes, "largest difference of service, units (less is fairer)", "tokens/s")
    axes.set_ylim(0.95 * min(speed.values()), 1.03 * max(speed.values()))
