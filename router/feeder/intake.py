"""Accepts the lines of a batch's file: all of them, or none if one is wrong."""

import time
from collections.abc import Iterator

from router.batches.folder import Blobs
from router.batches.lines import Reader, split
from router.batches.model import BatchIssue, Item, StoredBatch
from router.batches.store import Store

COMMIT_ITEMS = 2_000
COMMIT_BYTES = 8 << 20
READ_BYTES = 4 << 20
"""Lines that are wrong or blank make no commit: after so many bytes the next has its turn."""


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
        if not reader.wrong and not store.accept(batch.id, owner, items):
            return
        yield
    store.settle(batch.id, owner, reader.issues(), int(time.time()))


def _commits(lines: Iterator[bytes], reader: Reader) -> Iterator[list[Item]]:
    items: list[Item] = []
    item_bytes = read_bytes = 0
    for line in lines:
        item = reader.read(line)
        read_bytes += len(line)
        if item is not None:
            items.append(item)
            item_bytes += len(item.body)
        if reader.is_too_long:
            return
        if len(items) >= COMMIT_ITEMS or item_bytes >= COMMIT_BYTES or read_bytes >= READ_BYTES:
            yield items
            items, item_bytes, read_bytes = [], 0, 0
    if items:
        yield items
