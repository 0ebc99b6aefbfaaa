"""Experiments that fail, take long, or kill the process that runs them: what the runner must survive."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from workloads.driver import Plan
from workloads.experiments.contract import (
    Cell,
    Claim,
    Experiment,
    Figure,
    Measured,
    Report,
    Result,
    Size,
    Table,
    Traffic,
    verdict,
)
from workloads.simulation import Site


class Odd(Experiment):
    """Measures 2·x; a cell may fail, die or take long instead. Counts what it ran, in this process."""

    id, title, source, about = "odd", "Twice as much", "Nobody, Figure 0", "Numbers are doubled."

    def __init__(self, cells: Sequence[tuple[str, Mapping[str, Any]]] = (), seeds: tuple[str, ...] = ("0",)):
        self._cells, self._seeds = cells, seeds
        self.ran: list[tuple[str, str]] = []

    def cells(self, size: Size) -> Sequence[Cell]:
        return [
            Cell(
                name,
                Site(),
                Traffic("odd", dict(arguments)),
                Plan(2.0 if size == "full" else 1.0),
                self._seeds,
            )
            for name, arguments in self._cells
        ]

    def run(self, cell: Cell, seed: str) -> Measured:
        self.ran.append((cell.name, seed))
        told = cell.traffic.arguments
        if told.get("fails"):
            raise RuntimeError("it is broken")
        if told.get("dies"):
            os._exit(7)
        if told.get("sleeps"):
            time.sleep(600)
        doubled = 2.0 * told["x"] + int(seed)
        return Measured(
            {"y": doubled, "deep": {"third": doubled / 3, "nothing": None}, "curves": [doubled]}, 2.0
        )

    def report(self, results: Mapping[str, Result]) -> Report:
        total = sum(result.number("y") for result in results.values())
        return Report(
            claims=[
                Claim(
                    "The sum is 6", "6", f"{total:g}", verdict(total == 6, partly=total > 0), "Other numbers."
                )
            ],
            tables=[
                Table("Doubled", ("cell", "y"), [(name, one.shown("y")) for name, one in results.items()])
            ],
            figures=[Figure("y", "All of them.", lambda canvas: canvas.subplots().plot([1.0, total]))],
        )


EXPERIMENTS = {"odd": Odd([("good", {"x": 1}), ("bad", {"dies": True}), ("late", {"x": 2})])}
