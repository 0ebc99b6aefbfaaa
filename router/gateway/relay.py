"""Answer one client: read its request, ask the router, have a replica serve it, try another if need be.

The client sees one outcome:

    before the first byte   the replica refuses, resets, answers 503, falls silent → another replica, up to
                            `tries`; then an error with Retry-After
    after it                the stream goes on from another replica, exactly (`resume.py`), where sampling allows
                            it; else a last `data: {"error": ...}` event without [DONE]
    it leaves               its work is cancelled
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping

from starlette.types import Receive, Scope, Send

from router.events import Arrive, Refuse
from router.gateway.answer.reply import ClientGone, Reply
from router.gateway.answer.resume import Diverged, Resumable
from router.gateway.answer.sse import DONE
from router.gateway.errors import ApiError
from router.gateway.replicas.attempt import Attempt, NotServed
from router.gateway.replicas.connections import NoDescriptors
from router.gateway.request.call import Call
from router.gateway.request.continuation import Kind
from router.gateway.resources import MAX_ROUTED_TOKENS, PATHS, Gateway, address_share, header_safe
from router.gateway.routing.link import RouterGone
from router.wire import pack_tokens, unpack_tokens
from sglang_fair.common.identity import (
    ANNOUNCEMENTS,
    ANONYMOUS,
    HEADER_APP,
    HEADER_CLIENT,
    HEADER_INTERACTION,
    HEADER_STAGE,
    USER,
    identify,
)

log = logging.getLogger("gateway")

PASSED_THROUGH = (HEADER_APP, HEADER_INTERACTION, HEADER_STAGE, *ANNOUNCEMENTS)
RETRY_AFTER_S = 1
BODY_TIMEOUT_S = 60.0
"""A client may pause this long between two pieces of its body."""
MAX_SILENCED = 2
"""Replicas that may fall silent with a request in their hands. One that falls silent has mostly been lost, and its
requests are served by another; but a request that two of them did not survive may be what silences them."""
LARGE_BYTES = 1 << 18
"""So large a request is not given to a second one: its size alone may keep a replica busy."""


class Relay:
    """One request, as an ASGI application of its own: it reads, routes, carries, settles."""

    def __init__(self, gateway: Gateway, kind: Kind) -> None:
        """Nothing happens until it is called."""
        self._gateway = gateway
        self._kind = kind
        self._client = self._share = "-"
        self._worker = "-"
        self._is_in = False
        self._held_bytes = 0
        self._arrived_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request; returns when its client has an outcome or is gone."""
        gateway = self._gateway
        gateway.counts["requests"] += 1
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            client = header_safe(identify(headers, None, gateway.identity))
            is_open = client == ANONYMOUS and USER in gateway.identity  # its body may name it
            self._enter(client, address_share(scope.get("client")) if is_open else client)
            await self._read_and_serve(headers, receive, send)
        except ClientGone:
            gateway.counts["left"] += 1
        except ApiError as error:
            gateway.counts["refused" if error.status < 500 else "failed"] += 1
            await self._refuse(error, send)
        finally:
            self._leave()

    async def _read_and_serve(self, headers: Mapping[str, str], receive: Receive, send: Send) -> None:
        raw = await self._read_body(receive, headers)
        reply = Reply(send, self._gateway.limits.idle_timeout_s)
        serving, left = asyncio.current_task(), False
        assert serving is not None

        async def watch() -> None:
            nonlocal left
            while (await receive())["type"] != "http.disconnect":
                pass
            if not reply.ended:  # the end of an answer looks the same
                left = True
                serving.cancel()

        watching = asyncio.create_task(watch())
        try:
            call = await self._gateway.parsed(self._kind, raw, self._share)
            client = self._client
            if call.user:
                client = header_safe(identify(headers, call.user, self._gateway.identity))
            if client != self._share:
                self._leave()
                self._enter(client, client)
                self._hold(len(raw))
            passed_on = {"content-type": "application/json", HEADER_CLIENT: client}
            passed_on |= {name: header_safe(headers[name]) for name in PASSED_THROUGH if headers.get(name)}
            await self._serve(call, passed_on, reply)
        except asyncio.CancelledError:
            if not left:
                raise
            serving.uncancel()
            raise ClientGone from None
        finally:
            watching.cancel()
            reply.close()

    async def _serve(self, call: Call, headers: dict[str, str], reply: Reply) -> None:
        gateway = self._gateway
        tokens = await gateway.routed_tokens(call, self._share)
        resumable = Resumable(call) if call.resume else None
        leg, leg_tokens, begun_s = call, tokens, self._arrived_s
        excluded: tuple[str, ...] = ()
        silenced, reason = 0, ""
        for _ in range(gateway.limits.tries):
            arrive = Arrive(
                id=uuid.uuid4().hex,
                client=self._client,
                tokens=leg_tokens,
                max_output_tokens=leg.max_output_tokens,
                namespace=call.namespace,
                exclude=excluded,
            )
            try:
                answer = await gateway.place(arrive)
            except RouterGone as error:
                if reply.started:
                    break
                raise ApiError(
                    503, str(error), code="router_unavailable", retry_after_s=RETRY_AFTER_S
                ) from error
            if isinstance(answer, Refuse):
                if excluded:
                    break
                raise _refusal(answer)
            self._worker = answer.worker
            try:
                await Attempt(gateway, leg, answer, self._client, begun_s).carry(headers, reply, resumable)
                return
            except NoDescriptors as error:
                reason = str(error)
                if reply.started:
                    break
                raise ApiError(
                    503,
                    "the gateway has no room for a connection",
                    code="overloaded",
                    retry_after_s=RETRY_AFTER_S,
                ) from error
            except NotServed as error:
                reason = f"worker {answer.worker}: {error}"
                log.warning("request %s client=%s %s", answer.id, self._client, reason)
                silenced += error.fell_silent
                if silenced >= (1 if len(call.encoded) > LARGE_BYTES else MAX_SILENCED):
                    excluded = (*excluded, answer.worker)
                    break
                if not reply.started:
                    gateway.counts["retried"] += 1
                    excluded = (*excluded, answer.worker)
                    continue
                if resumable is None:
                    break
                if resumable.is_complete:
                    await reply.end(DONE)
                    return
                gateway.counts["resumed"] += 1
                excluded, begun_s = (answer.worker,), time.monotonic()
                try:
                    following = resumable.next_leg(unpack_tokens(tokens), gateway.text)
                except Diverged as cannot:
                    reason = f"{reason}; {cannot}"
                    break
                leg = following.call
                leg_tokens = tokens if following.tokens is None else _routed(following.tokens)
            except Diverged as error:
                reason = f"{reason}; worker {answer.worker}: {error}"
                break
        if reply.started:
            gateway.counts["failed"] += 1
            await reply.break_off(ApiError(502, f"the stream was lost midway: {reason}", code="replica_lost"))
            return
        raise ApiError(
            502,
            f"no replica could serve the request; tried {', '.join(excluded)}; the last: {reason}",
            code="no_replica",
            retry_after_s=RETRY_AFTER_S,
        )

    async def _read_body(self, receive: Receive, headers: Mapping[str, str]) -> bytes:
        limits = self._gateway.limits
        length = headers.get("content-length", "")
        self._hold(min(int(length), limits.max_body_bytes + 1) if length.isdecimal() else 0)
        pieces: list[bytes] = []
        size = 0
        loop = asyncio.get_running_loop()
        try:
            until_s = loop.time() + limits.body_timeout_s
            async with asyncio.timeout(min(BODY_TIMEOUT_S, limits.body_timeout_s)) as limit:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece = message.get("body", b"")
                    size += len(piece)
                    self._hold(size)
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        return b"".join(pieces)
                    limit.reschedule(min(until_s, loop.time() + BODY_TIMEOUT_S))
        except TimeoutError as error:
            raise ApiError(408, "the body did not arrive in time", code="body_timeout") from error

    def _enter(self, client: str, share: str) -> None:
        """The request is `client`'s, and counts for `share`. Raises `ApiError` when that is used up."""
        self._client, self._share = client, share
        places = self._gateway.places
        self._is_in = places.take(share)
        if not self._is_in:
            raise _full(f"too many requests in flight: {places.held(share)} of this client")

    def _leave(self) -> None:
        gateway = self._gateway
        if self._is_in:
            gateway.places.give(self._share)
        gateway.bytes.give(self._share, self._held_bytes)
        self._is_in, self._held_bytes = False, 0

    def _hold(self, size: int) -> None:
        """This request's body is at least `size` bytes long. Raises `ApiError` when that is too much."""
        gateway = self._gateway
        if size > gateway.limits.max_body_bytes:
            raise ApiError(
                413, f"the body is larger than {gateway.limits.max_body_bytes} bytes", code="body_too_large"
            )
        more = max(0, size - self._held_bytes)
        if not gateway.bytes.take(self._share, more):
            held = gateway.bytes.held(self._share)
            raise _full(f"too many bytes of requests in flight: {held} of this client")
        self._held_bytes += more

    async def _refuse(self, error: ApiError, send: Send) -> None:
        log.warning(
            "%s %d client=%s worker=%s: %s",
            PATHS[self._kind],
            error.status,
            self._client,
            self._worker,
            error.message,
        )
        self._gateway.refusals[error.status] += 1
        headers = [(b"content-type", b"application/json"), (b"x-fair-client", self._client.encode("latin-1"))]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(error.retry_after_s).encode()))
        body = error.body()
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _full(what: str) -> ApiError:
    return ApiError(429, what, code="overloaded", retry_after_s=RETRY_AFTER_S)


def _refusal(answer: Refuse) -> ApiError:
    if answer.is_full:
        return _full(f"the router refused: {answer.reason}")
    retry_after_s = RETRY_AFTER_S if answer.retry else None
    return ApiError(503, f"the router refused: {answer.reason}", code="refused", retry_after_s=retry_after_s)


def _routed(tokens: list[int]) -> bytes:
    return pack_tokens(tokens[:MAX_ROUTED_TOKENS])
