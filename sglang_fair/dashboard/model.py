"""From readings to what is shown. Pure: the time comes with each reading."""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from heapq import nlargest
from math import inf

from sglang_fair.dashboard.history import (
    ADMITTED,
    CACHED,
    EXTEND,
    SERVICE,
    WAITED_S,
    Amounts,
    Bucket,
    Followed,
    History,
    Sums,
    amounts,
)
from sglang_fair.dashboard.reading import OTHERS, SYSTEM, Quarantine, Reading, Status, Worker
from sglang_fair.dashboard.view import ClientView, Health, Level, Note, OthersView, ReplicaView, View

SPANS: Mapping[str, tuple[float, int]] = {"10 min": (5.0, 120), "2 h": (60.0, 120), "24 h": (720.0, 120)}
"""Step and length of each history."""

WINDOW = 12
"""Rates, shares, waits and hits are of so many buckets of the finest history, the newest not full yet."""
WINDOW_S = WINDOW * SPANS["10 min"][0]

ROWS = 8
"""Clients with a row and a colour of their own."""

FORGOTTEN_AFTER_S = 3600.0
"""A replica that no reading has named for so long is a new one when it comes back."""


RESTART_SHOWN_S = 60.0

HEALTH: Mapping[str, Health] = {"down": "gateway down", "denied": "denied", "router down": "router down"}

ABOUT_GATEWAY: Mapping[str, tuple[str, str]] = {
    "down": ("gateway", "The gateway does not answer. Replicas are asked where they were last."),
    "denied": ("gateway", "The gateway asks for another admin key (SGLANG_FAIR_ADMIN_KEY)."),
    "router down": (
        "router",
        "The router does not answer. Gateways go on and place each client by consistent hashing.",
    ),
}
ABOUT_REPLICAS: Mapping[str, str] = {
    "silent": "does not answer",
    "denied": "asks for another key than ours (SGLANG_FAIR_REPLICA_KEY)",
    "no overlay": "no overlay: it runs without the fair scheduler, and nothing is known of its clients",
    "sick": "is sick: it gets no requests until it answers again",
    "draining": "is draining: it finishes what it has",
    "swapping": "is loading another model: it gets no requests until it has it",
}


class Model:
    """Takes readings in order of time, and tells what to show."""

    def __init__(self, every_s: float = 2.0) -> None:
        """`every_s`: how often it is meant to look, which the view says."""
        self._every_s = every_s
        self._finest = next(iter(SPANS))
        self._histories = {
            span: History(*of, whole=WINDOW if span == self._finest else 0) for span, of in SPANS.items()
        }
        self._followed: dict[str, Followed] = {}
        self._reading: Reading | None = None
        self._at_s = 0.0
        self._answered_s: float | None = None
        """When a replica answered last."""
        self._slots: dict[str, int] = {}

    def take(self, reading: Reading, now_s: float) -> None:
        """One reading. `now_s` is unix time; if it went back, no time has passed."""
        now_s = max(now_s, self._at_s)
        since_s = now_s if self._answered_s is None else self._answered_s
        of_bound = dict[str, float]()
        for name, found in reading.replicas.items():
            one = self._followed.setdefault(name, Followed())
            one.named_s, one.state, one.report = now_s, found.state, None
            if found.report is None:
                continue
            replica_since_s, self._answered_s = one.answered_s, now_s
            gained = one.take(found.report, now_s)
            if gained is not None:
                gained.pop(SYSTEM, None)
                for history in self._histories.values():
                    history.gained(replica_since_s, now_s, name, gained)
            if (part := one.difference_over_bound) is not None:
                of_bound[name] = part
        if self._answered_s == now_s:
            for history in self._histories.values():
                history.look(since_s, now_s, of_bound)
        self._reading, self._at_s = reading, now_s
        gone = [name for name, one in self._followed.items() if now_s - one.named_s > FORGOTTEN_AFTER_S]
        for name in gone:
            del self._followed[name]

    def view(self, span: str = "10 min") -> View:
        """What to show now, with the history of one of `SPANS`."""
        history, recent, reading = self._histories[span], self._histories[self._finest], self._reading
        oldest = self._at_s // recent.step_s - WINDOW
        sums = Sums(bucket for bucket in recent.buckets() if bucket.number > oldest)
        followed = {name: self._followed[name] for name in (reading.replicas if reading is not None else ())}
        slots = self._shown(history, followed)
        status = reading.gateway.status if reading is not None else None
        buckets = history.buckets()
        replicas = [_replica(name, one, status, sums, buckets) for name, one in followed.items()]
        hungry = {
            name
            for one in followed.values()
            for name in one.lasting((self._answered_s or 0.0) - sums.observed_s / 2)
        }
        clients, others = _clients(followed, sums, buckets, slots, hungry)
        notes = _notes(reading, followed, replicas, self._at_s)
        hits = defaultdict(float, status.hits if status is not None else {})
        total = sum(sums.clients.values(), amounts())
        known = [one for one in replicas if one.waiting is not None]
        parts = [part for one in followed.values() if (part := one.difference_over_bound) is not None]
        is_bad = any(note.level == "bad" for note in notes)
        return View(
            at=self._at_s,
            every_s=self._every_s,
            window_s=WINDOW_S,
            span=span,
            step_s=history.step_s,
            health="no data"
            if reading is None
            else HEALTH.get(reading.gateway.state, "trouble" if is_bad else "ok"),
            notes=notes,
            placement=status.placement if status is not None else "",
            weights="file" if status is not None and status.gateway.tenants is not None else "live",
            rate=sums.rate(total[SERVICE]) if sums.observed_s else None,
            waiting=sum(one.waiting or 0 for one in known) if known else None,
            running=sum(one.running or 0 for one in known) if known else None,
            hit_rate=_hit_rate(total),
            predicted_hit_rate=_ratio(hits["measured_predicted_tokens"], hits["measured_input_tokens"]),
            measured_hit_rate=_ratio(hits["measured_cached_tokens"], hits["measured_input_tokens"]),
            of_bound=max(parts, default=None),
            clients_seen=len(_active(followed, sums)),
            times=[bucket.number * history.step_s for bucket in buckets],
            clients=clients,
            others=others,
            replicas=replicas,
            hit_rates=[
                _hit_rate(sum(bucket.replicas.values(), amounts())) if bucket.looks else None
                for bucket in buckets
            ],
        )

    def _shown(self, history: History, followed: Mapping[str, Followed]) -> dict[str, int]:
        """The clients with a row, most served first, and each one's colour, which it keeps while it is shown. One that
        got nothing in that time and asks for nothing has none."""
        served = defaultdict[str, float](float)
        for bucket in history.buckets():
            for name, units in bucket.clients.items():
                served[name] += units[SERVICE]
        for one in followed.values():
            for name, row in one.clients.items():
                if row.waiting or row.running:
                    served[name] += 0.0  # a client that has only just come
        served.pop(OTHERS, None)
        names = nlargest(ROWS, served, key=lambda name: (served[name], name))
        kept = {name: slot for name, slot in self._slots.items() if name in names}
        free = (slot for slot in range(ROWS) if slot not in kept.values())
        self._slots = {name: kept[name] if name in kept else next(free) for name in names}
        return self._slots


def fair_shares(total: float, wanted: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """How `total` units would be divided: weighted max-min fairness. A client that did not want more than it got keeps
    that, as far as its weight allows; those that waited divide the rest by their weights (Bertsekas and Gallager, Data
    Networks, section 6.5.2). `wanted` is inf for one that waited, else what it got. The shares sum to `total` if that
    much is wanted. O(n log n)."""
    order = sorted(wanted, key=lambda name: (wanted[name] / weights.get(name, 1.0), name))
    left, width = total, sum(weights.get(name, 1.0) for name in order)
    shares = dict[str, float]()
    for name in order:
        weight = weights.get(name, 1.0)
        shares[name] = max(0.0, min(wanted[name], left * weight / width)) if width > 0 else 0.0
        left -= shares[name]
        width -= weight
    return shares


def _wanted(sums: Sums, hungry: Container[str]) -> dict[str, float]:
    """The service that each client could have used. A client that is `hungry`, or of which requests waited and none was
    admitted: any. Others: what they got, and what waited on average, at what their requests cost on average."""
    wanted = {OTHERS: float(sums.of(OTHERS)[SERVICE])}
    for client, row in sums.clients.items():
        if client == OTHERS:
            continue
        if client in hungry or (row[WAITED_S] and not row[ADMITTED]):
            wanted[client] = inf
        else:
            requests = row[WAITED_S] / sums.observed_s if sums.observed_s else 0.0
            wanted[client] = float(row[SERVICE] * (1 + requests / max(1, row[ADMITTED])))
    return wanted


def _wait_s(sums: Sums, client: str) -> tuple[float | None, bool]:
    """Mean time that a request waited, and whether it is longer, because none was admitted. Little's law: requests that
    waited, on average, divided by requests that were admitted a second."""
    row = sums.of(client)
    if row[ADMITTED]:
        return float(row[WAITED_S] / row[ADMITTED]), False
    return (sums.observed_s, True) if row[WAITED_S] else (None, False)


def _clients(
    followed: Mapping[str, Followed],
    sums: Sums,
    buckets: Sequence[Bucket],
    slots: Mapping[str, int],
    hungry: Container[str],
) -> tuple[list[ClientView], OthersView | None]:
    waiting, running, weights = Counter[str](), Counter[str](), dict[str, float]()
    service, deficits = defaultdict[str, float](float), dict[str, dict[str, float | None]]()
    for replica, one in followed.items():
        for name, row in one.clients.items():
            waiting[name] += row.waiting
            running[name] += row.running
            if name in slots:
                service[name] += row.service
                deficits.setdefault(name, {})[replica] = row.counter
            if row.waiting or row.running or name not in weights:  # where it asks, its newest weight is known
                weights[name] = row.weight
    served = float(sum(row[SERVICE] for row in sums.clients.values()))
    due = fair_shares(served, _wanted(sums, hungry), weights)
    clients = []
    for name, slot in slots.items():
        wait_s, is_longer = _wait_s(sums, name)
        gained = sums.of(name)
        clients.append(
            ClientView(
                name=name,
                slot=slot,
                weight=weights.get(name, 1.0),
                rate=sums.rate(gained[SERVICE]),
                share=_ratio(gained[SERVICE], served),
                fair_share=_ratio(due.get(name, 0.0), served),
                waiting=waiting[name],
                running=running[name],
                wait_s=wait_s,
                wait_is_longer=is_longer,
                hit_rate=_hit_rate(gained),
                service=service[name],
                deficits=deficits.get(name, {}),
                rates=[_rate(bucket, (name,)) for bucket in buckets],
            )
        )
    rest = _active(followed, sums) - {*slots}
    rates = [_rate(bucket, bucket.clients.keys() - slots.keys()) for bucket in buckets]
    if not rest and not any(rates):
        return clients, None
    units = sum(sums.of(name)[SERVICE] for name in {OTHERS, *rest})
    others = OthersView(
        clients=len(rest),
        rate=sums.rate(units),
        share=_ratio(units, served),
        waiting=sum(waiting[name] for name in rest),
        running=sum(running[name] for name in rest),
        rates=rates,
    )
    return clients, others


def _active(followed: Mapping[str, Followed], sums: Sums) -> set[str]:
    """The clients that got something in the window, or have requests now."""
    names = {name for name, row in sums.clients.items() if row[SERVICE] and name != OTHERS}
    for one in followed.values():
        names.update(name for name, row in one.clients.items() if row.waiting or row.running)
    return names


def _replica(
    name: str, one: Followed, status: Status | None, sums: Sums, buckets: Sequence[Bucket]
) -> ReplicaView:
    worker = _worker(name, status)
    state = one.state
    if worker is not None and worker.state != "up" and state != "no overlay":
        state = worker.state
    report = one.report
    gained = sums.replicas.get(name, amounts())
    return ReplicaView(
        name=name,
        model=worker.model if worker is not None else "",
        state=state,
        policy=report.policy if report is not None else "",
        in_flight=worker.in_flight if worker is not None else None,
        waiting=report.totals.waiting if report is not None else None,
        running=report.totals.running if report is not None else None,
        rate=sums.rate(gained[SERVICE]) if report is not None and sums.observed_s else None,
        hit_rate=_hit_rate(gained) if report is not None else None,
        difference=one.difference,
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
    reading: Reading | None, followed: Mapping[str, Followed], replicas: Sequence[ReplicaView], at_s: float
) -> list[Note]:
    if reading is None:
        return []
    notes = []
    status = reading.gateway.status
    if reading.gateway.state in ABOUT_GATEWAY:
        notes.append(Note("bad", *ABOUT_GATEWAY[reading.gateway.state]))
    elif not replicas:
        notes.append(Note("bad", "router", "The router has no replica."))
    if status is not None:
        tenants = status.gateway.tenants
        if error := (tenants or {}).get("error"):
            text = f"The tenants' file cannot be used, and the one before holds: {error}"
            notes.append(Note("bad", "gateway", text))
        notes += map(_in_quarantine, status.suspects.quarantine.items())
    for shown in replicas:
        one = followed[shown.name]
        if shown.state in ABOUT_REPLICAS:
            level: Level = "info" if shown.state in ("draining", "swapping", "no overlay") else "bad"
            notes.append(Note(level, shown.name, ABOUT_REPLICAS[shown.state]))
        if one.report is not None and not one.report.conservation.get("ok", True):
            text = "charges and the engine's own counters differ; its log says where"
            notes.append(Note("bad", shown.name, text))
        if (part := one.difference_over_bound) is not None and part > 1:
            notes.append(Note("bad", shown.name, f"two clients are apart by {part:.2f} times the bound"))
        if at_s - one.restarted_s < RESTART_SHOWN_S:
            notes.append(Note("info", shown.name, "was restarted: its deficits began at zero"))
    order = ("bad", "warn", "info")
    return sorted(notes, key=lambda note: order.index(note.level))


def _worker(name: str, status: Status | None) -> Worker | None:
    """As the gateway knows the replica; of `r0.1`, one scheduler of several, it knows `r0`."""
    workers = status.workers if status is not None else {}
    return workers.get(name) or workers.get(name.rpartition(".")[0])


def _rate(bucket: Bucket, names: Iterable[str]) -> float | None:
    if not bucket.looks or not bucket.observed_s:
        return None
    units = sum(float(bucket.clients[name][SERVICE]) for name in names if name in bucket.clients)
    return round(units / bucket.observed_s, 2)


def _hit_rate(row: Amounts) -> float | None:
    return _ratio(row[CACHED], row[EXTEND] + row[CACHED])


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None
