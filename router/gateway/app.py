"""The routes of the gateway, and what a process needs to build them: its configuration."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from router.gateway.admin import add_routes
from router.gateway.errors import ApiError
from router.gateway.limits import Limits
from router.gateway.listener import STATE
from router.gateway.openapi import describe
from router.gateway.relay import Relay
from router.gateway.request.continuation import Kind
from router.gateway.request.tokens import Tokens
from router.gateway.resources import PATHS, Gateway
from router.gateway.routing.link import RouterGone
from sglang_fair.common.identity import DEFAULT_ORDER
from sglang_fair.common.processes import die_with_parent

CONFIG_VARIABLE = "SGLANG_FAIR_GATEWAY"
"""Where uvicorn's worker processes find their configuration: they are started by import string."""


@dataclass(frozen=True)
class Config:
    """One gateway."""

    router: str
    model_name: str
    tokenizer: str
    router_timeout_s: float = 5.0
    limits: Limits = field(default_factory=Limits)
    identity: tuple[str, ...] = DEFAULT_ORDER

    def to_json(self) -> str:
        """For `CONFIG_VARIABLE`."""
        return msgspec.json.encode(asdict(self)).decode()

    @staticmethod
    def from_json(text: str) -> "Config":
        """What `to_json` wrote."""
        return msgspec.json.decode(text, type=Config)


class App(FastAPI):
    """The application. What is to be served goes straight to its relay, past the framework's layers."""

    def __init__(self, gateway: Gateway, **options: Any) -> None:
        super().__init__(**options)
        self.state.gateway = gateway
        # Who asks for the rest matters (`admin`), also behind a proxy on this machine; as uvicorn would do it.
        proxies = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1")
        self._rest = ProxyHeadersMiddleware(super().__call__, proxies)
        self._kinds: dict[str, Kind] = {path: kind for kind, path in PATHS.items()}

    def openapi(self) -> dict[str, Any]:
        """What can be asked; served at /openapi.json."""
        return describe(self.version)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the lifespan."""
        if scope["type"] == "http" and scope["method"] == "POST":
            kind = self._kinds.get(scope["path"])
            if kind is not None:
                await Relay(self.state.gateway, kind)(scope, receive, send)
                return
        await self._rest(scope, receive, send)


def create_app(config: Config) -> App:
    """The application. Reads the tokenizer at once, and raises `TokenizerError` when it cannot."""
    tokens = Tokens(Path(config.tokenizer))
    gateway = Gateway(
        config.model_name, config.router, config.router_timeout_s, tokens, config.limits, config.identity
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Gateway]]:
        await gateway.start()
        try:
            yield {STATE: gateway}
        finally:
            await gateway.close()

    app = App(
        gateway, title="sglang-fair gateway", version=metadata.version("sglang-fair"), lifespan=lifespan
    )

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        """The one model that is served."""
        model = {"id": config.model_name, "object": "model", "created": 0, "owned_by": "sglang-fair"}
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while requests can be placed: by the router, or without it ("fallback")."""
        state = "ok" if gateway.link.alive else "fallback" if gateway.fleet.workers else "no router"
        return JSONResponse(
            {"status": state, "model": config.model_name}, 503 if state == "no router" else 200
        )

    @app.get("/status")
    async def status() -> JSONResponse:
        """The router's snapshot, and this process's own counters under `gateway`.

        While no router answers the snapshot holds only what this process knows itself.
        """
        try:
            state = await gateway.link.snapshot()
        except RouterGone as error:
            workers = gateway.fleet.view(gateway.health.sick())
            in_flight = sum(gateway.fleet.in_flight.values())
            state = {
                "placement": "fallback",
                "router": str(error),
                "workers": workers,
                "in_flight": in_flight,
            }
            return JSONResponse({**state, "gateway": gateway.state() | {"fallback": True}})
        return JSONResponse({**state, "gateway": gateway.state() | {"fallback": False}})

    add_routes(app, gateway)

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> JSONResponse:
        gateway.refusals[error.status] += 1
        return _error(error)

    @app.exception_handler(HTTPException)
    async def no_route(_: Request, error: HTTPException) -> JSONResponse:
        gateway.refusals[error.status_code] += 1
        return _error(ApiError(error.status_code, str(error.detail)))

    return app


def create_app_from_environment() -> App:
    """The factory for uvicorn's worker processes."""
    die_with_parent()
    return create_app(Config.from_json(os.environ[CONFIG_VARIABLE]))


def _error(error: ApiError) -> JSONResponse:
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return JSONResponse(msgspec.json.decode(error.body()), error.status, headers)
