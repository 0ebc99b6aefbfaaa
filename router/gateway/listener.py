"""The server's side of a client's connection, with the bounds that uvicorn lacks, and without ASGI for what replicas
answer.

uvicorn closes a connection that is idle after an answer. But it accepts any number of connections, and waits for ever
on one that sends nothing, or half a head. Here a connection counts for its address, and is closed when no whole
request head has come within a time limit. A request for replicas is a `ClientRequest`, which the application's relay
gets as it is; all others go to the application by ASGI.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol, cast
from urllib.parse import unquote_to_bytes

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from router.events import Place
from router.gateway.errors import overloaded
from router.gateway.metrics import Count
from router.gateway.request.kinds import PATHS, Kind
from router.shared_limit import SharedLimit, address_share

STATE = "connections"
"""Where the application's lifespan puts its `ConnectionBounds`, unless the server is given them."""
RELAY = "relay"
"""Where it puts what serves requests for replicas."""

KINDS = {path.encode(): kind for kind, path in PATHS.items()}

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


Callback = Callable[[], None]


class ClientGone(Exception):
    """The client has left, or has stopped reading."""


class Answer(Protocol):
    """What a replica answers, as it comes."""

    status: int
    headers: dict[str, str]

    async def piece(self) -> bytes:
        """The next bytes; b"" at the end. Raises OSError if the end does not come."""

    async def read(self) -> bytes:
        """All that is left."""


class Asked(Protocol):
    """A request on its way to a replica, for `async with`. Raises OSError if no answer begins."""

    @property
    def was_sent(self) -> bool:
        """The replica may have begun to work on it."""

    def give_up(self, error: Exception) -> None:
        """Fails it with this error, unless its answer is complete."""

    async def __aenter__(self) -> Answer: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


HandOver = Callable[[Place, Mapping[str, str], bytes], Asked]
"""Has the request brought to its replica, with these headers and this body, by whom it came from."""


class Incoming(Protocol):
    """A request for replicas, as relay, serving and attempt see it, and the way of its answer: `start`, `piece` again
    and again, and `end`; or `answer`, a whole one. Methods that are waited for raise `ClientGone`. By HTTP it is a
    `ClientRequest`; `router.picker` has one that another gateway brings to its replica."""

    headers: dict[str, str]
    """By names in lower case."""
    own_headers: Mapping[str, str]
    """Of any answer, as they are when it starts."""
    started: bool
    ended: bool
    status: int
    started_s: float
    """When the answer started, on the monotonic clock."""

    @property
    def client(self) -> Any:
        """Host and port of the peer."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def excluded(self) -> tuple[str, ...]:
        """Workers that may not serve it."""

    @property
    def hand_over(self) -> HandOver | None:
        """None: it is sent to its replica from here."""

    @property
    def served_by(self) -> str:
        """Whoever answers, once that is known; "": whoever was asked."""

    def whole_body(self) -> bytes | None:
        """The body, if all of it has come."""

    async def body_piece(self) -> tuple[bytes, bool]:
        """The next piece of the body, and whether another one follows."""

    def when_client_leaves(self, leave: Callback) -> Callback:
        """Calls `leave` once if the client goes away, whose body has been read. Calling the result ends that."""

    def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begins the answer. Call it once."""

    async def piece(self, body: bytes) -> None:
        """A piece, which must not be empty."""

    async def end(self, body: bytes = b"") -> None:
        """The last piece."""

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """A whole answer."""


@dataclass(frozen=True)
class ConnectionBounds:
    """What bounds the connections of clients."""

    open: SharedLimit
    """Open connections, by address."""
    head_timeout_s: float
    idle_timeout_s: float
    """Within which a client takes a piece of an answer."""
    count: Count


def refusal(share: str) -> bytes:
    body = overloaded(f"too many connections from {share.strip('()')}").body()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nretry-after: 1\r\nconnection: close"
    return f"HTTP/1.1 429 Too Many Requests\r\n{head}\r\n\r\n".encode() + body


class ClientRequest(RequestResponseCycle):
    """An `Incoming` by HTTP. What is sent waits for the client to take what was sent before; then methods raise
    `ClientGone`.

    By ASGI each piece is a message, and the head another one, which uvicorn writes by itself.
    """

    method = "POST"
    excluded: tuple[str, ...] = ()
    hand_over: HandOver | None = None
    served_by = ""

    def __init__(self, listener: "Listener", keep_alive: bool, idle_timeout_s: float) -> None:
        super().__init__(
            scope=listener.scope,
            transport=listener.transport,
            flow=listener.flow,
            logger=listener.logger,
            access_logger=listener.access_logger,
            access_log=listener.access_log,
            default_headers=listener.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=listener.expect_100_continue,
            keep_alive=keep_alive,
            on_response=listener.on_response_complete,
        )
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in listener.headers}
        self.client = listener.client
        self.own_headers: Mapping[str, str] = {}
        """Of any answer, as they are when it starts."""
        self.started = False
        self.ended = False
        self.status = 0
        self.started_s = 0.0
        """When the answer started, on the monotonic clock."""
        self._listener = listener
        self.loop = listener.loop
        self._idle_timeout_s = idle_timeout_s
        self._head = b""
        """What has not been written of it."""

    def whole_body(self) -> bytes | None:
        """The body if all of it has come, as it mostly has with the head: nobody need wait for it."""
        if self.more_body or self.disconnected or self.waiting_for_100_continue:
            return None
        body, self.body = bytes(self.body), bytearray()
        return body

    async def body_piece(self) -> tuple[bytes, bool]:
        """The next piece of the body, and whether another one follows."""
        message = await self.receive()
        if message["type"] != "http.request":
            raise ClientGone
        return message["body"], message["more_body"]

    def when_client_leaves(self, leave: Callback) -> Callback:
        """Calls `leave` once if the client goes away, whose body has been read. Calling the result ends that."""
        return self._listener.when_gone(leave)

    def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Sends status and headers, with the first piece if that comes in the same turn of the loop. Call it once.
        Raises ValueError for a header that cannot be."""
        assert not self.started
        self.started = self.response_started = True
        self.waiting_for_100_continue = False
        self.status, self.started_s = status, self.loop.time()
        named = {**headers, **self.own_headers}
        if not self.keep_alive:
            named["connection"] = "close"
        self.chunked_encoding = "content-length" not in named
        if self.chunked_encoding:
            named["transfer-encoding"] = "chunked"
        lines = "".join([f"{name}: {value}\r\n" for name, value in named.items()])
        if _CONTROL.search(lines) or lines.count("\r") + lines.count("\n") != 2 * len(named):
            raise ValueError("a header with a control character in it")
        usual = [b"%b: %b\r\n" % pair for pair in self.default_headers]
        self._head = b"".join((STATUS_LINE[status], *usual, lines.encode("latin-1"), b"\r\n"))
        self.loop.call_soon(self._flush)

    async def piece(self, body: bytes) -> None:
        """Sends a piece, which must not be empty, of an answer without a `content-length`."""
        if self.flow.write_paused:
            await self._until_taken()
        self._write(b"%x\r\n%b\r\n" % (len(body), body))

    async def end(self, body: bytes = b"") -> None:
        """Sends the last piece, or all of an answer that has a `content-length`."""
        if self.flow.write_paused:
            await self._until_taken()
        if self.chunked_encoding:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        self._write(body)
        self.ended = True
        if self.disconnected:
            return
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Sends a whole answer."""
        self.start(status, {**headers, "content-length": str(len(body))})
        await self.end(body)

    def _write(self, data: bytes) -> None:
        head, self._head = self._head, b""
        if not self.disconnected:
            self.transport.write(head + data if head else data)

    def _flush(self) -> None:
        if self._head:
            self._write(b"")

    async def _until_taken(self) -> None:
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                await self.flow.drain()
        except TimeoutError:
            raise ClientGone from None


Relaying = Callable[[Kind, ClientRequest], Awaitable[None]]


class Listener(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, *arguments: Any, bounds: ConnectionBounds | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._bounds: ConnectionBounds = self.app_state[STATE] if bounds is None else bounds
        self._relay: Relaying | None = self.app_state.get(RELAY)
        self._share: str | None = None
        self._has_begun = False
        self._timer: asyncio.TimerHandle | None = None
        self._leaving: set[Callback] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the connection, or refuses it if its address has too many."""
        peer = transport.get_extra_info("peername")
        share = address_share(peer if isinstance(peer, tuple) else None)
        if not self._bounds.open.take(share):
            self._bounds.count("refusals_total", "429")
            wire = cast(asyncio.Transport, transport)
            wire.write(refusal(share))
            wire.close()
            return
        self._share = share
        super().connection_made(cast(asyncio.Transport, transport))
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives its place back. A refused connection has none."""
        if self._share is None:
            return
        self._bounds.open.give(self._share)
        self._share = None
        self._stop_waiting()
        super().connection_lost(exc)
        for leave in tuple(self._leaving):
            leave()

    def data_received(self, data: bytes) -> None:
        """Starts the clock for the next head when one has begun, or none is being answered."""
        if self._share is None:
            return
        super().data_received(data)
        is_free = self.cycle is None or self.cycle.response_complete
        if (self._has_begun or is_free) and self._timer is None:
            self._wait_for_head()

    def on_message_begin(self) -> None:
        self._has_begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begins to serve the request, or lets it wait until those before it on this connection are answered."""
        self._has_begun = False
        self._stop_waiting()
        relay, kind = self._relay, self._kind()
        if relay is None or kind is None:
            super().on_headers_complete()
            return
        self.scope["method"] = ClientRequest.method
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        before = self.cycle
        self.cycle = made = ClientRequest(self, keep_alive, self._bounds.idle_timeout_s)
        serve = cast(Any, partial(_relayed, relay, kind, made))
        if before is None or before.response_complete:
            self._start_asgi_task(made, serve)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((made, serve))

    def when_gone(self, leave: Callback) -> Callback:
        """Calls `leave` once if the connection ends. Calling the result ends that."""
        if self._share is None:
            self.loop.call_soon(leave)
        self.flow.resume_reading()  # else the end would not be read behind a large body
        self._leaving.add(leave)
        return partial(self._leaving.discard, leave)

    def _kind(self) -> Kind | None:
        """Of a request for replicas. One that offers another protocol than uvicorn has is served as it is."""
        if self.parser.get_method() != b"POST" or (self.parser.should_upgrade() and self._should_upgrade()):
            return None
        return KINDS.get(self.url) or KINDS.get(unquote_to_bytes(httptools.parse_url(self.url).path or b""))

    def _wait_for_head(self) -> None:
        self._timer = self.loop.call_later(self._bounds.head_timeout_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _relayed(relay: Relaying, kind: Kind, request: ClientRequest, *_: Any) -> None:
    """As an application by ASGI, whose errors uvicorn's cycle looks after."""
    await relay(kind, request)
