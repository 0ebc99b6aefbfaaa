"""Runs side by side: medians, ratios, tables, and `python -m workloads.report`, which makes them from record files.

What each number means is in `measures`. What was not measured is None, and is printed as a dash, never as 0.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table

from sglang_fair.common.installed import missing_extra
from sglang_fair.settings.commands import Argument, Mistake, Option
from sglang_fair.settings.commands import run as run_command
from workloads.measures import METRICS, ComparisonRow, Summary, extras, ratios, rows, summarize
from workloads.records import read
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


def comparison_table(table: Sequence[ComparisonRow], summaries: Sequence[Summary]) -> Table:
    """A row for each scheduler and workload."""
    view = Table(title="medians over repeats", title_justify="left")
    add_columns(
        view,
        "workload|scheduler",
        "tokens/s|service/s|actual/s|Jain|Jain actual|P50 s|P99 s|hit rate|difference|bound|lag|failed",
    )
    last = None
    for row in sorted(table, key=lambda row: str(row["workload"])):
        more = extras(summaries, str(row["scheduler"]), str(row["workload"]))
        if last not in (None, row["workload"]):
            view.add_section()
        last = row["workload"]
        p50_mark, p99_mark = ("≥ " if more[f"p{p}_at_least"] else "" for p in (50, 99))
        view.add_row(
            str(row["workload"]),
            str(row["scheduler"]),
            number(row["throughput_tokens_per_s"]),
            number(row["service_rate"]),
            number(more["actual_rate"]),
            number(row["jain"]),
            number(more["jain_actual"]),
            p50_mark + number(row["well_behaved_p50_s"]),
            p99_mark + number(row["well_behaved_p99_s"]),
            number(row["hit_rate"]),
            number(row["service_difference"]),
            number(row["bound"]),
            number(more["service_lag"]),
            number(more["failed"]),
        )
    return view


def ratio_table(table: Sequence[ComparisonRow], summaries: Sequence[Summary], scheduler: str) -> Table:
    """`scheduler` over the best of the others, measure by measure."""
    view = Table(
        title=f"{scheduler} / best of the others (below 1 is better for latency and difference)",
        title_justify="left",
    )
    heads = (measure.removeprefix("well_behaved_").replace("_", " ") for measure in METRICS)
    add_columns(view, "workload", "|".join(heads))
    for workload, by_measure in ratios(table, summaries, scheduler).items():
        view.add_row(workload, *(number(by_measure[measure]) for measure in METRICS))
    return view


def client_table(summary: Summary) -> Table:
    """One run, client by client."""
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


def find(paths: Sequence[Path]) -> list[Path]:
    """The record files among `paths` and in the folders among them."""
    files = []
    for path in paths:
        files += sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"no *.jsonl under {', '.join(map(str, paths))}")
    return files


def command(
    paths: Annotated[list[Path], Argument(metavar="PATH...", help="Record files, or folders of them.")],
    out: Annotated[
        Path | None, Option(metavar="DIR", help="Folder for the plots. [default: none are drawn]")
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="End with every run's measures, a JSON line each.")
    ] = False,
) -> int:
    """Tables and plots of recorded runs."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        runs = [run for path in find(paths) if (run := read(path)).end is not None]
    except (OSError, ValueError) as error:
        raise Mistake(str(error)) from None
    if not runs:
        raise Mistake("no run among these was finished")
    summaries = [summarize(run) for run in runs]
    for summary in summaries:
        console.print(client_table(summary))
    console.print(comparison_table(rows(summaries), summaries))
    if out is not None:
        if missing := missing_extra("matplotlib"):
            raise Mistake(missing)
        from workloads.plots import draw_all

        for path in draw_all(runs, summaries, out):
            console.print(f"wrote {path}")
    if as_json:
        for summary in summaries:
            print(json.dumps(asdict(summary)))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(command, "python -m workloads.report", arguments)


if __name__ == "__main__":
    sys.exit(main())
