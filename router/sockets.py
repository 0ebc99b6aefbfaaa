"""ZMQ sockets in an event loop.

A socket's descriptor becomes readable once for any number of messages, and sending may reset it. So a socket is read
until it is empty, and looked at again after each message that is sent.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import zmq

_POLLIN = int(zmq.POLLIN)
_MESSAGES_PER_TURN = 256
"""Read in a row before the loop does something else."""


class Reader:
    """Calls `receive`, which reads one message of `socket`, for each that comes, until `close`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, socket: "zmq.Socket[bytes]", receive: Callable[[], None]
    ) -> None:
        self.socket = socket
        self._loop = loop
        self._receive = receive
        self._descriptor = cast(int, socket.getsockopt(zmq.FD))
        self._is_called = False
        loop.add_reader(self._descriptor, self.read)
        self.look()

    def read(self) -> None:
        self._is_called = True  # whatever is sent meanwhile, it reads on
        try:
            for _ in range(_MESSAGES_PER_TURN):
                if self.socket.closed or not has_come(self.socket):
                    return
                self._receive()
        finally:
            self._is_called = False
        self.look()

    def look(self) -> None:
        """Reads soon, if something has come. Needed after something was sent."""
        if not self._is_called and not self.socket.closed and has_come(self.socket):
            self._is_called = True
            self._loop.call_soon(self.read)

    def close(self, linger_ms: int | None = 0) -> None:
        """Closes the socket; calling it twice is harmless."""
        if not self.socket.closed:
            self._loop.remove_reader(self._descriptor)
            self.socket.close(linger_ms)


def has_come(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message can be read from it. To be told by an exception takes several times as long."""
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & _POLLIN)
