"""FairServe, Figure 8a to c: who is refused, what is cut, and what is wasted."""

from collections.abc import Mapping, Sequence

from workloads.experiments.contract import Cell, Json, Result, Size
from workloads.experiments.fairserve_setting import SURGE, Crowded

MORE = (0.3, 1.0)
"""Parts of the time with overload, besides the usual one."""


class Abuse(Crowded):
    id = "fairserve-abuse"
    schedulers = ("rpm", "fs", "literal", "dlpm")

    def cells(self, size: Size) -> Sequence[Cell]:
        more = [
            self.cell(name, size, surge, f".{round(100 * surge)}") for surge in MORE for name in ("rpm", "fs")
        ]
        return [*super().cells(size), *more]

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        lines = []
        for surge in (SURGE, *MORE):
            suffix = "" if surge == SURGE else f".{round(100 * surge)}"
            rpm, fs = (results[f"{name}{suffix}"].number("all/throttled") for name in ("rpm", "fs"))
            lines.append({"part": f"{surge:.0%}", "rpm": rpm, "fs": fs, "ratio": rpm / fs if fs else None})
        return {**super().values(results), "over_part": lines, "throttled": lines[0]["ratio"]}
