"""What groups lose and cost, and how many replicas do."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sglang_fair.bench.queue import measure, measure_plan
from workloads.deadlines.measures import attained
from workloads.deadlines.traffic import Stream
from workloads.experiments.contract import SEEDS, Cell, Json, Measured, Result, Size, TrafficSpec
from workloads.experiments.qlm_setting import (
    LABELS,
    TRACE,
    W_B,
    Deadlines,
    cell,
    other,
    qlm,
    rule,
    run_of,
    w_a,
    w_b,
)
from workloads.session import Plan
from workloads.simulation import Site

DELTAS = (1, 4, 16)
DELTA_RATE = 40.0
DELTA_REPLICAS = 4
MODELS_RATE = 8.0
QUEUED = 400_000
GROUPS, QUEUES = 400, 50
SMALL_QUEUED = 20_000


class Overhead(Deadlines):
    id = "qlm-fig19-20"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        found = []
        for delta in DELTAS if full else (1, 4):
            options = {"delta": float(delta)}
            seeds, most = (SEEDS[:1], TRACE) if full else (SEEDS[:1], 300)
            for name, fleet, streams in (
                ("one", qlm(DELTA_REPLICAS, options=options), w_a(DELTA_RATE)),
                ("several", qlm(DELTA_REPLICAS, W_B, options=options), w_b(MODELS_RATE)),
            ):
                found.append(
                    cell(
                        f"{name}.{delta}",
                        fleet,
                        streams,
                        most=most // (1 if name == "one" else 2),
                        seeds=seeds,
                        label=f"{name}, {delta}",
                    )
                )
        arguments = {"queued": QUEUED if full else SMALL_QUEUED}
        found.append(Cell("cost", Site(), TrafficSpec("bench", arguments), Plan(10.0), ("1",), "cost"))
        return found

    def run(self, cell: Cell, seed: str) -> Measured:
        if cell.traffic.name != "bench":
            return super().run(cell, seed)
        queued, began_s = cell.traffic.arguments["queued"], time.monotonic()
        few = queued < QUEUED
        plan = measure_plan(GROUPS // 10 if few else GROUPS, QUEUES // 5 if few else QUEUES, int(seed))
        calls = measure("qlm", queued, int(seed))
        each_ms = sum(calls[f"{kind}_us_p50"] for kind in ("arrive", "pull", "end")) / 1e3
        per_group = queued / plan["groups"]
        return Measured(
            {
                "plan_s": plan["plan_s"],
                "groups": calls["groups"],
                "requests_per_group": per_group,
                "calls_ms": each_ms,
                "ms_per_request": each_ms + 1e3 * plan["plan_s"] / per_group,
                "pull_us_p99": calls["pull_us_p99"],
            },
            time.monotonic() - began_s,
        )

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        deltas = sorted({int(name.rpartition(".")[2]) for name in results if "." in name})

        def met(name: str, delta: int) -> float:
            return 100 * results[f"{name}.{delta}"].number("attained")

        kinds = ("one", "several")
        return {
            "loss_delta_4": max(met(name, deltas[0]) - met(name, 4) for name in kinds),
            "cells_of": [f"{name}.{delta}" for name in kinds for delta in deltas],
            "ms_per_request": results["cost"].number("ms_per_request"),
            "plan_seconds": results["cost"].number("plan_s"),
            "calls_ms": results["cost"].number("calls_ms"),
        }


# ---- Figure 1

MOST_REPLICAS = 24
NEEDED = 0.99
ONE_RATE = 6.0
SEVERAL_RATE = 8.0
SEVENTY = {"llama-70b": "llama-2-70b-4bit"}
SYSTEMS = ("qlm", "deadline", "shepherd", "edf")


class Needed(Deadlines):
    id = "qlm-fig1"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        one = [Stream("llama-70b", "interactive", ONE_RATE)]
        found = []
        for system in SYSTEMS:
            for name, models, streams in (("one", SEVENTY, one), ("several", W_B, w_b(SEVERAL_RATE))):
                fleet = qlm(1, models)
                if system != "qlm":
                    fleet = rule(fleet) if system == "deadline" else other(system, fleet)
                found.append(
                    cell(
                        f"{system}.{name}",
                        fleet,
                        streams,
                        most=(600 if name == "one" else 800) if full else 60,
                        label=f"{LABELS[system]}, {name}",
                        most_replicas=MOST_REPLICAS if full else 4,
                    )
                )
        return found

    def run(self, cell: Cell, seed: str) -> Measured:
        told = cell.traffic.arguments
        tried: dict[int, float] = {}

        def is_enough(replicas: int) -> bool:
            outcome = run_of(cell, seed, replace(cell.site, replicas=replicas))
            tried[replicas] = attained(outcome.served) or 0.0
            return tried[replicas] >= NEEDED

        low, high = 0, 1
        while not is_enough(high) and high < told["most_replicas"]:
            low, high = high, min(told["most_replicas"], 2 * high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_enough(middle) else (middle, high)
        found = {str(replicas): met for replicas, met in sorted(tried.items())}
        return Measured(
            {"replicas": high, "is_enough": tried[high] >= NEEDED, "attained": tried[high], "tried": found},
            100.0,
        )

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        def over(name: str) -> float:
            return results[f"qlm.{name}"].number("replicas") / results[f"shepherd.{name}"].number("replicas")

        return {"over_one": over("one"), "over_several": over("several")}
