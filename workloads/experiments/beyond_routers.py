"""Two routers that do not know of each other, and clients of weights 4 and 1: do replicas still serve them 4 : 1?"""

from collections.abc import Mapping, Sequence

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Size, TrafficSpec
from workloads.experiments.dlpm_setting import observe
from workloads.experiments.plots import Panel, drawing
from workloads.experiments.program_senders import judge, sender
from workloads.experiments.senders import traffic
from workloads.records import Run
from workloads.windows import Windows

REPLICAS = 4
WEIGHTS = {"heavy": 4.0, "light": 1.0}
LOADS = {"heavy": 1.5, "light": 0.8}
"""Of what the cluster does: each more than its share, 4/5 and 1/5."""
INGRESS: Mapping[str, tuple[float, ...]] = {
    "one": (1.0,),
    "even": (1.0, 1.0),
    "skewed": (4.0, 1.0),
}
TITLES = {"one": "one router", "even": "two routers, evenly", "skewed": "two routers, 4 : 1"}
PLACEMENTS = {"d2lpm": "D2LPM", "cache_aware": "cache_aware"}
LENGTH_S = 400.0
WARM_UP = 0.25
"""After this part of a run both clients wait at every replica."""
COUNTED_S = LENGTH_S * (1 - WARM_UP)


def judgements(replicas: int) -> TrafficSpec:
    """Both ask for more than their share."""
    return traffic(
        "judge",
        *(sender(name, judge(2), dlpm.JUDGE.rate_per_s(load * replicas)) for name, load in LOADS.items()),
    )


class Routers(dlpm.A10GExperiment):
    id = "beyond-routers"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        replicas, length_s, seeds = (REPLICAS, LENGTH_S, SEEDS) if full else (2, 40.0, SEEDS[:1])
        return [
            Cell(
                f"{ingress}.{placement}",
                dlpm.a10g(
                    "d2lpm",
                    replicas,
                    placement=placement,
                    client_weights=WEIGHTS,
                    ingress=parts,
                    **dlpm.JUDGE.quanta,
                ),
                judgements(replicas),
                dlpm.plan(length_s),
                seeds,
            )
            for ingress, parts in INGRESS.items()
            for placement in (PLACEMENTS if full else ("d2lpm",))
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        length_s = cell.plan.duration_s
        actual = Windows(run, side="actual").service(WARM_UP * length_s, length_s)
        heavy, light = actual["heavy"], actual["light"]
        return observe(run) | {"ratio": heavy / light if heavy and light else None}

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        ratio = {name: result.number("ratio") for name, result in results.items()}
        off = {name: abs(value / 4 - 1) for name, value in ratio.items() if "cache_aware" not in name}
        worst = max(off, key=lambda name: (off[name], name))
        speed = {name: results[f"{name}.d2lpm"].number("tokens_per_s") for name in INGRESS}
        return {
            "worst": worst,
            "off": off[worst],
            "cost": min(speed.values()) / speed["one"],
            "rows": [
                {
                    "cell": name,
                    "routers": TITLES[name.split(".")[0]],
                    "placement": PLACEMENTS[name.split(".")[1]],
                }
                for name in results
            ],
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        panels = [
            Panel(
                y=unit,
                groups=tuple(TITLES.values()),
                bars={
                    label: [results[f"{ingress}.{name}"].number(path) for ingress in INGRESS]
                    for name, label in PLACEMENTS.items()
                    if f"one.{name}" in results
                },
            )
            for unit, path in (("service, heavy : light", "ratio"), ("tokens/s", "tokens_per_s"))
        ]
        return {"ratio": drawing(panels)}
