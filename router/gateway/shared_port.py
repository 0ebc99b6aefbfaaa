"""A port at which several processes listen, each with a socket of its own, so that the kernel deals connections out.

With one socket for all, which uvicorn has, whichever process wakes first takes all connections that have come by then:
of 32 that come at once one process had all, and the other had nothing to do.
"""

import socket
from typing import Any


class SharedPort(socket.socket):
    """A socket that keeps the address and listens at nothing itself. In each process that it is sent to it is another
    socket of the same address."""

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError if somebody has the address."""
        _bound(host, port).close()  # `SO_REUSEPORT` would share it with a stranger
        family, kind, protocol, _, address = _resolved(host, port)
        super().__init__(family, kind, protocol)
        _bind(self, address, shared=True)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        host, port, *_rest = self.getsockname()
        return _own, (host, port)


def _own(host: str, port: int) -> socket.socket:
    return _bound(host, port, shared=True)


def _resolved(host: str, port: int) -> Any:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]


def _bound(host: str, port: int, *, shared: bool = False) -> socket.socket:
    family, kind, protocol, _, address = _resolved(host, port)
    made = socket.socket(family, kind, protocol)
    _bind(made, address, shared=shared)
    return made


def _bind(made: socket.socket, address: Any, *, shared: bool) -> None:
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
