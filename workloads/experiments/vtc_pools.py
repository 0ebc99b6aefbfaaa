"""VTC, Figures 15a and 15b: how large the difference gets, by size of the pool and by length of requests."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from workloads.experiments import style
from workloads.experiments import vtc_setting as vtc
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import Cell, Json, Result, Size
from workloads.experiments.senders import even, sender, traffic

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

COST_MODEL = f"a100-80g/llama-2-13b:{vtc.STEP_OVERHEAD}"

SETTINGS: Mapping[str, tuple[int, int, int]] = {
    "pool-35k": (35_000, 512, 90),
    "pool-65k": (65_000, 512, 120),
    "length-256": (35_000, 256, 180),
    "length-768": (35_000, 768, 60),
}
"""KV pool, input and output tokens of a request, requests/min of client 1; client 2 sends twice as many."""

STARTS = {"": vtc.IN_STEP, ".spread": 0}
"""Requests that wait at the start, by the end of a cell's name: requests in step, and out of step."""


class Pools(vtc.VtcExperiment):
    id = "vtc-fig15"

    def cells(self, size: Size) -> Sequence[Cell]:
        return [
            vtc.cell(
                f"{name}{start}",
                "vtc",
                traffic(
                    name,
                    sender("client 1", even(rpm, waiting), length, length),
                    sender("client 2", even(2 * rpm, waiting), length, length),
                ),
                *vtc.extent(size),
                cost_model=COST_MODEL,
                kv_tokens=pool,
                max_running=1024,
            )
            for name, (pool, length, rpm) in SETTINGS.items()
            for start, waiting in STARTS.items()
        ]

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        most = {name: result.number("accumulated/max") for name, result in results.items()}
        bounds = {name: 2 * max(length, 2 * pool) for name, (pool, length, _) in SETTINGS.items()}

        def over(more: str, less: str) -> list[float]:
            return [most[more + start] / most[less + start] for start in STARTS]

        return {
            "by_pool": over("pool-65k", "pool-35k"),
            "by_length": over("pool-35k", "length-256"),
            "beyond": over("length-768", "pool-35k"),
            "used": max(most[name + start] / bound for name, bound in bounds.items() for start in STARTS),
            "settings": [
                {"cell": name, "spread": results[f"{name}.spread"].shown("accumulated/max"), "pool": f"{pool:,}",
                 "length": f"{length} + {length}", "bound": float(bounds[name])}
                for name, (pool, length, _) in SETTINGS.items()
            ],
        }  # fmt: skip

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        parts = {
            "512 + 512, by pool in tokens": {"35 000": "pool-35k", "65 000": "pool-65k"},
            "pool of 35 000, by length": {
                "256 + 256": "length-256",
                "512 + 512": "pool-35k",
                "768 + 768": "length-768",
            },
        }

        def draw(canvas: "Canvas") -> None:
            for axes, (title, names) in zip(style.panels(canvas, 2), parts.items(), strict=True):
                style.client_lines(
                    axes, {name: vtc.accumulated_curve(results[cell]) for name, cell in names.items()}
                )
                style.label(axes, vtc.TIME, "difference of service, units", title)

        return {"difference": Drawing(draw, (8.4, 3.4))}
