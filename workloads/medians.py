"""Several runs side by side: medians over repeats, and ratios between schedulers.

What each number means is in `measures`. What was not measured is None.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeAlias

from workloads.measures import Summary

METRICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "throughput_tokens_per_s": max,
    "service_rate": max,
    "jain": max,
    "well_behaved_p50_s": min,
    "well_behaved_p99_s": min,
    "hit_rate": max,
    "service_difference": min,
}
"""The comparison's measures, each with the function that picks the better value."""

EXTRA = ("actual_rate", "jain_actual", "ttft_p50_s", "ttft_p99_s", "service_lag", "backlog_s", "active_s")

ComparisonRow: TypeAlias = dict[str, str | float | None]
"""One scheduler on one workload."""


def rows(summaries: Sequence[Summary]) -> list[ComparisonRow]:
    """One row for each (scheduler, workload), in order of appearance: medians over repeats, bound included.

    A repeat in which a measure is None does not take part in its median.
    """
    groups: dict[tuple[str, str], list[Summary]] = defaultdict(list)
    for summary in summaries:
        groups[summary.scheduler, summary.workload].append(summary)
    return [
        {"scheduler": scheduler, "workload": workload, **_medians(group, [*METRICS, "bound"])}
        for (scheduler, workload), group in groups.items()
    ]


def extras(summaries: Sequence[Summary], scheduler: str, workload: str) -> ComparisonRow:
    """The measures beside the comparison's own, for one of its rows."""
    group = [s for s in summaries if (s.scheduler, s.workload) == (scheduler, workload)]
    return {
        **_medians(group, EXTRA),
        "p50_at_least": float(any(s.p50_at_least for s in group)),
        "p99_at_least": float(any(s.p99_at_least for s in group)),
        "ok": float(sum(s.ok for s in group)),
        "failed": float(sum(s.failed for s in group)),
        "cancelled": float(sum(s.cancelled for s in group)),
    }


def _medians(group: Sequence[Summary], measures: Sequence[str]) -> ComparisonRow:
    found: ComparisonRow = {}
    for measure in measures:
        values = [value for summary in group if (value := getattr(summary, measure)) is not None]
        found[measure] = median(values) if values else None
    return found


def ratios(
    table: Sequence[ComparisonRow], summaries: Sequence[Summary], scheduler: str
) -> dict[str, dict[str, float | None]]:
    """By workload and measure: `scheduler`'s value over the others' best.

    None where one is missing, or where `scheduler`'s own is only a lower bound. Where a rival's latency is
    a lower bound, the ratio is an upper one.
    """
    found: dict[str, dict[str, float | None]] = {}
    for workload in dict.fromkeys(str(row["workload"]) for row in table):
        row = next((r for r in table if (r["scheduler"], r["workload"]) == (scheduler, workload)), None)
        if row is None:
            continue
        more = extras(summaries, scheduler, workload)
        rivals = [other for other in table if other["workload"] == workload and other is not row]
        found[workload] = {}
        for measure, better in METRICS.items():
            others = [value for rival in rivals if isinstance(value := rival[measure], float | int)]
            best, own = better(others) if others else None, row[measure]
            open_ended = more.get(measure.removeprefix("well_behaved_").removesuffix("_s") + "_at_least")
            known = isinstance(own, float | int) and best and not open_ended
            found[workload][measure] = float(own) / best if known and best and own is not None else None
    return found
