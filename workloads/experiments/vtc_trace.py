"""VTC, Figures 12, 13, 14 and 18, Tables 2 and 3: a trace of 27 clients, a few of which send most of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from sglang_fair.core.cost import make_cost
from workloads.clients import Client
from workloads.experiments import style
from workloads.experiments import vtc_setting as vtc
from workloads.experiments.contract import (
    Cell,
    Claim,
    Figure,
    Json,
    Report,
    Result,
    Simulated,
    Size,
    Table,
    Traffic,
    verdict,
)
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
"""Those that charge service, so that the cost function makes a difference to what they do."""

RANKS = (13, 14, 26, 27)
"""The clients that the paper draws, by number of requests; 27 sends most."""

TABLE_2: Mapping[str, vtc.PaperRow] = {
    "FCFS": (759.97, 433.53, 32112.00, 777),
    "LCF": (750.49, 323.82, 29088.90, 778),
    "VTC": (368.40, 251.66, 6549.16, 779),
    "VTC (predict)": (365.47, 240.33, 5321.62, 773),
    "VTC (oracle)": (329.46, 227.51, 4475.76, 781),
    "RPM(5)": (143.86, 83.58, 1020.46, 340),
    "RPM(20)": (446.76, 195.71, 7449.79, 694),
    "RPM(30)": (693.66, 309.45, 24221.31, 747),
}
TABLE_3: Mapping[str, vtc.PaperRow] = {
    "FCFS": (743.23, 457.29, 26645.42, 777),
    "LCF": (709.35, 384.78, 23299.20, 778),
    "VTC": (707.35, 368.74, 21918.67, 780),
    "VTC (predict)": (617.22, 337.05, 11803.41, 778),
    "VTC (oracle)": (387.43, 277.18, 4541.57, 783),
    "RPM(5)": (230.78, 151.00, 823.15, 340),
    "RPM(20)": (445.34, 270.51, 5938.52, 694),
    "RPM(30)": (801.16, 377.22, 25980.39, 747),
}


def come_and_go(trace: Trace, seed: str) -> Trace:
    """The same requests, but every other client sends all of its own within 0.3 to 0.7 of the time: rates of
    the authors' trace are "highly dynamic", and a third of its most active clients come minutes after the
    start."""
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
    title = "A trace of 27 clients"
    source = "VTC, Figures 12, 13, 14 and 18, Tables 2 and 3"
    about = (
        "210 requests/min for 10 minutes, prompts of 136 and answers of 256 tokens in the mean. The authors' trace is "
        "lost: these are made from a seed, with its statistics (clients, their shares, lengths; every other client is "
        "there for a part of the time only). So tables compare in order and ratio, not in numbers. Table 3 "
        "counts service by the profiled cost, in tenths of its units."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s, seeds = (600.0, ("0", "1", "2")) if size == "full" else (150.0, ("0",))
        names = list(SCHEDULERS) if size == "full" else [n for n in SCHEDULERS if n not in _LEFT_OUT_IF_QUICK]
        sent = Traffic("arena", {"duration_s": length_s})
        cells = [
            Cell(_cell(label), vtc.site(*SCHEDULERS[label]), sent, vtc.plan(length_s), seeds)
            for label in names
        ]
        return cells + [
            Cell(
                _cell(label, "profiled"),
                vtc.site(*SCHEDULERS[label], cost="profiled"),
                sent,
                vtc.plan(length_s),
                seeds,
            )
            for label in COUNTING
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

    def report(self, results: Mapping[str, Result]) -> Report:
        linear = {label: results[_cell(label)] for label in SCHEDULERS if _cell(label) in results}
        profiled = {
            label: results[_cell(label, "profiled") if label in COUNTING else _cell(label)]
            for label in linear
        }
        return Report(
            claims=[*_table_2(linear), *_figure_12(linear), *_rpm(linear), *_table_3(profiled)],
            tables=[
                vtc.difference_table("Table 2: service difference", linear, TABLE_2),
                vtc.difference_table(
                    "Table 3: service difference, profiled cost",
                    profiled,
                    TABLE_3,
                    path="difference_profiled",
                ),
                _responses(
                    "Wait for the first token, or the run's end, mean in s, by a client's rank in requests",
                    linear,
                ),
                _responses(
                    "Figure 18: the same, profiled cost", {k: profiled[k] for k in ("FCFS", *COUNTING)}
                ),
            ],
            figures=[
                Figure(
                    "response",
                    "Figure 12: response time of the clients that rank 13th, 14th, 26th and 27th in requests.",
                    _draw_responses({label: linear[label] for label in ("FCFS", "VTC")}),
                    (8.4, 3.4),
                ),
                Figure(
                    "rpm-response",
                    "Figure 13: the same under limits of requests a minute.",
                    _draw_responses(
                        {k: v for k, v in linear.items() if k.startswith("RPM") and k != "RPM(10)"}
                    ),
                    (11.0, 3.2),
                ),
                Figure(
                    "rpm-throughput",
                    "Figure 14: throughput by limit.",
                    _draw_throughput(linear),
                    (5.6, 3.4),
                ),
            ],
        )


_LEFT_OUT_IF_QUICK = ("RPM(10)", "RPM(15)", "RPM(20)")


def _cell(label: str, cost: str = "linear") -> str:
    """The name of a scheduler's cell."""
    policy, options = SCHEDULERS[label]
    name = f"{policy}-{options.removeprefix('limit=')}" if options else policy
    return name if cost == "linear" else f"{name}.{cost}"


# ---- claims


def _order(text: str, table: Mapping[str, vtc.PaperRow], found: Mapping[str, Result], path: str) -> Claim:
    """That the schedulers which reject nothing come in the order of the paper's table."""
    names = ("VTC (oracle)", "VTC (predict)", "VTC", "LCF", "FCFS")
    average = {label: found[label].number(path) for label in names}
    return Claim(
        text,
        " < ".join(f"{table[label][1]:.0f}" for label in names),
        ", ".join(f"{average[label]:.0f}" for label in names),
        verdict(
            all(average[a] <= average[b] for a, b in pairwise(names)), partly=average["VTC"] < average["FCFS"]
        ),
        "VTC is below FCFS; its relatives lie close to it, and their order changes with the trace.",
    )


def _table_2(found: Mapping[str, Result]) -> list[Claim]:
    fair = found["VTC"].number("difference/avg") / found["FCFS"].number("difference/avg")
    fifo = found["FCFS"].number("tokens_per_s")
    throughput = found["VTC"].number("tokens_per_s") / fifo
    return [
        _order(
            "Table 2: mean difference, oracle < predict < VTC < LCF < FCFS", TABLE_2, found, "difference/avg"
        ),
        Claim(
            "Table 2: VTC's mean difference is a good part below FCFS's",
            f"{TABLE_2['VTC'][1] / TABLE_2['FCFS'][1]:.0%}",
            f"{fair:.0%}",
            verdict(fair <= 0.75, partly=fair < 1),
        ),
        Claim(
            "Table 2: VTC costs no throughput",
            "779 to 777 tokens/s, 1.00×",
            f"{throughput * fifo:.0f} to {fifo:.0f} tokens/s, {throughput:.2f}×",
            verdict(throughput >= 0.98, partly=throughput >= 0.95),
        ),
    ]


def _figure_12(found: Mapping[str, Result]) -> list[Claim]:
    fifo, fair = found["FCFS"], found["VTC"]
    waits = _medium(fifo), _heavy(fifo), _medium(fair), _heavy(fair)
    shown = (
        f"medium clients {waits[0]:.0f} s under FCFS, {waits[2]:.1f} s under VTC; "
        f"heavy {waits[1]:.0f} s and {waits[3]:.0f} s"
    )
    return [
        Claim(
            "Figure 12: under FCFS all clients' response times rise, under VTC those of over-senders alone",
            "all; only over-senders",
            shown,
            verdict(waits[0] >= 0.5 * waits[1] and waits[2] <= 0.25 * waits[0], partly=waits[2] < waits[0]),
        )
    ]


def _rpm(found: Mapping[str, Result]) -> list[Claim]:
    limits = {label: one.number("tokens_per_s") for label, one in found.items() if label.startswith("RPM")}
    fair = found["VTC"].number("tokens_per_s")
    low, high = limits["RPM(5)"] / fair, limits["RPM(30)"] / fair
    tight, loose, fifo = (_all(found[label]) for label in ("RPM(5)", "RPM(30)", "FCFS"))
    return [
        Claim(
            "Figure 14: RPM's throughput is below VTC's at every limit",
            "340 of 779 tokens/s at 5 requests/min, 44 %; 747 at 30, 96 %",
            f"{low:.0%} at 5, {high:.0%} at 30",
            verdict(max(limits.values()) <= 0.99 * fair and low <= 0.6, partly=low < 0.8),
            "At the highest limits hardly anything is refused.",
        ),
        Claim(
            "Figure 13: a low limit is fast for all, a high one is FCFS again",
            "similar, low response times at 5; FCFS's curve at high limits",
            f"mean {tight:.1f} s at 5, {loose:.0f} s at 30, {fifo:.0f} s under FCFS",
            verdict(tight <= 0.1 * fifo and loose >= 0.5 * fifo, partly=tight < loose <= fifo),
            "A limit of 30 still refuses what the heaviest clients send.",
        ),
    ]


def _table_3(found: Mapping[str, Result]) -> list[Claim]:
    fair = found["VTC"]
    punished = [_five_heaviest(one) for one in (found["LCF"], fair)]
    return [
        _order("Table 3: the same order under the profiled cost", TABLE_3, found, "difference_profiled/avg"),
        Claim(
            "Figure 18: VTC keeps clients with few requests fast under the profiled cost, FCFS does not",
            "low against rising",
            f"medium clients {_medium(fair):.1f} s to {_medium(found['FCFS']):.0f} s",
            verdict(
                _medium(fair) <= 0.25 * _medium(found["FCFS"]), partly=_medium(fair) < _medium(found["FCFS"])
            ),
        ),
        Claim(
            "Figure 18: LCF punishes clients that always send much",
            "excessively high response times",
            f"median of the five heaviest: {punished[0]:.0f} s under LCF, {punished[1]:.0f} s under VTC",
            verdict(punished[0] >= 1.2 * punished[1], partly=punished[0] >= 1.05 * punished[1]),
            "LCF serves whoever comes later first, at the expense of those that are always there; of the five that "
            "send most, by no means all are.",
        ),
    ]


def _wait(run: Mapping[str, Json], names: Sequence[str]) -> list[float]:
    """How long each of these clients waited for a first token in the mean, until the run's end where none came."""
    told = (run["clients"][name]["waited_s"] for name in names)
    return [wait for wait in told if wait is not None]


def _over_seeds(result: Result, of: Callable[[Mapping[str, Json]], Sequence[str]]) -> float:
    """The mean over some clients, the median over seeds; s."""
    return median(fmean(_wait(run, of(run))) for run in result.runs)


def _medium(result: Result) -> float:
    """Clients that send a medium number of requests: ranks 10 to 17 of 27."""
    return _over_seeds(result, lambda run: run["ranked"][9:17])


def _heavy(result: Result) -> float:
    """The two that send most."""
    return _over_seeds(result, lambda run: run["ranked"][-2:])


def _five_heaviest(result: Result) -> float:
    """The median of the five that send most, and over seeds; s."""
    return median(median(_wait(run, run["ranked"][-5:])) for run in result.runs)


def _all(result: Result) -> float:
    """All clients."""
    return _over_seeds(result, lambda run: run["ranked"])


# ---- tables and plots


def _responses(title: str, found: Mapping[str, Result]) -> Table:
    light = [_over_seeds(one, lambda run: run["ranked"][:9]) for one in found.values()]
    rows = [
        (label, few, _medium(one), _heavy(one), _refused(one))
        for (label, one), few in zip(found.items(), light, strict=True)
    ]
    return Table(
        title,
        ("scheduler", "1st to 9th (fewest)", "10th to 17th", "26th and 27th (most)", "refused, %"),
        rows,
    )


def _refused(result: Result) -> float:
    """Part of all requests, in percent."""
    parts: list[float] = []
    for run in result.runs:
        clients = run["clients"].values()
        parts.append(100 * sum(one["refused"] for one in clients) / sum(one["sent"] for one in clients))
    return median(parts)


def _draw_responses(found: Mapping[str, Result]) -> "Callable[[Canvas], None]":
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


def _draw_throughput(found: Mapping[str, Result]) -> "Callable[[Canvas], None]":
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
