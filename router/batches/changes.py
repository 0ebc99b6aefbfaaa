"""How a batch goes from one status to the next, and what is made then. Pure: the stores keep what comes of it."""

from collections.abc import Sequence
from typing import Any

import msgspec

from router.batches import lines
from router.batches.model import Ending, Issue, Results, Status, StoredBatch, StoredFile


def moved(batch: StoredBatch, status: Status, now_s: int, **more: Any) -> StoredBatch:
    """In another status."""
    return msgspec.structs.replace(batch, status=status, times={**batch.times, status: now_s}, **more)


def cancelled(batch: StoredBatch, now_s: int) -> StoredBatch:
    """Its client cancels it; nothing changes if it is over, or no more of it is run anyway."""
    if batch.is_over or batch.closing:
        return batch
    return moved(batch, "cancelling", now_s, closing="cancelled")


def closing(batch: StoredBatch, now_s: int) -> StoredBatch:
    """Nothing more of it is run: its window is over, unless it is cancelled."""
    return batch if batch.closing else moved(batch, "finalizing", now_s, closing="expired")


def failed(batch: StoredBatch, issues: Sequence[Issue], now_s: int) -> StoredBatch:
    """Nothing of it is ever run."""
    return moved(batch, "failed", now_s, issues=tuple(issues), total=0)


def closed(batch: StoredBatch, number: int, custom_id: str) -> Ending:
    """What becomes of an item that is not run because the batch is closing."""
    code, message = lines.EXPIRED if batch.closing == "expired" else lines.CANCELLED
    return Ending(batch.id, number, False, lines.unanswered(batch.id, number, custom_id, code, message))


def is_ending(batch: StoredBatch) -> bool:
    """All its items have results, so it is over."""
    return not batch.left and batch.status in ("in_progress", "finalizing", "cancelling")


def ended(
    batch: StoredBatch, output_bytes: int, error_bytes: int, now_s: int
) -> tuple[StoredBatch, list[StoredFile]]:
    """A batch that is over, and its files, which have these sizes."""
    of: tuple[tuple[Results, int, int], ...] = (
        ("output", batch.completed, output_bytes),
        ("error", batch.failed, error_bytes),
    )
    files = [
        StoredFile(
            id=f"file-{batch.id.removeprefix('batch_')}-{results}",
            client=batch.client,
            purpose="batch_output",
            filename=f"{batch.id}_{results}.jsonl",
            bytes=size,
            created_s=now_s,
            batch=batch.id,
            results=results,
        )
        for results, count, size in of
        if count
    ]
    ids = {file.results: file.id for file in files}
    finalizing = batch if batch.closing else moved(batch, "finalizing", now_s)
    over = moved(finalizing, batch.closing or "completed", now_s)
    return msgspec.structs.replace(over, output_file=ids.get("output"), error_file=ids.get("error")), files
