"""Change a running cluster: `GET`, `POST /workers` and `DELETE /workers/NAME`, `POST /swap`, `GET` and `POST /limits`,
`POST /flush_cache`, `DELETE /quarantine/CLIENT`, and with tenants `PATCH /tenants/NAME`.

A replica that is added gets requests from the router's next decision on. One that is drained gets no new ones and
is forgotten when its last has ended. Whoever may call this can send everybody's prompts to an address of their
choice, so it is guarded (`guard`). The limits of throttling hold for all gateways, and in a router that is restarted
as it was started before. A tenant's weight is written into the tenants' file, so every gateway that reads the file
obeys it, and a restart forgets nothing.
"""

import asyncio
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request

from router.events import URL_PATTERN, ZMQ_PATTERN, Capacity, Refuse, WorkerDrain, Workers, WorkerUp
from router.gateway.errors import ApiError, check, describe, of_replica
from router.gateway.operations import Operation, numbered, read_body
from router.gateway.replicas.health import models_in
from router.gateway.replicas.pool import ANSWER_TIMEOUT_S, Replicas
from router.gateway.request.call import Names, model_not_found
from router.gateway.routing.links import Links
from router.throttling import NO_THROTTLE
from sglang_fair.common.weights import MOST_WEIGHT
from sglang_fair.core import throttle
from sglang_fair.settings.setting import SettingError
from sglang_fair.tenants import edit
from sglang_fair.tenants.model import NAME_PATTERN as TENANT_PATTERN

MAX_BODY_BYTES = 4096
MAX_LIMITS_BYTES = 1 << 20
MOST_FLUSH_S = 600

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


REPLAY_NEEDS_KV = {
    "anyOf": [
        {"properties": {"replay": {"type": "null"}}},
        {"required": ["kv"], "properties": {"kv": {"type": "string"}}},
    ]
}
"""What a type cannot say."""


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


class NewLimits(throttle.Rules, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /limits`: it takes the place of all that held before. `user`: calls a minute of one client, in
    all applications. `apps`: of one client in an application; "*" is each one that is not named. `app_total`: an
    application's limit is of all its clients together. `counts`: calls that were let in, or all. A replica is
    overloaded from pressure `high` until below `low`, which is less."""

    def __post_init__(self) -> None:
        """Which of the two is less is for the router to check: where nothing is throttled, that is the answer."""


class FlushQuery(msgspec.Struct):
    """How long a replica may wait until it has nothing to do; busy ones do not flush."""

    timeout: Annotated[float, numbered(0, MOST_FLUSH_S)] = 0.0


class Flushed(msgspec.Struct):
    """All replicas whose caches are empty now."""

    workers: list[str]


class ThrottleReport(msgspec.Struct):
    """How the router throttles: its rules, the pressure, and whom it refuses."""

    throttle: dict[str, Any]


class WorkerName(msgspec.Struct):
    """Which replica."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN)]


class ClientName(msgspec.Struct):
    """Which client, or tenant."""

    client: Annotated[str, Meta(min_length=1, max_length=1_000)]


class Lifted(msgspec.Struct):
    """The client is in quarantine no more."""

    client: str


class TenantName(msgspec.Struct):
    """Which tenant."""

    name: Annotated[str, Meta(pattern=TENANT_PATTERN)]


class TenantChange(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `PATCH /tenants/NAME`."""

    weight: Annotated[
        float, Meta(ge=1 / MOST_WEIGHT, le=MOST_WEIGHT, description="Its share beside the others'.")
    ]


class TenantState(msgspec.Struct):
    """A tenant, as the file has it."""

    name: str
    weight: float


ERRORS = (400, 401, 403, 404, 409, 413, 503)


class Admin:
    """The answers, of a gateway that serves the models `names`."""

    def __init__(self, link: Links, replicas: Replicas, names: Names) -> None:
        self._link = link
        self._replicas = replicas
        self._names = names

    @Operation("GET", "/workers", "The replicas.", WorkerList, ERRORS)
    async def workers(self, _: Request) -> WorkerList:
        known = await self._link.workers()
        return WorkerList([_state(known, up.worker) for up in known.workers])

    @Operation(
        "POST", "/workers", "Add a replica.", WorkerState, ERRORS, 201,
        body=Annotated[NewWorker, Meta(extra_json_schema=REPLAY_NEEDS_KV)],
    )  # fmt: skip
    async def add(self, request: Request) -> WorkerState:
        asked = await _sent(request, NewWorker, "a worker", code="invalid_worker")
        if asked.replay is not None and asked.kv is None:
            raise ApiError(400, "`replay` is of no use without `kv`", code="invalid_worker")
        await self._check_ready(asked.url)
        known = {up.worker: up for up in (await self._link.workers()).workers}
        model = await self._model(asked, known.values())
        name = asked.name or next(free for n in count() if (free := f"r{n}") not in known)
        owner = next((up.worker for up in known.values() if up.url == asked.url and up.worker != name), None)
        if owner is not None:
            raise ApiError(409, f"{asked.url} is worker {owner}", code="worker_exists")
        if name in known and known[name].url != asked.url:
            raise ApiError(409, f"worker {name} is at {known[name].url}", code="worker_exists")
        models = (model,) if model else ()
        self._link.order(
            WorkerUp(name, asked.url, asked.kv, asked.replay, asked.capacity, asked.load, models, model)
        )
        return _state(await self._link.workers(), name)

    @Operation(
        "DELETE", "/workers/{name}", "Drain a replica, then forget it.", WorkerState, ERRORS, where=WorkerName
    )
    async def drain(self, request: Request) -> WorkerState:
        name = request.path_params["name"]
        if name not in {up.worker for up in (await self._link.workers()).workers}:
            raise ApiError(404, f"there is no worker {name[:100]!r}", code="worker_not_found")
        self._link.order(WorkerDrain(name))
        return _state(await self._link.workers(), name)

    @Operation("POST", "/flush_cache", "Empty all replicas' caches.", Flushed, ERRORS, query=FlushQuery)
    async def flush(self, request: Request) -> Flushed:
        """SGLang also answers GET, which a link of another site's page could send."""
        wait_s = check(dict(request.query_params), FlushQuery, strict=False).timeout
        known = (await self._link.workers()).workers
        reasons = await asyncio.gather(*(self._flush(up.url, wait_s) for up in known))
        failed = [f"{up.worker}: {why}" for up, why in zip(known, reasons, strict=True) if why]
        if failed:
            raise ApiError(409, f"not all caches were emptied: {'; '.join(failed)}", code="not_flushed")
        return Flushed([up.worker for up in known])

    async def _flush(self, url: str, wait_s: float) -> str:
        """Why the replica does not; "": it has."""
        try:
            found = await self._replicas.get(url, f"/flush_cache?timeout={wait_s}", wait_s + ANSWER_TIMEOUT_S)
        except OSError as error:
            return describe(error)
        return "" if found[0] == 200 else of_replica(*found).message

    @Operation("GET", "/limits", "How calls are throttled.", ThrottleReport, ERRORS)
    async def limits(self, _: Request) -> ThrottleReport:
        return _throttle(await self._link.snapshot())

    @Operation("POST", "/limits", "Replace the limits of throttling.", ThrottleReport, ERRORS, body=NewLimits)
    async def set_limits(self, request: Request) -> ThrottleReport:
        asked = await _sent(request, NewLimits, "limits", MAX_LIMITS_BYTES, code="invalid_limits")
        answer = await self._link.set_limits(msgspec.json.encode(asked))
        if isinstance(answer, Refuse):
            raise ApiError(409 if answer.code == NO_THROTTLE else 400, answer.reason, code=answer.code)
        return _throttle(answer.state)

    @Operation("POST", "/swap", "Have a replica load another model.", SwapState, ERRORS, 202, body=NewSwap)
    async def swap(self, request: Request) -> SwapState:
        asked = await _sent(request, NewSwap, "a swap", code="invalid_swap")
        answer = await self._link.swap(asked.worker, asked.model)
        if isinstance(answer, Refuse):
            raise ApiError(409, answer.reason, code="cannot_swap")
        swaps: Any = answer.state.get("swaps", {})
        return msgspec.convert({"name": asked.worker, **swaps.get(asked.worker, {})}, SwapState)

    @Operation(
        "DELETE", "/quarantine/{client}", "End the quarantine of a client whose requests have ended replicas.",
        Lifted, ERRORS, where=ClientName, has_slashes=True,
    )  # fmt: skip
    async def lift(self, request: Request) -> Lifted:
        client = request.path_params["client"]
        if not await self._link.lift(client):
            raise ApiError(404, f"{client[:100]!r} is in no quarantine", code="not_quarantined")
        return Lifted(client)

    async def _check_ready(self, url: str) -> None:
        try:
            if (await self._replicas.get(url, "/ready"))[0] != 503:
                return
            reason = "it answers 503"
        except OSError as error:
            reason = describe(error)
        raise ApiError(400, f"{url} is not ready: {reason}", code="worker_not_ready")

    async def _model(self, asked: NewWorker, known: Iterable[WorkerUp]) -> str:
        """Which of our models a new replica has; "": the only one, and of those that are `known` nothing more is."""
        names = self._names
        if asked.model is not None:
            if asked.model not in names:
                raise model_not_found(asked.model)
            return asked.model
        if len(names) == 1:
            return names.first if any(up.loaded for up in known) else ""
        try:
            status, body = await self._replicas.get(asked.url, "/v1/models")
        except OSError:
            status, body = 503, b""
        found = [one.id for one in models_in(body) if status == 200 and one.id in names]
        if len(found) != 1:
            served = ", ".join(names)
            text = f"say in `model` which one {asked.url} has: {served}"
            raise ApiError(400, text, code="invalid_worker")
        return found[0]


class TenantsAdmin:
    """The answers about the tenants' file `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @Operation(
        "PATCH", "/tenants/{name}", "Change a tenant's weight, in the tenants' file.", TenantState,
        (400, 401, 403, 404, 409, 413), body=TenantChange, where=TenantName, has_slashes=True,
    )  # fmt: skip
    async def change(self, request: Request) -> TenantState:
        name = request.path_params["name"]
        asked = await _sent(request, TenantChange, "a change of a tenant", code="invalid_tenant")
        try:
            await asyncio.to_thread(edit.set_weight, self._path, name, asked.weight)
        except edit.NoSuchTenant as error:
            raise ApiError(404, str(error), code="tenant_not_found") from error
        except (edit.CannotEdit, SettingError, OSError) as error:
            text = f"the tenants' file cannot be changed: {error}"
            raise ApiError(409, text, code="tenants_file") from error
        return TenantState(name, asked.weight)


async def _sent(
    request: Request, kind: type[Sent], what: str, most_bytes: int = MAX_BODY_BYTES, *, code: str
) -> Sent:
    try:
        return msgspec.json.decode(await read_body(request, most_bytes), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"not {what}: {error}", code=code) from error


def _throttle(state: dict[str, Any]) -> ThrottleReport:
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
