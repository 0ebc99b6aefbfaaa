"""An experiment that fails or takes long."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from workloads.experiments.claims import Part, graded
from workloads.experiments.contract import Cell, Experiment, Measured, Result, Row, TrafficSpec, medians
from workloads.plots import Figure, Panel
from workloads.session import Plan
from workloads.simulation import Site


class Odd(Experiment):
    """Measures 2·x; a cell may fail or take long instead. Counts what it ran, in this process."""

    id = "odd"
    title = "Twice as much"
    source = "Nobody, Figure 0"
    about = """Numbers are
        doubled."""
    lengths_s = (2.0, 1.0)

    def __init__(self, cells: Sequence[tuple[str, Mapping[str, Any]]] = (), seeds: tuple[str, ...] = ("0",)):
        self._cells, self._seeds = cells, seeds
        self.ran: list[tuple[str, str]] = []

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        for name, arguments in self._cells:
            yield Row(
                name, Site(), TrafficSpec("odd", dict(arguments)), plan=Plan(length_s), seeds=self._seeds
            )

    def run(self, cell: Cell, seed: str) -> Measured:
        self.ran.append((cell.name, seed))
        asked = cell.traffic.arguments
        if asked.get("fails"):
            raise RuntimeError("it is broken")
        if asked.get("sleeps"):
            time.sleep(600)
        doubled = 2.0 * asked["x"] + int(seed)
        return Measured(
            {"y": doubled, "deep": {"third": doubled / 3, "nothing": None}, "curves": [doubled]}, 2.0
        )

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        total = sum(result["y"] for result in at.values())
        yield graded(total == 6, total > 0).claim(f"The sum is 6 | 6 | {total:g} | Other numbers.")
        yield medians("Doubled", "cell | y = y", at.values())
        panel = Panel(y="y", lines={"y": ([0.0, 1.0], [1.0, total])})
        yield Figure("y", "All of them.", [[panel]])
