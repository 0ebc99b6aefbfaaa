"""A replica answers for the model that it has, and for no other: the gate in front of SGLang's HTTP application.

    GET  /fair/model   {"run": "5f…", "state": "serves", "loaded": "a", "target": "", "in_flight": 3}
    POST /fair/model   {"state": "empties", "model": "b"}      by the replica's agent (`sglang_fair.agent`)

A request that is not let in gets status 421, which a gateway takes for "ask the router again". What is let in is
counted until its answer has ended, so "nothing in flight" means that no request for the old model is anywhere in here.
"""

import uuid
from collections.abc import MutableMapping
from typing import Any

from sglang_fair.common.swapping import HEADER_PROBE, MISDIRECTED, PATH, Gate
from sglang_fair.overlay.application import Application, answer, wrap

GENERATES = frozenset(
    {
        "/generate",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/classify",
        "/v1/score",
        "/v1/rerank",
        "/encode",
        "/classify",
        "/api/generate",
        "/api/chat",
        "/vertex_generate",
        "/invocations",
    }
)
"""Paths whose requests are answered by the model."""

SCOPE_KEY = "sglang_fair.gate"
"""Key in an HTTP request's scope: the gate that has let an agent's own request in."""

GATE = "fair_gate"
"""Attribute of SGLang's tokenizer manager: the gate in front of it."""


def is_changing(manager: Any) -> bool:
    """Whether the replica is between two models."""
    gate = getattr(manager, GATE, None)
    return gate is not None and gate.state != "serves"


def is_probe(request: Any) -> bool:
    """Whether the replica's agent has sent this HTTP request."""
    return SCOPE_KEY in getattr(request, "scope", {})


def add_gate(app: Any, manager: Any) -> None:
    """Put the gate in front of SGLang's HTTP application, and add the routes."""
    from fastapi import HTTPException, Request
    from sglang.srt.utils.auth import AuthLevel, auth_level

    gate = Gate(uuid.uuid4().hex, manager.served_model_name)
    setattr(manager, GATE, gate)

    async def show() -> Any:
        return gate.says(len(manager.rid_to_state))

    async def change(request: Request) -> Any:
        try:
            gate.set(await request.json())
        except ValueError as error:  # not JSON, or not what can be asked
            raise HTTPException(400, str(error)) from None
        if gate.loaded:
            manager.served_model_name = gate.loaded  # SGLang calls a model that was loaded later by its path
        return await show()

    app.add_api_route(PATH, show, methods=["GET"])
    app.add_api_route(PATH, auth_level(AuthLevel.ADMIN_OPTIONAL)(change), methods=["POST"])
    wrap(app, Gatekeeper, gate=gate)


class Gatekeeper:
    """ASGI middleware in front of what the model answers."""

    def __init__(self, app: Application, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATES:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        reason = self._gate.refuses(headers)
        if reason is not None:
            error = {"message": reason, "type": "misdirected", "code": MISDIRECTED}
            await answer(send, MISDIRECTED, error, x_fair_loaded=self._gate.loaded)
            return
        if headers.get(HEADER_PROBE) == self._gate.run:
            scope[SCOPE_KEY] = self._gate
            await self._app(scope, receive, send)
            return
        self._gate.inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._gate.inside -= 1
