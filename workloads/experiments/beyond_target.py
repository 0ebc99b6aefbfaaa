"""What a target for output tokens gives light clients beside a flood, and what it costs, on four simulated A100."""

from collections.abc import Mapping, Sequence

from workloads.experiments.beyond_isolation import (
    FLOOD_PERIOD_S,
    FLOOD_SECONDS,
    FLOODS,
    REPLICAS,
    SEVERAL,
    STACKS,
    Isolation,
    cell_of,
    site_of,
    slowest_program_s,
)
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import Cell, Json, Result, Size
from workloads.isolation.attacks import FLOOD, Scene

__all__ = ["FLOOD_PERIOD_S", "FLOOD_SECONDS", "REPLICAS", "SEVERAL", "Target"]

TARGETS_MS = (12.0, 15.0, 20.0, 30.0)
AT_MS = 20.0
"""The target that the words are about."""
OFF = "off"
SHORTER, TOGETHER = 0.6, 0.95
"""What is to hold beside the largest flood: of the programs' times, and of the throughput, without a target."""


class Target(Isolation):
    """Clients and measures are those of `Isolation`."""

    id = "beyond-target"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        targets = {OFF: 0.0} | {
            f"{target_ms:g}": target_ms for target_ms in (TARGETS_MS if full else (AT_MS,))
        }
        stack = STACKS["dlpm"]
        scenes = {f"{FLOOD}{flood}": flood for flood in (FLOODS if full else FLOODS[:1])}
        return [
            cell_of("light", site_of(stack), Scene(light=SEVERAL), size, FLOOD_SECONDS, FLOOD_PERIOD_S),
            *(
                cell_of(
                    f"{name}.{flood}",
                    site_of(stack, target_tpot_ms=target_ms),
                    Scene(scene, SEVERAL),
                    size,
                    FLOOD_SECONDS,
                    FLOOD_PERIOD_S,
                )
                for scene, flood in scenes.items()
                for name, target_ms in targets.items()
            ),
        ]

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        solo_s = slowest_program_s(results["light"])
        lines: list[dict[str, Json]] = []
        for key, result in results.items():
            name, _, flood = key.partition(".")
            if flood:
                program_s = slowest_program_s(result)
                lines.append(
                    {
                        "flood": int(flood),
                        "target": "none" if name == OFF else f"{name} ms",
                        "program_s": program_s,
                        "over_solo": program_s / solo_s,
                        "over_off": program_s / slowest_program_s(results[f"{OFF}.{flood}"]),
                        "ttft_p99_s": result.number("ttft_p99_s"),
                        "tokens_per_s": result.number("tokens_per_s"),
                        "tokens_over_off": result.number("tokens_per_s")
                        / results[f"{OFF}.{flood}"].number("tokens_per_s"),
                    }
                )
        most = max(line["flood"] for line in lines)
        at = f"{AT_MS:g} ms"
        return {
            "lines": lines,
            "most": most,
            "none": next(line for line in lines if (line["flood"], line["target"]) == (most, "none")),
            "held": next(line for line in lines if (line["flood"], line["target"]) == (most, at)),
            "least": min(line["tokens_over_off"] for line in lines if line["target"] == at),
            "least_of_all": min(line["tokens_over_off"] for line in lines),
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {}
