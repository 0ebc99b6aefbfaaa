"""What the experiments beside DLPM's Figure 7 share: its second testbed, curves over time, and plots.

The second testbed is Llama-3.2-3B on A10G, whose pool holds 129,000 tokens beside the model. At most 256 requests
run at a time and prompts are cut into chunks of 2,048 tokens, as SGLang does by itself on GPUs of 24 GB. Rates are
given in parts of `capacity_per_s`, what one such GPU completes of a burst, start and tail included; the
well-behaved clients alone ask for less than that. Quanta follow a rule of their own, not Figure 7's: Q^u is what one
program is charged, Q^w four times what it is charged in full.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workloads.experiments import style
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import Cell, Json, Result
from workloads.experiments.dlpm_fig7_setting import KINDS, SCHEDULERS, observe
from workloads.experiments.senders import FromSenders
from workloads.experiments.store import rounded
from workloads.records import Run
from workloads.session import Plan
from workloads.simulation import Site
from workloads.windows import Windows, regular_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

A10G: Mapping[str, Json] = {
    "gpu": "a10g",
    "model": "llama-3.2-3b",
    "max_running": 256,
    "chunked_prefill_tokens": 2048,
}

POLICIES = {"dlpm": "DLPM", "lpm": "LPM", "vtc": "VTC"}
"""With one replica, by their labels."""


class A10GExperiment(FromSenders):
    """An experiment on the second testbed, whose records have what Figure 7 measures."""

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return observe(run)


@dataclass(frozen=True, slots=True)
class A10GProgramKind:
    """A kind of program on one A10G. Charges are as in `dlpm_fig7_setting.ProgramKind`."""

    capacity_per_s: float
    """Programs a second."""
    charged: float
    charged_in_full: float

    @property
    def quanta(self) -> dict[str, float]:
        """Q^u and Q^w, units."""
        return {"quantum": self.charged, "worker_quantum": 4 * self.charged_in_full}

    def rate_per_s(self, parts: float) -> float:
        """Programs a second that ask for `parts` times what one GPU completes."""
        return float(f"{parts * self.capacity_per_s:.4g}")


TOT2 = A10GProgramKind(0.24, KINDS["tot"].charged, KINDS["tot"].charged_in_full)
TOT3 = A10GProgramKind(0.062, 64_600.0, 219_000.0)
JUDGE = A10GProgramKind(0.9, KINDS["judge"].charged, KINDS["judge"].charged_in_full)
CHAT = A10GProgramKind(13.0, 440.0, 510.0)
"""Conversations, of which 64 run at a time."""


def a10g(scheduler: str, replicas: int = 1, **more: Json) -> Site:
    """A10Gs under one of Figure 7's schedulers, prompts first as in the paper. `more` are fields of the site."""
    chosen = SCHEDULERS[scheduler]
    given = {**A10G, "placement": chosen.placement, "policy": chosen.policy, "stall_ms": 0.0, **more}
    return Site(replicas=replicas, **given)


def plan(duration_s: float, programs: int | None = None, *, drain_s: float | None = 0.0) -> Plan:
    """Programs arrive for `duration_s`, at most `programs` of each client. The run ends `drain_s` later, or with the
    last program."""
    return Plan(
        duration_s,
        programs_per_client=programs,
        drain_s=drain_s,
        connections_per_client=1_000_000,
        sample_s=2.0,
        token_step_s=2.0,
    )


# ---- what is kept of a run


def observe_curves(run: Run, *, window_s: float = 60.0, step_s: float = 10.0) -> dict[str, Json]:
    """What Figure 7 measures, the time at which the run ended, and each client's curves over the whole run."""
    assert run.end is not None, "a run that has ended"
    client_side, actual = (Windows(run, side=side, window_s=window_s) for side in ("client", "actual"))
    times = regular_times(run.end.t_s, step_s=step_s, window_s=window_s)
    rates, computed = client_side.service_rate(times), actual.service_rate(times)
    responses = client_side.response_time(times)
    return observe(run) | {
        "end_s": run.end.t_s,
        "curves": {
            "times_s": list(times),
            "service": {name: rounded(rates[name] or (), PLOTTED) for name in client_side.clients},
            "actual": {name: rounded(computed[name] or (), PLOTTED) for name in client_side.clients},
            "response_s": {name: rounded(responses[name], PLOTTED) for name in client_side.clients},
        },
    }


PLOTTED = 4
"""Significant digits of a curve."""


# ---- plots

PANELS: Mapping[str, str] = {
    "response_s": "response time, s",
    "actual": "actual service, units/s",
    "service": "service, units/s",
}
"""Rows of the papers' figures over time."""


def over_time(
    results: Mapping[str, Result], inches: tuple[float, float], rows: Sequence[str] = tuple(PANELS)
) -> Drawing:
    """A column for each named result, a row for each kind of curve."""

    def draw(canvas: "Canvas") -> None:
        grid = canvas.subplots(len(rows), len(results), squeeze=False, sharey="row")
        for row, what in enumerate(rows):
            for axes, result in zip(grid[row], results.values(), strict=True):
                clients = result.first["curves"][what]
                style.client_lines(axes, {name: result.curve(what, name) for name in clients})
            for place, (axes, title) in enumerate(zip(grid[row], results, strict=True)):
                style.label(
                    axes,
                    "time, s" if row == len(rows) - 1 else "",
                    PANELS[what] if place == 0 else "",
                    title if row == 0 else "",
                    legend=row == 0 and place == 0,
                )

    return Drawing(draw, inches)


Panel = tuple[str, Sequence[str]]
"""The unit of a panel of bars, and its groups."""


def draw_bars(canvas: "Canvas", panels: Mapping[Panel, Mapping[str, Sequence[float]]]) -> None:
    """Panels of bars side by side, with one legend."""
    for axes, ((unit, groups), values) in zip(style.panels(canvas, len(panels)), panels.items(), strict=True):
        style.bars(axes, groups, values, unit=unit, legend=False)
    canvas.axes[0].legend(fontsize=8, loc="lower left", framealpha=0.9)


def points(axes: "Axes", places: Mapping[str, tuple[float, float]]) -> None:
    """A point for each scheduler, in its colour."""
    for label, (x, y) in places.items():
        axes.plot([x], [y], "D", color=style.scheduler_colour(label), label=label, markersize=7)
