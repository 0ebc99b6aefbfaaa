"""DLPM, Figure 10: what Q^w, which limits how long a client may stay at a worker, does to throughput and fairness."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments import style
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Size
from workloads.experiments.dlpm_fig7_setting import SCHEDULERS
from workloads.experiments.dlpm_fig9 import REPLICAS, trees

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

QUANTA = (2_000, 5_000, 10_000, 20_000, 40_000)
"""Q^w of the paper, units."""
LARGER = (200_000, 1_000_000)
TREE_UNITS = dlpm.TOT3.charged_in_full
OTHERS = ("rr", "preble", "vtc", "cache-aware")
SIDES = {"a": "one misbehaving client", "b": "all well-behaved"}
LENGTH_S = 160.0


class Figure10(dlpm.A10GExperiment):
    id = "dlpm-fig10"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        replicas, length_s = (REPLICAS, LENGTH_S) if full else (2, 40.0)
        found = []
        for side in SIDES if full else ("a",):
            sent = trees(replicas, factor=10 if side == "a" else 1)
            seeds = SEEDS if full and side == "a" else SEEDS[:1]
            sites = {
                f"{quantum}": dlpm.a10g(
                    "d2lpm", replicas, **dlpm.TOT3.quanta | {"worker_quantum": float(quantum)}
                )
                for quantum in ((*QUANTA, *LARGER) if full else (QUANTA[0], QUANTA[-1]))
            }
            sites |= {name: dlpm.a10g(name, replicas, **dlpm.TOT3.quanta) for name in OTHERS}
            for name, site in sites.items():
                label = SCHEDULERS[name].label if name in SCHEDULERS else f"{int(name):,}"
                found.append(Cell(f"{side}.{name}", site, sent, dlpm.plan(length_s), seeds, label))
        return found

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        sides = {side: [name for name in results if name[0] == side] for side in SIDES}
        first, last = f"a.{QUANTA[0]}", f"a.{QUANTA[-1]}"
        others = {name: results[name].number("tokens_per_s") for name in (f"a.{other}" for other in OTHERS)}
        before, after = results[first].values("jain"), results[last].values("jain")
        return {
            "sides": sides,
            "first": first,
            "last": last,
            "largest": _swept(results, "a")[-1],
            "best": max(others, key=lambda name: (others[name], name)),
            "titles": {name: result.cell.title for name, result in results.items()},
            "moves": sorted(new - old for old, new in zip(before, after, strict=True)),
            "move": median(new - old for old, new in zip(before, after, strict=True)),
            "apart": max(before) - min(before),
            "alike": min((results[name].number("jain") for name in _swept(results, "b")), default=None),
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {"quantum": Drawing(lambda canvas: _draw(canvas, results), (9.0, 3.8))}


def _swept(results: Mapping[str, Result], side: str) -> list[str]:
    """The D2LPM cells of a side, by Q^w."""
    return [name for name in results if name.startswith(f"{side}.") and name[2:].isdigit()]


def _draw(canvas: "Canvas", results: Mapping[str, Result]) -> None:
    sides = [side for side in SIDES if f"{side}.rr" in results]
    for axes, side in zip(style.panels(canvas, len(sides), share_y=True), sides, strict=True):
        swept = _swept(results, side)
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
