"""Accepts the lines of a batch's file: all of them, or none if one is wrong.

A validation takes one step at a time, a commit each, so several batches take turns and a large one holds up no small
one. After a death it begins anew: a batch runs only when all its lines are accepted.
"""

from collections.abc import Iterator

from router.batches.blobs import Blobs
from router.batches.lines import Reader, split
from router.batches.model import Issue, Item, StoredBatch
from router.batches.store import Store
from sglang_fair.common.fields import WIDEST, Facts

COMMIT_ITEMS = 2_000
COMMIT_BYTES = 8 << 20
READ_BYTES = 4 << 20
"""Lines that are wrong or blank make no commit: after so many bytes the next has its turn."""


class Validation:
    """Of a batch that `owner` has claimed. `step` it in a thread, until it says that it is over."""

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        batch: StoredBatch,
        owner: str,
        most_items: int,
        most_line_bytes: int,
        facts: Facts = WIDEST,
    ) -> None:
        self.batch = batch
        self._store, self._owner = store, owner
        self._is_there = blobs.path(batch.input_file).exists
        self._lines = split(blobs.pieces(batch.input_file), most_line_bytes)
        self._reader = Reader(batch, most_items, most_line_bytes, facts)

    def step(self, now_s: int) -> bool:
        """One commit. True: the batch runs, has failed, or is another's to validate. Raises `StoreError`; then it has
        to begin anew."""
        name, store, owner = self.batch.id, self._store, self._owner
        if not self._is_there():
            store.fail(name, owner, (Issue("file_unreadable", "the file is gone"),), now_s)
            return True
        items, is_over = self._read(self._lines)
        if self._reader.is_too_long or (is_over and self._reader.issues()):
            store.fail(name, owner, self._reader.issues(), now_s)
            return True
        if items and not self._reader.wrong and not store.accept(name, owner, items):
            return True
        if is_over:
            store.start(name, owner, now_s)
        return is_over

    def _read(self, lines: Iterator[bytes]) -> tuple[list[Item], bool]:
        """The next items, and whether they are the last."""
        items, item_bytes, read_bytes = [], 0, 0
        for line in lines:
            item = self._reader.read(line)
            read_bytes += len(line)
            if item is not None:
                items.append(item)
                item_bytes += len(item.body)
            if len(items) >= COMMIT_ITEMS or item_bytes >= COMMIT_BYTES or read_bytes >= READ_BYTES:
                return items, False
            if self._reader.is_too_long:
                return items, True
        return items, True
