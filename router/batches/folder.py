"""The folder of files and batches: the database, the uploads beside it, and the mark of the feeder that serves it."""

from pathlib import Path

from router.batches.amqp import AmqpStore
from router.batches.blobs import Blobs
from router.batches.contract import StoreError
from router.batches.sqlite import SqliteStore
from sglang_fair.common.installed import missing_extra
from sglang_fair.common.service_keys import broker_url

DATABASE, UPLOADS, MARK = "batches.db", "files", "feeder.lock"


def open_blobs(folder: Path) -> Blobs:
    """Makes the folder. Raises `StoreError`."""
    try:
        return Blobs(folder / UPLOADS)
    except OSError as error:
        raise StoreError(f"{folder}: {error.strerror}") from None


def open_store(folder: Path) -> SqliteStore:
    """What follows a broker's log, if one is named. Raises `StoreError`."""
    open_blobs(folder)
    url = broker_url.key()
    return AmqpStore(folder / DATABASE, url) if url else SqliteStore(folder / DATABASE)


def check(folder: Path, option: str = "--batches") -> None:
    """ValueError, in one line, for a folder that cannot be had, or whose database is damaged, and where what reads
    uploads is not installed."""
    if missing := missing_extra("python_multipart"):
        raise ValueError(missing)
    try:
        store = open_store(folder)
        try:
            store.check()
        finally:
            store.shut()
    except StoreError as error:
        raise ValueError(f"{option}: {error}") from None
