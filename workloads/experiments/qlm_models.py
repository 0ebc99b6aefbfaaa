"""Several models (W_B): QLM beside EDF that loads models as it goes, and the other systems."""

from collections.abc import Mapping, Sequence

from workloads.deadlines.traffic import Stream
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Size
from workloads.experiments.qlm_setting import (
    PAPER_REPLICAS,
    TRACE,
    W_B,
    Deadlines,
    cell,
    other,
    points,
    qlm,
    ratio,
    rule,
    w_b,
    with_fleet,
    without_eviction,
)

# ---- Figure 5

DRAINED = ("b1-mistral-7b", "b1-llama-70b", "b2-vicuna-13b")
EACH = 300
DRAIN_REPLICAS = (2, 4)


class Drain(Deadlines):
    id = "qlm-fig5"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        models = {model: W_B[model] for model in DRAINED}
        streams = [Stream(model, "batch-2", 1000.0, count=EACH if full else 40) for model in DRAINED]
        found = []
        for replicas in DRAIN_REPLICAS if full else DRAIN_REPLICAS[:1]:
            fleet = qlm(replicas, models)
            systems = (
                ("grouped", "groups (QLM)", fleet),
                ("rule", "deadline", rule(fleet)),
                ("edf", "EDF", other("edf", fleet)),
                ("affine", "EDF, loaded model first", other("edf", fleet, prefers_loaded=True)),
            )
            for name, label, one in systems:
                found.append(
                    cell(f"{name}.{replicas}", one, streams, most=None, label=f"{label}, {replicas}")
                )
        return found

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        counts = sorted({name.rpartition(".")[2] for name in results})
        return {
            "edf_drain_over_grouped": min(
                ratio(results, f"edf.{n}", f"grouped.{n}", "end_s") for n in counts
            ),
            "affine_drain_over_grouped": min(
                ratio(results, f"affine.{n}", f"grouped.{n}", "end_s") for n in counts
            ),
        }


# ---- Figures 12 to 14

RATES = (100.0, 400.0)
"""Batch-1 requests a second on the paper's 50 replicas."""
SMALL_REPLICAS = 4
SMALL_RATES = (4.0, 8.0, 20.0)
"""On few replicas, where models have to take turns."""
ABLATION_RATE = 8.0


class Models(Deadlines):
    id = "qlm-fig12-14"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        found = []
        if full:
            for rate in RATES:
                found += self._at(PAPER_REPLICAS, rate, TRACE, SEEDS[:1])
        for rate in SMALL_RATES if full else (ABLATION_RATE,):
            found += self._at(SMALL_REPLICAS, rate, TRACE // 2 if full else 200, SEEDS[:1])
        fleet = qlm(SMALL_REPLICAS, W_B)
        streams = w_b(ABLATION_RATE)
        most = TRACE // 2 if full else 200
        for name, label, one in (
            ("no-swap", "each keeps its model", with_fleet(fleet, swaps=False)),
            ("cold", "models from disk", with_fleet(fleet, warm=False)),
            ("no-eviction", "without eviction", without_eviction(fleet)),
            ("random", "assigned at random", other("spread", fleet, "slo", by="random")),
        ):
            found.append(cell(name, one, streams, most=most, seeds=SEEDS[:1], label=label))
        return found

    def _at(self, replicas: int, rate: float, most: int, seeds: tuple[str, ...]) -> list[Cell]:
        fleet = qlm(replicas, W_B)
        return [
            cell(f"{name}.{replicas}.{rate:.0f}", one, w_b(rate), most=most, seeds=seeds, label=label)
            for name, label, one in (
                ("qlm", "QLM", fleet),
                ("rule", "deadline", rule(fleet)),
                ("edf", "EDF", other("edf", fleet)),
                ("affine", "EDF, loaded model first", other("edf", fleet, prefers_loaded=True)),
                ("shepherd", "SHEPHERD", other("shepherd", fleet)),
            )
        ]

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        sweeps = sorted(
            (int(name.split(".")[1]), float(name.split(".")[2]))
            for name in results
            if name.startswith("qlm.")
        )
        few = [one for one in sweeps if one[0] == SMALL_REPLICAS]
        many = [one for one in sweeps if one[0] == PAPER_REPLICAS]
        rows = []
        for replicas, rate in sweeps:
            row: dict[str, Json] = {"replicas": replicas, "rate": rate}
            for name in ("qlm", "rule", "edf", "affine", "shepherd"):
                result = results[f"{name}.{replicas}.{rate:.0f}"]
                row[name] = result.shown("attained")
                row[f"{name}_rate"] = result.shown("throughput_per_s")
            rows.append(row)

        def over(name: str, at: tuple[int, float]) -> float:
            return ratio(
                results,
                f"qlm.{at[0]}.{at[1]:.0f}",
                f"{name}.{at[0]}.{at[1]:.0f}",
                "throughput_per_s",
            )

        base = f"qlm.{SMALL_REPLICAS}.{ABLATION_RATE:.0f}"
        served = results[base].number("ended") / results["no-swap"].number("ended")
        return {
            "throughput_over_edf": min(over("edf", one) for one in sweeps),
            "throughput_over_affine": min(over("affine", one) for one in few),
            "attained": min(results[f"qlm.{n}.{rate:.0f}"].number("attained") for n, rate in (many or few)),
            "attained_few": min(results[f"qlm.{n}.{rate:.0f}"].number("attained") for n, rate in few),
            "throughput_lost_no_swap": served,
            "throughput_lost_cold": ratio(results, base, "cold", "throughput_per_s"),
            "points_lost_no_swap": points(results, base, "no-swap"),
            "points_lost_no_eviction": points(results, base, "no-eviction"),
            "points_lost_random": points(results, base, "random"),
            "rows": rows,
            "parts": [base, "no-swap", "cold", "no-eviction", "random"],
        }


# ---- Figure 17

QUEUE_REPLICAS = 4
QUEUE_RATES = (2.0, 8.0, 24.0)
"""Of each class; the higher, the longer the queue."""


class Queues(Deadlines):
    id = "qlm-fig17"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        found = []
        for rate in QUEUE_RATES if full else QUEUE_RATES[:2]:
            fleet = qlm(QUEUE_REPLICAS, W_B)
            for name, label, one in (
                ("qlm", "QLM", fleet),
                ("rule", "deadline", rule(fleet)),
                ("edf", "EDF", other("edf", fleet)),
                ("fcfs", "FCFS", other("fcfs_models", fleet)),
                ("shepherd", "SHEPHERD", other("shepherd", fleet)),
            ):
                most, seeds = (TRACE, SEEDS[:1]) if full else (200, SEEDS[:1])
                found.append(cell(f"{name}.{rate:.0f}", one, w_b(rate), most=most, seeds=seeds, label=label))
        return found

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        rates = sorted({float(name.rpartition(".")[2]) for name in results})

        def over(rate: float, names: Sequence[str] = ("edf", "fcfs", "shepherd")) -> float:
            return min(points(results, f"qlm.{rate:.0f}", f"{name}.{rate:.0f}") for name in names)

        rows = []
        for rate in rates:
            row: dict[str, Json] = {
                "rate": rate,
                "over": over(rate),
                "over_requests": over(rate, ("edf", "fcfs")),
            }
            for name in ("qlm", "rule", "edf", "fcfs", "shepherd"):
                row[name] = results[f"{name}.{rate:.0f}"].shown("attained")
            rows.append(row)
        return {
            "points_over_best_empty": over(rates[0]),
            "points_over_best_long": max(over(rate) for rate in rates[1:]),
            "points_over_requests_long": max(over(rate, ("edf", "fcfs")) for rate in rates[1:]),
            "least_over": min(over(rate) for rate in rates),
            "rows": rows,
        }
