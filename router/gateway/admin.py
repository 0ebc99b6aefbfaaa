"""Add and drain replicas while the cluster runs: `GET`, `POST /workers` and `DELETE /workers/NAME`.

A replica that is added gets requests from the router's next decision on; one that is drained gets no new ones
and is forgotten when its last is over. Whoever may call this may send everybody's prompts to an address of
their choice, so it is for this machine alone, or for whoever has the key in `KEY_VARIABLE`.
"""

import hmac
import os
import re
from typing import Annotated, Any

import aiohttp
import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from router.events import WorkerDrain, Workers, WorkerUp
from router.gateway.errors import ApiError
from router.gateway.resources import Gateway, why
from router.gateway.routing.link import RouterGone

KEY_VARIABLE = "SGLANG_FAIR_ADMIN_KEY"
"""Environment variable; when it is set, calls need `Authorization: Bearer` and its value, from anywhere."""

MAX_BODY_BYTES = 4096
ANSWER_TIMEOUT_S = 5.0

_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class NewWorker(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /workers`. `kv` and `replay` are ZMQ addresses; `name` is made up when it is left out."""

    url: Annotated[str, msgspec.Meta(pattern=r"^https?://[!-.0-~]+/?\Z")]
    name: str | None = None
    kv: Annotated[str, msgspec.Meta(pattern=r"^[a-z]+://[!-~]+\Z")] | None = None
    replay: Annotated[str, msgspec.Meta(pattern=r"^[a-z]+://[!-~]+\Z")] | None = None
    capacity: Annotated[float, msgspec.Meta(gt=0)] = 1.0


def add_routes(app: FastAPI, gateway: Gateway) -> None:
    """The three calls. They raise `ApiError`, which `app` must turn into answers."""
    key = os.environ.get(KEY_VARIABLE, "")

    @app.get("/workers")
    async def workers(request: Request) -> JSONResponse:
        _allow(request, key)
        return JSONResponse({"workers": _rows(await _known(gateway))})

    @app.post("/workers")
    async def add(request: Request) -> JSONResponse:
        _allow(request, key)
        asked = _parse(await _read(request))
        await _check_answers(gateway, asked.url)
        known = {up.worker: up for up in (await _known(gateway)).workers}
        name = asked.name or _free_name(known)
        taken = next((up.worker for up in known.values() if up.url == asked.url and up.worker != name), None)
        if taken is not None:
            raise ApiError(409, f"{asked.url} is worker {taken}", code="worker_exists")
        if name in known and known[name].url != asked.url:
            raise ApiError(409, f"worker {name} is at {known[name].url}", code="worker_exists")
        gateway.link.tell(WorkerUp(name, asked.url, asked.kv, asked.replay, asked.capacity))
        return JSONResponse(_row(await _known(gateway), name), 201)

    @app.delete("/workers/{name}")
    async def drain(request: Request, name: str) -> JSONResponse:
        _allow(request, key)
        if name not in {up.worker for up in (await _known(gateway)).workers}:
            raise ApiError(404, f"there is no worker {name[:100]!r}", code="worker_not_found")
        gateway.link.tell(WorkerDrain(name))
        return JSONResponse(_row(await _known(gateway), name))


def _allow(request: Request, key: str) -> None:
    if key:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, key.encode()):
            raise ApiError(401, "this needs the admin key", code="unauthorized")
    elif request.client is None or request.client.host not in ("127.0.0.1", "::1"):
        raise ApiError(403, f"this is for the machine itself; set {KEY_VARIABLE}", code="forbidden")


async def _read(request: Request) -> bytes:
    raw = b""
    async for piece in request.stream():
        raw += piece
        if len(raw) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")
    return raw


def _parse(raw: bytes) -> NewWorker:
    try:
        asked = msgspec.json.decode(raw, type=NewWorker)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"not a worker: {error}", code="invalid_worker") from error
    if asked.name is not None and not _NAME.fullmatch(asked.name):
        raise ApiError(400, "a worker's name has letters, digits and . _ : -", code="invalid_worker")
    if asked.replay is not None and asked.kv is None:
        raise ApiError(400, "`replay` is of no use without `kv`", code="invalid_worker")
    return asked


async def _check_answers(gateway: Gateway, url: str) -> None:
    try:
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        async with gateway.session.get(f"{url.rstrip('/')}/ready", timeout=timeout) as response:
            if response.status != 503:
                return
            reason = "it answers 503"
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        reason = why(error)
    raise ApiError(400, f"{url} is not ready: {reason}", code="worker_not_ready")


async def _known(gateway: Gateway) -> Workers:
    try:
        return await gateway.link.workers()
    except RouterGone as error:
        raise ApiError(503, str(error), code="router_unavailable", retry_after_s=1) from error


def _free_name(known: dict[str, WorkerUp]) -> str:
    number = 0
    while f"r{number}" in known:
        number += 1
    return f"r{number}"


def _rows(workers: Workers) -> list[dict[str, Any]]:
    return [_row(workers, up.worker) for up in workers.workers]


def _row(workers: Workers, name: str) -> dict[str, Any]:
    found = next((up for up in workers.workers if up.worker == name), None)
    if found is None:
        return {"name": name, "state": "gone"}
    state = "draining" if name in workers.draining else "sick" if name in workers.sick else "up"
    row = {"name": name, "url": found.url, "kv": found.kv, "replay": found.replay}
    return row | {"capacity": found.capacity, "state": state}
