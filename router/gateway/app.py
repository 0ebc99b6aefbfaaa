"""The routes of the gateway, and the configuration from which a process builds them."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.types import Receive, Scope, Send

from router.batches.model import StoreError
from router.collector import collect_seldom
from router.gateway import admin, logs, notice, pages, tenants
from router.gateway.access import proxies
from router.gateway.access.quota import MEMORY
from router.gateway.address import Address, Shown
from router.gateway.batches import routes as batches
from router.gateway.batches.files import Bounds, Files
from router.gateway.errors import ApiError
from router.gateway.gateway import Gateway
from router.gateway.guard import Guard
from router.gateway.limits import Limits
from router.gateway.listener import STATE, ConnectionBounds, Listener
from router.gateway.openapi import describe
from router.gateway.request.kinds import PATHS
from router.gateway.request.tokens import read_tokens
from sglang_fair.common import tls
from sglang_fair.common.curve import Keys
from sglang_fair.common.deadlines import DEFAULT_CLASSES, Classes
from sglang_fair.common.fields import WIDEST, Facts
from sglang_fair.common.files import read_json
from sglang_fair.common.guard import named
from sglang_fair.common.identity import DEFAULT_ORDER
from sglang_fair.common.interaction import make_apps
from sglang_fair.common.processes import die_with_parent
from sglang_fair.common.service_keys import feeder_key
from sglang_fair.common.version import VERSION
from sglang_fair.settings.setting import SettingError
from sglang_fair.settings.table import METRICS_CLIENTS

CONFIG_VARIABLE = "SGLANG_FAIR_GATEWAY"
"""Where uvicorn's worker processes find their configuration: they are started by import string."""


@dataclass(frozen=True)
class Config:
    """The configuration of one gateway."""

    router: tuple[str, ...]
    model_name: str
    tokenizer: str
    router_timeout_s: float = 5.0
    limits: Limits = field(default_factory=Limits)
    identity: tuple[str, ...] = DEFAULT_ORDER
    tenants: str | None = None
    trusted_proxies: str | None = None
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    limit_store: str = MEMORY
    metrics_clients: int = METRICS_CLIENTS
    processes: int = 1
    log_level: str = "info"
    log_format: str = "text"
    otlp_traces_endpoint: str | None = None
    apps: str | None = None
    more_models: Mapping[str, str] = field(default_factory=dict)
    """Further models, each with the folder of its tokenizer."""
    slo_classes: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_CLASSES))
    batches: str | None = None
    """Where files and batches are; None: there are none."""
    batch_files: str | None = None
    batch_file_bytes: int = 1 << 30
    batch_client_bytes: int = 16 << 30
    batch_keep_days: float = 30.0
    keys: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    replica_ca: str | None = None
    names: str = ""
    notice_s: float = 0.0
    max_logprobs: int = 20
    allow_fields: str = ""

    @property
    def folders(self) -> dict[str, str]:
        """All models, the first one first, each with the folder of its tokenizer."""
        return {self.model_name: self.tokenizer, **self.more_models}

    def to_json(self) -> str:
        """For `CONFIG_VARIABLE`."""
        return msgspec.json.encode(asdict(self)).decode()

    @staticmethod
    def from_json(text: str) -> "Config":
        """Reads what `to_json` wrote."""
        return msgspec.json.decode(text, type=Config)


DOCUMENTATION = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>sglang-fair gateway</title>
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css">
<div id="page"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#page", deepLinking: true})</script>
</html>
"""


class Pages(Starlette):
    """What the gateway answers itself, and its documentation at /docs and /openapi.json."""

    def __init__(
        self, gateway: Gateway, routes: Sequence[Route], relayed: Sequence[str], facts: Facts = WIDEST
    ) -> None:
        """`relayed` are paths of the same address that replicas answer; `facts` is what clients may ask of these."""
        self._facts = facts

        async def refuse(request: Request, error: Exception) -> Response:
            if isinstance(error, HTTPException):  # no such route, or not with this method
                error = ApiError(error.status_code, str(error.detail))
            assert isinstance(error, ApiError)
            return refused(gateway, request.url.path, error)

        async def openapi(_: Request) -> Response:
            return JSONResponse(self.openapi())

        async def documentation(_: Request) -> Response:
            return HTMLResponse(DOCUMENTATION)

        about = [Route("/openapi.json", openapi), Route("/docs", documentation)]
        super().__init__(
            routes=[*routes, *about], exception_handlers={ApiError: refuse, HTTPException: refuse}
        )
        self._paths = {*relayed, *(route.path.replace(":path", "") for route in routes)}

    def openapi(self) -> dict[str, Any]:
        """The document of this address, which is made from our own types."""
        return describe(VERSION, self._paths, self._facts)


def refused(gateway: Gateway, path: str, error: ApiError) -> Response:
    """The answer to a request that is refused, in the shape of the API that was asked."""
    gateway.counters.refusals[error.status] += 1
    body = error.body("anthropic" if path.startswith(PATHS["messages"]) else "openai")
    return Response(body, error.status, error.headers, "application/json")


class App(Router):
    """The application. Requests for replicas stand in front of the pages, whose middleware would take 12 µs
    for each, and they answer their errors themselves.
    """

    def __init__(
        self,
        gateway: Gateway,
        pages: Pages,
        admin: Address | None = None,
        files: Files | None = None,
        notice_s: float = 0.0,
        guard: Guard | None = None,
    ) -> None:
        """`admin` is where operators ask, if that is an address of its own. `files` are closed at the end. From SIGTERM
        on /readyz says 503, for `notice_s` before the server begins to stop. `guard` keeps other sites' pages from what
        clients may ask; None: clients have keys."""

        @asynccontextmanager
        async def lifespan(_: Router) -> AsyncIterator[dict[str, ConnectionBounds]]:
            await gateway.start()
            counting = None
            if files is not None:
                counting = asyncio.create_task(files.follow(gateway.hear_of_batches))
            try:
                if admin is not None:
                    await admin.start()
                if notice_s > 0:
                    notice.give(gateway, notice_s)
                yield {STATE: gateway.connection_bounds}
            finally:
                if admin is not None:
                    await admin.close()
                await gateway.close()
                if files is not None and counting is not None:
                    counting.cancel()
                    files.close()

        self._relays = {path: gateway.relay(kind) for kind, path in PATHS.items()}
        relays = [Route(path, relay, methods=["POST"]) for path, relay in self._relays.items()]
        # A path with a line break matches no Mount: it goes to `default`.
        super().__init__(
            [*relays, Mount("", pages)], default=pages, redirect_slashes=False, lifespan=lifespan
        )
        self.gateway = gateway
        self.pages = pages
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request. One for replicas needs no search through the routes, which would take 20 µs."""
        path = scope.get("path", "")
        relay = self._relays.get(path) if scope.get("method") == "POST" else None
        is_clients = relay is not None or (scope["type"] == "http" and path.startswith("/v1/"))
        if self._guard is not None and is_clients:
            try:
                self._guard.check_site(Request(scope), content=None)
            except ApiError as error:
                await refused(self.gateway, path, error)(scope, receive, send)
                return
        await (super().__call__ if relay is None else relay)(scope, receive, send)


def create_app(config: Config) -> App:
    """The application. Reads tokenizers and tenants, and opens the folder of batches, at once; raises `TokenizerError`
    and SettingError if it cannot."""
    files = open_files(config)
    shown = None if config.tls_cert is None else Shown(config.tls_cert, config.tls_key)
    facts = Facts.allowing(config.max_logprobs, config.allow_fields)
    gateway = Gateway(
        read_tokens(config.folders),
        config.router,
        config.router_timeout_s,
        config.limits,
        config.identity,
        None if config.tenants is None else Path(config.tenants),
        None if config.trusted_proxies is None else proxies.parse(config.trusted_proxies),
        config.limit_store,
        config.metrics_clients,
        config.processes,
        config.log_format,
        config.otlp_traces_endpoint,
        None if config.apps is None else make_apps(read_json(config.apps), config.apps),
        Classes(config.slo_classes),
        feeder_key.key() if files is not None else "",
        Keys.read_if(config.keys, "gateway"),
        tls.authorities(config.replica_ca),
        (lambda: inf) if shown is None else lambda: shown().end_s,
        facts,
    )
    guard = Guard(has_tenants=config.tenants is not None, names=named(config.names))
    workers = admin.routes(gateway.link, gateway.replicas, gateway.names, guard)
    relayed = tuple(PATHS.values())
    public = [*pages.public(gateway), *(() if files is None else batches.routes(gateway, files))]
    if config.tenants is None and config.admin_port is None:
        own = [*public, *pages.private(gateway, guard.check_site), *workers]
        return App(gateway, Pages(gateway, own, relayed, facts), None, files, config.notice_s, guard)
    address = None
    if config.admin_port is not None:
        changes = [] if config.tenants is None else tenants.routes(Path(config.tenants), guard)
        operators = Pages(gateway, [*pages.private(gateway, guard.check), *workers, *changes], ())
        address = Address(
            operators,
            config.admin_host,
            config.admin_port,
            shared=config.processes > 1,
            connection=partial(Listener, bounds=gateway.operators_bounds),
            shown=shown,
        )
    by_name = guard if config.tenants is None else None  # else each request shows a key, which no page has
    return App(gateway, Pages(gateway, public, relayed, facts), address, files, config.notice_s, by_name)


def open_files(config: Config) -> Files | None:
    """What the gateway keeps of batches, if it has any. Raises SettingError, in one line."""
    if config.batches is None:
        return None
    keep_s = int(86_400 * config.batch_keep_days)
    try:
        bounds = Bounds(config.batch_file_bytes, config.batch_client_bytes, keep_s)
        return Files(config.batches, config.batch_files, bounds)
    except StoreError as error:
        raise SettingError(f"--batches: {error}", "batches") from None


def create_app_from_environment() -> App:
    """The factory for uvicorn's worker processes."""
    die_with_parent()
    config = Config.from_json(os.environ[CONFIG_VARIABLE])
    logs.configure(config.log_level, config.log_format)
    app = create_app(config)
    collect_seldom()
    return app
