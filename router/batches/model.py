"""What is kept of files and batches. Times are whole seconds of Unix time, as OpenAI's API has them."""

import re
from collections.abc import Mapping
from typing import Literal

import msgspec


class StoreError(Exception):
    """The store cannot do what it was asked for; the text is one line."""


class StoreFull(StoreError):
    """There is no room on the disk."""


class StoreDamaged(StoreError):
    """What is on the disk cannot be read."""


class FileInUse(StoreError):
    """A batch is still reading the file."""


Purpose = Literal["batch", "batch_output"]

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
"""OpenAI's. A batch is over when it is failed, completed, expired or cancelled."""

OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")

Results = Literal["", "output", "error"]

FILE_PATTERN = "^file-[0-9a-f]{32}(-output|-error)?$"
BATCH_PATTERN = "^batch_[0-9a-f]{32}$"
"""What ids are like."""

WINDOW_PATTERN = "^([1-9][0-9]{0,4}s|[1-9][0-9]{0,3}m|([1-9][0-9]?|1[0-5][0-9]|16[0-8])h|[1-7]d)$"
"""A completion window: seconds, minutes, hours or days, at most seven of these."""

_WINDOW = re.compile(WINDOW_PATTERN.removesuffix("$") + r"\Z", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

MOST_NUMBER = 1 << 24
"""Items of one batch."""


def window_s(text: str) -> int:
    """Seconds of a completion window: `24h`, `10m`, `90s`, `7d`. ValueError, which says what it must be."""
    if not _WINDOW.match(text):
        raise ValueError("must be a number of seconds, minutes, hours or days up to 7d, as 24h or 10m")
    return int(text[:-1]) * _UNITS[text[-1]]


def class_of(window_s: float, seconds: Mapping[str, float]) -> str:
    """The class of a batch's requests: of `seconds`, those to a class's first token, the longest that the window has
    room for; of a window that has room for none, the shortest."""
    fits = {name: slo_s for name, slo_s in seconds.items() if slo_s <= window_s}
    if fits:
        return max(fits, key=lambda name: fits[name])
    return min(seconds, key=lambda name: seconds[name])


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file. Of an uploaded one the content is in a folder (`blobs`), of results it is in the store."""

    id: str
    client: str
    purpose: Purpose = "batch"
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None = None
    batch: str = ""
    """Whose results it holds."""
    results: Results = ""

    @property
    def status(self) -> str:
        return "processed"


class BatchIssue(msgspec.Struct, frozen=True):
    """What is wrong with a line of a batch, or with all of it."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchIssues(msgspec.Struct, frozen=True):
    """What is wrong with a batch."""

    data: tuple[BatchIssue, ...]
    object: Literal["list"] = "list"


class BatchCounts(msgspec.Struct, frozen=True):
    """Requests of a batch. Those that are neither completed nor failed wait or run."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """A batch."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str = "validating"
    created_at: int
    expires_at: int
    request_counts: BatchCounts = BatchCounts()
    errors: BatchIssues | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    metadata: Mapping[str, str] | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    object: Literal["batch"] = "batch"


class StoredBatch(BatchObject, frozen=True, kw_only=True):
    """One batch, with what its client is not shown."""

    client: str
    seq: int = 0
    """The store's name for it, once it is kept."""
    closing: Literal["", "expired", "cancelled"] = ""
    """Why what is left of it is not answered; "": it is."""
    left: Mapping[str, int] = {}
    """Items without a result, by model."""
    output_bytes: int = 0
    error_bytes: int = 0
    models: tuple[str, ...] = ()
    """Those that were served when it was made, the first one first."""
    allowed: tuple[str, ...] | None = None
    """Those of them, and of their adapters, that its client may ask for; None: all."""
    vocabularies: Mapping[str, int] = {}
    """Of models of which that is known: token ids are below it."""

    @property
    def is_over(self) -> bool:
        """Nothing of it changes any more."""
        return self.status not in OPEN

    @property
    def base(self) -> int:
        """Its items have the keys above it."""
        return self.seq * MOST_NUMBER


class Item(msgspec.Struct, frozen=True, gc=False):
    """One request of a batch, the `number`-th from 1. `body` is JSON as its client wrote it."""

    number: int
    custom_id: str
    model: str
    body: bytes
    tries: int = 0
    """That have failed, and may have been its fault."""
    key: int = 0
    """The store's name for it, once it is accepted."""


class Ending(msgspec.Struct, frozen=True, gc=False):
    """What became of an item: a line of the output file, or of the error file."""

    batch: str
    number: int
    is_ok: bool
    line: bytes


class ClientTotals(msgspec.Struct):
    """Items of one client, in all its batches that are kept. Of those that are left some are leased: `running`."""

    left: int = 0
    completed: int = 0
    failed: int = 0
    running: int = 0
