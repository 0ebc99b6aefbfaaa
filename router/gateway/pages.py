"""What the gateway itself tells: its models, its health, its state."""

from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.client import RouterGone
from router.gateway.explain import Explained, Latest
from router.gateway.gateway import Gateway
from router.gateway.metrics import CONTENT_TYPE
from router.gateway.operations import AnyId, Operation, json_response, numbered
from router.gateway.request.call import model_not_found
from router.gateway.usage import UsageReport

MOST_LATEST = 1000


class Model(msgspec.Struct):
    """A model, as OpenAI describes one, Anthropic, and SGLang, which adds `root` and `max_model_len`. When it was made
    is not known."""

    id: str
    display_name: str
    root: str
    max_model_len: int | None
    """The longest prompt, where replicas have said it."""
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


class Public:
    """The answers to clients."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @Operation("GET", "/healthz", "Whether the process answers.", Liveness)
    async def alive(self, _: Request) -> Liveness:
        return Liveness()

    @Operation(
        "GET",
        "/readyz",
        "Whether requests may be sent here.",
        Readiness,
        others={503: ("requests cannot be placed, or it is about to end", Readiness)},
    )
    async def ready(self, _: Request) -> Readiness | Response:
        if self._gateway.is_ending:
            return json_response(Readiness("ending"), 503)
        if self._gateway.link.alive or self._gateway.fleet.workers:
            return Readiness("ready")
        return json_response(Readiness("no router"), 503)

    @Operation(
        "GET",
        "/health",
        "Whether requests can be placed.",
        HealthReport,
        others={503: ("requests cannot be placed", HealthReport)},
    )
    async def health(self, _: Request) -> HealthReport | Response:
        names = list(self._gateway.names)
        if self._gateway.link.alive:
            return HealthReport("ok", names[0], names)
        if self._gateway.fleet.workers:
            return HealthReport("fallback", names[0], names)
        return json_response(HealthReport("no router", names[0], names), 503)

    @Operation("GET", "/v1/models", "The models that the sender may ask for.", Models, (401,))
    async def models(self, request: Request) -> Models:
        found = self._allowed(request)
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        return Models(found, first, last)

    @Operation(
        "GET", "/v1/models/{id}", "A model by its name.", Model, (401, 404), where=AnyId, has_slashes=True
    )
    async def model(self, request: Request) -> Model:
        asked = request.path_params["id"]
        found = next((model for model in self._allowed(request) if model.id == asked), None)
        if found is None:
            raise model_not_found(asked)
        return found

    @Operation(
        "GET",
        "/v1/usage",
        "What the sender has had, what it may have, and what is left.",
        UsageReport,
        (401,),
    )
    async def usage(self, request: Request) -> UsageReport:
        return await self._gateway.usage.of(
            self._gateway.identity.of(request.headers, request.scope.get("client"))
        )

    def _allowed(self, request: Request) -> list[Model]:
        gateway = self._gateway
        names = gateway.models(request.headers, request.scope.get("client"))
        models = {name: gateway.names.model_of(name) or name for name in names}
        return [
            Model(name, name, model, gateway.replicas.context_tokens(model)) for name, model in models.items()
        ]


class OfTenants:
    """Answers about a tenant's own requests. Where there are no tenants, operators alone get them."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @EXPLAIN
    async def explain(self, request: Request) -> Explained:
        known = self._gateway.identity.of(request.headers, request.scope.get("client"))
        return await self._gateway.explainer.explain(request.path_params["id"], known.caller.client)


class Private:
    """The answers to operators."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @Operation(
        "GET", "/status", "The router's snapshot, and this gateway's counters.", StatusReport, (401, 403)
    )
    async def status(self, _: Request) -> Response:
        gateway = self._gateway
        try:
            snapshot, is_fallback = await gateway.link.snapshot(), False
        except RouterGone as error:
            is_fallback = True
            snapshot = {
                "placement": "fallback",
                "router": str(error),
                "workers": gateway.fleet.view(gateway.replicas.sick()),
                "in_flight": sum(gateway.fleet.in_flight.values()),
            }
        return JSONResponse(
            {**snapshot, "batches": gateway.batches, "gateway": gateway.state() | {"fallback": is_fallback}}
        )

    @Operation("GET", "/metrics", "Numbers for Prometheus.", content={"text/plain": str}, errors=(401, 403))
    async def metrics(self, _: Request) -> Response:
        return Response(await self._gateway.metrics.page(), headers={"content-type": CONTENT_TYPE})

    @LATEST
    async def latest(self, request: Request) -> Latest:
        asked = LATEST.asked(request, LatestQuery)
        return self._gateway.explainer.latest(asked.client, asked.limit)

    @EXPLAIN
    async def explain(self, request: Request) -> Explained:
        return await self._gateway.explainer.explain(request.path_params["id"], None)
