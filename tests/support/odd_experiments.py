"""Experiments that fail, take long, or kill the process that runs them: what the runner must survive."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from workloads.experiments.claims import Drawing
from workloads.experiments.contract import Cell, Experiment, Measured, Result, Size, TrafficSpec
from workloads.session import Plan
from workloads.simulation import Site


class Odd(Experiment):
    """Measures 2·x; a cell may fail, die or take long instead. Counts what it ran, in this process."""

    id = "odd"

    def __init__(self, cells: Sequence[tuple[str, Mapping[str, Any]]] = (), seeds: tuple[str, ...] = ("0",)):
        self._cells, self._seeds = cells, seeds
        self.ran: list[tuple[str, str]] = []

    def cells(self, size: Size) -> Sequence[Cell]:
        return [
            Cell(
                name,
                Site(),
                TrafficSpec("odd", dict(arguments)),
                Plan(2.0 if size == "full" else 1.0),
                self._seeds,
            )
            for name, arguments in self._cells
        ]

    def run(self, cell: Cell, seed: str) -> Measured:
        self.ran.append((cell.name, seed))
        asked = cell.traffic.arguments
        if asked.get("fails"):
            raise RuntimeError("it is broken")
        if asked.get("dies"):
            os._exit(7)
        if asked.get("sleeps"):
            time.sleep(600)
        doubled = 2.0 * asked["x"] + int(seed)
        return Measured(
            {"y": doubled, "deep": {"third": doubled / 3, "nothing": None}, "curves": [doubled]}, 2.0
        )

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Any]:
        return {"total": sum(result.number("y") for result in results.values())}

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        heights = [1.0, *(result.number("y") for result in results.values())]
        return {"y": Drawing(lambda canvas: canvas.subplots().plot(heights))}


EXPERIMENTS = {"odd": Odd([("good", {"x": 1}), ("bad", {"dies": True}), ("late", {"x": 2})])}
