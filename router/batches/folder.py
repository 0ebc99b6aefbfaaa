"""Where files and batches are: the database, and the folder of uploads."""

from pathlib import Path
from typing import TYPE_CHECKING

from router.batches.blobs import Blobs
from router.batches.model import StoreError
from sglang_fair.common.installed import missing_extra

if TYPE_CHECKING:
    from router.batches.store import Store

DATABASE, UPLOADS = "batches.db", "files"


def open_blobs(batches: str, uploads: str | None = None) -> Blobs:
    """The folder `uploads`, which is made; by default it is in the folder `batches`. Raises `StoreError`."""
    folder = Path(batches) / UPLOADS if uploads is None else Path(uploads)
    try:
        return Blobs(folder)
    except OSError as error:
        raise StoreError(f"{folder}: {error.strerror}") from None


def open_store(batches: str) -> "Store":
    """In the folder `batches`, which is made, or at `postgresql://…`. Raises `StoreError`."""
    from router.batches.store import Store  # of an extra, which others do not need

    if is_database(batches):
        return Store(batches)
    try:
        Path(batches).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{batches}: {error.strerror}") from None
    return Store(Path(batches) / DATABASE)


def is_database(batches: str) -> bool:
    """Whether it names a database, and no folder."""
    return batches.startswith("postgresql://")


def absolute(place: str | None) -> str | None:
    """As processes in other folders name it."""
    return place if place is None or is_database(place) else str(Path(place).absolute())


def check(batches: str, uploads: str | None) -> None:
    """ValueError, in one line, for what cannot be had, or is damaged, and where a package is not installed."""
    for package in ("python_multipart", "sqlalchemy", *(("psycopg",) if is_database(batches) else ())):
        if missing := missing_extra(package):
            raise ValueError(missing)
    if "://" in batches and not is_database(batches):
        raise ValueError("--batches: a folder, or postgresql://…")
    if is_database(batches) and uploads is None:
        raise ValueError(
            "--batches postgresql://… needs --batch-files, a folder that all gateways and feeders share"
        )
    try:
        open_blobs(batches, uploads)
        store = open_store(batches)
        try:
            store.check()
        finally:
            store.shut()
    except StoreError as error:
        raise ValueError(f"--batches: {error}") from None
