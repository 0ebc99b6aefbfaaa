"""Accepts the lines of a batch's file: all of them, or none if one is wrong."""

import time
from collections.abc import Iterator

from router.batches.folder import Blobs
from router.batches.lines import Reader, split
from router.batches.model import BatchIssue, Item, StoredBatch
from router.batches.store import Store

COMMIT_ITEMS = 2_000
COMMIT_BYTES = 4 << 20
"""Of lines, also of those that are wrong or blank: after so many the next batch has its turn."""


def validation(
    store: Store, blobs: Blobs, batch: StoredBatch, owner: str, reader: Reader, most_line_bytes: int
) -> Iterator[None]:
    """Of a batch that `owner` has claimed, to be gone through in a thread, a commit at a time: so several batches take
    turns and a large one holds up no small one. At its end the batch runs, has failed, or is another's to validate.
    Raises `StoreError`; then it has to begin anew, as after a death: a batch runs only when all its lines are accepted.
    """
    if not blobs.path(batch.input_file_id).exists():
        store.settle(batch.id, owner, [BatchIssue("file_unreadable", "the file is gone")], int(time.time()))
        return
    lines = split(blobs.pieces(batch.input_file_id), most_line_bytes)
    for items in _commits(lines, reader):
        if reader.is_too_long:
            break
        if not reader.wrong and not store.accept(batch.id, owner, items):
            return
        yield
    store.settle(batch.id, owner, reader.issues(), int(time.time()))


def _commits(lines: Iterator[bytes], reader: Reader) -> Iterator[list[Item]]:
    items: list[Item] = []
    size = 0
    for line in lines:
        item = reader.read(line)
        if item is not None:
            items.append(item)
        size += len(line)
        if len(items) >= COMMIT_ITEMS or size >= COMMIT_BYTES:
            yield items
            items, size = [], 0
    if items:
        yield items
