"""Change a running cluster: `GET`, `POST /workers` and `DELETE /workers/NAME`, `POST /swap`, `GET` and `POST /limits`,
`DELETE /quarantine/CLIENT`.

A replica that is added gets requests from the router's next decision on. One that is drained gets no new ones and
is forgotten when its last has ended. Whoever may call this can send everybody's prompts to an address of their
choice, so it is guarded (`guard`). The limits of throttling hold for all gateways, and in a router that is restarted
as it was started before.
"""

from collections.abc import Iterable
from itertools import count
from typing import Annotated, Any, Literal, TypeVar

import aiohttp
import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.client import RouterGone
from router.events import URL_PATTERN, ZMQ_PATTERN, Capacity, Refuse, WorkerDrain, Workers, WorkerUp
from router.gateway.errors import RETRY_AFTER_S, ApiError, describe
from router.gateway.guard import Guard, behind_proxy
from router.gateway.operations import Handler, Operation
from router.gateway.pages import json_response
from router.gateway.replicas.context import names_of
from router.gateway.replicas.pool import Replicas
from router.gateway.request.names import Names, model_not_found
from router.gateway.routing.links import Links
from router.throttling import NO_THROTTLE
from sglang_fair.core.throttle import HIGH, LOW, MOST_CALLS

MAX_BODY_BYTES = 4096
MAX_LIMITS_BYTES = 1 << 20
ANSWER_TIMEOUT_S = 5.0

Sent = TypeVar("Sent", bound=msgspec.Struct)

NAME_PATTERN = "^[A-Za-z0-9._:-]{1,64}$"


def _matching(pattern: str, description: str | None = None) -> Meta:
    """Of texts that match the whole of `pattern`, which ends in $. In Python $ would let a line break follow."""
    return Meta(
        pattern=pattern.removesuffix("$") + r"\Z",
        description=description,
        extra_json_schema={"pattern": pattern},
    )


class NewWorker(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /workers`. A `name` is made up where none is given; `replay` needs `kv`."""

    url: Annotated[str, _matching(URL_PATTERN)]
    name: Annotated[str, _matching(NAME_PATTERN)] | None = None
    kv: Annotated[str, _matching(ZMQ_PATTERN, "ZMQ address of its KV events.")] | None = None
    replay: Annotated[str, _matching(ZMQ_PATTERN, "ZMQ address that replays them.")] | None = None
    load: (
        Annotated[str, _matching(ZMQ_PATTERN, "ZMQ address at which it says how much it has to do.")] | None
    ) = None
    capacity: Capacity = 1.0
    model: Annotated[
        str | None,
        Meta(
            description="Which of the served models it has; where there are several and none is named, that of its "
            "own name at its /v1/models."
        ),
    ] = None


class WorkerState(msgspec.Struct):
    """A replica, as the router knows it. One that is "gone" has only a name."""

    name: str
    state: Literal["up", "draining", "sick", "gone"]
    url: str | UnsetType = UNSET
    kv: str | UnsetType | None = UNSET
    replay: str | UnsetType | None = UNSET
    capacity: Capacity | UnsetType = UNSET
    model: str | UnsetType = UNSET


class NewSwap(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /swap`: this replica is to load this model."""

    worker: Annotated[str, _matching(NAME_PATTERN)]
    model: Annotated[str, Meta(min_length=1, max_length=200)]


class SwapState(msgspec.Struct):
    """How far a replica is with that: it serves, empties, or loads; or that is unknown."""

    name: str
    phase: str = "unknown"
    model: Annotated[str, Meta(description="What it has, or had until it began to load.")] = ""
    target: Annotated[str, Meta(description="What it is to load.")] = ""
    swaps: int = 0
    failed: int = 0
    error: Annotated[str, Meta(description="Of its last swap, if that failed.")] = ""


class WorkerList(msgspec.Struct):
    """`GET /workers`."""

    workers: list[WorkerState]


PressurePart = Annotated[float, Meta(gt=0, le=1)]


class NewLimits(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /limits`: it takes the place of all that held before."""

    user: (
        Annotated[
            int,
            Meta(ge=1, le=MOST_CALLS, description="Calls a minute of one client, over all applications."),
        ]
        | None
    ) = None
    apps: Annotated[
        dict[str, Annotated[int, Meta(ge=1, le=MOST_CALLS)]],
        Meta(description='The same of one client in an application; "*" is each one that is not named.'),
    ] = {}
    app_total: Annotated[bool, Meta(description="An application's limit is of all its clients together.")] = (
        False
    )
    counts: Annotated[
        Literal["accepted", "arrivals"], Meta(description="Which calls count: those let in, or all.")
    ] = "accepted"
    high: Annotated[PressurePart, Meta(description="Pressure from which a replica is overloaded.")] = HIGH
    low: Annotated[PressurePart, Meta(description="And below which it no longer is; less than `high`.")] = LOW


class ThrottleReport(msgspec.Struct):
    """How the router throttles: its rules, the pressure, and whom it refuses."""

    throttle: dict[str, Any]


DocumentedNewWorker = Annotated[
    NewWorker,
    Meta(
        extra_json_schema={
            "anyOf": [
                {"properties": {"replay": {"type": "null"}}},
                {"required": ["kv"], "properties": {"kv": {"type": "string"}}},
            ]
        }
    ),
]
"""With the rule that `replay` needs `kv`, which a type cannot say."""


class WorkerName(msgspec.Struct):
    """Which replica."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN)]


class ClientName(msgspec.Struct):
    """Which client, or tenant."""

    client: Annotated[str, Meta(min_length=1, max_length=1_000)]


class Lifted(msgspec.Struct):
    """The client is in quarantine no more."""

    client: str


ADMIN_ERRORS = (400, 401, 403, 404, 409, 413, 503)
SWAP = Operation(
    "POST", "/swap", "Have a replica load another model.", SwapState, ADMIN_ERRORS, 202, body=NewSwap
)
LIMITS = Operation("GET", "/limits", "How calls are throttled.", ThrottleReport, ADMIN_ERRORS)
SET_LIMITS = Operation(
    "POST", "/limits", "Replace the limits of throttling.", ThrottleReport, ADMIN_ERRORS, body=NewLimits
)
WORKERS = Operation("GET", "/workers", "The replicas.", WorkerList, ADMIN_ERRORS)
ADD = Operation(
    "POST", "/workers", "Add a replica.", WorkerState, ADMIN_ERRORS, 201, body=DocumentedNewWorker
)
DRAIN = Operation(
    "DELETE",
    "/workers/{name}",
    "Drain a replica, then forget it.",
    WorkerState,
    ADMIN_ERRORS,
    where=WorkerName,
)
LIFT = Operation(
    "DELETE",
    "/quarantine/{client}",
    "End the quarantine of a client whose requests have ended replicas.",
    Lifted,
    ADMIN_ERRORS,
    where=ClientName,
    has_slashes=True,
)
OPERATIONS = (SWAP, LIMITS, SET_LIMITS, WORKERS, ADD, DRAIN, LIFT)


def routes(link: Links, replicas: Replicas, names: Names, guard: Guard) -> list[Route]:
    """The routes, of a gateway that serves the models `names`. They raise `ApiError`."""

    async def workers(_: Request) -> Response:
        known = await link.workers()
        return json_response(WorkerList([_state(known, up.worker) for up in known.workers]))

    async def add(request: Request) -> Response:
        asked = await _sent(request, NewWorker, "worker")
        if asked.replay is not None and asked.kv is None:
            raise ApiError(400, "`replay` is of no use without `kv`", code="invalid_worker")
        await _check_ready(replicas, asked.url)
        known = {up.worker: up for up in (await link.workers()).workers}
        model = await _model(replicas, asked, names, known.values())
        name = asked.name or next(free for n in count() if (free := f"r{n}") not in known)
        owner = next((up.worker for up in known.values() if up.url == asked.url and up.worker != name), None)
        if owner is not None:
            raise ApiError(409, f"{asked.url} is worker {owner}", code="worker_exists")
        if name in known and known[name].url != asked.url:
            raise ApiError(409, f"worker {name} is at {known[name].url}", code="worker_exists")
        models = (model,) if model else ()
        link.order(
            WorkerUp(name, asked.url, asked.kv, asked.replay, asked.capacity, asked.load, models, model)
        )
        return json_response(_state(await link.workers(), name), 201)

    async def drain(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in {up.worker for up in (await link.workers()).workers}:
            raise ApiError(404, f"there is no worker {name[:100]!r}", code="worker_not_found")
        link.order(WorkerDrain(name))
        return json_response(_state(await link.workers(), name))

    async def limits(_: Request) -> Response:
        return json_response(_throttle(await link.snapshot()))

    async def set_limits(request: Request) -> Response:
        asked = await _sent(request, NewLimits, "limits", MAX_LIMITS_BYTES)
        answer = await link.set_limits(msgspec.json.encode(asked))
        if isinstance(answer, Refuse):
            raise ApiError(409 if answer.code == NO_THROTTLE else 400, answer.reason, code=answer.code)
        return json_response(_throttle(answer.state))

    async def lift(request: Request) -> Response:
        client = request.path_params["client"]
        if not await link.lift(client):
            raise ApiError(404, f"{client[:100]!r} is in no quarantine", code="not_quarantined")
        return json_response(Lifted(client))

    async def swap(request: Request) -> Response:
        asked = await _sent(request, NewSwap, "swap")
        answer = await link.swap(asked.worker, asked.model)
        if isinstance(answer, Refuse):
            raise ApiError(409, answer.reason, code="cannot_swap")
        swaps: Any = answer.state.get("swaps", {})
        found: dict[str, Any] = swaps.get(asked.worker, {})
        known = {key: found[key] for key in SwapState.__struct_fields__ if key != "name" and key in found}
        return json_response(SwapState(asked.worker, **known), 202)

    def guarded(handle: Handler) -> Handler:
        async def handler(request: Request) -> Response:
            guard.check(request)
            try:
                return await handle(request)
            except RouterGone as error:
                raise ApiError(
                    503, str(error), code="router_unavailable", retry_after_s=RETRY_AFTER_S
                ) from error

        return handler

    handlers = (swap, limits, set_limits, workers, add, drain, lift)
    return [
        operation.route(guarded(handle), behind_proxy())
        for operation, handle in zip(OPERATIONS, handlers, strict=True)
    ]


async def _sent(request: Request, kind: type[Sent], what: str, most_bytes: int = MAX_BODY_BYTES) -> Sent:
    try:
        return msgspec.json.decode(await read_body(request, most_bytes), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        article = "" if what == "limits" else "a "
        raise ApiError(400, f"not {article}{what}: {error}", code=f"invalid_{what}") from error


async def read_body(request: Request, most_bytes: int = MAX_BODY_BYTES) -> bytes:
    """A body of at most `most_bytes`. Raises `ApiError`."""
    raw = b""
    async for piece in request.stream():
        raw += piece
        if len(raw) > most_bytes:
            raise ApiError(413, f"the body is larger than {most_bytes} bytes", code="body_too_large")
    return raw


async def _check_ready(replicas: Replicas, url: str) -> None:
    try:
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        async with replicas.session.get(f"{url.rstrip('/')}/ready", timeout=timeout) as response:
            if response.status != 503:
                return
            reason = "it answers 503"
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        reason = describe(error)
    raise ApiError(400, f"{url} is not ready: {reason}", code="worker_not_ready")


async def _model(replicas: Replicas, asked: NewWorker, names: Names, known: Iterable[WorkerUp]) -> str:
    """Which of `names` a new replica has; "": the only one, and of those that are `known` nobody was told more."""
    if asked.model is not None:
        if asked.model not in names:
            raise model_not_found(asked.model)
        return asked.model
    if len(names) == 1:
        return names.first if any(up.loaded for up in known) else ""
    said = [one for one in await _models_of(replicas, asked.url) if one in names]
    if len(said) != 1:
        served = ", ".join(names)
        raise ApiError(400, f"say in `model` which one {asked.url} has: {served}", code="invalid_worker")
    return said[0]


async def _models_of(replicas: Replicas, url: str) -> list[str]:
    """What a replica calls its models; none if it does not say."""
    try:
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        async with replicas.session.get(f"{url.rstrip('/')}/v1/models", timeout=timeout) as response:
            return names_of(await response.read()) if response.status == 200 else []
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return []


def _throttle(state: dict[str, Any]) -> ThrottleReport:
    """Of a router's snapshot."""
    return ThrottleReport(state.get("throttle", {}))


def _state(workers: Workers, name: str) -> WorkerState:
    up = next((up for up in workers.workers if up.worker == name), None)
    if up is None:
        return WorkerState(name, "gone")
    if name in workers.draining:
        state: Literal["draining", "sick", "up"] = "draining"
    else:
        state = "sick" if name in workers.sick else "up"
    return WorkerState(name, state, up.url, up.kv, up.replay, up.capacity, up.loaded)
