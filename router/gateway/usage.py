"""`GET /v1/usage`: what the holder of a key has had, what it may have, and what is left.

Tokens are those of the replicas' books, from which clients are charged; so they are the same from every gateway, and
begin anew with a replica. The books are read every `FRESH_S` at most, however often somebody asks.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from router.gateway.access.identity import Known
from router.gateway.access.quota import Quotas
from router.gateway.metrics import GatewayMetrics, by_class
from router.gateway.replicas.pool import Replicas
from router.gateway.routing.fleet import Fleet

FRESH_S = 2.0

Book = Mapping[str, Mapping[str, Any]]
"""A replica's clients."""


class TokensUsed(msgspec.Struct):
    """Prompt tokens that were computed, and that the cache had; output tokens."""

    computed: int = 0
    cached: int = 0
    output: int = 0


class LimitUsed(msgspec.Struct):
    """One of the tenant's limits. `remaining` and `resets_s` are of the window that it is."""

    name: str
    limit: int
    remaining: int | None = None
    resets_s: int | None = None


class ClassUsed(msgspec.Struct):
    """Requests of a class that have ended; of these, those whose first token came in time, and those that missed it."""

    requests: int
    met: int
    missed: int


class UsageReport(msgspec.Struct):
    """`GET /v1/usage`."""

    client: str
    tokens: TokensUsed
    service: float
    """Units of the cost function, which is what shares are of."""
    share: float | None
    """Of all service that the replicas have given; None: there was none."""
    fair_share: float
    """What its weight entitles it to beside those who have requests at this moment."""
    weight: float
    requests: int
    waiting: int
    running: int
    limits: list[LimitUsed]
    replicas: int
    """Replicas whose books are in this."""
    classes: dict[str, ClassUsed] = {}
    """What a tenant's requests have attained since the gateway process that answers began, by class."""


class Usage:
    """Answers for one client at a time, from the replicas' books. Belongs to one event loop."""

    def __init__(self, fleet: Fleet, replicas: Replicas, quotas: Quotas, metrics: GatewayMetrics) -> None:
        self._fleet = fleet
        self._replicas = replicas
        self._quotas = quotas
        self._metrics = metrics
        self._read_s = float("-inf")
        self._known: list[Book] = []
        self._reading = asyncio.Lock()

    async def of(self, known: Known) -> UsageReport:
        client = known.caller.client
        books = await self._books()
        own = [book[client] for book in books if client in book]

        def total(name: str) -> Any:
            return sum(row[name] for row in own)

        limits = [] if known.tenant is None else await self._quotas.left(client, known.tenant.limits)
        whole = sum(row["service"] for book in books for row in book.values())
        weight = known.caller.weight
        if weight is None:
            weight = max((row["weight"] for row in own), default=1.0)
        return UsageReport(
            client,
            TokensUsed(total("extend_tokens"), total("cached_tokens"), total("output_tokens")),
            total("service"),
            total("service") / whole if whole else None,
            weight / (weight + _others_weight(books, client)),
            weight,
            total("requests"),
            total("waiting"),
            total("running"),
            [LimitUsed(*one) for one in limits],
            len(books),
            {
                name: ClassUsed(int(row["requests"]), int(row["met"]), int(row["missed"]))
                for name, row in by_class(self._metrics.classes_of_tenants.get(client, {})).items()
            },
        )

    async def _books(self) -> list[Book]:
        """Those of the replicas that answer."""
        async with self._reading:
            if time.monotonic() - self._read_s >= FRESH_S:
                found = await asyncio.gather(*(self._read(up.url) for up in self._fleet.workers.values()))
                self._known = [book for books in found for book in books]
                self._read_s = time.monotonic()
        return self._known

    async def _read(self, url: str) -> list[Book]:
        try:
            status, body = await self._replicas.get(url, "/fair")
            report = msgspec.json.decode(body) if status == 200 else {"data_parallel": ()}
            return [rank["clients"] for rank in report.get("data_parallel", [report])]
        except (OSError, msgspec.DecodeError, LookupError, TypeError, AttributeError):
            return []


def _others_weight(books: list[Book], client: str) -> float:
    present: dict[str, float] = {}
    for book in books:
        for name, row in book.items():
            if name != client and (row["waiting"] or row["running"]):
                present[name] = max(present.get(name, 0.0), row["weight"])
    return sum(present.values())
