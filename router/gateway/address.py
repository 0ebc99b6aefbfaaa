"""An address of its own for what operators ask, beside the one that clients have: served by the same process."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from sglang_fair.common import tls


class _Server(uvicorn.Server):
    """Leaves signals to the server of the clients' address, which is in the same process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True)
class Shown:
    """The certificate of all addresses of a gateway. Called by uvicorn in each of its processes, which has one context
    of it."""

    certificate: str
    key: str | None

    def __call__(self, *_: object) -> tls.Server:
        return _context(self)


@cache
def _context(shown: Shown) -> tls.Server:
    return tls.Server(shown.certificate, shown.key)


class Address:
    """`start` it, `close` it. Belongs to one event loop."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        shared: bool,
        connection: Callable[..., asyncio.Protocol],
        shown: Shown | None = None,
    ) -> None:
        """`shared`: other processes of the same gateway listen there too, and each answers for itself. `connection`
        makes uvicorn's protocol of each connection. With `shown`, by https."""
        self._host = host
        self._port = port
        self._shared = shared
        self._server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                access_log=False,
                log_config=None,
                proxy_headers=False,
                http=cast(Any, connection),
                timeout_keep_alive=30,
                ssl_context_factory=shown,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens. Raises OSError if that address cannot be had."""
        listener = _bound(self._host, self._port, self._shared)
        self._serving = asyncio.create_task(self._server.serve([listener]))
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
    """Raises OSError if nobody can listen there."""
    _bound(host, port, shared).close()


def _bound(host: str, port: int, shared: bool) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise OSError(f"--admin-port: {host}:{port}: {error.strerror}") from None
    return made
