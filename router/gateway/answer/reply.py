"""Sending an answer to one client: status and headers, then the body by pieces. One that stops reading is dropped."""

import asyncio
from collections.abc import Mapping

from starlette.types import Message, Send


class ClientGone(Exception):
    """The client has left, or has stopped reading."""


class Reply:
    """The answer to one client, over whatever replicas it comes from. One timer serves all its pieces."""

    def __init__(self, send: Send, idle_timeout_s: float, headers: Mapping[str, str] | None = None) -> None:
        """`idle_timeout_s` bounds the sending of each piece. `headers` go with any answer, as they are when it
        starts. Methods that send raise `ClientGone`."""
        self.started = False
        self.ended = False
        self.status = 0
        self.started_s = 0.0
        """When it started, on the monotonic clock."""
        self._send_raw = send
        self._own_headers = {} if headers is None else headers
        self._idle_timeout_s = idle_timeout_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[object] | None = None
        self._since_s = 0.0
        self._is_given_up = False

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Sends status and headers. Call it once."""
        assert not self.started
        self.started = True
        self.status, self.started_s = status, self._loop.time()
        named = {**headers, **self._own_headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def piece(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": body})
        self.ended = True

    def close(self) -> None:
        """Stops the timer. Nothing more may be sent."""
        if self._timer is not None:
            self._timer.cancel()

    async def _send(self, message: Message) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._idle_timeout_s, self._look)
        self._since_s, self._sending = self._loop.time(), asyncio.current_task()
        try:
            await self._send_raw(message)
        except OSError as error:
            raise ClientGone from error
        except asyncio.CancelledError:
            if not self._is_given_up:
                raise
            if self._sending is not None:
                self._sending.uncancel()
            raise ClientGone from None
        finally:
            self._sending = None

    def _look(self) -> None:
        """Gives the client up if it has not accepted the piece that is being sent."""
        waited_s = self._loop.time() - self._since_s if self._sending is not None else 0.0
        if self._sending is not None and waited_s >= self._idle_timeout_s:
            self._is_given_up = True
            self._sending.cancel()
        else:
            self._timer = self._loop.call_later(self._idle_timeout_s - waited_s, self._look)
