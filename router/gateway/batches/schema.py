"""Files and batches as OpenAI's API shows them, and what may be asked."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from router.batches.model import BATCH_PATTERN, FILE_PATTERN, WINDOW_PATTERN, Purpose, StoredBatch, StoredFile
from router.gateway.operations import numbered

MOST_METADATA = 16
_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]


class FileObject(msgspec.Struct):
    """A file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    expires_at: int | UnsetType = UNSET

    @staticmethod
    def of(file: StoredFile) -> "FileObject":
        """As it is kept."""
        expires_at = UNSET if file.expires_s is None else file.expires_s
        return FileObject(
            file.id, file.bytes, file.created_s, file.filename, file.purpose, expires_at=expires_at
        )


After = Annotated[str | None, Meta(description="The last of the page before.")]
MOST_FILES, MOST_BATCHES = 10_000, 100
"""Listed in one answer."""


class FilesQuery(msgspec.Struct):
    """What `GET /v1/files` may be asked."""

    after: After = None
    limit: Annotated[int, numbered(1, MOST_FILES)] = MOST_FILES
    purpose: Annotated[
        Purpose | None, Meta(extra={"must": "be batch or batch_output", "code": "invalid_purpose"})
    ] = None
    order: Annotated[
        Literal["asc", "desc"], Meta(extra={"must": "be asc or desc", "code": "invalid_order"})
    ] = "desc"


class BatchesQuery(msgspec.Struct):
    """What `GET /v1/batches` may be asked."""

    after: After = None
    limit: Annotated[int, numbered(1, MOST_BATCHES)] = 20


class FileId(msgspec.Struct):
    """Which file."""

    id: Annotated[str, Meta(pattern=FILE_PATTERN)]


class BatchId(msgspec.Struct):
    """Which batch."""

    id: Annotated[str, Meta(pattern=BATCH_PATTERN)]


class NewFile(msgspec.Struct, forbid_unknown_fields=True):
    """The form of `POST /v1/files`."""

    file: Annotated[
        str, Meta(description="A request a line, in JSON.", extra_json_schema={"format": "binary"})
    ]
    purpose: Literal["batch"]


class FileList(msgspec.Struct):
    """`GET /v1/files`."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class FileDeleted(msgspec.Struct):
    """`DELETE /v1/files/{id}`."""

    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class NewBatch(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Annotated[
        str,
        Meta(
            pattern=WINDOW_PATTERN.removesuffix("$") + r"\Z",
            description="Within what time it is answered: 24h, 10m, 90s, up to 7d. What is not answered then is not "
            "answered at all.",
            extra_json_schema={"pattern": WINDOW_PATTERN},
        ),
    ]
    metadata: Annotated[dict[_Key, _Value], Meta(max_length=MOST_METADATA)] | None = None


class BatchIssue(msgspec.Struct):
    """What is wrong with a line of a batch, or with all of it."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchIssues(msgspec.Struct):
    """What is wrong with a batch."""

    data: list[BatchIssue]
    object: Literal["list"] = "list"


class BatchCounts(msgspec.Struct):
    """Requests of a batch. Those that are neither completed nor failed wait or run."""

    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct):
    """A batch."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    created_at: int
    expires_at: int
    request_counts: BatchCounts
    errors: BatchIssues | None
    output_file_id: str | None
    error_file_id: str | None
    metadata: Mapping[str, str] | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    object: Literal["batch"] = "batch"

    @staticmethod
    def of(batch: StoredBatch) -> "BatchObject":
        """As it is kept."""
        issues = [BatchIssue(one.code, one.message, one.line, one.param) for one in batch.issues]
        times: dict[str, Any] = {
            f"{status}_at": batch.times.get(status)
            for status in (
                "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled",
            )
        }  # fmt: skip
        return BatchObject(
            id=batch.id,
            endpoint=batch.endpoint,
            input_file_id=batch.input_file,
            completion_window=batch.window,
            status=batch.status,
            created_at=batch.created_s,
            expires_at=batch.expires_s,
            request_counts=BatchCounts(batch.total, batch.completed, batch.failed),
            errors=BatchIssues(issues) if issues else None,
            output_file_id=batch.output_file,
            error_file_id=batch.error_file,
            metadata=batch.metadata,
            **times,
        )


class BatchList(msgspec.Struct):
    """`GET /v1/batches`."""

    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"
