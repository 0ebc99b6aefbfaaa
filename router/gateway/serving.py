"""The attempts at one request that is understood: it is placed and served, again and elsewhere if that fails.

What follows a failed attempt is decided in `replicas.retries`, and whether a stream that has begun can go on in
`answer.resume`.
"""

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from router.client import RouterGone
from router.events import Arrive, Due, Place, Refuse, Suspicion
from router.gateway.access.directory import Known
from router.gateway.answer.reply import Reply
from router.gateway.answer.resume import Diverged, Resumable
from router.gateway.answer.sse import DONE, error_event
from router.gateway.errors import ApiError
from router.gateway.gateway import Gateway
from router.gateway.record import Exchange, Try
from router.gateway.replicas.attempt import Attempt
from router.gateway.replicas.retries import MAX_ENDED, Failed, Retries
from router.gateway.request.call import Call
from router.gateway.request.intake import MAX_ROUTED_TOKENS
from router.suspects import fingerprint
from router.wire import pack_tokens, unpack_tokens
from sglang_fair.common.deadlines import HEADER_TIER, Promise
from sglang_fair.common.identity import HEADER_ATTEMPT, HEADER_CALL
from sglang_fair.common.interaction import Part
from sglang_fair.common.names import fresh_name
from sglang_fair.common.swapping import HEADER_MODEL
from sglang_fair.core.interactions import Interaction

if TYPE_CHECKING:  # imported only where spans are made
    from router.gateway.tracing import Trace

log = logging.getLogger("gateway")

Outcome = Literal["ok", "refused", "failed", "left"]
"""How a request ends (`sglang_fair.metrics.table.OUTCOMES`)."""

LARGE_BYTES = 1 << 18
"""A request of this size gets no second replica when the first falls silent: its size alone may be the cause."""


class _Leg(NamedTuple):
    """What the next replica is asked for: the request, or what is left of it."""

    call: Call
    tokens: bytes
    """Its prompt, for the router."""
    waiting_since_s: float


class Serving:
    """`run` it once; `end` it."""

    def __init__(
        self,
        gateway: Gateway,
        row: Exchange,
        known: Known,
        part: Part,
        call: Call,
        reply: Reply,
        headers: dict[str, str],
        trace: "Trace | None",
    ) -> None:
        """`part` is what the request says of its interaction; `headers` are those of every attempt."""
        self._gateway = gateway
        self._row = row
        self._known = known
        self._part = part
        self._call = call
        self._reply = reply
        self._headers = headers
        self._trace = trace
        self._interaction = Interaction(row.client, part.app, part.interaction)
        self._is_open = False
        """The gateway counts it as under way in its interaction."""
        self._call_number = 0
        """In its interaction, from the router; 0: not known."""
        self._promise: Promise | None = row.promise
        """By when its next token is due, on the monotonic clock."""
        self._resumable = Resumable(call) if call.can_go_on else None
        self._fingerprint = fingerprint(row.client, call.encoded)
        max_silenced = 1 if len(call.encoded) > LARGE_BYTES else MAX_ENDED
        self._retries = Retries(gateway.settings.tries, max_silenced)
        self._attempt: Attempt | None = None
        """That under way."""
        self._was_taken = False
        self._next_number = 0
        """Of the event that follows what the client has, in a stream that numbers them."""

    @property
    def was_taken(self) -> bool:
        """A replica has, or may have, computed something for it."""
        return self._was_taken or (self._attempt is not None and self._attempt.was_taken)

    @property
    def is_uncounted(self) -> bool:
        """How much was computed is not known."""
        return self._attempt is not None and self._attempt.is_uncounted

    def end(self, outcome: Outcome) -> None:
        """The request is over. Its record has what its client has got."""
        if self._attempt is not None:  # it was broken off
            self._row.output_tokens += self._attempt.usage.output_tokens
        if self._is_open:
            is_answered = self._part.is_last and outcome == "ok"
            self._gateway.interactions.end(self._interaction, is_answered=is_answered)

    async def run(self, tokens: bytes) -> Outcome:
        """Makes attempts until the client has an outcome; `tokens` are the request's. Raises `ApiError` while it has
        nothing."""
        reply, resumable = self._reply, self._resumable
        leg = _Leg(self._call, tokens, self._row.came_s)
        failed = await self._tried(leg)
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
                await self._give_up(error)
                return "failed"
            if has_begun and resumable is not None:
                try:
                    leg = self._rest(resumable, tokens)
                except Diverged as error:
                    failed = Failed("mismatch", str(error))
                    continue
            else:
                self._gateway.metrics.count("retries_total")
            failed = await self._tried(leg)
        return "ok" if reply.status < 400 else "refused" if reply.status < 500 else "failed"

    async def _give_up(self, error: ApiError) -> None:
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
        if not self._reply.started:
            raise error
        row.failed(error.status, f"{error.code or error.status}: {error.message}")
        await self._reply.end(error_event(self._call.kind, error, self._next_number))

    def _rest(self, resumable: Resumable, tokens: bytes) -> _Leg:
        """The rest of the stream. Raises `Diverged` if nobody can continue it."""
        call, prompt = resumable.next_leg(unpack_tokens(tokens), self._gateway.intake.decoder(self._call))
        if prompt is not None:
            tokens = pack_tokens(prompt[:MAX_ROUTED_TOKENS])
        self._gateway.metrics.count("resumes_total")
        self._row.resumed += 1
        now_s = time.monotonic()
        if self._promise is not None:
            self._promise = self._promise.renewed(now_s)
        return _Leg(call, tokens, now_s)

    # -- one attempt

    async def _tried(self, leg: _Leg) -> Failed | Refuse | None:
        """Has the leg placed and, if it is, served; None: to its end."""
        gateway, row = self._gateway, self._row
        arrive = self._arrive(leg)
        noted = gateway.record.tried(row, arrive.id)
        traced = {} if self._trace is None else self._trace.attempt(noted)
        try:
            place = await gateway.link.place(arrive)
            if isinstance(place, Refuse):
                noted.outcome, noted.reason = "refused", place.reason
                return place
            return await self._served(leg, place, noted, traced)
        except RouterGone as error:
            noted.outcome, noted.reason = "unplaced", str(error)
            return Failed("unplaced", str(error))
        finally:
            noted.ended_s = time.monotonic()
            noted.outcome = noted.outcome or "left"

    async def _served(self, leg: _Leg, place: Place, noted: Try, traced: dict[str, str]) -> Failed | None:
        """Has a replica serve the leg."""
        gateway, row = self._gateway, self._row
        if len(row.tries) == 1:
            self._let_in(place)
        gateway.record.placed(row, noted, place, itself=gateway.fleet.placed_itself(place.id))
        attempt = self._attempt = Attempt(
            gateway.replicas,
            gateway.link,
            leg.call,
            place,
            client=row.client,
            waiting_since_s=leg.waiting_since_s,
            progress_interval_s=gateway.settings.progress_interval_s,
            patient_until_s=self._patient_until_s(),
            suspicion=Suspicion(row.client, self._fingerprint, len(self._retries.ended) + 1),
        )
        if leg.call.stream:
            gateway.cuts[place.id] = partial(self._cut, attempt, leg)
        try:
            headers = {**self._headers, **traced, **self._headers_of(place)}
            failed = await attempt.run(headers, self._reply, self._resumable)
        finally:
            gateway.cuts.pop(place.id, None)
            noted.first_s = attempt.first_s
            if attempt.usage.cached_tokens is not None:
                row.cached_tokens = attempt.usage.cached_tokens
        noted.outcome = "ok" if failed is None else "failed"
        if failed is None or self._reply.started:
            row.output_tokens += attempt.usage.output_tokens
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

    def _arrive(self, leg: _Leg) -> Arrive:
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
            begun=gateway.interactions.calls(self._interaction) if part.interaction else 0,
            most_calls=None if limits is None else limits.calls_per_minute,
            app_calls=None if limits is None else limits.of_app(part.app),
            model=leg.call.model,
            due=None if self._promise is None else Due.of(self._promise, now_s),
            stands_for=known.stands_for,
            fingerprint=self._fingerprint,
            lost=len(self._retries.ended),
            goes_on=self._reply.started,
        )

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
        interactions, name, now_s = self._gateway.interactions, self._interaction, time.monotonic()
        if place.due is not None and place.due.slo_class in self._gateway.classes.seconds:
            self._promise = self._row.promise = place.due.promise(now_s)
        interactions.accepted(name, place.call or interactions.calls(name) + 1)
        if self._promise is not None:
            interactions.promise(name, self._promise)

    def _cut(self, attempt: Attempt, leg: _Leg) -> None:
        """Cuts a stream off if nothing of it is lost by that: the client has none of it, or it can go on."""
        if self._reply.started:
            decode = self._gateway.intake.decoder(leg.call)
            if self._resumable is None or not self._resumable.can_go_on(unpack_tokens(leg.tokens), decode):
                return
        self._gateway.metrics.count("cuts_total")
        attempt.cut()

    def _patient_until_s(self) -> float | None:
        """Timeouts are made for the first class. Who may be answered later than that may wait longer by so much."""
        classes = self._gateway.classes
        return None if self._promise is None else self._promise.due_s - classes.seconds[classes.default]
