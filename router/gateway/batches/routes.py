"""`/v1/files` and `/v1/batches`. Whoever asks sees what is its own, by the same rule that names a request's client."""

import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterator

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from router.batches.blobs import PIECE_BYTES
from router.batches.model import StoredBatch, StoredFile, window_s
from router.gateway.batches.files import Files
from router.gateway.batches.schema import (
    BatchesQuery,
    BatchId,
    BatchList,
    BatchObject,
    FileDeleted,
    FileId,
    FileList,
    FileObject,
    FilesQuery,
    NewBatch,
    NewFile,
)
from router.gateway.errors import ApiError, overloaded
from router.gateway.gateway import Gateway
from router.gateway.operations import Operation, json_response, read_body

log = logging.getLogger("gateway")

MOST_BODY_BYTES = 64 << 10
MOST_OPEN_BATCHES = 1000
"""Of one client, not over yet."""
LEAST_EXPIRY_S = 3600

CONTENT_TYPE = "application/octet-stream"


ERRORS = (400, 401, 404, 408, 409, 413, 429, 503)
UPLOAD = Operation(
    "POST", "/v1/files", "Upload the requests of a batch.", FileObject, ERRORS,
    body=NewFile, sent="multipart/form-data",
)  # fmt: skip
FILES = Operation("GET", "/v1/files", "The sender's files.", FileList, ERRORS, query=FilesQuery)
FILE = Operation("GET", "/v1/files/{id}", "A file.", FileObject, ERRORS, where=FileId)
REMOVE = Operation("DELETE", "/v1/files/{id}", "Delete a file.", FileDeleted, ERRORS, where=FileId)
CONTENT = Operation(
    "GET", "/v1/files/{id}/content", "What is in a file.", errors=ERRORS,
    where=FileId, content={CONTENT_TYPE: None},
)  # fmt: skip
CREATE = Operation(
    "POST", "/v1/batches", "Have the requests of a file answered.", BatchObject, ERRORS, body=NewBatch
)
BATCHES = Operation("GET", "/v1/batches", "The sender's batches.", BatchList, ERRORS, query=BatchesQuery)
BATCH = Operation("GET", "/v1/batches/{id}", "A batch.", BatchObject, ERRORS, where=BatchId)
CANCEL = Operation(
    "POST", "/v1/batches/{id}/cancel", "Answer no more of a batch's requests.", BatchObject, ERRORS,
    where=BatchId,
)  # fmt: skip
OPERATIONS = (UPLOAD, FILES, FILE, REMOVE, CONTENT, CREATE, BATCHES, BATCH, CANCEL)


def routes(gateway: Gateway, files: Files) -> list[Route]:
    """They raise `ApiError`."""
    asked = _Asked(gateway, files)
    answers = (
        asked.upload, asked.list_files, asked.file, asked.remove, asked.content,
        asked.create, asked.list_batches, asked.batch, asked.cancel,
    )  # fmt: skip
    return [operation.route(answer) for operation, answer in zip(OPERATIONS, answers, strict=True)]


class _Asked:
    """The answers."""

    def __init__(self, gateway: Gateway, files: Files) -> None:
        self._gateway = gateway
        self._files = files

    def _client(self, request: Request) -> str:
        return self._gateway.identity.of(request.headers, request.scope.get("client")).caller.client

    # -- files

    async def upload(self, request: Request) -> Response:
        from router.gateway.batches.upload import HEAD_BYTES  # of an extra, which others do not need

        client, files = self._client(request), self._files
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > files.bounds.file_bytes + HEAD_BYTES:
            message = f"the file is larger than {files.bounds.file_bytes} bytes"
            raise ApiError(413, message, code="file_too_large", param="file")
        if not files.uploads.take(client):
            raise overloaded(
                f"too many files are being uploaded: {files.uploads.held(client)} of this client"
            )
        try:
            return await self._take_in(request, client)
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody reads
        finally:
            files.uploads.give(client)

    async def _take_in(self, request: Request, client: str) -> Response:
        from router.gateway.batches.upload import Upload

        files = self._files
        left = files.bounds.client_bytes - await files.run(files.store.file_bytes, client)
        if left <= 0:
            raise _too_much(files.bounds.client_bytes)
        name = f"file-{uuid.uuid4().hex}"
        writing = await files.run(files.blobs.create, name)
        is_kept = False
        try:
            most_bytes = min(files.bounds.file_bytes, left)
            upload = Upload(request.headers, request.stream(), writing, most_bytes, files.run)
            try:
                await upload.read()
            except ApiError as error:
                if error.code == "file_too_large" and left < files.bounds.file_bytes:
                    raise _too_much(files.bounds.client_bytes) from None
                raise
            if upload.fields.get("purpose") != "batch":
                raise ApiError(400, "`purpose` must be batch", code="invalid_purpose", param="purpose")
            now_s = int(time.time())
            file = StoredFile(
                id=name,
                client=client,
                filename=upload.filename or "file",
                bytes=writing.bytes,
                created_s=now_s,
                expires_s=now_s + _expiry_s(upload.fields, files.bounds.keep_s),
            )
            await files.run(writing.keep)
            await files.run(files.store.add_file, file)
            is_kept = True
        finally:
            if not is_kept:
                await files.run(writing.drop)
        return json_response(FileObject.of(file))

    async def list_files(self, request: Request) -> Response:
        client, query = self._client(request), FILES.asked(request, FilesQuery)
        limit = query.limit
        found = await self._files.run(
            self._files.store.files, client, purpose=query.purpose, after=query.after, limit=limit + 1,
            newest_first=query.order == "desc",
        )  # fmt: skip
        if found is None:
            raise _missing("file", query.after)
        data = [FileObject.of(file) for file in found[:limit]]
        return json_response(FileList(data, *_ends([one.id for one in data]), len(found) > limit))

    async def file(self, request: Request) -> Response:
        return json_response(FileObject.of(await self._file(request)))

    async def remove(self, request: Request) -> Response:
        client, name = self._client(request), request.path_params["id"]
        if not await self._files.run(self._files.store.remove_file, client, name):
            raise _missing("file", name)
        await self._files.run(self._files.blobs.remove, name)
        return json_response(FileDeleted(name))

    async def content(self, request: Request) -> Response:
        file = await self._file(request)
        pieces = self._uploaded(file) if file.purpose == "batch" else self._results(file)
        return StreamingResponse(pieces, media_type=CONTENT_TYPE, headers={"content-length": str(file.bytes)})

    async def _file(self, request: Request) -> StoredFile:
        client, name = self._client(request), request.path_params["id"]
        file = await self._files.run(self._files.store.file, client, name)
        if file is None:
            raise _missing("file", name)
        return file

    async def _uploaded(self, file: StoredFile) -> AsyncIterator[bytes]:
        pieces: Iterator[bytes] = self._files.blobs.pieces(file.id)
        while (piece := await self._files.run(next, pieces, b"")) != b"":
            yield piece

    async def _results(self, file: StoredFile) -> AsyncIterator[bytes]:
        after: int | None = 0
        while after is not None:
            piece, after = await self._files.run(self._files.store.results, file, after, PIECE_BYTES)
            yield piece

    # -- batches

    async def create(self, request: Request) -> Response:
        client, files, peer = self._client(request), self._files, request.scope.get("client")
        try:
            asked = msgspec.json.decode(await read_body(request, MOST_BODY_BYTES), type=NewBatch)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"not a batch: {error}", code="invalid_batch") from error
        file = await files.run(files.store.file, client, asked.input_file_id)
        if file is None or file.purpose != "batch":
            raise _missing("file", asked.input_file_id)
        are_open = await files.run(files.store.open_batches)
        if sum(one.client == client for one in are_open) >= MOST_OPEN_BATCHES:
            raise overloaded(f"{MOST_OPEN_BATCHES} batches of this client are not over yet")
        now_s = int(time.time())
        tenant = self._gateway.identity.of(request.headers, peer).tenant
        batch = StoredBatch(
            id=f"batch_{uuid.uuid4().hex}",
            client=client,
            endpoint=asked.endpoint,
            input_file=file.id,
            window=asked.completion_window,
            created_s=now_s,
            expires_s=now_s + window_s(asked.completion_window),
            metadata=asked.metadata,
            models=tuple(self._gateway.names),
            allowed=None if tenant is None or tenant.models is None else tuple(tenant.models),
            vocabularies=self._gateway.vocabularies,
        )
        await files.run(files.store.add_batch, batch)
        log.info("batch %s of %s: %d bytes within %s", batch.id, client, file.bytes, batch.window)
        return json_response(BatchObject.of(batch))

    async def list_batches(self, request: Request) -> Response:
        client, query = self._client(request), BATCHES.asked(request, BatchesQuery)
        store, limit = self._files.store, query.limit
        found = await self._files.run(store.batches, client, after=query.after, limit=limit + 1)
        if found is None:
            raise _missing("batch", query.after)
        data = [BatchObject.of(batch) for batch in found[:limit]]
        return json_response(BatchList(data, *_ends([one.id for one in data]), len(found) > limit))

    async def batch(self, request: Request) -> Response:
        client, name = self._client(request), request.path_params["id"]
        found = await self._files.run(self._files.store.batch, client, name)
        if found is None:
            raise _missing("batch", name)
        return json_response(BatchObject.of(found))

    async def cancel(self, request: Request) -> Response:
        client, name = self._client(request), request.path_params["id"]
        found = await self._files.run(self._files.store.cancel, client, name, int(time.time()))
        if found is None:
            raise _missing("batch", name)
        if found.is_over and found.status != "cancelled":
            raise ApiError(409, f"the batch is {found.status} already", code="batch_is_over")
        return json_response(BatchObject.of(found))


def _expiry_s(fields: dict[str, str], keep_s: int) -> int:
    """How long an uploaded file is kept. Raises `ApiError`."""
    seconds = fields.get("expires_after[seconds]")
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise ApiError(400, "`expires_after[anchor]` must be created_at", code="invalid_expiry")
    if seconds is None:
        return keep_s
    if not (
        seconds.isascii() and seconds.isdecimal() and len(seconds) < 9 and int(seconds) >= LEAST_EXPIRY_S
    ):
        raise ApiError(
            400, f"`expires_after[seconds]` must be at least {LEAST_EXPIRY_S}", code="invalid_expiry"
        )
    return min(int(seconds), keep_s)


def _ends(ids: list[str]) -> tuple[str | None, str | None]:
    """The first and the last."""
    return (ids[0], ids[-1]) if ids else (None, None)


def _too_much(most_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the files of this client together are larger than {most_bytes} bytes; delete some",
        code="too_many_bytes",
        param="file",
    )


def _missing(what: str, name: str | None) -> ApiError:
    message = f"there is no {what} {(name or '')[:100]!r}"
    if what == "file":
        return ApiError(404, message, code="file_not_found")
    return ApiError(404, message, code="batch_not_found")
