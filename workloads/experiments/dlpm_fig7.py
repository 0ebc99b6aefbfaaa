"""DLPM, Figure 7: three kinds of programs, two kinds of misbehaviour, one to eight A100s, five schedulers. And what
its ratios depend on: load, the run's length, limits of a replica, quanta."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from workloads.clients import SCENARIOS
from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments.claims import Claim, Part, Table, graded, shown
from workloads.experiments.contract import SEEDS, Json, Result, Row
from workloads.experiments.dlpm_setting import DEFAULT, KINDS, SCHEDULERS, SHIPPED, Point, is_cut
from workloads.plots import Figure, Panel, Panels

PANELS = (("qa-s1", "tot-s1", "judge-s1"), ("qa-s2", "tot-s2", "judge-s2"))
"""Scenarios as the panels lie: more requests above, longer prefixes below."""

SCENARIO_NAMES = (*PANELS[0], *PANELS[1])

NUMBERS = (1, 2, 4, 8)
"""Of GPUs. With the largest there is one seed, with the others there are three."""

LENGTH_S = 240.0

COLUMNS: Mapping[str, str] = {
    "d2lpm": SCHEDULERS["d2lpm"].label,
    DEFAULT: SHIPPED.label,
    **{name: chosen.label for name, chosen in SCHEDULERS.items()},
}

AHEAD = 0.01
"""Throughputs that differ by less count as equal."""
SAME_INDEX = 0.005
"""Jain's indices that differ by less count as equal."""

PAPER: Mapping[tuple[str, str], tuple[float, float | None]] = {
    ("throughput", "vtc"): (2.87, None),
    ("throughput", "rr"): (2.22, None),
    ("latency", "vtc"): (7.96, 2.98),
    ("latency", "rr"): (9.55, 4.06),
    ("latency", "preble"): (7.18, 2.90),
}
"""D2LPM's gain: the largest, and the mean."""


class Figure7(dlpm.ScenarioExperiment):
    id = "dlpm-fig7"
    title = "Throughput, fairness and latency with one misbehaving client, from one to eight A100s"
    source = "DLPM, Figure 7"
    about = f"""Llama-3.1-8B; three well-behaved clients and a bad one, who sends more requests (S1) or longer
        prefixes (S2), as in Tables 2 and 3; Gamma arrivals for {LENGTH_S:.0f} s, then up to {dlpm.DRAIN_S:.0f} s
        more for what the well-behaved clients still wait for. Each client sends an equal share of what the cluster
        completes of well-behaved programs (QA's bad client in S1 four times that), so rates grow with D, the
        well-behaved clients alone ask for three quarters of the cluster, and what makes the bad one bad is overload.
        Q^u is what four requests of a well-behaved client are charged by a replica, Q^w what sixteen of its programs
        are charged by the router, where prompts count in full. A replica runs {dlpm.MAX_RUNNING} requests at most.
        Rates, durations, clients, limits and quanta are not in the paper: these are one rule for all workloads.
        cache_aware is sglang-router's algorithm over replicas with LPM; with one replica it is RR+LPM, as is Preble.
        Three seeds, medians; on {NUMBERS[3]} GPUs one."""

    lengths_s = (LENGTH_S, 15.0)

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        for replicas in NUMBERS if full else NUMBERS[:2]:
            # Alone, Preble's and cache_aware's replica is RR+LPM's.
            names = SCHEDULERS if replicas > 1 else ("d2lpm", "rr", "vtc")
            runs: list[tuple[str, str, Mapping[str, Json]]] = [(name, name, {}) for name in names]
            runs.append((DEFAULT, "d2lpm", SHIPPED.fields))
            seeds = SEEDS[:1] if replicas == max(NUMBERS) else None
            for scenario in SCENARIO_NAMES:
                for column, scheduler, more in runs:
                    name = f"{scenario}-d{replicas}-{column}"
                    site, sent = dlpm.scenario(scenario, scheduler, replicas, **more)
                    yield Row(name, site, sent, COLUMNS[column], seeds=seeds)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        grid = Grid(at)
        yield from _throughput(grid)
        yield from _fairness(grid)
        yield from _latency(grid)
        if grid.get(Point("tot-s2", 8), "rr"):
            yield from _dealt_out_trees(grid)
        yield _gains_table(grid)
        head = f"workload | D | {' | '.join(COLUMNS.values())}"
        for what, (title, unit, caption) in MEASURES.items():
            lines = [grid.row(_workload(point.setting), point, COLUMNS, what) for point in grid.points]
            yield Table(title, head, lines)
            if unit:
                name = "throughput" if what == "rate" else what.replace("_", "-")
                yield Figure(name, caption, _panels(grid, what, unit), one_scale=False)
        yield from _notes(grid)


# ---- results by where they stand in the figure


class Ratio(NamedTuple):
    """One scheduler's number over another's at one point; a lower bound if `at_least`."""

    value: float
    point: Point
    at_least: bool = False


class Gain:
    def __init__(self, ratios: Sequence[Ratio]) -> None:
        self.ratios, self.mean = ratios, fmean(one.value for one in ratios)
        self.lowest, *_, self.most = sorted([*ratios, *ratios], key=lambda one: one.value)

    @property
    def words(self) -> str:
        bound, below = "more than " if self.most.at_least else "", sum(one.value < 1 for one in self.ratios)
        return f"""up to {bound}{self.most.value:.2f}× ({place(self.most.point)}), mean {self.mean:.2f}×, below one
            at {below} of {len(self.ratios)} points"""

    @property
    def span(self) -> str:
        return f"{self.lowest.value:.2f} to {self.most.value:.2f} times"


class Grid(dlpm.Grid):
    """Points scenario by scenario."""

    def __init__(self, results: Mapping[str, Result]) -> None:
        super().__init__(results)
        self.points.sort(key=lambda point: SCENARIO_NAMES.index(point.setting))
        self.numbers = sorted({point.number for point in self.points})

    def ratios(self, what: str, over: str, under: str) -> Iterator[Ratio]:
        """One scheduler's number over another's, wherever both have one. Where the lower number is a latency that was
        cut off there is no ratio."""
        for point in self.points:
            one, other, path = self.get(point, over), self.get(point, under), dlpm.path(point.setting, what)
            if one is not None and other is not None and not is_cut(other, path):
                more, less = one.median(path), other.median(path)
                if more is not None and less:
                    yield Ratio(more / less, point, is_cut(one, path))

    def rates(self, under: str, over: str = "d2lpm") -> list[Ratio]:
        return list(self.ratios("rate", over, under))

    def latencies(self, over: str, percents: Iterable[str] = ("p50", "p99")) -> list[Ratio]:
        """Ratios of the percentiles of the well-behaved clients' latency, over D2LPM's."""
        return [one for percent in percents for one in self.ratios(percent, over, "d2lpm")]

    def judges_lower(self, name: str) -> float:
        """By what part the P99 of judgements with longer prefixes is lower than D2LPM's, at most."""
        return 1 - min(one.value for one in self.latencies(name, ["p99"]) if one.point.setting == "judge-s2")


def place(point: Point) -> str:
    return f"{_workload(point.setting)}, D = {point.number}"


def _workload(scenario: str) -> str:
    return f"{scenario[-2:].upper()} {KINDS[SCENARIOS[scenario].app].title}"


# ---- claims


def _throughput(grid: Grid) -> Iterator[Claim]:
    for name in ("vtc", "rr"):
        gain, most = Gain(grid.rates(name)), PAPER["throughput", name][0]
        yield graded(
            gain.most.value >= 0.75 * most and gain.mean > 1, gain.most.value >= 1.25 and gain.mean > 1
        ).claim(f"""D2LPM's throughput beside {COLUMNS[name]}'s | up to {most:.2f}× | {gain.words}""")
    rates = grid.rates("preble")
    behind = [one for one in rates if one.value < 1 - AHEAD]
    least = Gain(rates).lowest
    several = [point for point in grid.points if point.number > 1 and "qa" in point.setting]
    hits = {name: [grid.number(one, name, "hit_rate") for one in several] for name in ("d2lpm", "preble")}
    more = max((1 - one) / (1 - other) - 1 for one, other in zip(hits["d2lpm"], hits["preble"], strict=True))
    spans = {name: f"{min(found):.1%} to {max(found):.1%}" for name, found in hits.items()}
    yield graded(
        all(one.point == ("qa-s2", 8) for one in behind), least.value >= 0.9
    ).claim(f"""D2LPM's throughput is at least Preble's but for QA with longer documents on {NUMBERS[3]} GPUs
        | Preble ahead at 1 of 18 points | Preble ahead by more than {AHEAD:.0%} at {len(behind)} of
        {len(rates)} points, D2LPM at least {least.value:.2f}× ({place(least.point)}) | Two things. The
        service rate counts prompts in full, and the bad client's are cheap where many of its requests share
        them: D2LPM holds it back and so serves fewer of these (judge, S1). And moving a client whose credit
        is spent loses a hit now and then: of QA's prompts {spans["d2lpm"]} are cached where Preble has
        {spans["preble"]}, so up to {more:.0%} more must be computed. That is what the paper saw at one point.
        Preble is at its best here: the replicas report what they hold, and it moves load, while in the paper
        it sent everything to one GPU for minutes. Trees go to D2LPM.""")


def _fairness(grid: Grid) -> Iterator[Claim]:
    def order(text: str, above: str, below: str, margin: float) -> Claim:
        pairs = [
            (one["jain"], other["jain"])
            for point in grid.points
            if (one := grid.get(point, above)) is not None and (other := grid.get(point, below)) is not None
        ]
        means = [fmean(column) for column in zip(*pairs, strict=True)]
        times = sum(one > other + margin for one, other in pairs)
        verdict = graded(times == len(pairs), 2 * times > len(pairs) and means[0] >= means[1])
        ours = f"at {times} of {len(pairs)} points; means {means[0]:.2f} and {means[1]:.2f}"
        return verdict.claim(text.replace("{}", ours))

    few = [point for point in grid.points if point.setting == "judge-s1" and point.number < 8]
    even = min(grid.number(point, "vtc", "jain_actual") for point in few)
    least = f"""VTC's Jain's index is at least D2LPM's | VTC >= D2LPM | {{}} | Not for judgements of S1 on few GPUs,
        where VTC finds far fewer of the prompts cached and so leaves the well-behaved clients backlogged too. Then
        all receive equal work (the index of actual service is {even:.2f} and more), which is more service with
        prompts in full for the bad client, whose prompts are shared by 17 requests. Elsewhere it is below by less
        than seeds differ."""
    yield order(least, "vtc", "d2lpm", -SAME_INDEX)
    above = """D2LPM's Jain's index is above Preble's | D2LPM > Preble | {} | Not in part of S2. Judgements overload
        nothing as long as prefixes are kept, so all clients have what they ask for under both. With trees the ten
        times longer questions set the index: all clients' trees are served, and each of the bad one's is more
        service."""
    yield order(above, "d2lpm", "preble", SAME_INDEX)
    slightly = """Preble's Jain's index is slightly above RR+LPM's | Preble > RR+LPM | {} | Preble's replicas run LPM
        here, as RR+LPM's do. Its queue of ten groups by hit rate, to which the paper owes the difference, is not
        part of this comparison: it is placement alone that differs."""
    yield order(slightly, "preble", "rr", SAME_INDEX)


def _latency(grid: Grid) -> Iterator[Claim]:
    for name in ("preble", "rr", "vtc"):
        gain, (most, mean) = Gain(grid.latencies(name)), PAPER["latency", name]
        assert mean is not None
        of = 2 * sum(grid.get(point, name) is not None for point in grid.points)
        why = f"""Preble is at its best here, as said of throughput. And a bad client with longer prefixes (S2)
            overloads little while they are cached: judgements keep up under both, and there Preble's P99 is lower by
            up to {grid.judges_lower("preble"):.0%}, since D2LPM moves clients and finds less cached."""
        yield graded(
            gain.most.value >= 0.75 * most and gain.mean >= max(1.0, 0.75 * mean),
            gain.most.value >= 1.25 and gain.mean > 1,
        ).claim(f"""Latency (P50 and P99) of well-behaved clients under {COLUMNS[name]}, beside D2LPM's | up
            to {most:.2f}×, mean {mean:.2f}× | {gain.words}; {len(gain.ratios)} of {of} are known |
            {why if name == "preble" else ""}""")


def _dealt_out_trees(grid: Grid) -> Iterator[Claim]:
    rate, hits = (
        {number: grid.number(Point("tot-s2", number), "rr", what) for number in (1, 4, 8)}
        for what in ("rate", "hit_rate")
    )
    ratio = rate[8] / rate[4]
    yield graded(ratio < 1).claim(f"""RR+LPM's throughput on trees with longer questions is lower on 8 GPUs
        than on 4 | lower | {ratio:.2f}× that of 4 | The hit rate falls as in the paper, and each of 8 GPUs
        serves {rate[8] / 8 / rate[1]:.0%} of what one serves alone; all together still serve more. Two things
        that the paper's engine may have had do not change this: FCFS in place of LPM, to which SGLang turns
        when more than 128 requests wait, and a pool of 100,000 tokens. How its throughput was timed, with or
        without the last stragglers, is not stated.""")
    yield graded(
        hits[8] < hits[4] and hits[8] <= 0.6, hits[8] < hits[4] and hits[8] <= 0.8
    ).claim(f"""Its hit rate falls, since round robin keeps no tree in one place | from 95 % to 50 % |
        {", ".join(f"{hits[number]:.0%} at D = {number}" for number in (1, 4, 8))} | The fall from 4 to 8 GPUs
        is smaller than the paper's.""")


# ---- tables, plots, notes


_OF = "latency of the well-behaved clients, s (of QA: TTFT; > where the run ended before)"
_CAPTION = "of the well-behaved clients: a program's time, of QA the time to first token."
MEASURES = {
    "rate": ("Service rate, units/s", "units/s", "Service rate of all clients while programs arrive."),
    "actual_rate": ("Actual service rate (extend tokens and outputs), units/s", "", ""),
    "jain": (
        "Jain's index of the clients' service rates",
        "Jain's index",
        "Jain's index, over the time that all clients are active.",
    ),
    "p50": (f"P50 {_OF}", "P50, s", f"P50 {_CAPTION}"),
    "p99": (f"P99 {_OF}", "P99, s", f"P99 {_CAPTION}"),
    "hit_rate": ("Hit rate", "hit rate", "Part of the prompts that was cached."),
    "difference": (dlpm.DIFFERENCE, "", ""),
    "imbalance": ("Prompt tokens computed by the busiest replica over the average", "", ""),
}
"""The title of its table, and of its figure, if there is one, the unit and the caption."""


def _gains_table(grid: Grid) -> Table:
    rows = []
    for what, of in (("throughput", grid.rates), ("latency", grid.latencies)):
        for name in ("vtc", "rr", "preble", "cache-aware", DEFAULT):
            gain = Gain(of(name))
            most = f"{'> ' if gain.most.at_least else ''}{gain.most.value:.2f}"
            ours = [most, place(gain.most.point), f"{gain.mean:.2f}", f"{gain.lowest.value:.2f}"]
            rows.append([what, COLUMNS[name], *ours, *PAPER.get((what, name), (None, None))])
    return Table(
        "D2LPM's gain: its throughput over another's, another's latency over its own",
        "of | beside | most | where | mean | least | most, paper | mean, paper",
        rows,
    )


def _panels(grid: Grid, what: str, unit: str) -> Panels:

    def panel(scenario: str) -> Panel:
        lines = {}
        for scheduler, label in COLUMNS.items():
            there = {n: one for n in grid.numbers if (one := grid.get(Point(scenario, n), scheduler))}
            lines[label] = list(there), [one.median(dlpm.path(scenario, what)) for one in there.values()]
        top = 1.03 if what == "jain" else None
        return Panel(unit, lines, "D, GPUs", _workload(scenario), swept=True, log="x", top=top)

    return [[panel(scenario) for scenario in row] for row in PANELS]


def _notes(grid: Grid) -> Iterator[str]:
    rate = Gain(grid.rates("d2lpm", over=DEFAULT))
    p50, p99 = (Gain(grid.latencies(DEFAULT, [percent])) for percent in ("p50", "p99"))
    preble = Gain(grid.rates("preble", over=DEFAULT))
    yield f"""The shipped default is D2LPM by queues with its own quanta and a rule of steps, which the paper does not
        have: steps are mixed, and while a client is there that is not backlogged, none takes longer than
        {SHIPPED.fields["stall_ms"]:.0f} ms. All else here computes prompts first. It serves {rate.span} as much as
        D2LPM, {rate.mean:.2f} in the mean, and {preble.span} as much as Preble, {preble.mean:.2f} in the mean;
        the well-behaved clients' P50 is {p50.span} D2LPM's, {p50.mean:.2f} in the mean ({len(p50.ratios)} points where
        both are known), and their P99 {p99.span}, {p99.mean:.2f} in the mean."""
    yield """A ratio of latencies under overload is no constant: it grows with the time that the overload lasts,
        since requests behind the bad client's backlog wait ever longer. `dlpm-fig7-load` has the ratios for shorter
        and longer runs. From below, a tree's latency is bounded by its four answers in a row in a full batch, so
        trees have smaller ratios than QA's first tokens."""
    hits = grid.number(Point("qa-s1", max(grid.numbers)), "rr", "hit_rate")
    yield f"""QA's ratios beside RR+LPM and VTC are larger than the paper's largest. All eight questions about a
        document come at once here, so round robin computes the document on every GPU: of QA's prompts in S1
        {hits:.0%} are cached with most GPUs. The paper does not say how its questions arrive."""
    late = [one.point for one in grid.latencies("vtc", ["p99"]) if one.value < 1]
    first = [f"D = {point.number}" for point in late if point.setting == "tot-s1"]
    yield f"""For trees of S1, VTC's P99 is lower than D2LPM's at {", ".join(first) or "no number of GPUs"}. It
        spreads a client over all GPUs, while D2LPM keeps a tree where its prefix is, for as long as the client has
        credit there, behind the client's other requests. With a sixteenth of Q^w this is gone, and a part of the
        hits with it: see `dlpm-fig7-load`. Where nothing is overloaded (judge, S2) Preble's and cache_aware's P99 is
        lower by up to {grid.judges_lower("preble"):.0%} and {grid.judges_lower("cache-aware"):.0%}, for they keep
        more prefixes."""
    yield "cache_aware places about as well as Preble: as much is cached, and nobody is protected."


# ---- what the ratios depend on

REPLICAS = 2
_TOT = KINDS["tot"].quanta_7
VARIANTS: Mapping[str, tuple[str, float, float, Mapping[str, Json]]] = {
    "base": ("as in Figure 7", 1.0, 240.0, {}),
    "load-0.8": ("rates at 80 % of an equal share", 0.8, 240.0, {}),
    "load-1.2": ("rates at 120 % of an equal share", 1.2, 240.0, {}),
    "short": ("arrivals for 2 minutes", 1.0, 120.0, {}),
    "long": ("arrivals for 8 minutes", 1.0, 480.0, {}),
    "running": ("at most 2,048 requests run, SGLang's default", 1.0, 240.0, {"max_running": 2048}),
    "pool": ("a KV pool of 100,000 tokens", 1.0, 240.0, {"kv_tokens": 100_000}),
    "small-qu": ("Q^u an eighth", 1.0, 240.0, {"quantum": _TOT["quantum"] / 8}),
    "large-qu": ("Q^u eight times", 1.0, 240.0, {"quantum": _TOT["quantum"] * 8}),
    "small-qw": ("Q^w a sixteenth", 1.0, 240.0, {"worker_quantum": _TOT["worker_quantum"] / 16}),
}
"""The setting with one thing changed: what, the load, seconds of arrivals, and fields of the site. A quantum makes a
difference to D2LPM alone."""


class Sensitivity(dlpm.ScenarioExperiment):
    id = "dlpm-fig7-load"
    title = "What Figure 7's ratios depend on"
    source = "this project, around DLPM's Figure 7"
    about = """S1 of tree of thoughts on two A100s with one thing changed at a time, run until the last program of a
        well-behaved client has ended; and the overload by well-behaved clients on one replica that gives the
        capacity from which all rates follow."""

    lengths_s = (LENGTH_S, 15.0)
    seeds = SEEDS[:1]

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        for name in KINDS:
            site, sent = dlpm.scenario(f"{name}-s1", "d2lpm", 1, load=2.0, with_bad=False)
            yield Row(f"flood-{name}", site, sent, plan=dlpm.plan(length_s, drain_for="well-behaved"))
        for name in VARIANTS if full else ("base", "load-1.2", "small-qu"):
            _, load, own_s, more = VARIANTS[name]
            plan = dlpm.plan(own_s if full else length_s, drain_s=None, drain_for="well-behaved")
            for scheduler in ("d2lpm",) if "-q" in name else ("d2lpm", "rr", "vtc"):
                site, sent = dlpm.scenario("tot-s1", scheduler, REPLICAS, load=load, **more)
                yield Row(f"{name}-{scheduler}", site, sent, SCHEDULERS[scheduler].label, plan)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        rows = {}
        for name in (name for name in VARIANTS if f"{name}-d2lpm" in at):
            ours, base = at[f"{name}-d2lpm"], "base" if "-q" in name else name
            others = [at[f"{base}-{other}"] for other in ("vtc", "rr")]
            gains = [ours["service_rate"] / other["service_rate"] for other in others]
            gains += [other[path] / ours[path] for path in ("p50_s", "p99_s") for other in others]
            indices = [one.shown("jain") for one in (ours, *others)]
            words = [f"{gain:.2f}" for gain in gains]
            rows[name] = [VARIANTS[name][0], *words, *indices, ours.shown("p50_s")]
        yield Table(
            f"S1 tree of thoughts, D = {REPLICAS}: D2LPM's gains and Jain's indices",
            """setting | throughput, to VTC | throughput, to RR+LPM | P50, to VTC | P50, to RR+LPM | P99, to VTC |
                P99, to RR+LPM | Jain, D2LPM | Jain, VTC | Jain, RR+LPM | P50 of D2LPM, s""",
            list(rows.values()),
        )
        capacity = {name: at[f"flood-{name}"]["actual_rate"] for name in KINDS}
        yield Table(
            "Capacity of one A100 for well-behaved programs under DLPM",
            "kind | actual service, units/s | programs/s | as rates take it | a client's rate with one replica",
            [
                [kind.title, capacity[name], capacity[name] / kind.charged, kind.capacity_per_s,
                 shown(kind.rate_per_s(1 / dlpm.CLIENTS))]
                for name, kind in KINDS.items()
            ],
        )  # fmt: skip
        if {"short", "long", "running"} <= rows.keys():
            rate, p50, jain = (
                "{}, {} and {}".format(*(rows[name][column] for name in ("short", "base", "long")))
                for column in (2, 4, 7)
            )
            yield f"""A ratio of latencies under overload is no constant: requests behind the bad client's backlog
                wait longer, the longer the backlog has grown. So a largest ratio says as much about how long the
                overload lasted as about a scheduler. After 120, 240 and 480 s of arrivals RR+LPM's P50 is
                {p50} times D2LPM's, D2LPM's throughput {rate} times RR+LPM's, and its Jain's index
                {jain}."""
            yield f"""No order of admission can hold back what is admitted at once: with at most 2,048 running
                requests in place of 256 D2LPM's Jain's index is {rows["running"][7]} in place of {rows["base"][7]}."""
