"""The attempts at one request that is understood: it is placed and served, again and elsewhere if that fails.

What follows a failed attempt is decided in `replicas.retries`, and whether a stream that has begun can go on in
`answer.resume`.
"""

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Literal

from router.client import RouterGone
from router.events import Arrive, Due, Place, Refuse, Suspicion
from router.gateway.access.identity import Known
from router.gateway.answer.resume import Diverged, Resumable
from router.gateway.answer.sse import DONE, error_event
from router.gateway.attempt import Attempt, Leg
from router.gateway.errors import ApiError, expired
from router.gateway.gateway import Gateway
from router.gateway.listener import Incoming
from router.gateway.record import Exchange, Try
from router.gateway.replicas.retries import MAX_ENDED, Failed, Retries
from router.gateway.request.call import Call
from router.gateway.request.intake import MAX_ROUTED_TOKENS
from router.suspects import fingerprint
from router.wire import pack_tokens, unpack_tokens
from sglang_fair.common.deadlines import HEADER_TIER, Promise
from sglang_fair.common.identity import HEADER_ATTEMPT, HEADER_CALL
from sglang_fair.common.ids import new_id
from sglang_fair.common.interaction import Part
from sglang_fair.common.swapping import HEADER_MODEL
from sglang_fair.core.interactions import Interaction

if TYPE_CHECKING:  # imported only where spans are made
    from router.gateway.tracing import Trace

log = logging.getLogger("gateway")

Outcome = Literal["ok", "refused", "failed", "left"]
"""How a request ends (`sglang_fair.metrics.table.OUTCOMES`)."""

LARGE_BYTES = 1 << 18
"""A request of this size gets no second replica when the first falls silent: its size alone may be the cause."""


class Serving:
    """`run` it once; `end` it."""

    def __init__(
        self,
        gateway: Gateway,
        row: Exchange,
        known: Known,
        part: Part,
        call: Call,
        reply: Incoming,
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
        self._retries = Retries(1 if gateway.hands_over else gateway.settings.tries, max_silenced)
        self._attempt: Attempt | None = None
        """That under way."""
        self._was_taken = False
        self.is_overdue = False
        """It may begin no more."""
        self._next_number = 0
        """Of the event that follows what the client has, in a stream that numbers them."""

    @property
    def was_taken(self) -> bool:
        """A replica has, or may have, computed something for it."""
        return self._was_taken or (self._attempt is not None and self._attempt.was_taken)

    @property
    def is_sent(self) -> bool:
        """A replica has it."""
        return self._attempt is not None and self._attempt.is_sent

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

    async def run(self, tokens: bytes, expires_s: float | None = None) -> Outcome:
        """Makes attempts until the client has an outcome; `tokens` are the request's, `expires_s` as in `Leg`. Raises
        `ApiError` while it has nothing."""
        reply, resumable = self._reply, self._resumable
        leg, failed = Leg(self._call, tokens, self._row.came_s, expires_s), None
        while True:
            try:
                if failed is not None:
                    if resumable is not None and reply.started and resumable.is_complete:
                        await reply.end(resumable.closing() + DONE)
                        return "ok"
                    leg = await self._leg_after(failed, leg, tokens)
                await self._try(leg)
                return "ok" if reply.status < 400 else "refused" if reply.status < 500 else "failed"
            except Failed as error:
                failed = error.with_traceback(None)  # which would keep this frame, and with it the body
            except ApiError as error:
                self._give_up(error)
                if not reply.started:
                    raise
                await reply.end(error_event(self._call.kind, error, self._next_number))
                return "failed"

    async def _leg_after(self, failed: Failed, leg: Leg, tokens: bytes) -> Leg:
        """What is asked for next, when it is time. Raises `ApiError` if nothing is, `Failed` if nobody can continue the
        stream."""
        gateway, resumable, has_begun = self._gateway, self._resumable, self._reply.started
        await asyncio.sleep(self._retries.after(failed, has_begun=has_begun, can_go_on=resumable is not None))
        if not has_begun or resumable is None:
            gateway.metrics.count("retries_total")
            return leg
        try:
            call, prompt = resumable.next_leg(unpack_tokens(tokens), gateway.intake.decoder(self._call))
        except Diverged as error:
            raise Failed("mismatch", str(error)) from error
        if prompt is not None:
            tokens = pack_tokens(prompt[:MAX_ROUTED_TOKENS])
        gateway.metrics.count("resumes_total")
        self._row.resumed += 1
        now_s = time.monotonic()
        if self._promise is not None:
            self._promise = self._promise.renewed(now_s)
        return Leg(call, tokens, now_s)

    def _give_up(self, error: ApiError) -> None:
        """Notes that no attempt follows."""
        row, ended = self._row, self._retries.ended
        if len(ended) >= MAX_ENDED:
            log.error(
                "request %s client=%s fingerprint=%s: replicas %s ended while they had it",
                row.name,
                row.client,
                self._fingerprint,
                ", ".join(ended),
            )
        row.failed(error.status, f"{error.code or error.status}: {error.message}")

    # -- one attempt

    async def _try(self, leg: Leg) -> None:
        """Has the leg placed and served to its end. Raises `Failed`, and `ApiError` if it has expired."""
        gateway, row = self._gateway, self._row
        if self.is_overdue and not self._reply.started:
            raise expired()
        arrive = self._arrive(leg)
        noted = gateway.record.tried(row, arrive.id)
        traced = {} if self._trace is None else self._trace.attempt(noted)
        try:
            place = await gateway.link.place(arrive)
            if isinstance(place, Refuse):
                raise Failed("refused", place.reason, refuse=place)
            await self._served(leg, place, noted, traced)
            noted.outcome = "ok"
        except (Failed, RouterGone) as error:
            failed = error if isinstance(error, Failed) else Failed("unplaced", str(error))
            noted.outcome = failed.how if failed.how in ("refused", "unplaced") else "failed"
            noted.reason = failed.reason
            raise failed from None
        except ApiError as error:
            noted.outcome, noted.reason = "refused", error.message
            raise
        finally:
            noted.ended_s = time.monotonic()
            noted.outcome = noted.outcome or "left"

    async def _served(self, leg: Leg, place: Place, noted: Try, traced: dict[str, str]) -> None:
        gateway, row = self._gateway, self._row
        if len(row.tries) == 1:
            self._let_in(place)
        gateway.record.placed(row, noted, place, itself=gateway.fleet.placed_itself(place.id))
        suspicion = Suspicion(row.client, self._fingerprint, len(self._retries.ended) + 1)
        attempt = self._attempt = Attempt(gateway, leg, place, noted, suspicion, self._patience_s())
        if leg.call.stream and not gateway.hands_over:
            gateway.cuts[place.id] = partial(self._cut, attempt, leg)
        headers = {**self._headers, **traced, **self._headers_of(place)}
        failed = None
        try:
            await attempt.run(headers, self._reply, self._resumable)
        except Failed as error:
            failed = error
        finally:
            gateway.cuts.pop(place.id, None)
            if attempt.usage.cached_tokens is not None:
                row.cached_tokens = attempt.usage.cached_tokens
        if self._reply.started:
            row.output_tokens += attempt.usage.output_tokens
        self._was_taken |= attempt.was_taken
        self._next_number = attempt.next_number
        self._attempt = None
        if failed is not None:
            if failed.how == "lost":
                log.warning(
                    "request %s client=%s worker %s: %s", place.id, row.client, place.worker, failed.reason
                )
            raise failed

    def _arrive(self, leg: Leg) -> Arrive:
        gateway, row, known, part = self._gateway, self._row, self._known, self._part
        now_s = time.monotonic()
        gateway.interactions.tick(now_s)
        limits = None if known.tenant is None else known.tenant.overload
        return Arrive(
            id=new_id(),
            client=row.client,
            tokens=leg.tokens,
            max_output_tokens=leg.call.max_output_tokens,
            namespace=leg.call.namespace,
            exclude=(*self._reply.excluded, *self._retries.excluded),
            weight=known.caller.weight,
            weight_version=known.caller.version,
            request=row.name,
            app=part.app,
            interaction=part.interaction,
            stage=part.stage,
            session=part.session,
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

    def _cut(self, attempt: Attempt, leg: Leg) -> None:
        """Cuts a stream off if nothing of it is lost by that: the client has none of it, or it can go on."""
        if self._reply.started:
            decode = self._gateway.intake.decoder(leg.call)
            if self._resumable is None or not self._resumable.can_go_on(unpack_tokens(leg.tokens), decode):
                return
        self._gateway.metrics.count("cuts_total")
        attempt.cut()

    def _patience_s(self) -> float:
        """Timeouts are made for the first class. Who may be answered later than that may wait longer by so much."""
        if self._promise is None:
            return 0.0
        classes = self._gateway.classes
        return max(0.0, self._promise.due_s - classes.seconds[classes.default] - time.monotonic())
