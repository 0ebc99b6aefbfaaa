"""One model, three classes (W_A): QLM beside FCFS, EDF and SHEPHERD, and without each of its operations."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from workloads.deadlines.traffic import Stream
from workloads.experiments import style
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Size
from workloads.experiments.qlm_setting import (
    LABELS,
    ONE_MODEL,
    TRACE,
    Deadlines,
    cell,
    other,
    points,
    qlm,
    ratio,
    rule,
    w_a,
    with_fleet,
    without_eviction,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

SWEEP_REPLICAS = 2
REPLICAS = 4
RATES = (8.0, 12.0, 16.0, 20.0, 26.0)
"""Requests a second of all classes together."""
OTHERS = ("edf", "fcfs_models", "shepherd")
SYSTEMS = ("qlm", "deadline", *OTHERS)
MOST_MET = 0.9
"""Where QLM meets so many, it is compared."""


class Sweep(Deadlines):
    id = "qlm-fig9-10"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        found = []
        for rate in RATES if full else RATES[-1:]:
            fleet = qlm(SWEEP_REPLICAS)
            streams, most = w_a(rate), TRACE if full else 400
            seeds = SEEDS[:1]
            systems = (fleet, rule(fleet), *(other(name, fleet) for name in OTHERS))
            found += [
                cell(f"{one.placement}.{rate:.0f}", one, streams, most=most, seeds=seeds) for one in systems
            ]
        return found

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        rates = sorted({float(name.rpartition(".")[2]) for name in results})
        met = [rate for rate in rates if results[f"qlm.{rate:.0f}"].number("attained") >= MOST_MET]
        most = max(met, key=lambda rate: _points(results, rate, "fcfs_models")) if met else rates[0]
        busiest = max(met, default=rates[0])
        found: dict[str, Json] = {
            "throughput_over_fcfs": ratio(
                results, f"qlm.{busiest:.0f}", f"fcfs_models.{busiest:.0f}", "throughput_per_s"
            ),
            "goodput_over_fcfs": ratio(
                results, f"qlm.{busiest:.0f}", f"fcfs_models.{busiest:.0f}", "goodput_per_s"
            ),
            "throughput_over_shepherd": ratio(
                results, f"qlm.{busiest:.0f}", f"shepherd.{busiest:.0f}", "throughput_per_s"
            ),
            "points_over_fcfs": _points(results, most, "fcfs_models"),
            "points_over_edf": min(_points(results, rate, "edf") for rate in rates),
            "points_over_shepherd": max(_points(results, rate, "shepherd") for rate in met or rates[:1]),
            "rate": busiest,
            "rate_points": most,
            "met": len(met),
            "rows": [{"rate": rate, **{name: f"{name}.{rate:.0f}" for name in SYSTEMS}} for rate in rates],
        }
        for row in found["rows"]:
            for name in SYSTEMS:
                cell_of = results[row.pop(name)]
                row[name] = cell_of.shown("attained")
                row[f"{name}_chat"] = cell_of.shown("classes/interactive/attained")
                row[f"{name}_rate"] = cell_of.shown("throughput_per_s")
                row[f"{name}_good"] = cell_of.shown("goodput_per_s")
        return found

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {"attained": Drawing(lambda canvas: _draw(canvas, results))}


def _points(results: Mapping[str, Result], rate: float, name: str) -> float:
    return points(results, f"qlm.{rate:.0f}", f"{name}.{rate:.0f}")


def _draw(canvas: "Canvas", results: Mapping[str, Result]) -> None:
    axes = canvas.subplots()
    rates = sorted({float(name.rpartition(".")[2]) for name in results})
    for place, name in enumerate(SYSTEMS):
        line = [100 * results[f"{name}.{rate:.0f}"].number("attained") for rate in rates]
        axes.plot(rates, line, marker="o", color=style.client_colour(place), label=LABELS[name])
    axes.set_xlabel("requests/s")
    axes.set_ylabel("in time, %")
    axes.legend(fontsize=8)


BATCH = 1_200
BATCH_ALONE_S, CHATS_UNTIL_S = 10.0, 90.0
CHATS_PER_S = 4.0
RESERVES = 0.5
OUTPUTS = 4.0
"""Answers of the batches in the ablation, in multiples of ShareGPT's."""


class Ablation(Deadlines):
    id = "qlm-fig11"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        seeds = SEEDS[:1]
        fleet = qlm(REPLICAS if full else 1, new_token_ratio=RESERVES)
        model = next(iter(ONE_MODEL))
        scale = 1.0 if full else 0.25
        streams = [
            Stream(model, "batch-2", 1e4, count=round(BATCH * scale), outputs=OUTPUTS),
            Stream(model, "interactive", CHATS_PER_S * scale, from_s=BATCH_ALONE_S, until_s=CHATS_UNTIL_S),
        ]
        without = {
            "all": ("QLM", fleet),
            "rule": ("deadline", rule(fleet)),
            "eviction": ("without eviction", without_eviction(fleet)),
            "swap": ("without swapping", with_fleet(fleet, swaps=False)),
            "pulling": ("without pulling", other("push", fleet, "slo")),
            "balance": ("assigned at random", other("spread", fleet, "slo", by="random")),
        }
        return [
            cell(name, one, streams, most=None, seeds=seeds, label=label)
            for name, (label, one) in without.items()
        ]

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        chats = "classes/interactive/attained"
        return {
            "points_lost_no_eviction": points(results, "all", "eviction", chats),
            "points_lost_no_swap": points(results, "all", "swap"),
            "points_lost_random": points(results, "all", "balance", chats),
            "points_lost_pulling": points(results, "all", "pulling", chats),
        }
