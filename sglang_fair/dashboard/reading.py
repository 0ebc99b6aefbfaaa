"""One look at a cluster: what the gateway's `/status` and each replica's `/fair` say, or why they say nothing. Pure.

Peers may be of another version, or not ours at all: a field that is missing has a default, and a body that is no report
of ours is a state of its own, never an error. Only what is shown is decoded.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

SYSTEM = "(system)"
"""The account of work that no client caused (`core.ledger`)."""

OTHERS = "(others)"
"""The account of the clients that a replica's ledger has dropped."""


class Totals(Struct, frozen=True):
    """All accounts of a replica since it began."""

    extend_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    service: float = 0.0
    waiting: int = 0
    running: int = 0


class ClientReading(Totals, frozen=True):
    """A client's account at one replica. It is charged `service` and `transferred_units`: what it paid for others'
    prefixes less what others paid for its own."""

    weight: float = 1.0
    counter: float | None = None
    """The policy's: DLPM's deficit, VTC's virtual counter."""
    transferred_units: float = 0.0
    requests: int = 0
    """Admitted ones."""
    backlog: int | None = None
    """The number of its present backlog; another one is a new backlog."""


class ReplicaReport(Struct, frozen=True):
    """`GET /fair` of one scheduler."""

    policy: str
    clients: dict[str, ClientReading]
    totals: Totals
    bound: float | None = None
    refills: int | None = None
    conservation: dict[str, Any] = {}
    """`ok`: charges and the engine's counters agree."""


class Ranks(Struct, frozen=True):
    """`GET /fair` of a replica with several schedulers."""

    data_parallel: list[ReplicaReport]


ReplicaState = Literal["ok", "silent", "denied", "no overlay"]


class ReplicaReading(Struct, frozen=True):
    """A replica. Its `report` is there if its state is "ok"."""

    state: ReplicaState
    report: ReplicaReport | None = None


class Worker(Struct, frozen=True):
    """A replica as the router knows it, or in fallback the gateway."""

    url: str = ""
    state: str = "up"
    in_flight: int = 0
    model: str = ""


class Front(Struct, frozen=True):
    """The gateway's own part of `/status`."""

    fallback: bool = False
    tenants: dict[str, Any] | None = None
    """How it reads its tenants' file: `error`."""


class Quarantine(Struct, frozen=True):
    """A client whose requests have ended replicas, the latest `request` at `worker`."""

    left_s: float = 0.0
    convictions: int = 0
    doubts: int = 0
    request: str = ""
    worker: str = ""
    is_refused: bool = False
    """None of its requests are served; otherwise one at a time is."""


class Suspects(Struct, frozen=True):
    quarantine: dict[str, Quarantine] = {}
    """By client."""


class Status(Struct, frozen=True):
    """`GET /status`."""

    gateway: Front
    placement: str = ""
    workers: dict[str, Worker] = {}
    hits: dict[str, float] = {}
    """Prompt tokens of answered requests: those that the router took to be cached, and those that were."""
    suspects: Suspects = Suspects()


GatewayState = Literal["up", "router down", "down", "denied"]


class GatewayReading(Struct, frozen=True):
    """The gateway. `status` is there unless it is down or denies."""

    state: GatewayState
    status: Status | None = None


class Reading(Struct, frozen=True):
    """One look at the whole cluster."""

    gateway: GatewayReading
    replicas: Mapping[str, ReplicaReading] = {}


def gateway_reading(status: int | None, body: bytes) -> GatewayReading:
    """What an answer of `/status` says; `status` None: there was none."""
    if status in (401, 403):
        return GatewayReading("denied")
    found = _decoded(body, Status) if status == 200 else None
    if found is None:
        return GatewayReading("down")
    return GatewayReading("router down" if found.gateway.fallback else "up", found)


def replica_reading(name: str, status: int | None, body: bytes) -> dict[str, ReplicaReading]:
    """What an answer of `/fair` says, for each scheduler of the replica: `r0`, or `r0.0` and `r0.1`."""
    if status in (401, 403):
        return {name: ReplicaReading("denied")}
    if status == 404:
        return {name: ReplicaReading("no overlay")}
    if status == 200:
        if (one := _decoded(body, ReplicaReport)) is not None:
            return {name: ReplicaReading("ok", one)}
        if (ranks := _decoded(body, Ranks)) is not None:
            reports = enumerate(ranks.data_parallel)
            return {f"{name}.{rank}": ReplicaReading("ok", report) for rank, report in reports}
    return {name: ReplicaReading("silent")}


def _decoded(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
