"""What one client's load does to the others on four simulated A100: the scenes of bench isolation, and what the bound
on a step costs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from operator import attrgetter

from sglang_fair.core.options import shipped
from workloads.clients import Client
from workloads.experiments.claims import Entry, Part, Table, at_least, at_most, graded
from workloads.experiments.contract import Cell, Json, Result, Row, Simulated, TrafficSpec
from workloads.isolation.attacks import ATTACKS, FLOOD, LIGHT_PERIOD_S, TRICKLE, Scene, scenes
from workloads.isolation.measures import OURS, STOCK, IsolationRow, Observed, Stack, observe, rows
from workloads.plots import Figure, Panel
from workloads.programs import PackedCodec
from workloads.records import Run
from workloads.session import Plan
from workloads.simulation import Site

REPLICAS, MAX_RUNNING = 4, 256
WARM_UP_S, SECONDS, DRAIN_S = 3.0, 40.0, 10.0
SHORT, SHORT_SECONDS = (TRICKLE, "many-short"), 10.0
"""Floods of many steps, which take a simulator long."""
FLOOD_SECONDS, FLOOD_PERIOD_S = 25.0, 1.5
QUICK_SECONDS, QUICK_PERIOD_S = 2.0, 1.0
HOP_S = 0.002
TOKEN_STEP_S = 0.25
MIXED = "stock-mixed"
"""Stock with --enable-mixed-chunk."""
STACKS = {
    "stock": Stack(STOCK, "cache_aware", "fcfs"),
    MIXED: Stack(f"{STOCK}, mixed", "cache_aware", "fcfs"),
    "dlpm": Stack(OURS, "d2lpm-queue", "dlpm"),
    "vtc": Stack(OURS, "d2lpm-queue", "vtc"),
}
CROWD, RUNNING = "1000-concurrent", (192, 128, 64)
"""The attack that is the hardest for programs, and fewer requests that a replica may run beside it."""
SEVERAL = 3
"""Light clients beside a flood."""
FLOODS = (50, 100, 200, 400, 800)
STALLS_MS = (50.0, 100.0, 200.0)
STALL_FLOOD, SMALLER_FLOOD = 800, 400
"""The floods that the words are about."""
BASE = "stall-off"
LABELS = {BASE: "prompts first", **{f"stall-{stall_ms:g}": f"{stall_ms:g} ms" for stall_ms in STALLS_MS}}
"""Bounds on a prefill step."""
SHARE, SLOWDOWN, TTFT, THROUGHPUT = 0.9, 1.1, 2.0, 0.98
"""What is to hold: see `workloads.isolation.measures`. The last is of the better stock's throughput, without and with
a light client."""


class Isolation(Simulated):
    id = "beyond-isolation"
    title = "What one client's load does to the others"
    source = "beyond the papers, whose bounds are about clients that wait"
    about = f"""Llama-3.1-8B on four A100, the scenes of `sglang-fair bench isolation`. One client keeps requests of
        one kind under way; beside it runs a victim (its requests do nothing but decode), or a light
        client holds a short conversation every few seconds. Stock is FCFS behind cache_aware, which
        forms prompts before anything else, or mixes both kinds of steps; ours are DLPM and VTC behind
        D2LPM by queues, with the rule of steps and its target for tokens. n is the number of clients.
        A victim's share is of what n clients get under generalized processor sharing (GPS), so
        {SHARE} of it is {SHARE} of the engine's time over n. A light client's slowdown is over n
        times the time of its programs when it is alone."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        for name, stack in STACKS.items():
            site = site_of(stack, target_tpot_ms=None, mixed_chunk=True if name == MIXED else None)
            for scene in scenes(tuple(ATTACKS) if full else (TRICKLE,), 1):
                seconds = SHORT_SECONDS if scene.attack in SHORT else SECONDS
                yield row(f"{name}.{scene.name}", site, scene, full, seconds, LIGHT_PERIOD_S)
        for most in RUNNING if full else ():
            site = replace(site_of(STACKS["dlpm"], target_tpot_ms=None), max_running=most)
            for scene in (Scene(light=1), Scene(CROWD), Scene(CROWD, 1)):
                yield row(f"running-{most}.{scene.name}", site, scene, full, SECONDS, LIGHT_PERIOD_S)
        yield row("light", site_of(STACKS["dlpm"]), Scene(light=SEVERAL), full)
        bounds = {BASE: 0.0} | {f"stall-{stall_ms:g}": stall_ms for stall_ms in STALLS_MS}
        for name in bounds if full else (BASE, "stall-100"):
            for flood in FLOODS if full else FLOODS[:1]:
                site = site_of(STACKS["dlpm"], stall_ms=bounds[name])
                yield row(f"{name}.{flood}", site, Scene(f"{FLOOD}{flood}", SEVERAL), full)

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        return _load(cell.traffic.arguments, seed)[0]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return asdict(observe(run, min(WARM_UP_S, run.manifest.duration_s / 4)))

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        table = {(_name(row), row.attack, row.clients): row for row in rows(_runs(at))}
        better = {
            key[1:]: max(row.tokens_per_s or 0.0, table["stock", *key[1:]].tokens_per_s or 0.0)
            for key, row in table.items()
            if key[0] == MIXED
        }

        def over_better(row: IsolationRow) -> float | None:
            return row.tokens_per_s and row.tokens_per_s / better[row.attack, row.clients]

        def worst(
            of: Callable[[IsolationRow], float | None], pick: Callable[..., float], clients: int
        ) -> dict[str, float]:
            found: dict[str, list[float]] = {name: [] for name in STACKS}
            for (stack, _, count), row in table.items():
                if count == clients and (value := of(row)) is not None:
                    found[stack].append(value)
            return {name: pick(values) for name, values in found.items()}

        share = worst(attrgetter("victim_share_of_gps"), min, 2)
        slowdown = worst(attrgetter("slowdown_over_n"), max, 2)
        ttft = worst(attrgetter("ttft_p99_over_solo"), max, 2)
        alone, together = (worst(over_better, min, clients) for clients in (1, 2))
        yield graded(min(share["dlpm"], share["vtc"]) >= SHARE).claim(f"""Running victims keep their share of
            the time beside a trickle of prompts | | DLPM {share["dlpm"]:.2f}, VTC {share["vtc"]:.2f} of GPS;
            stock {share["stock"]:.2f} | The engine's loop forms prompts first.""")
        most = max(slowdown["dlpm"], slowdown["vtc"])
        yield at_most(most, SLOWDOWN, slowdown["stock"] / 2).claim(f"""Beside every kind of flood, a light
            client's programs take little longer than its share of the engine makes them | | at most
            {slowdown["dlpm"]:.2f} (DLPM) and {slowdown["vtc"]:.2f} (VTC) times n times solo; stock
            {slowdown["stock"]:.1f}, {slowdown[MIXED]:.1f} mixed | A decode step serves all
            that run, and takes longer the more there are. A flood's requests that run already are left alone, so
            beside hundreds of them the first programs of a light client are over before the batch is smaller. What is
            asked for needs a smaller batch all the time, and that costs more throughput than may be lost: see the table
            of fewer running requests.""")
        most = max(ttft["dlpm"], ttft["vtc"])
        yield at_most(most, TTFT, ttft["stock"] / 4).claim(f"""and its first tokens come soon | | TTFT P99 at
            most {ttft["dlpm"]:.1f} (DLPM) and {ttft["vtc"]:.1f} (VTC) times solo; stock {ttft["stock"]:.0f},
            mixed {ttft[MIXED]:.0f} | A step under way is not ended; it may last 100 ms, and a light client's own
            first one takes 70.""")
        yield at_least(
            min(alone["dlpm"], alone["vtc"]), THROUGHPUT, 0.9
        ).claim(f"""The cluster does as much as
            the better of both stocks without a light client | | tokens/s at least {alone["dlpm"]:.3f} (DLPM) and
            {alone["vtc"]:.3f} (VTC) times the better's | The trickle's few requests are spread over replicas less
            evenly than by cache_aware, and chunks are bounded.""")
        yield at_least(min(together["dlpm"], together["vtc"]), THROUGHPUT, 0.85).claim(f"""and with one | | at
            least {together["dlpm"]:.3f} (DLPM) and {together["vtc"]:.3f} (VTC) times the better's | Steps are
            shorter while a light client decodes, and each costs something; stock lets the light client wait. With
            steps eight times as long while nobody else is here, in place of four, it would be 0.972 beside long prompts
            (3 seeds, by hand), and whoever comes after a minute would find one of 0.8 s.""")
        yield Table(
            """Medians over seeds, with one light client or one victim beside the flood; throughput over stock's
                without and with the light client""",
            """flood | stack | victim's share of GPS | slowdown over n | TTFT P99 over solo | throughput alone | with
                it""",
            [
                [attack, stack, row.victim_share_of_gps, row.slowdown_over_n, row.ttft_p99_over_solo,
                 table[stack, attack, 1].throughput_over_stock, row.throughput_over_stock]
                for attack in ATTACKS
                for stack in STACKS
                if (row := table.get((stack, attack, 2))) is not None
            ],
        )  # fmt: skip
        yield from _limits(at)
        yield from _bounds(at)


def _limits(at: Mapping[str, Result]) -> Iterator[Part]:
    """What fewer running requests would give a light client, and cost."""
    alone, beside = (scene.name for scene in (Scene(light=1), Scene(CROWD, 1)))
    stocks = [found for name in ("stock", MIXED) if (found := at.get(f"{name}.{beside}")) is not None]
    better = max((found["tokens_per_s"] for found in stocks), default=0.0)
    lines = list[list[Entry]]()
    for most, name in ({MAX_RUNNING: "dlpm"} | {most: f"running-{most}" for most in RUNNING}).items():
        if (one := at.get(f"{name}.{beside}")) is not None:
            solo = at[f"{name}.{alone}"]
            slowdown, ttft = (
                slowest_program_s(one) / slowest_program_s(solo) / 2,
                one["ttft_p99_s"] / solo["ttft_p99_s"],
            )
            lines.append([most, slowdown, ttft, one["tokens_per_s"] / better])
    if lines:
        yield Table(
            f"Fewer running requests at a replica (DLPM, {CROWD})",
            "running, at most | slowdown over n | TTFT P99 over solo | throughput over the better stock's",
            lines,
        )


def _bounds(at: Mapping[str, Result]) -> Iterator[Part]:
    """What the bound on a prefill step does."""
    light, flood = at["light"], dict[tuple[str, int], dict[str, float]]()
    for name, one in at.items():
        bound, _, size = name.rpartition(".")
        if size.isdecimal():
            flood[bound, int(size)] = {
                "tokens": one["tokens_per_s"] / at[f"{BASE}.{size}"]["tokens_per_s"],
                "ttft": one["ttft_p99_s"] / light["ttft_p99_s"],
                "slowdown": slowest_program_s(one) / slowest_program_s(light) / (SEVERAL + 1),
            }
    counts = sorted({count for _, count in flood})
    count = STALL_FLOOD if STALL_FLOOD in counts else counts[-1]
    free, bounded = flood[BASE, count], flood["stall-100", count]
    less = flood["stall-100", SMALLER_FLOOD if SMALLER_FLOOD in counts else counts[0]]
    yield graded(
        bounded["ttft"] <= 0.7 * free["ttft"] and bounded["tokens"] >= 0.97, bounded["ttft"] <= free["ttft"]
    ).claim(f"""Beside a large flood, the bound on a step and mixed steps cost little throughput, shorten the wait
        for a first token, and programs | | beside {count} requests, {SEVERAL} light clients: TTFT P99
        {free["ttft"]:.1f} times solo with prompts first, {bounded["ttft"]:.1f} with {STALLS_MS[1]:.0f} ms, slowdown
        over n {free["slowdown"]:.2f} and {bounded["slowdown"]:.2f}, at {bounded["tokens"]:.3f} of the throughput;
        beside half as many at {less["tokens"]:.3f} | Beside fewer requests prompts are soon computed either way.""")
    bounds = [bound for bound in LABELS if (bound, counts[0]) in flood]
    panels = []
    for title, what in (
        ("TTFT P99 of light clients over solo", "ttft"),
        ("slowdown over n", "slowdown"),
        ("tokens/s over prompts first", "tokens"),
    ):
        lines = {LABELS[b]: (counts, [flood[b, count][what] for count in counts]) for b in bounds}
        log = "xy" if what == "ttft" else "x"
        panels.append(Panel(title, lines, "requests of one client", swept=True, log=log))
    caption = f"""What the bound on a prefill step does, by the size of the flood: {SEVERAL} light clients beside
        one client's requests."""
    yield Figure("trade", caption, [panels])


# ---- a target for output tokens

TARGETS_MS = (12.0, 15.0, 20.0, 30.0)
AT_MS = 20.0
"""The target that the words are about."""
OFF = "off"


class Target(Isolation):
    """Clients and measures are those of `Isolation`."""

    id = "beyond-target"
    title = "What a target for output tokens costs and gives"
    source = "beyond the papers, which leave the size of a batch to the engine"
    about = f"""Llama-3.1-8B on {REPLICAS} A100 under DLPM behind D2LPM by queues for {FLOOD_SECONDS:.0f} s after a
        warm-up. One client keeps its requests of middle length under way, all the time; beside it, {SEVERAL} light
        clients hold short conversations, one begins every {FLOOD_PERIOD_S} s. With `--target-tpot-ms` the flood's
        requests wait while more of them would make an output token take longer than that, and while a light client
        runs. A program's time is the mean of the light client that fares worst."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        targets = {OFF: 0.0} | {f"{one:g}": one for one in (TARGETS_MS if full else (AT_MS,))}
        yield row("light", site_of(STACKS["dlpm"]), Scene(light=SEVERAL), full)
        for flood, (name, target_ms) in product(FLOODS if full else FLOODS[:1], targets.items()):
            site = site_of(STACKS["dlpm"], target_tpot_ms=target_ms)
            yield row(f"{name}.{flood}", site, Scene(f"{FLOOD}{flood}", SEVERAL), full)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        solo_s = slowest_program_s(at["light"])
        parts = {key: key.split(".") for key in at if key != "light"}
        program_s = {key: slowest_program_s(at[key]) for key in parts}
        kept = {
            key: at[key]["tokens_per_s"] / at[f"{OFF}.{flood}"]["tokens_per_s"]
            for key, (_, flood) in parts.items()
        }
        most = max(int(flood) for _, flood in parts.values())
        free_s, held_s = (program_s[f"{name}.{most}"] for name in (OFF, f"{AT_MS:g}"))
        least = min(part for key, part in kept.items() if key.startswith(f"{AT_MS:g}."))
        yield graded(held_s / free_s <= 0.6, held_s < free_s).claim(f"""A target makes light clients' programs
            shorter beside a large flood | | beside {most} requests {free_s:.2f} s without a target,
            {held_s:.2f} s with {AT_MS:.0f} ms | A decode step with fewer requests is shorter; what runs
            already is left alone.""")
        yield at_least(least, 0.95, 0.9).claim(f"""and costs little throughput | | with {AT_MS:.0f} ms at
            least {least:.3f} of the tokens/s without, with any of the targets {min(kept.values()):.3f} | The
            flood is held back only while others run, and only at their replica.""")
        yield Table(
            "Medians over seeds",
            """requests of the flood | target | light programs, s | over solo | TTFT P99, s | tokens/s | over those
                without""",
            [
                [int(flood), "none" if name == OFF else f"{name} ms", program_s[key], program_s[key] / solo_s,
                 at[key]["ttft_p99_s"], at[key]["tokens_per_s"], kept[key]]
                for key, (name, flood) in parts.items()
            ],
        )  # fmt: skip


def site_of(stack: Stack, **others: float | None) -> Site:
    """Stock's policy forms prompts first, whatever the bound."""
    return Site(
        replicas=REPLICAS,
        placement=stack.placement,
        policy=stack.policy,
        policy_options=shipped(stack.policy, ""),
        max_running=MAX_RUNNING,
        hop_s=HOP_S,
        **others,  # type: ignore[arg-type]
    )


def row(
    name: str,
    site: Site,
    scene: Scene,
    full: bool,
    seconds: float = FLOOD_SECONDS,
    period_s: float = FLOOD_PERIOD_S,
) -> Row:
    """One scene; light clients begin a conversation every `period_s`."""
    traffic = {"scene": asdict(scene), "period_s": period_s if full else QUICK_PERIOD_S}
    _, at_once = _load(traffic, "0")
    plan = Plan(
        WARM_UP_S + seconds if full else QUICK_SECONDS,
        at_once=at_once,
        drain_s=DRAIN_S if full else 1.0,
        drain_for="well-behaved",
        connections_per_client=max([256, *at_once.values()]),
        token_step_s=TOKEN_STEP_S,
    )
    return Row(name, site, TrafficSpec("isolation", traffic), plan=plan)


def _load(traffic: Mapping[str, Json], seed: str) -> tuple[tuple[Client, ...], dict[str, int]]:
    return _scene(traffic).load(PackedCodec(), seed, replicas=REPLICAS, period_s=traffic["period_s"])


def _scene(traffic: Mapping[str, Json]) -> Scene:
    return Scene(**traffic["scene"])


def _runs(results: Mapping[str, Result]) -> dict[tuple[Stack, Scene], list[Observed]]:
    """The runs of the attacks, by stack and scene."""
    return {
        (STACKS[name], _scene(result.cell.traffic.arguments)): [Observed(**run) for run in result.runs]
        for key, result in results.items()
        if (name := key.partition(".")[0]) in STACKS
    }


def _name(row: IsolationRow) -> str:
    return row.policy if row.stack == OURS else {one.name: name for name, one in STACKS.items()}[row.stack]


def slowest_program_s(result: Result) -> float:
    """Mean time of a program of the light client that fares worst."""
    return max(result[f"program_s/{name}"] for name in result.first["program_s"])
