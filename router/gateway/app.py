"""The routes of the gateway, and what a process needs to build them: its configuration."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from router.gateway.calls import ApiError
from router.gateway.link import Link, RouterGone
from router.gateway.relay import Relay
from router.gateway.resources import PATHS, Gateway, Limits
from router.gateway.tokens import Tokens
from sglang_fair.core.identity import DEFAULT_ORDER
from sglang_fair.processes import die_with_parent

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


def create_app(config: Config) -> FastAPI:
    """The application. Reads the tokenizer at once, and raises `TokenizerError` when it cannot."""
    tokens = Tokens(Path(config.tokenizer))
    link = Link(config.router, config.router_timeout_s)
    gateway = Gateway(config.model_name, link, tokens, config.limits, config.identity)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.close()

    app = FastAPI(title="sglang-fair gateway", lifespan=lifespan)
    app.state.gateway = gateway

    @app.post(PATHS["chat"])
    async def chat(_: Request) -> Any:
        return Relay(gateway, "chat")

    @app.post(PATHS["completions"])
    async def completions(_: Request) -> Any:
        return Relay(gateway, "completions")

    @app.post(PATHS["generate"])
    async def generate(_: Request) -> Any:
        return Relay(gateway, "generate")

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        """The one model that is served."""
        model = {"id": config.model_name, "object": "model", "created": 0, "owned_by": "sglang-fair"}
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while the router answers: without it nothing can be served."""
        alive = gateway.link.alive
        body = {"status": "ok" if alive else "no router", "model": config.model_name}
        return JSONResponse(body, 200 if alive else 503)

    @app.get("/status")
    async def status() -> JSONResponse:
        """The router's snapshot, and this process's own counters under `gateway`."""
        try:
            state = await gateway.link.snapshot()
        except RouterGone as error:
            return _error(ApiError(503, str(error), code="router_unavailable", retry_after_s=1))
        return JSONResponse({**state, "gateway": {"in_flight": gateway.in_flight, **gateway.counts}})

    @app.exception_handler(HTTPException)
    async def no_route(_: Request, error: HTTPException) -> JSONResponse:
        return _error(ApiError(error.status_code, str(error.detail)))

    return app


def create_app_from_environment() -> FastAPI:
    """The factory for uvicorn's worker processes."""
    die_with_parent()
    return create_app(Config.from_json(os.environ[CONFIG_VARIABLE]))


def _error(error: ApiError) -> JSONResponse:
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return JSONResponse(msgspec.json.decode(error.body()), error.status, headers)
