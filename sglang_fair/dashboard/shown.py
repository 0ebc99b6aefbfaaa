"""Builds a view from what the model knows. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sglang_fair.dashboard.history import Bucket, History
from sglang_fair.dashboard.reading import OTHERS, Hits, Quarantine, Reading, Status, Worker
from sglang_fair.dashboard.shares import fair_shares
from sglang_fair.dashboard.view import ClientView, Health, Level, Note, OthersView, ReplicaView, View
from sglang_fair.dashboard.window import Sums, amount

if TYPE_CHECKING:
    from sglang_fair.dashboard.model import Followed

RESTART_SHOWN_S = 60.0

ABOUT_REPLICAS: Mapping[str, str] = {
    "silent": "does not answer",
    "denied": "asks for another key than ours (SGLANG_FAIR_REPLICA_KEY)",
    "no overlay": "no overlay: it runs without the fair scheduler, and nothing is known of its clients",
    "sick": "is sick: it gets no requests until it answers again",
    "draining": "is draining: it finishes what it has",
    "swapping": "is loading another model: it gets no requests until it has it",
}


def view(
    reading: Reading | None,
    followed: Mapping[str, "Followed"],
    sums: Sums,
    history: History,
    slots: Mapping[str, int],
    *,
    at_s: float,
    every_s: float,
    window_s: float,
    span: str,
) -> View:
    """What to show. `slots` are the clients that have a row, in order, with their colours."""
    status = reading.gateway.status if reading is not None else None
    buckets = history.buckets()
    replicas = [_replica(name, one, status, sums, buckets) for name, one in followed.items()]
    clients, others = _clients(followed, sums, buckets, slots)
    notes = _notes(reading, followed, replicas, at_s)
    hits = status.hits if status is not None else Hits()
    served = sum(sums.service.values()) + sums.others
    known = [one for one in replicas if one.waiting is not None]
    return View(
        at=at_s,
        every_s=every_s,
        window_s=window_s,
        span=span,
        step_s=history.step_s,
        health=_health(reading, notes),
        notes=notes,
        placement=status.placement if status is not None else "",
        weights="file" if status is not None and status.gateway.tenants is not None else "live",
        rate=sums.rate(served) if sums.lasted_s else None,
        waiting=sum(one.waiting or 0 for one in known) if known else None,
        running=sum(one.running or 0 for one in known) if known else None,
        hit_rate=_ratio(sum(sums.cached_tokens.values()), sum(sums.prompt_tokens.values())),
        predicted_hit_rate=_ratio(hits.measured_predicted_tokens, hits.measured_input_tokens),
        measured_hit_rate=_ratio(hits.measured_cached_tokens, hits.measured_input_tokens),
        of_bound=max(
            (part for one in followed.values() if (part := one.of_bound()) is not None), default=None
        ),
        clients_seen=len(_active(followed, sums)),
        times=[bucket.number * history.step_s for bucket in buckets],
        clients=clients,
        others=others,
        replicas=replicas,
        hit_rates=[
            _ratio(bucket.cached_tokens, bucket.prompt_tokens) if bucket.looks else None for bucket in buckets
        ],
    )


def _clients(
    followed: Mapping[str, "Followed"], sums: Sums, buckets: Sequence[Bucket], slots: Mapping[str, int]
) -> tuple[list[ClientView], OthersView | None]:
    waiting, running, weights = Counter[str](), Counter[str](), dict[str, float]()
    service, deficits = amount(), dict[str, dict[str, float | None]]()
    for replica, one in followed.items():
        for name, row in one.clients().items():
            waiting[name] += row.waiting
            running[name] += row.running
            if name in slots:
                service[name] += row.service
                deficits.setdefault(name, {})[replica] = row.counter
            if row.waiting or row.running or name not in weights:  # where it asks, its newest weight is known
                weights[name] = row.weight
    served = sum(sums.service.values()) + sums.others
    hungry = {name for one in followed.values() for name in one.lasting(sums.at_s - sums.lasted_s / 2)}
    wanted = {**sums.wanted(hungry), OTHERS: sums.others}
    due = fair_shares(served, wanted, weights)
    clients = []
    for name, slot in slots.items():
        wait_s, is_longer = sums.wait_s(name)
        clients.append(
            ClientView(
                name=name,
                slot=slot,
                weight=weights.get(name, 1.0),
                rate=sums.rate(sums.service[name]),
                share=_ratio(sums.service[name], served),
                fair_share=_ratio(due.get(name, 0.0), served),
                waiting=waiting[name],
                running=running[name],
                wait_s=wait_s,
                wait_is_longer=is_longer,
                hit_rate=_ratio(sums.cached_tokens[name], sums.prompt_tokens[name]),
                service=service[name],
                deficits=deficits.get(name, {}),
                rates=[_rate(bucket, bucket.service.get(name, 0.0)) for bucket in buckets],
            )
        )
    rest = _active(followed, sums) - {*slots}
    rest_served = [_of_rest(bucket, slots) for bucket in buckets]
    if not rest and not any(rest_served):
        return clients, None
    units = sums.others + sum(sums.service[name] for name in rest)
    others = OthersView(
        clients=len(rest),
        rate=sums.rate(units),
        share=_ratio(units, served),
        waiting=sum(waiting[name] for name in rest),
        running=sum(running[name] for name in rest),
        rates=[_rate(bucket, one) for bucket, one in zip(buckets, rest_served, strict=True)],
    )
    return clients, others


def _active(followed: Mapping[str, "Followed"], sums: Sums) -> set[str]:
    """The clients that got something in the window, or have requests now."""
    names = {name for name, units in sums.service.items() if units}
    for one in followed.values():
        names.update(name for name, row in one.clients().items() if row.waiting or row.running)
    return names


def _replica(
    name: str, one: "Followed", status: Status | None, sums: Sums, buckets: Sequence[Bucket]
) -> ReplicaView:
    worker = _worker(name, status)
    state = one.state
    if worker is not None and worker.state != "up" and state != "no overlay":
        state = worker.state
    report = one.report
    units, prompt, cached = sums.by_replica.get(name, (0.0, 0, 0))
    has_report = report is not None
    return ReplicaView(
        name=name,
        model=worker.model if worker is not None else "",
        state=state,
        policy=report.policy if report is not None else "",
        in_flight=worker.in_flight if worker is not None else None,
        waiting=report.totals.waiting if report is not None else None,
        running=report.totals.running if report is not None else None,
        rate=sums.rate(units) if has_report and sums.lasted_s else None,
        hit_rate=_ratio(cached, prompt) if has_report else None,
        difference=one.difference(),
        bound=report.bound if report is not None else None,
        refills=report.refills if report is not None else None,
        of_bound=[bucket.of_bound.get(name) for bucket in buckets],
    )


def _in_quarantine(case: tuple[str, Quarantine]) -> Note:
    client, found = case
    served = "none of its requests is served" if found.is_refused else "its requests are served one at a time"
    ended = f"{found.convictions} of its requests ended two replicas each"
    why = ended if found.convictions else f"replicas ended under its requests {found.doubts} times"
    return Note(
        "warn",
        "router",
        f"{client} is in quarantine for {found.left_s / 60:.0f} min more, and {served}: {why}, the latest "
        f"{found.request} at {found.worker}. DELETE /quarantine/{client} ends it.",
    )


def _notes(
    reading: Reading | None, followed: Mapping[str, "Followed"], replicas: Sequence[ReplicaView], at_s: float
) -> list[Note]:
    """The worst first."""
    if reading is None:
        return []
    notes = []
    front = reading.gateway.status.gateway if reading.gateway.status is not None else None
    match reading.gateway.state:
        case "down":
            notes.append(
                Note(
                    "bad", "gateway", "The gateway does not answer. Replicas are asked where they were last."
                )
            )
        case "denied":
            notes.append(
                Note("bad", "gateway", "The gateway asks for another admin key (SGLANG_FAIR_ADMIN_KEY).")
            )
        case "router down":
            notes.append(
                Note(
                    "bad",
                    "router",
                    "The router does not answer. Gateways go on and place each client by consistent hashing.",
                )
            )
        case "up":
            if not replicas:
                notes.append(Note("bad", "router", "The router has no replica."))
    if front is not None and front.tenants is not None and front.tenants.error:
        notes.append(
            Note(
                "bad",
                "gateway",
                f"The tenants' file cannot be used, and the one before holds: {front.tenants.error}",
            )
        )
    if reading.gateway.status is not None:
        notes += map(_in_quarantine, reading.gateway.status.suspects.quarantine.items())
    for shown in replicas:
        one = followed[shown.name]
        report = one.report
        if shown.state in ABOUT_REPLICAS:
            level: Level = "info" if shown.state in ("draining", "swapping", "no overlay") else "bad"
            notes.append(Note(level, shown.name, ABOUT_REPLICAS[shown.state]))
        if report is not None and not report.conservation.ok:
            notes.append(
                Note("bad", shown.name, "charges and the engine's own counters differ; its log says where")
            )
        if (part := one.of_bound()) is not None and part > 1:
            notes.append(Note("bad", shown.name, f"two clients are apart by {part:.2f} times the bound"))
        if at_s - one.restarted_s < RESTART_SHOWN_S:
            notes.append(Note("info", shown.name, "was restarted: its deficits began at zero"))
    order = ("bad", "warn", "info")
    return sorted(notes, key=lambda note: order.index(note.level))


def _health(reading: Reading | None, notes: Sequence[Note]) -> Health:
    if reading is None:
        return "no data"
    match reading.gateway.state:
        case "down":
            return "gateway down"
        case "denied":
            return "denied"
        case "router down":
            return "router down"
        case "up":
            return "trouble" if any(note.level == "bad" for note in notes) else "ok"


def _worker(name: str, status: Status | None) -> Worker | None:
    """As the gateway knows the replica; of `r0.1`, one scheduler of several, it knows `r0`."""
    workers = status.workers if status is not None else {}
    return workers.get(name) or workers.get(name.rpartition(".")[0])


def _of_rest(bucket: Bucket, slots: Mapping[str, int]) -> float:
    return bucket.others + sum(units for name, units in bucket.service.items() if name not in slots)


def _rate(bucket: Bucket, units: float) -> float | None:
    if not bucket.looks or not bucket.observed_s:
        return None
    return round(units / bucket.observed_s, 2)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
