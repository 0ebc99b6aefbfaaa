"""Runs side by side, as tables. What each number means is in `measures`. What was not measured is None, and is printed
as a dash, never as 0.
"""

from collections.abc import Sequence

from rich.table import Table

from workloads.measures import METRICS, ComparisonRow, Summary, ratios
from workloads.table import Percentile

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


def add_columns(table: Table, names: str, numbers: str | None = None) -> None:
    """Columns with these heads, separated by `|`; the first of them is of names, if `numbers` are not given apart."""
    if numbers is None:
        names, _, numbers = names.partition("|")
    for head in names.split("|"):
        table.add_column(head)
    for head in numbers.split("|"):
        table.add_column(head, justify="right")


COLUMNS = {
    "tokens/s": "throughput_tokens_per_s",
    "service/s": "service_rate",
    "actual/s": "actual_rate",
    "Jain": "jain",
    "Jain actual": "jain_actual",
    "P50 s": "well_behaved_p50_s",
    "P99 s": "well_behaved_p99_s",
    "hit rate": "hit_rate",
    "difference": "service_difference",
    "bound": "bound",
    "lag": "service_lag",
    "failed": "failed",
}


def comparison_table(table: Sequence[ComparisonRow]) -> Table:
    view = Table(title="medians over repeats", title_justify="left")
    add_columns(view, "workload|scheduler", "|".join(COLUMNS))
    last = None
    for row in sorted(table, key=lambda row: str(row["workload"])):
        if last not in (None, row["workload"]):
            view.add_section()
        last = row["workload"]
        open_ended = {f"P{p} s" for p in (50, 99) if row[f"p{p}_at_least"]}
        cells = (
            ("≥ " if head in open_ended else "") + number(row[measure]) for head, measure in COLUMNS.items()
        )
        view.add_row(str(row["workload"]), str(row["scheduler"]), *cells)
    return view


def ratio_table(table: Sequence[ComparisonRow], scheduler: str) -> Table:
    """`scheduler` over the best of the others, measure by measure."""
    view = Table(
        title=f"{scheduler} / best of the others (below 1 is better for latency and difference)",
        title_justify="left",
    )
    heads = (measure.removeprefix("well_behaved_").replace("_", " ") for measure in METRICS)
    add_columns(view, "workload", "|".join(heads))
    for workload, by_measure in ratios(table, scheduler).items():
        view.add_row(workload, *(number(by_measure[measure]) for measure in METRICS))
    return view


def client_table(summary: Summary) -> Table:
    view = Table(title=f"{summary.scheduler} on {summary.workload}", title_justify="left")
    add_columns(
        view, "client|programs|finished|service/s|actual/s|hit rate|P50 s|P99 s|TTFT P50 s|TTFT P99 s"
    )
    for name, client in summary.clients.items():
        view.add_row(
            name if client.well_behaved else f"{name} (misbehaves)",
            str(client.programs),
            str(client.finished),
            number(client.service_rate),
            number(client.actual_rate),
            number(client.hit_rate),
            *(shown(p) for p in (client.p50, client.p99, client.ttft_p50, client.ttft_p99)),
        )
    return view
