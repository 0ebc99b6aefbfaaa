"""DLPM, Figure 11: from five clients to fifty at the same total rate."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments import style
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Size, TrafficSpec
from workloads.experiments.dlpm_fig7_setting import observe
from workloads.experiments.program_senders import sender, tot
from workloads.experiments.senders import traffic
from workloads.records import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

COUNTS = (5, 10, 20, 35, 50)
LOAD = 1.5
INSTRUCTIONS = 1000
LENGTH_S = 200.0


def crowd(count: int) -> TrafficSpec:
    """`count` clients with trees of two branches. Together they ask for `LOAD` times what the GPU does."""
    rate = dlpm.TOT2.rate_per_s(LOAD / count)
    return traffic(
        "tot", *(sender(f"client {k}", tot(2, instructions=INSTRUCTIONS), rate) for k in range(count))
    )


class Figure11(dlpm.A10GExperiment):
    id = "dlpm-fig11"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        length_s, seeds = (LENGTH_S, SEEDS) if full else (40.0, SEEDS[:1])
        return [
            Cell(
                f"{policy}.{count}",
                dlpm.a10g("rr", policy=policy, quantum=dlpm.TOT2.charged),
                crowd(count),
                dlpm.plan(length_s),
                seeds,
            )
            for policy in dlpm.POLICIES
            for count in (COUNTS if full else (COUNTS[0], COUNTS[-1]))
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        found = observe(run)
        del found["clients"]
        return found

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        rates, counts = _rates(results), _counts(results)
        fair = rates["dlpm"].values()
        return {
            "counts": [
                {
                    "count": count,
                    **{
                        f"{policy}_{what}": results[f"{policy}.{count}"].shown(what)
                        for policy in dlpm.POLICIES
                        for what in ("service_rate", "hit_rate", "difference")
                    },
                }
                for count in counts
            ],
            "to_lpm": [one / other for one, other in zip(fair, rates["lpm"].values(), strict=True)],
            "to_vtc": [one / other for one, other in zip(fair, rates["vtc"].values(), strict=True)],
            "most": counts[-1],
            "falls": {policy: found[counts[-1]] / found[counts[0]] for policy, found in rates.items()},
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {"clients": Drawing(lambda canvas: _draw(canvas, results), (6.0, 3.6))}


def _counts(results: Mapping[str, Result]) -> list[int]:
    return [count for count in COUNTS if f"dlpm.{count}" in results]


def _rates(results: Mapping[str, Result]) -> dict[str, dict[int, float]]:
    """Service rates by policy and number of clients, units/s."""
    return {
        policy: {count: results[f"{policy}.{count}"].number("service_rate") for count in _counts(results)}
        for policy in dlpm.POLICIES
    }


def _draw(canvas: "Canvas", results: Mapping[str, Result]) -> None:
    [axes] = style.panels(canvas, 1)
    curves = {
        dlpm.POLICIES[policy]: (list(found), list(found.values()))
        for policy, found in _rates(results).items()
    }
    style.scheduler_lines(axes, curves, marker="o")
    style.label(axes, "clients", "service rate, units/s")
