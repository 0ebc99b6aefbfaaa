"""A comparison's plots as PNG files: service over time, and latency."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sglang_fair.core.fairness import Curve
from workloads.measures import prices
from workloads.programs import Outcome
from workloads.records import Run
from workloads.table import Requests

_COLOURS = ("#1f5fa8", "#d1682b", "#3c8c4f", "#8a4ea0", "#777777", "#b8a12c", "#2aa0a8", "#b0476b")

MOST_LABELS = 24
"""A legend with more of them is left out."""


def draw_all(runs: Sequence[Run], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    schedulers = dict.fromkeys(run.manifest.scheduler for run in runs)
    colours = dict(zip(schedulers, cycle(_COLOURS), strict=False))
    by_workload: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_workload[run.manifest.workload].append(run)
    for workload, group in by_workload.items():
        first = [run for run in group if run.manifest.repeat == min(r.manifest.repeat for r in group)]
        _service(first, workload).savefig(folder / f"{workload}-service.png", dpi=130)
        _latency(group, workload, colours).savefig(folder / f"{workload}-latency.png", dpi=130)


def _is_good(run: Run, client: str) -> bool:
    return bool(run.manifest.clients.get(client, {}).get("well_behaved", True))


def _service(runs: Sequence[Run], workload: str) -> Figure:
    """Cumulative service of each client, a panel for each scheduler, on one scale."""
    figure = Figure(figsize=(4.2 * len(runs), 3.6), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    curves, unit = _curves(runs)
    for panel, run, of_clients in zip(panels, runs, curves, strict=True):
        for (name, curve), colour in zip(of_clients.items(), cycle(_COLOURS), strict=False):
            line = {"color": colour} if _is_good(run, name) else {"color": "black", "linestyle": "--"}
            panel.step((0.0, *curve.times_s), (0.0, *curve.totals), where="post", label=name, **line)
        panel.axvline(run.manifest.duration_s, color="#bbbbbb", linewidth=0.8)
        panel.set_title(run.manifest.scheduler, fontsize=10)
        panel.set_xlabel("s (line: arrivals end)")
    panels[0].set_ylabel(f"{unit} service, units")
    _legend(panels[0])
    figure.suptitle(f"{workload}: service received")
    return figure


def _curves(runs: Sequence[Run]) -> tuple[list[Mapping[str, Curve]], str]:
    """Each run's service by client, and what kind of service it is: actual, where all runs know it."""
    tables = [(Requests(run), prices(run)) for run in runs]
    actual = [table.curves(cost, "actual") for table, cost in tables]
    if all(actual):
        return [curves or {} for curves in actual], "actual"
    return [table.curves(cost) or {} for table, cost in tables], "client-side"


def _latency(runs: Sequence[Run], workload: str, colours: Mapping[str, str]) -> Figure:
    """Distribution of well-behaved clients' program latency. Programs that never finished keep a curve below 1."""
    figure = Figure(figsize=(5.4, 3.8), layout="constrained")
    panel: Axes = figure.subplots()
    latencies: dict[str, list[float]] = defaultdict(list)
    programs: dict[str, int] = defaultdict(int)
    for run in runs:
        for program in run.programs:
            if _is_good(run, program.client):
                programs[run.manifest.scheduler] += 1
                if program.t_done_s is not None and program.outcome == Outcome.OK:
                    latencies[run.manifest.scheduler].append(program.t_done_s - program.t_intended_s)
    for scheduler, count in programs.items():
        done = sorted(latencies[scheduler])
        shares = [(place + 1) / count for place in range(len(done))]
        panel.step((0.0, *done), (0.0, *shares), where="post", label=scheduler, color=colours[scheduler])
    panel.set_ylim(0, 1.02)
    panel.set_xlabel("latency of a program, s")
    panel.set_ylabel("share of all programs")
    panel.set_title(f"{workload}: well-behaved clients", fontsize=10)
    _legend(panel, loc="lower right")
    return figure


def _legend(panel: Axes, **style: Any) -> None:
    """A legend, if there is something to name and room for it."""
    if 0 < len(panel.get_legend_handles_labels()[1]) <= MOST_LABELS:
        panel.legend(**{"fontsize": 8, **style})
