"""Two routers that do not know of each other, and clients of weights 4 and 1: do replicas still serve them 4 : 1?"""

from collections.abc import Iterable, Iterator, Mapping

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments.claims import Part, at_least, at_most
from workloads.experiments.contract import Cell, Json, Result, Row, medians
from workloads.experiments.senders import judge, sender, traffic
from workloads.plots import Figure, Panel
from workloads.records import Run
from workloads.windows import Windows

REPLICAS = 4
WEIGHTS = {"heavy": 4.0, "light": 1.0}
LOADS = {"heavy": 1.5, "light": 0.8}
"""Of what the cluster does: each more than its share, 4/5 and 1/5."""
INGRESS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "one": ("one router", (1.0,)),
    "even": ("two routers, evenly", (1.0, 1.0)),
    "skewed": ("two routers, 4 : 1", (4.0, 1.0)),
}
PLACEMENTS = {"d2lpm": "D2LPM", "cache_aware": "cache_aware"}
LENGTH_S = 400.0
WARM_UP = 0.25
"""After this part of a run both clients wait at every replica."""


class Routers(dlpm.A10GExperiment):
    id = "beyond-routers"
    title = "Several routers, weighted clients"
    source = "beyond the papers; D2LPM with more than one global scheduler"
    about = f"""Llama-3.2-3B on four A10G, every replica under DLPM; two clients of weights {WEIGHTS["heavy"]:.0f}
        and {WEIGHTS["light"]:.0f} have articles judged and both ask for more than their share for {LENGTH_S:.0f} s,
        of which the last {LENGTH_S * (1 - WARM_UP):.0f} count. Programs come through one router, or through two that
        do not know of each other: half each, or four in five through the first."""
    lengths_s = (LENGTH_S, 40.0)

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        replicas = REPLICAS if full else 2
        rates = {name: dlpm.JUDGE.rate_per_s(load * replicas) for name, load in LOADS.items()}
        sent = traffic("judge", *(sender(name, judge(2), rate) for name, rate in rates.items()))
        for ingress, (called, parts) in INGRESS.items():
            for placement in PLACEMENTS if full else ("d2lpm",):
                fields: Json = {"placement": placement, "client_weights": WEIGHTS, "ingress": parts}
                site = dlpm.a10g("d2lpm", replicas, **fields, **dlpm.JUDGE.quanta)
                yield Row(f"{ingress}.{placement}", site, sent, called)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        length_s = cell.plan.duration_s
        actual = Windows(run, side="actual").service(WARM_UP * length_s, length_s)
        heavy, light = actual["heavy"], actual["light"]
        return dlpm.observe(run) | {"ratio": heavy / light if heavy and light else None}

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        ratio = {name: one["ratio"] for name, one in at.items()}
        off = {name: abs(value / 4 - 1) for name, value in ratio.items() if "cache_aware" not in name}
        worst = max(off, key=lambda name: (off[name], name))
        speed = {name: at[f"{name}.d2lpm"]["tokens_per_s"] for name in INGRESS}
        cost = min(speed.values()) / speed["one"]
        yield at_most(off[worst], 0.05, 0.1).claim(f"""4 : 1 holds, however many routers there are and however
            skewed their parts | | one router {ratio["one.d2lpm"]:.2f}, two {ratio["even.d2lpm"]:.2f}, skewed
            {ratio["skewed.d2lpm"]:.2f} : 1 (furthest off: {worst} {ratio[worst]:.2f}) | Replicas keep the
            shares, and they do so only while both clients wait at them.""")
        yield at_least(cost, 0.97, 0.9).claim(f"""A second router costs no throughput | | {cost:.2f}× at worst
            | Each router knows only its own requests' load, and both send to the same replica at times.""")
        columns = """routers | placement = placements | actual service, heavy : light = ratio |
            tokens/s = tokens_per_s | hit rate = hit_rate | imbalance = imbalance"""
        placements = {name: PLACEMENTS[one.cell.site.placement] for name, one in at.items()}
        yield medians("Medians over seeds (lowest to highest)", columns, at.values(), placements=placements)
        there = {name: label for name, label in PLACEMENTS.items() if f"one.{name}" in at}
        groups, panels = [title.replace(", ", ",\n") for title, _ in INGRESS.values()], []
        for unit, path in (("service, heavy : light", "ratio"), ("tokens/s", "tokens_per_s")):
            bars = {label: [at[f"{one}.{name}"][path] for one in INGRESS] for name, label in there.items()}
            panels.append(Panel(unit, groups=groups, bars=bars))
        caption = "Actual service of the client of weight 4 over that of weight 1, and throughput."
        yield Figure("ratio", caption, [panels])
