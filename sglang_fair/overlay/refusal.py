"""Refused requests: their sender gets status 429 and the policy's reason, and nothing of them is left behind.

The scheduler ends such a request where SGLang ends one that finds a full queue. SGLang turns that into an HTTP error,
except for a stream, whose status it has already sent. So `Refusals` holds back a stream's status until its first piece.
"""

from collections.abc import AsyncGenerator, MutableMapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq

from sglang_fair.core import POLICIES
from sglang_fair.overlay.application import Application, Message, answer
from sglang_fair.overlay.config import SERVER_POLICIES

STATUS = HTTPStatus.TOO_MANY_REQUESTS
"""SGLang itself ends no request with this status."""

SCOPE_KEY = "sglang_fair.refused"
"""Key in an HTTP request's scope: the reason of its refusal."""


def may_refuse(chosen: str) -> bool:
    """Whether the policy that --schedule-policy `chosen` names may refuse requests."""
    ours = SERVER_POLICIES.get(chosen)
    return ours is not None and POLICIES[ours].may_refuse


def refuse(scheduler: Any, request: Any, reason: str, status: HTTPStatus = STATUS) -> None:
    """End a request that is in no queue yet, with `reason` for its sender. The caller releases what SGLang holds for
    it."""
    finish = {"type": "abort", "status_code": status, "message": reason}
    scheduler.send_abort_output(AbortReq(rid=request.rid, finished_reason=finish), request)
    request.time_stats.trace_ctx.abort(abort_info={"reason": reason})


async def noted(outputs: AsyncGenerator[Any, None], request: Any) -> AsyncGenerator[Any, None]:
    """`outputs`, unchanged. If the first one is a refusal, its reason is noted in the scope of `request`."""
    first = True
    async with aclosing(outputs):
        async for output in outputs:
            if first and (reason := _refused(output)) is not None:
                request.scope[SCOPE_KEY] = reason
            first = False
            yield output


class Refusals:
    """ASGI middleware: a refused stream gets the status of a refusal, like a refused request without streaming."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
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
                    error = {"message": scope[SCOPE_KEY], "type": str(STATUS.value), "code": STATUS.value}
                    await answer(send, STATUS, error)
                else:
                    await send(begun)
            if not refused:
                await send(message)

        await self._app(scope, receive, held)


def _refused(output: Any) -> str | None:
    finish = output.get("meta_info", {}).get("finish_reason") if isinstance(output, dict) else None
    if not isinstance(finish, dict) or finish.get("status_code") != STATUS:
        return None
    return str(finish["message"])


def _is_stream(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start.get("headers", ())
    )
