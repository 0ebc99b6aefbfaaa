"""What of a run was in time.

attained      part of the requests whose first token came within their class's time; of each class too
goodput       requests within their time, a second, until the last answer is complete
throughput    requests a second, all of them
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workloads.deadlines.run import Outcome, Served


def attained(served: Sequence[Served]) -> float | None:
    """The part that was in time; None of nobody."""
    return sum(one.met for one in served) / len(served) if served else None


def by(served: Sequence[Served], key: Callable[[Served], str]) -> dict[str, list[Served]]:
    """Grouped by `key`, in order of the keys."""
    found: dict[str, list[Served]] = {}
    for one in served:
        found.setdefault(key(one), []).append(one)
    return dict(sorted(found.items()))


def percentile(values: Sequence[float], part: float) -> float | None:
    """The smallest of the values that `part` of them do not exceed; None of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else None


def measure(outcome: Outcome) -> dict[str, Any]:
    """What is kept of a run."""
    served = outcome.served
    end_s = max(outcome.end_s, 1e-9)
    waits = [one.ttft_s for one in served if one.ttft_s is not None]
    classes: Mapping[str, Any] = {
        name: {
            "attained": attained(some),
            "p50_s": percentile([one.ttft_s for one in some if one.ttft_s is not None], 0.5),
            "p99_s": percentile([one.ttft_s for one in some if one.ttft_s is not None], 0.99),
            "requests": len(some),
        }
        for name, some in by(served, lambda one: one.asked.slo_class).items()
    }
    return {
        "attained": attained(served),
        "classes": classes,
        "goodput_per_s": sum(one.met for one in served) / end_s,
        "throughput_per_s": sum(one.ended_s is not None for one in served) / end_s,
        "end_s": end_s,
        "p99_s": percentile(waits, 0.99),
        "requests": len(served),
        "ended": sum(one.ended_s is not None for one in served),
        "plans": outcome.cluster.plans,
        "busy_part": (outcome.total("prefill_s") + outcome.total("decode_s"))
        / (end_s * max(1, len(outcome.replicas))),
        **{
            name: outcome.total(name)
            for name in ("swaps", "swap_s", "evictions", "extend_tokens", "output_tokens")
        },
    }
