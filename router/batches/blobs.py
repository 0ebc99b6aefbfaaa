"""The files that were uploaded: one file each in a folder. One that is half written has another name, and is taken away
by its writer, or after `STALE_S` by the feeder.
"""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from router.batches.model import StoreError, StoreFull

PIECE_BYTES = 1 << 20
STALE_S = 86_400.0

_PART = ".part"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Writing:
    """A file that is being written: `write`, then `keep` or `drop`. All of them wait for the disk."""

    def __init__(self, path: Path) -> None:
        """Raises `StoreError`."""
        self._path = path
        self._part = path.with_name(path.name + _PART)
        self.bytes = 0
        self._file: BinaryIO | None = None
        try:
            self._file = self._part.open("xb", buffering=0)
        except OSError as error:
            raise _as_store_error(error) from None

    def write(self, piece: bytes) -> None:
        """Raises `StoreError`."""
        assert self._file is not None
        left = memoryview(piece)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            raise _as_store_error(error) from None
        self.bytes += len(piece)

    def keep(self) -> None:
        """It is on the disk when this returns. Raises `StoreError`."""
        assert self._file is not None
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.rename(self._path)
            _sync(self._path.parent)
        except OSError as error:
            raise _as_store_error(error) from None

    def drop(self) -> None:
        """It leaves nothing behind, also if it was kept."""
        if self._file is not None:
            self._file.close()
        for path in (self._part, self._path):
            with suppress(OSError):
                path.unlink()


class Blobs:
    """Of one folder, which is made."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Where the content is."""
        return self._folder / name

    def create(self, name: str) -> Writing:
        """Raises `StoreError`."""
        return Writing(self._folder / name)

    def pieces(self, name: str, start: int = 0) -> Iterator[bytes]:
        """The content from byte `start` on. Raises `StoreError`."""
        try:
            with (self._folder / name).open("rb", buffering=0) as file:
                file.seek(start)
                while piece := file.read(PIECE_BYTES):
                    yield piece
        except OSError as error:
            raise _as_store_error(error) from None

    def remove(self, name: str) -> None:
        """If it is there."""
        with suppress(OSError):
            (self._folder / name).unlink()

    def sweep(self, known: set[str]) -> None:
        """Takes away what nobody knows and nobody has written to for `STALE_S`."""
        for path in self._folder.iterdir():
            with suppress(OSError):
                if path.name not in known and time.time() - path.stat().st_mtime > STALE_S:
                    path.unlink()


def _sync(folder: Path) -> None:
    """A name in it is on the disk then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _as_store_error(error: OSError) -> StoreError:
    kind = StoreFull if error.errno in _FULL else StoreError
    return kind(f"{error.filename or 'the disk'}: {error.strerror}")
