"""Files and batches as OpenAI's API shows them, and what may be asked."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from router.batches.model import BATCH_PATTERN, FILE_PATTERN, WINDOW_PATTERN, BatchObject, Purpose
from router.gateway.operations import numbered

MOST_METADATA = 16
_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]


class FileObject(msgspec.Struct, omit_defaults=True, tag_field="object", tag="file"):
    """A file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    expires_at: int | None = None


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


class BatchList(msgspec.Struct):
    """`GET /v1/batches`."""

    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"
