"""A comparison for people and for programs: tables, plots, `summary.json`, and one line of JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_fair.common.installed import missing_extra
from sglang_fair.common.provenance import machine
from workloads.measures import Summary
from workloads.records import Run
from workloads.report import ComparisonRow, comparison_table, ratio_table, ratios, rows
from workloads.runs.case import OURS


def print_tables(summaries: Sequence[Summary], console: Console) -> list[ComparisonRow]:
    """All schedulers, then ours over the best of the others. Returns the rows: medians over repeats."""
    table = rows(summaries)
    console.print(comparison_table(table, summaries))
    schedulers = {row["scheduler"] for row in table}
    if OURS in schedulers and len(schedulers) > 1:
        console.print(ratio_table(table, summaries, OURS))
    return table


def keep(
    folder: Path,
    runs: Sequence[Run],
    summaries: Sequence[Summary],
    comparison: Mapping[str, Any],
    more: Mapping[str, Any],
    console: Console,
) -> None:
    """Write plots and `summary.json`: the `comparison` as in the line of JSON, `more`, and each run's measures."""
    try:
        from workloads.plots import draw_all
    except ImportError as error:
        console.print(f"no plots: {missing_extra('matplotlib') or error}", highlight=False, markup=False)
    else:
        draw_all(runs, summaries, folder)
    kept = {
        "comparison": comparison,
        **more,
        "ratios": ratios(rows(summaries), summaries, OURS),
        "machine": machine(),
        "runs": [asdict(summary) for summary in summaries],
    }
    (folder / "summary.json").write_text(json.dumps(kept, indent=1, default=str) + "\n", encoding="utf-8")
    console.print(f"records, plots and summary.json: {folder}", highlight=False, soft_wrap=True)


def print_line(line: Mapping[str, Any], file: Path | None) -> None:
    """The comparison for programs: the last line of stdout, and of `file`."""
    text = json.dumps(line)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
