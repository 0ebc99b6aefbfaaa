"""DLPM, Figure 7: three kinds of programs, two kinds of misbehaviour, one to eight A100s, five schedulers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from workloads.clients import SCENARIOS, Client
from workloads.experiments import dlpm_fig7_setting as setting
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
    Verdict,
    shown,
    verdict,
)
from workloads.experiments.curves import Line
from workloads.experiments.dlpm_fig7_setting import KINDS, SCHEDULERS, is_cut, latency, shown_latency
from workloads.records import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

ROWS = (("qa-s1", "tot-s1", "judge-s1"), ("qa-s2", "tot-s2", "judge-s2"))
"""Scenarios as the panels lie: more requests above, longer prefixes below."""

SEEDS = ("0", "1", "2")
"""With fewer GPUs than the most; there it is one."""

LABELS = [chosen.label for chosen in SCHEDULERS.values()]


class Figure7(Simulated):
    id = "dlpm-fig7"
    title = "Throughput, fairness and latency with one misbehaving client, from one to eight A100s"
    source = "DLPM, Figure 7"
    about = (
        "Llama-3.1-8B; three well-behaved clients and a bad one, who sends more requests (S1) or longer prefixes "
        "(S2), as in Tables 2 and 3; Gamma arrivals for 4 minutes, then up to 4 more for what the well-behaved "
        "clients still wait for. Each client sends an equal share of what the cluster completes of well-behaved "
        "programs (QA's bad client in S1 four times that), so rates grow with D, the well-behaved clients alone ask "
        "for 3/4 of the cluster, and what makes the bad one bad is overload. Q^u is what four requests of a "
        "well-behaved client are charged by a replica, Q^w what sixteen of its programs are charged by the router, "
        "where prompts count in full. A replica runs 256 requests at most. Rates, durations, clients, limits and "
        "quanta are not in the paper: these are one rule for all workloads. cache_aware is sglang-router's algorithm "
        "over replicas with LPM; with one replica it is RR+LPM, as is Preble. Three seeds, medians; on 8 GPUs one."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        duration_s, numbers = (240.0, (1, 2, 4, 8)) if full else (15.0, (1, 2))
        return [
            setting.cell(
                f"{scenario}-d{replicas}-{scheduler}",
                scenario,
                scheduler,
                replicas,
                duration_s,
                seeds=SEEDS if full and replicas < max(numbers) else SEEDS[:1],
            )
            for replicas in numbers
            for row in ROWS
            for scenario in row
            for scheduler, chosen in SCHEDULERS.items()
            if chosen.single or replicas > 1
        ]

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        return setting.clients(cell, seed)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return setting.observe(run)

    def report(self, results: Mapping[str, Result]) -> Report:
        grid = Grid(results)
        return Report(
            claims=[*_throughput(grid), *_fairness(grid), *_latency(grid), *_round_robin(grid)],
            tables=[_ratios(grid), *(_table(grid, measure) for measure in MEASURES)],
            figures=[
                Figure(measure.name, measure.caption, _panels(grid, measure), (10.5, 5.6))
                for measure in MEASURES
                if measure.drawn
            ],
            notes=NOTES,
        )


# ---- results by where they stand in the figure

Point = tuple[str, int]
"""Scenario and number of replicas."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of two schedulers at one point; more than that if `at_least`."""

    point: Point
    value: float
    at_least: bool = False


class Grid:
    """All results of the figure."""

    def __init__(self, results: Mapping[str, Result]) -> None:
        self._results = results
        self.numbers = sorted({result.cell.site.replicas for result in results.values()})
        self.points: list[Point] = [(name, number) for row in ROWS for name in row for number in self.numbers]

    def get(self, point: Point, scheduler: str) -> Result | None:
        """None where a scheduler has no point of its own."""
        return self._results.get(f"{point[0]}-d{point[1]}-{scheduler}")

    def ratios(self, path: Callable[[str], str], over: str, under: str) -> list[Ratio]:
        """One scheduler's number over another's, wherever both have one; `path` is where a scenario's is kept. Over
        a latency that was cut off there is no ratio."""
        found = []
        for point in self.points:
            one, other, at = self.get(point, over), self.get(point, under), path(point[0])
            if one is None or other is None or (at.endswith("_s") and is_cut(other, at)):
                continue
            more, less = one.median(at), other.median(at)
            if more is not None and less:
                found.append(Ratio(point, more / less, at.endswith("_s") and is_cut(one, at)))
        return found

    def latencies(self, over: str, under: str = "d2lpm") -> list[Ratio]:
        """Ratios of both percentiles of the well-behaved clients' latency."""
        halves = (MEASURES_BY_NAME[name].path for name in ("p50", "p99"))
        return [one for path in halves for one in self.ratios(path, over, under)]

    def rates(self, under: str, over: str = "d2lpm") -> list[Ratio]:
        """Ratios of the service rate."""
        return self.ratios(lambda _: "service_rate", over, under)


def place(point: Point) -> str:
    """A point in words."""
    scenario, number = point
    return f"{scenario[-2:].upper()} {KINDS[SCENARIOS[scenario].app].title}, D = {number}"


def told(ratios: Sequence[Ratio]) -> str:
    """The largest of some ratios, where it is, and their mean."""
    if not ratios:
        return "–"
    most = max(ratios, key=lambda one: one.value)
    bound = "more than " if most.at_least else ""
    below = sum(one.value < 1 for one in ratios)
    return (
        f"up to {bound}{most.value:.2f}× ({place(most.point)}), mean {fmean(one.value for one in ratios):.2f}×, "
        f"below 1 at {below} of {len(ratios)} points"
    )


def up_to(ratios: Sequence[Ratio], paper: float, paper_mean: float | None = None) -> Verdict:
    """Of "up to so many times as much": whether the largest ratio is at least 3/4 of the paper's, and so the mean, or
    above 1 where the paper has none; in part where the mean is above 1 and some gain at least a quarter."""
    most = max((one.value for one in ratios), default=0.0)
    mean = fmean(one.value for one in ratios) if ratios else 0.0
    near = most >= 0.75 * paper and (paper_mean is None or mean >= 0.75 * paper_mean)
    return verdict(near and mean > 1, partly=most >= 1.25 and mean > 1)


# ---- claims


def _throughput(grid: Grid) -> list[Claim]:
    preble = grid.rates("preble")
    behind = [one for one in preble if one.value < 0.99]
    least = min(preble, key=lambda one: one.value, default=None)
    named = f", D2LPM at least {least.value:.2f}× ({place(least.point)})" if least is not None else ""
    return [
        Claim(
            f"D2LPM's throughput beside {label}'s",
            f"up to {paper:.2f}×",
            told(grid.rates(key)),
            up_to(grid.rates(key), paper),
        )
        for key, label, paper in (("vtc", "VTC", 2.87), ("rr", "RR+LPM", 2.22))
    ] + [
        Claim(
            "D2LPM's throughput is at least Preble's but for QA with longer documents on 8 GPUs",
            "Preble ahead at 1 of 18 points",
            f"Preble ahead by more than 1 % at {len(behind)} of {len(preble)} points{named}",
            verdict(
                bool(preble) and {one.point for one in behind} <= {("qa-s2", 8)},
                partly=bool(preble) and all(one.value >= 0.9 for one in preble),
            ),
            WHY_PREBLE_THROUGHPUT,
        )
    ]


def _fairness(grid: Grid) -> list[Claim]:
    return [
        _order(grid, "vtc", "d2lpm", "VTC's Jain's index is at least D2LPM's", ">=", WHY_JAIN_VTC),
        _order(grid, "d2lpm", "preble", "D2LPM's Jain's index is above Preble's", ">", WHY_JAIN_PREBLE),
        _order(grid, "preble", "rr", "Preble's Jain's index is slightly above RR+LPM's", ">", WHY_JAIN_RR),
    ]


_SAME = 0.005
"""Jain's indices so close are equal."""


def _order(grid: Grid, above: str, below: str, text: str, sign: str, why: str) -> Claim:
    pairs = [
        (one.number("jain"), other.number("jain"))
        for point in grid.points
        if (one := grid.get(point, above)) is not None and (other := grid.get(point, below)) is not None
    ]
    holds = sum(one >= other - _SAME if sign == ">=" else one > other + _SAME for one, other in pairs)
    means = [fmean(column) for column in zip(*pairs, strict=True)] or [0.0, 0.0]
    return Claim(
        text,
        f"{SCHEDULERS[above].label} {sign} {SCHEDULERS[below].label}",
        f"at {holds} of {len(pairs)} points; means {means[0]:.2f} and {means[1]:.2f}",
        verdict(holds == len(pairs) > 0, partly=holds * 2 > len(pairs) and means[0] >= means[1]),
        why,
    )


def _latency(grid: Grid) -> list[Claim]:
    found = []
    for key, label, paper, mean, why in (
        ("preble", "Preble", 7.18, 2.90, WHY_PREBLE_LATENCY),
        ("rr", "RR+LPM", 9.55, 4.06, ""),
        ("vtc", "VTC", 7.96, 2.98, ""),
    ):
        ratios = grid.latencies(key)
        points = 2 * sum(grid.get(point, key) is not None for point in grid.points)
        unknown = f"; {points - len(ratios)} are not known: D2LPM's own run was cut off"
        found.append(
            Claim(
                f"Latency (P50 and P99) of well-behaved clients under {label}, beside D2LPM's",
                f"up to {paper:.2f}×, mean {mean:.2f}×",
                told(ratios) + (unknown if len(ratios) < points else ""),
                up_to(ratios, paper, mean),
                why,
            )
        )
    return found


def _round_robin(grid: Grid) -> list[Claim]:
    few, many = grid.get(("tot-s2", 4), "rr"), grid.get(("tot-s2", 8), "rr")
    if few is None or many is None:
        return []
    slower = many.number("service_rate") / few.number("service_rate")
    hits = [result.number("hit_rate") for result in (few, many)]
    alone = grid.get(("tot-s2", 1), "rr")
    first = f"{alone.number('hit_rate'):.0%} at D = 1, " if alone is not None else ""
    return [
        Claim(
            "RR+LPM's throughput on trees with longer questions is lower on 8 GPUs than on 4",
            "lower",
            f"{slower:.2f}× that of 4",
            verdict(slower < 1),
            WHY_RR_SCALING,
        ),
        Claim(
            "Its hit rate falls, since round robin keeps no tree in one place",
            "from 95 % to 50 %",
            f"{first}{hits[0]:.0%} at D = 4, {hits[1]:.0%} at D = 8",
            verdict(hits[1] < hits[0] and hits[1] <= 0.6, partly=hits[1] < hits[0] and hits[1] <= 0.8),
            WHY_RR_SCALING,
        ),
    ]


WHY_PREBLE_THROUGHPUT = (
    "Two things. The service rate counts prompts in full, and the bad client's are cheap where many of its "
    "requests share them: D2LPM holds it back and so serves fewer of these (judge, S1). And moving a client "
    "whose credit is spent costs a hit now and then: of QA's prompts 86.3 to 86.9 % are cached where Preble "
    "has 87.2 or 87.3 %, so up to 8 % more is to compute. That is what the paper saw at one point. Preble is "
    "at its best here: it hears from the replicas what they hold, and it moves load, while in the paper it "
    "sent everything to one GPU for minutes. Trees go to D2LPM."
)
WHY_PREBLE_LATENCY = (
    "Preble is at its best here, as said of throughput. And a bad client with longer prefixes (S2) overloads little "
    "while they are cached: judgements keep up under both, and there Preble's P99 is the lower one by up to a third, "
    "for D2LPM moves clients and finds less cached."
)
WHY_JAIN_VTC = (
    "Not for judgements of S1 on up to four GPUs, where VTC finds far fewer of the prompts cached and so leaves "
    "the well-behaved clients backlogged too. Then all receive equal work (the index of actual service is 0.99 "
    "and more), which is more service with prompts in full for the bad client, whose prompts are shared by "
    "seventeen requests. Elsewhere it is below by less than seeds differ."
)
WHY_JAIN_PREBLE = (
    "Not in part of S2. Judgements overload nothing as long as prefixes are kept, so all clients have what "
    "they ask for under both. With trees the ten times longer questions set the index: all clients' trees are "
    "served, and the bad one's are four times as much service."
)
WHY_JAIN_RR = (
    "Preble's replicas run LPM here, as RR+LPM's do. Its queue of ten groups by hit rate, to which the paper "
    "owes the difference, is not part of this comparison: it is placement alone that differs."
)
WHY_RR_SCALING = (
    "The hit rate falls as in the paper, and each of eight GPUs serves half of what one serves alone; all "
    "eight together still serve more than four. Two things that the paper's engine may have had do not change "
    "this: FCFS in place of LPM, to which SGLang turns when more than 128 requests wait, and a pool of "
    "100,000 tokens (1.5 and 1.6 times as much on 8 GPUs as on 4). How its throughput was timed, with or "
    "without the last stragglers, is not told."
)

NOTES = (
    "A ratio of latencies under overload is no constant: it grows with the time that the overload lasts, "
    "since what waits behind the bad client's backlog waits the longer. `dlpm-fig7-load` has the ratios for "
    "2, 4 and 8 minutes. From below, a tree's latency is bounded by its four answers in a row in a full "
    "batch, so trees have smaller ratios than QA's first tokens.",
    "QA's ratios beside RR+LPM and VTC are larger than the paper's largest. All eight questions about a document "
    "come at once here, so dealing requests out in turn has the document computed on up to eight GPUs: no prompt "
    "is cached at D = 8. The paper does not say how its questions arrive.",
    "VTC's P99 is the lower one for trees of S1 on one and two GPUs. It spreads a client over all GPUs, "
    "while D2LPM keeps a tree where its prefix is as long as the client has credit there, behind whatever "
    "else of the client is there. With a sixteenth of Q^w this is gone, and a part of the hits with it: see "
    "`dlpm-fig7-load`. Where nothing is overloaded (judge, S2) Preble's and cache_aware's P99 is lower by up "
    "to a third, for they keep more prefixes.",
    "cache_aware places about as well as Preble: as much is cached, and nobody is protected.",
)


# ---- tables and plots


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of each run. `path` is where a scenario's is kept."""

    name: str
    title: str
    caption: str
    unit: str
    path: Callable[[str], str]
    drawn: bool = True
    top: float | None = None
    """Where its axis ends, if that is known."""


MEASURES = (
    Measure(
        "throughput",
        "Service rate, units/s",
        "Service rate of all clients while programs arrive.",
        "units/s",
        lambda _: "service_rate",
    ),
    Measure(
        "actual",
        "Actual service rate (extend tokens and outputs), units/s",
        "",
        "units/s",
        lambda _: "actual_rate",
        drawn=False,
    ),
    Measure(
        "jain",
        "Jain's index of the clients' service rates",
        "Jain's index, over the time that all clients are active.",
        "Jain's index",
        lambda _: "jain",
        top=1.03,
    ),
    Measure(
        "p50",
        "P50 latency of the well-behaved clients, s (of QA: TTFT; > where the run ended before)",
        "P50 of the well-behaved clients: a program's time, of QA the time to first token.",
        "P50, s",
        lambda scenario: latency(scenario, 50),
    ),
    Measure(
        "p99",
        "P99 latency of the well-behaved clients, s (of QA: TTFT; > where the run ended before)",
        "P99 of the well-behaved clients: a program's time, of QA the time to first token.",
        "P99, s",
        lambda scenario: latency(scenario, 99),
    ),
    Measure("hit-rate", "Hit rate", "Part of the prompts that was cached.", "hit rate", lambda _: "hit_rate"),
    Measure(
        "difference",
        "Largest difference of actual service between clients while both are backlogged, units",
        "",
        "units",
        lambda _: "difference",
        drawn=False,
    ),
    Measure(
        "imbalance",
        "Prompt tokens computed by the busiest replica over the average",
        "",
        "×",
        lambda _: "imbalance",
        drawn=False,
    ),
)

MEASURES_BY_NAME = {measure.name: measure for measure in MEASURES}


def _ratios(grid: Grid) -> Table:
    rows: list[Sequence[str | float | None]] = []
    for what, key, ratios, paper in (
        ("throughput", "vtc", grid.rates("vtc"), "up to 2.87"),
        ("throughput", "rr", grid.rates("rr"), "up to 2.22"),
        ("throughput", "preble", grid.rates("preble"), "1 or more, but for one point"),
        ("throughput", "cache-aware", grid.rates("cache-aware"), None),
        ("latency", "vtc", grid.latencies("vtc"), "up to 7.96, mean 2.98"),
        ("latency", "rr", grid.latencies("rr"), "up to 9.55, mean 4.06"),
        ("latency", "preble", grid.latencies("preble"), "up to 7.18, mean 2.90"),
        ("latency", "cache-aware", grid.latencies("cache-aware"), None),
    ):
        values = [one.value for one in ratios]
        if values:
            most = max(ratios, key=lambda one: one.value)
            bound = "> " if most.at_least else ""
            rows.append(
                (
                    what,
                    SCHEDULERS[key].label,
                    f"{bound}{most.value:.2f}",
                    place(most.point),
                    f"{fmean(values):.2f}",
                    f"{min(values):.2f}",
                    paper,
                )
            )
    return Table(
        "D2LPM's gain: its throughput over another's, another's latency over its own",
        ("of", "beside", "most", "where", "mean", "least", "paper"),
        rows,
    )


def _table(grid: Grid, measure: Measure) -> Table:
    return Table(
        measure.title,
        ("workload", "D", *LABELS),
        [
            (
                place(point).split(",")[0],
                f"{point[1]}",
                *(_entry(grid.get(point, scheduler), measure.path(point[0])) for scheduler in SCHEDULERS),
            )
            for point in grid.points
        ],
    )


def _entry(result: Result | None, path: str) -> str:
    if result is None:
        return shown(None)
    return shown_latency(result, path) if path.endswith("_s") else result.shown(path)


def _panels(grid: Grid, measure: Measure) -> Callable[["Canvas"], None]:
    """A panel for each workload, a line for each scheduler."""

    def draw(canvas: "Canvas") -> None:
        axes = canvas.subplots(len(ROWS), len(ROWS[0]), squeeze=False)
        for row, names in zip(axes, ROWS, strict=True):
            for panel, scenario in zip(row, names, strict=True):
                lines: dict[str, Line] = {}
                for scheduler, chosen in SCHEDULERS.items():
                    there = [
                        (number, result.median(measure.path(scenario)))
                        for number in grid.numbers
                        if (result := grid.get((scenario, number), scheduler)) is not None
                    ]
                    lines[chosen.label] = [at for at, _ in there], [value for _, value in there]
                panel.set_xscale("log", base=2)
                style.scheduler_lines(panel, lines, marker="o", markersize=4)
                panel.set_xticks(grid.numbers, [f"{number}" for number in grid.numbers])
                panel.minorticks_off()
                title = f"{scenario[-2:].upper()} {KINDS[SCENARIOS[scenario].app].title}"
                style.label(panel, "D, GPUs", measure.unit, title, legend=False)
                panel.set_ylim(top=measure.top)
        lines_and_names = axes[0][0].get_legend_handles_labels()
        canvas.legend(*lines_and_names, loc="outside lower center", ncols=len(SCHEDULERS), fontsize=8)

    return draw
