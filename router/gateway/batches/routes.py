"""`/v1/files` and `/v1/batches`. A sender sees what is its own, by the same rule that names a request's client."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from router.batches.folder import PIECE_BYTES, open_blobs, open_store
from router.batches.model import (
    BatchObject,
    ClientTotals,
    FileInUse,
    StoredBatch,
    StoredFile,
    StoreError,
    StoreFull,
    window_s,
)
from router.gateway.batches.schema import (
    BatchesQuery,
    BatchId,
    BatchList,
    FileDeleted,
    FileId,
    FileList,
    FileObject,
    FilesQuery,
    NewBatch,
    NewFile,
)
from router.gateway.batches.upload import HEAD_BYTES, Spool, read_form, too_large
from router.gateway.errors import ApiError, overloaded
from router.gateway.gateway import Gateway
from router.gateway.operations import Operation, read_body
from router.shared_limit import SharedLimit
from sglang_fair.settings import table

log = logging.getLogger("gateway")

MOST_BODY_BYTES = 64 << 10
MOST_OPEN_BATCHES = 1000
"""Of one client, not over yet."""
LEAST_EXPIRY_S = 3600
THREADS = 4
COUNT_S = 2.0
"""Between two counts of what clients have."""
MOST_UPLOADS = 32
"""At a time in one process, shared by the clients (`shared_limit`); more get 429."""

CONTENT_TYPE = "application/octet-stream"
ERRORS = (400, 401, 404, 408, 409, 413, 429, 503)
FILES = Operation("GET", "/v1/files", "The sender's files.", FileList, ERRORS, query=FilesQuery)
BATCHES = Operation("GET", "/v1/batches", "The sender's batches.", BatchList, ERRORS, query=BatchesQuery)

P = ParamSpec("P")
T = TypeVar("T")


class Batches:
    """Belongs to one event loop; store and disk are waited for in threads."""

    def __init__(self, gateway: Gateway, settings: table.Gateway) -> None:
        """Raises `StoreError`."""
        assert settings.batches is not None
        self._gateway, self._settings = gateway, settings
        self.blobs = open_blobs(settings.batches, settings.batch_files)
        self.store = open_store(settings.batches)
        self._uploads = SharedLimit(MOST_UPLOADS)
        self._threads = ThreadPoolExecutor(THREADS, "batches")

    async def follow(self, tell: Callable[[Mapping[str, ClientTotals]], None]) -> None:
        """Tells what each client has in the store, again and again, until it is cancelled."""
        while True:
            with suppress(ApiError):
                tell(await self._run(self.store.totals))
            await asyncio.sleep(COUNT_S)

    def close(self) -> None:
        """What is being written is waited for."""
        self._threads.shutdown()
        self.store.shut()

    async def _run(self, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """What `function` returns, called in a thread. Raises `ApiError`."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, partial(function, *given, **named))
        except FileInUse as error:
            raise ApiError(409, str(error), code="file_in_use") from None
        except StoreFull:
            message = "the disk is full: nothing was accepted"
            raise ApiError(503, message, code="disk_full", retry_after_s=60) from None
        except StoreError:
            message = "files and batches cannot be read or written here"
            raise ApiError(503, message, code="store_failed", retry_after_s=10) from None

    def _client(self, request: Request) -> str:
        return self._gateway.identity.of(request.headers, request.scope.get("client")).caller.client

    # -- files

    @Operation(
        "POST", "/v1/files", "Upload the requests of a batch.", FileObject, ERRORS,
        body=NewFile, sent="multipart/form-data",
    )  # fmt: skip
    async def upload(self, request: Request) -> FileObject | Response:
        client, most_bytes = self._client(request), self._settings.batch_file_bytes
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > most_bytes + HEAD_BYTES:
            raise too_large(most_bytes)
        if not self._uploads.take(client):
            held = self._uploads.held(client)
            raise overloaded(f"too many files are being uploaded: {held} of this client")
        try:
            return await self._take_in(request, client)
        except ClientDisconnect:
            return Response(status_code=400)  # which is not sent
        finally:
            self._uploads.give(client)

    async def _take_in(self, request: Request, client: str) -> FileObject:
        all_bytes = self._settings.batch_client_bytes
        left = all_bytes - await self._run(self.store.file_bytes, client)
        most_bytes = min(self._settings.batch_file_bytes, left)
        name, is_kept = f"file-{uuid.uuid4().hex}", False
        writing = await self._run(self.blobs.create, name)
        try:
            spool = Spool(writing, most_bytes, self._run)
            filename, fields = await read_form(request.headers, request.stream(), spool, most_bytes)
            if fields.get("purpose") != "batch":
                raise ApiError(400, "`purpose` must be batch", code="invalid_purpose", param="purpose")
            now_s = int(time.time())
            expires_at = now_s + _expiry_s(fields, int(86_400 * self._settings.batch_keep_days))
            file = StoredFile(
                id=name, client=client, filename=filename, bytes=writing.bytes, created_at=now_s,
                expires_at=expires_at,
            )  # fmt: skip
            await self._run(writing.keep)
            await self._run(self.store.add_file, file)
            is_kept = True
        except ApiError as error:
            if error.code == "file_too_large" and left < self._settings.batch_file_bytes:
                message = f"the files of this client together are larger than {all_bytes} bytes; delete some"
                raise ApiError(413, message, code="too_many_bytes", param="file") from None
            raise
        finally:
            if not is_kept:
                await self._run(writing.drop)
        return _shown(file)

    @FILES
    async def list_files(self, request: Request) -> FileList:
        client, query = self._client(request), FILES.asked(request, FilesQuery)
        limit, newest_first = query.limit, query.order == "desc"
        found = await self._run(
            self.store.files, client, purpose=query.purpose, after=query.after, limit=limit + 1,
            newest_first=newest_first,
        )  # fmt: skip
        if found is None:
            raise _missing("file_not_found", query.after)
        return FileList([_shown(one) for one in found[:limit]], *_ends(found, limit))

    @Operation("GET", "/v1/files/{id}", "A file.", FileObject, ERRORS, where=FileId)
    async def file(self, request: Request) -> FileObject:
        return _shown(await self._file(self._client(request), request.path_params["id"]))

    @Operation("DELETE", "/v1/files/{id}", "Delete a file.", FileDeleted, ERRORS, where=FileId)
    async def remove(self, request: Request) -> FileDeleted:
        client, name = self._client(request), request.path_params["id"]
        if not await self._run(self.store.remove_file, client, name):
            raise _missing("file_not_found", name)
        await self._run(self.blobs.remove, name)
        return FileDeleted(name)

    @Operation(
        "GET", "/v1/files/{id}/content", "What is in a file.", errors=ERRORS, where=FileId,
        content={CONTENT_TYPE: None},
    )  # fmt: skip
    async def content(self, request: Request) -> Response:
        file = await self._file(self._client(request), request.path_params["id"])
        pieces = self._uploaded(file) if file.purpose == "batch" else self._results(file)
        return StreamingResponse(pieces, media_type=CONTENT_TYPE, headers={"content-length": str(file.bytes)})

    async def _file(self, client: str, name: str) -> StoredFile:
        file = await self._run(self.store.file, client, name)
        if file is None:
            raise _missing("file_not_found", name)
        return file

    async def _uploaded(self, file: StoredFile) -> AsyncIterator[bytes]:
        pieces = self.blobs.pieces(file.id)
        while piece := await self._run(next, pieces, b""):
            yield piece

    async def _results(self, file: StoredFile) -> AsyncIterator[bytes]:
        after: int | None = 0
        while after is not None:
            piece, after = await self._run(self.store.results, file, after, PIECE_BYTES)
            yield piece

    # -- batches

    @Operation(
        "POST", "/v1/batches", "Have the requests of a file answered.", BatchObject, ERRORS, body=NewBatch
    )
    async def create(self, request: Request) -> BatchObject:
        client, store = self._client(request), self.store
        try:
            asked = msgspec.json.decode(await read_body(request, MOST_BODY_BYTES), type=NewBatch)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"not a batch: {error}", code="invalid_batch") from error
        file = await self._file(client, asked.input_file_id)
        if file.purpose != "batch":
            raise _missing("file_not_found", file.id)
        are_open = await self._run(store.open_batches)
        if sum(one.client == client for one in are_open) >= MOST_OPEN_BATCHES:
            raise overloaded(f"{MOST_OPEN_BATCHES} batches of this client are not over yet")
        now_s = int(time.time())
        tenant = self._gateway.identity.of(request.headers, request.scope.get("client")).tenant
        batch = StoredBatch(
            **msgspec.structs.asdict(asked),
            id=f"batch_{uuid.uuid4().hex}",
            client=client,
            created_at=now_s,
            expires_at=now_s + window_s(asked.completion_window),
            models=tuple(self._gateway.names),
            allowed=None if tenant is None or tenant.models is None else tuple(tenant.models),
            vocabularies=self._gateway.vocabularies,
        )
        await self._run(store.add_batch, batch)
        log.info("batch %s of %s: %d bytes within %s", batch.id, client, file.bytes, batch.completion_window)
        return _of(batch)

    @BATCHES
    async def list_batches(self, request: Request) -> BatchList:
        client, query = self._client(request), BATCHES.asked(request, BatchesQuery)
        found = await self._run(self.store.batches, client, after=query.after, limit=query.limit + 1)
        if found is None:
            raise _missing("batch_not_found", query.after)
        return BatchList([_of(one) for one in found[: query.limit]], *_ends(found, query.limit))

    @Operation("GET", "/v1/batches/{id}", "A batch.", BatchObject, ERRORS, where=BatchId)
    async def batch(self, request: Request) -> BatchObject:
        client, name = self._client(request), request.path_params["id"]
        found = await self._run(self.store.batch, client, name)
        if found is None:
            raise _missing("batch_not_found", name)
        return _of(found)

    @Operation(
        "POST", "/v1/batches/{id}/cancel", "Answer no more of a batch's requests.", BatchObject, ERRORS,
        where=BatchId,
    )  # fmt: skip
    async def cancel(self, request: Request) -> BatchObject:
        client, name = self._client(request), request.path_params["id"]
        found = await self._run(self.store.cancel, client, name, int(time.time()))
        if found is None:
            raise _missing("batch_not_found", name)
        if found.is_over and found.status != "cancelled":
            raise ApiError(409, f"the batch is {found.status} already", code="batch_is_over")
        return _of(found)


def _expiry_s(fields: dict[str, str], keep_s: int) -> int:
    """How long an uploaded file is kept. Raises `ApiError`."""
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise ApiError(400, "`expires_after[anchor]` must be created_at", code="invalid_expiry")
    seconds = fields.get("expires_after[seconds]")
    if seconds is None:
        return keep_s
    if not (
        seconds.isascii() and seconds.isdecimal() and len(seconds) < 9 and int(seconds) >= LEAST_EXPIRY_S
    ):
        message = f"`expires_after[seconds]` must be at least {LEAST_EXPIRY_S}"
        raise ApiError(400, message, code="invalid_expiry")
    return min(int(seconds), keep_s)


def _shown(file: StoredFile) -> FileObject:
    return msgspec.convert(file, FileObject, from_attributes=True)


def _of(batch: StoredBatch) -> BatchObject:
    return msgspec.convert(batch, BatchObject, from_attributes=True)


def _ends(found: Sequence[StoredFile | StoredBatch], limit: int) -> tuple[str | None, str | None, bool]:
    """The first and the last of a page, and whether more follow."""
    page = found[:limit]
    return (page[0].id, page[-1].id, len(found) > limit) if page else (None, None, False)


def _missing(code: str, name: str | None) -> ApiError:
    return ApiError(404, f"there is no {code.partition('_')[0]} {(name or '')[:100]!r}", code=code)
