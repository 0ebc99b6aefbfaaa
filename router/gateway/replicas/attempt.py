"""One request at one worker, from the router's word to its end.

Whatever happens, the router hears of the end exactly once (`Attempt.settle`), and the replica works for
nobody who has left: a stream is closed, other work is cancelled by /abort_request.
"""

import asyncio
import logging
import time

from router.events import Done, Outcome, Place, Progress
from router.gateway.answer.reply import ClientGone, Reply
from router.gateway.answer.resume import Resumable
from router.gateway.answer.sse import Stream, Usage, usage_of
from router.gateway.replicas.connections import Asking, Broken, Connection, NoDescriptors, NotConnected
from router.gateway.request.call import Call
from router.gateway.resources import PATHS, Gateway, header_safe, why

log = logging.getLogger("gateway")


class NotServed(Exception):
    """The replica did not answer to the end; another one may.

    `fell_silent`: it had the request and nothing came from it any more, so the request may be the reason.
    """

    def __init__(self, reason: str, *, fell_silent: bool = False) -> None:
        super().__init__(reason)
        self.fell_silent = fell_silent


class Attempt:
    """`carry` it; it settles itself."""

    def __init__(self, gateway: Gateway, call: Call, place: Place, client: str, begun_s: float) -> None:
        """`begun_s` is since when the client waits for this answer, on the monotonic clock."""
        self._gateway = gateway
        self._call = call
        self._place = place
        self._client = client
        self._begun_s = begun_s
        self._settled = False
        self._received = False
        self._first_s: float | None = None
        self._last_s = begun_s

    async def carry(self, headers: dict[str, str], reply: Reply, resumable: Resumable | None) -> None:
        """Has the worker serve the request.

        Raises `NotServed` when it did not to the end, `Diverged` when it served another answer than the one
        that the client has begun to read, and `NoDescriptors` when this process could not ask it.
        """
        url = self._place.url.rstrip("/")
        is_over, stream = True, Stream(self._call)
        asking: Asking | None = None
        try:
            await self._gateway.pace(url).reserve(self._client, len(self._call.encoded))
            is_over = False
            asking = self._gateway.replicas.post(
                url, PATHS[self._call.kind], headers, self._call.forwarded(self._place.id)
            )
            with self._gateway.health.while_it_answers(self._place.worker, asking.give_up):
                async with asking as answer:
                    if answer.status == 503:
                        is_over = True
                        raise NotServed("it answered 503")
                    if answer.status == 200 and _content_type(answer) == "text/event-stream":
                        try:
                            await self._stream(answer, stream, reply, resumable)
                        except OSError:
                            if not stream.ended:
                                raise
                        await reply.end()
                    elif reply.started:
                        raise NotServed(f"it answered {answer.status} to the rest of a stream")
                    else:
                        await self._whole(answer, reply)
                    is_over = True
        except NoDescriptors:
            is_over = True
            raise
        except OSError as error:
            is_over = isinstance(error, NotConnected)
            if is_over:
                self._gateway.health.refused(self._place.worker)
            fell_silent = isinstance(error, TimeoutError) and asking is not None and asking.was_sent
            raise NotServed(why(error), fell_silent=fell_silent and not self._received) from error
        except (ClientGone, asyncio.CancelledError):
            self.settle("aborted", stream.usage)
            raise
        finally:
            if not self._settled:
                tokens = resumable.leg_tokens if resumable is not None else None
                usage = stream.usage if tokens is None else Usage(tokens, stream.usage.cached_tokens)
                self.settle("aborted" if self._received else "failed", usage)
            if not is_over:
                self._gateway.cancel_work(url, self._call.rids(self._place.id) + tuple(sorted(stream.rids)))

    def settle(self, outcome: Outcome, usage: Usage | None = None) -> None:
        """Tells the router how the request ended; only the first call counts."""
        if self._settled:
            return
        self._settled = True
        usage = usage or Usage()
        first_s = self._first_s
        span_s = None if first_s is None else self._last_s - first_s
        self._gateway.end(
            Done(
                self._place.id,
                output_tokens=usage.output_tokens,
                cached_tokens=usage.cached_tokens,
                outcome=outcome,
                ttft_s=None if first_s is None else first_s - self._begun_s,
                tpot_s=None
                if span_s is None or usage.output_tokens < 2
                else span_s / (usage.output_tokens - 1),
            )
        )

    async def _whole(self, answer: Connection, reply: Reply) -> None:
        body = await answer.read()
        self._gateway.health.heard(self._place.worker, time.monotonic())
        if answer.status < 400:
            self.settle("ok", usage_of(self._call.kind, body))
        else:
            log.warning("request %s client=%s worker=%s: it answered %d", *self._names(), answer.status)
            self.settle("failed")
        await reply.start(answer.status, self._headers(answer) | {"content-length": str(len(body))})
        await reply.end(body)

    async def _stream(
        self, answer: Connection, stream: Stream, reply: Reply, resumable: Resumable | None
    ) -> None:
        interval_s = self._gateway.limits.progress_interval_s
        told_s = time.monotonic()
        while chunk := await answer.piece():
            events = stream.feed(chunk)
            if not events:
                continue
            self._last_s = time.monotonic()
            self._gateway.health.heard(self._place.worker, self._last_s)
            if not self._received:
                self._received, self._first_s = True, self._last_s
                if not reply.started:
                    await reply.start(200, self._headers(answer) | {"cache-control": "no-cache"})
            if interval_s and self._last_s - told_s >= interval_s:
                told_s = self._last_s
                self._gateway.link.tell(Progress(self._place.id, stream.usage.output_tokens))
            if stream.ended:
                self.settle("ok", stream.usage)
            if resumable is not None:
                events = resumable.pass_on(events)
            if events:
                await reply.piece(events)
        if not stream.ended:
            raise Broken("the stream ended without [DONE]")

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

    def _names(self) -> tuple[str, str, str]:
        return self._place.id, self._client, self._place.worker


def _content_type(answer: Connection) -> str:
    """Without its parameters."""
    return answer.headers.get("content-type", "").partition(";")[0].strip().lower()
