"""What one client gets: a status and headers once, then pieces of a body, whoever they come from."""

import asyncio
from collections.abc import Mapping

from starlette.types import Message, Send

from router.gateway.calls import ApiError


class ClientGone(Exception):
    """The client reads no more."""


class Reply:
    """The way to one client. A client that reads too slowly is gone."""

    def __init__(self, send: Send, idle_timeout_s: float) -> None:
        """`idle_timeout_s` bounds every piece. All methods raise `ClientGone`."""
        self.started = False
        self.ended = False
        self._send_raw = send
        self._idle_timeout_s = idle_timeout_s

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers; once."""
        assert not self.started
        self.started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def piece(self, body: bytes) -> None:
        """A piece of the body, more to come."""
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        """The last piece."""
        await self._send({"type": "http.response.body", "body": body})
        self.ended = True

    async def break_off(self, error: ApiError) -> None:
        """Ends a stream in an error event, without [DONE]."""
        await self.end(b"data: " + error.body() + b"\n\n")

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                await self._send_raw(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error
