"""The server's side of a client's connection, with the bounds that uvicorn lacks.

uvicorn closes a connection that is idle after an answer. But it accepts any number of connections, and waits for ever
on one that sends nothing, or half a head. Here a connection counts for its address, and is closed when no whole
request head has come within a time limit.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.gateway.errors import overloaded
from router.gateway.metrics import Count
from router.shared_limit import SharedLimit, address_share

STATE = "connections"
"""Where the application's lifespan puts its `ConnectionBounds`, unless the server is given them."""


LEAVING = "sglang_fair.leaving"
"""The extension of a request's scope that `when_client_leaves` uses."""

WHOLE = "sglang_fair.whole"
"""The extension of a request's scope that `body_in` uses."""

Callback = Callable[[], None]


def when_client_leaves(scope: Scope, leave: Callback) -> Callback:
    """Calls `leave` once if the client of a request, whose body has been read, goes away. Calling the result ends that.
    It is an event of the connection, where ASGI has a task that waits for it beside each request; another server than
    `Listener` has none."""
    extension = scope.get("extensions", {}).get(LEAVING)
    return (lambda: None) if extension is None else cast(Callback, extension["listen"](leave))


def body_in(scope: Scope) -> bytes | None:
    """The body of a request if all of it has come, as it mostly has with the head: nobody need wait for it."""
    extension = scope.get("extensions", {}).get(WHOLE)
    return None if extension is None else cast(bytes | None, extension["read"]())


@dataclass(frozen=True)
class ConnectionBounds:
    """What bounds the connections of clients."""

    open: SharedLimit
    """Open connections, by address."""
    head_timeout_s: float
    count: Count


def refusal(share: str) -> bytes:
    body = overloaded(f"too many connections from {share.strip('()')}").body()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nretry-after: 1\r\nconnection: close"
    return f"HTTP/1.1 429 Too Many Requests\r\n{head}\r\n\r\n".encode() + body


class Wire:
    """A transport that sends the head of an answer together with what follows it at once: ASGI has head and body in two
    messages, and uvicorn writes each, for which the system takes as long as the gateway takes for much of a request."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        """Writes `data`: a head with the next write, or when the loop's turn is over."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _body_of(cycle: RequestResponseCycle) -> bytes | None:
    if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
        return None
    body, cycle.body = bytes(cycle.body), bytearray()
    return body


class Listener(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, *arguments: Any, bounds: ConnectionBounds | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._bounds: ConnectionBounds = self.app_state[STATE] if bounds is None else bounds
        self._share: str | None = None
        self._has_begun = False
        self._timer: asyncio.TimerHandle | None = None
        self._extensions: dict[str, dict[object, object]] = {LEAVING: {"listen": self._when_gone}}
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
        super().connection_made(cast(asyncio.Transport, Wire(cast(asyncio.Transport, transport), self.loop)))
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
        self.scope["extensions"] = self._extensions

    def on_headers_complete(self) -> None:
        self._has_begun = False
        self._stop_waiting()
        super().on_headers_complete()
        if (cycle := self.cycle) is not None:  # this request's, which may have to wait for those before it
            self.scope["extensions"] = {**self._extensions, WHOLE: {"read": partial(_body_of, cycle)}}

    def _when_gone(self, leave: Callback) -> Callback:
        if self._share is None:
            self.loop.call_soon(leave)
        self.flow.resume_reading()  # else the end would not be read behind a large body
        self._leaving.add(leave)
        return partial(self._leaving.discard, leave)

    def _wait_for_head(self) -> None:
        self._timer = self.loop.call_later(self._bounds.head_timeout_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
