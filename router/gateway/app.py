"""The routes of the gateway, and the configuration from which a process builds them."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Mount, Route, Router

from router.gateway import admin, pages
from router.gateway.errors import ApiError
from router.gateway.gateway import Gateway
from router.gateway.limits import Limits
from router.gateway.listener import STATE, ConnectionBounds
from router.gateway.openapi import describe
from router.gateway.request.schema import PATHS
from router.gateway.request.tokens import Tokens
from sglang_fair.common.identity import DEFAULT_ORDER
from sglang_fair.common.processes import die_with_parent

CONFIG_VARIABLE = "SGLANG_FAIR_GATEWAY"
"""Where uvicorn's worker processes find their configuration: they are started by import string."""


@dataclass(frozen=True)
class Config:
    """The configuration of one gateway."""

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
        """Reads what `to_json` wrote."""
        return msgspec.json.decode(text, type=Config)


class Pages(FastAPI):
    """What the gateway answers itself, and its documentation at /docs and /openapi.json."""

    def openapi(self) -> dict[str, Any]:
        """The document, which is made from our own types."""
        return describe(self.version)


class App(Router):
    """The application. Requests for replicas stand in front of the pages, because FastAPI's middleware would take 12 µs
    for each, and they answer their errors themselves.
    """

    def __init__(self, gateway: Gateway, pages: Pages) -> None:
        @asynccontextmanager
        async def lifespan(_: Router) -> AsyncIterator[dict[str, ConnectionBounds]]:
            await gateway.start()
            try:
                yield {STATE: gateway.connection_bounds}
            finally:
                await gateway.close()

        relays = [Route(path, gateway.relay(kind), methods=["POST"]) for kind, path in PATHS.items()]
        # A path with a line break matches no Mount: it goes to `default`.
        super().__init__(
            [*relays, Mount("", pages)], default=pages, redirect_slashes=False, lifespan=lifespan
        )
        self.gateway = gateway
        self.pages = pages


def create_app(config: Config) -> App:
    """The application. Reads the tokenizer at once, and raises `TokenizerError` if it cannot."""
    tokens = Tokens(Path(config.tokenizer))
    gateway = Gateway(
        config.model_name, config.router, config.router_timeout_s, tokens, config.limits, config.identity
    )

    async def refuse(_: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):  # no such route, or not with this method
            error = ApiError(error.status_code, str(error.detail))
        assert isinstance(error, ApiError)
        gateway.counters.refusals[error.status] += 1
        headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
        return Response(error.body(), error.status, headers, "application/json")

    own = Pages(
        routes=[*pages.routes(gateway), *admin.routes(gateway.link, gateway.replicas)],
        exception_handlers={ApiError: refuse, HTTPException: refuse},
        title="sglang-fair gateway",
        version=metadata.version("sglang-fair"),
    )
    return App(gateway, own)


def create_app_from_environment() -> App:
    """The factory for uvicorn's worker processes."""
    die_with_parent()
    return create_app(Config.from_json(os.environ[CONFIG_VARIABLE]))
