"""DLPM, Figure 1: throughput against fairness on one A10G, Q^u swept, with VTC and LPM as end points."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments import style
from workloads.experiments.contract import (
    Cell,
    Claim,
    Figure,
    Json,
    Report,
    Result,
    Size,
    Traffic,
    medians,
    verdict,
)
from workloads.experiments.dlpm_fig7_setting import observe
from workloads.experiments.program_senders import sender, tot
from workloads.experiments.senders import FromSenders, traffic
from workloads.records import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

QUANTA = (100, 1_000, 5_000, 20_000, 100_000, 500_000)
LABELS = {"vtc": "VTC", "lpm": "LPM"}
LOAD = 2.0
"""What the three alike ask for, in parts of what the GPU does."""


def trees() -> Traffic:
    """Four clients at equal rates, three with trees of two branches and one with trees of four."""
    rate = dlpm.TOT2.rate_per_s(LOAD / 3)
    return traffic(
        "tot",
        *(sender(f"client {k}", tot(2), rate) for k in range(3)),
        sender("client 3", tot(4), rate, well_behaved=False),
    )


class Figure1(FromSenders):
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
        length_s, seeds = (240.0, ("0", "1", "2")) if full else (60.0, ("0",))
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

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return observe(run)

    def report(self, results: Mapping[str, Result]) -> Report:
        speed = {name: result.number("tokens_per_s") for name, result in results.items()}
        gap = {name: result.number("difference") for name, result in results.items()}
        swept = [name for name in results if name.startswith("dlpm.")]
        between = gap["lpm"] - gap["vtc"]
        closed = {name: (gap["lpm"] - gap[name]) / between for name in swept}
        best = max(
            [name for name in swept if closed[name] >= 0.9] or swept, key=lambda name: (speed[name], name)
        )
        won = (speed[best] - speed["vtc"]) / (speed["lpm"] - speed["vtc"])
        least, most = swept[0], swept[-1]
        faster, wider = speed[most] / speed[least], gap[most] / gap[least]
        return Report(
            claims=[
                Claim(
                    "Some Q^u has about LPM's throughput at close to VTC's fairness",
                    "a new Pareto frontier",
                    f"Q^u = {_quantum(best)}: {speed[best] / speed['lpm']:.0%} of LPM's throughput (VTC "
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
                    f"from Q^u = {_quantum(least)} to {_quantum(most)} throughput {faster:.2f}×, difference "
                    f"{wider:.1f}×",
                    verdict(faster >= 1.05 and wider >= 1.5, partly=max(faster / 1.05, wider / 1.5) >= 1),
                    "Throughput has little to rise: within its turn a client's requests go by prefix whatever Q^u "
                    f"is, so the smallest has a hit rate of {results[least].number('hit_rate'):.2f}, LPM "
                    f"{results['lpm'].number('hit_rate'):.2f} and VTC {results['vtc'].number('hit_rate'):.2f}.",
                ),
            ],
            tables=[
                medians(
                    "Medians over seeds (lowest to highest)",
                    "scheduler",
                    {
                        "tokens/s": "tokens_per_s",
                        "hit rate": "hit_rate",
                        "largest difference, units": "difference",
                        "bound, units": "bound",
                        "Jain, actual": "jain_actual",
                    },
                    {
                        LABELS.get(name) or f"DLPM, Q^u = {_quantum(name)}": result
                        for name, result in results.items()
                    },
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


def _quantum(name: str) -> str:
    """Of a DLPM cell, units."""
    return f"{int(name.removeprefix('dlpm.')):,}"


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
            _quantum(name), (gap[name], speed[name]), (5, -10), textcoords="offset points", fontsize=7
        )
    dlpm.points(axes, {label: (gap[name], speed[name]) for name, label in LABELS.items()})
    axes.set_xscale("log")
    style.label(axes, "largest difference of service, units (less is fairer)", "tokens/s")
    axes.set_ylim(0.95 * min(speed.values()), 1.03 * max(speed.values()))
