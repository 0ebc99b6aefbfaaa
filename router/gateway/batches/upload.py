"""A file that a client sends, `multipart/form-data`, from the wire to the disk: whatever its size, a piece of it is in
memory at a time, and the disk is waited for in a thread.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from router.batches.blobs import PIECE_BYTES, Writing
from router.gateway.errors import ApiError

FIELD_BYTES = 1024
"""Longest field beside the file."""
HEAD_BYTES = 64 << 10
"""Of the body, beside the file's content."""
MOST_PARTS = 16
MOST_FILENAME = 255
PAUSE_S = 60.0
"""Longest pause of a client between two pieces."""
PARSED_BYTES = 64 << 10
"""Looked at in one go: others have their turn in between."""

FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")

InThread = Callable[..., Awaitable[Any]]


class Upload:
    """One body. `read` it, then `fields` and `filename` are what stood in it, and the content is in `writing`."""

    def __init__(self, headers: Mapping[str, str], writing: Writing, most_bytes: int, run: InThread) -> None:
        """`run` calls a function in a thread. Raises `ApiError` for what is no form."""
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._writing = writing
        self._most_bytes = most_bytes
        self._run = run
        self._parts = 0
        self._name = ""
        self._header: tuple[bytes, bytes] = b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._into: Literal["file", "field"] = "field"
        self._field = b""
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._file_bytes = 0
        self._is_whole = False
        self._parser = MultipartParser(
            _boundary(headers),
            {
                "on_part_begin": self._part_begins,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_ends,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._part_data,
                "on_part_end": self._part_ends,
                "on_end": self._ends,
            },
        )

    async def read(self, receive: Callable[[], Awaitable[bytes | None]]) -> None:
        """The body, whose pieces `receive` returns until None. Raises `ApiError`, and `StoreError` of the disk."""
        size = 0
        while (piece := await self._next(receive)) is not None:
            size += len(piece)
            if size > self._most_bytes + HEAD_BYTES:
                raise self._too_large()
            for start in range(0, len(piece), PARSED_BYTES):
                try:
                    self._parser.write(piece[start : start + PARSED_BYTES])
                except FormParserError as error:
                    raise _bad(f"the body is no form: {error}") from None
                if start:
                    await asyncio.sleep(0)
            if self._pending_bytes >= PIECE_BYTES:
                await self._flush()
        await self._flush()
        if not self._is_whole:
            raise _bad("the body ends before the form does")
        if self.filename is None:
            raise ApiError(400, "`file` is missing", code="missing_file", param="file")

    async def _next(self, receive: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        try:
            async with asyncio.timeout(PAUSE_S):
                return await receive()
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time", code="body_timeout") from None

    async def _flush(self) -> None:
        if self._pending:
            content, self._pending, self._pending_bytes = b"".join(self._pending), [], 0
            await self._run(self._writing.write, content)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the file is larger than {self._most_bytes} bytes", code="file_too_large", param="file"
        )

    # -- what the parser finds

    def _part_begins(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise _bad("the form has too many parts")
        self._headers, self._field = {}, b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header = self._header[0] + data[start:end], self._header[1]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header = self._header[0], self._header[1] + data[start:end]

    def _header_ends(self) -> None:
        self._headers[self._header[0].lower()] = self._header[1]
        self._header = b"", b""

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == "file":
            if self.filename is not None:
                raise _bad("the form has two files")
            self._into = "file"
            self.filename = _readable(options.get(b"filename", b"").decode("utf-8", "replace"))
        elif self._name in FIELDS:
            self._into = "field"
        else:
            raise _bad(f"the form has a field {self._name!r:.80}, which is none of file, {', '.join(FIELDS)}")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._into == "file":
            self._file_bytes += end - start
            if self._file_bytes > self._most_bytes:
                raise self._too_large()
            self._pending.append(data[start:end])
            self._pending_bytes += end - start
            return
        self._field += data[start:end]
        if len(self._field) > FIELD_BYTES:
            raise _bad(f"the field {self._name} is too long")

    def _part_ends(self) -> None:
        if self._into == "field":
            self.fields[self._name] = self._field.decode("utf-8", "replace")

    def _ends(self) -> None:
        self._is_whole = True


def _boundary(headers: Mapping[str, str]) -> bytes:
    kind, options = parse_options_header(headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise _bad("a file is sent as multipart/form-data with a boundary")
    return boundary


def _readable(name: str) -> str:
    """A filename as it can be shown."""
    shown = "".join(one if one.isprintable() else "_" for one in name.rpartition("/")[2])
    return shown[:MOST_FILENAME] or "file"


def _bad(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_form")
