"""Assembles the parts of a gateway process."""

import asyncio
import time
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from router.batches.model import ClientTotals
from router.events import Due
from router.gateway.access.identity import Directory, Headers, Identity, Peer
from router.gateway.access.quota import Quotas
from router.gateway.address import shown
from router.gateway.explain import Explainer
from router.gateway.listener import ConnectionBounds
from router.gateway.logs import request_ended
from router.gateway.metrics import GatewayMetrics
from router.gateway.record import RequestRecord
from router.gateway.replicas.pool import Replicas
from router.gateway.request.intake import Intake, read_tokens
from router.gateway.routing.fleet import Fleet
from router.gateway.routing.links import Link, Links
from router.gateway.settings import apps, classes, facts, folders, networks, places
from router.gateway.sharing import Capacity
from router.gateway.usage import Usage
from router.shared_limit import SharedLimit
from sglang_fair.common import tls
from sglang_fair.common.curve import Keys
from sglang_fair.common.service_keys import feeder_key
from sglang_fair.common.version import VERSION
from sglang_fair.core.interactions import Interaction, Interactions
from sglang_fair.settings import table

if TYPE_CHECKING:
    from router.gateway.tracing import Tracing

REMEMBERED_INTERACTIONS = 50_000
"""That a router which was restarted hears of."""

LISTED_CLIENTS = 10
"""`/status` names this many clients, those with most requests in flight, or most items of batches left."""


class Gateway:
    """The parts, and when they start and stop. Belongs to one event loop. No part knows it."""

    def __init__(self, settings: table.Gateway, *, hands_over: bool = False) -> None:
        """Reads tokenizers, keys and the tenants' file at once, and raises `TokenizerError` and SettingError if it
        cannot. `start` opens connections."""
        self.settings = settings
        self.hands_over = hands_over
        """Another gateway brings requests to replicas and carries their answers (`router.picker`), so nothing is tried
        again from here, or continued elsewhere."""
        self.processes = settings.workers
        self.is_ending = False
        """It has been told to stop, and load balancers are to notice."""
        self.metrics = GatewayMetrics(settings.metrics_clients, self._gauges, shared=self.processes > 1)
        count = self.metrics.count
        self.directory = None if settings.tenants is None else Directory(Path(settings.tenants))
        self.quotas = Quotas(settings.limit_store)
        self.identity = Identity(
            places(settings),
            count,
            self.directory,
            networks(settings),
            feeder_key.key() if settings.batches is not None else "",
        )
        self.capacity = Capacity(settings.max_in_flight, settings.max_held_bytes, settings.max_body_bytes)
        self.connection_bounds, self.operators_bounds = (
            ConnectionBounds(
                SharedLimit(settings.max_connections), settings.head_timeout_s, settings.idle_timeout_s, count
            )
            for _ in range(2)
        )
        self.apps, self.classes = apps(settings), classes(settings)
        self.interactions = Interactions(most=REMEMBERED_INTERACTIONS)
        """Those of which calls were served here."""
        self.fleet = Fleet(
            lambda worker: self.replicas.health.is_well(worker), self._begun, self._due, settings.router
        )
        keys = Keys.read_if(settings.keys, "gateway")
        links = [
            Link(router, settings.router_timeout_s, self.fleet.side(router), keys)
            for router in settings.router
        ]
        for link in links:
            link.cut = self._cut
        self.link = Links(links, self.fleet, count)
        self.replicas = Replicas(
            settings,
            lambda: self.fleet.workers,
            self.link.report_health,
            tls.believed(settings.replica_ca),
        )
        tokens = read_tokens(folders(settings))
        self.intake = Intake(
            tokens,
            settings.max_prompt_tokens,
            lambda model: self.replicas.context_tokens(model),
            facts(settings),
            goes_on=not hands_over,
        )
        self.vocabularies = {name: one.vocabulary for name, one in tokens.items() if one.vocabulary}
        """How many tokens models have of which that is known."""
        self.names = self.intake.names
        self.record = RequestRecord(log=request_ended if settings.log_format == "json" else None)
        self.explainer = Explainer(self.record, self.link, self.fleet, self.replicas)
        self.tracing = self._traced() if settings.otlp_traces_endpoint is not None else None
        """None: no spans are made."""
        self.usage = Usage(self.fleet, self.replicas, self.quotas, self.metrics)
        self.cuts: dict[str, Callable[[], None]] = {}
        """By id of an attempt at a stream: cuts it off, if nothing is lost by that."""
        self.batches: Mapping[str, object] = {}
        """What `/status` says of them."""
        self._following: list[asyncio.Task[None]] = []

    def hear_of_batches(self, totals: Mapping[str, ClientTotals]) -> None:
        self.metrics.batches(totals)
        most = sorted(totals.items(), key=lambda pair: (-pair[1].left, pair[0]))[:LISTED_CLIENTS]
        running = sum(one.running for one in totals.values())
        self.batches = {
            "waiting": sum(one.left for one in totals.values()) - running,
            "running": running,
            "clients": {name: asdict(one) for name, one in most},
        }

    def _cut(self, attempt: str) -> None:
        cut = self.cuts.get(attempt)
        if cut is not None:
            cut()

    def models(self, headers: Headers, peer: Peer) -> list[str]:
        """The names of models that the sender may ask for. Raises `ApiError` for who may not ask at all."""
        if self.directory is None:
            return list(self.names)
        tenant = self.identity.of(headers, peer).tenant
        if tenant is None or tenant.models is None:
            return list(self.names)
        return [name for name in tenant.models if self.names.model_of(name) is not None]

    async def start(self) -> None:
        self.replicas.start()
        await self.link.start()
        self._following = [asyncio.create_task(self.metrics.run())]
        if self.directory is not None:
            self._following += [
                asyncio.create_task(self.directory.run()),
            ]

    async def close(self) -> None:
        """Closes everything; cancellations and ends under way still leave."""
        for task in self._following:
            task.cancel()
        if self.tracing is not None:
            await self.tracing.close()
        await self.quotas.close()
        await self.replicas.close()
        await self.link.close()
        self.intake.close()

    def state(self) -> dict[str, object]:
        return {
            "version": VERSION,
            "in_flight": self.capacity.requests.taken,
            "in_flight_by_client": self.capacity.requests.most(LISTED_CLIENTS),
            "held_bytes": self.capacity.body_bytes.taken,
            "connections": self.connection_bounds.open.taken,
            "context_tokens": self._context_tokens(),
            "interactions": len(self._begun()),
            "routers": self.link.state(),
            "workers": len(self.fleet.workers),
            "sick": self.replicas.sick(),
            **self.metrics.status(),
            "processes": self.processes,
            **(
                {}
                if self.directory is None
                else {"tenants": self.directory.state(), "limits": self.quotas.state()}
            ),
        }

    def _context_tokens(self) -> int | dict[str, int | None] | None:
        found = {model: self.replicas.context_tokens(model) for model in self.names}
        return found if len(found) > 1 else found[self.names.first]

    def _gauges(self) -> dict[str, float]:
        certificate = shown(self.settings)
        return {
            "gateway_requests_in_flight": self.capacity.requests.taken,
            "gateway_connections": self.connection_bounds.open.taken,
            "gateway_held_bytes": self.capacity.body_bytes.taken,
            "gateway_router_up": self.link.alive,
            "gateway_routers_up": sum(
                self.fleet.routers.state(one) == "up" for one in self.fleet.routers.names
            ),
            "gateway_tenants_ok": self.directory is None or not self.directory.error,
            "gateway_certificate_end_timestamp_seconds": inf if certificate is None else certificate().end_s,
        }

    def _traced(self) -> "Tracing":
        from router.gateway import tracing  # the SDK takes memory and time to import

        assert self.settings.otlp_traces_endpoint is not None
        return tracing.Tracing(tracing.otlp(self.settings.otlp_traces_endpoint))

    def _due(self, name: Interaction) -> Due | None:
        promise = self.interactions.promised(name)
        return None if promise is None else Due.of(promise, time.monotonic())

    def _begun(self) -> Interactions:
        self.interactions.tick(time.monotonic())
        return self.interactions
