"""What one client's load does to the others on four simulated A100: the scenes of bench isolation, and what the bound
on a step costs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from workloads.clients import Client
from workloads.experiments import style
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Simulated, Size, TrafficSpec
from workloads.isolation.attacks import ATTACKS, FLOOD, LIGHT_PERIOD_S, TRICKLE, Scene, scenes
from workloads.isolation.measures import OURS, STOCK, IsolationRow, Observed, Stack, observe, rows
from workloads.programs import PackedCodec
from workloads.records import Run
from workloads.session import Plan
from workloads.simulation import Site

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

REPLICAS, MAX_RUNNING = 4, 256
WARM_UP_S, SECONDS, DRAIN_S = 3.0, 40.0, 10.0
SHORT, SHORT_SECONDS = (TRICKLE, "many-short"), 10.0
"""Floods of many steps, which take a simulator long."""
FLOOD_SECONDS, FLOOD_PERIOD_S = 25.0, 1.5
QUICK_SECONDS, QUICK_PERIOD_S = 2.0, 1.0
HOP_S = 0.002
TOKEN_STEP_S = 0.25
STACKS = {
    "stock": Stack(STOCK, "cache_aware", "fcfs"),
    "dlpm": Stack(OURS, "d2lpm-queue", "dlpm"),
    "vtc": Stack(OURS, "d2lpm-queue", "vtc"),
}
SEVERAL = 3
"""Light clients beside a flood."""
FLOODS = (50, 100, 200, 400, 800)
STALLS_MS = (50.0, 100.0, 200.0)
STALL_FLOOD = 400
"""The flood that the words are about."""
BASE = "stall-off"
LABELS = {BASE: "prompts first", **{f"stall-{stall_ms:g}": f"{stall_ms:g} ms" for stall_ms in STALLS_MS}}
"""Bounds on a prefill step."""
SHARE, SLOWDOWN, TTFT, ALONE, TOGETHER = 0.9, 1.25, 4.0, 0.97, 0.95
"""What is to hold: see `workloads.isolation.measures`. The last two are of stock's throughput, without and with a light
client."""


class Isolation(Simulated):
    id = "beyond-isolation"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        attacks = tuple(ATTACKS) if full else (TRICKLE,)
        found = [
            cell_of(
                f"{name}.{scene.name}",
                site_of(stack, target_tpot_ms=None),
                scene,
                size,
                SHORT_SECONDS if scene.attack in SHORT else SECONDS,
                LIGHT_PERIOD_S,
            )
            for name, stack in STACKS.items()
            for scene in scenes(attacks, 1)
        ]
        bounds = {BASE: 0.0} | {f"stall-{stall_ms:g}": stall_ms for stall_ms in STALLS_MS}
        if not full:
            bounds = {BASE: 0.0, "stall-100": 100.0}
        found.append(
            cell_of(
                "light", site_of(STACKS["dlpm"]), Scene(light=SEVERAL), size, FLOOD_SECONDS, FLOOD_PERIOD_S
            )
        )
        for name, stall_ms in bounds.items():
            site = site_of(STACKS["dlpm"], stall_ms=stall_ms)
            found += [
                cell_of(
                    f"{name}.{flood}",
                    site,
                    Scene(f"{FLOOD}{flood}", SEVERAL),
                    size,
                    FLOOD_SECONDS,
                    FLOOD_PERIOD_S,
                )
                for flood in (FLOODS if full else FLOODS[:1])
            ]
        return found

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        return _load(cell.traffic.arguments, seed)[0]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return asdict(observe(run, min(WARM_UP_S, run.manifest.duration_s / 4)))

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        table = {(_name(row), row.attack, row.clients): row for row in rows(_runs(results))}
        solo = results["light"].number("ttft_p99_s"), slowest_program_s(results["light"])
        flood = {
            name: {
                "tokens": result.number("tokens_per_s") / results[f"{BASE}.{count}"].number("tokens_per_s"),
                "ttft": result.number("ttft_p99_s") / solo[0],
                "slowdown": slowest_program_s(result) / solo[1] / (SEVERAL + 1),
            }
            for name, result in results.items()
            if (count := name.rpartition(".")[2]).isdecimal()
        }
        sizes = [int(name.rpartition(".")[2]) for name in flood]
        at = STALL_FLOOD if STALL_FLOOD in sizes else max(sizes)

        def worst(what: str, pick: Callable[..., float], *clients: int) -> dict[str, float]:
            return {
                name: pick(
                    value
                    for (stack, _, count), row in table.items()
                    if stack == name and count in clients and (value := getattr(row, what)) is not None
                )
                for name in STACKS
            }

        return {
            "lines": [
                {**asdict(row), "stack": stack, "alone": table[stack, attack, 1].throughput_over_stock}
                for attack in ATTACKS
                for stack in STACKS
                if (row := table.get((stack, attack, 2))) is not None
            ],
            "share": worst("victim_share_of_gps", min, 2),
            "slowdown": worst("slowdown_over_n", max, 2),
            "ttft": worst("ttft_p99_over_solo", max, 2),
            "alone": worst("throughput_over_stock", min, 1),
            "together": worst("throughput_over_stock", min, 2),
            "flood": flood,
            "flooding": at,
            "unbounded": flood[f"{BASE}.{at}"],
            "bounded": flood[f"stall-100.{at}"],
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {"trade": Drawing(lambda canvas: _draw(canvas, self.values(results)["flood"]), (10.0, 3.6))}


def site_of(stack: Stack, **others: float | None) -> Site:
    """Stock's policy forms prompts first, whatever the bound."""
    return Site(
        replicas=REPLICAS,
        placement=stack.placement,
        policy=stack.policy,
        max_running=MAX_RUNNING,
        hop_s=HOP_S,
        **others,  # type: ignore[arg-type]
    )


def cell_of(name: str, site: Site, scene: Scene, size: Size, seconds: float, period_s: float) -> Cell:
    """One scene; light clients begin a conversation every `period_s`."""
    full = size == "full"
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
    return Cell(name, site, TrafficSpec("isolation", traffic), plan, SEEDS if full else SEEDS[:1])


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
    return "stock" if row.stack == STOCK else row.policy


def slowest_program_s(result: Result) -> float:
    """Mean time of a program of the light client that fares worst."""
    return max(result.number(f"program_s/{name}") for name in result.first["program_s"])


def _draw(canvas: "Canvas", flood: Mapping[str, Mapping[str, float]]) -> None:
    bounds = dict.fromkeys(name.partition(".")[0] for name in flood)
    panels = {
        "TTFT P99 of light clients over solo": "ttft",
        "slowdown over n": "slowdown",
        "tokens/s over prompts first": "tokens",
    }
    for axes, (title, what) in zip(style.panels(canvas, len(panels)), panels.items(), strict=True):
        for place, bound in enumerate(bounds):
            floods = [int(name.rpartition(".")[2]) for name in flood if name.startswith(f"{bound}.")]
            axes.semilogx(
                floods,
                [flood[f"{bound}.{count}"][what] for count in floods],
                "o-",
                color=style.client_colour(place),
                label=LABELS[bound],
            )
        if what == "ttft":
            axes.set_yscale("log")
        style.label(axes, "concurrent requests of one client", title, legend=what == "ttft")
