"""Curves, their numbers, and figures: panels of curves over time, of numbers over what was swept, or of bars. Each
scheduler has one colour on the whole page; other names have theirs by their order."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import inf
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Line: TypeAlias = tuple[Sequence[float], Sequence[float | None]]
"""Times, and values; None where the value is unknown."""


# ---- numbers of a curve in [start, end]; without a value there is none, so that no claim holds for lack of data


def between(line: Line, start: float = -inf, end: float = inf) -> list[float]:
    """The known values."""
    return [one for time, one in zip(*line, strict=True) if one is not None and start <= time <= end]


def average(line: Line, start: float = -inf, end: float = inf) -> float:
    """The mean value. Raises ValueError if no value is known, as do those below."""
    return fmean(_some(line, start, end))


def largest(line: Line, start: float = -inf, end: float = inf) -> float:
    return max(_some(line, start, end))


def variation(line: Line, start: float = -inf, end: float = inf) -> float:
    """The standard deviation over the mean. Raises ValueError if the mean is 0, too."""
    values = _some(line, start, end)
    if not (mean := fmean(values)):
        raise ValueError("the mean of a curve is 0: it has no variation")
    return pstdev(values) / mean


def _some(line: Line, start: float, end: float) -> list[float]:
    if not (values := between(line, start, end)):
        raise ValueError(f"a curve has no value from {start:g} to {end:g}")
    return values


# ---- figures

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
    "LPM": "#3c8c4f",
    "RR+LPM": "#3c8c4f",
    "Preble": "#8a4ea0",
    "cache_aware": "#c2477f",
    "FCFS": "#777777",
    "LCF": "#2a9d8f",
    "RPM": "#b5838d",
}
"""By the name in the legend. VTC keeps its colour over several replicas, whatever the placement."""

MOST_LABELS = 24
"""A legend with more of them is left out."""

OTHERS = ("#20507d", "#d1682b", "#3c8c4f", "#8a4ea0", "#c2477f", "#8c6d1f", "#2a9d8f", "#777777")


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    y: str
    lines: Mapping[str, Line] = field(default_factory=dict)
    """By their names in the legend. A missing value breaks a line."""
    x: str = "time, s"
    title: str = ""
    _: KW_ONLY
    dashed: Mapping[str, Line] = field(default_factory=dict)
    """Further lines: black, or in the colour of the line of the same name."""
    levels: Mapping[str, float] = field(default_factory=dict)
    """Horizontal lines."""
    swept: bool = False
    """Points that lines connect."""
    bars: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """A bar for each name in each of `groups`."""
    groups: Sequence[str] = ()
    log: str = ""
    """The axes that are logarithmic: "x", "y" or "xy"."""
    bottom: float | None = 0.0
    top: float | None = None


Panels: TypeAlias = Sequence[Sequence[Panel]]
"""Rows of panels."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels with a caption."""

    name: str
    """Within the experiment."""
    caption: str
    rows: Panels
    one_scale: bool = True
    """Whether those of a row have one scale where they have one unit."""

    @property
    def inches(self) -> tuple[float, float]:
        """Width and height."""
        columns = max(len(row) for row in self.rows)
        groups = max(len(panel.groups) for row in self.rows for panel in row)
        return max(6.0, 3.2 * columns + 0.8, 0.45 * columns * groups), 0.4 + 3.0 * len(self.rows)

    def draw(self, canvas: "Canvas") -> None:
        """On an empty matplotlib figure of `inches`."""
        rows = self.rows
        grid = canvas.subplots(len(rows), max(len(row) for row in rows), squeeze=False)
        for place, (panels, line) in enumerate(zip(rows, grid, strict=True)):
            for panel, axes in zip(panels, line, strict=True):
                _fill(axes, panel)
                _label(axes, panel)
            if len({panel.y for panel in panels}) == 1:
                top = max(axes.get_ylim()[1] for axes in line)
                for axes in line:
                    axes.set_ylim(top=top if self.one_scale else None)
                    axes.set_ylabel(panels[0].y if axes is line[0] else "")
            if place < len(rows) - 1 and rows[place + 1][0].x == panels[0].x:
                for axes in line:
                    axes.set_xlabel("")
        before: list[str] = []
        for axes in (axes for line in grid for axes in line):
            names = axes.get_legend_handles_labels()[1]
            if names not in ([], before) and len(names) <= MOST_LABELS:
                axes.legend(fontsize=8)
            before = names

    def save(self, path: Path, dpi: int = 130) -> None:
        """As a file. Equal figures give equal files. Raises ImportError without matplotlib."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure as Canvas

        with rc_context({"svg.hashsalt": "sglang-fair", "svg.fonttype": "none"}):
            canvas = Canvas(figsize=self.inches, layout="constrained")
            self.draw(canvas)
            metadata = {"Date" if path.suffix == ".svg" else "Software": None}
            canvas.savefig(path, dpi=dpi, metadata=metadata)


def _fill(axes: "Axes", panel: Panel) -> None:
    names = enumerate(panel.lines or panel.bars)
    colours = {name: SCHEDULERS.get(name, OTHERS[place % len(OTHERS)]) for place, name in names}
    marker = "o" if panel.swept else ""
    for name, (xs, ys) in panel.lines.items():
        axes.plot(xs, _gaps(ys), marker=marker, markersize=4, label=name, color=colours[name], linewidth=1.6)
    for name, (xs, ys) in panel.dashed.items():
        known = name in colours
        axes.plot(xs, _gaps(ys), "--", color=colours.get(name, "black"), linewidth=1.0,
                  label=None if known else name)  # fmt: skip
    for name, height in panel.levels.items():
        axes.axhline(height, color=SCHEDULERS.get(name, "black"), linewidth=1.0, linestyle=":", label=name)
    width = 0.8 / max(1, len(panel.bars))
    for place, (name, heights) in enumerate(panel.bars.items()):
        left = (place - (len(panel.bars) - 1) / 2) * width
        at = [group + left for group in range(len(panel.groups))]
        axes.bar(at, _gaps(heights), width * 0.92, label=name, color=colours[name])
    if panel.bars:
        axes.set_xticks(range(len(panel.groups)), list(panel.groups))
        if len(panel.groups) > 8:
            axes.tick_params(axis="x", labelrotation=60, labelsize=8)


def _label(axes: "Axes", panel: Panel) -> None:
    if "x" in panel.log:
        axes.set_xscale("log")
        swept = sorted({x for xs, _ in panel.lines.values() for x in xs})
        if swept and swept[-1] <= 1000:
            axes.set_xticks(swept, [f"{x:g}" for x in swept])
            axes.minorticks_off()
    if "y" in panel.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=panel.bottom, top=panel.top)
    axes.set_xlabel("" if panel.bars else panel.x)
    axes.set_ylabel(panel.y)
    axes.set_title(panel.title, fontsize=10)
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
