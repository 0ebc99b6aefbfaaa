"""Placements and policies beside each other, fair and not: is there one that is fair and loses to nobody?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from workloads.clients import SCENARIOS, Client
from workloads.experiments import beyond_production, style
from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Simulated, Size, TrafficSpec
from workloads.experiments.dlpm_a10g import trees
from workloads.experiments.dlpm_setting import KINDS, MAX_RUNNING
from workloads.experiments.program_senders import conversations, sender
from workloads.experiments.senders import clients_of, traffic
from workloads.programs import PackedCodec
from workloads.records import Run
from workloads.simulation import Site
from workloads.traces.mooncake import mooncake

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True, slots=True)
class Contender:
    """A placement, and the policy of the replicas behind it."""

    label: str
    placement: str
    policy: str
    policy_options: str = ""


OURS = "queue"
CONTENDERS = {
    OURS: Contender("D2LPM by queues", "d2lpm-queue", "dlpm", "borrow=0.3"),
    "d2lpm": Contender("D2LPM", "d2lpm", "dlpm"),
    "rr": Contender("RR+LPM", "round_robin", "lpm"),
    "preble": Contender("Preble", "preble", "lpm"),
    "cache-aware": Contender("cache_aware", "cache_aware", "lpm"),
    "lmetric": Contender("LMetric", "lmetric", "lpm"),
    "vtc": Contender("VTC", "client_round_robin", "vtc"),
}
OTHERS = tuple(name for name in CONTENDERS if name != OURS)

FIGURE_7 = ("qa-s1", "tot-s1", "judge-s1", "qa-s2", "tot-s2", "judge-s2")
PRODUCTION, TRACE, FIGURE_10, CHAT = "production", "mooncake", "fig10", "chat"
NUMBERS = (4, 8)
"""Of GPUs; Figure 10 has four."""
LENGTHS_S: Mapping[str, Mapping[int, float]] = {
    **{what: {4: 120.0, 8: 60.0} for what in FIGURE_7},
    PRODUCTION: {4: 120.0, 8: 120.0},
    FIGURE_10: {4: 160.0},
    CHAT: {4: 60.0, 8: 60.0},
}
QUICK = ("judge-s1", PRODUCTION, "chat-20")

CONVERSATIONS = (1, 20, 200)
"""Under way at a time."""
SYSTEM_TOKENS, TURNS = 1024, 4.0

MOONCAKE = Path(__file__).parents[3] / "shared" / "data" / "mooncake_conversation_trace.jsonl"
PART_S = 600.0
"""Of the trace."""

AHEAD = 0.02
"""Latencies that differ by less count as equal."""
ENOUGH: Mapping[str, float] = {"judge-s1": 0.92, PRODUCTION: 0.97}
ENOUGH_ELSE = 0.99
"""Throughput over the best of all."""


class Contest(Simulated):
    id = "beyond-placement"

    def cells(self, size: Size) -> Sequence[Cell]:
        if size == "quick":
            points = [(what, 2) for what in QUICK]
        else:
            points = [(what, number) for number in NUMBERS for what in settings(number)]
        return [
            replace(
                _cell(what, number, quick=size == "quick"),
                name=f"{what}-d{number}.{name}",
                site=_site(what, number, contender),
                label=contender.label,
                seeds=SEEDS if size == "full" else SEEDS[:1],
            )
            for what, number in points
            for name, contender in CONTENDERS.items()
        ]

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        if cell.traffic.name == PRODUCTION:
            return beyond_production.clients(cell.traffic, seed)
        if cell.traffic.name == TRACE:
            return _replayed(cell.traffic, seed)
        if cell.traffic.name in SCENARIOS:
            return dlpm.clients(cell.traffic, seed)
        return clients_of(cell.traffic, seed)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return beyond_production.observe_mix(run)

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        points = list(dict.fromkeys(name.partition(".")[0] for name in results))
        grid = Grid(results, points)
        parts = {point: grid.part_of_best(point) for point in points}
        late = [one for point in points for percent in (50, 99) if (one := grid.beaten(point, percent))]
        figure_7 = [point for point in points if point.rpartition("-d")[0] in FIGURE_7]
        return {
            "parts": parts,
            "short": [point for point, part in parts.items() if part < enough(point)],
            "least": min(
                (part for point, part in parts.items() if enough(point) == ENOUGH_ELSE), default=None
            ),
            "judges": min((part for point, part in parts.items() if "judge-s1" in point), default=None),
            "mixes": min((part for point, part in parts.items() if PRODUCTION in point), default=None),
            "speed": {name: grid.gain(points, name) for name in OTHERS},
            "latencies": 2 * len(points),
            "late": late,
            "late_in_words": "; ".join(late) or "nowhere",
            "ratios": {name: grid.latency_ratios(figure_7, name) for name in OTHERS},
            "outside": grid.outside(points),
            "rows": {
                what: [grid.row(point, what) for point in points]
                for what in ("rate", "p50", "p99", "difference", "bound")
            },
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        points = list(dict.fromkeys(name.partition(".")[0] for name in results))
        grid = Grid(results, points)
        return {"throughput": Drawing(lambda canvas: _draw(canvas, grid), (11.0, 6.4))}


def settings(number: int) -> list[str]:
    """What is run on so many GPUs."""
    mixes = [*(f"{CHAT}-{count}" for count in CONVERSATIONS), PRODUCTION, TRACE]
    return [*mixes, *([FIGURE_10] if number in LENGTHS_S[FIGURE_10] else []), *FIGURE_7]


def enough(point: str) -> float:
    """Which part of the best throughput is to be reached."""
    return ENOUGH.get(point.rpartition("-d")[0], ENOUGH_ELSE)


# ---- cells


def _cell(what: str, number: int, *, quick: bool) -> Cell:
    """Traffic and plan of a setting; name, site and seeds are the caller's."""
    site = Site()
    if what in FIGURE_7:
        length_s = 10.0 if quick else LENGTHS_S[what][number]
        rate = KINDS[SCENARIOS[what].app].client_rate_per_s(number)
        return Cell(
            what,
            site,
            TrafficSpec(what, {"rate_per_s": rate}),
            dlpm.plan(length_s, drain_s=dlpm.DRAIN_S, drain_for="well-behaved"),
        )
    if what == PRODUCTION:
        length_s = 20.0 if quick else LENGTHS_S[what][number]
        mix = beyond_production.traffic(number, length_s, 40 if quick else 50 * number)
        return Cell(what, site, mix, beyond_production.plan(length_s))
    if what == TRACE:
        rate = float(f"{beyond_production.LOAD * beyond_production.CAPACITY_PER_S * number:.4g}")
        return Cell(
            what,
            site,
            TrafficSpec(TRACE, {"part_s": PART_S, "rate_per_s": rate}),
            beyond_production.plan(float(f"{PART_S * TRACE_PER_S / rate:.4g}")),
        )
    if what == FIGURE_10:
        return Cell(what, site, trees(number), dlpm.plan(LENGTHS_S[what][number]))
    count = int(what.removeprefix(f"{CHAT}-"))
    names = [f"client {k}" for k in range(min(4, count))]
    length_s = 15.0 if quick else LENGTHS_S[CHAT][number]
    return Cell(
        what,
        site,
        traffic(CHAT, *(sender(name, conversations(SYSTEM_TOKENS, TURNS), 1.0) for name in names)),
        replace(dlpm.plan(length_s), at_once={name: count // len(names) for name in names}),
    )


TRACE_PER_S = 3.4
"""Requests a second of the trace, about: it sets how long its part takes at another rate."""


def _site(what: str, number: int, contender: Contender) -> Site:
    """Quanta by the rule of Figure 7, prompts first as there; ours has its placement's own Q^w everywhere."""
    if what == FIGURE_10:
        given = dict(dlpm.A10G)
        quantum, worker_quantum = dlpm.TOT3.charged, 4 * dlpm.TOT3.charged_in_full
    else:
        given = {"max_running": MAX_RUNNING}
        if what in FIGURE_7:
            kind = KINDS[SCENARIOS[what].app]
            quantum, worker_quantum = kind.quantum, kind.worker_quantum
        elif what.startswith(CHAT):
            quantum, worker_quantum = dlpm.CHAT.charged * 4, dlpm.CHAT.charged_in_full * 16
        else:
            quantum, worker_quantum = beyond_production.QUANTUM, beyond_production.WORKER_QUANTUM
    return Site(
        replicas=number,
        placement=contender.placement,
        policy=contender.policy,
        policy_options=contender.policy_options,
        quantum=quantum,
        worker_quantum=None if contender is CONTENDERS[OURS] else worker_quantum,
        stall_ms=0.0,
        **given,
    )


def _replayed(spec: TrafficSpec, seed: str) -> list[Client]:
    """A part of Mooncake's trace at another rate. Well-behaved is who asks for less than an equal share."""
    if not MOONCAKE.exists():
        raise ValueError(f"the trace of Mooncake's conversations is not at {MOONCAKE}")
    arguments = spec.arguments
    part = mooncake(MOONCAKE, seed=seed).between(0.0, arguments["part_s"]).at_rate(arguments["rate_per_s"])
    asked: dict[str, int] = {}
    for request in part.requests:
        units = request.input_tokens + 2 * request.output_tokens
        asked[request.client] = asked.get(request.client, 0) + units
    share = sum(asked.values()) / len(asked) / beyond_production.LOAD
    return [
        replace(client, well_behaved=asked[client.name] <= share)
        for client in part.clients(PackedCodec(), seed=seed)
    ]


# ---- what the claims are about


@dataclass(frozen=True, slots=True)
class Grid:
    """All results, by point (a setting on so many GPUs) and contender."""

    results: Mapping[str, Result]
    points: Sequence[str]

    def path(self, point: str, what: str) -> str:
        """The field of a measure."""
        setting = point.rpartition("-d")[0]
        if what == "rate":
            return "service_rate" if setting in FIGURE_7 else "tokens_per_s"
        if what not in ("p50", "p99"):
            return what
        programs = setting == FIGURE_10 or (setting in FIGURE_7 and SCENARIOS[setting].app != "qa")
        return f"{'' if programs else 'ttft_'}{what}_s"

    def get(self, point: str, name: str) -> Result:
        return self.results[f"{point}.{name}"]

    def number(self, point: str, name: str, what: str) -> float:
        return self.get(point, name).number(self.path(point, what))

    def part_of_best(self, point: str) -> float:
        """Our throughput over that of the best of all, us included."""
        return self.number(point, OURS, "rate") / max(self.number(point, name, "rate") for name in CONTENDERS)

    def gain(self, points: Sequence[str], name: str) -> Json:
        """Our throughput over another's: the mean, and where it is least."""
        found = {
            point: self.number(point, OURS, "rate") / self.number(point, name, "rate") for point in points
        }
        where = min(found, key=lambda point: found[point])
        return {"mean": fmean(found.values()), "least": found[where], "where": in_words(where)}

    def beaten(self, point: str, percent: int) -> str:
        """In words, if another's latency is lower than ours by more than `AHEAD`, and by more than seeds differ."""
        path = self.path(point, f"p{percent}")
        ours = self.get(point, OURS).values(path)
        for name in OTHERS:
            theirs = self.get(point, name).values(path)
            if theirs and ours and max(theirs) < (1 - AHEAD) * min(ours):
                label = CONTENDERS[name].label
                part = self.number(point, name, f"p{percent}") / self.number(point, OURS, f"p{percent}")
                return f"{in_words(point)}: {label}'s P{percent} {part:.2f}×"
        return ""

    def latency_ratios(self, points: Sequence[str], name: str) -> Json:
        """Another's P50 and P99 over ours. A latency that was cut off counts as the time at which it was."""
        found = [
            self.number(point, name, what) / self.number(point, OURS, what)
            for point in points
            for what in ("p50", "p99")
        ]
        return {
            "mean": fmean(found) if found else None,
            "least": min(found, default=None),
            "most": max(found, default=None),
            "below": sum(one < 1 for one in found),
            "of": len(found),
        }

    def outside(self, points: Sequence[str]) -> list[str]:
        """Where our clients' services differ by more than the bound."""
        return [
            in_words(point)
            for point in points
            for run in self.get(point, OURS).runs
            if run["difference"] is not None and run["bound"] is not None and run["difference"] > run["bound"]
        ]

    def row(self, point: str, what: str) -> dict[str, str]:
        setting, _, number = point.rpartition("-d")
        entries = {}
        for name in CONTENDERS:
            result, path = self.get(point, name), self.path(point, what)
            cut = path.endswith("_s") and any(
                run.get(path.removesuffix("_s") + "_cut") for run in result.runs
            )
            entries[name.replace("-", "_")] = ("> " if cut else "") + result.shown(path)
        return {"setting": setting, "gpus": number} | entries


def in_words(point: str) -> str:
    """A point as people read it."""
    setting, _, number = point.rpartition("-d")
    return f"{setting}, D = {number}"


def _draw(canvas: "Canvas", grid: Grid) -> None:
    upper, lower = canvas.subplots(2, 1, sharex=True)
    for axes, what, unit in ((upper, "rate", "throughput, × the best"), (lower, "p99", "P99, × ours")):
        heights = {}
        for name in (OURS, "d2lpm", "preble", "lmetric", "vtc"):
            heights[CONTENDERS[name].label] = [
                grid.number(point, name, what)
                / (
                    max(grid.number(point, one, "rate") for one in CONTENDERS)
                    if what == "rate"
                    else grid.number(point, OURS, what)
                )
                for point in grid.points
            ]
        style.bars(axes, list(grid.points), heights, unit=unit, legend=False)
        axes.axhline(1.0, color="black", linewidth=0.8)
    lower.set_yscale("log")
    upper.legend(fontsize=8, ncols=5, loc="lower center")
    lower.set_xticks(range(len(grid.points)), list(grid.points), rotation=40, ha="right", fontsize=8)
