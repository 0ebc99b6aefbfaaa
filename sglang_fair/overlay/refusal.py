"""Refused requests: their sender gets status 429 and the policy's reason, and nothing of them is left behind. Likewise
requests that have waited for longer than they may, with status 504.

The scheduler ends such a request where SGLang ends one that finds a full queue. SGLang turns that into an HTTP error,
except for a stream, whose status it has already sent. So `Refusals` holds back a stream's status until its first piece.
"""

from collections.abc import AsyncGenerator, Iterable, MutableMapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.mem_cache.common import release_kv_cache

from sglang_fair.common.deadlines import EXPIRED, EXPIRED_STATUS, HEADER_TTL
from sglang_fair.core import POLICIES
from sglang_fair.overlay.application import Application, Message, answer
from sglang_fair.overlay.config import SERVER_POLICIES
from sglang_fair.overlay.waiting import take_out

STATUS = HTTPStatus.TOO_MANY_REQUESTS
OURS = (STATUS, HTTPStatus(EXPIRED_STATUS))
"""SGLang itself ends no request with these statuses."""

SCOPE_KEY = "sglang_fair.refused"
"""Key in an HTTP request's scope: status and reason of its refusal."""


def may_refuse(chosen: str) -> bool:
    """Whether the policy that --schedule-policy `chosen` names may refuse any request."""
    ours = SERVER_POLICIES.get(chosen)
    return ours is not None and POLICIES[ours].may_refuse


def refuse(scheduler: Any, request: Any, reason: str, status: HTTPStatus = STATUS) -> None:
    """End a request that is in no queue yet, with `reason` for its sender. The caller releases what SGLang holds for
    it."""
    finish = {"type": "abort", "status_code": status, "message": reason}
    scheduler.send_abort_output(AbortReq(rid=request.rid, finished_reason=finish), request)
    request.time_stats.trace_ctx.abort(abort_info={"reason": reason})


def drop(scheduler: Any, request: Any) -> None:
    """End a request that waits and has not begun, as SGLang does when it is aborted there: by the request itself, not
    by its id, which others may have too."""
    queue = scheduler.waiting_queue
    if not take_out([request], queue):
        return
    scheduler._release_aborted_request(request)
    scheduler.beam_coordinator.retire_group(request)
    refuse(scheduler, request, EXPIRED, HTTPStatus(EXPIRED_STATUS))
    if request.kv.holds_mamba:
        release_kv_cache(request, scheduler.tree_cache, checkpoint=False)


async def noted(
    outputs: AsyncGenerator[Any, None], request: Any, *, stream: bool
) -> AsyncGenerator[Any, None]:
    """`outputs`, unchanged. If the first one is a refusal, its reason is noted in the scope of `request`; it is raised
    where SGLang, before 0.5.23, would answer as if it had been served."""
    first = True
    async with aclosing(outputs):
        async for output in outputs:
            if first and (refused := _refused(output)) is not None:
                request.scope[SCOPE_KEY] = refused
                if not stream:
                    raise HTTPException(*refused)
            first = False
            yield output


class Refusals:
    """ASGI middleware: a refused stream gets the status of a refusal, like a refused request without streaming."""

    def __init__(self, app: Application, *, of_all: bool) -> None:
        """`of_all`: the policy may refuse any request; otherwise only what expires has its status held back."""
        self._app = app
        self._of_all = of_all

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not (self._of_all or expires(scope["headers"])):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        refused = False

        async def held(message: Message) -> None:
            nonlocal start, refused
            if message["type"] == "http.response.start" and _is_stream(message):
                start = message
                return
            if start is not None:
                begun, start = start, None
                if SCOPE_KEY in scope:
                    refused = True
                    status, reason = scope[SCOPE_KEY]
                    await answer(send, status, {"message": reason, "type": str(status), "code": status})
                else:
                    await send(begun)
            if not refused:
                await send(message)

        await self._app(scope, receive, held)


def expires(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether an HTTP request with these headers has a time to live."""
    return any(name.lower() == HEADER_TTL.encode() for name, _ in headers)


def _refused(output: Any) -> tuple[int, str] | None:
    if isinstance(output, list):
        return next((found for one in output if (found := _refused(one)) is not None), None)
    finish = output.get("meta_info", {}).get("finish_reason") if isinstance(output, dict) else None
    if not isinstance(finish, dict) or finish.get("status_code") not in OURS:
        return None
    return int(finish["status_code"]), str(finish["message"])


def _is_stream(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start.get("headers", ())
    )
