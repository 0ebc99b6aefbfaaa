"""Two routers that do not know of each other, clients of weights 4 and 1: do replicas still serve 4 : 1?"""

from collections.abc import Mapping, Sequence

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments.contract import (
    Cell,
    Claim,
    Figure,
    Json,
    Report,
    Result,
    Size,
    Table,
    Traffic,
    verdict,
)
from workloads.experiments.dlpm_fig7_setting import observe
from workloads.experiments.program_senders import judge, sender
from workloads.experiments.senders import FromSenders, traffic
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
PLACEMENTS = {"d2lpm": "D2LPM", "d2lpm-tokens": "D2LPM (tokens)", "cache_aware": "cache_aware"}
WARM_UP = 0.25
"""Part of a run after which both clients wait at every replica."""


def judgements(replicas: int) -> Traffic:
    """Both ask for more than their share."""
    return traffic(
        "judge",
        *(sender(name, judge(2), dlpm.JUDGE.rate_per_s(load * replicas)) for name, load in LOADS.items()),
    )


class Routers(FromSenders):
    id = "beyond-routers"
    title = "Several routers, weighted clients"
    source = "beyond the papers; D2LPM with more than one global scheduler"
    about = (
        "Llama-3.2-3B on four A10G, every replica under DLPM; two clients of weights 4 and 1 have articles judged and "
        "both ask for more than their share for 400 s, of which the last 300 count. Programs come through one router, "
        "or through two that do not know of each other: half each, or four in five through the first."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        replicas, length_s = (REPLICAS, 400.0) if full else (2, 40.0)
        seeds = ("0", "1", "2") if full else ("0",)
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

    def report(self, results: Mapping[str, Result]) -> Report:
        placements = [name for name in PLACEMENTS if f"one.{name}" in results]
        ratio = {name: result.number("ratio") for name, result in results.items()}
        speed = {name: result.number("tokens_per_s") for name, result in results.items()}
        fair = [name for name in placements if name != "cache_aware"]
        off = {name: abs(ratio[name] / 4 - 1) for name in ratio if name.split(".")[1] in fair}
        worst = max(off, key=lambda name: (off[name], name))
        cost = min(speed[f"{ingress}.d2lpm"] / speed["one.d2lpm"] for ingress in INGRESS)
        return Report(
            claims=[
                Claim(
                    "4 : 1 holds, however many routers there are and however skewed their parts",
                    "our own question",
                    f"one router {ratio['one.d2lpm']:.2f}, two {ratio['even.d2lpm']:.2f}, "
                    f"skewed {ratio['skewed.d2lpm']:.2f} : 1 (furthest off: {worst} {ratio[worst]:.2f})",
                    verdict(off[worst] <= 0.05, partly=off[worst] <= 0.1),
                    "Replicas keep the shares, and they do so only while both clients wait at them.",
                ),
                Claim(
                    "A second router costs no throughput",
                    "our own question",
                    f"{cost:.2f}× at worst",
                    verdict(cost >= 0.97, partly=cost >= 0.9),
                    "Each router knows only its own requests' load, and both send to the same replica at times.",
                ),
            ],
            tables=[
                Table(
                    "Medians over seeds (lowest to highest)",
                    (
                        "routers",
                        "placement",
                        "actual service, heavy : light",
                        "tokens/s",
                        "hit rate",
                        "imbalance",
                    ),
                    [
                        (
                            TITLES[ingress],
                            PLACEMENTS[name],
                            results[f"{ingress}.{name}"].shown("ratio"),
                            results[f"{ingress}.{name}"].shown("tokens_per_s"),
                            results[f"{ingress}.{name}"].shown("hit_rate"),
                            results[f"{ingress}.{name}"].shown("imbalance"),
                        )
                        for ingress in INGRESS
                        for name in placements
                    ],
                )
            ],
            figures=[
                Figure(
                    "ratio",
                    "Actual service of the client of weight 4 over that of weight 1, and throughput.",
                    lambda canvas: dlpm.draw_bars(
                        canvas,
                        {
                            (unit, tuple(TITLES[ingress] for ingress in INGRESS)): {
                                PLACEMENTS[name]: [found[f"{ingress}.{name}"] for ingress in INGRESS]
                                for name in placements
                            }
                            for unit, found in (("service, heavy : light", ratio), ("tokens/s", speed))
                        },
                    ),
                    (10.0, 3.4),
                )
            ],
        )
