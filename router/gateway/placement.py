"""One request at one worker, from the router's word to its end.

Whatever happens, the router hears of the end exactly once (`Placement.settle`), and the replica works for
nobody who has left: a stream is closed, other work is cancelled by /abort_request.
"""

import asyncio
import logging
import time

import aiohttp
from starlette.types import Message, Send

from router.events import Done, Outcome, Place, Progress
from router.gateway.calls import ApiError, Call
from router.gateway.resources import PATHS, Gateway, header_safe, why
from router.gateway.sse import Stream, Usage, usage_of

log = logging.getLogger("gateway")


class NotServed(Exception):
    """The replica gave no byte of an answer; another one may."""


class ClientGone(Exception):
    """The client reads no more."""


class Placement:
    """`carry` it; it settles itself."""

    def __init__(self, gateway: Gateway, call: Call, place: Place, client: str, arrived_s: float) -> None:
        """`arrived_s` is when the client's request came, on the monotonic clock."""
        self._gateway = gateway
        self._call = call
        self._place = place
        self._client = client
        self._arrived_s = arrived_s
        self._settled = False
        self._started = False
        self._first_s: float | None = None
        self._last_s = arrived_s
        self._usage = Usage()

    async def carry(self, body: bytes, headers: dict[str, str], send: Send) -> None:
        """Has the worker serve the request. Raises `NotServed` when the client has seen nothing of it."""
        url = self._place.url.rstrip("/")
        is_over, stream = False, Stream(self._call)
        try:
            async with self._gateway.session.post(
                url + PATHS[self._call.kind], data=body, headers=headers
            ) as response:
                try:
                    if response.status == 503:
                        is_over = True
                        raise NotServed("it answered 503")
                    if response.status == 200 and response.content_type == "text/event-stream":
                        await self._stream(response, stream, send)
                    else:
                        await self._whole(response, send)
                    is_over = True
                except BaseException:
                    response.close()  # else the rest of the answer would be read, and worked for
                    raise
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            is_over = isinstance(error, aiohttp.ClientConnectorError)
            if not self._started:
                raise NotServed(why(error)) from error
            await self._break_off(error, send)
        except (ClientGone, asyncio.CancelledError):
            self.settle("aborted", stream.usage)
            raise
        finally:
            self.settle("aborted" if self._started else "failed", stream.usage)
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
        self._gateway.link.tell(
            Done(
                self._place.id,
                output_tokens=usage.output_tokens,
                cached_tokens=usage.cached_tokens,
                outcome=outcome,
                ttft_s=None if first_s is None else first_s - self._arrived_s,
                tpot_s=None
                if span_s is None or usage.output_tokens < 2
                else span_s / (usage.output_tokens - 1),
            )
        )

    async def _whole(self, response: aiohttp.ClientResponse, send: Send) -> None:
        body = await response.read()
        if response.status < 400:
            self.settle("ok", usage_of(self._call.kind, body))
        else:
            log.warning("request %s client=%s worker=%s: it answered %d", *self._names(), response.status)
            self.settle("failed")
        headers = self._headers(response) | {"content-length": str(len(body))}
        await self._start(response.status, headers, send)
        await self._send({"type": "http.response.body", "body": body}, send)

    async def _stream(self, response: aiohttp.ClientResponse, stream: Stream, send: Send) -> None:
        interval_s = self._gateway.limits.progress_interval_s
        told_s = time.monotonic()
        async for chunk in response.content.iter_any():
            events = stream.feed(chunk)
            if not events:
                continue
            self._last_s = time.monotonic()
            if not self._started:
                self._first_s = self._last_s
                await self._start(200, self._headers(response) | {"cache-control": "no-cache"}, send)
            if interval_s and self._last_s - told_s >= interval_s:
                told_s = self._last_s
                self._gateway.link.tell(Progress(self._place.id, stream.usage.output_tokens))
            if stream.ended:
                self.settle("ok", stream.usage)
            await self._send({"type": "http.response.body", "body": events, "more_body": True}, send)
        if not stream.ended:
            raise aiohttp.ClientPayloadError("the stream ended without [DONE]")
        await self._send({"type": "http.response.body", "body": b""}, send)

    async def _break_off(self, error: Exception, send: Send) -> None:
        log.warning("request %s client=%s worker=%s: lost midway: %s", *self._names(), why(error))
        self._gateway.counts["failed"] += 1
        lost = ApiError(
            502, f"worker {self._place.worker} was lost midway: {why(error)}", code="replica_lost"
        )
        await self._send({"type": "http.response.body", "body": b"data: " + lost.body() + b"\n\n"}, send)

    async def _start(self, status: int, headers: dict[str, str], send: Send) -> None:
        self._started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw}, send)

    async def _send(self, message: Message, send: Send) -> None:
        try:
            async with asyncio.timeout(self._gateway.limits.idle_timeout_s):
                await send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error

    def _headers(self, response: aiohttp.ClientResponse) -> dict[str, str]:
        headers = {
            "content-type": response.headers.get("content-type", "application/json"),
            "x-fair-worker": header_safe(self._place.worker),
            "x-fair-client": self._client,
            "x-fair-request-id": self._place.id,
            "x-fair-matched-tokens": str(self._place.matched_tokens),
        }
        if "retry-after" in response.headers:
            headers["retry-after"] = response.headers["retry-after"]
        return headers

    def _names(self) -> tuple[str, str, str]:
        return self._place.id, self._client, self._place.worker
