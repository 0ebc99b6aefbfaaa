"""A comparison for people and for programs: tables, plots, `summary.json`, and one line of JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_fair.common.installed import missing_extra
from sglang_fair.common.provenance import machine, versions
from workloads.measures import Summary, ratios, rows
from workloads.records import Run
from workloads.report import comparison_table, ratio_table
from workloads.runs.case import OURS


def show(
    name: str,
    runs: Sequence[Run],
    summaries: Sequence[Summary],
    console: Console,
    *,
    note: str,
    seed: int,
    more: Mapping[str, Any],
    folder: Path | None,
    kept: Mapping[str, Any],
    json_file: Path | None,
) -> None:
    """All schedulers, then ours over the best of the others, and the `note`. Plots of the `runs` and `summary.json`
    (with what is `kept` besides) go to the folder, if there is one. Last of all is the line of JSON, which ends with
    `more`, on stdout and in the file."""
    table = rows(summaries)
    console.print(comparison_table(table, summaries))
    schedulers = {row["scheduler"] for row in table}
    if OURS in schedulers and len(schedulers) > 1:
        console.print(ratio_table(table, summaries, OURS))
    console.print(note, highlight=False)
    line = {"bench": name, "rows": table, "versions": versions(), "seed": seed, **more}
    if folder is not None:
        _keep(folder, runs, summaries, {"comparison": line, **kept}, console)
    print_line(json.dumps(line), json_file)


def print_line(text: str, file: Path | None) -> None:
    """A result for programs: the last line of stdout, and of `file`."""
    print(text, flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")


def _keep(
    folder: Path,
    runs: Sequence[Run],
    summaries: Sequence[Summary],
    kept: Mapping[str, Any],
    console: Console,
) -> None:
    try:
        from workloads.plots import draw_all
    except ImportError as error:
        console.print(f"no plots: {missing_extra('matplotlib') or error}", highlight=False, markup=False)
    else:
        draw_all(runs, summaries, folder)
    found = {
        **kept,
        "ratios": ratios(rows(summaries), summaries, OURS),
        "machine": machine(),
        "runs": [asdict(summary) for summary in summaries],
    }
    (folder / "summary.json").write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
    console.print(f"records, plots and summary.json: {folder}", highlight=False, soft_wrap=True)
