"""A quantum that follows a target, beside fixed ones, while the load changes its kind."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments import style
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Size, TrafficSpec
from workloads.experiments.program_senders import sender, tot
from workloads.experiments.senders import FromSenders, traffic
from workloads.records import Run
from workloads.windows import Windows

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

FIXED = (500, 20_000, 500_000)
TARGET_HIT_RATE, TARGET_GAP = 0.85, 200_000
LEAST, MOST = 500, 500_000
"""Limits of the quantum, units."""
START = 20_000
PHASE_S = 100.0
LOAD = 2.0
PHASES = ("no sharing", "trees", "no sharing again")
SINGLE_PER_S = 9.0
"""Requests of 512 + 256 tokens a second that one A10G completes."""


def shifting(phase_s: float) -> TrafficSpec:
    """Three equal clients and one that asks for more. They send single requests, then trees, then single requests."""
    single = {"kind": "shared", "of": "", "prefix": 256, "input": 256, "output": 256, "requests": 1}
    rate = float(f"{LOAD * SINGLE_PER_S / 5:.4g}")
    trees = float(f"{LOAD * dlpm.TOT2.capacity_per_s / 3:.4g}")
    never = 1e-9
    senders = []
    for k in range(4):
        mine = rate if k < 3 else 2 * rate
        shape = single | {"of": f"client {k}"}
        senders.append(
            sender(f"client {k}", shape, (mine, phase_s), (never, 2 * phase_s), (mine, 3 * phase_s))
        )
        senders.append(
            sender(
                f"trees {k}",
                tot(2 if k < 3 else 4),
                (never, phase_s),
                (trees, 2 * phase_s),
                (never, 3 * phase_s),
            )
        )
    return traffic("shifting", *senders)


class Adaptive(FromSenders):
    id = "beyond-adaptive"
    version = 2

    def cells(self, size: Size) -> Sequence[Cell]:
        phase_s, seeds = (PHASE_S, SEEDS) if size == "full" else (25.0, SEEDS[:1])
        limits = f"min_quantum={LEAST},max_quantum={MOST}"
        runs: list[tuple[str, str, str, int, str]] = [
            (f"fixed.{quantum}", f"fixed, {quantum:,}", "dlpm", quantum, "") for quantum in FIXED
        ]
        for name, label, target in (
            ("hit-rate", f"hit rate of {TARGET_HIT_RATE}", f"target_hit_rate={TARGET_HIT_RATE}"),
            ("gap", f"gap of {TARGET_GAP:,}", f"target_gap={TARGET_GAP}"),
        ):
            runs.append((name, label, "dlpm-adaptive", START, f"{target},{limits}"))
        return [
            Cell(
                name,
                dlpm.a10g("rr", policy=policy, quantum=float(quantum), policy_options=options),
                shifting(phase_s),
                dlpm.plan(3 * phase_s),
                seeds,
                label,
            )
            for name, label, policy, quantum, options in runs
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        phase_s = cell.plan.duration_s / 3
        seen, actual = Windows(run), Windows(run, side="actual")
        found: dict[str, Json] = {}
        for k, phase in enumerate(PHASES):
            start_s, end_s = k * phase_s, (k + 1) * phase_s
            kind = "trees" if k == 1 else "client"
            served = seen.service(start_s, end_s)
            mine = {
                name: units for name, units in actual.service(start_s, end_s).items() if name.startswith(kind)
            }
            known = [units for units in mine.values() if units is not None]
            found[phase] = {
                "service_rate": sum(units or 0.0 for units in served.values()) / phase_s,
                "difference": max(known) - min(known),
            }
        return {"phases": found}

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        speed, gap = (_by_phase(results, what) for what in ("service_rate", "difference"))
        fixed = [f"fixed.{quantum}" for quantum in FIXED]
        trees = PHASES[1]
        rates = [speed[name][trees] for name in fixed]
        return {
            "kept": {name: speed[name][trees] / max(rates) for name in results},
            "spread": max(rates) / min(rates),
            "plain": {name.removeprefix("fixed."): gap[name][PHASES[2]] for name in results},
            "widest": {name: max(gap[name].values()) for name in results},
            "fairest": min(max(gap[name].values()) for name in fixed),
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {"phases": Drawing(lambda canvas: _draw(canvas, results), (10.0, 3.6))}


def _by_phase(results: Mapping[str, Result], what: str) -> dict[str, dict[str, float]]:
    return {
        name: {phase: result.number(f"phases/{phase}/{what}") for phase in PHASES}
        for name, result in results.items()
    }


def _draw(canvas: "Canvas", results: Mapping[str, Result]) -> None:
    units = {"service, units/s": "service_rate", "difference, units": "difference"}
    for axes, (unit, what) in zip(style.panels(canvas, 2), units.items(), strict=True):
        found = _by_phase(results, what)
        style.bars(
            axes,
            PHASES,
            {results[name].cell.title: list(values.values()) for name, values in found.items()},
            unit=unit,
            colours={
                result.cell.title: style.client_colour(place) for place, result in enumerate(results.values())
            },
            legend=what == "service_rate",
        )
