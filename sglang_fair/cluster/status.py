"""`sglang-fair status`: what each client got, added up over the replicas, and what each replica does."""

import json
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sglang_fair.common.service_keys import admin_key, replica_key

TIMEOUT_S = 10.0
MOST_ROWS = 6
"""Of a list that are shown."""

AMOUNTS = {
    "service": "service",
    "computed": "extend_tokens",
    "cached": "cached_tokens",
    "output": "output_tokens",
    "waiting": "waiting",
    "running": "running",
}
"""Of a client, as `core.ledger` counts them: title and key."""

Report = Mapping[str, Any]


class Unreachable(RuntimeError):
    """An address does not answer, or not as it should; the text says which."""


class _KeyNeeded(Unreachable):
    """It answers 401."""


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


def by_client(replicas: Mapping[str, Report | None]) -> dict[str, dict[str, object]]:
    """A row for each client, most served first: what all replicas have of it, and the policy's counter in each."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    counters: dict[str, dict[str, object]] = defaultdict(dict)
    for name, report in replicas.items():
        for client, row in (report or {}).get("clients", {}).items():
            totals[client].update({title: row.get(key, 0) for title, key in AMOUNTS.items()})
            policy = f"{(report or {}).get('policy', '?')} {name}"
            counters[client][policy] = row.get("counter", row.get("deficit"))
    served = sum(row["service"] for row in totals.values())
    return {
        client: {
            "client": client,
            "service": row["service"],
            "share": f"{row['service'] / served:.0%}" if served else "",
            **row,
            **counters[client],
        }
        for client, row in sorted(totals.items(), key=lambda item: (-item[1]["service"], item[0]))
    }


def render(status: Mapping[str, Any]) -> RenderableType:
    """Tables of clients and what they got, of replicas and what they do, and by the names of `/status` and `/fair` what
    else there is: whom the router refuses, queues with deadlines, batches, classes, emulated GPUs."""
    front: Report = status["gateway"]
    replicas: Mapping[str, Report | None] = status["replicas"]
    locked: Collection[str] = status.get("locked", ())
    throttle, classes = front.get("throttle", {}), front.get("gateway", {}).get("classes", {})
    parts: list[RenderableType] = [
        _table("clients", [*by_client(replicas).values()], ("client", "service", "share", *AMOUNTS)),
        _workers(front, replicas, locked),
        *sections("throttle", throttle if throttle.get("kind", "none") != "none" else {}),
        *sections("queues", front.get("queues") or {}),
        *sections("batches", batches if (batches := front.get("batches", {})).get("clients") else {}),
        *sections("classes", classes if len(classes) > 1 else {}),
        *sections(
            "emulated",
            {name: _own(one["emulated"]) for name, one in replicas.items() if one and "emulated" in one},
        ),
    ]
    if locked:
        words = f"What clients got is not known: replicas ask for the key in {replica_key.variable}."
        parts.append(Text(words))
    return Group(*(piece for part in parts for piece in (part, Text(""))))


def sections(title: str, found: Report) -> Iterator[RenderableType]:
    """An object of JSON: its own values in a line, a table of what has the same keys, and so on for what is within."""
    rows = {name: one for name, one in found.items() if isinstance(one, Mapping)}
    if rows and len(rows) == len(found):
        yield _table(title, [{"": name} | _own(one) for name, one in rows.items()])
        for name, one in rows.items():
            yield from _inner(f"{title} of {name}", one)
        return
    if own := _own(found):
        yield Text(f"{title}: {', '.join(f'{key} {_shown(value)}' for key, value in own.items())}")
    yield from _inner(title, found)


def _inner(title: str, found: Report) -> Iterator[RenderableType]:
    for name, one in found.items():
        if isinstance(one, Mapping):
            yield from sections(f"{title}, {name}", one)
        elif isinstance(one, list) and one and isinstance(one[0], Mapping):
            more = f", {len(one) - MOST_ROWS:,} more" if len(one) > MOST_ROWS else ""
            yield _table(f"{title}, {name}{more}", [_own(row) for row in one[:MOST_ROWS]])


def _own(found: Report) -> dict[str, object]:
    return {key: value for key, value in found.items() if not isinstance(value, (Mapping, list))}


def _table(title: str, rows: Sequence[Mapping[str, object]], headings: Sequence[str] = ()) -> Table:
    """A row's keys are the headings, which are `headings` where there is no row. Texts stand to the left."""
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    for heading in dict.fromkeys([key for row in rows for key in row] or headings):
        is_text = all(isinstance(row.get(heading), str) for row in rows) and heading != "share"
        table.add_column(Text(heading), justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(Text(_shown(row.get(str(column.header)))) for column in table.columns))
    return table


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)


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
