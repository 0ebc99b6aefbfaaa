"""What the gateway itself tells: its model, its health, its state."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.client import RouterGone
from router.gateway.errors import ApiError
from router.gateway.explain import Explained, Latest
from router.gateway.gateway import Gateway
from router.gateway.guard import behind_proxy
from router.gateway.metrics import CONTENT_TYPE
from router.gateway.operations import AnyId, Operation, numbered
from router.gateway.request.names import model_not_found
from router.gateway.request.schema import NOT_STORED
from router.gateway.usage import UsageReport

MOST_LATEST = 1000


class Model(msgspec.Struct):
    """A model, as OpenAI describes one and as Anthropic does. When it was made is not known."""

    id: str
    display_name: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    created: int = 0
    created_at: str = "1970-01-01T00:00:00Z"
    lifecycle: Literal["active"] = "active"
    owned_by: str = "sglang-fair"


class Models(msgspec.Struct):
    """`GET /v1/models`: all of them, in one page."""

    data: list[Model]
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"
    has_more: Literal[False] = False


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


class LatestQuery(msgspec.Struct):
    """What `GET /requests` may be asked."""

    client: str | None = None
    limit: Annotated[int, numbered(1, MOST_LATEST)] = 100


class StatusReport(msgspec.Struct):
    """`GET /status`: the router's snapshot and, under `gateway`, its counters, of all its processes.

    While no router answers it holds only what this process knows itself.
    """

    workers: dict[str, Any]
    in_flight: int
    gateway: dict[str, Any]


MODELS = Operation("GET", "/v1/models", "The models that the sender may ask for.", Models, (401,))
ONE_MODEL = Operation(
    "GET", "/v1/models/{id}", "A model by its name.", Model, (401, 404), where=AnyId, has_slashes=True
)
USAGE = Operation(
    "GET", "/v1/usage", "What the sender has had, what it may have, and what is left.", UsageReport, (401,)
)
STORED = tuple(
    Operation(method, path, f"{what}, of which there are none.", errors=(401, 404), where=AnyId)
    for method, path, what in (
        ("GET", "/v1/responses/{id}", "A stored response"),
        ("DELETE", "/v1/responses/{id}", "Delete a stored response"),
        ("POST", "/v1/responses/{id}/cancel", "Cancel a response in the background"),
    )
)
HEALTH = Operation(
    "GET",
    "/health",
    "Whether requests can be placed.",
    HealthReport,
    others={503: ("requests cannot be placed", HealthReport)},
)
ALIVE = Operation("GET", "/healthz", "Whether the process answers.", Liveness)
READY = Operation(
    "GET",
    "/readyz",
    "Whether requests may be sent here.",
    Readiness,
    others={503: ("requests cannot be placed, or it is about to end", Readiness)},
)
EXPLAIN = Operation(
    "GET",
    "/explain/{id}",
    "Why a request was served as it was: what gateway, router and replica remember. By the id in its answer, "
    "x-request-id or x-fair-request-id; a tenant sees its own.",
    Explained,
    (401, 403, 404),
    where=AnyId,
    has_slashes=True,
)
LATEST = Operation(
    "GET",
    "/requests",
    "The requests that came last to this process, the latest first.",
    Latest,
    (400, 401, 403),
    query=LatestQuery,
)
STATUS = Operation(
    "GET", "/status", "The router's snapshot, and this gateway's counters.", StatusReport, (401, 403)
)
METRICS = Operation(
    "GET", "/metrics", "Numbers for Prometheus.", content={"text/plain": str}, errors=(401, 403)
)
OPERATIONS = (
    *(MODELS, ONE_MODEL, USAGE, *STORED, HEALTH, ALIVE, READY, EXPLAIN),
    *(LATEST, STATUS, METRICS),
)


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
        return [Model(name, name) for name in gateway.models(request.headers, request.scope.get("client"))]

    async def models(request: Request) -> Response:
        found = allowed(request)
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        return json_response(Models(found, first, last))

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
        ALIVE.route(alive),
        READY.route(ready),
        MODELS.route(models),
        ONE_MODEL.route(one_model),
        USAGE.route(usage),
        *(operation.route(stored) for operation in STORED),
        HEALTH.route(health),
        *([] if gateway.directory is None else [EXPLAIN.route(explain)]),
    ]


def private(gateway: Gateway, check: Callable[[Request], None] = lambda _: None) -> list[Route]:
    """The routes for operators. `check` raises `ApiError` for everybody else."""

    async def explain(request: Request) -> Response:
        check(request)
        return json_response(await gateway.explainer.explain(request.path_params["id"], None))

    async def latest(request: Request) -> Response:
        check(request)
        asked = LATEST.asked(request, LatestQuery)
        return json_response(gateway.explainer.latest(asked.client, asked.limit))

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
        return JSONResponse(
            {**snapshot, "batches": gateway.batches, "gateway": gateway.state() | {"fallback": is_fallback}}
        )

    async def metrics(request: Request) -> Response:
        check(request)
        return Response(await gateway.metrics.page(), headers={"content-type": CONTENT_TYPE})

    return [
        STATUS.route(status, behind_proxy()),
        METRICS.route(metrics, behind_proxy()),
        LATEST.route(latest, behind_proxy()),
        EXPLAIN.route(explain, behind_proxy()),
    ]


def json_response(content: msgspec.Struct, status: int = 200) -> Response:
    """An answer with `content` as its JSON body."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")
