"""One look at a cluster: what the gateway's `/status` and each replica's `/fair` said, or why they said nothing.

Peers may be of another version, or not ours at all: a field that is missing has a default. Pure; `peers` reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

SYSTEM = "(system)"
"""The account of work that no client caused (`core.ledger`)."""

OTHERS = "(others)"
"""The account of the clients that a replica's ledger has dropped."""


@dataclass(frozen=True, slots=True)
class ClientReading:
    """A client at one replica: what it was given since the replica began, and what it has there."""

    weight: float = 1.0
    counter: float | None = None
    """The policy's: DLPM's deficit, VTC's virtual counter."""
    extend_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    service: float = 0.0
    transferred_units: float = 0.0
    """What it paid for others' prefixes less what others paid for its own. It is charged this and its service."""
    requests: int = 0
    """Admitted ones."""
    backlog: int | None = None
    """The number of its present backlog; another one is a new backlog."""
    waiting: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class Totals:
    """The same over all accounts of a replica."""

    extend_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    service: float = 0.0
    waiting: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class Books:
    """Whether charges and the engine's counters agree."""

    ok: bool = True


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """`GET /fair` of one scheduler."""

    policy: str
    clients: dict[str, ClientReading]
    totals: Totals
    bound: float | None = None
    refills: int | None = None
    conservation: Books = field(default_factory=Books)


@dataclass(frozen=True, slots=True)
class Ranks:
    """`GET /fair` of a replica with several schedulers."""

    data_parallel: list[ReplicaReport]


ReplicaState = Literal["ok", "silent", "denied", "no overlay"]


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """A replica. Its `report` is there if its state is "ok"."""

    state: ReplicaState
    report: ReplicaReport | None = None


@dataclass(frozen=True, slots=True)
class Worker:
    """A replica as the router knows it, or in fallback the gateway."""

    url: str = ""
    state: str = "up"
    in_flight: int = 0
    tree_tokens: int = 0
    model: str = ""


@dataclass(frozen=True, slots=True)
class Hits:
    """Prompt tokens of answered requests: those that the router took to be cached, and those that were."""

    measured_input_tokens: int = 0
    measured_predicted_tokens: int = 0
    measured_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TenantsFile:
    """How the gateway reads its tenants' file."""

    tenants: int = 0
    failures: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Front:
    """The gateway's own part of `/status`."""

    fallback: bool = False
    in_flight: int = 0
    requests: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    tenants: TenantsFile | None = None


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A client whose requests have ended replicas."""

    left_s: float = 0.0
    convictions: int = 0
    doubts: int = 0
    request: str = ""
    """The latest of these requests."""
    worker: str = ""
    is_refused: bool = False
    """None of its requests are served; otherwise one at a time is."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """The router's quarantine, by client."""

    quarantine: dict[str, Quarantine] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    """`GET /status`."""

    gateway: Front
    placement: str = ""
    workers: dict[str, Worker] = field(default_factory=dict)
    hits: Hits = field(default_factory=Hits)
    suspects: Suspects = field(default_factory=Suspects)


GatewayState = Literal["up", "router down", "down", "denied"]


@dataclass(frozen=True, slots=True)
class GatewayReading:
    """The gateway. `status` is there unless it is down or denies."""

    state: GatewayState
    status: Status | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the whole cluster."""

    gateway: GatewayReading
    replicas: Mapping[str, ReplicaReading] = field(default_factory=dict)
