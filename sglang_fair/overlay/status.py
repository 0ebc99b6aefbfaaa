"""`/fair` on a replica: GET reads from the scheduler the active policy and each client's counter and service;
POST changes the clients' weights in it. `/metrics` is described in `metrics.py`. And `/ready`, which says also when the
scheduler last moved (`heartbeat.py`):

    {"in_flight": 3, "schedulers": [{"ran_s_ago": 0.2, "passed_s_ago": 4.1, "computes": true}]}

    curl -X POST http://127.0.0.1:30000/fair -d '{"client_weights": {"gold": 2}}'

The change travels as a request of SGLang's own to set internal state, which reaches every data-parallel rank.
Such a request carries numbers under names, so each client's weight is one number with the client in its name.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any

from sglang_fair.overlay import config, explain, metrics, model_gate
from sglang_fair.overlay.heartbeat import Heartbeats

WEIGHT_PREFIX = "sglang_fair.client_weight:"
"""Before a client's name: the name of its weight among the numbers of a request to set internal state."""


def to_settings(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights as SGLang carries them to its schedulers."""
    return {WEIGHT_PREFIX + client: weight for client, weight in weights.items()}


def from_settings(settings: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """The weights in `settings`, and what of it is SGLang's."""
    weights = {
        name.removeprefix(WEIGHT_PREFIX): value
        for name, value in settings.items()
        if name.startswith(WEIGHT_PREFIX)
    }
    return weights, {name: value for name, value in settings.items() if not name.startswith(WEIGHT_PREFIX)}


def add_routes(manager: Any) -> None:
    """Add the routes to SGLang's HTTP application, if this process serves HTTP.

    The tokenizer manager lives in the process that serves; an in-process `Engine` has no application.
    """
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is None or any(getattr(route, "path", None) == "/fair" for route in server.app.routes):
        return
    from fastapi import HTTPException, Request
    from sglang.srt.managers.io_struct import SetInternalStateReq
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def fair() -> Any:
        states = await manager.get_internal_state()
        reports = [state["fair"] for state in states]
        return reports[0] if len(reports) == 1 else {"data_parallel": reports}

    async def change(request: Request) -> Any:
        try:
            weights = config.requested_weights(await request.json())
        except ValueError as error:  # not JSON, or not what can be asked
            raise HTTPException(400, str(error)) from None
        settings = SetInternalStateReq(server_args=to_settings(weights))
        if not all(await manager.set_internal_state(settings)):
            raise HTTPException(500, "a scheduler refused the weights")
        return await fair()

    page = metrics.Page(manager)

    async def show_metrics(request: Request) -> Any:
        return await page.answer(request.headers.get("authorization"))

    server.app.add_api_route("/fair", fair, methods=["GET"])
    server.app.add_api_route("/fair", auth_level(AuthLevel.ADMIN_OPTIONAL)(change), methods=["POST"])
    server.app.add_api_route("/metrics", show_metrics, methods=["GET"])
    explain.add_route(manager)
    _add_heartbeats(server.app, manager)


def _add_heartbeats(app: Any, manager: Any) -> None:
    """Give SGLang's answer to GET /ready, which has none, a body."""
    from fastapi import Response
    from fastapi.responses import JSONResponse
    from fastapi.routing import APIRoute

    routes, heartbeats = app.router.routes, Heartbeats()
    at = next(at for at, route in enumerate(routes) if getattr(route, "path", None) == "/ready")
    is_ready = routes[at].endpoint

    async def ready() -> Response:
        status = (await is_ready()).status_code
        if model_gate.is_changing(manager) and manager.is_healthy():
            # SGLang says 503 while it is paused. Between two models that is no reason to take the replica for sick: the
            # router, which has ordered it, sends it nothing, and gateways would refuse the first requests behind it.
            status = 200
        schedulers = heartbeats.read(time.monotonic())
        body = {"in_flight": len(manager.rid_to_state), "schedulers": schedulers}
        return JSONResponse(body, status)

    routes[at] = APIRoute("/ready", ready, methods=["GET"])
