"""What a replica says of itself over HTTP, and what an operator changes in it.

    GET  /fair         from the scheduler: the active policy, each client's counter and service
    POST /fair         {"client_weights": {"gold": 2}} changes the clients' weights in it
    GET  /explain/ID   what it remembers of the requests with this id (`core.record`); `?client=acme`: of one client
    GET  /metrics      `metrics`
    GET  /ready        says also when the schedulers last moved (`heartbeat`):
                       {"in_flight": 3, "schedulers": [{"ran_s_ago": 0.2, "passed_s_ago": 4.1, "computes": true}]}

Questions and changes travel as requests of SGLang's own for the scheduler's state, which reach every data-parallel
rank. One to set it carries numbers under names, so each client's weight is one number with the client in its name; one
to get it has an id that SGLang does not use, and in which stands what is to be explained.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

from sglang_fair.common.record import MOST_NAME
from sglang_fair.overlay import config, metrics, model_gate
from sglang_fair.overlay.heartbeat import Heartbeats

EXPLAIN = "sglang_fair.explain:"
"""Before the JSON in the id of a question about requests."""

EXPLAINED = "explained"

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


def question(rid: str | None) -> tuple[str, str | None] | None:
    """Id and client of the requests that a question for the scheduler's state is about; None if it is another one."""
    if rid is None or not rid.startswith(EXPLAIN):
        return None
    id, client = json.loads(rid.removeprefix(EXPLAIN))
    return id, client


def add_routes(app: Any, manager: Any) -> None:
    """Add the routes to SGLang's HTTP application."""
    from fastapi import HTTPException, Request
    from sglang.srt.managers.io_struct import GetInternalStateReq, SetInternalStateReq
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

    async def explain(id: str, client: str | None = None) -> Any:
        manager.auto_create_handle_loop()
        asked = GetInternalStateReq(rid=EXPLAIN + json.dumps([id[:MOST_NAME], client]))
        answers = await manager.get_internal_state_communicator(asked)
        found = [request for answer in answers for request in answer.internal_state[EXPLAINED]]
        if not found:
            raise HTTPException(404, "no such request is remembered here")
        now_s = time.time()
        return {"requests": [{**one, "came_at_s": now_s - one["came_s_ago"]} for one in found]}

    page = metrics.Page(manager)

    async def show_metrics(request: Request) -> Any:
        return await page.answer(request.headers.get("authorization"))

    app.add_api_route("/fair", fair, methods=["GET"])
    app.add_api_route("/fair", auth_level(AuthLevel.ADMIN_OPTIONAL)(change), methods=["POST"])
    app.add_api_route("/explain/{id:path}", explain, methods=["GET"])
    app.add_api_route("/metrics", show_metrics, methods=["GET"])
    _add_heartbeats(app, manager)


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
