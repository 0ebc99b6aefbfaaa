"""The queues of the rule as people see them: plain maps, texts and finite numbers."""

from collections import Counter
from collections.abc import Mapping
from math import isfinite

from router.placement.deadline.line import Job
from router.placement.deadline.models import Models
from router.placement.deadline.replica import UNKNOWN_S, Replica


def report(models: Models, ahead: float, now_s: float) -> Mapping[str, object]:
    """What waits by model, class and tier, in which order for each worker, and how many replicas would do."""
    rows, late = Counter[tuple[str, str, int]](), Counter[tuple[str, str, int]]()
    for model, line in models.lines.items():
        for (slo_class, tier, is_late), count in line.counts.items():
            rows[model, slo_class, tier] += count
            late[model, slo_class, tier] += is_late * count
    shortage = None
    if models.missing and rows:
        shortage = {
            "more": sum(models.missing.values()),
            "models": dict(models.missing),
            "why": "what waits within its clients' shares is more than can be served in time",
            "for_s": round(now_s - models.missing_since_s, 3),
        }
    return {
        "groups": sum(len(line.orders()) for line in models.lines.values()),
        "waiting": [
            {"model": sort[0], "class": sort[1], "tier": sort[2], "requests": count, "late": late[sort]}
            for sort, count in sorted(rows.items())
        ],
        "workers": {name: _shown(models, replica, now_s) for name, replica in models.replicas.items()},
        "ahead": ahead if isfinite(ahead) else None,
        "shortage": shortage,
    }


def standing(models: Models, one: Job, *, ahead: bool) -> Mapping[str, object]:
    """The order of a request that waits, and with `ahead` how much is before it."""
    model = one.request.model
    line = models.lines[model]
    order = 2 * line.tier(one) + one.is_late
    found: dict[str, object] = {
        "group": order,
        "model": model,
        "class": one.slo_class,
        "tier": line.tier(one),
        "with": line.count - 1,
    }
    if not ahead:
        return found
    have = [replica for replica in models.replicas.values() if model in (replica.target, replica.loaded)]
    count, tokens = line.before(one)
    rate = sum(replica.rates.get(model, replica.kv_tokens / UNKNOWN_S) for replica in have)
    wait_s = round(tokens / rate, 3) if rate else None
    return found | {
        "worker": have[0].name if have else None,
        "groups_before": order,
        "requests_before": round(count),
        "swaps_before": int(all(replica.loaded != model for replica in have)),
        "wait_s": wait_s,
        "likely_s": wait_s,
        "before": [],
    }


def _shown(models: Models, replica: Replica, now_s: float) -> Mapping[str, object]:
    """A worker and the orders from which it takes, the one that goes first before the others."""
    rows, line = [], models.lines.get(replica.loaded or "") if replica.loaded is not None else None
    for (tier, is_late), (first, count) in (line.orders() if line is not None else {}).items():
        slack_s = round(first.due_s - now_s, 3)
        rows.append(
            {
                "group": 2 * tier + is_late,
                "model": replica.loaded,
                "class": "(late)" if is_late else first.slo_class,
                "tier": tier,
                "waiting": count,
                "running": sum(flight.tier == tier for flight in replica.flights.values()),
                "starts_s": round(replica.to_do_s, 3),
                "slack_s": slack_s,
                "late_s": max(0.0, -slack_s),
            }
        )
    return {
        "loaded": replica.loaded,
        "wanted": replica.target or replica.loaded,
        "in_flight": len(replica.flights),
        "in_flight_tokens": round(replica.held, 3),
        "kv_tokens": replica.kv_tokens,
        "groups": rows,
    }
