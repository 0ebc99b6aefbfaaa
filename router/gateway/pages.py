"""What the gateway itself tells: its model, its health, its state."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.gateway.errors import ApiError
from router.gateway.gateway import Gateway
from router.gateway.guard import behind_proxy
from router.gateway.metrics import CONTENT_TYPE
from router.gateway.request.names import model_not_found
from router.gateway.request.schema import NOT_STORED
from router.gateway.routing.link import RouterGone

EXPLAIN = "/explain/{id:path}"
MOST_LATEST = 1000


class Model(msgspec.Struct):
    """A model, as OpenAI describes one."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "sglang-fair"


class Models(msgspec.Struct):
    """`GET /v1/models`."""

    data: list[Model]
    object: Literal["list"] = "list"


class HealthReport(msgspec.Struct):
    """`GET /health`. "fallback": no router answers, and the gateway places requests by itself."""

    status: Literal["ok", "fallback", "no router"]
    model: str
    """The first of `models`."""
    models: list[str]


class Readiness(msgspec.Struct):
    """`GET /readyz`. "ending": it has been told to stop, and still answers for a while."""

    status: Literal["ready", "no router", "ending"]


class Liveness(msgspec.Struct):
    """`GET /healthz`."""

    status: Literal["ok"] = "ok"


class StatusReport(msgspec.Struct):
    """`GET /status`: the router's snapshot and, under `gateway`, its counters, of all its processes.

    While no router answers it holds only what this process knows itself.
    """

    workers: dict[str, Any]
    in_flight: int
    gateway: dict[str, Any]


def public(gateway: Gateway) -> list[Route]:
    """The routes for clients. They raise `ApiError`. Tenants are told of their own requests; where there are none,
    nobody can be told from others, and only operators are told."""

    async def usage(request: Request) -> Response:
        known = gateway.identity.of(request.headers, request.scope.get("client"))
        return json_response(await gateway.usage.of(known))

    async def explain(request: Request) -> Response:
        client = gateway.identity.of(request.headers, request.scope.get("client")).caller.client
        return json_response(await gateway.explainer.explain(request.path_params["id"], client))

    def allowed(request: Request) -> list[Model]:
        return [Model(name) for name in gateway.models(request.headers, request.scope.get("client"))]

    async def models(request: Request) -> Response:
        return json_response(Models(allowed(request)))

    async def one_model(request: Request) -> Response:
        asked = request.path_params["id"]
        found = next((model for model in allowed(request) if model.id == asked), None)
        if found is None:
            raise model_not_found(asked)
        return json_response(found)

    async def stored(request: Request) -> Response:
        gateway.identity.of(request.headers, request.scope.get("client"))
        raise ApiError(404, f"there is none: {NOT_STORED.partition(':')[0]}", code="not_stored")

    async def health(_: Request) -> Response:
        names = list(gateway.names)
        if gateway.link.alive:
            return json_response(HealthReport("ok", names[0], names))
        if gateway.fleet.workers:
            return json_response(HealthReport("fallback", names[0], names))
        return json_response(HealthReport("no router", names[0], names), 503)

    async def alive(_: Request) -> Response:
        return json_response(Liveness())

    async def ready(_: Request) -> Response:
        if gateway.is_ending:
            return json_response(Readiness("ending"), 503)
        if gateway.link.alive or gateway.fleet.workers:
            return json_response(Readiness("ready"))
        return json_response(Readiness("no router"), 503)

    return [
        Route("/healthz", alive, methods=["GET"]),
        Route("/readyz", ready, methods=["GET"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{id:path}", one_model, methods=["GET"]),
        Route("/v1/usage", usage, methods=["GET"]),
        Route("/v1/responses/{id}", stored, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/cancel", stored, methods=["POST"]),
        Route("/health", health, methods=["GET"]),
        *([] if gateway.directory is None else [Route(EXPLAIN, explain, methods=["GET"])]),
    ]


def private(gateway: Gateway, check: Callable[[Request], None] = lambda _: None) -> list[Route]:
    """The routes for operators. `check` raises `ApiError` for everybody else."""

    async def explain(request: Request) -> Response:
        check(request)
        return json_response(await gateway.explainer.explain(request.path_params["id"], None))

    async def latest(request: Request) -> Response:
        check(request)
        asked = request.query_params.get("limit", "100")
        if not (asked.isascii() and asked.isdecimal() and len(asked) < 5 and 1 <= int(asked) <= MOST_LATEST):
            raise ApiError(400, f"limit is a number from 1 to {MOST_LATEST}", code="invalid_limit")
        return json_response(gateway.explainer.latest(request.query_params.get("client"), int(asked)))

    async def status(request: Request) -> Response:
        check(request)
        try:
            snapshot, is_fallback = await gateway.link.snapshot(), False
        except RouterGone as error:
            is_fallback = True
            snapshot = {
                "placement": "fallback",
                "router": str(error),
                "workers": gateway.fleet.view(gateway.replicas.health.sick()),
                "in_flight": sum(gateway.fleet.in_flight.values()),
            }
        return JSONResponse({**snapshot, "gateway": gateway.state() | {"fallback": is_fallback}})

    async def metrics(request: Request) -> Response:
        check(request)
        return Response(await gateway.metrics.page(), headers={"content-type": CONTENT_TYPE})

    return [
        Route("/status", status, methods=["GET"], middleware=behind_proxy()),
        Route("/metrics", metrics, methods=["GET"], middleware=behind_proxy()),
        Route("/requests", latest, methods=["GET"], middleware=behind_proxy()),
        Route(EXPLAIN, explain, methods=["GET"], middleware=behind_proxy()),
    ]


def json_response(content: msgspec.Struct, status: int = 200) -> Response:
    """An answer with `content` as its JSON body."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")
