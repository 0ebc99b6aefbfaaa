"""Connections of the small HTTP servers, the page's and the router's, with the bounds that aiohttp lacks.

aiohttp closes a connection that is idle after an answer. But it accepts any number of connections, and waits for ever
for the first request of one (`keepalive_timeout` holds from the first answer on). Here, as at the clients' address
(`router.gateway.listener`), a connection counts for its address, and is closed when no whole request head has come
within a time limit.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

from aiohttp import web

from router.shared_limit import SharedLimit, address_share

HEAD_TIMEOUT_S = 15.0
MOST_CONNECTIONS = 512
"""Of one server. One address has at most half of those that the others leave."""

_BACKLOG = 64
_HEAD_ENDS = b"\r\n\r\n"
_REFUSAL = (
    b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
)


def listen(host: str, port: int) -> socket.socket:
    """The server's socket. Raises OSError."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


@asynccontextmanager
async def serving(
    app: web.Application,
    listener: socket.socket,
    tls: ssl.SSLContext | None = None,
    *,
    shutdown_timeout_s: float = 0.1,
    head_timeout_s: float = HEAD_TIMEOUT_S,
) -> AsyncIterator[None]:
    """Serves `app` at `listener`, which is closed at the end; with `tls` over https."""
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=shutdown_timeout_s, keepalive_timeout=head_timeout_s
    )
    await runner.setup()
    assert runner.server is not None
    made: Callable[[], asyncio.Protocol] = runner.server
    connections = SharedLimit(MOST_CONNECTIONS)
    server = await asyncio.get_running_loop().create_server(
        lambda: _Connection(made(), connections, head_timeout_s), sock=listener, ssl=tls
    )
    try:
        yield
    finally:
        server.close()
        await runner.cleanup()


class _Connection(asyncio.Protocol):
    """Passes everything on to aiohttp's protocol, if the connection is not one too many."""

    def __init__(self, inner: asyncio.Protocol, connections: SharedLimit, head_timeout_s: float) -> None:
        self._inner = inner
        self._connections = connections
        self._head_timeout_s = head_timeout_s
        self._share: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        wire = cast(asyncio.Transport, transport)
        peer = wire.get_extra_info("peername")
        share = address_share(peer if isinstance(peer, tuple) else None)
        if not self._connections.take(share):
            wire.write(_REFUSAL)
            wire.close()
            return
        self._share = share
        self._timer = asyncio.get_running_loop().call_later(self._head_timeout_s, wire.abort)
        self._inner.connection_made(wire)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._share is None:
            return
        self._connections.give(self._share)
        self._share = None
        self._stop_waiting()
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._share is None:
            return
        if self._timer is not None:
            seen = self._tail + data
            self._tail = seen[-len(_HEAD_ENDS) + 1 :]
            if _HEAD_ENDS in seen:
                self._stop_waiting()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._share is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
