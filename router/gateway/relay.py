"""Answer one client: read its request, ask the router, have a replica serve it, try another if need be.

The client sees one outcome:

    before the first byte   the replica refuses, resets, answers 503, falls silent → another replica, up to
                            `tries`; then an error with Retry-After
    after it                a last `data: {"error": ...}` event without [DONE]
    it leaves               its work is cancelled
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from router.events import Arrive, Refuse
from router.gateway.calls import ApiError, Call, Kind, parse
from router.gateway.link import RouterGone
from router.gateway.placement import ClientGone, NotServed, Placement
from router.gateway.resources import PATHS, Gateway, header_safe
from sglang_fair.core.identity import HEADER_APP, HEADER_CLIENT, HEADER_INTERACTION, HEADER_STAGE, identify

log = logging.getLogger("gateway")

PASSED_THROUGH = (HEADER_APP, HEADER_INTERACTION, HEADER_STAGE)
RETRY_AFTER_S = 1
BODY_TIMEOUT_S = 60.0
"""A client may pause this long between two pieces of its body."""


class Relay(Response):
    """The response to one request, as an ASGI application of its own: it reads, routes, carries, settles."""

    def __init__(self, gateway: Gateway, kind: Kind) -> None:
        """Nothing happens until it is called."""
        super().__init__()
        self._gateway = gateway
        self._kind = kind
        self._client = "-"
        self._worker = "-"
        self._complete = False
        self._arrived_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request; returns when its client has an outcome or is gone."""
        gateway = self._gateway
        gateway.counts["requests"] += 1
        if gateway.in_flight >= gateway.limits.max_in_flight:
            gateway.counts["refused"] += 1
            await self._refuse(
                ApiError(429, "too many requests in flight", code="overloaded", retry_after_s=RETRY_AFTER_S),
                send,
            )
            return
        gateway.in_flight += 1
        try:
            await self._read_and_serve(scope, receive, send)
        except ClientGone:
            gateway.counts["left"] += 1
        except ApiError as error:
            gateway.counts["refused" if error.status < 500 else "failed"] += 1
            await self._refuse(error, send)
        finally:
            gateway.in_flight -= 1

    async def _read_and_serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        raw = await _read_body(receive, headers, self._gateway.limits.max_body_bytes)
        call = parse(self._kind, raw, self._gateway.model_name)
        self._client = header_safe(identify(headers, call.user, self._gateway.identity))
        replica_headers = {"content-type": "application/json", HEADER_CLIENT: self._client}
        replica_headers |= {name: header_safe(headers[name]) for name in PASSED_THROUGH if headers.get(name)}

        async def noted(message: Message) -> None:
            await send(message)
            self._complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        work = asyncio.create_task(self._serve(call, len(raw), replica_headers, noted))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = not work.done() and not self._complete
            for task in (work, gone):
                task.cancel()
            # `work` settles its placement as it is cancelled.
            await asyncio.gather(work, gone, return_exceptions=True)
        if left:
            raise ClientGone
        if not work.cancelled():
            work.result()

    async def _serve(self, call: Call, body_bytes: int, headers: dict[str, str], send: Send) -> None:
        gateway = self._gateway
        tokens = await gateway.routed_tokens(call, body_bytes)
        excluded: tuple[str, ...] = ()
        reason = ""
        for _ in range(gateway.limits.tries):
            arrive = Arrive(
                id=uuid.uuid4().hex,
                client=self._client,
                tokens=tokens,
                max_output_tokens=call.max_output_tokens,
                namespace=call.namespace,
                exclude=excluded,
            )
            try:
                answer = await gateway.link.place(arrive)
            except RouterGone as error:
                raise ApiError(
                    503, str(error), code="router_unavailable", retry_after_s=RETRY_AFTER_S
                ) from error
            if isinstance(answer, Refuse):
                if excluded:
                    break
                raise _refusal(answer)
            self._worker = answer.worker
            placement = Placement(gateway, call, answer, self._client, self._arrived_s)
            try:
                await placement.carry(call.forwarded(answer.id), headers, send)
                return
            except NotServed as error:
                reason = str(error)
                excluded = (*excluded, answer.worker)
                gateway.counts["retried"] += 1
                log.info("request %s: worker %s: %s; trying another", answer.id, answer.worker, reason)
        raise ApiError(
            502,
            f"no replica could serve the request; tried {', '.join(excluded)}; the last: {reason}",
            code="no_replica",
            retry_after_s=RETRY_AFTER_S,
        )

    async def _refuse(self, error: ApiError, send: Send) -> None:
        log.warning(
            "%s %d client=%s worker=%s: %s",
            PATHS[self._kind],
            error.status,
            self._client,
            self._worker,
            error.message,
        )
        headers = [(b"content-type", b"application/json"), (b"x-fair-client", self._client.encode("latin-1"))]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(error.retry_after_s).encode()))
        body = error.body()
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _refusal(answer: Refuse) -> ApiError:
    retry_after_s = RETRY_AFTER_S if answer.retry else None
    return ApiError(503, f"the router refused: {answer.reason}", code="refused", retry_after_s=retry_after_s)


async def _read_body(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                message = await receive()
        except TimeoutError as error:
            raise ApiError(408, "the body did not arrive in time", code="body_timeout") from error
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise too_large
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
