"""VTC, Figures 12, 13, 14 and 18, Tables 2 and 3: a trace of 27 clients, a few of which send most of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import TYPE_CHECKING

from sglang_fair.core.cost import make_cost
from workloads.clients import Client
from workloads.experiments import style
from workloads.experiments import vtc_setting as vtc
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import Cell, Json, Result, Simulated, Size, TrafficSpec
from workloads.programs.codec import PackedCodec
from workloads.programs.prose import seeded
from workloads.records import Run
from workloads.traces import Trace, arena

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

LIMITS = (5, 10, 15, 20, 30)
"""Requests a minute that RPM allows a client."""

SCHEDULERS: Mapping[str, tuple[str, str]] = {
    "FCFS": ("fcfs", ""),
    "LCF": ("lcf", ""),
    "VTC": ("vtc", ""),
    "VTC (predict)": ("vtc-predict", ""),
    "VTC (oracle)": ("vtc-oracle", ""),
    **{f"RPM({limit})": ("rpm", f"limit={limit}") for limit in LIMITS},
}
"""By their name in the paper: policy and options."""

COUNTING = ("LCF", "VTC", "VTC (predict)", "VTC (oracle)")
"""Those that charge service, so that the cost function changes what they do."""

RANKS = (13, 14, 26, 27)
"""The clients that the paper draws, by number of requests; 27 sends most."""

LENGTH_S = 600.0
NOT_QUICK = ("RPM(10)", "RPM(15)", "RPM(20)")


def come_and_go(trace: Trace, seed: str) -> Trace:
    """The same requests, but every other client sends all of its own within 0.3 to 0.7 of the time. Rates in the
    authors' trace are "highly dynamic", and a third of its most active clients come minutes after the start."""
    spans: dict[str, tuple[float, float]] = {}
    for client in sorted({request.client for request in trace.requests}):
        rng = seeded(seed, "arena", client, "span")
        part = rng.uniform(0.3, 0.7) if rng.random() < 0.5 else 1.0
        spans[client] = rng.uniform(0.0, 1.0 - part) * trace.duration_s, part
    moved = []
    for request in trace.requests:
        start_s, part = spans[request.client]
        moved.append(replace(request, arrival_s=start_s + part * request.arrival_s))
    return replace(trace, requests=sorted(moved, key=lambda request: (request.arrival_s, request.client)))


class ArenaTrace(Simulated):
    id = "vtc-trace"

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s, seeds = vtc.extent(size) if size == "full" else (150.0, ("0",))
        sent = TrafficSpec("arena", {"duration_s": length_s})
        runs = [
            *((label, "linear") for label in SCHEDULERS if size == "full" or label not in NOT_QUICK),
            *((label, "profiled") for label in COUNTING),
        ]
        return [
            Cell(
                _cell(label, cost),
                vtc.site(*SCHEDULERS[label], cost=cost),
                sent,
                vtc.plan(length_s),
                seeds,
                label,
            )
            for label, cost in runs
        ]

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        whole = come_and_go(arena(seed=seed), seed)
        return whole.between(0.0, cell.traffic.arguments["duration_s"]).clients(PackedCodec(), seed=seed)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        sent = dict.fromkeys(run.manifest.clients, 0)
        for record in run.requests:
            sent[record.client] += 1
        ranked = [name for _, name in sorted((count, name) for name, count in sent.items())]
        drawn = {str(rank): ranked[rank - 1] for rank in RANKS if rank <= len(ranked)}
        found = vtc.observe(run, curves_of=list(drawn.values()))
        curves = {key: found["curves"][key] for key in ("times_s", "response_s")}
        kept = ("sent", "refused", "service", "waited_s")
        return {
            "clients": {name: {key: one[key] for key in kept} for name, one in found["clients"].items()},
            "tokens_per_s": found["tokens_per_s"],
            "difference": found["difference"],
            "curves": curves,
            "ranked": ranked,
            "drawn": drawn,
            "difference_profiled": vtc.tenths(vtc.difference(run, make_cost("profiled"))),
        }

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        linear = {label: results[_cell(label)] for label in SCHEDULERS if _cell(label) in results}
        profiled = {label: results.get(_cell(label, "profiled"), one) for label, one in linear.items()}
        return {
            "schedulers": {
                "linear": [one.cell.name for one in linear.values()],
                "profiled": [one.cell.name for one in profiled.values()],
                "charged": [profiled[label].cell.name for label in ("FCFS", *COUNTING)],
            },
            "limited": [one.number("tokens_per_s") for label, one in linear.items() if "RPM" in label],
            "waits": {name: _waits(result) for name, result in results.items()},
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        linear = {label: results[_cell(label)] for label in SCHEDULERS if _cell(label) in results}
        limits = {label: one for label, one in linear.items() if "RPM" in label and label != "RPM(10)"}
        return {
            "response": Drawing(_draw_responses({"FCFS": linear["FCFS"], "VTC": linear["VTC"]}), (8.4, 3.4)),
            "rpm-response": Drawing(_draw_responses(limits), (11.0, 3.2)),
            "rpm-throughput": Drawing(_draw_throughput(linear), (5.6, 3.4)),
        }


def _cell(label: str, cost: str = "linear") -> str:
    """The name of a scheduler's cell."""
    policy, options = SCHEDULERS[label]
    name = f"{policy}-{options.removeprefix('limit=')}" if options else policy
    return name if cost == "linear" else f"{name}.{cost}"


# ---- how long clients wait for a first token, by their rank in requests: s


def _waits(result: Result) -> dict[str, float]:
    """The mean over some clients, then the median over seeds. A client without a first token waits to the end."""

    def of(ranks: slice, reduce: Callable[[Sequence[float]], float] = fmean) -> float:
        return median(reduce(_wait(run, run["ranked"][ranks])) for run in result.runs)

    return {
        "light": of(slice(9)),
        "medium": of(slice(9, 17)),
        "heavy": of(slice(-2, None)),
        "all": of(slice(None)),
        "five_heaviest": of(slice(-5, None), median),
        "refused_percent": _refused(result),
    }


def _wait(run: Mapping[str, Json], names: Sequence[str]) -> list[float]:
    waits = (run["clients"][name]["waited_s"] for name in names)
    return [wait for wait in waits if wait is not None]


def _refused(result: Result) -> float:
    """Part of all requests, in percent."""
    parts: list[float] = []
    for run in result.runs:
        clients = run["clients"].values()
        parts.append(100 * sum(one["refused"] for one in clients) / sum(one["sent"] for one in clients))
    return median(parts)


# ---- plots


def _draw_responses(found: Mapping[str, Result]) -> Callable[["Canvas"], None]:
    def draw(canvas: "Canvas") -> None:
        panels = style.panels(canvas, len(found), share_y=True)
        for axes, one in zip(panels, found.values(), strict=True):
            drawn = one.first["drawn"]
            lines = {f"client of rank {rank}": one.curve("response_s", name) for rank, name in drawn.items()}
            style.client_lines(axes, lines)
        for axes, (label, one) in zip(panels, found.items(), strict=True):
            first = axes is panels[0]
            style.label(axes, vtc.TIME, vtc.RESPONSE if first else "", label, legend=first)
            style.spans(canvas, 0.0, one.cell.plan.duration_s)

    return draw


def _draw_throughput(found: Mapping[str, Result]) -> Callable[["Canvas"], None]:
    def draw(canvas: "Canvas") -> None:
        [axes] = style.panels(canvas, 1)
        limits = [limit for limit in LIMITS if f"RPM({limit})" in found]
        heights = [found[f"RPM({limit})"].median("tokens_per_s") for limit in limits]
        style.scheduler_lines(axes, {"RPM": (limits, heights)}, marker="o")
        for label, dashes in (("VTC", "-"), ("FCFS", ":")):
            height = found[label].number("tokens_per_s")
            axes.axhline(height, color=style.scheduler_colour(label), linestyle=dashes, label=label)
        style.label(axes, "limit, requests/min and client", "input and output tokens/s")

    return draw
