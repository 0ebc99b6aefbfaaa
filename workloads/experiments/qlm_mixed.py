"""Unlike replicas, and unlike requests: A10 beside A100, mega prompts beside usual ones."""

from collections.abc import Mapping, Sequence

from workloads.experiments.contract import SEEDS, Cell, Json, Result, Size
from workloads.experiments.qlm_setting import (
    A10,
    A100,
    TRACE,
    Deadlines,
    cell,
    other,
    points,
    qlm,
    ratio,
    rule,
    w_a,
)

# ---- Figure 15

SEVEN_B: Mapping[str, str] = {"vicuna-13b": "mistral-7b"}
"""A 13B in bf16 does not fit an A10, so all requests are for Mistral-7B."""
REPLICAS = 6
SHARES = (0, 1, 2, 3, 6)
"""How many of them are A10s."""
MIX_RATE = 60.0


class Hardware(Deadlines):
    id = "qlm-fig15"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        found = []
        for slow in SHARES if full else (0, 3):
            gpus = [A10] * slow + [A100] * (REPLICAS - slow)
            fleet = qlm(REPLICAS, SEVEN_B, gpus=gpus)
            part = 100 * slow / REPLICAS
            for name, label, one in (
                ("qlm", "QLM", fleet),
                ("rule", "deadline", rule(fleet)),
                ("turn", "round-robin", other("spread", fleet)),
                ("random", "random", other("spread", fleet, by="random")),
            ):
                found.append(
                    cell(
                        f"{name}.{slow}",
                        one,
                        w_a(MIX_RATE),
                        most=TRACE if full else 300,
                        seeds=SEEDS[:1],
                        label=f"{label}, {part:.0f}% A10",
                    )
                )
        return found

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        counts = sorted({int(name.rpartition(".")[2]) for name in results})
        gains = {slow: _gain(results, slow) for slow in counts}
        mixed = [gain for slow, gain in gains.items() if 0 < slow < REPLICAS]
        pure = [gain for slow, gain in gains.items() if slow in (0, REPLICAS)]
        return {
            "gain_mixed_over_pure": max(mixed) / max(pure),
            "gain_mixed": max(mixed),
            "gain_pure": max(pure),
            "rows": [
                {
                    "part": 100 * slow / REPLICAS,
                    "gain": gains[slow],
                    **{
                        name: results[f"{name}.{slow}"].shown("throughput_per_s")
                        for name in ("qlm", "rule", "turn", "random")
                    },
                    "qlm_met": results[f"qlm.{slow}"].shown("attained"),
                    "rule_met": results[f"rule.{slow}"].shown("attained"),
                    "turn_met": results[f"turn.{slow}"].shown("attained"),
                }
                for slow in counts
            ],
        }


def _gain(results: Mapping[str, Result], slow: int) -> float:
    """Throughput over the better of the two others."""
    return min(
        ratio(results, f"qlm.{slow}", f"{name}.{slow}", "throughput_per_s") for name in ("turn", "random")
    )


# ---- Figure 16

MEGA_REPLICAS = 4
MEGA_PARTS = (0.0, 0.1, 0.5, 1.0)
MEGA_WORK = 24.0
"""Requests a second without mega prompts; with them as many as are as much work."""
MEGA_COST = 6.0
"""Of a mega prompt, in usual requests."""


class Mega(Deadlines):
    id = "qlm-fig16"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        found = []
        for part in MEGA_PARTS if full else (0.1,):
            rate = MEGA_WORK / (1 + part * (MEGA_COST - 1))
            fleet = qlm(MEGA_REPLICAS)
            most = round((TRACE if full else 200) / (1 + part * (MEGA_COST - 1)))
            for name, label, one in (
                ("qlm", "QLM", fleet),
                ("rule", "deadline", rule(fleet)),
                ("edf", "EDF", other("edf", fleet)),
                ("fcfs", "FCFS", other("fcfs_models", fleet)),
            ):
                found.append(
                    cell(
                        f"{name}.{100 * part:.0f}",
                        one,
                        w_a(rate, mega=part),
                        most=most,
                        seeds=SEEDS[:1],
                        label=label,
                    )
                )
        return found

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        parts = sorted({int(name.rpartition(".")[2]) for name in results})
        gains = {part: points(results, f"qlm.{part}", f"fcfs.{part}") for part in parts}
        few = [gain for part, gain in gains.items() if 0 < part <= 10]
        many = [gain for part, gain in gains.items() if part >= 50]
        fewest, most = max(few, default=0.0), max(many, default=0.0)
        return {
            "gain_few": fewest,
            "gain_many": most,
            "gain_few_over_many_mega": fewest / most if most > 0 else None,
            "rows": [
                {
                    "part": part,
                    "gain": gains[part],
                    **{
                        name: results[f"{name}.{part}"].shown("attained")
                        for name in ("qlm", "rule", "edf", "fcfs")
                    },
                }
                for part in parts
            ],
        }
