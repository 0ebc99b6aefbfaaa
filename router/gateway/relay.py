"""One request from arrival to its outcome: read it, have the router place it, have a replica serve it.

What the client sees when a replica fails:

    before the first byte   nothing: another replica is tried, up to `tries`; then an error with Retry-After
    after it                nothing, where the stream can be continued exactly (`answer.resume`); else the stream
                            ends in a `data: {"error": ...}` event without [DONE]

A client that leaves has its work cancelled. What follows a failed attempt is decided in `replicas.retries`.
"""

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, assert_never

from starlette.types import Receive, Scope, Send

from router.client import RouterGone
from router.events import TOKEN_BYTES, Arrive, Due, Place, Refuse, Suspicion
from router.gateway.access.identity import Headers, Peer
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
from router.gateway.replicas.retries import (
    MAX_ENDED,
    ContinueElsewhere,
    EndStream,
    Finish,
    GiveUp,
    Lost,
    Mismatch,
    Outcome,
    Retries,
    Sent,
    Served,
    TryAnother,
    Unplaced,
)
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
from sglang_fair.tenants.model import Tenant

if TYPE_CHECKING:  # imported only where spans are made
    from router.gateway.tracing import Trace

log = logging.getLogger("gateway")

Outcomes = Literal["ok", "refused", "failed", "left"]
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


@dataclass
class _Leg:
    """What the next replica is asked for: the request, or what is left of it."""

    call: Call
    tokens: bytes
    """Its prompt, for the router."""
    waiting_since_s: float


class _Exchange:
    """One request and its answer."""

    def __init__(self, kind: Kind, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        self._kind = kind
        self._scope = scope
        self._gateway = gateway
        self._receive = receive
        self._send = send
        self._allowance = Allowance(gateway.capacity)
        self._caller = Caller("-")
        """As whom it is served; nobody until that is known."""
        self._tenant: Tenant | None = None
        self._stands_for = 1
        self._ticket: Ticket | None = None
        """What is charged to its tenant; None: there are no limits."""
        self._attempting: Attempt | None = None
        self._answered_before = 0
        """Output tokens of earlier attempts that the client has."""
        self._was_taken = False
        """A replica has, or may have, computed something for it."""
        self._next_number = 0
        """Of the event that follows what the client has, in a stream that numbers them."""
        self._own_headers: dict[str, str] = {}
        """Of every answer: the request's name, and what is left of its tenant's limits."""
        self._worker = "-"
        self._arrived_s = time.monotonic()
        self._is_known = False
        """Its client may ask."""
        self._part = Part()
        """What it says of its interaction."""
        self._promise: Promise | None = None
        """By when its first token is due, on the monotonic clock; None while it is not known what it asks for."""
        self._call_number = 0
        """In that, from the router; 0: not known yet."""
        self._is_open = False
        """The gateway counts it as under way in its interaction."""
        self._attempts = 0
        self._fingerprint = ""
        self._retries = Retries(gateway.settings.tries)
        self._outcome: Outcomes = "failed"
        self._prompt_tokens = 0
        self._first_s: float | None = None
        """When the first piece of a stream went out."""
        self._answered_s: float | None = None
        """When the first piece of any answer did."""
        self._model: str | None = None
        """Which it is for; None: nobody knows yet."""
        self._trace: Trace | None = None

    async def run(self) -> None:
        gateway, scope = self._gateway, self._scope
        gateway.counters.requests += 1
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self._noted = gateway.record.came(self._kind, headers.get(REQUEST_ID))
        self._own_headers[REQUEST_ID] = self._noted.name
        try:
            peer = scope.get("client")
            known = gateway.identity.of(headers, peer)
            self._caller, self._tenant, self._is_known = known.caller, known.tenant, True
            self._stands_for = known.stands_for
            self._noted.client = self._client
            gateway.record.enter(self._noted)
            if gateway.tracing is not None:
                self._trace = gateway.tracing.begin(self._noted, PATHS[self._kind], headers)
            self._ticket = await gateway.quotas.enter(known)
            if self._ticket is not None:
                self._ticket.headers[REQUEST_ID] = self._noted.name
                self._own_headers = self._ticket.headers
            # The body may still name the client. Until it is read, an unknown client counts by its address.
            is_unnamed = self._client == ANONYMOUS and gateway.identity.reads_user
            self._allowance.enter(address_share(peer) if is_unnamed else self._client)
            promise = self._promised(headers)
            raw = await self._read_body(headers)
            await self._while_client_listens(raw, headers, peer, promise)
        except ClientGone:
            self._outcome = "left"
            gateway.counters.left += 1
        except ApiError as error:
            self._noted.error = f"{error.code or error.status}: {error.message}"
            self._noted.status = error.status
            if error.status < 500:
                self._outcome = "refused"
                gateway.counters.refused += 1
            else:
                gateway.counters.failed += 1
            await self._refuse(error)
        finally:
            self._allowance.release()
            if self._ticket is not None:
                self._close(self._ticket)
            if self._is_open:
                is_answered = self._part.is_last and self._outcome == "ok"
                gateway.interactions.end(self._interaction(), is_answered=is_answered)
            self._count()
            self._count_model_and_class()
            self._noted.output_tokens = self._answered()
            gateway.record.ended(self._noted, self._outcome)
            if self._trace is not None:
                self._trace.end()

    def _answered(self) -> int:
        """Output tokens that the client has."""
        return self._answered_before + (self._attempting.output_tokens if self._attempting is not None else 0)

    def _close(self, ticket: Ticket) -> None:
        """The end of what its tenant is charged."""
        attempt = self._attempting
        is_known = attempt is None or not attempt.is_uncounted
        was_taken = self._was_taken or (attempt is not None and attempt.was_taken)
        ticket.close(self._answered() if is_known else None, was_taken=was_taken)

    def _count(self) -> None:
        """For the metrics."""
        self._gateway.metrics.ended(
            self._client if self._is_known else None,
            self._outcome,
            is_tenant=self._tenant is not None,
            tokens=self._prompt_tokens + self._answered(),
            duration_s=time.monotonic() - self._arrived_s,
            ttft_s=None if self._first_s is None else self._first_s - self._arrived_s,
        )

    def _count_model_and_class(self) -> None:
        """For the metrics and the record."""
        counters = self._gateway.counters
        if self._model is not None:
            counters.models[self._model, self._outcome] += 1
        if self._promise is not None:
            now_s = time.monotonic()
            found = attained(self._promise, self._arrived_s, self._answered_s, now_s, self._outcome)
            counters.classes[self._promise.slo_class, found] += 1
            if self._tenant is not None:
                counters.of_tenants.setdefault(self._client, Counter())[self._promise.slo_class, found] += 1
            self._noted.attained = found

    @property
    def _client(self) -> str:
        return self._caller.client

    # -- reading

    async def _read_body(self, headers: Headers) -> bytes:
        limits = self._gateway.settings
        announced = headers.get("content-length", "")
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

    async def _while_client_listens(self, raw: bytes, headers: Headers, peer: Peer, promise: Promise) -> None:
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
            call = await self._gateway.intake.parsed(
                self._kind, raw, self._allowance.share, self._caller.group, self._longest_answer()
            )
            self._check_model(call)
            self._name_client(call, headers, peer)
            self._model = call.model
            self._part = self._part_of(call, headers)
            self._keep(promise)
            await self._serve(call, self._headers_for_replica(headers), reply)
        except asyncio.CancelledError:
            if not has_left:
                raise
            serving.uncancel()
            raise ClientGone from None
        finally:
            self._noted.status = self._noted.status or reply.status or None
            stop_watching()
            reply.close()
            if reply.started and reply.is_stream:
                self._first_s = reply.started_s
            if reply.started and reply.status < 400:
                self._answered_s = reply.started_s

    def _longest_answer(self) -> int | None:
        return None if self._tenant is None else self._tenant.limits.output_tokens

    def _check_model(self, call: Call) -> None:
        if self._tenant is not None and self._tenant.models is not None:
            check_models(call, self._tenant.models)

    def _name_client(self, call: Call, headers: Headers, peer: Peer) -> None:
        identity = self._gateway.identity
        if call.user and identity.reads_user:
            self._caller = identity.of(headers, peer, call.user).caller
        self._noted.client = self._client
        if self._client != self._allowance.share:
            self._allowance.move(self._client)

    def _part_of(self, call: Call, headers: Headers) -> Part:
        """With an application that its client may name."""
        if not call.needs_engine:
            return Part()  # it is no call of an interaction
        part = part_of(headers, call.body.get("metadata"))
        apps = self._gateway.apps
        if self._tenant is not None and self._tenant.apps is not None:
            apps = Apps({self._client: self._tenant.apps})
        app = apps.of(self._client, part.app)
        return part if app == part.app else part._replace(app=app)

    def _promised(self, headers: Headers) -> Promise:
        """What its headers ask for. Raises `ApiError` 400, which names the header, for what nobody can promise."""
        try:
            return self._gateway.classes.promise(headers, self._arrived_s)
        except BadDeadline as error:
            raise ApiError(400, str(error), code="invalid_deadline", param=error.header) from None

    def _keep(self, promise: Promise) -> None:
        """What holds for it, as far as is known here: a later call of an interaction is due when the first was."""
        if self._part.interaction:
            self._gateway.interactions.tick(time.monotonic())
            promise = self._gateway.interactions.promised(self._interaction()) or promise
        self._promise = self._noted.promise = promise

    def _interaction(self) -> Interaction:
        return Interaction(self._client, self._part.app, self._part.interaction)

    def _headers_for_replica(self, headers: Headers) -> dict[str, str]:
        names = PASSED_THROUGH if self._trace is not None else PASSED_THROUGH + TRACE_CONTEXT
        passed_on = {name: header_safe(headers[name]) for name in names if headers.get(name)}
        own = {"content-type": "application/json", HEADER_CLIENT: self._client} | self._caller.headers()
        own[REQUEST_ID] = self._noted.name
        return own | passed_on | self._part.headers()

    # -- serving

    async def _serve(self, call: Call, headers: dict[str, str], reply: Reply) -> None:
        """Makes attempts until the client has an outcome. Raises `ApiError` while it has nothing."""
        gateway = self._gateway
        tokens = await gateway.intake.routed_tokens(call, self._allowance.share)
        self._prompt_tokens = self._noted.input_tokens = len(tokens) // TOKEN_BYTES
        self._noted.model = str(call.body.get("model") or call.model)[:MOST_NAME]
        if self._ticket is not None:
            await self._ticket.admit(self._prompt_tokens, call.max_output_tokens, call.unnamed)
        resumable = Resumable(call) if call.can_go_on else None
        if call.asks_for_token_ids:
            headers |= {token_ids.HEADER: "1"}
        if call.salt is not None:
            headers |= {HEADER_SALT: salt_header(call.salt)}
        if (system_tokens := await gateway.intake.system_tokens(call, self._allowance.share)) > 0:
            headers |= {HEADER_SYSTEM_TOKENS: str(min(system_tokens, self._prompt_tokens))}
        self._fingerprint = fingerprint(self._client, call.encoded)
        max_silenced = 1 if len(call.encoded) > LARGE_BYTES else MAX_ENDED
        retries = self._retries = Retries(gateway.settings.tries, max_silenced)
        leg = _Leg(call, tokens, self._arrived_s)
        outcome = await self._attempt(leg, retries.excluded, headers, reply, resumable)
        while True:
            sent = Sent.NOTHING if isinstance(outcome, Served) else _sent(reply, resumable)
            match retries.after(outcome, sent):
                case Finish():
                    self._outcome = (
                        "ok" if reply.status < 400 else "refused" if reply.status < 500 else "failed"
                    )
                    return
                case TryAnother(after_s):
                    gateway.counters.retried += 1
                    await asyncio.sleep(after_s)
                case ContinueElsewhere(after_s):
                    gateway.counters.resumed += 1
                    await asyncio.sleep(after_s)
                    if self._promise is not None:
                        self._promise = self._promise.renewed(time.monotonic())
                    self._noted.resumed += 1
                    assert resumable is not None
                    try:
                        leg = self._next_leg(call, resumable, tokens)
                    except Diverged as error:
                        outcome = Mismatch(str(error))
                        continue
                case EndStream():
                    await reply.end((resumable.closing() if resumable is not None else b"") + DONE)
                    self._outcome = "ok"
                    return
                case GiveUp(error):
                    if len(retries.ended) >= MAX_ENDED:
                        log.error(
                            "request %s client=%s fingerprint=%s: replicas %s ended while they had it",
                            self._noted.name,
                            self._client,
                            self._fingerprint,
                            ", ".join(retries.ended),
                        )
                    if not reply.started:
                        raise error
                    gateway.counters.failed += 1
                    self._noted.error = f"{error.code or error.status}: {error.message}"
                    self._noted.status = error.status
                    await reply.end(error_event(self._kind, error, self._next_number))
                    return
                case step:
                    assert_never(step)
            outcome = await self._attempt(leg, retries.excluded, headers, reply, resumable)

    async def _attempt(
        self,
        leg: _Leg,
        excluded: tuple[str, ...],
        headers: dict[str, str],
        reply: Reply,
        resumable: Resumable | None,
    ) -> Outcome:
        """Has the leg placed and, if it is, served."""
        gateway = self._gateway
        part, name = self._part, self._interaction()
        gateway.interactions.tick(time.monotonic())
        limits = None if self._tenant is None else self._tenant.overload
        arrive = Arrive(
            id=fresh_name(),
            client=self._client,
            tokens=leg.tokens,
            max_output_tokens=leg.call.max_output_tokens,
            namespace=leg.call.namespace,
            exclude=excluded,
            weight=self._caller.weight,
            weight_version=self._caller.version,
            request=self._noted.name,
            app=part.app,
            interaction=part.interaction,
            stage=part.stage,
            last=part.is_last,
            attempt=self._attempts,
            begun=gateway.interactions.calls(name) if part.interaction else 0,
            most_calls=None if limits is None else limits.calls_per_minute,
            app_calls=None if limits is None else limits.of_app(part.app),
            model=leg.call.model,
            due=None if self._promise is None else Due.of(self._promise, time.monotonic()),
            stands_for=self._stands_for,
            fingerprint=self._fingerprint,
            lost=len(self._retries.ended),
            goes_on=reply.started,
        )
        self._attempts += 1
        noted = gateway.record.tried(self._noted, arrive.id)
        if self._trace is not None:
            headers = headers | self._trace.attempt(noted)
        try:
            return await self._place_and_serve(leg, arrive, noted, headers, reply, resumable)
        finally:
            noted.ended_s = time.monotonic()
            noted.outcome = noted.outcome or "left"

    async def _place_and_serve(
        self,
        leg: _Leg,
        arrive: Arrive,
        noted: Try,
        headers: dict[str, str],
        reply: Reply,
        resumable: Resumable | None,
    ) -> Outcome:
        gateway = self._gateway
        try:
            place = await gateway.placer.place(arrive)
        except RouterGone as error:
            noted.outcome, noted.reason = "unplaced", str(error)
            return Unplaced(str(error))
        if isinstance(place, Refuse):
            noted.outcome, noted.reason = "refused", place.reason
            return place
        self._note_call(place)
        if self._call_number:
            headers |= {HEADER_CALL: str(self._call_number)}
        if self._promise is not None:
            headers = headers | self._promise.headers(time.monotonic())
        if place.tier:
            headers = headers | {HEADER_TIER: str(place.tier)}
        gateway.record.placed(self._noted, noted, place, itself=gateway.placer.placed_itself(place.id))
        self._worker = place.worker
        attempt = self._attempting = Attempt(
            gateway.replicas,
            gateway.placer,
            leg.call,
            place,
            client=self._client,
            waiting_since_s=leg.waiting_since_s,
            progress_interval_s=gateway.settings.progress_interval_s,
            patient_until_s=self._patient_until_s(),
            suspicion=Suspicion(self._client, self._fingerprint, len(self._retries.ended) + 1),
        )
        own = {HEADER_ATTEMPT: place.id} | ({HEADER_MODEL: place.model} if place.model else {})
        if leg.call.stream:
            gateway.cuts[place.id] = partial(self._cut, attempt, leg, reply, resumable)
        try:
            outcome = await attempt.run(headers | own, reply, resumable)
        finally:
            gateway.cuts.pop(place.id, None)
            noted.first_s = attempt.first_s
            if attempt.usage.cached_tokens is not None:
                self._noted.cached_tokens = attempt.usage.cached_tokens
        _note(noted, outcome)
        if isinstance(outcome, Served) or reply.started:
            self._answered_before += attempt.output_tokens
        self._was_taken |= attempt.was_taken
        self._next_number = attempt.next_number
        self._attempting = None
        if isinstance(outcome, Lost):
            log.warning(
                "request %s client=%s worker %s: %s", place.id, self._client, outcome.worker, outcome.reason
            )
        return outcome

    def _cut(self, attempt: Attempt, leg: _Leg, reply: Reply, resumable: Resumable | None) -> None:
        """Cuts a stream off if nothing of it is lost by that: the client has none of it, or it goes on by its
        tokens."""
        if reply.started:
            decode = self._gateway.intake.decoder(leg.call)
            if resumable is None or not resumable.can_go_on(unpack_tokens(leg.tokens), decode):
                return
        self._gateway.counters.cut += 1
        attempt.cut()

    def _patient_until_s(self) -> float | None:
        """Timeouts are made for the first class. Who may be answered later than that may wait longer by so much."""
        classes = self._gateway.classes
        return None if self._promise is None else self._promise.due_s - classes.seconds[classes.default]

    def _note_call(self, place: Place) -> None:
        """The first attempt at the call was let in."""
        if self._attempts > 1:
            return
        self._call_number = place.call
        if self._part.interaction:
            self._is_open = True
            if place.due is not None and place.due.slo_class in self._gateway.classes.seconds:
                self._promise = self._noted.promise = place.due.promise(time.monotonic())
            interactions, name = self._gateway.interactions, self._interaction()
            interactions.told(name, place.call or interactions.calls(name) + 1)
            if self._promise is not None:
                interactions.promise(name, self._promise)

    def _next_leg(self, call: Call, resumable: Resumable, tokens: bytes) -> _Leg:
        """The rest of the stream. Raises `Diverged` if nobody can continue it."""
        following = resumable.next_leg(unpack_tokens(tokens), self._gateway.intake.decoder(call))
        if following.tokens is not None:
            tokens = pack_tokens(following.tokens[:MAX_ROUTED_TOKENS])
        return _Leg(following.call, tokens, time.monotonic())

    async def _refuse(self, error: ApiError) -> None:
        log.log(
            # Of these anybody can cause any number; they are counted.
            logging.DEBUG if error.status == 401 else logging.WARNING,
            "%s %d client=%s worker=%s: %s",
            PATHS[self._kind],
            error.status,
            self._client,
            self._worker,
            error.message,
        )
        self._gateway.counters.refusals[error.status] += 1
        headers = [(b"content-type", b"application/json"), (b"x-fair-client", self._client.encode("latin-1"))]
        more = {**self._own_headers, **error.headers}
        headers += [(name.encode(), value.encode()) for name, value in more.items()]
        body = error.body(style_of(self._kind))
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _note(noted: Try, outcome: Outcome) -> None:
    """How an attempt ended."""
    noted.outcome = "ok" if isinstance(outcome, Served) else "failed"
    noted.reason = getattr(outcome, "reason", "")


def _sent(reply: Reply, resumable: Resumable | None) -> Sent:
    """What the client has got so far."""
    if not reply.started:
        return Sent.NOTHING
    if resumable is None:
        return Sent.FIXED
    return Sent.ALL_BUT_END if resumable.is_complete else Sent.CONTINUABLE
