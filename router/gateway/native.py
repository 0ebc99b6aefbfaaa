"""What SGLang's own programs ask of a server: its frontend language (`sglang.lang`), and its benchmarks.

A replica of the model answers, and of that the fields below leave the gateway. SGLang tells everybody all of its
options, with folders, addresses and the books of all clients.
"""

import asyncio
import re
import time
from collections import defaultdict
from typing import NoReturn, TypeVar

import msgspec
from starlette.requests import Request

from router.gateway.errors import RETRY_AFTER_S, ApiError, check
from router.gateway.gateway import Gateway
from router.gateway.operations import Operation
from router.gateway.request.call import model_not_found

FRESH_S = 2.0
"""How long an answer holds, however often somebody asks: SGLang's schedulers stop for it."""

HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")

ERRORS = (400, 401, 404, 503)


class About(msgspec.Struct, kw_only=True):
    """A path is the model's id at Hugging Face; where the replica has a folder, the name by which it is served."""

    model_path: str
    tokenizer_path: str
    served_model_name: str


class ModelInfo(About, kw_only=True):
    """`GET /model_info`."""

    is_generation: bool
    has_image_understanding: bool = False
    has_audio_understanding: bool = False
    model_type: str | None = None
    architectures: list[str] | None = None
    weight_version: str | None = None


class SchedulerInfo(msgspec.Struct):
    """One of a replica's schedulers."""

    dp_size: int | None = None
    effective_max_running_requests_per_dp: int | None = None
    avg_spec_accept_length: float | None = None


class ServerInfo(About, kw_only=True):
    """`GET /server_info`: one replica."""

    version: str
    """SGLang's."""
    max_total_num_tokens: int | None = None
    max_req_input_len: int | None = None
    internal_states: list[SchedulerInfo] = []


Told = TypeVar("Told", bound=About)


class ModelQuery(msgspec.Struct):
    """Which model is asked about."""

    model: str | None = None


class Native:
    """The answers to clients."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._latest: dict[tuple[type[About], str], tuple[float, About]] = {}
        """By kind of answer and model: when it came, and what it was."""
        self._asking: defaultdict[tuple[type[About], str], asyncio.Lock] = defaultdict(asyncio.Lock)

    @Operation("GET", "/model_info", "What a model is.", ModelInfo, ERRORS, query=ModelQuery)
    @Operation("GET", "/get_model_info", "The same as /model_info.", ModelInfo, ERRORS, query=ModelQuery)
    async def model_info(self, request: Request) -> ModelInfo:
        return await self._told(request, "/model_info", ModelInfo)

    @Operation("GET", "/server_info", "How large a replica is.", ServerInfo, ERRORS, query=ModelQuery)
    @Operation("GET", "/get_server_info", "The same as /server_info.", ServerInfo, ERRORS, query=ModelQuery)
    async def server_info(self, request: Request) -> ServerInfo:
        return await self._told(request, "/server_info", ServerInfo)

    @Operation("POST", "/concate_and_append_request", "Refused: SGLang has none.", errors=(401, 404))
    async def append(self, request: Request) -> NoReturn:
        self._gateway.models(request.headers, request.scope.get("client"))
        text = (
            "SGLang 0.5.23 does not join caches: set `support_concate_and_append = False` on the frontend's "
            "endpoint, and it joins texts"
        )
        raise ApiError(404, text, code="unsupported")

    async def _told(self, request: Request, path: str, kind: type[Told]) -> Told:
        """What a replica of the model that is asked about says. Raises `ApiError`."""
        gateway = self._gateway
        asked = check(dict(request.query_params), ModelQuery, strict=False).model
        model = gateway.names.asked_for(asked)
        if model not in gateway.models(request.headers, request.scope.get("client")):
            raise model_not_found(model)
        async with self._asking[kind, model]:
            came_s, latest = self._latest.get((kind, model), (float("-inf"), None))
            if not isinstance(latest, kind) or time.monotonic() - came_s >= FRESH_S:
                latest = await self._ask(model, path, kind)
                self._latest[kind, model] = time.monotonic(), latest
        return latest

    async def _ask(self, model: str, path: str, kind: type[Told]) -> Told:
        fleet = self._gateway.fleet
        for worker in fleet.having(self._gateway.names.model_of(model) or model):  # which may be an adapter's
            try:
                status, body = await self._gateway.replicas.get(fleet.workers[worker].url, path)
                found = msgspec.json.decode(body, type=kind) if status == 200 else None
            except (OSError, LookupError, msgspec.MsgspecError, UnicodeDecodeError):
                continue
            if found is None:
                continue
            found.served_model_name = model
            found.model_path, found.tokenizer_path = (
                one if HUB_ID.fullmatch(one) else model for one in (found.model_path, found.tokenizer_path)
            )
            return found
        text = f"no replica of {model} answers {path}"
        raise ApiError(503, text, code="no_replica", retry_after_s=RETRY_AFTER_S)
