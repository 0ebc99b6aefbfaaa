"""Runs side by side, as tables and figures. What each number means is in `measures`. What was not measured is None,
and is printed as a dash, never as 0.
"""

from collections import defaultdict
from collections.abc import Sequence

from rich.table import Table

from workloads.measures import METRICS, ComparisonRow, Summary, is_well_behaved, prices, ratios
from workloads.plots import Figure, Line, Panel
from workloads.programs import Outcome
from workloads.records import Run
from workloads.table import Percentile, Requests

DASH = "–"


def number(value: float | str | None, digits: int = 3) -> str:
    """`value` for a table: a dash for None, else `digits` significant digits, with thousands separated."""
    if value is None:
        return DASH
    if isinstance(value, str):
        return value
    if value and abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def shown(percentile: Percentile | None) -> str:
    """For a table; a lower bound is marked."""
    if percentile is None:
        return DASH
    return ("≥ " if percentile.at_least else "") + number(percentile.value_s)


def table_of(title: str, names: str, numbers: str | None = None) -> Table:
    """An empty table whose columns have these heads, separated by `|`; the first of them is of names, if `numbers` are
    not given apart."""
    table = Table(title=title, title_justify="left")
    if numbers is None:
        names, _, numbers = names.partition("|")
    for head in names.split("|"):
        table.add_column(head)
    for head in numbers.split("|"):
        table.add_column(head, justify="right")
    return table


COLUMNS = {
    "tokens/s": "throughput_tokens_per_s",
    "service/s": "service_rate",
    "actual/s": "actual_rate",
    "Jain": "jain",
    "Jain actual": "jain_actual",
    "P50 s": "well_behaved_p50_s",
    "P99 s": "well_behaved_p99_s",
    "program s": "program_mean_s",
    "spread": "program_spread",
    "hit rate": "hit_rate",
    "difference": "service_difference",
    "bound": "bound",
    "lag": "service_lag",
    "failed": "failed",
}


def comparison_table(table: Sequence[ComparisonRow]) -> Table:
    view = table_of("medians over repeats", "workload|scheduler", "|".join(COLUMNS))
    last = None
    for row in sorted(table, key=lambda row: str(row["workload"])):
        if last not in (None, row["workload"]):
            view.add_section()
        last = row["workload"]
        open_ended = {f"P{p} s" for p in (50, 99) if row[f"p{p}_at_least"]}
        if row["program_mean_at_least"]:
            open_ended.add("program s")
        cells = (
            ("≥ " if head in open_ended else "") + number(row[measure]) for head, measure in COLUMNS.items()
        )
        view.add_row(str(row["workload"]), str(row["scheduler"]), *cells)
    return view


def ratio_table(table: Sequence[ComparisonRow], scheduler: str) -> Table:
    """`scheduler` over the best of the others, measure by measure."""
    title = f"{scheduler} / best of the others (below 1 is better for latency and difference)"
    heads = (measure.removeprefix("well_behaved_").replace("_", " ") for measure in METRICS)
    view = table_of(title, "workload", "|".join(heads))
    for workload, by_measure in ratios(table, scheduler).items():
        view.add_row(workload, *(number(by_measure[measure]) for measure in METRICS))
    return view


def client_table(summary: Summary) -> Table:
    heads = "client|programs|finished|service/s|actual/s|hit rate|P50 s|P99 s|program s|TTFT P50 s|TTFT P99 s"
    view = table_of(f"{summary.scheduler} on {summary.workload}", heads)
    for name, client in summary.clients.items():
        view.add_row(
            name if client.well_behaved else f"{name} (misbehaves)",
            str(client.programs),
            str(client.finished),
            number(client.service_rate),
            number(client.actual_rate),
            number(client.hit_rate),
            *(
                shown(p)
                for p in (client.p50, client.p99, client.program_mean, client.ttft_p50, client.ttft_p99)
            ),
        )
    return view


def figures(runs: Sequence[Run]) -> list[Figure]:
    """For each workload its name with `-service`, each client's service over time in the first repeat, and with
    `-latency`, how long programs of well-behaved clients took."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.manifest.workload].append(run)
    found = []
    for workload, group in groups.items():
        first = [run for run in group if run.manifest.repeat == min(r.manifest.repeat for r in group)]
        found += [
            Figure(f"{workload}-service", "", [_service(first)]),
            Figure(f"{workload}-latency", "", [[_latency(group)]]),
        ]
    return found


def _service(runs: Sequence[Run]) -> list[Panel]:
    """Actual service, where all runs know it."""
    tables = [(Requests(run), prices(run)) for run in runs]
    unit, curves = "actual", [table.curves(cost, "actual") for table, cost in tables]
    if not all(curves):
        unit, curves = "client-side", [table.curves(cost) for table, cost in tables]
    panels = []
    for run, of_clients in zip(runs, curves, strict=True):
        good, bad = dict[str, Line](), dict[str, Line]()
        for name, curve in (of_clients or {}).items():
            lines = good if is_well_behaved(run, name) else bad
            lines[name] = (0.0, *curve.times_s), (0.0, *curve.totals)
        x = f"s (arrivals end at {run.manifest.duration_s:g})"
        panels.append(Panel(f"{unit} service, units", good, x, run.manifest.scheduler, dashed=bad))
    return panels


def _latency(runs: Sequence[Run]) -> Panel:
    """A curve of programs that never finished stays below 1."""
    took: dict[str, list[float | None]] = defaultdict(list)
    for run in runs:
        for one in run.programs:
            if is_well_behaved(run, one.client):
                is_done = one.t_done_s is not None and one.outcome == Outcome.OK
                took[run.manifest.scheduler].append(
                    (one.t_done_s or 0.0) - one.t_intended_s if is_done else None
                )
    lines: dict[str, Line] = {}
    for scheduler, times in took.items():
        done = sorted(one for one in times if one is not None)
        lines[scheduler] = (0.0, *done), [place / len(times) for place in range(len(done) + 1)]
    return Panel("part of all programs", lines, "latency of a well-behaved client's program, s", top=1.02)
