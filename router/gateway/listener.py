"""The server's side of a client's connection, bounded where uvicorn leaves it open.

uvicorn closes a connection that is idle after an answer. It waits for ever on one that has sent nothing, or half a
head, and takes as many as come. Here a connection counts for its address (`resources.address_share`), and is closed
when no whole head has come for `head_timeout_s`.
"""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.gateway.errors import ApiError
from router.gateway.resources import Gateway, address_share

STATE = "gateway"
"""Where the application's lifespan puts the `Gateway`."""


def full(share: str) -> bytes:
    """The answer to a connection that is one too many."""
    body = ApiError(429, f"too many connections from {share.strip('()')}", code="overloaded").body()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nretry-after: 1\r\nconnection: close"
    return f"HTTP/1.1 429 Too Many Requests\r\n{head}\r\n\r\n".encode() + body


class Listener(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._gateway: Gateway = self.app_state[STATE]
        self._share: str | None = None
        self._has_begun = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open, unless its address has too many."""
        peer = transport.get_extra_info("peername")
        share = address_share(peer if isinstance(peer, tuple) else None)
        if not self._gateway.connections.take(share):
            self._gateway.refusals[429] += 1
            wire = cast(asyncio.Transport, transport)
            wire.write(full(share))
            wire.close()
            return
        self._share = share
        super().connection_made(cast(asyncio.Transport, transport))
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        if self._share is None:
            return
        self._gateway.connections.give(self._share)
        self._share = None
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Something came."""
        if self._share is None:
            return
        super().data_received(data)
        is_free = self.cycle is None or self.cycle.response_complete
        if (self._has_begun or is_free) and self._timer is None:
            self._wait_for_head()

    def on_message_begin(self) -> None:
        """The first byte of a request's head."""
        self._has_begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The whole head."""
        self._has_begun = False
        self._stop_waiting()
        super().on_headers_complete()

    def _wait_for_head(self) -> None:
        self._timer = self.loop.call_later(self._gateway.limits.head_timeout_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
