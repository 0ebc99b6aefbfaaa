"""Placements and policies beside each other, fair and not: is there one that is fair and loses to nobody?"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from sglang_fair.core.options import shipped
from workloads.clients import SCENARIOS, Client
from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments.claims import Claim, Part, Table, at_least, graded
from workloads.experiments.contract import Cell, Json, Result, Row, Scheduler, Simulated, TrafficSpec
from workloads.experiments.dlpm_a10g import trees
from workloads.experiments.dlpm_setting import DEFAULT, DIFFERENCE, KINDS, MAX_RUNNING, Point
from workloads.experiments.senders import clients_of, conversations, sender, traffic
from workloads.plots import Figure, Panel, Panels
from workloads.programs import PackedCodec
from workloads.records import Run
from workloads.session import Plan
from workloads.simulation import Site
from workloads.traces import Trace, mix, mooncake, production, servegen

OURS = "queue"
_QUEUES: Json = {"placement": "d2lpm-queue", "policy": "dlpm", "policy_options": shipped("dlpm", "")}
CONTENDERS = {
    OURS: Scheduler("D2LPM by queues", _QUEUES),
    **{name: dlpm.SCHEDULERS[name] for name in ("d2lpm", "rr", "preble", "cache-aware")},
    "lmetric": Scheduler("LMetric", {"placement": "lmetric", "policy": "lpm"}),
    "vtc": dlpm.SCHEDULERS["vtc"],
    DEFAULT: dlpm.SHIPPED,
}
OTHERS = tuple(name for name in CONTENDERS if name not in (OURS, DEFAULT))
"""Placements and policies that ours is compared with, all with prompts first."""

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
    title = "Is there a placement that is fair and loses to nobody?"
    source = "beyond the papers; DLPM §5"
    about = f"""D2LPM by queues with borrowing (ours) beside D2LPM, RR+LPM, Preble, cache_aware, LMetric (all three
        over LPM) and VTC. Llama-3.1-8B on {NUMBERS[0]} and {NUMBERS[1]} A100: the six settings of
        Figure 7 at its rates and quanta, for {LENGTHS_S["tot-s1"][4]:.0f} s and
        {LENGTHS_S["tot-s1"][8]:.0f} s of arrivals; the production mix; {PART_S:.0f} s of Mooncake's
        conversation trace at the rate of the mix; conversations behind one system prompt of
        {SYSTEM_TOKENS:,} tokens, {CONVERSATIONS[0]} to {CONVERSATIONS[2]} at a time. On four A10G:
        Figure 10, one client with ten times as long questions. Ours has one Q^w everywhere, its
        default; the others have the quanta of the experiments named. All of these compute prompts
        first; the last is what `sglang-fair cluster` runs by default, with mixed steps and all its
        own quanta. Latency is the well-behaved clients': a program's for trees and judgements,
        elsewhere a first token's. Three seeds, medians."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        every = [(what, number) for number in NUMBERS for what in settings(number)]
        for what, number in every if full else [(what, 2) for what in QUICK]:
            sent, plan = load(what, number, quick=not full)
            for name, contender in CONTENDERS.items():
                site = site_of(what, number, contender)
                yield Row(f"{what}-d{number}.{name}", site, sent, contender.label, plan)

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        if cell.traffic.name == PRODUCTION:
            return _mixed(cell.traffic, seed)
        if cell.traffic.name == TRACE:
            return _replayed(cell.traffic, seed)
        if cell.traffic.name in SCENARIOS:
            return dlpm.clients(cell.traffic, seed)
        return clients_of(cell.traffic, seed)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return _observe(run)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        grid = Grid(at)
        yield from _throughput(grid)
        yield from _latency(grid)
        yield from _default(grid)
        outside = [
            point
            for point in grid.points
            for run in at[f"{point.name}.{OURS}"].runs
            if None not in (run["difference"], run["bound"]) and run["difference"] > run["bound"]
        ]
        yield graded(not outside).claim(f"""Clients' services differ by less than the bound | D2LPM's theorem,
            with the quantum that may be borrowed | outside it in {len(outside)} runs""")
        late = "latency of the well-behaved clients, s (> where the run ended before)"
        head = " | ".join(["setting", "D", "by queues", *(one.label for one in [*CONTENDERS.values()][1:])])
        for field, what in {
            "rate": "Throughput: Figure 7 in units/s of service with prompts in full, others in tokens/s",
            "p50": f"P50 {late}",
            "p99": f"P99 {late}",
            "difference": DIFFERENCE,
            **(dlpm.PROGRAM_TIMES if all(one.values("program_mean_s") for one in at.values()) else {}),
        }.items():
            lines = [grid.row(point.setting, point, CONTENDERS, field) for point in grid.points]
            yield Table(what, head, lines)
        caption = "Above: throughput over the best of all. Below: P99 of the well-behaved clients over ours."
        yield Figure("throughput", caption, _plot(grid))


def settings(number: int) -> list[str]:
    """What is run on so many GPUs."""
    mixes = [*(f"{CHAT}-{count}" for count in CONVERSATIONS), PRODUCTION, TRACE]
    return [*mixes, *([FIGURE_10] if number in LENGTHS_S[FIGURE_10] else []), *FIGURE_7]


# ---- a production mix: hundreds of clients after ServeGen's profiles, prefixes after Mooncake's trace

CAPACITY_PER_S = 0.75
"""Requests a second that one A100 completes of this mix, in overload and under D2LPM."""
LOAD = 1.3
QUANTUM = 12_000.0
"""One request's prompt and answer, units."""
WORKER_QUANTUM = 4 * QUANTUM
DRAIN_S = 120.0


def _mixed(spec: TrafficSpec, seed: str) -> list[Client]:
    """The mix, made from a seed in place of the traces' files, so that it is the same everywhere."""
    arguments = spec.arguments
    senders = mix(
        servegen(),
        clients=arguments["clients"],
        rate_per_s=arguments["rate_per_s"],
        duration_s=arguments["duration_s"],
        seed=seed,
    )
    return _small_ones(production(senders, mooncake(seed=seed), seed=seed), seed)


def _small_ones(trace: Trace, seed: str) -> list[Client]:
    """The trace's clients. Well-behaved is one that asks for less than an equal share of what the cluster does."""
    asked: Counter[str] = Counter()
    for request in trace.requests:
        asked[request.client] += request.input_tokens + 2 * request.output_tokens
    share = asked.total() / len(asked) / LOAD
    return [
        replace(client, well_behaved=asked[client.name] <= share)
        for client in trace.clients(PackedCodec(), seed=seed)
    ]


def _plan(duration_s: float, drain_s: float = DRAIN_S) -> Plan:
    """Requests arrive for that long; then the well-behaved clients' are waited for."""
    return dlpm.plan(duration_s, drain_s=drain_s, drain_for="well-behaved")


GROUPS = ("good", "others")
"""The clients that are well-behaved, and the others."""


def _observe(run: Run) -> dict[str, Json]:
    """As for Figure 7, with the numbers of clients in place of what is kept of each, and service per second by group:
    with prompts in full, and as it was computed."""
    found = dlpm.observe(run)
    good = [client for client in run.manifest.clients.values() if client["well_behaved"]]
    groups = dict.fromkeys(GROUPS, (0.0, 0.0))
    for name, client in found.pop("clients").items():
        group = GROUPS[not run.manifest.clients[name]["well_behaved"]]
        full, actual = groups[group]
        groups[group] = full + (client["service_rate"] or 0.0), actual + (client["actual_rate"] or 0.0)
    found["groups"] = groups
    return found | {"good_clients": len(good), "all_clients": len(run.manifest.clients)}


# ---- cells


def load(what: str, number: int, *, quick: bool) -> tuple[TrafficSpec, Plan]:
    """Traffic and plan of a setting on so many GPUs."""
    if what in FIGURE_7:
        rate = KINDS[SCENARIOS[what].app].rate_per_s(number / dlpm.CLIENTS)
        length_s = 10.0 if quick else LENGTHS_S[what][number]
        return TrafficSpec(what, {"rate_per_s": rate}), _plan(length_s, dlpm.DRAIN_S)
    rate = float(f"{LOAD * CAPACITY_PER_S * number:.4g}")
    if what == PRODUCTION:
        length_s = 20.0 if quick else LENGTHS_S[what][number]
        arguments = {"rate_per_s": rate, "duration_s": length_s, "clients": 40 if quick else 50 * number}
        return TrafficSpec(what, arguments), _plan(length_s)
    if what == TRACE:
        arguments = {"part_s": PART_S, "rate_per_s": rate}
        return TrafficSpec(what, arguments), _plan(float(f"{PART_S * TRACE_PER_S / rate:.4g}"))
    if what == FIGURE_10:
        return trees(number), dlpm.plan(LENGTHS_S[what][number])
    count = int(what.removeprefix(f"{CHAT}-"))
    names = [f"client {k}" for k in range(min(4, count))]
    sent = traffic(CHAT, *(sender(name, conversations(SYSTEM_TOKENS, TURNS), 1.0) for name in names))
    plan = dlpm.plan(15.0 if quick else LENGTHS_S[CHAT][number])
    return sent, replace(plan, at_once={name: count // len(names) for name in names})


TRACE_PER_S = 3.4
"""Requests a second of the trace, about: it sets how long its part takes at another rate."""


def site_of(what: str, number: int, contender: Scheduler) -> Site:
    """Quanta by the rule of Figure 7, prompts first as there; ours has its placement's own Q^w everywhere."""
    given: dict[str, Json] = dict(dlpm.A10G) if what == FIGURE_10 else {"max_running": MAX_RUNNING}
    if what == FIGURE_10:
        given |= dlpm.TOT3.quanta
    elif what in FIGURE_7:
        given |= KINDS[SCENARIOS[what].app].quanta_7
    elif what.startswith(CHAT):
        given |= {"quantum": dlpm.CHAT.charged * 4, "worker_quantum": dlpm.CHAT.charged_in_full * 16}
    else:
        given |= {"quantum": QUANTUM, "worker_quantum": WORKER_QUANTUM}
    own = {"worker_quantum": None} if contender.fields["placement"] == _QUEUES["placement"] else {}
    return Site(**{"replicas": number, "stall_ms": 0.0, **given, **contender.fields, **own})


def _replayed(spec: TrafficSpec, seed: str) -> list[Client]:
    """A part of Mooncake's trace at another rate."""
    if not MOONCAKE.exists():
        raise ValueError(f"the trace of Mooncake's conversations is not at {MOONCAKE}")
    arguments = spec.arguments
    part = mooncake(MOONCAKE, seed=seed).between(0.0, arguments["part_s"]).at_rate(arguments["rate_per_s"])
    return _small_ones(part, seed)


# ---- what the claims are about


class Grid(dlpm.Grid):
    def over(self, one: str, other: str, what: str) -> dict[Point, float]:
        """A contender's number over another's."""
        return {at: self.number(at, one, what) / self.number(at, other, what) for at in self.points}

    def best(self, point: Point) -> float:
        """The throughput of the best of all, us included."""
        return max(self.number(point, name, "rate") for name in (OURS, *OTHERS))

    def at_our_shares(self, point: Point) -> float | None:
        """Our service, prompts in full, over what the best of the others would have if its groups of clients had the
        parts of what it computes that ours have. The median over seeds; None of records that do not say."""
        ours, ratios = self._at[point, OURS].runs, []
        for name in OTHERS:
            runs = self._at[point, name].runs
            if not all("groups" in run for run in (*ours, *runs)):
                return None
            found = [at_shares(mine["groups"], its["groups"]) for mine, its in zip(ours, runs, strict=True)]
            ratios.append(median(found))
        return min(ratios)

    def beaten(self, point: Point, percent: int) -> str:
        """In words, if another's latency is lower than ours by more than `AHEAD`, and by more than seeds differ."""
        what = f"p{percent}"
        latencies = {
            name: self._at[point, name].values(dlpm.path(point.setting, what)) for name in CONTENDERS
        }
        for name in OTHERS:
            if latencies[name] and max(latencies[name]) < (1 - AHEAD) * min(latencies[OURS]):
                part = self.over(name, OURS, what)[point]
                return f"{point.words}: {CONTENDERS[name].label}'s P{percent} {part:.2f}×"
        return ""


def at_shares(mine: Mapping[str, Sequence[float]], its: Mapping[str, Sequence[float]]) -> float:
    """Service with prompts in full over what the other would have at our shares. By group: (in full, computed)."""
    all_mine, all_its = (sum(actual for _, actual in groups.values()) for groups in (mine, its))
    worth = {group: full / actual if actual else 0.0 for group, (full, actual) in its.items()}
    would_be = all_its * sum(actual / all_mine * worth[group] for group, (_, actual) in mine.items())
    return sum(full for full, _ in mine.values()) / would_be


def _throughput(grid: Grid) -> Iterator[Claim]:
    parts = {point: grid.number(point, OURS, "rate") / grid.best(point) for point in grid.points}
    short = [point for point, part in parts.items() if part < ENOUGH.get(point.setting, ENOUGH_ELSE)]
    usual = [part for point, part in parts.items() if point.setting not in ENOUGH]
    if usual:
        judges, mixes = (
            min(part for point, part in parts.items() if point.setting == what) for what in ENOUGH
        )
        yield graded(not short, 4 * len(short) <= len(parts)).claim(f"""Its throughput is that of the best of
            all schedulers, fair or not | | at least {min(usual):.3f}× the best (asked: {ENOUGH_ELSE});
            judgements of S1 {judges:.3f}× ({ENOUGH["judge-s1"]}), the production mix {mixes:.3f}×
            ({ENOUGH[PRODUCTION]}); short of it at {len(short)} of {len(parts)} points | What a fair scheduler
            cannot have: where the bad client's requests share more, each unit of work for it counts as more
            service, and LPM serves more of it. The rest is within a few percent.""")
    yield from _at_our_shares(grid)
    for name in ("d2lpm", "preble", "cache-aware", "lmetric"):
        gains = grid.over(OURS, name, "rate")
        (least, where), mean = min((gain, point) for point, gain in gains.items()), fmean(gains.values())
        yield at_least(mean, 1, 0.98).claim(f"""Its throughput beside {CONTENDERS[name].label}'s | | mean
            {mean:.3f}×, at least {least:.2f}× ({where.words}) | As said of the best of all.""")


def _at_our_shares(grid: Grid) -> Iterator[Claim]:
    shared = {point: ratio for point in grid.points if (ratio := grid.at_our_shares(point)) is not None}
    if len(shared) < len(grid.points):
        return
    below = [f"{at.words}: {ratio:.3f}" for at, ratio in shared.items() if ratio < ENOUGH_ELSE]
    found = f"below {ENOUGH_ELSE} at {len(below)} of {len(shared)} points: {'; '.join(below) or 'nowhere'}"
    yield at_least(
        min(shared.values()), ENOUGH_ELSE, 0.9
    ).claim(f"""At its clients' shares nobody would have more | |
        what the others compute counted at the shares that our well-behaved and other clients have, ours is at least
        {min(shared.values()):.3f}× the best of them; {found} | On Mooncake's trace turns between clients evict
        prefixes, and LPM leaves for later what is not cached: over LPM this placement has the best throughput there
        too (`beyond-frontier`). Where nothing is overloaded LMetric's spread is a little better.""")


def _latency(grid: Grid) -> Iterator[Claim]:
    late = [one for point in grid.points for percent in (50, 99) if (one := grid.beaten(point, percent))]
    of = 2 * len(grid.points)
    yield graded(not late, 8 * len(late) <= of).claim(f"""Well-behaved clients wait least of all, at the
        median and at P99 | | another's latency is lower by more than {AHEAD:.0%}, and by more than seeds
        differ, at {len(late)} of {of} points: {"; ".join(late) or "nowhere"} | Where nothing is overloaded
        everybody's latency is about the same, and a scheduler that is not fair serves small requests as well.""")
    for name, asked in (("preble", 2.3), ("rr", 4.06), ("vtc", 3.5)):
        found = [grid.over(name, OURS, what) for what in ("p50", "p99")]
        ratios = [one[point] for point in grid.points if point.setting in FIGURE_7 for one in found]
        mean, below = fmean(ratios), sum(one < 1 for one in ratios)
        yield at_least(mean, asked, 0.6 * asked).claim(f"""Well-behaved clients' latency under
            {CONTENDERS[name].label} over ours, in Figure 7's settings | asked: a mean of {asked}× | mean
            {mean:.2f}×, from {min(ratios):.2f}× to {max(ratios):.1f}×, below one at {below} of {len(ratios)};
            latencies that were cut off count as the time at which they were | Ratios under overload grow with
            its length, and here it lasts half as long as in Figure 7, or a quarter.""")


def _default(grid: Grid) -> Iterator[Claim]:
    paths = ("rate", "actual_rate", "p50_s", "p99_s", "ttft_p50_s")
    rate, computed, p50, p99, first = (grid.over(DEFAULT, OURS, path) for path in paths)
    (least, where), mean = min((gain, point) for point, gain in rate.items()), fmean(rate.values())
    sooner = sum(one < 1 + AHEAD for one in p50.values())
    holds = graded(least >= 1 and sooner == len(p50), mean >= 0.97 and 2 * sooner > len(p50))
    yield holds.claim(f"""What ships serves as much as prompts first do, and programs of well-behaved clients end
        sooner | | over D2LPM by queues with prompts first: throughput {mean:.3f}× in the mean, at least {least:.3f}
        ({where.words}), work that was computed {fmean(computed.values()):.3f}×; P50 of programs
        {fmean(p50.values()):.2f}×, not longer at {sooner} of {len(p50)} points, P99 {fmean(p99.values()):.2f}×; P50
        of first tokens {fmean(first.values()):.2f}× | A step for prompts that is short for those who decode costs what
        each step costs, and small decodes read all weights, where prompts first decode later and in larger batches;
        so first tokens come later and last ones sooner. Where the bad client's requests share more (judgements), fair
        shares are less service with prompts in full.""")


def _plot(grid: Grid) -> Panels:
    names = (OURS, DEFAULT, "d2lpm", "preble", "lmetric", "vtc")

    def panel(unit: str, what: str, over: Callable[[Point], float], log: str = "") -> Panel:
        bars = {
            CONTENDERS[name].label: [grid.number(point, name, what) / over(point) for point in grid.points]
            for name in names
        }
        return Panel(unit, bars=bars, groups=[point.name for point in grid.points], log=log)

    return [
        [panel("throughput, × the best", "rate", grid.best)],
        [panel("P99, × ours", "p99", lambda point: grid.number(point, OURS, "p99"), "y")],
    ]
