"""One request from arrival to its outcome: read it, have the router place it, have a replica serve it.

What the client sees when a replica fails:

    before the first byte   nothing: another replica is tried, up to `tries`; then an error with Retry-After
    after it                nothing, where the stream can be continued (`answer.resume`); else the stream ends in a
                            `data: {"error": ...}` event without [DONE]

A client that leaves has its work cancelled. What follows a failed attempt is decided in `replicas.retries`. What
happens is noted in the request's record (`record.Exchange`), which counts, metrics, log and spans read at its end.
"""

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from starlette.types import Receive, Scope, Send

from router.client import RouterGone
from router.events import TOKEN_BYTES, Arrive, Due, Place, Refuse, Suspicion
from router.gateway.access.directory import Known
from router.gateway.access.quota import Ticket
from router.gateway.answer.leaving import when_client_leaves
from router.gateway.answer.reply import ClientGone, Reply
from router.gateway.answer.resume import Diverged, Resumable
from router.gateway.answer.sse import DONE
from router.gateway.answer.typed import error_event
from router.gateway.clients import address_share, header_safe
from router.gateway.errors import ApiError
from router.gateway.gateway import Gateway
from router.gateway.record import MOST_NAME, REQUEST_ID, Try
from router.gateway.replicas.attempt import Attempt
from router.gateway.replicas.retries import MAX_ENDED, Failed, Retries
from router.gateway.request.call import Call, check_models
from router.gateway.request.intake import MAX_ROUTED_TOKENS
from router.gateway.request.kinds import PATHS, Kind, style_of
from router.gateway.sharing.allowance import Allowance
from router.suspects import fingerprint
from router.wire import pack_tokens, unpack_tokens
from sglang_fair.common import token_ids
from sglang_fair.common.caller import HEADER_SALT, Caller, salt_header
from sglang_fair.common.deadlines import HEADER_TIER, BadDeadline, Promise, attained
from sglang_fair.common.identity import (
    ANNOUNCEMENTS,
    ANONYMOUS,
    HEADER_ATTEMPT,
    HEADER_CALL,
    HEADER_CLIENT,
    HEADER_SYSTEM_TOKENS,
)
from sglang_fair.common.interaction import Apps, Part, part_of
from sglang_fair.common.names import fresh_name
from sglang_fair.common.swapping import HEADER_MODEL
from sglang_fair.core.interactions import Interaction

if TYPE_CHECKING:  # imported only where spans are made
    from router.gateway.tracing import Trace

log = logging.getLogger("gateway")

Outcome = Literal["ok", "refused", "failed", "left"]
"""How a request ends (`sglang_fair.metrics.table.OUTCOMES`)."""

TRACE_CONTEXT = ("traceparent", "tracestate")
"""W3C Trace Context: SGLang's own spans (`--enable-trace`) become part of the client's trace. Where the gateway makes
spans, they are below its own."""

PASSED_THROUGH = tuple(ANNOUNCEMENTS)
"""A client's headers that its replica gets too."""
BODY_TIMEOUT_S = 60.0
"""Longest pause of a client between two pieces of its body."""
LARGE_BYTES = 1 << 18
"""A request of this size gets no second replica when the first falls silent: its size alone may be the cause."""


class Relay:
    """The ASGI endpoint of one kind of requests."""

    def __init__(self, kind: Kind, gateway: Gateway) -> None:
        self._kind = kind
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; returns when its client has an outcome or has left."""
        await _Exchange(self._kind, self._gateway, scope, receive, send).run()


class _Leg(NamedTuple):
    """What the next replica is asked for: the request, or what is left of it."""

    call: Call
    tokens: bytes
    """Its prompt, for the router."""
    waiting_since_s: float


class _Exchange:
    """One request and its answer. `run` has its steps in their order."""

    def __init__(self, kind: Kind, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        self._kind = kind
        self._gateway = gateway
        self._scope = scope
        self._receive = receive
        self._send = send
        self._headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self._row = gateway.record.came(kind, self._headers.get(REQUEST_ID))
        self._own_headers = {REQUEST_ID: self._row.name}
        """Of every answer: the request's name, and what is left of its tenant's limits."""
        self._known = Known(None, Caller("-"))
        """As whom it is served."""
        self._allowance = Allowance(gateway.capacity)
        self._ticket: Ticket | None = None
        """What is charged to its tenant; None: there are no limits."""
        self._trace: Trace | None = None
        self._part = Part()
        """What it says of its interaction."""
        self._is_open = False
        """The gateway counts it as under way in its interaction."""
        self._call_number = 0
        """In its interaction, from the router; 0: not known."""
        self._promise: Promise | None = None
        """By when its next token is due, on the monotonic clock; None while it is not known what it asks for."""
        self._fingerprint = ""
        self._retries = Retries(gateway.settings.tries)
        self._attempt: Attempt | None = None
        """That under way."""
        self._was_taken = False
        """A replica has, or may have, computed something for it."""
        self._next_number = 0
        """Of the event that follows what the client has, in a stream that numbers them."""

    async def run(self) -> None:
        outcome: Outcome = "failed"
        try:
            self._known = self._gateway.identity.of(self._headers, self._scope.get("client"))
            await self._admit()
            promise = self._promised()
            outcome = await self._while_client_listens(await self._read_body(), promise)
        except ClientGone:
            outcome = "left"
        except ApiError as error:
            outcome = "refused" if error.status < 500 else "failed"
            await self._refuse(error)
        finally:
            self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        """Gives back what it had, and has its record read."""
        gateway, row = self._gateway, self._row
        self._allowance.release()
        attempt, row.output_tokens = self._attempt, self._answered()
        if self._ticket is not None:
            is_known = attempt is None or not attempt.is_uncounted
            was_taken = self._was_taken or (attempt is not None and attempt.was_taken)
            self._ticket.close(row.output_tokens if is_known else None, was_taken=was_taken)
        if self._is_open:
            is_answered = self._part.is_last and outcome == "ok"
            gateway.interactions.end(self._interaction(), is_answered=is_answered)
        if row.promise is not None:
            now_s = time.monotonic()
            row.attained = attained(row.promise, row.came_s, row.answered_s, now_s, outcome)
        gateway.record.ended(row, outcome)
        gateway.metrics.ended(row)
        if self._trace is not None:
            self._trace.end()

    def _answered(self) -> int:
        """Output tokens that the client has."""
        return self._row.output_tokens + (0 if self._attempt is None else self._attempt.output_tokens)

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
            self._own_headers = self._ticket.headers
            self._own_headers[REQUEST_ID] = row.name
        # The body may still name the client. Until it is read, an unknown client counts by its address.
        is_unnamed = row.client == ANONYMOUS and gateway.identity.reads_user
        self._allowance.enter(address_share(self._scope.get("client")) if is_unnamed else row.client)

    def _promised(self) -> Promise:
        """What its headers ask for. Raises `ApiError` 400, which names the header, for what nobody can promise."""
        try:
            return self._gateway.classes.promise(self._headers, self._row.came_s)
        except BadDeadline as error:
            raise ApiError(400, str(error), code="invalid_deadline", param=error.header) from None

    async def _read_body(self) -> bytes:
        limits = self._gateway.settings
        announced = self._headers.get("content-length", "")
        self._allowance.hold(min(int(announced), limits.max_body_bytes + 1) if announced.isdecimal() else 0)
        pieces: list[bytes] = []
        size = 0
        loop = asyncio.get_running_loop()
        try:
            until_s = loop.time() + limits.body_timeout_s
            async with asyncio.timeout(min(BODY_TIMEOUT_S, limits.body_timeout_s)) as timeout:
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece = message.get("body", b"")
                    size += len(piece)
                    self._allowance.hold(size)
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        return b"".join(pieces)
                    timeout.reschedule(min(until_s, loop.time() + BODY_TIMEOUT_S))
        except TimeoutError as error:
            raise ApiError(408, "the body did not arrive in time", code="body_timeout") from error

    async def _while_client_listens(self, raw: bytes, promise: Promise) -> Outcome:
        """Serves the request; cancels that and raises `ClientGone` when the client disconnects."""
        reply = Reply(self._send, self._gateway.settings.idle_timeout_s, self._own_headers)
        serving, has_left = asyncio.current_task(), False
        assert serving is not None

        def leave() -> None:
            nonlocal has_left
            if not (reply.ended or has_left):  # the end of an answer may be reported, too
                has_left = True
                serving.cancel()

        stop_watching = when_client_leaves(self._scope, self._receive, leave)
        try:
            return await self._serve(await self._understood(raw, promise), reply)
        except asyncio.CancelledError:
            if not has_left:
                raise
            serving.uncancel()
            raise ClientGone from None
        finally:
            stop_watching()
            reply.close()
            if reply.started:
                self._row.status = self._row.status or reply.status
                self._row.answered_s = reply.started_s if reply.status < 400 else None

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
            found = gateway.identity.of(self._headers, self._scope.get("client"), call.user)
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
            promise = gateway.interactions.promised(self._interaction()) or promise
        self._promise = row.promise = promise
        return call

    def _interaction(self) -> Interaction:
        return Interaction(self._row.client, self._part.app, self._part.interaction)

    # -- serving

    async def _serve(self, call: Call, reply: Reply) -> Outcome:
        """Makes attempts until the client has an outcome. Raises `ApiError` while it has nothing."""
        gateway, row, share = self._gateway, self._row, self._allowance.share
        tokens = await gateway.intake.routed_tokens(call, share)
        row.input_tokens = len(tokens) // TOKEN_BYTES
        row.model = str(call.body.get("model") or call.model)[:MOST_NAME]
        if self._ticket is not None:
            await self._ticket.admit(row.input_tokens, call.max_output_tokens, call.unnamed)
        headers = self._headers_for_replica(call, await gateway.intake.system_tokens(call, share))
        self._fingerprint = fingerprint(row.client, call.encoded)
        max_silenced = 1 if len(call.encoded) > LARGE_BYTES else MAX_ENDED
        self._retries = Retries(gateway.settings.tries, max_silenced)
        resumable = Resumable(call) if call.can_go_on else None
        leg = _Leg(call, tokens, row.came_s)
        failed = await self._tried(leg, headers, reply, resumable)
        while failed is not None:
            if resumable is not None and reply.started and resumable.is_complete:
                await reply.end(resumable.closing() + DONE)
                return "ok"
            try:
                has_begun = reply.started
                await asyncio.sleep(
                    self._retries.after(failed, has_begun=has_begun, can_go_on=resumable is not None)
                )
            except ApiError as error:
                await self._give_up(error, reply)
                return "failed"
            if has_begun and resumable is not None:
                try:
                    leg = self._rest(resumable, leg.call, tokens)
                except Diverged as error:
                    failed = Failed("mismatch", str(error))
                    continue
            else:
                gateway.metrics.count("retries_total")
            failed = await self._tried(leg, headers, reply, resumable)
        return "ok" if reply.status < 400 else "refused" if reply.status < 500 else "failed"

    async def _tried(
        self, leg: _Leg, headers: dict[str, str], reply: Reply, resumable: Resumable | None
    ) -> Failed | Refuse | None:
        """Has the leg placed and, if it is, served; None: to its end."""
        gateway, row = self._gateway, self._row
        arrive = self._arrive(leg, goes_on=reply.started)
        noted = gateway.record.tried(row, arrive.id)
        if self._trace is not None:
            headers = headers | self._trace.attempt(noted)
        try:
            place = await gateway.placer.place(arrive)
            if isinstance(place, Refuse):
                noted.outcome, noted.reason = "refused", place.reason
                return place
            return await self._served(leg, place, noted, headers, reply, resumable)
        except RouterGone as error:
            noted.outcome, noted.reason = "unplaced", str(error)
            return Failed("unplaced", str(error))
        finally:
            noted.ended_s = time.monotonic()
            noted.outcome = noted.outcome or "left"

    async def _served(
        self,
        leg: _Leg,
        place: Place,
        noted: Try,
        headers: dict[str, str],
        reply: Reply,
        resumable: Resumable | None,
    ) -> Failed | None:
        """Has a replica serve the leg."""
        gateway, row = self._gateway, self._row
        if len(row.tries) == 1:
            self._let_in(place)
        gateway.record.placed(row, noted, place, itself=gateway.placer.placed_itself(place.id))
        attempt = self._attempt = Attempt(
            gateway.replicas,
            gateway.placer,
            leg.call,
            place,
            client=row.client,
            waiting_since_s=leg.waiting_since_s,
            progress_interval_s=gateway.settings.progress_interval_s,
            patient_until_s=self._patient_until_s(),
            suspicion=Suspicion(row.client, self._fingerprint, len(self._retries.ended) + 1),
        )
        if leg.call.stream:
            gateway.cuts[place.id] = partial(self._cut, attempt, leg, reply, resumable)
        try:
            failed = await attempt.run(headers | self._headers_of(place), reply, resumable)
        finally:
            gateway.cuts.pop(place.id, None)
            noted.first_s = attempt.first_s
            if attempt.usage.cached_tokens is not None:
                row.cached_tokens = attempt.usage.cached_tokens
        noted.outcome = "ok" if failed is None else "failed"
        if failed is None or reply.started:
            row.output_tokens += attempt.output_tokens
        self._was_taken |= attempt.was_taken
        self._next_number = attempt.next_number
        self._attempt = None
        if failed is not None:
            noted.reason = failed.reason
            if failed.how == "lost":
                log.warning(
                    "request %s client=%s worker %s: %s", place.id, row.client, place.worker, failed.reason
                )
        return failed

    def _arrive(self, leg: _Leg, *, goes_on: bool) -> Arrive:
        """What the router is asked."""
        gateway, row, known, part = self._gateway, self._row, self._known, self._part
        now_s = time.monotonic()
        gateway.interactions.tick(now_s)
        limits = None if known.tenant is None else known.tenant.overload
        return Arrive(
            id=fresh_name(),
            client=row.client,
            tokens=leg.tokens,
            max_output_tokens=leg.call.max_output_tokens,
            namespace=leg.call.namespace,
            exclude=self._retries.excluded,
            weight=known.caller.weight,
            weight_version=known.caller.version,
            request=row.name,
            app=part.app,
            interaction=part.interaction,
            stage=part.stage,
            last=part.is_last,
            attempt=len(row.tries),
            begun=gateway.interactions.calls(self._interaction()) if part.interaction else 0,
            most_calls=None if limits is None else limits.calls_per_minute,
            app_calls=None if limits is None else limits.of_app(part.app),
            model=leg.call.model,
            due=None if self._promise is None else Due.of(self._promise, now_s),
            stands_for=known.stands_for,
            fingerprint=self._fingerprint,
            lost=len(self._retries.ended),
            goes_on=goes_on,
        )

    def _headers_for_replica(self, call: Call, system_tokens: int) -> dict[str, str]:
        """Of every attempt."""
        names = PASSED_THROUGH if self._trace is not None else PASSED_THROUGH + TRACE_CONTEXT
        headers = {
            "content-type": "application/json",
            HEADER_CLIENT: self._row.client,
            **self._known.caller.headers(),
            REQUEST_ID: self._row.name,
            **{name: header_safe(self._headers[name]) for name in names if self._headers.get(name)},
            **self._part.headers(),
        }
        if call.asks_for_token_ids:
            headers[token_ids.HEADER] = "1"
        if call.salt is not None:
            headers[HEADER_SALT] = salt_header(call.salt)
        if system_tokens > 0:
            headers[HEADER_SYSTEM_TOKENS] = str(min(system_tokens, self._row.input_tokens or 0))
        return headers

    def _headers_of(self, place: Place) -> dict[str, str]:
        """Of one attempt."""
        headers = {HEADER_ATTEMPT: place.id}
        if self._promise is not None:
            headers |= self._promise.headers(time.monotonic())
        if self._call_number:
            headers[HEADER_CALL] = str(self._call_number)
        if place.tier:
            headers[HEADER_TIER] = str(place.tier)
        if place.model:
            headers[HEADER_MODEL] = place.model
        return headers

    def _let_in(self, place: Place) -> None:
        """The first attempt at the call was."""
        self._call_number = place.call
        if not self._part.interaction:
            return
        self._is_open = True
        interactions, name, now_s = self._gateway.interactions, self._interaction(), time.monotonic()
        if place.due is not None and place.due.slo_class in self._gateway.classes.seconds:
            self._promise = self._row.promise = place.due.promise(now_s)
        interactions.told(name, place.call or interactions.calls(name) + 1)
        if self._promise is not None:
            interactions.promise(name, self._promise)

    def _rest(self, resumable: Resumable, call: Call, tokens: bytes) -> _Leg:
        """The rest of the stream. Raises `Diverged` if nobody can continue it."""
        following = resumable.next_leg(unpack_tokens(tokens), self._gateway.intake.decoder(call))
        if following.tokens is not None:
            tokens = pack_tokens(following.tokens[:MAX_ROUTED_TOKENS])
        self._gateway.metrics.count("resumes_total")
        self._row.resumed += 1
        now_s = time.monotonic()
        if self._promise is not None:
            self._promise = self._promise.renewed(now_s)
        return _Leg(following.call, tokens, now_s)

    def _cut(self, attempt: Attempt, leg: _Leg, reply: Reply, resumable: Resumable | None) -> None:
        """Cuts a stream off if nothing of it is lost by that: the client has none of it, or it can go on."""
        if reply.started:
            decode = self._gateway.intake.decoder(leg.call)
            if resumable is None or not resumable.can_go_on(unpack_tokens(leg.tokens), decode):
                return
        self._gateway.metrics.count("cuts_total")
        attempt.cut()

    def _patient_until_s(self) -> float | None:
        """Timeouts are made for the first class. Who may be answered later than that may wait longer by so much."""
        classes = self._gateway.classes
        return None if self._promise is None else self._promise.due_s - classes.seconds[classes.default]

    # -- errors

    async def _give_up(self, error: ApiError, reply: Reply) -> None:
        """No attempt follows: raises `error` while the client has nothing, else ends its stream with it."""
        row, ended = self._row, self._retries.ended
        if len(ended) >= MAX_ENDED:
            log.error(
                "request %s client=%s fingerprint=%s: replicas %s ended while they had it",
                row.name,
                row.client,
                self._fingerprint,
                ", ".join(ended),
            )
        if not reply.started:
            raise error
        row.failed(error.status, f"{error.code or error.status}: {error.message}")
        await reply.end(error_event(self._kind, error, self._next_number))

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
        headers = [(b"content-type", b"application/json"), (b"x-fair-client", row.client.encode("latin-1"))]
        more = {**self._own_headers, **error.headers}
        headers += [(name.encode(), value.encode()) for name, value in more.items()]
        body = error.body(style_of(self._kind))
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})
