"""The virtual queues as people see them: plain maps, texts and finite numbers."""

from collections import Counter
from collections.abc import Mapping
from math import isfinite

from router.placement.qlm.groups import Group
from router.placement.qlm.problem import Slot
from router.placement.qlm.queues import VirtualQueues

MOST_GROUPS = 20
"""Of a worker that are listed."""
LATE = "(late)"
"""In place of a class: what is late already waits in groups of all classes."""


def report(queues: VirtualQueues, now_s: float) -> dict[str, object]:
    """What waits by model, class and tier, each worker's groups in order with when they start, and how good estimates
    were. O(groups)."""
    waiting, late, workers = Counter[tuple[str, str, int]](), Counter[tuple[str, str, int]](), {}
    for group in queues.groups:
        waiting[_sort(group)] += len(group)
    for name, worker in queues.workers.items():
        rows = [(queues.groups.by_number[slot.demand.number], slot) for slot in queues.slots(name, now_s)]
        for group, slot in rows:
            late[_sort(group)] += len(group) * (slot.late_s > 0)
        workers[name] = {
            "loaded": worker.loaded,
            "wanted": queues.wanted(name),
            "in_flight": len(worker.in_flight),
            "in_flight_tokens": _number(worker.sent.tokens),
            "kv_tokens": worker.kv_tokens,
            "waiting": sum(len(group) for group, _ in rows),
            "groups": [_row(*row) for row in rows[:MOST_GROUPS]],
            "more_groups": max(0, len(rows) - MOST_GROUPS),
        }
    keys = "model", "class", "tier"
    r2 = queues.estimator.r2
    return {
        "groups": len(queues.groups),
        "stranded": len(queues.stranded),
        "waiting": [
            {**dict(zip(keys, sort, strict=True)), "requests": waiting[sort], "late": late[sort]}
            for sort in sorted(waiting)
            if waiting[sort]
        ],
        "workers": workers,
        "r2": None if r2 is None else _number(r2),
    }


def standing(
    queues: VirtualQueues, request_id: str, now_s: float, *, ahead: bool = True
) -> Mapping[str, object] | None:
    """Where a request stands; None if it is in no group. With `ahead` also what stands before it at its worker and how
    long it still waits, in O(groups in front); without, in O(1)."""
    group = queues.groups.of(request_id)
    if group is None:
        return None
    model, slo_class, tier = _sort(group)
    found: dict[str, object] = {
        "group": group.number,
        "model": model,
        "class": slo_class,
        "tier": tier,
        "with": max(0, len(group) - 1),
    }
    if not ahead:
        return found
    worker = next((name for name, order in queues.orders().items() if group.number in order), None)
    if worker is None:
        return found | {"worker": None}
    slots = queues.slots(worker, now_s)
    at = next((at for at, slot in enumerate(slots) if slot.demand.number == group.number), 0)
    before = [(queues.groups.by_number[slot.demand.number], slot) for slot in slots[:at]]
    wait = queues.wait(request_id, now_s)
    return found | {
        "worker": worker,
        "groups_before": len(before),
        "requests_before": sum(len(one) for one, _ in before),
        "swaps_before": sum(slot.swaps for slot in slots[: at + 1]),
        "before": [_row(*one) for one in before[:MOST_GROUPS]],
        "wait_s": None if wait is None else _number(wait.mean_s),
        "likely_s": None if wait is None else _number(wait.likely_s),
    }


def _sort(group: Group) -> tuple[str, str, int]:
    """Model, class and tier; the class without what tells apart those that were promised unlike times."""
    kind = group.kind
    return kind.model, LATE if kind.late else kind.slo_class.partition("~")[0], kind.tier


def _row(group: Group, slot: Slot) -> dict[str, object]:
    model, slo_class, tier = _sort(group)
    return {
        "group": group.number,
        "model": model,
        "class": slo_class,
        "tier": tier,
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
