"""What a store of files and batches promises. Every store passes `tests/batches/test_stores.py`.

What a call has changed is kept when it returns, whatever dies then: the process, or the machine. A call that raises has
changed nothing. `StoreFull` is a full disk; `StoreDamaged` is for nobody to repair but an operator. Several processes
may have one store open.

An item is accepted by `accept`, and ends once: by the first `finish` that names it, or by `close`. Its result is kept
with its end, in one step. The batch is over in the same step as the last of its items.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from router.batches.model import ClientTotals, Ending, Issue, Item, Part, Purpose, StoredBatch, StoredFile


class StoreError(Exception):
    """The store cannot do what it was asked for; the text is one line."""


class StoreFull(StoreError):
    """There is no room on the disk."""


class StoreDamaged(StoreError):
    """What is on the disk cannot be read."""


class FileInUse(StoreError):
    """A batch is still reading the file."""


class Store(Protocol):
    """Files and batches. Whoever names a client sees only what is that client's."""

    def add_file(self, file: StoredFile) -> None:
        """Its content is kept already."""
        ...

    def file(self, client: str, name: str) -> StoredFile | None:
        """The file of this id."""
        ...

    def files(
        self, client: str, *, purpose: Purpose | None, after: str | None, limit: int, newest_first: bool
    ) -> list[StoredFile] | None:
        """At most `limit` files behind the one of id `after`; None if there is no such file."""
        ...

    def file_bytes(self, client: str) -> int:
        """Of all its files that were uploaded."""
        ...

    def remove_file(self, client: str, name: str) -> bool:
        """With the results that it holds. False if there is none. Raises `FileInUse`."""
        ...

    def results(self, file: StoredFile, after: int, most_bytes: int) -> tuple[bytes, int | None]:
        """Lines of a file of results, behind that of item `after`, in the order of items: some, not far above
        `most_bytes` together, and the number of the last; None: these are the last."""
        ...

    def add_batch(self, batch: StoredBatch) -> None:
        """It is to be validated."""
        ...

    def batch(self, client: str, name: str) -> StoredBatch | None:
        """The batch of this id."""
        ...

    def batches(self, client: str, *, after: str | None, limit: int) -> list[StoredBatch] | None:
        """At most `limit`, the newest first, behind the one of id `after`; None if there is no such batch."""
        ...

    def cancel(self, client: str, name: str, now_s: int) -> StoredBatch | None:
        """The batch as it is then: cancelling, unless it was over; None if there is none."""
        ...

    def open_batches(self) -> list[StoredBatch]:
        """Of all clients: those that are not over, the oldest first."""
        ...

    def forget_items(self, batch: str) -> None:
        """Its validation begins anew."""
        ...

    def accept(self, batch: str, items: Sequence[Item]) -> bool:
        """Further items of a batch that is being validated. False, and nothing is kept, if it is no longer."""
        ...

    def start(self, batch: str, now_s: int) -> bool:
        """All its items are accepted, and may be answered. False if it is no longer being validated."""
        ...

    def fail(self, batch: str, issues: Sequence[Issue], now_s: int) -> bool:
        """It was validated, and nothing of it is run. False if it is no longer being validated."""
        ...

    def parts(self) -> list[Part]:
        """Of all batches that are in progress: what is left, by batch and model."""
        ...

    def items(self, batch: str, model: str, after: int, limit: int) -> list[Item]:
        """At most `limit` that have no result, in order, behind number `after`."""
        ...

    def tried(self, batch: str, tries: Mapping[int, int]) -> None:
        """How often items without a result were tried so far, by number."""
        ...

    def finish(self, endings: Sequence[Ending], now_s: int) -> int:
        """How many of these were without a result, and have it now."""
        ...

    def close(self, batch: str, now_s: int, most: int) -> bool:
        """Ends at most `most` items of a batch that is cancelled, or whose window is over. True: it is over."""
        ...

    def totals(self) -> Mapping[str, ClientTotals]:
        """By client."""
        ...

    def sweep(self, now_s: int, ended_before_s: int) -> list[str]:
        """Forgets files that have expired and are not being read, and batches that were over before
        `ended_before_s`, with their results. The files that were uploaded and are gone, by id."""
        ...

    def uploaded(self) -> set[str]:
        """The ids of all files that were uploaded."""
        ...

    def check(self) -> None:
        """Raises `StoreDamaged`."""
        ...

    def shut(self) -> None:
        """Nothing more is asked of it."""
        ...
