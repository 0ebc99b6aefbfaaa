"""Where files and batches are: the database, and the folder of uploads. An upload is one file there; one that is half
written has another name, and is taken away by its writer, or after `STALE_S` by the feeder.
"""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from router.batches.model import StoreError, StoreFull
from sglang_fair.common.installed import missing_extra

if TYPE_CHECKING:
    from router.batches.store import Store

DATABASE, UPLOADS = "batches.db", "files"

PIECE_BYTES = 1 << 20
STALE_S = 3_600.0

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def _disk() -> Iterator[None]:
    """What is wrong with it as `StoreError`."""
    try:
        yield
    except OSError as error:
        kind = StoreFull if error.errno in _FULL else StoreError
        raise kind(f"{error.filename or 'the disk'}: {error.strerror}") from None


class Writing:
    """A file that is being written: `write`, then `keep` or `drop`. All wait for the disk and raise `StoreError`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(path.name + ".part")
        self.bytes = 0
        with _disk():
            self._file = self._part.open("xb", buffering=0)

    def write(self, piece: bytes) -> None:
        left = memoryview(piece)
        with _disk():
            while left:
                left = left[self._file.write(left) or 0 :]
        self.bytes += len(piece)

    def keep(self) -> None:
        """It is on the disk when this returns."""
        with _disk():
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.rename(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def drop(self) -> None:
        """It leaves nothing behind, also if it was kept."""
        self._file.close()
        for path in (self._part, self._path):
            with suppress(OSError):
                path.unlink()


class Blobs:
    """The uploads in a folder, which is made. Raises `StoreError`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with _disk():
            folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        return self._folder / name

    def create(self, name: str) -> Writing:
        return Writing(self._folder / name)

    def pieces(self, name: str) -> Iterator[bytes]:
        with _disk(), (self._folder / name).open("rb", buffering=0) as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    def remove(self, name: str) -> None:
        """If it is there."""
        with suppress(OSError):
            (self._folder / name).unlink()

    def sweep(self, known: set[str]) -> None:
        """Takes away what is not `known` and was not written to for `STALE_S`."""
        for path in self._folder.iterdir():
            with suppress(OSError):
                if path.name not in known and time.time() - path.stat().st_mtime > STALE_S:
                    path.unlink()


def open_blobs(batches: str, uploads: str | None = None) -> Blobs:
    """The folder `uploads`; by default it is in the folder `batches`. Raises `StoreError`."""
    return Blobs(Path(batches) / UPLOADS if uploads is None else Path(uploads))


def open_store(batches: str) -> "Store":
    """In the folder `batches`, which is made, or at `postgresql://…`. Raises `StoreError`."""
    from router.batches.store import Store  # of an extra, which others do not need

    if is_database(batches):
        return Store(batches)
    with _disk():
        Path(batches).mkdir(parents=True, exist_ok=True)
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
