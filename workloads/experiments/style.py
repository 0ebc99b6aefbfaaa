"""How experiments draw: each scheduler has one colour on the whole page, and there are a few kinds of plot."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from workloads.experiments.curves import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCHEDULERS: Mapping[str, str] = {
    "DLPM": "#1f5fa8",
    "D2LPM": "#1f5fa8",
    "D2LPM, stall bound": "#7fb0e0",
    "D2LPM by queues": "#12375f",
    "LMetric": "#8c6d1f",
    "VTC": "#d1682b",
    "VTC (predict)": "#e39b55",
    "VTC (±50%)": "#b8a12c",
    "VTC (oracle)": "#8c4a1d",
    "weighted VTC": "#8c4a1d",
    "LPM": "#3c8c4f",
    "RR+LPM": "#3c8c4f",
    "Preble": "#8a4ea0",
    "cache_aware": "#c2477f",
    "FCFS": "#777777",
    "LCF": "#2a9d8f",
    "DRR": "#6b705c",
    "RPM": "#b5838d",
}
"""By the name in the legend. VTC keeps its colour over several replicas, whatever the placement."""

CLIENTS = ("#20507d", "#d1682b", "#3c8c4f", "#8a4ea0", "#c2477f", "#8c6d1f", "#2a9d8f", "#777777")
"""For lines that are clients and not schedulers, in the clients' order."""


def scheduler_colour(label: str) -> str:
    """Raises KeyError for a scheduler without a colour: give it one above."""
    return SCHEDULERS[label]


def client_colour(place: int) -> str:
    """The colour of the client at that place."""
    return CLIENTS[place % len(CLIENTS)]


def lines(axes: "Axes", curves: Mapping[str, Line], colours: Mapping[str, str], **more: object) -> None:
    """One line for each curve, named in the legend. A missing value breaks the line."""
    for name, (times, values) in curves.items():
        gaps = [float("nan") if value is None else value for value in values]
        axes.plot(times, gaps, label=name, color=colours[name], linewidth=1.6, **more)  # type: ignore[arg-type]


def client_lines(axes: "Axes", curves: Mapping[str, Line]) -> None:
    """A line for each client, coloured by their order."""
    lines(axes, curves, {name: client_colour(place) for place, name in enumerate(curves)})


def scheduler_lines(axes: "Axes", curves: Mapping[str, Line], **more: object) -> None:
    """A line for each scheduler, in its colour."""
    lines(axes, curves, {name: scheduler_colour(name) for name in curves}, **more)


def label(axes: "Axes", x: str, y: str, title: str = "", *, legend: bool = True) -> None:
    """Name the axes, with units. A linear y axis begins at 0. This fixes the limits, so draw all panels that share an
    axis before the first is labelled."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title, fontsize=10)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)


def spans(figure: "Figure", start: float, end: float) -> None:
    """Show this part of the x axis in all panels."""
    for axes in figure.axes:
        axes.set_xlim(start, end)


def panels(figure: "Figure", columns: int, *, share_y: bool = False) -> "list[Axes]":
    """Axes side by side."""
    return list(figure.subplots(1, columns, squeeze=False, sharey=share_y)[0])


def bars(
    axes: "Axes",
    groups: Sequence[str],
    values: Mapping[str, Sequence[float | None]],
    *,
    unit: str,
    colours: Mapping[str, str] = SCHEDULERS,
    legend: bool = True,
) -> None:
    """A group of bars for each name on the x axis, with a bar for each scheduler (or client, as `colours` says)."""
    width = 0.8 / max(1, len(values))
    for place, (name, heights) in enumerate(values.items()):
        axes.bar(
            [group + (place - (len(values) - 1) / 2) * width for group in range(len(groups))],
            [float("nan") if height is None else height for height in heights],
            width=width * 0.92,
            label=name,
            color=colours[name],
        )
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(unit)
    axes.grid(visible=True, axis="y", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    if legend:
        axes.legend(fontsize=8)
