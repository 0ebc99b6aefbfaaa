"""One attempt: one replica serves a request, or the part of it that is left.

Whatever happens, the router hears exactly once how the attempt ended, and the replica does not go on working for a
client that has left: a stream is closed, other work is cancelled by `/abort_request`.
"""

import asyncio
import logging
import time
from collections.abc import Mapping

from router.events import Done, Place, Progress, Suspicion
from router.events import Outcome as Ending
from router.gateway.answer.reply import ClientGone, Reply
from router.gateway.answer.resume import Diverged, Resumable
from router.gateway.answer.sse import TypedStream, Usage, stream_of, usage_of
from router.gateway.clients import header_safe
from router.gateway.errors import describe, of_replica
from router.gateway.replicas.connections import Asking, Broken, Connection, NoDescriptors, NotConnected
from router.gateway.replicas.pool import Replicas
from router.gateway.replicas.retries import Failed, How
from router.gateway.request.call import Call
from router.gateway.request.kinds import PATHS, style_of
from router.gateway.routing.links import Links
from sglang_fair.common.swapping import MISDIRECTED

log = logging.getLogger("gateway")


TURNED_AWAY: Mapping[int, tuple[How, str]] = {
    MISDIRECTED: ("misdirected", "it has another model"),
    503: ("lost", "it answered 503"),
    401: ("lost", "it does not accept this gateway's key"),  # a client's stays here
}
"""What a status means with which a replica takes nothing on."""


class _Ended(Exception):
    """The attempt fails."""

    def __init__(self, how: How, reason: str = "") -> None:
        super().__init__(reason)
        self.how, self.reason = how, reason


class Attempt:
    """`run` it once."""

    def __init__(
        self,
        replicas: Replicas,
        links: Links,
        call: Call,
        place: Place,
        *,
        client: str,
        waiting_since_s: float,
        progress_interval_s: float,
        patient_until_s: float | None = None,
        suspicion: Suspicion | None = None,
    ) -> None:
        """`suspicion` is what the router is told if the replica ends with the request. `waiting_since_s` is
        when the client began to wait, on the monotonic clock; the time to first token counts from it. Until
        `patient_until_s` the replica may be silent beyond all timeouts, because of its queue."""
        self._replicas = replicas
        self._links = links
        self._call = call
        self._place = place
        self._client = client
        self._url = place.url.rstrip("/")
        self._waiting_since_s = waiting_since_s
        self._patient_until_s = 0.0 if patient_until_s is None else patient_until_s
        self._progress_interval_s = progress_interval_s
        self._suspicion = suspicion
        self._has_ended_it = False
        """The replica has ended, with the request in its hands."""
        self._stream = stream_of(call)
        self._asking: Asking | None = None
        self._may_be_working = False
        """The replica has, or may have, the request and has not finished it."""
        self._is_cut = self._was_accepted = self._is_whole = False
        self._ended: Usage | None = None
        """What it came to. The router has been told."""
        self.first_s: float | None = None
        """When the first piece of a streamed answer came, on the monotonic clock; `_last_s`, when the latest."""
        self._last_s = waiting_since_s

    @property
    def usage(self) -> Usage:
        return self._stream.usage if self._ended is None else self._ended

    @property
    def next_number(self) -> int:
        """Of the event that would follow, in a stream that numbers its events."""
        return self._stream.next_number if isinstance(self._stream, TypedStream) else 0

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
            self._asking.give_up(_Ended("cut"))

    async def run(self, headers: dict[str, str], reply: Reply, resumable: Resumable | None) -> Failed | None:
        """Has the replica serve the request and passes its answer on; None: the client has it whole. Raises
        `ClientGone` if the client leaves."""
        worker = self._place.worker
        try:
            await self._carry(headers, reply, resumable)
            return None
        except NoDescriptors as error:
            self._may_be_working = False
            return Failed("no descriptors", str(error))
        except _Ended as error:
            return Failed(error.how, error.reason, worker)
        except OSError as error:
            return Failed("cut", worker=worker) if self._is_cut else self._lost(error)
        except Diverged as error:
            return Failed("mismatch", f"worker {worker}: {error}")
        except (ClientGone, asyncio.CancelledError):
            self._settle("aborted", self._stream.usage)
            raise
        finally:
            if self._ended is None:
                self._settle("failed" if self.first_s is None else "aborted", self._usage(resumable))
            if self._may_be_working:
                rids = self._call.rids(self._place.id) + tuple(sorted(self._stream.rids))
                self._replicas.cancel_work(self._url, rids)

    async def _carry(self, headers: dict[str, str], reply: Reply, resumable: Resumable | None) -> None:
        await self._replicas.window(self._url).reserve(self._client, len(self._call.encoded))
        self._may_be_working = True
        body = self._call.forwarded(self._place.id)
        patience_s = max(0.0, self._patient_until_s - time.monotonic())
        self._asking = self._replicas.post(self._url, PATHS[self._call.kind], headers, body, patience_s)
        # A replica that falls silent is given up at once, wherever in here its answer is waited for.
        with self._replicas.while_it_answers(self._place.worker, self._asking.give_up):
            async with self._asking as answer:
                if answer.status in TURNED_AWAY:
                    self._may_be_working = False
                    raise _Ended(*TURNED_AWAY[answer.status])
                self._was_accepted = True
                kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
                if answer.status == 200 and kind == "text/event-stream":
                    await self._pass_stream(answer, reply, resumable)
                elif reply.started:
                    raise _Ended("lost", f"it answered {answer.status} to the rest of a stream")
                else:
                    await self._pass_whole(answer, reply)
                self._may_be_working = False

    async def _pass_whole(self, answer: Connection, reply: Reply) -> None:
        body, headers = await answer.read(), self._headers(answer)
        self._is_whole = True
        self._replicas.health.heard(self._place.worker, time.monotonic())
        if answer.status < 400:
            self._settle("ok", usage_of(self._call.kind, body) or Usage())
        else:
            log.warning(
                "request %s client=%s worker=%s: it answered %d",
                self._place.id,
                self._client,
                self._place.worker,
                answer.status,
            )
            self._settle("failed", Usage())
            body = of_replica(answer.status, body).body(style_of(self._call.kind))
            headers["content-type"] = "application/json"
        await reply.start(answer.status, headers | {"content-length": str(len(body))})
        await reply.end(body)

    async def _pass_stream(self, answer: Connection, reply: Reply, resumable: Resumable | None) -> None:
        stream = self._stream
        reported_s = time.monotonic()
        try:
            while not self._is_cut and (chunk := await answer.piece()):
                events = stream.feed(chunk)
                if not events:
                    continue
                self._last_s = time.monotonic()
                self._replicas.health.heard(self._place.worker, self._last_s)
                if self.first_s is None:
                    self.first_s = self._last_s
                    if self._place.on_trial:
                        self._links.progress(Progress(self._place.id, max(1, stream.usage.output_tokens)))
                    if not reply.started:
                        headers = self._headers(answer) | {"cache-control": "no-cache"}
                        await reply.start(200, headers)
                if self._progress_interval_s and self._last_s - reported_s >= self._progress_interval_s:
                    reported_s = self._last_s
                    self._links.progress(Progress(self._place.id, stream.usage.output_tokens))
                if stream.ended:
                    self._settle("ok", stream.usage)
                if resumable is not None:
                    events = resumable.pass_on(events)
                if stream.ended and not reply.ended:  # what follows is read too: the connection is used again
                    await reply.end(events)
                elif events and not reply.ended:
                    await reply.piece(events)
            if self._is_cut and not stream.ended:
                raise _Ended("cut")
            if not stream.ended:
                raise Broken("the stream ended without [DONE]")
        except OSError:
            if not stream.ended:  # what breaks after [DONE] does not matter
                raise
        if not reply.ended:
            await reply.end()

    def _lost(self, error: OSError) -> Failed:
        if isinstance(error, NotConnected):
            self._may_be_working = False
            self._replicas.refused_request(self._place.worker)
        was_sent = self._asking is not None and self._asking.was_sent
        self._has_ended_it = was_sent and not self._replicas.health.is_leaving(self._place.worker)
        fell_silent = isinstance(error, TimeoutError) and was_sent and self.first_s is None
        return Failed("lost", describe(error), self._place.worker, self._has_ended_it, fell_silent)

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
        ttft_s = tpot_s = None
        if self.first_s is not None:
            ttft_s = self.first_s - self._waiting_since_s
            if usage.output_tokens > 1:
                tpot_s = (self._last_s - self.first_s) / (usage.output_tokens - 1)
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

    def _headers(self, answer: Connection) -> dict[str, str]:
        headers = {
            "content-type": answer.headers.get("content-type", "application/json"),
            "x-fair-worker": header_safe(self._place.worker),
            "x-fair-client": self._client,
            "x-fair-request-id": self._place.id,
            "x-fair-matched-tokens": str(self._place.matched_tokens),
        }
        if "retry-after" in answer.headers:
            headers["retry-after"] = answer.headers["retry-after"]
        return headers
