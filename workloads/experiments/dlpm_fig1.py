"""DLPM, Figure 1: throughput against fairness on one A10G, Q^u swept, with VTC and LPM as end points."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments import style
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Size, TrafficSpec
from workloads.experiments.program_senders import sender, tot
from workloads.experiments.senders import traffic

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

QUANTA = (100, 1_000, 5_000, 20_000, 100_000, 500_000)
LOAD = 2.0
"""What the three alike ask for, in parts of what the GPU does."""
LENGTH_S = 240.0


def trees() -> TrafficSpec:
    """Four clients at equal rates, three with trees of two branches and one with trees of four."""
    rate = dlpm.TOT2.rate_per_s(LOAD / 3)
    return traffic(
        "tot",
        *(sender(f"client {k}", tot(2), rate) for k in range(3)),
        sender("client 3", tot(4), rate, well_behaved=False),
    )


class Figure1(dlpm.A10GExperiment):
    id = "dlpm-fig1"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        length_s, seeds = (LENGTH_S, SEEDS) if full else (60.0, SEEDS[:1])
        runs: list[tuple[str, str, str, float | None]] = [
            (f"dlpm.{quantum}", f"DLPM, Q^u = {quantum:,}", "dlpm", float(quantum))
            for quantum in (QUANTA if full else QUANTA[1::2])
        ]
        runs += [("vtc", "VTC", "vtc", None), ("lpm", "LPM", "lpm", None)]
        return [
            Cell(
                name,
                dlpm.a10g("rr", policy=policy, quantum=quantum),
                trees(),
                dlpm.plan(length_s),
                seeds,
                label,
            )
            for name, label, policy, quantum in runs
        ]

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        speed = {name: result.number("tokens_per_s") for name, result in results.items()}
        gap = {name: result.number("difference") for name, result in results.items()}
        swept = _swept(results)
        closed = {name: (gap["lpm"] - gap[name]) / (gap["lpm"] - gap["vtc"]) for name in swept}
        fair = [name for name in swept if closed[name] >= 0.9]
        best = max(fair or swept, key=lambda name: (speed[name], name))
        return {
            "swept": swept,
            "quantum": {name: _quantum(name) for name in swept},
            "best": best,
            "closed": closed[best],
            "won": (speed[best] - speed["vtc"]) / (speed["lpm"] - speed["vtc"]),
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {"frontier": Drawing(lambda canvas: _draw(canvas, results), (6.4, 4.0))}


def _swept(results: Mapping[str, Result]) -> list[str]:
    return [name for name in results if name.startswith("dlpm.")]


def _quantum(name: str) -> int:
    """Q^u of a DLPM cell, units."""
    return int(name.removeprefix("dlpm."))


def _draw(canvas: "Canvas", results: Mapping[str, Result]) -> None:
    at = {
        name: (result.number("difference"), result.number("tokens_per_s")) for name, result in results.items()
    }
    swept = _swept(results)
    [axes] = style.panels(canvas, 1)
    axes.plot(
        [at[name][0] for name in swept],
        [at[name][1] for name in swept],
        "o-",
        color=style.scheduler_colour("DLPM"),
        label="DLPM",
    )
    for name in swept:
        axes.annotate(f"{_quantum(name):,}", at[name], (5, -10), textcoords="offset points", fontsize=7)
    dlpm.points(axes, {"VTC": at["vtc"], "LPM": at["lpm"]})
    axes.set_xscale("log")
    style.label(axes, "largest difference of service, units (less is fairer)", "tokens/s")
    speeds = [speed for _, speed in at.values()]
    axes.set_ylim(0.95 * min(speeds), 1.03 * max(speeds))
