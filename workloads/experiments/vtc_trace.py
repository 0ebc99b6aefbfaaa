"""VTC, Figures 12, 13, 14 and 18, Tables 2 and 3: a trace of 27 clients, a few of which send most of it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from sglang_fair.core.cost import make_cost
from workloads.clients import Client
from workloads.experiments import vtc_setting as vtc
from workloads.experiments.claims import Claim, Entry, Part, Table, at_least, graded
from workloads.experiments.contract import Cell, Json, Result, Row, Simulated, TrafficSpec
from workloads.plots import Figure, Panel, Panels
from workloads.programs.codec import PackedCodec
from workloads.programs.prose import seeded
from workloads.records import Run
from workloads.traces import Trace, arena

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

COUNTING = ("LCF", "VTC", "VTC (predict)", "VTC (oracle)")
"""Those that charge service, so that the cost function changes what they do."""

RANKS = (13, 14, 26, 27)
"""The clients that the paper draws, by number of requests; 27 sends most."""

TABLE_2: Mapping[str, tuple[float, ...]] = {
    "FCFS": (759.97, 433.53, 32112.00, 777),
    "LCF": (750.49, 323.82, 29088.90, 778),
    "VTC": (368.40, 251.66, 6549.16, 779),
    "VTC (predict)": (365.47, 240.33, 5321.62, 773),
    "VTC (oracle)": (329.46, 227.51, 4475.76, 781),
    "RPM(5)": (143.86, 83.58, 1020.46, 340),
    "RPM(20)": (446.76, 195.71, 7449.79, 694),
    "RPM(30)": (693.66, 309.45, 24221.31, 747),
}
"""Maximum, mean and variance of the service difference, units/s, and tokens/s."""
TABLE_3: Mapping[str, tuple[float, ...]] = {
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
    """The same requests, but every other client sends all of its own within 0.3 to 0.7 of the time. Rates in the
    authors' trace are "highly dynamic", and a third of its most active clients come minutes after the start."""
    spans, moved = {}, []
    for client in {request.client for request in trace.requests}:
        rng = seeded(seed, "arena", client, "span")
        part = rng.uniform(0.3, 0.7) if rng.random() < 0.5 else 1.0
        spans[client] = rng.uniform(0.0, 1.0 - part) * trace.duration_s, part
    for request in trace.requests:
        start_s, part = spans[request.client]
        moved.append(replace(request, arrival_s=start_s + part * request.arrival_s))
    return replace(trace, requests=sorted(moved, key=lambda request: (request.arrival_s, request.client)))


class ArenaTrace(Simulated):
    id = "vtc-trace"
    title = f"A trace of {RANKS[3]} clients"
    source = "VTC, Figures 12, 13, 14 and 18, Tables 2 and 3"
    about = f"""210 requests/min for {vtc.LENGTH_S:.0f} s, prompts of 136 and answers of 256 tokens in the mean. The
        authors' trace is lost: these are made from a seed, with its statistics (clients, their shares, lengths; every
        other client is there for a part of the time only). So tables compare in order and ratio, not in numbers. Table
        3 counts service by the profiled cost, in tenths of its units."""
    lengths_s = (vtc.LENGTH_S, 150.0)
    plan = vtc.VtcExperiment.plan

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        sent = TrafficSpec("arena", {"duration_s": length_s})
        quick = ("RPM(5)", "RPM(30)")
        runs = [(label, "linear") for label in SCHEDULERS if full or "RPM" not in label or label in quick]
        for label, cost in (*runs, *((label, "profiled") for label in COUNTING)):
            yield Row(_cell(label, cost), vtc.site(*SCHEDULERS[label], cost=cost), sent, label)

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        whole = come_and_go(arena(seed=seed), seed)
        return whole.between(0.0, cell.traffic.arguments["duration_s"]).clients(PackedCodec(), seed=seed)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        sent = Counter(record.client for record in run.requests)
        ranked = sorted(run.manifest.clients, key=lambda name: (sent[name], name))
        drawn = {str(rank): ranked[rank - 1] for rank in RANKS if rank <= len(ranked)}
        found = vtc.observe(run, curves_of=list(drawn.values()))
        kept = ("sent", "refused", "service", "waited_s")
        return {
            "clients": {name: {key: one[key] for key in kept} for name, one in found["clients"].items()},
            "tokens_per_s": found["tokens_per_s"],
            "difference": found["difference"],
            "curves": {key: found["curves"][key] for key in ("times_s", "response_s")},
            "ranked": ranked,
            "drawn": drawn,
            "difference_profiled": vtc.tenths(vtc.difference(run, make_cost("profiled"))),
        }

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        linear = {label: at[_cell(label)] for label in SCHEDULERS if _cell(label) in at}
        profiled = {label: at.get(_cell(label, "profiled"), one) for label, one in linear.items()}
        yield from self._tables_2_and_3(linear, profiled)
        yield from self._limits(linear)
        yield from self._figure_18(linear, profiled)
        for title, of, path, theirs in (
            ("Table 2: service difference", linear, "difference", TABLE_2),
            ("Table 3: service difference, profiled cost", profiled, "difference_profiled", TABLE_3),
        ):
            title += " (service difference in units/s)"
            yield vtc.beside_paper(title, of.values(), map(theirs.get, of), path)
        ranks = "scheduler | 1st to 9th (fewest) | 10th to 17th | 26th and 27th (most) | refused, %"
        title = "Wait for the first token, or the run's end, mean in s, by a client's rank in requests"
        charged = [profiled[label] for label in ("FCFS", *COUNTING)]
        yield Table(title, ranks, [_row(one) for one in linear.values()])
        yield Table("Figure 18: the same, profiled cost", ranks, [_row(one) for one in charged])
        ordinals = f"{RANKS[0]}th, {RANKS[1]}th, {RANKS[2]}th and {RANKS[3]}th"
        caption = f"Figure 12: response time of the clients that rank {ordinals} in requests."
        yield Figure("response", caption, _responses({label: linear[label] for label in ("FCFS", "VTC")}))
        caption = "Figure 13: the same under limits of requests a minute."
        limits = {label: one for label, one in linear.items() if "RPM" in label and label != "RPM(10)"}
        yield Figure("rpm-response", caption, _responses(limits))
        swept = [limit for limit in LIMITS if f"RPM({limit})" in linear]
        lines = {"RPM": (swept, [linear[f"RPM({limit})"].median("tokens_per_s") for limit in swept])}
        levels = {label: linear[label]["tokens_per_s"] for label in ("VTC", "FCFS")}
        x = "limit, requests/min and client"
        throughput = Panel("input and output tokens/s", lines, x, swept=True, levels=levels)
        yield Figure("rpm-throughput", "Figure 14: throughput by limit.", [[throughput]])

    def _tables_2_and_3(
        self, linear: Mapping[str, Result], profiled: Mapping[str, Result]
    ) -> Iterator[Claim]:
        fifo, fair = linear["FCFS"], linear["VTC"]
        yield _in_order(
            "Table 2: mean difference, oracle < predict < VTC < LCF < FCFS", linear, "difference", TABLE_2
        )
        below = fair["difference/avg"] / fifo["difference/avg"]
        yield graded(below <= 0.75, below < 1).claim(f"""Table 2: VTC's mean difference is a good part below
            FCFS's | {TABLE_2["VTC"][1] / TABLE_2["FCFS"][1]:.0%} | {below:.0%}""")
        speed = fair["tokens_per_s"] / fifo["tokens_per_s"]
        yield at_least(speed, 0.98, 0.95).claim(f"""Table 2: VTC costs no throughput | 779 to 777 tokens/s,
            1.00× | {fair["tokens_per_s"]:.0f} to {fifo["tokens_per_s"]:.0f} tokens/s, {speed:.2f}×""")
        (fcfs_s, vtc_s), heavy = (_waits(one, MEDIUM) for one in (fifo, fair)), slice(-2, None)
        fcfs_heavy_s, vtc_heavy_s = (_waits(one, heavy) for one in (fifo, fair))
        yield graded(
            fcfs_s >= 0.5 * fcfs_heavy_s and vtc_s <= 0.25 * fcfs_s, vtc_s < fcfs_s
        ).claim(f"""Figure 12: under FCFS all clients' response times rise, under VTC those of over-senders
            alone | all; only over-senders | medium clients {fcfs_s:.0f} s under FCFS, {vtc_s:.1f} s under
            VTC; heavy {fcfs_heavy_s:.0f} s and {vtc_heavy_s:.0f} s""")

    def _limits(self, linear: Mapping[str, Result]) -> Iterator[Claim]:
        fair = linear["VTC"]["tokens_per_s"]
        limited = [one["tokens_per_s"] / fair for label, one in linear.items() if "RPM" in label]
        tight, loose = limited[0], limited[-1]
        yield graded(max(limited) <= 0.99 and tight <= 0.6, tight < 0.8).claim(f"""Figure 14: RPM's throughput
            is below VTC's at every limit | 340 of 779 tokens/s at 5 requests/min, 44 %; 747 at 30, 96 % |
            {tight:.0%} at {LIMITS[0]}, {loose:.0%} at {LIMITS[4]} | At the highest limits almost nothing is
            refused.""")
        low, high, all_s = (_waits(linear[label]) for label in ("RPM(5)", "RPM(30)", "FCFS"))
        yield graded(
            low <= 0.1 * all_s and high >= 0.5 * all_s, low < high <= all_s
        ).claim(f"""Figure 13: a low limit is fast for all, a high one is FCFS again | similar, low response
            times at {LIMITS[0]}; FCFS's curve at high limits | mean {low:.1f} s at {LIMITS[0]}, {high:.0f} s
            at {LIMITS[4]}, {all_s:.0f} s under FCFS | A limit of {LIMITS[4]} still refuses what the heaviest
            clients send.""")

    def _figure_18(self, linear: Mapping[str, Result], profiled: Mapping[str, Result]) -> Iterator[Claim]:
        text = "Table 3: the same order under the profiled cost"
        yield _in_order(text, profiled, "difference_profiled", TABLE_3)
        ours, others = _waits(profiled["VTC"], MEDIUM), _waits(linear["FCFS"], MEDIUM)
        yield graded(ours <= 0.25 * others, ours < others).claim(f"""Figure 18: VTC keeps clients with few
            requests fast under the profiled cost, FCFS does not | low against rising | medium clients
            {ours:.1f} s to {others:.0f} s""")
        lcf, fair = (_waits(profiled[label], slice(-5, None), median) for label in ("LCF", "VTC"))
        yield at_least(lcf / fair, 1.2, 1.05).claim(f"""Figure 18: LCF punishes clients that always send much
            | excessively high response times | median of the five heaviest: {lcf:.0f} s under LCF, {fair:.0f}
            s under VTC | LCF favours clients that come later over those that are always there, and not all of
            the five that send most are always there.""")


def _cell(label: str, cost: str = "linear") -> str:
    policy, options = SCHEDULERS[label]
    name = f"{policy}-{options.removeprefix('limit=')}" if options else policy
    return name if cost == "linear" else f"{name}.{cost}"


def _in_order(
    text: str, found: Mapping[str, Result], path: str, theirs: Mapping[str, tuple[float, ...]]
) -> Claim:
    names = ("VTC (oracle)", "VTC (predict)", "VTC", "LCF", "FCFS")
    means = [found[name][f"{path}/avg"] for name in names]
    return graded(means == sorted(means), means[2] < means[4]).claim(f"""{text} |
        {" < ".join(f"{theirs[name][1]:.0f}" for name in names)} |
        {", ".join(f"{mean:.0f}" for mean in means)} | VTC is below FCFS; its relatives lie close to it, and
        their order changes with the trace.""")


MEDIUM = slice(9, 17)
"""Ranks of clients that send neither few nor many requests."""


def _waits(
    result: Result, ranks: slice = slice(None), reduce: Callable[[Sequence[float]], float] = fmean
) -> float:
    """How long clients of these ranks wait for a first token, s: the mean over them, then the median over seeds. A
    client without a first token waits to the end."""

    def of(run: Mapping[str, Json]) -> float:
        waits = (run["clients"][name]["waited_s"] for name in run["ranked"][ranks])
        return reduce([wait for wait in waits if wait is not None])

    return median(map(of, result.runs))


def _row(result: Result) -> list[Entry]:
    refused, sent = (
        [sum(client[what] for client in run["clients"].values()) for run in result.runs]
        for what in ("refused", "sent")
    )
    waits = (_waits(result, ranks) for ranks in (slice(9), MEDIUM, slice(-2, None)))
    return [
        result.cell.title,
        *waits,
        median(100 * one / all_ for one, all_ in zip(refused, sent, strict=True)),
    ]


def _responses(found: Mapping[str, Result]) -> Panels:
    lines = {
        label: {
            f"client of rank {rank}": one.curve("response_s", name)
            for rank, name in one.first["drawn"].items()
        }
        for label, one in found.items()
    }
    return [[Panel(vtc.RESPONSE, curves, title=label) for label, curves in lines.items()]]
