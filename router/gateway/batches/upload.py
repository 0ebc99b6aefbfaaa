"""A file that a client sends, `multipart/form-data`, from the wire to the disk, by Starlette's parser: whatever its
size, a piece of it is in memory at a time, and the disk is waited for in a thread.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from io import BytesIO
from typing import Any

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from router.batches.blobs import PIECE_BYTES, Writing
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

InThread = Callable[..., Awaitable[Any]]


class Spool(UploadFile):
    """In place of Starlette's temporary file: `writing`, with a bound on its size."""

    def __init__(self, filename: str, writing: Writing, most_bytes: int, run: InThread) -> None:
        super().__init__(BytesIO(), filename=filename)
        self.pending: list[bytes] = []
        self.pending_bytes = 0
        self._writing, self._most_bytes, self._run = writing, most_bytes, run

    async def write(self, data: bytes) -> None:
        """Raises `ApiError` for more than may come, and `StoreError` of the disk."""
        self.pending.append(data)
        self.pending_bytes += len(data)
        if self._writing.bytes + self.pending_bytes > self._most_bytes:
            raise _too_large(self._most_bytes)
        if self.pending_bytes >= PIECE_BYTES:
            await self.seek(0)

    async def seek(self, offset: int) -> None:
        """At the end of the part: what is left goes to the disk."""
        content, self.pending, self.pending_bytes = b"".join(self.pending), [], 0
        if content:
            await self._run(self._writing.write, content)


class Upload(MultiPartParser):
    """One body. `read` it, then `fields` and `filename` are what stood in it, and the content is in `writing`."""

    def __init__(
        self, headers: Headers, pieces: AsyncIterable[bytes], writing: Writing, most_bytes: int, run: InThread
    ) -> None:
        """`run` calls a function in a thread."""
        stream = _bounded(pieces, most_bytes)
        super().__init__(headers, stream, max_files=1, max_fields=8, max_part_size=FIELD_BYTES)
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._make: Callable[[str], Spool] = lambda name: Spool(name, writing, most_bytes, run)
        self._is_whole = False

    async def read(self) -> None:
        """The body. Raises `ApiError`, and `StoreError` of the disk."""
        if not self.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise _bad("a file is sent as multipart/form-data with a boundary")
        try:
            form = await self.parse()
        except MultiPartException as error:
            raise _bad(error.message) from None
        if not self._is_whole:
            raise _bad("the body ends before the form does")
        self.fields = {name: value for name, value in form.items() if isinstance(value, str)}
        file = form.get("file")
        if not isinstance(file, Spool):
            raise ApiError(400, "`file` is missing", code="missing_file", param="file")
        self.filename = file.filename

    def on_headers_finished(self) -> None:
        """The file goes where it is kept. Raises `ApiError` for a part that is none of the form's."""
        super().on_headers_finished()
        part = self._current_part
        if part.field_name not in (FIELDS if part.file is None else ("file",)):
            raise _bad(f"the form has {part.field_name!r:.80}, which is none of file, {', '.join(FIELDS)}")
        if part.file is not None:
            part.file.file.close()
            part.file = self._make(_readable(part.file.filename or ""))

    def on_end(self) -> None:
        """The last boundary has come."""
        self._is_whole = True


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
            raise _too_large(most_bytes)
        for start in range(0, len(piece), PARSED_BYTES):
            yield piece[start : start + PARSED_BYTES]
            await asyncio.sleep(0)


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the file is larger than {most_bytes} bytes", code="file_too_large", param="file")


def _readable(name: str) -> str:
    """A filename as it can be shown."""
    shown = "".join(one if one.isprintable() else "_" for one in name.rpartition("/")[2])
    return shown[:MOST_FILENAME] or "file"


def _bad(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_form")
