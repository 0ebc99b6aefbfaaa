"""One request from arrival to its outcome: read it, have the router place it, have a replica serve it.

What the client sees when a replica fails:

    before the first byte   nothing: another replica is tried, up to `tries`; then an error with Retry-After
    after it                nothing, where the stream can be continued (`answer.resume`); else the stream ends in a
                            `data: {"error": ...}` event without [DONE]

A client that leaves has its work cancelled. Placing and serving is in `serving`. What happens is noted in the request's
record (`record.Exchange`), which counts, metrics, log and spans read at its end.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from router.events import TOKEN_BYTES
from router.gateway.access.identity import Known
from router.gateway.access.quota import Ticket
from router.gateway.errors import ApiError, expired
from router.gateway.gateway import Gateway
from router.gateway.listener import ClientGone, Incoming
from router.gateway.record import REQUEST_ID
from router.gateway.request.call import Call, check_models
from router.gateway.request.kinds import PATHS, Kind, style_of
from router.gateway.serving import Outcome, Serving
from router.gateway.sharing import Allowance
from router.shared_limit import address_share
from sglang_fair.common import token_ids
from sglang_fair.common.caller import HEADER_SALT, Caller, salt_header
from sglang_fair.common.deadlines import EXPIRED_CODE, BadDeadline, Promise, attained, time_to_live
from sglang_fair.common.identity import (
    ANNOUNCEMENTS,
    ANONYMOUS,
    HEADER_CLIENT,
    HEADER_SYSTEM_TOKENS,
    bounded,
)
from sglang_fair.common.interaction import Apps, Part, part_of
from sglang_fair.common.record import MOST_NAME
from sglang_fair.core.interactions import Interaction

if TYPE_CHECKING:  # imported only where spans are made
    from router.gateway.tracing import Trace

log = logging.getLogger("gateway")

TRACE_CONTEXT = ("traceparent", "tracestate")
"""W3C Trace Context: SGLang's own spans (`--enable-trace`) become part of the client's trace. Where the gateway makes
spans, they are below its own."""

PASSED_THROUGH = tuple(ANNOUNCEMENTS)
"""A client's headers that its replica gets too."""
BODY_TIMEOUT_S = 60.0
"""Longest pause of a client between two pieces of its body."""


class Relay:
    """One request and its answer. `run` has its steps in their order; it returns when the client has an outcome or has
    left."""

    def __init__(self, kind: Kind, gateway: Gateway, request: Incoming) -> None:
        self._kind = kind
        self._gateway = gateway
        self._request = request
        self._headers = request.headers
        self._row = gateway.record.came(kind, self._headers.get(REQUEST_ID))
        request.own_headers = {REQUEST_ID: self._row.name}
        self._known = Known(None, Caller("-"))
        """As whom it is served."""
        self._allowance = Allowance(gateway.capacity)
        self._ticket: Ticket | None = None
        """What is charged to its tenant; None: there are no limits."""
        self._trace: Trace | None = None
        self._part = Part()
        """What it says of its interaction."""
        self._serving: Serving | None = None
        self._ttl_s: float | None = None
        """After which it is dropped, if it has not begun."""

    async def run(self) -> None:
        outcome: Outcome = "failed"
        try:
            self._known = self._gateway.identity.of(self._headers, self._request.client)
            await self._admit()
            promise = self._promised()
            outcome = await self._while_client_listens(await self._read_body(), promise)
        except ClientGone:
            outcome = "left"
        except ApiError as error:
            outcome = "refused" if error.status < 500 or error.code == EXPIRED_CODE else "failed"
            await self._refuse(error)
        finally:
            self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        """Gives back what it had, and has its record read."""
        gateway, row = self._gateway, self._row
        self._allowance.release()
        if self._serving is not None:
            self._serving.end(outcome)
        if self._ticket is not None:
            is_known = self._serving is None or not self._serving.is_uncounted
            was_taken = self._serving is not None and self._serving.was_taken
            self._ticket.close(row.output_tokens if is_known else None, was_taken=was_taken)
        if row.promise is not None:
            now_s = time.monotonic()
            row.attained = attained(row.promise, row.came_s, row.answered_s, now_s, outcome)
        gateway.record.ended(row, outcome)
        gateway.metrics.ended(row)
        if self._trace is not None:
            self._trace.end()

    # -- who asks, and what

    async def _admit(self) -> None:
        """Its client may ask: it is remembered, and takes its place. Raises `ApiError` 429."""
        gateway, known, row = self._gateway, self._known, self._row
        row.client, row.is_tenant = known.caller.client, known.tenant is not None
        gateway.record.enter(row)
        if gateway.tracing is not None:
            self._trace = gateway.tracing.begin(row, PATHS[self._kind], self._headers)
        self._ticket = await gateway.quotas.enter(known)
        if self._ticket is not None:
            self._ticket.headers[REQUEST_ID] = (
                row.name
            )  # what is left of the limits, as it is when it answers
            self._request.own_headers = self._ticket.headers
        # The body may still name the client. Until it is read, an unknown client counts by its address.
        is_unnamed = row.client == ANONYMOUS and gateway.identity.reads_user
        self._allowance.enter(address_share(self._request.client) if is_unnamed else row.client)

    def _promised(self) -> Promise:
        """What its headers ask for. Raises `ApiError` 400, which names the header, for what nobody can promise."""
        try:
            self._ttl_s = time_to_live(self._headers)
            return self._gateway.classes.promise(self._headers, self._row.came_s)
        except BadDeadline as error:
            raise ApiError(400, str(error), code="invalid_deadline", param=error.header) from None

    async def _read_body(self) -> bytes:
        if (whole := self._request.whole_body()) is not None:
            self._allowance.hold(len(whole))
            return whole
        limits = self._gateway.settings
        announced = self._headers.get("content-length", "")
        self._allowance.hold(min(int(announced), limits.max_body_bytes + 1) if announced.isdecimal() else 0)
        pieces: list[bytes] = []
        size = 0
        loop = self._request.loop
        try:
            until_s = loop.time() + limits.body_timeout_s
            async with asyncio.timeout(min(BODY_TIMEOUT_S, limits.body_timeout_s)) as timeout:
                while True:
                    piece, has_more = await self._request.body_piece()
                    size += len(piece)
                    self._allowance.hold(size)
                    pieces.append(piece)
                    if not has_more:
                        return b"".join(pieces)
                    timeout.reschedule(min(until_s, loop.time() + BODY_TIMEOUT_S))
        except TimeoutError as error:
            raise ApiError(408, "the body did not arrive in time", code="body_timeout") from error

    async def _while_client_listens(self, raw: bytes, promise: Promise) -> Outcome:
        """Serves the request; cancels that and raises `ClientGone` when the client disconnects, or `ApiError` 504 when
        it expires while no replica has it."""
        reply = self._request
        why: Exception | None = None
        serving = asyncio.current_task(reply.loop)
        assert serving is not None

        def stop(reason: Exception) -> None:
            nonlocal why
            if not (reply.ended or why):  # the end of an answer may be reported, too
                why = reason
                serving.cancel()

        def expire() -> None:
            if self._serving is not None:
                self._serving.is_overdue = True
            if self._serving is None or not self._serving.is_sent:  # else the replica knows, and it decides
                stop(expired())

        stop_watching = reply.when_client_leaves(lambda: stop(ClientGone()))
        timer = self._at_its_end(expire)
        try:
            call = await self._understood(raw, promise)
            if self._ttl_s is None and call.ttl_s is not None:
                self._ttl_s = call.ttl_s
                timer = self._at_its_end(expire)
            return await self._serve(call)
        except asyncio.CancelledError:
            if why is None:
                raise
            serving.uncancel()
            raise why from None
        finally:
            stop_watching()
            if timer is not None:
                timer.cancel()
            if reply.started:
                self._row.status = self._row.status or reply.status
                self._row.answered_s = reply.started_s if reply.status < 400 else None

    def _at_its_end(self, expire: Callable[[], None]) -> asyncio.TimerHandle | None:
        if self._ttl_s is None:
            return None
        left_s = self._row.came_s + self._ttl_s - time.monotonic()
        return self._request.loop.call_later(max(0.0, left_s), expire)

    async def _understood(self, raw: bytes, promise: Promise) -> Call:
        """The request in the body, which its client may make. Raises `ApiError`."""
        gateway, tenant, row = self._gateway, self._known.tenant, self._row
        longest = None if tenant is None else tenant.limits.output_tokens
        call = await gateway.intake.parsed(
            self._kind, raw, self._allowance.share, self._known.caller.group, longest
        )
        if tenant is not None and tenant.models is not None:
            check_models(call, tenant.models)
        if call.user and gateway.identity.reads_user:
            found = gateway.identity.of(self._headers, self._request.client, call.user)
            self._known = self._known._replace(caller=found.caller)
            row.client = found.caller.client
        if row.client != self._allowance.share:
            self._allowance.move(row.client)
        row.served_model = call.model
        if call.needs_engine:  # else it is no call of an interaction
            part = part_of(self._headers, call.body.get("metadata"))
            bound = None if tenant is None else tenant.apps
            apps = gateway.apps if bound is None else Apps({row.client: bound})
            self._part = part._replace(app=apps.of(row.client, part.app))
        if self._part.interaction:  # a later call of one is due when the first was
            gateway.interactions.tick(time.monotonic())
            interaction = Interaction(row.client, self._part.app, self._part.interaction)
            promise = gateway.interactions.promised(interaction) or promise
        row.promise = promise
        return call

    async def _serve(self, call: Call) -> Outcome:
        """Counts its tokens and has it served. Raises `ApiError` while its client has nothing."""
        intake, row, share = self._gateway.intake, self._row, self._allowance.share
        tokens = await intake.routed_tokens(call, share)
        row.input_tokens = len(tokens) // TOKEN_BYTES
        row.model = str(call.body.get("model") or call.model)[:MOST_NAME]
        if self._ticket is not None:
            await self._ticket.admit(row.input_tokens, call.max_output_tokens, call.unnamed)
        headers = self._headers_for_replica(call, await intake.system_tokens(call, share))
        self._serving = Serving(
            self._gateway, row, self._known, self._part, call, self._request, headers, self._trace
        )
        return await self._serving.run(tokens, None if self._ttl_s is None else row.came_s + self._ttl_s)

    def _headers_for_replica(self, call: Call, system_tokens: int) -> dict[str, str]:
        names = PASSED_THROUGH if self._trace is not None else PASSED_THROUGH + TRACE_CONTEXT
        headers = {
            "content-type": "application/json",
            HEADER_CLIENT: self._row.client,
            **self._known.caller.headers(),
            REQUEST_ID: self._row.name,
            **{name: bounded(self._headers[name]) for name in names if self._headers.get(name)},
            **self._part.headers(),
        }
        if call.asks_for_token_ids:
            headers[token_ids.HEADER] = "1"
        if call.salt is not None:
            headers[HEADER_SALT] = salt_header(call.salt)
        if system_tokens > 0:
            headers[HEADER_SYSTEM_TOKENS] = str(min(system_tokens, self._row.input_tokens or 0))
        return headers

    async def _refuse(self, error: ApiError) -> None:
        row = self._row
        row.failed(error.status, f"{error.code or error.status}: {error.message}")
        log.log(
            # Of these anybody can cause any number; they are counted.
            logging.DEBUG if error.status == 401 else logging.WARNING,
            "%s %d client=%s worker=%s: %s",
            PATHS[self._kind],
            error.status,
            row.client,
            next((one.worker for one in reversed(row.tries) if one.worker), "-"),
            error.message,
        )
        self._gateway.metrics.count("refusals_total", str(error.status))
        headers = {"content-type": "application/json", "x-fair-client": row.client, **error.headers}
        await self._request.answer(error.status, headers, error.body(style_of(self._kind)))
