"""When an emulated GPU's steps end: PURE. All times are seconds of one monotonic clock, which the caller reads.

A GPU runs its steps one after another. A step that is launched while another runs starts when that one ends;
one that is launched later starts then. So a scheduler that prepares the next step while one runs loses no
time, and one that is too slow for its GPU makes it wait, exactly as with a real one.

Whether a measurement had true timing is told by two numbers. *Stalled*: time in which the GPU had nothing to
do although the scheduler had never run out of requests. *Late*: how long after a step's end the scheduler came
to read its tokens; on a real GPU that is microseconds, here the machine's other processes delay it.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

RECENT_STEPS = 2000
"""Steps that the percentile of lateness is taken over."""


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
        """A step that takes `takes_s` is launched: when it will end.

        `cpu_s` is the processor time that the scheduler has used so far. `after_idle`: there was nothing to
        run before this step.
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
        """The scheduler has the tokens of the step that ended at `end_s`."""
        late_s = max(0.0, now_s - end_s)
        self._late_s += late_s
        self._latest_s = max(self._latest_s, late_s)
        self._recent_late_s.append(late_s)

    def report(self) -> dict[str, Any]:
        """What a reader needs to judge the timing: totals, and how late the later of the recent steps were."""
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
"""What of a report adds up."""


def since(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float]:
    """The totals of what happened between two reports of one clock."""
    return {name: after[name] - before[name] for name in TOTALS}


def in_words(replicas: Sequence[Mapping[str, float]]) -> str:
    """Whether the timing of these was true, by their totals."""
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
