"""One attempt: one replica serves a request, or the part of it that is left, and its client gets the answer.

Whatever happens, the router hears exactly once how the attempt ended, and the replica does not go on working for a
client that has left: a stream is closed, other work is cancelled by `/abort_request`.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from router.events import Done, Place, Progress, Suspicion
from router.events import Outcome as Ending
from router.gateway.answer.resume import Diverged, Resumable
from router.gateway.answer.sse import Usage, stream_of, usage_of
from router.gateway.errors import describe, expired, of_replica
from router.gateway.gateway import Gateway
from router.gateway.listener import Answer, Asked, ClientGone, Incoming
from router.gateway.record import Try
from router.gateway.replicas.connections import Broken, NoDescriptors, NotConnected
from router.gateway.replicas.pool import GiveUp
from router.gateway.replicas.retries import Failed
from router.gateway.request.call import Call
from router.gateway.request.kinds import PATHS, style_of
from sglang_fair.common.deadlines import EXPIRED_STATUS, HEADER_TTL
from sglang_fair.common.identity import bounded
from sglang_fair.common.swapping import MISDIRECTED

log = logging.getLogger("gateway")

TURNED_AWAY: Mapping[int, Failed] = {
    MISDIRECTED: Failed("misdirected", "it has another model"),
    503: Failed("lost", "it answered 503"),
    401: Failed("lost", "it does not accept this gateway's key"),  # a client's stays here
}
"""What a status means with which a replica takes nothing on."""


class Leg(NamedTuple):
    """What a replica is asked for: the request, or what is left of it."""

    call: Call
    tokens: bytes
    """Its prompt, for the router."""
    waiting_since_s: float
    """When its client began to wait, on the monotonic clock; the time to first token counts from it."""
    expires_s: float | None = None
    """When it is dropped if it has not begun, on the same clock; None: never."""


class Attempt:
    """`run` it once."""

    def __init__(
        self, gateway: Gateway, leg: Leg, place: Place, noted: Try, suspicion: Suspicion, patience_s: float
    ) -> None:
        """`suspicion` is what the router is told if the replica ends with the request. For `patience_s` the replica may
        be silent beyond all timeouts, because of its queue."""
        self._replicas = gateway.replicas
        self._links = gateway.link
        self._progress_interval_s = gateway.settings.progress_interval_s
        self._leg = leg
        self._call = leg.call
        self._place = place
        self._noted = noted
        self._suspicion = suspicion
        self._patience_s = patience_s
        self._url = place.url.rstrip("/")
        self._has_ended_it = False
        """The replica has ended, with the request in its hands."""
        self._stream = stream_of(leg.call)
        self._asking: Asked | None = None
        self._may_be_working = False
        """The replica has, or may have, the request and has not finished it."""
        self._is_cut = self._was_accepted = self._is_whole = False
        self._ended: Usage | None = None
        """What it came to. The router has been told."""
        self._last_s = leg.waiting_since_s
        """When the latest piece of a streamed answer came."""

    @property
    def usage(self) -> Usage:
        return self._stream.usage if self._ended is None else self._ended

    @property
    def next_number(self) -> int:
        """Of the event that would follow, in a stream that numbers its events."""
        return self._stream.next_number

    @property
    def is_sent(self) -> bool:
        """The replica has the request, or is being sent it, and has to say whether it has begun."""
        return self._asking is not None

    @property
    def was_taken(self) -> bool:
        """The replica has, or may have, computed something for it."""
        return self._was_accepted or self._may_be_working

    @property
    def is_uncounted(self) -> bool:
        """It has ended, and how much was computed is not known: an answer in one piece did not come to its end."""
        return (
            self._asking is not None and self._ended is not None and not (self._call.stream or self._is_whole)
        )

    def cut(self) -> None:
        """Ends the attempt as cut off, unless the answer is complete. For one that can be continued."""
        self._is_cut = True
        if self._asking is not None:
            self._asking.give_up(Failed("cut", worker=self._place.worker))

    async def run(self, headers: dict[str, str], reply: Incoming, resumable: Resumable | None) -> None:
        """Has the replica serve the request and passes its answer on. Raises `Failed` if the client has it not whole,
        `ApiError` if it has expired there, `ClientGone` if the client leaves."""
        worker = self._place.worker
        try:
            await self._carry(headers, reply, resumable)
        except NoDescriptors as error:
            self._may_be_working = False
            raise Failed("no descriptors", str(error)) from error
        except OSError as error:
            raise self._lost(error) from error
        except Diverged as error:
            raise Failed("mismatch", f"worker {worker}: {error}") from error
        except (ClientGone, asyncio.CancelledError):
            self._settle("aborted", self._stream.usage)
            raise
        finally:
            if self._ended is None:
                self._settle("failed" if self._noted.first_s is None else "aborted", self._usage(resumable))
            if self._may_be_working:
                rids = self._call.rids(self._place.id) + tuple(sorted(self._stream.rids))
                self._replicas.cancel_work(self._url, rids)

    async def _carry(self, headers: dict[str, str], reply: Incoming, resumable: Resumable | None) -> None:
        client, worker = self._suspicion.client, self._place.worker
        await self._replicas.window(self._url).reserve(client, len(self._call.encoded))
        self._may_be_working = True
        call, expires_s = self._call, self._leg.expires_s
        if expires_s is not None and call.samples == 1 and not call.is_batch:
            headers[HEADER_TTL] = f"{max(1.0, 1e3 * (expires_s - time.monotonic())):.1f}"
        body = self._call.forwarded(self._place.id)
        if reply.hand_over is not None:
            self._asking = reply.hand_over(self._place, headers, body)
        else:
            self._asking = self._replicas.post(
                self._url, PATHS[self._call.kind], headers, body, self._patience_s
            )
        # A replica that falls silent is given up at once, wherever in here its answer is waited for.
        waiting, give_up = self._replicas.waiting_for(worker), self._asking.give_up
        waiting.add(give_up)
        try:
            async with self._asking as answer:
                if reply.served_by:
                    waiting.discard(give_up)
                    waiting = self._move(reply.served_by)
                    waiting.add(give_up)
                if (failed := TURNED_AWAY.get(answer.status)) is not None:
                    self._may_be_working = False
                    raise Failed(failed.how, failed.reason, worker)
                if answer.status == EXPIRED_STATUS and HEADER_TTL in headers:
                    self._may_be_working = False
                    raise expired()
                self._was_accepted = True
                kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
                if answer.status == 200 and kind == "text/event-stream":
                    await self._pass_stream(answer, reply, resumable)
                elif reply.started:
                    raise Failed("lost", f"it answered {answer.status} to the rest of a stream", worker)
                else:
                    await self._pass_whole(answer, reply)
                self._may_be_working = False
        finally:
            waiting.discard(give_up)

    def _move(self, worker: str) -> set[GiveUp]:
        """Another worker than was chosen has it: what it comes to is counted there. What waits for that worker."""
        if (url := self._links.moved(self._place.id, worker)) is not None:
            self._url = url.rstrip("/")
        self._place = msgspec.structs.replace(self._place, worker=worker, matched_tokens=0)
        self._noted.worker, self._noted.matched_tokens = worker, 0
        return self._replicas.waiting_for(worker)

    async def _pass_whole(self, answer: Answer, reply: Incoming) -> None:
        body, headers = await answer.read(), self._headers(answer)
        self._is_whole = True
        self._replicas.health.heard(self._place.worker, time.monotonic())
        if answer.status < 400:
            self._settle("ok", usage_of(self._call.kind, body) or Usage())
        else:
            log.warning(
                "request %s client=%s worker=%s: it answered %d",
                self._place.id,
                self._suspicion.client,
                self._place.worker,
                answer.status,
            )
            self._settle("failed", Usage())
            body = of_replica(answer.status, body).body(style_of(self._call.kind))
            headers["content-type"] = "application/json"
        await reply.answer(answer.status, headers, body)

    async def _pass_stream(self, answer: Answer, reply: Incoming, resumable: Resumable | None) -> None:
        stream, place = self._stream, self._place
        reported_s = time.monotonic()
        try:
            while not self._is_cut and (chunk := await answer.piece()):
                events = stream.feed(chunk)
                if not events:
                    continue
                self._last_s = time.monotonic()
                self._replicas.health.heard(place.worker, self._last_s)
                if self._noted.first_s is None:
                    self._noted.first_s = self._last_s
                    if place.on_trial:
                        self._links.progress(Progress(place.id, max(1, stream.usage.output_tokens)))
                    if not reply.started:
                        reply.start(200, self._headers(answer) | {"cache-control": "no-cache"})
                if self._progress_interval_s and self._last_s - reported_s >= self._progress_interval_s:
                    reported_s = self._last_s
                    self._links.progress(Progress(place.id, stream.usage.output_tokens))
                if stream.ended:
                    self._settle("ok", stream.usage)
                if resumable is not None:
                    events = resumable.pass_on(events)
                if stream.ended and not reply.ended:  # what follows is read too: the connection is used again
                    await reply.end(events)
                elif events and not reply.ended:
                    await reply.piece(events)
            if not stream.ended:
                raise (
                    Failed("cut", worker=place.worker)
                    if self._is_cut
                    else Broken("the stream ended without [DONE]")
                )
        except (OSError, Failed):
            if not stream.ended:  # what breaks after [DONE] does not matter
                raise
        if not reply.ended:
            await reply.end()

    def _lost(self, error: OSError) -> Failed:
        worker = self._place.worker
        if self._is_cut:
            return Failed("cut", worker=worker)
        if isinstance(error, NotConnected):
            self._may_be_working = False
            self._replicas.refused_request(worker)
        was_sent = self._asking is not None and self._asking.was_sent
        self._has_ended_it = was_sent and not self._replicas.health.is_leaving(worker)
        fell_silent = isinstance(error, TimeoutError) and was_sent and self._noted.first_s is None
        return Failed("lost", describe(error), worker, self._has_ended_it, fell_silent)

    def _usage(self, resumable: Resumable | None) -> Usage:
        """Of an attempt that was cut off: counted by token ids where they are known, else as the stream says."""
        usage = self._stream.usage
        tokens = resumable.leg_tokens if resumable is not None else None
        return usage if tokens is None else Usage(tokens, usage.cached_tokens)

    def _settle(self, ending: Ending, usage: Usage) -> None:
        """Tells the router how the attempt ended. Only the first call counts."""
        if self._ended is not None:
            return
        self._ended = usage
        first_s, ttft_s, tpot_s = self._noted.first_s, None, None
        if first_s is not None:
            ttft_s = first_s - self._leg.waiting_since_s
            if usage.output_tokens > 1:
                tpot_s = (self._last_s - first_s) / (usage.output_tokens - 1)
        self._links.end(
            Done(
                self._place.id,
                output_tokens=usage.output_tokens,
                cached_tokens=usage.cached_tokens,
                outcome=ending,
                ttft_s=ttft_s,
                tpot_s=tpot_s,
                lost=self._suspicion if self._has_ended_it else None,
            )
        )

    def _headers(self, answer: Answer) -> dict[str, str]:
        headers = {
            "content-type": answer.headers.get("content-type", "application/json"),
            "x-fair-worker": bounded(self._place.worker),
            "x-fair-client": self._suspicion.client,
            "x-fair-request-id": self._place.id,
            "x-fair-matched-tokens": str(self._place.matched_tokens),
        }
        if "retry-after" in answer.headers:
            headers["retry-after"] = answer.headers["retry-after"]
        return headers
