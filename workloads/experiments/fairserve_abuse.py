"""FairServe, Figure 8a to c: who is refused, what is cut, and what is wasted."""

from collections.abc import Mapping

from workloads.experiments.contract import Json, Result
from workloads.experiments.fairserve_setting import ABUSERS as ABUSERS  # what the words quote
from workloads.experiments.fairserve_setting import Crowded

SURGES = (0.1, 0.3, 1.0)


class Abuse(Crowded):
    id = "fairserve-abuse"
    schedulers = ("rpm", "fs", "literal", "dlpm")
    surges = SURGES

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        parts = [f"{round(100 * surge)}" for surge in SURGES]
        return {
            "over_part": [
                {
                    "part": part,
                    "rpm": results[f"rpm.{part}"].number("all/throttled"),
                    "fs": results[f"fs.{part}"].number("all/throttled"),
                    "ratio": _over(results, part),
                }
                for part in parts
            ],
            "throttled": _over(results, parts[0]),
        }


def _over(results: Mapping[str, Result], part: str) -> float | None:
    fs = results[f"fs.{part}"].number("all/throttled")
    return results[f"rpm.{part}"].number("all/throttled") / fs if fs else None
