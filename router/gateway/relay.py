"""Carry one request: from its client to the replica that the router names, and the answer back as it comes.

Whatever happens, each placement is ended at the router exactly once (`Placement.settle`), the replica works
for nobody who has left, and the client sees one outcome:

    before the first byte   the replica refuses, resets, answers 503, falls silent → another replica, up to
                            `tries`; then an error with Retry-After
    after it                a last `data: {"error": ...}` event without [DONE]
    the client leaves       the replica is told: a stream is closed, other work cancelled by /abort_request
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from router.events import TOKEN_BYTES, Arrive, Done, Outcome, Place, Progress, Refuse
from router.gateway.calls import ApiError, Call, Kind, pack_prompts, parse
from router.gateway.link import Link, RouterGone
from router.gateway.sse import Stream, Usage, usage_of
from router.gateway.tokens import Tokens
from sglang_fair.core.identity import (
    HEADER_APP,
    HEADER_CLIENT,
    HEADER_INTERACTION,
    HEADER_STAGE,
    bounded,
    identify,
)

log = logging.getLogger("gateway")

PATHS: Mapping[Kind, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/generate",
}
PASSED_THROUGH = (HEADER_APP, HEADER_INTERACTION, HEADER_STAGE)
RETRY_AFTER_S = 1
ABORT_TIMEOUT_S = 2.0
BODY_TIMEOUT_S = 60.0
"""A client may pause this long between two pieces of its body."""
LONG_BODY_BYTES = 8192
"""Longer bodies are tokenized off the event loop."""
MAX_ROUTED_TOKENS = 1 << 22
"""Tokens told to the router; beyond them a prompt is counted and compared no further."""


@dataclass(frozen=True)
class Limits:
    """What bounds a gateway."""

    max_in_flight: int = 2048
    max_body_bytes: int = 16 << 20
    tries: int = 3
    connect_timeout_s: float = 2.0
    idle_timeout_s: float = 600.0
    """Longest silence of a replica, its queue included, and of a client that reads too slowly."""
    progress_interval_s: float = 1.0
    """How often the router hears of a stream's output; 0 for never."""


class NotServed(Exception):
    """The replica gave no byte of an answer; another one may."""


class ClientGone(Exception):
    """The client reads no more."""


class Gateway:
    """What requests share: connections, tokenizer, limits, counters. Belongs to one event loop."""

    def __init__(self, model_name: str, link: Link, tokens: Tokens, limits: Limits) -> None:
        """`start` opens the connections."""
        self.model_name = model_name
        self.link = link
        self.limits = limits
        self.in_flight = 0
        self.counts = {"requests": 0, "retried": 0, "failed": 0, "left": 0, "refused": 0}
        self._tokens = tokens
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._background: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The HTTP connections to replicas."""
        assert self._session is not None, "the gateway is not started"
        return self._session

    async def start(self) -> None:
        """Opens what belongs to the running loop."""
        self._session = aiohttp.ClientSession(
            # Shorter than the 5 s for which a replica keeps an idle connection: none is reused as it closes.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=self.limits.connect_timeout_s,
                sock_read=self.limits.idle_timeout_s,
            ),
            auto_decompress=False,
            read_bufsize=1 << 18,
        )
        await self.link.start()

    async def close(self) -> None:
        """Lets cancellations under way reach their replicas, then closes everything."""
        if self._background:
            await asyncio.wait(self._background, timeout=ABORT_TIMEOUT_S)
        if self._session is not None:
            await self._session.close()
        await self.link.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def routed_tokens(self, call: Call, body_bytes: int) -> bytes:
        """The tokens that the router is told of."""

        def work() -> bytes:
            return pack_prompts(self._tokens.ids(call))[: MAX_ROUTED_TOKENS * TOKEN_BYTES]

        if body_bytes <= LONG_BODY_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def cancel_work(self, url: str, rids: tuple[str, ...]) -> None:
        """Tells the replica to drop these requests, in the background."""
        for rid in rids:
            self._spawn(self._abort(url, rid))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort(self, url: str, rid: str) -> None:
        try:
            timeout = aiohttp.ClientTimeout(total=ABORT_TIMEOUT_S)
            async with self.session.post(f"{url}/abort_request", json={"rid": rid}, timeout=timeout):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.info("request %s could not be cancelled at %s: %s", rid, url, _why(error))


class Relay(Response):
    """The response to one request, as an ASGI application of its own: it reads, routes, carries, settles."""

    def __init__(self, gateway: Gateway, kind: Kind) -> None:
        """Nothing happens until it is called."""
        super().__init__()
        self._gateway = gateway
        self._kind = kind
        self._client = "-"
        self._worker = "-"
        self._complete = False
        self._arrived_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request; returns when its client has an outcome or is gone."""
        gateway = self._gateway
        gateway.counts["requests"] += 1
        if gateway.in_flight >= gateway.limits.max_in_flight:
            gateway.counts["refused"] += 1
            await self._refuse(
                ApiError(429, "too many requests in flight", code="overloaded", retry_after_s=RETRY_AFTER_S),
                send,
            )
            return
        gateway.in_flight += 1
        try:
            await self._read_and_serve(scope, receive, send)
        except ClientGone:
            gateway.counts["left"] += 1
        except ApiError as error:
            gateway.counts["refused" if error.status < 500 else "failed"] += 1
            await self._refuse(error, send)
        finally:
            gateway.in_flight -= 1

    async def _read_and_serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        raw = await _read_body(receive, headers, self._gateway.limits.max_body_bytes)
        call = parse(self._kind, raw, self._gateway.model_name)
        self._client = header_safe(identify(headers, call.user))
        replica_headers = {"content-type": "application/json", HEADER_CLIENT: self._client}
        replica_headers |= {name: header_safe(headers[name]) for name in PASSED_THROUGH if headers.get(name)}

        async def noted(message: Message) -> None:
            await send(message)
            self._complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        work = asyncio.create_task(self._serve(call, len(raw), replica_headers, noted))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = not work.done() and not self._complete
            for task in (work, gone):
                task.cancel()
            # `work` settles its placement as it is cancelled.
            await asyncio.gather(work, gone, return_exceptions=True)
        if left:
            raise ClientGone
        if not work.cancelled():
            work.result()

    async def _serve(self, call: Call, body_bytes: int, headers: dict[str, str], send: Send) -> None:
        gateway = self._gateway
        tokens = await gateway.routed_tokens(call, body_bytes)
        excluded: tuple[str, ...] = ()
        reason = ""
        for _ in range(gateway.limits.tries):
            arrive = Arrive(
                id=uuid.uuid4().hex,
                client=self._client,
                tokens=tokens,
                max_output_tokens=call.max_output_tokens,
                namespace=call.namespace,
                exclude=excluded,
            )
            try:
                answer = await gateway.link.place(arrive)
            except RouterGone as error:
                raise ApiError(
                    503, str(error), code="router_unavailable", retry_after_s=RETRY_AFTER_S
                ) from error
            if isinstance(answer, Refuse):
                if excluded:
                    break
                raise _refusal(answer)
            self._worker = answer.worker
            placement = Placement(gateway, call, answer, self._client, self._arrived_s)
            try:
                await placement.carry(call.forwarded(answer.id), headers, send)
                return
            except NotServed as error:
                reason = str(error)
                excluded = (*excluded, answer.worker)
                gateway.counts["retried"] += 1
                log.info("request %s: worker %s: %s; trying another", answer.id, answer.worker, reason)
        raise ApiError(
            502,
            f"no replica could serve the request; tried {', '.join(excluded)}; the last: {reason}",
            code="no_replica",
            retry_after_s=RETRY_AFTER_S,
        )

    async def _refuse(self, error: ApiError, send: Send) -> None:
        log.warning(
            "%s %d client=%s worker=%s: %s",
            PATHS[self._kind],
            error.status,
            self._client,
            self._worker,
            error.message,
        )
        headers = [(b"content-type", b"application/json"), (b"x-fair-client", self._client.encode("latin-1"))]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(error.retry_after_s).encode()))
        body = error.body()
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Placement:
    """One request at one worker, from the router's word to its end."""

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
                raise NotServed(_why(error)) from error
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
        log.warning("request %s client=%s worker=%s: lost midway: %s", *self._names(), _why(error))
        self._gateway.counts["failed"] += 1
        lost = ApiError(
            502, f"worker {self._place.worker} was lost midway: {_why(error)}", code="replica_lost"
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


def header_safe(name: str) -> str:
    """`name` as it can stand in a header, so that router and replica know a client by one name.

    Printable ASCII is itself; anything else, line breaks among it, is percent-encoded.
    """
    if name.isascii() and name.isprintable():
        return bounded(name)
    return bounded(quote(name, safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}"))


def _refusal(answer: Refuse) -> ApiError:
    retry_after_s = RETRY_AFTER_S if answer.retry else None
    return ApiError(503, f"the router refused: {answer.reason}", code="refused", retry_after_s=retry_after_s)


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def _read_body(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                message = await receive()
        except TimeoutError as error:
            raise ApiError(408, "the body did not arrive in time", code="body_timeout") from error
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise too_large
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
