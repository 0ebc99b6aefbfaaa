"""DLPM, Figure 7: three kinds of programs, two kinds of misbehaviour, one to eight A100s, five schedulers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from workloads.clients import SCENARIOS
from workloads.experiments import dlpm_fig7_setting as setting
from workloads.experiments import style
from workloads.experiments.claims import Drawing, shown
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Size
from workloads.experiments.curves import Line
from workloads.experiments.dlpm_fig7_setting import (
    KINDS,
    SCHEDULERS,
    SHIPPED_STEPS,
    is_cut,
    latency,
    shown_latency,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

PANELS = (("qa-s1", "tot-s1", "judge-s1"), ("qa-s2", "tot-s2", "judge-s2"))
"""Scenarios as the panels lie: more requests above, longer prefixes below."""

NUMBERS = (1, 2, 4, 8)
"""Of GPUs. With the largest there is one seed, with the others there are three."""

LENGTH_S = 240.0

STALL_BOUND = "d2lpm-stall"
"""D2LPM with the bound on prefill steps, and the target that goes with it, that replicas have by default. All others
here compute prompts first, as the paper's did."""
COLUMNS: Mapping[str, str] = {
    "d2lpm": SCHEDULERS["d2lpm"].label,
    STALL_BOUND: "D2LPM, stall bound",
    **{name: chosen.label for name, chosen in SCHEDULERS.items()},
}
"""What tables and figures call each scheduler, by the last part of a cell's name."""

AHEAD = 0.01
"""Throughputs that differ by less count as equal."""
SAME_INDEX = 0.005
"""Jain's indices that differ by less count as equal."""


class Figure7(setting.ScenarioExperiment):
    id = "dlpm-fig7"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        duration_s, numbers = (LENGTH_S, NUMBERS) if full else (15.0, NUMBERS[:2])

        def cell(scenario: str, replicas: int, column: str, scheduler: str, **more: Json) -> Cell:
            seeds = SEEDS if full and replicas < max(numbers) else SEEDS[:1]
            name = f"{scenario}-d{replicas}-{column}"
            found = setting.cell(name, scenario, scheduler, replicas, duration_s, seeds=seeds, **more)
            return replace(found, label=COLUMNS[column])

        return [
            one
            for replicas in numbers
            for row in PANELS
            for scenario in row
            for one in (
                *(
                    cell(scenario, replicas, name, name)
                    for name, chosen in SCHEDULERS.items()
                    if chosen.single or replicas > 1
                ),
                cell(scenario, replicas, STALL_BOUND, "d2lpm", **SHIPPED_STEPS),
            )
        ]

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        grid = Grid(results)
        others = [name for name in SCHEDULERS if name != "d2lpm"]
        return {
            "throughput": {name: gain(grid.rates(name)) for name in others},
            "latency": {name: gain(grid.latencies(name), 2 * grid.count(name)) for name in others},
            "gains": [
                {"what": what, "name": name, "beside": COLUMNS[name]} | _shown_gain(ratios)
                for what, of in (("throughput", grid.rates), ("latency", grid.latencies))
                for name in ("vtc", "rr", "preble", "cache-aware", STALL_BOUND)
                if (ratios := of(name))
            ],
            "preble": _beside_preble(grid),
            "order": {
                f"{above}_{below}": _order(grid, above, below)
                for above, below in (("vtc", "d2lpm"), ("d2lpm", "preble"), ("preble", "rr"))
            },
            "stall": _stall_bound(grid),
            "points": {measure.name: _rows(grid, measure) for measure in MEASURES},
            **_asides(grid),
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        grid = Grid(results)
        return {
            measure.name: Drawing(_draw_panels(grid, measure), (10.5, 5.6))
            for measure in MEASURES
            if measure.unit
        }


# ---- results by where they stand in the figure

Point = tuple[str, int]
"""Scenario and number of replicas."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """One scheduler's number over another's at one point; a lower bound if `at_least`."""

    point: Point
    value: float
    at_least: bool = False


class Grid:
    """All results of the figure."""

    def __init__(self, results: Mapping[str, Result]) -> None:
        self._results = results
        self.numbers = sorted({result.cell.site.replicas for result in results.values()})
        self.points: list[Point] = [
            (name, number) for row in PANELS for name in row for number in self.numbers
        ]

    def get(self, point: Point, scheduler: str) -> Result | None:
        """None where a scheduler has no point of its own."""
        return self._results.get(f"{point[0]}-d{point[1]}-{scheduler}")

    def count(self, scheduler: str) -> int:
        """At how many points the scheduler was run."""
        return sum(self.get(point, scheduler) is not None for point in self.points)

    def ratios(self, path: Callable[[str], str], over: str, under: str) -> list[Ratio]:
        """One scheduler's number over another's, wherever both have one. `path` gives a scenario's field. Where the
        lower number is a latency that was cut off there is no ratio."""
        found = []
        for point in self.points:
            one, other, at = self.get(point, over), self.get(point, under), path(point[0])
            if one is None or other is None or (at.endswith("_s") and is_cut(other, at)):
                continue
            more, less = one.median(at), other.median(at)
            if more is not None and less:
                found.append(Ratio(point, more / less, at.endswith("_s") and is_cut(one, at)))
        return found

    def latencies(self, over: str, under: str = "d2lpm", percents: Iterable[int] = (50, 99)) -> list[Ratio]:
        """Ratios of the percentiles of the well-behaved clients' latency."""
        return [
            one
            for percent in percents
            for one in self.ratios(lambda scenario, at=percent: latency(scenario, at), over, under)  # type: ignore[misc]
        ]

    def rates(self, under: str, over: str = "d2lpm") -> list[Ratio]:
        """Ratios of the service rate."""
        return self.ratios(lambda _: "service_rate", over, under)


def place(point: Point) -> str:
    """A point in words."""
    scenario, number = point
    return f"{_workload(scenario)}, D = {number}"


def _workload(scenario: str) -> str:
    return f"{scenario[-2:].upper()} {KINDS[SCENARIOS[scenario].app].title}"


# ---- what the claims are about


def gain(ratios: Sequence[Ratio], of: int | None = None) -> dict[str, Json]:
    """The largest of some ratios and where it is, their mean and the least; `of` is how many there could be."""
    most = max(ratios, key=lambda one: one.value, default=None)
    return {
        "points": len(ratios),
        "of": len(ratios) if of is None else of,
        "most": None if most is None else most.value,
        "bound": "more than " if most is not None and most.at_least else "",
        "where": None if most is None else place(most.point),
        "mean": fmean(one.value for one in ratios) if ratios else None,
        "least": min((one.value for one in ratios), default=None),
        "below": sum(one.value < 1 for one in ratios),
    }


def _shown_gain(ratios: Sequence[Ratio]) -> dict[str, str]:
    """For a table, with two digits behind the point."""
    most = max(ratios, key=lambda one: one.value)
    values = [one.value for one in ratios]
    return {
        "most": f"{'> ' if most.at_least else ''}{most.value:.2f}",
        "where": place(most.point),
        "mean": f"{fmean(values):.2f}",
        "least": f"{min(values):.2f}",
    }


def _beside_preble(grid: Grid) -> dict[str, Json]:
    rates = grid.rates("preble")
    behind = [one for one in rates if one.value < 1 - AHEAD]
    least = min(rates, key=lambda one: one.value, default=None)
    return {
        "points": len(rates),
        "behind": len(behind),
        "behind_unlike_paper": sum(one.point != ("qa-s2", 8) for one in behind),
        "least": None if least is None else least.value,
        "where": None if least is None else place(least.point),
    }


def _stall_bound(grid: Grid) -> dict[str, Json]:
    """What the default bound on prefill steps changes: D2LPM with it over D2LPM without."""
    return {
        "bound_ms": SHIPPED_STEPS["stall_ms"],
        "rate": gain(grid.rates("d2lpm", over=STALL_BOUND)),
        "p50": gain(grid.latencies(STALL_BOUND, percents=(50,))),
        "p99": gain(grid.latencies(STALL_BOUND, percents=(99,))),
    }


def _order(grid: Grid, above: str, below: str) -> dict[str, Json]:
    """At how many points one scheduler's Jain's index is at least, or above, another's."""
    pairs = [
        (one.number("jain"), other.number("jain"))
        for point in grid.points
        if (one := grid.get(point, above)) is not None and (other := grid.get(point, below)) is not None
    ]
    means = [fmean(column) for column in zip(*pairs, strict=True)] or [0.0, 0.0]
    return {
        "points": len(pairs),
        "at_least": sum(one >= other - SAME_INDEX for one, other in pairs),
        "above": sum(one > other + SAME_INDEX for one, other in pairs),
        "means": means,
    }


def _asides(grid: Grid) -> dict[str, Json]:
    """Numbers that explain where a claim does not hold; None where the records of a size have none."""

    def field(path: str, scheduler: str, *scenarios: str, numbers: Sequence[int] = NUMBERS) -> list[float]:
        found = (grid.get((name, number), scheduler) for name in scenarios for number in numbers)
        return [value for one in found if one is not None and (value := one.median(path)) is not None]

    def one(path: str, scheduler: str, scenario: str, number: int) -> float | None:
        return next(iter(field(path, scheduler, scenario, numbers=(number,))), None)

    several = grid.numbers[1:]
    hits = {name: field("hit_rate", name, "qa-s1", "qa-s2", numbers=several) for name in ("d2lpm", "preble")}
    lower = {
        name: min(
            (ratio.value for ratio in grid.latencies(name, percents=(99,)) if ratio.point[0] == "judge-s2"),
            default=None,
        )
        for name in ("preble", "cache-aware")
    }
    vtc_first = [
        ratio.point[1]
        for ratio in grid.latencies("vtc", percents=(99,))
        if ratio.point[0] == "tot-s1" and ratio.value < 1
    ]
    return {
        "qa_hits": {
            name: {"least": min(found, default=None), "most": max(found, default=None)}
            for name, found in hits.items()
        },
        "qa_computed_more": max(
            ((1 - one) / (1 - other) - 1 for one, other in zip(hits["d2lpm"], hits["preble"], strict=True)),
            default=None,
        ),
        "qa_dealt_out_hits": one("hit_rate", "rr", "qa-s1", max(grid.numbers, default=1)),
        "vtc_judge_even": min(field("jain_actual", "vtc", "judge-s1", numbers=(1, 2, 4)), default=None),
        "judge_s2_p99_lower": {name: None if least is None else 1 - least for name, least in lower.items()},
        "vtc_first_at": ", ".join(f"D = {number}" for number in vtc_first) or "no number of GPUs",
        "rr_trees": {
            what: {f"d{number}": one(path, "rr", "tot-s2", number) for number in (1, 4, 8)}
            for what, path in (("rate", "service_rate"), ("hits", "hit_rate"))
        },
    }


# ---- tables and plots


@dataclass(frozen=True, slots=True)
class GridMeasure:
    """One number of each run. `path` gives the field for a scenario."""

    name: str
    path: Callable[[str], str]
    unit: str = ""
    """Of the figure's axis; without one there is no figure."""
    top: float | None = None
    """Where the axis ends, if that is known."""


MEASURES = (
    GridMeasure("throughput", lambda _: "service_rate", "units/s"),
    GridMeasure("actual", lambda _: "actual_rate"),
    GridMeasure("jain", lambda _: "jain", "Jain's index", top=1.03),
    GridMeasure("p50", lambda scenario: latency(scenario, 50), "P50, s"),
    GridMeasure("p99", lambda scenario: latency(scenario, 99), "P99, s"),
    GridMeasure("hit-rate", lambda _: "hit_rate", "hit rate"),
    GridMeasure("difference", lambda _: "difference"),
    GridMeasure("imbalance", lambda _: "imbalance"),
)


def _rows(grid: Grid, measure: GridMeasure) -> list[dict[str, str]]:
    return [
        {"workload": _workload(point[0]), "gpus": f"{point[1]}"}
        | {name.replace("-", "_"): _entry(grid.get(point, name), measure.path(point[0])) for name in COLUMNS}
        for point in grid.points
    ]


def _entry(result: Result | None, path: str) -> str:
    if result is None:
        return shown(None)
    return shown_latency(result, path) if path.endswith("_s") else result.shown(path)


def _draw_panels(grid: Grid, measure: GridMeasure) -> Callable[["Canvas"], None]:
    """A panel for each workload, a line for each scheduler."""

    def draw(canvas: "Canvas") -> None:
        axes = canvas.subplots(len(PANELS), len(PANELS[0]), squeeze=False)
        for row, names in zip(axes, PANELS, strict=True):
            for panel, scenario in zip(row, names, strict=True):
                lines: dict[str, Line] = {}
                for scheduler, label in COLUMNS.items():
                    there = [
                        (number, result.median(measure.path(scenario)))
                        for number in grid.numbers
                        if (result := grid.get((scenario, number), scheduler)) is not None
                    ]
                    lines[label] = [at for at, _ in there], [value for _, value in there]
                panel.set_xscale("log", base=2)
                style.scheduler_lines(panel, lines, marker="o", markersize=4)
                panel.set_xticks(grid.numbers, [f"{number}" for number in grid.numbers])
                panel.minorticks_off()
                style.label(panel, "D, GPUs", measure.unit, _workload(scenario), legend=False)
                panel.set_ylim(top=measure.top)
        lines_and_names = axes[0][0].get_legend_handles_labels()
        canvas.legend(*lines_and_names, loc="outside lower center", ncols=len(COLUMNS), fontsize=8)

    return draw
