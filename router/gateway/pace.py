"""How much a replica is given to read before it has shown that it has read what came before.

A replica's HTTP process parses and tokenizes a request in one go and answers nobody meanwhile, so a flood of long
prompts makes it look dead, and all that it serves is given up.

Rule. Once `WINDOW_BYTES` have been sent to a replica, it is asked whether it is ready, behind all of them; what
follows waits for the answer, the clients in turn (`turns`). The question is put when half of it is used up, so that
a replica that keeps up is not waited for. Unit: bytes of bodies. Bound: a replica has two windows and two requests
to read at most, for its answer may overtake what was sent just before. Leaks: each gateway has a window of its own.
"""

import asyncio
from collections.abc import Awaitable, Callable

from router.gateway.turns import Turns

WINDOW_BYTES = 1 << 18


class Pace:
    """Of one replica, on one event loop."""

    def __init__(self, ask: Callable[[], Awaitable[None]]) -> None:
        """`ask` returns when the replica has answered, or will not."""
        self._ask = ask
        self._unread_bytes = 0
        self._turns: Turns[tuple[int, asyncio.Future[None]]] = Turns()
        self._asking: asyncio.Task[None] | None = None
        self._is_closed = False

    async def turn(self, client: str, size: int) -> None:
        """Returns when `client` may send a body of `size` bytes."""
        if self._is_closed or (self._unread_bytes < WINDOW_BYTES and not self._turns):
            self._send(size)
            return
        waiting = size, asyncio.get_running_loop().create_future()
        self._turns.add(client, waiting)
        try:
            await waiting[1]
        except asyncio.CancelledError:
            self._turns.remove(client, waiting)
            raise

    def close(self) -> None:
        """The replica is gone: nobody waits for it any more."""
        self._is_closed = True
        if self._asking is not None:
            self._asking.cancel()
        while (found := self._turns.next()) is not None:
            self._let(found[1])

    def _send(self, size: int) -> None:
        self._unread_bytes += size
        if self._asking is None and self._unread_bytes > WINDOW_BYTES // 2 and not self._is_closed:
            self._asking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        before_bytes = self._unread_bytes
        await self._ask()
        self._asking = None
        self._unread_bytes -= before_bytes
        self._send(0)
        while self._unread_bytes < WINDOW_BYTES and (found := self._turns.next()) is not None:
            self._let(found[1])

    def _let(self, found: "tuple[int, asyncio.Future[None]]") -> None:
        size, waiting = found
        if not waiting.done():
            waiting.set_result(None)
            self._send(size)
