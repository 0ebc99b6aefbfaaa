"""Where a gateway listens: an address of its own for what operators ask, beside the one that clients have and served by
the same process; and ports at which several processes listen, each with a socket of its own.

With one socket for all processes, which uvicorn has, whichever wakes first takes all connections that have come by
then: of 32 that come at once one process had all, and the other had nothing to do. So the kernel deals them out.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from sglang_fair.common import tls
from sglang_fair.settings import table

Shown = Callable[..., tls.Server]
"""Makes the TLS context of a process; called by uvicorn, whose arguments do not matter."""


def shown(settings: table.Gateway) -> Shown | None:
    """The certificate of all addresses of a gateway; None: it is asked over http. It can be sent to other processes."""
    return None if settings.tls_cert is None else partial(_shown, settings.tls_cert, settings.tls_key)


def _shown(certificate: str, key: str | None, *_: object) -> tls.Server:
    return _context(certificate, key)


_context = cache(tls.Server)
"""One for all addresses of a process."""


class _Server(uvicorn.Server):
    """Leaves signals to the server of the clients' address, which is in the same process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Address:
    """`start` it, `close` it. Belongs to one event loop."""

    def __init__(
        self, app: ASGIApp, settings: table.Gateway, connection: Callable[..., asyncio.Protocol]
    ) -> None:
        """The operators' address of `settings`. With several processes each listens there, and answers for itself.
        `connection` makes uvicorn's protocol of each connection."""
        assert settings.admin_port is not None
        self._where = settings.admin_host, settings.admin_port, settings.workers > 1
        self._server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                access_log=False,
                log_config=None,
                proxy_headers=False,
                http=cast(Any, connection),
                timeout_keep_alive=30,
                ssl_context_factory=shown(settings),
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens. Raises OSError if that address cannot be had."""
        self._serving = asyncio.create_task(self._server.serve([_for_operators(*self._where)]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.01)
        if self._serving.done():
            await self._serving  # raises what is wrong

    async def close(self) -> None:
        """Stops; what is being answered is dropped."""
        if self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving


def check_free(host: str, port: int, *, shared: bool) -> None:
    """Raises OSError if the operators' address cannot be had."""
    _for_operators(host, port, shared).close()


def _for_operators(host: str, port: int, shared: bool) -> socket.socket:
    try:
        return bound(host, port, shared)
    except OSError as error:
        raise OSError(f"--admin-port: {host}:{port}: {error.strerror}") from None


class SharedPort(socket.socket):
    """A socket that keeps the address and listens at nothing itself. In each process that it is sent to it is another
    socket of the same address."""

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError if another program has the address."""
        bound(host, port).close()  # `SO_REUSEPORT` would share it
        family, kind, protocol, _, address = _resolved(host, port)
        super().__init__(family, kind, protocol)
        _bind(self, address, shared=True)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return bound, (*self.getsockname()[:2], True)


def _resolved(host: str, port: int) -> Any:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]


def bound(host: str, port: int, shared: bool = False) -> socket.socket:
    """A socket at this address. Raises OSError."""
    family, kind, protocol, _, address = _resolved(host, port)
    made = socket.socket(family, kind, protocol)
    _bind(made, address, shared)
    return made


def _bind(made: socket.socket, address: Any, shared: bool) -> None:
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
