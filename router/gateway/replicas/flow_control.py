"""Flow control towards one replica: it is sent no more than a window of bytes that it has not read yet.

A replica's HTTP process parses and tokenizes a request in one go and answers nobody meanwhile. A flood of long prompts
would therefore make it look dead, and everything in flight there would be given up.

Rule. After half a window of request bodies the replica is asked whether it is ready (`GET /ready`); the question queues
behind those bodies, so its answer acknowledges them. When a whole window is unacknowledged, further requests wait, the
clients in turn. A replica that keeps up is never waited for. Unit: bytes of bodies. Bound: at most two windows and two
requests are unread, because the answer may overtake what was sent just before the question. Leaks: each gateway process
has a window of its own.
"""

import asyncio
from collections.abc import Awaitable, Callable

from router.gateway.sharing.thread_pool import RoundRobin

WINDOW_BYTES = 1 << 18


class SendWindow:
    """The window of one replica. Belongs to one event loop."""

    def __init__(self, probe: Callable[[], Awaitable[None]]) -> None:
        """`probe` asks the replica whether it is ready, and returns when it has answered or will not."""
        self._probe = probe
        self._unread_bytes = 0
        self._waiting: RoundRobin[tuple[int, asyncio.Future[None]]] = RoundRobin()
        self._probing: asyncio.Task[None] | None = None
        self._is_closed = False

    async def reserve(self, client: str, size: int) -> None:
        """Returns when `client` may send a body of `size` bytes."""
        if self._is_closed or (self._unread_bytes < WINDOW_BYTES and not self._waiting):
            self._count(size)
            return
        waiting = size, asyncio.get_running_loop().create_future()
        self._waiting.add(client, waiting)
        try:
            await waiting[1]
        except asyncio.CancelledError:
            self._waiting.remove(client, waiting)
            raise

    def close(self) -> None:
        """The replica is gone: everyone who waits may go on, and fails by itself."""
        self._is_closed = True
        if self._probing is not None:
            self._probing.cancel()
        while (waiting := self._waiting.next()) is not None:
            self._release(*waiting[1])

    def _count(self, size: int) -> None:
        self._unread_bytes += size
        if self._probing is None and self._unread_bytes > WINDOW_BYTES // 2 and not self._is_closed:
            self._probing = asyncio.create_task(self._acknowledge())

    async def _acknowledge(self) -> None:
        sent_bytes = self._unread_bytes
        await self._probe()
        self._probing = None
        self._unread_bytes -= sent_bytes
        self._count(0)
        while self._unread_bytes < WINDOW_BYTES and (waiting := self._waiting.next()) is not None:
            self._release(*waiting[1])

    def _release(self, size: int, waiting: "asyncio.Future[None]") -> None:
        if not waiting.done():
            waiting.set_result(None)
            self._count(size)
