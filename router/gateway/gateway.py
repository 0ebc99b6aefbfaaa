"""Assembles the parts of a gateway process."""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from router.batches.model import ClientTotals
from router.events import Due
from router.gateway.access.directory import Directory
from router.gateway.access.identity import Headers, Identity, Peer
from router.gateway.access.proxies import Network
from router.gateway.access.quota import MEMORY, Quotas
from router.gateway.counters import Counters
from router.gateway.explain import Explainer
from router.gateway.limits import Limits
from router.gateway.listener import ConnectionBounds
from router.gateway.logs import request_ended
from router.gateway.metrics import GatewayMetrics
from router.gateway.record import RequestRecord
from router.gateway.relay import REMEMBERED_INTERACTIONS, Relay, Services
from router.gateway.replicas.pool import Replicas
from router.gateway.request.intake import Intake
from router.gateway.request.kinds import Kind
from router.gateway.request.tokens import Tokens
from router.gateway.routing.fleet import Fleet
from router.gateway.routing.link import Link
from router.gateway.routing.links import Links
from router.gateway.routing.placer import Placer
from router.gateway.sharing.allowance import Capacity
from router.gateway.usage import Books, Usage
from router.shared_limit import SharedLimit
from sglang_fair.common.curve import Keys
from sglang_fair.common.deadlines import Classes
from sglang_fair.common.fields import WIDEST, Facts
from sglang_fair.common.identity import DEFAULT_ORDER
from sglang_fair.common.interaction import Apps
from sglang_fair.common.version import VERSION
from sglang_fair.core.interactions import Interaction, Interactions
from sglang_fair.settings.table import METRICS_CLIENTS

if TYPE_CHECKING:
    from router.gateway.tracing import Tracing

LISTED_CLIENTS = 10
"""`/status` names this many clients, those with most requests in flight, or most items of batches left."""


class Gateway:
    """The parts, and when they start and stop. Belongs to one event loop. No part knows it."""

    def __init__(
        self,
        tokens: Mapping[str, Tokens],
        routers: Sequence[str],
        router_timeout_s: float,
        limits: Limits,
        identity: Sequence[str] = DEFAULT_ORDER,
        tenants: Path | None = None,
        trusted: Sequence[Network] | None = None,
        limit_store: str = MEMORY,
        metrics_clients: int = METRICS_CLIENTS,
        processes: int = 1,
        log_format: str = "text",
        otlp_traces_endpoint: str | None = None,
        apps: Apps | None = None,
        classes: Classes | None = None,
        feeder_key: str = "",
        keys: Keys | None = None,
        replica_tls: ssl.SSLContext | None = None,
        certificate_end_s: Callable[[], float] = lambda: inf,
        facts: Facts = WIDEST,
    ) -> None:
        """`tokens` are the tokenizers of the models that it serves, the first one first. `routers` are the
        addresses of its routers, `identity` where a client's name is looked for. `start` opens connections.

        Reads the tenants' file at once, and raises SettingError if it cannot. `trusted` are the networks of proxies,
        `limit_store` is where tenants' limits are counted. `metrics_clients` who are no tenants have labels of their
        own; `processes` of this gateway count together. With `log_format` "json" each request is logged. `apps` says
        which applications clients may name, `classes` what they may ask to be promised.
        With `feeder_key` the feeder of batches asks on behalf of clients. Spans go to `otlp_traces_endpoint`; None:
        none are made. Routers must have the keys that belong to `keys`, and replicas with https:// addresses a
        certificate that `replica_tls` believes; None: the system's authorities do. `certificate_end_s` is when its own
        certificate ends, in seconds since 1970; inf: it has none. `facts` is what the operator allows clients to ask.
        """
        self.processes = processes
        self.is_ending = False
        """It has been told to stop, and load balancers are to notice."""
        self.counters = Counters()
        self.directory = None if tenants is None else Directory(tenants)
        self.quotas = Quotas(limit_store)
        self.identity = Identity(identity, self.counters, self.directory, trusted, feeder_key)
        self.capacity = Capacity(limits.max_in_flight, limits.max_held_bytes, limits.max_body_bytes)
        self.connection_bounds = ConnectionBounds(
            SharedLimit(limits.max_connections), limits.head_timeout_s, self.counters
        )
        self.operators_bounds = ConnectionBounds(
            SharedLimit(limits.max_connections), limits.head_timeout_s, self.counters
        )
        self.interactions = Interactions(most=REMEMBERED_INTERACTIONS)
        self.fleet = Fleet(
            lambda worker: self.replicas.health.is_well(worker), self._begun, self._due, routers
        )
        links = [Link(router, router_timeout_s, self.fleet.side(router), keys) for router in routers]
        for link in links:
            link.cut = self._cut
        self.link = Links(links, self.fleet)
        self.replicas = Replicas(limits, lambda: self.fleet.workers, self.link.report_health, replica_tls)
        self._certificate_end_s = certificate_end_s
        self._intake = Intake(
            tokens, limits.max_prompt_tokens, lambda model: self.replicas.context_tokens(model), facts
        )
        self.names = self._intake.names
        self.metrics = GatewayMetrics(metrics_clients, self.counters, self._gauges, shared=processes > 1)
        self.record = RequestRecord(log=request_ended if log_format == "json" else None)
        self.explainer = Explainer(self.record, self.link, self.fleet, self.replicas)
        self.tracing = None if otlp_traces_endpoint is None else self._traced(otlp_traces_endpoint)
        self.usage = Usage(Books(self.fleet, self.replicas), self.quotas, self.counters)
        placer = Placer(self.link, self.fleet, self.counters)
        self._services = Services(
            limits,
            self.identity,
            self.quotas,
            self.counters,
            self.capacity,
            self._intake,
            placer,
            self.replicas,
            self.metrics,
            self.record,
            apps or Apps(),
            self.interactions,
            classes or Classes(),
            self.tracing,
        )

        self._following: list[asyncio.Task[None]] = []
        self.vocabularies = {name: one.vocabulary for name, one in tokens.items() if one.vocabulary}
        """How many tokens models have of which that is known."""
        self.batches: Mapping[str, object] = {}
        """What `/status` says of them."""

    def hear_of_batches(self, totals: Mapping[str, ClientTotals]) -> None:
        """What clients have in the store."""
        self.metrics.batches(totals)
        most = sorted(totals.items(), key=lambda pair: (-pair[1].left, pair[0]))[:LISTED_CLIENTS]
        running = sum(one.running for one in totals.values())
        self.batches = {
            "waiting": sum(one.left for one in totals.values()) - running,
            "running": running,
            "clients": {name: asdict(one) for name, one in most},
        }

    def _cut(self, attempt: str) -> None:
        """A router wants this attempt cut."""
        cut = self._services.cuts.get(attempt)
        if cut is not None:
            cut()

    def relay(self, kind: Kind) -> Relay:
        """The endpoint for requests of one kind."""
        return Relay(kind, self._services)

    def models(self, headers: Headers, peer: Peer) -> list[str]:
        """The names of models that the sender may ask for. Raises `ApiError` for who may not ask at all."""
        if self.directory is None:
            return list(self.names)
        tenant = self.identity.of(headers, peer).tenant
        if tenant is None or tenant.models is None:
            return list(self.names)
        return [name for name in tenant.models if self.names.model_of(name) is not None]

    async def start(self) -> None:
        """Opens what belongs to the running loop."""
        await self.replicas.start()
        await self.link.start()
        self._following = [asyncio.create_task(self.metrics.run())]
        if self.directory is not None:
            self._following += [
                asyncio.create_task(self.directory.run()),
                asyncio.create_task(self.quotas.run()),
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
        self._intake.close()

    def state(self) -> dict[str, object]:
        """What this process counts, as `/status` shows it."""
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
            "sick": self.replicas.health.sick(),
            **self.counters.state(),
            **(self.metrics.status() if self.processes > 1 else {}),
            **({} if self.tracing is None else {"spans": self.tracing.state()}),
            "processes": self.processes,
            **(
                {}
                if self.directory is None
                else {"tenants": self.directory.state(), "limits": self.quotas.state()}
            ),
        }

    def _context_tokens(self) -> int | dict[str, int | None] | None:
        """By model, where there are several."""
        found = {model: self.replicas.context_tokens(model) for model in self.names}
        return found if len(found) > 1 else found[self.names.first]

    def _gauges(self) -> dict[str, float]:
        return {
            "gateway_requests_in_flight": self.capacity.requests.taken,
            "gateway_connections": self.connection_bounds.open.taken,
            "gateway_held_bytes": self.capacity.body_bytes.taken,
            "gateway_router_up": self.link.alive,
            "gateway_routers_up": sum(
                self.fleet.routers.state(one) == "up" for one in self.fleet.routers.names
            ),
            "gateway_tenants_ok": self.directory is None or not self.directory.error,
            "gateway_certificate_end_timestamp_seconds": self._certificate_end_s(),
        }

    def _traced(self, endpoint: str) -> "Tracing":
        from router.gateway import tracing  # the SDK takes memory and time to import

        return tracing.Tracing(tracing.otlp(endpoint), self.explainer.attempts)

    def _due(self, name: Interaction) -> Due | None:
        """By when further calls of it are due."""
        promise = self.interactions.promised(name)
        return None if promise is None else Due.of(promise, time.monotonic())

    def _begun(self) -> Interactions:
        """Those under way of which this gateway knows."""
        self.interactions.tick(time.monotonic())
        return self.interactions
