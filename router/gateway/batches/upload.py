"""A file that a client sends, `multipart/form-data`, from the wire to the disk, by Starlette's parser: whatever its
size, a piece of it is in memory at a time, and the disk is waited for in a thread.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from io import BytesIO
from typing import Any

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from router.batches.folder import PIECE_BYTES, Writing
from router.gateway.errors import ApiError

FIELD_BYTES = 1024
"""Longest field beside the file."""
HEAD_BYTES = 64 << 10
"""Of the body, beside the file's content."""
MOST_FILENAME = 255
PAUSE_S = 60.0
"""Longest pause of a client between two pieces."""
PARSED_BYTES = 64 << 10
"""Looked at in one go: others have their turn in between."""

FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


class Spool(UploadFile):
    """In place of Starlette's temporary file: `writing`, with a bound on its size. `run` calls a function in a
    thread."""

    def __init__(self, writing: Writing, most_bytes: int, run: Callable[..., Awaitable[Any]]) -> None:
        super().__init__(BytesIO())
        self.pending = bytearray()
        self._writing, self._most_bytes, self._run = writing, most_bytes, run

    async def write(self, data: bytes) -> None:
        """Raises `ApiError` for more than may come, or if the disk cannot take it."""
        self.pending += data
        if self._writing.bytes + len(self.pending) > self._most_bytes:
            raise too_large(self._most_bytes)
        if len(self.pending) >= PIECE_BYTES:
            await self.seek(0)

    async def seek(self, offset: int) -> None:
        """At the end of the part: what is left goes to the disk."""
        content, self.pending = self.pending, bytearray()
        await self._run(self._writing.write, content)


class _Parser(MultiPartParser):
    def __init__(self, headers: Headers, stream: AsyncGenerator[bytes, None], spool: Spool) -> None:
        super().__init__(headers, stream, max_files=1, max_fields=8, max_part_size=FIELD_BYTES)
        self._spool = spool
        self.is_whole = False

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        if (file := self._current_part.file) is not None:
            file.file.close()
            self._spool.filename = file.filename
            self._current_part.file = self._spool

    def on_end(self) -> None:
        self.is_whole = True


async def read_form(
    headers: Headers, pieces: AsyncIterable[bytes], spool: Spool, most_bytes: int
) -> tuple[str, dict[str, str]]:
    """The file's name and the fields; its content is in `spool`. Raises `ApiError`."""
    if not headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise _bad("a file is sent as multipart/form-data with a boundary")
    try:
        parser = _Parser(headers, _bounded(pieces, most_bytes), spool)
        form = await parser.parse()
    except MultiPartException as error:
        raise _bad(error.message) from None
    if not parser.is_whole:
        raise _bad("the body ends before the form does")
    fields = {name: value for name, value in form.items() if isinstance(value, str)}
    for name in form:
        if name not in (FIELDS if name in fields else ("file",)):
            raise _bad(f"the form has {name!r:.80}, which is none of file, {', '.join(FIELDS)}")
    if "file" not in form:
        raise ApiError(400, "`file` is missing", code="missing_file", param="file")
    name = (spool.filename or "").rpartition("/")[2]
    return "".join(one if one.isprintable() else "_" for one in name)[:MOST_FILENAME] or "file", fields


async def _bounded(pieces: AsyncIterable[bytes], most_bytes: int) -> AsyncGenerator[bytes, None]:
    """The body, of which so much may come, and no piece too late."""
    stream, size = aiter(pieces), 0
    while True:
        try:
            async with asyncio.timeout(PAUSE_S):
                piece = await anext(stream, None)
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time", code="body_timeout") from None
        if piece is None:
            return
        size += len(piece)
        if size > most_bytes + HEAD_BYTES:
            raise too_large(most_bytes)
        for start in range(0, len(piece), PARSED_BYTES):
            yield piece[start : start + PARSED_BYTES]
            await asyncio.sleep(0)


def too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the file is larger than {most_bytes} bytes", code="file_too_large", param="file")


def _bad(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_form")
