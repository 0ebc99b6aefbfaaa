"""`sglang-fair status`: what each client got, added up over the replicas, and what each replica does."""

import json
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sglang_fair.common.service_keys import admin_key, replica_key

TIMEOUT_S = 10.0
MOST_GROUPS = 6
"""Of one replica's queue that are shown."""

Report = Mapping[str, Any]


class Unreachable(RuntimeError):
    """An address does not answer, or not as it should; the text says which."""


class _KeyNeeded(Unreachable):
    """It answers 401."""


@dataclass
class ClientTotal:
    """One client over all replicas. Tokens and service as `core.ledger` counts them."""

    service: float = 0.0
    extend_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    waiting: int = 0
    running: int = 0
    counters: dict[str, float | None] = field(default_factory=dict)
    """The policy's counter for it in each replica: DLPM's deficit, VTC's counter."""


def read(gateway: str) -> dict[str, Any]:
    """`{"gateway": /status, "replicas": {name: /fair or None}, "locked": [name]}`; locked are replicas that ask for
    another key than ours. Raises `Unreachable` for the gateway."""
    try:
        front = fetch(f"{gateway.rstrip('/')}/status", admin_key.headers())
    except _KeyNeeded as error:
        raise Unreachable(f"{error}; {admin_key.variable} must be the admin key") from error
    replicas: dict[str, Any] = {}
    locked = []
    for name, worker in front.get("workers", {}).items():
        try:
            replicas[name] = fetch(f"{worker['url']}/fair", replica_key.headers())
        except Unreachable as error:
            replicas[name] = None
            if isinstance(error, _KeyNeeded):
                locked.append(name)
    return {"gateway": front, "replicas": replicas, "locked": locked}


def by_client(replicas: Mapping[str, Report | None]) -> dict[str, ClientTotal]:
    """Clients and their totals, most served first."""
    totals: dict[str, ClientTotal] = {}
    for name, report in replicas.items():
        for client, row in (report or {}).get("clients", {}).items():
            total = totals.setdefault(client, ClientTotal())
            total.service += row.get("service", 0.0)
            for amount in ("extend_tokens", "cached_tokens", "output_tokens", "waiting", "running"):
                setattr(total, amount, getattr(total, amount) + row.get(amount, 0))
            total.counters[name] = row.get("counter", row.get("deficit"))
    return dict(sorted(totals.items(), key=lambda item: (-item[1].service, item[0])))


def render(status: Mapping[str, Any]) -> RenderableType:
    """Tables: clients and what they got, whom the router refuses, replicas and what they do, queues with deadlines,
    classes, batches, emulated GPUs and their timing."""
    front: Report = status["gateway"]
    replicas: Mapping[str, Report | None] = status["replicas"]
    locked: Collection[str] = status.get("locked", ())
    parts = [_clients(replicas), *_throttle(front.get("throttle", {})), _workers(front, replicas, locked)]
    batches, classes = front.get("batches", {}), front.get("gateway", {}).get("classes", {})
    if batches.get("clients"):
        title = f"batches: {batches['waiting']:,} items wait, {batches['running']:,} run"
        parts.append(_table(title, (
            {"client": name} | {key: row[key] for key in ("left", "completed", "failed")}
            for name, row in batches["clients"].items()
        )))  # fmt: skip
    parts += queue_tables(front.get("queues") or {})
    if len(classes) > 1:
        parts.append(_table("classes: first tokens in time", (
            {"class": name} | {key: row.get(key) for key in ("requests", "met", "missed")}
            for name, row in classes.items()
        )))  # fmt: skip
    if locked:
        parts.append(
            Text(f"What clients got is not known: replicas ask for the key in {replica_key.variable}.")
        )
    emulated = {
        name: report["emulated"] for name, report in replicas.items() if report and "emulated" in report
    }
    if emulated:
        parts.append(_emulated(emulated))
    return Group(*(piece for part in parts for piece in (part, Text(""))))


def _table(title: str, rows: Iterable[Mapping[str, object]], headings: Sequence[str] = ()) -> Table:
    """A row's keys are the headings, which are `headings` where there is no row. Texts stand to the left."""
    rows = list(rows)
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    for heading in rows[0] if rows else headings:
        is_text = all(isinstance(row[heading], str) for row in rows) and heading not in NUMBERS
        table.add_column(heading, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(Text(_shown(value)) for value in row.values()))
    return table


NUMBERS = ("share", "starts in", "left", "late by", "stalled")
"""Columns of numbers that are texts because of their units."""


def _shown(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)


def seconds(spent_s: float | None) -> str:
    """A time in a fitting unit."""
    if spent_s is None:
        return "?"
    if abs(spent_s) >= 600:
        return f"{spent_s / 60:,.0f} min"
    return f"{1e3 * spent_s:,.0f} ms" if abs(spent_s) < 1 else f"{spent_s:,.1f} s"


def _clients(replicas: Mapping[str, Report | None]) -> Table:
    totals = by_client(replicas)
    served = sum(total.service for total in totals.values())
    headings = ("client", "service", "share", "computed", "cached", "output", "waiting", "running")
    return _table("clients", (
        {
            "client": client,
            "service": total.service,
            "share": f"{total.service / served:.0%}" if served else "",
            "computed": total.extend_tokens,
            "cached": total.cached_tokens,
            "output": total.output_tokens,
            "waiting": total.waiting,
            "running": total.running,
        } | {
            f"{(report or {}).get('policy', '?')} {name}": total.counters.get(name)
            for name, report in replicas.items()
        }
        for client, total in totals.items()
    ), headings)  # fmt: skip


def _throttle(throttle: Report) -> Iterator[RenderableType]:
    """Whether the cluster is overloaded, and whom the router refuses for that; nothing where it refuses nobody."""
    if throttle.get("kind", "none") == "none":
        return
    for_s, refused = throttle.get("overloaded_for_s"), throttle.get("refused", {})
    state = "not overloaded" if for_s is None else f"overloaded for {for_s:,.0f} s"
    words = ", ".join(f"{count:,} {code}" for code, count in refused.items() if count) or "nobody"
    yield Text(
        f"throttle {throttle['kind']}: {state}, pressure {throttle.get('pressure', 0):.2f}, "
        f"{throttle.get('open_interactions', 0):,} interactions open; refused: {words}"
    )
    if nearest := throttle.get("nearest", ()):
        yield _table("nearest their limit", (
            {"client": str(row["client"]), "calls in 60 s": row["calls"], "limit": row["limit"]} for row in nearest
        ))  # fmt: skip


def model_of(swap: Mapping[str, Any]) -> str:
    """What a replica that can load several models has, and what it is about to have."""
    if swap["phase"] in ("empties", "loads"):
        return f"{swap['model'] or '-'} -> {swap['target']}"
    return str(swap["model"])


def _workers(front: Report, replicas: Mapping[str, Report | None], locked: Collection[str]) -> Table:
    workers, swaps = front.get("workers", {}), front.get("swaps") or {}
    has_several = bool(swaps) or len({worker.get("model") for worker in workers.values()}) > 1
    rows = []
    for name, worker in workers.items():
        report = replicas.get(name)
        if report is None:
            state = "asks for its key" if name in locked else "does not answer"
        else:
            state = "balance" if report.get("conservation", {}).get("ok", True) else "DO NOT BALANCE"
        model = model_of(swaps[name]) if name in swaps else str(worker.get("model") or "")
        rows.append({
            "replica": name,
            **({"model": model} if has_several else {}),
            "in flight": worker.get("in_flight"),
            "placed": worker.get("dispatched"),
            "tokens in tree": worker.get("tree_tokens"),
            "policy": str((report or {}).get("policy", "")),
            "books": state,
            "address": str(worker.get("url", "")),
        })  # fmt: skip
    return _table(f"replicas, placement {front.get('placement', '?')}", rows)


def queue_tables(queues: Report) -> list[RenderableType]:
    """The plans in a line, what is missing in another, and a table of each replica's queue; nothing where there are no
    queues."""
    if not queues:
        return []
    lines = [_plans(queues), shortage_text(queues["shortage"]) if queues.get("shortage") else ""]
    waiting = queues.get("waiting", ())
    late = sum(row["late"] for row in waiting)
    title = f"queues: {sum(row['requests'] for row in waiting):,} requests wait in {queues.get('groups', 0):,} groups"
    title += f", {late:,} in groups that will be late" if late else ""
    return [*(Text(line) for line in lines if line), _table(title, _queue_rows(queues))]


def _queue_rows(queues: Report) -> Iterator[Mapping[str, object]]:
    for name, worker in queues.get("workers", {}).items():
        rows = worker["groups"][:MOST_GROUPS]
        for row in rows:
            yield {
                "replica": name,
                "model": row["model"] + ("" if row["model"] == worker.get("loaded") else " (to be loaded)"),
                "class": row["class"],
                "tier": row["tier"],
                "waiting": row["waiting"],
                "running": row["running"],
                "starts in": seconds(row["starts_s"]),
                "left": "" if row["class"] == "(late)" else seconds(row["slack_s"]),
                "late by": seconds(row["late_s"]) if row["late_s"] else "",
            }
        more = len(worker["groups"]) - len(rows) + worker.get("more_groups", 0)
        if more or not rows:
            words = f"{more:,} more groups" if more else f"{worker.get('loaded') or ''} nobody waits".strip()
            empty = dict.fromkeys(("class", "tier", "waiting", "running", "starts in", "left", "late by"), "")
            yield {"replica": name, "model": words, **empty}


def _plans(queues: Report) -> str:
    """The plans and the estimates in a line; "" where nothing is planned."""
    plans, r2 = queues.get("plans"), queues.get("r2")
    parts = []
    if plans:
        words = f"{plans['asked']:,} plans asked, {plans['answered']:,} answered"
        if last := plans.get("last"):
            words += f", the last {seconds(last['s_ago'])} ago"
            words += f" with {last['late']:,} groups late" if last["late"] else ""
        for name, said in (
            ("failed", "failed"), ("unanswered", "too late"), ("stale", "stale"), ("ignored", "entries ignored"),
        ):  # fmt: skip
            words += f", {plans[name]:,} {said}" if plans.get(name) else ""
        parts.append(words)
    return "; ".join([*parts, *([] if r2 is None else [f"waits are estimated with R² {r2:.3f}"])])


def shortage_text(shortage: Report) -> str:
    """How many replicas would do, in a line."""
    more, models = shortage.get("more"), shortage.get("models") or {}
    if more is None:
        words = "no number of replicas was found that would do"
        words += f", at least {shortage['least']} more are needed" if shortage.get("least") else ""
    elif not more:
        words = "the replicas that are there would do"
    else:
        named = ", ".join(f"{count} with {model}" for model, count in models.items() if model)
        words = f"{more} more replicas would do" + (f" ({named})" if named else "")
    why = f": {shortage['why']}" if shortage.get("why") else ""
    return f"deadlines cannot be met, for {seconds(shortage.get('for_s'))}: {words}{why}"


def _emulated(replicas: Mapping[str, Report]) -> Table:
    return _table("emulated GPUs: stalled and late say how true their timing is", (
        {
            "replica": name,
            "gpu": report["gpu"],
            "model": report["model"],
            "time scale": Text(f"{report['time_scale']:g}"),
            "steps": report["steps"],
            "busy s": Text(f"{report['busy_s']:,.1f}"),
            "stalled": f"{report['stalled_s'] / (report['busy_s'] or 1.0):.1%}",
            "late ms": Text(f"{1e3 * report['late_s'] / (report['steps'] or 1):.2f}"),
            "P99": Text(f"{1e3 * (report['late_p99_s'] or 0.0):.2f}"),
            "cpu ms": Text(f"{1e3 * report['scheduler_cpu_s'] / (report['steps'] or 1):.2f}"),
        }
        for name, report in replicas.items()
    ))  # fmt: skip


def fetch(url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """The JSON object that a server answers with. Raises `Unreachable`."""
    try:
        request = urllib.request.Request(url, headers=dict(headers))
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        kind = _KeyNeeded if error.code == 401 else Unreachable
        raise kind(f"{url} answers {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Unreachable(f"{url} does not answer: {reason}") from error
    if not isinstance(answer, dict):
        raise Unreachable(f"{url} answers no JSON object")
    return answer
