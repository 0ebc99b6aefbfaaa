"""When an emulated GPU's steps end. All times are seconds of one monotonic clock, which the caller reads.

A GPU runs its steps one after another. A step that is launched while another runs starts when that one ends; later,
it starts at once. So a scheduler that prepares the next step while one runs loses no time, and one that is too slow
makes its GPU wait, exactly as with a real GPU.

Two numbers say whether a measurement had true timing. *Stalled* is time in which the GPU had nothing to do although
the scheduler had requests. *Late* is the time from a step's end until the scheduler reads its tokens: microseconds on
a real GPU; here the machine's other processes delay it.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

RECENT_STEPS = 2000
"""The percentile of lateness is over this many latest steps."""


class GpuClock:
    """One GPU's time, and what the scheduler spent beside it."""

    def __init__(self) -> None:
        self._free_at_s = 0.0
        self._cpu_mark_s = 0.0
        self._steps = 0
        self._busy_s = 0.0
        self._stalled_s = 0.0
        self._late_s = 0.0
        self._latest_s = 0.0
        self._recent_late_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._cpu_s = 0.0

    def launch(self, takes_s: float, *, now_s: float, cpu_s: float, after_idle: bool) -> float:
        """Launches a step that takes `takes_s`. Returns when it will end.

        `cpu_s` is the processor time that the scheduler has used so far. `after_idle`: the scheduler had no requests
        before this step.
        """
        if not after_idle and self._steps:
            self._stalled_s += max(0.0, now_s - self._free_at_s)
            self._cpu_s += cpu_s - self._cpu_mark_s
        self._cpu_mark_s = cpu_s
        self._steps += 1
        self._busy_s += takes_s
        self._free_at_s = max(self._free_at_s, now_s) + takes_s
        return self._free_at_s

    def ended(self, end_s: float, *, now_s: float) -> None:
        """Notes that the scheduler has read the tokens of the step that ended at `end_s`."""
        late_s = max(0.0, now_s - end_s)
        self._late_s += late_s
        self._latest_s = max(self._latest_s, late_s)
        self._recent_late_s.append(late_s)

    def report(self) -> dict[str, Any]:
        """What a reader needs to judge the timing: totals, and how late the steps were read."""
        recent = sorted(self._recent_late_s)
        return {
            "steps": self._steps,
            "busy_s": self._busy_s,
            "stalled_s": self._stalled_s,
            "late_s": self._late_s,
            "scheduler_cpu_s": self._cpu_s,
            "late_p99_s": recent[int(0.99 * (len(recent) - 1))] if recent else None,
            "late_max_s": self._latest_s,
        }


TOTALS = ("steps", "busy_s", "stalled_s", "late_s", "scheduler_cpu_s")
"""The fields of a report that add up."""


def since(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float]:
    """The totals between two reports of one clock."""
    return {name: after[name] - before[name] for name in TOTALS}


def in_words(replicas: Sequence[Mapping[str, float]]) -> str:
    """One sentence on how true the timing of these replicas was, by their totals."""
    steps = sum(totals["steps"] for totals in replicas)
    if not steps:
        return "no step was run"
    stalled = max(totals["stalled_s"] / totals["busy_s"] for totals in replicas if totals["busy_s"])
    late_s, cpu_s = (
        sum(totals[name] for totals in replicas) / steps for name in ("late_s", "scheduler_cpu_s")
    )
    return (
        f"emulated GPUs stalled for {stalled:.1%} of their time at most; their {steps:,.0f} steps were read "
        f"{late_s * 1e3:.2f} ms late and cost {cpu_s * 1e3:.2f} ms of scheduling each"
    )
