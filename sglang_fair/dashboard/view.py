"""What is shown: the same for the page, which gets it as JSON, and for the terminal. None is "no data"."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["bad", "warn", "info"]
Health = Literal["no data", "gateway down", "denied", "router down", "trouble", "ok"]
Weights = Literal["file", "live"]


@dataclass(frozen=True, slots=True)
class Note:
    """Something that an operator should know, in a sentence. `about` is a replica, "gateway" or "router"."""

    level: Level
    about: str
    text: str


@dataclass(frozen=True, slots=True)
class ClientView:
    """A client over all replicas. Rates are of the last `window_s`, `rates` of each bucket of the span."""

    name: str
    slot: int
    """Its colour, which it keeps as long as it is shown."""
    weight: float
    rate: float
    """Units of service a second."""
    share: float | None
    fair_share: float | None
    waiting: int
    running: int
    wait_s: float | None
    """Mean time in a replica's queue (Little's law: those that waited, divided by those admitted a second)."""
    wait_is_longer: bool
    """Nobody was admitted: those that wait have waited so long already."""
    hit_rate: float | None
    """Cached part of the prompts."""
    service: float
    """Units since the replicas began."""
    deficits: dict[str, float | None]
    """The policy's counter, by replica."""
    rates: list[float | None]


@dataclass(frozen=True, slots=True)
class OthersView:
    """All clients that have no row of their own."""

    clients: int
    rate: float
    share: float | None
    waiting: int
    running: int
    rates: list[float | None]


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica, or one scheduler of it."""

    name: str
    model: str
    """"" where the gateway does not say."""
    state: str
    """ok, starting, silent, denied, no overlay, sick, draining or swapping (its model)."""
    policy: str
    in_flight: int | None
    waiting: int | None
    running: int | None
    rate: float | None
    hit_rate: float | None
    difference: float | None
    """Largest one between two clients that wait there, in units of service by weight; None: fewer than two wait."""
    bound: float | None
    refills: int | None
    of_bound: list[float | None]
    """Difference divided by bound, by bucket."""


@dataclass(frozen=True, slots=True)
class View:
    """A cluster at one time."""

    at: float
    """Unix time, in seconds."""
    every_s: float
    window_s: float
    span: str
    step_s: float
    health: Health
    notes: list[Note]
    placement: str
    weights: Weights
    """What a change of a weight changes: the tenants' file, or the replicas until they are restarted."""
    rate: float | None
    waiting: int | None
    running: int | None
    hit_rate: float | None
    predicted_hit_rate: float | None
    """As the router predicted it for the requests that were answered, since it began."""
    measured_hit_rate: float | None
    """Of the same requests."""
    of_bound: float | None
    """The largest of all replicas now."""
    clients_seen: int
    times: list[float]
    clients: list[ClientView]
    others: OthersView | None
    replicas: list[ReplicaView]
    hit_rates: list[float | None]
