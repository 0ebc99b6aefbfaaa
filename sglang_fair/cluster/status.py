"""`sglang-fair status`: what each client got, added up over the replicas, and what each replica does."""

import json
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sglang_fair.cluster import queues
from sglang_fair.common.service_keys import admin_key, replica_key

TIMEOUT_S = 10.0
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
    """Tables: clients and what they got, whom the router refuses, replicas and what they do, emulated GPUs and their
    timing."""
    replicas: Mapping[str, Report | None] = status["replicas"]
    locked: Collection[str] = status.get("locked", ())
    workers = _workers(status["gateway"], replicas, locked)
    tables: list[RenderableType] = [_clients(replicas), Text(""), workers]
    batches = status["gateway"].get("batches", {})
    if batches.get("clients"):
        tables += [Text(""), _batches(batches)]
    throttle = status["gateway"].get("throttle", {})
    if throttle.get("kind", "none") != "none":
        tables[2:2] = [_throttle(throttle), Text("")]
    tables += [part for one in queues.rendered(status["gateway"]) for part in (Text(""), one)]
    classes = status["gateway"].get("gateway", {}).get("classes", {})
    if len(classes) > 1:
        tables += [Text(""), _classes(classes)]
    if locked:
        tables.append(
            Text(f"What clients got is not known: replicas ask for the key in {replica_key.variable}.")
        )
    emulated = {
        name: report["emulated"] for name, report in replicas.items() if report and "emulated" in report
    }
    return Group(*tables, *((Text(""), _emulated(emulated)) if emulated else ()))


def _clients(replicas: Mapping[str, Report | None]) -> Table:
    table = _table(
        "clients", "client", "service", "share", "computed", "cached", "output", "waiting", "running"
    )
    for name, report in replicas.items():
        table.add_column(f"{(report or {}).get('policy', '?')} {name}", justify="right")
    totals = by_client(replicas)
    served = sum(total.service for total in totals.values())
    for client, total in totals.items():
        share = f"{total.service / served:.0%}" if served else ""
        counts = (total.extend_tokens, total.cached_tokens, total.output_tokens, total.waiting, total.running)
        table.add_row(
            Text(client),
            f"{total.service:,.0f}",
            share,
            *(f"{count:,}" for count in counts),
            *(_number(total.counters.get(name)) for name in replicas),
        )
    return table


def _batches(batches: Report) -> Table:
    """What clients' batches have left."""
    title = f"batches: {batches['waiting']:,} items wait, {batches['running']:,} run"
    table = _table(title, "client", "left", "completed", "failed")
    for name, row in batches["clients"].items():
        table.add_row(Text(name), *(_number(row[key]) for key in ("left", "completed", "failed")))
    return table


def _throttle(throttle: Report) -> RenderableType:
    """Whether the cluster is overloaded, and whom the router refuses for that."""
    for_s, refused = throttle.get("overloaded_for_s"), throttle.get("refused", {})
    state = "not overloaded" if for_s is None else f"overloaded for {for_s:,.0f} s"
    words = ", ".join(f"{count:,} {code}" for code, count in refused.items() if count) or "nobody"
    lines = Text(
        f"throttle {throttle['kind']}: {state}, pressure {throttle.get('pressure', 0):.2f}, "
        f"{throttle.get('open_interactions', 0):,} interactions open; refused: {words}"
    )
    nearest = throttle.get("nearest", ())
    if not nearest:
        return lines
    table = _table("nearest their limit", "client", "calls in 60 s", "limit")
    for row in nearest:
        table.add_row(Text(str(row["client"])), _number(row["calls"]), _number(row["limit"]))
    return Group(lines, table)


def model_of(swap: Mapping[str, Any]) -> str:
    """What a replica that can load several models has, and what it is about to have."""
    if swap["phase"] in ("empties", "loads"):
        return f"{swap['model'] or '-'} -> {swap['target']}"
    return str(swap["model"])


def _workers(front: Report, replicas: Mapping[str, Report | None], locked: Collection[str]) -> Table:
    swaps = front.get("swaps") or {}
    has_several = (
        bool(swaps) or len({worker.get("model") for worker in front.get("workers", {}).values()}) > 1
    )
    headings = ["replica", "in flight", "placed", "tokens in tree", "policy", "books", "address"]
    if has_several:
        headings.insert(1, "model")
    table = _table(f"replicas, placement {front.get('placement', '?')}", *headings)
    for name, worker in front.get("workers", {}).items():
        report = replicas.get(name)
        books = report.get("conservation", {}) if report else {}
        if report is None:
            state = "asks for its key" if name in locked else "does not answer"
        else:
            state = "balance" if books.get("ok", True) else "DO NOT BALANCE"
        table.add_row(
            name,
            *(
                [Text(model_of(swaps[name]) if name in swaps else str(worker.get("model") or ""))]
                if has_several
                else []
            ),
            _number(worker.get("in_flight")),
            _number(worker.get("dispatched")),
            _number(worker.get("tree_tokens")),
            str((report or {}).get("policy", "")),
            state,
            Text(str(worker.get("url", ""))),
        )
    return table


def _classes(classes: Mapping[str, Report]) -> Table:
    """What was attained of what each class promises, at the gateway that answers."""
    table = _table("classes: first tokens in time", "class", "requests", "met", "missed")
    for name, row in classes.items():
        counts = (row.get(key) for key in ("requests", "met", "missed"))
        table.add_row(Text(name), *(_number(count) for count in counts))
    return table


def _emulated(replicas: Mapping[str, Report]) -> Table:
    headings = (
        "replica",
        "gpu",
        "model",
        "time scale",
        "steps",
        "busy s",
        "stalled",
        "late ms",
        "P99",
        "cpu ms",
    )
    table = _table("emulated GPUs: stalled and late say how true their timing is", *headings)
    for name, report in replicas.items():
        steps, busy_s = report["steps"] or 1, report["busy_s"] or 1.0
        table.add_row(
            name,
            report["gpu"],
            report["model"],
            f"{report['time_scale']:g}",
            f"{report['steps']:,}",
            f"{report['busy_s']:,.1f}",
            f"{report['stalled_s'] / busy_s:.1%}",
            f"{1e3 * report['late_s'] / steps:.2f}",
            f"{1e3 * (report['late_p99_s'] or 0.0):.2f}",
            f"{1e3 * report['scheduler_cpu_s'] / steps:.2f}",
        )
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="right" if position and heading not in TEXT_COLUMNS else "left")
    return table


TEXT_COLUMNS = ("policy", "books", "address", "gpu", "model")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


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
