"""The virtual queues as people see them: plain maps, texts and finite numbers.

report    all queues: what waits by model, class and tier, each worker's groups in order with when they start, and
          how good the estimates and the plans were
standing  one request that waits: its group, and what stands before it
"""

from collections import Counter
from collections.abc import Mapping
from math import isfinite

from router.placement.qlm.groups import Group
from router.placement.qlm.problem import Slot
from router.placement.qlm.queues import VirtualQueues

_Sort = tuple[str, str, int]
"""Model, class and tier."""

MOST_GROUPS = 20
"""Of a worker that are listed."""
LATE = "(late)"
"""In place of a class: what is late already waits in groups of all classes."""


def report(queues: VirtualQueues, now_s: float) -> dict[str, object]:
    """All queues. O(groups)."""
    waiting, late = Counter[_Sort](), Counter[_Sort]()
    for group in queues.groups:
        waiting[_sort(group)] += len(group)
    workers = {}
    for name in queues.orders():
        slots = queues.slots(name, now_s)
        for slot in slots:
            group = queues.groups.by_number[slot.demand.number]
            if slot.late_s > 0:
                late[_sort(group)] += len(group)
        workers[name] = _worker(queues, name, slots)
    sorts = [sort for sort in sorted(waiting) if waiting[sort]]
    r2 = queues.estimator.r2
    return {
        "groups": len(queues.groups),
        "stranded": len(queues.stranded),
        "waiting": [
            {
                "model": model,
                "class": slo_class,
                "tier": tier,
                "requests": waiting[model, slo_class, tier],
                "late": late[model, slo_class, tier],
            }
            for model, slo_class, tier in sorts
        ],
        "workers": workers,
        "r2": r2 if r2 is not None and isfinite(r2) else None,
    }


def standing(
    queues: VirtualQueues, request_id: str, now_s: float, *, ahead: bool = True
) -> Mapping[str, object] | None:
    """Where a request stands; None if it is in no group. With `ahead` also what stands before it at its worker and how
    long it still waits, in O(groups in front); without, in O(1)."""
    group = queues.groups.of(request_id)
    if group is None:
        return None
    found: dict[str, object] = {
        "group": group.number,
        "model": group.kind.model,
        "class": _class_of(group),
        "tier": group.kind.tier,
        "with": max(0, len(group) - 1),
    }
    if not ahead:
        return found
    worker = next((name for name, order in queues.orders().items() if group.number in order), None)
    found["worker"] = worker
    if worker is None:
        return found
    slots = queues.slots(worker, now_s)
    at = next((at for at, slot in enumerate(slots) if slot.demand.number == group.number), 0)
    before = [queues.groups.by_number[slot.demand.number] for slot in slots[:at]]
    wait = queues.wait(request_id, now_s)
    return found | {
        "groups_before": len(before),
        "requests_before": sum(map(len, before)),
        "swaps_before": sum(slot.swaps for slot in slots[: at + 1]),
        "before": [_row(one, slot) for one, slot in zip(before, slots, strict=False)][:MOST_GROUPS],
        "wait_s": None if wait is None else _number(wait.mean_s),
        "likely_s": None if wait is None else _number(wait.likely_s),
    }


def _sort(group: Group) -> _Sort:
    return group.kind.model, _class_of(group), group.kind.tier


def _class_of(group: Group) -> str:
    """Without what tells apart those of one class that were promised unlike times."""
    return LATE if group.kind.late else group.kind.slo_class.partition("~")[0]


def _worker(queues: VirtualQueues, name: str, slots: list[Slot]) -> dict[str, object]:
    worker, groups = queues.workers[name], queues.groups.by_number
    return {
        "loaded": worker.loaded,
        "wanted": queues.wanted(name),
        "in_flight": len(worker.in_flight),
        "in_flight_tokens": _number(worker.in_flight_tokens),
        "kv_tokens": worker.kv_tokens,
        "waiting": sum(len(groups[slot.demand.number]) for slot in slots),
        "groups": [_row(groups[slot.demand.number], slot) for slot in slots[:MOST_GROUPS]],
        "more_groups": max(0, len(slots) - MOST_GROUPS),
    }


def _row(group: Group, slot: Slot) -> dict[str, object]:
    return {
        "group": group.number,
        "model": group.kind.model,
        "class": _class_of(group),
        "tier": group.kind.tier,
        "waiting": len(group),
        "running": group.running,
        "begun": group.begun_on is not None,
        "starts_s": _number(slot.start_s),
        "slack_s": _number(slot.demand.slack_s),
        "late_s": _number(slot.late_s),
    }


def _number(value: float) -> float | None:
    """Finite, to a millisecond."""
    return round(value, 3) if isfinite(value) else None
