"""A store in one SQLite database, shared by all processes of a machine.

The write-ahead log is synced with each commit (`synchronous=FULL`), so what was committed survives a loss of power.
Many items a commit make that cheap: accept and finish hundreds at a time. An item's row has its request while it has no
result, and then its line of the result in the same place, so item, end and result are one row that changes once. Rows
are in the order of batch and number, so a batch is read from front to back and needs no further index.

Each object has one connection, behind a lock: threads take turns.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from router.batches.changes import cancelled, closed, closing, ended, failed, is_ending, moved
from router.batches.contract import FileInUse, StoreDamaged, StoreError, StoreFull
from router.batches.model import (
    MOST_NUMBER,
    OPEN,
    ClientTotals,
    Ending,
    Issue,
    Item,
    Part,
    Purpose,
    StoredBatch,
    StoredFile,
)

VERSION = 2
"""Of the schema, in the database's `user_version`. 1 had no `tries`."""

BUSY_S = 30.0
"""Longest wait for another process's commit."""

CHECKED_BYTES = 1 << 30
"""A larger database is not read whole when it is checked: its first pages are."""

WAITS, DONE, FAILED = 0, 1, 2
"""An item's `kind`."""

_SCHEMA = """
CREATE TABLE files (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, client TEXT NOT NULL,
    purpose TEXT NOT NULL, filename TEXT NOT NULL, bytes INTEGER NOT NULL, created_s INTEGER NOT NULL,
    expires_s INTEGER, batch TEXT NOT NULL, results TEXT NOT NULL);
CREATE INDEX files_of ON files (client, seq);
CREATE TABLE batches (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, client TEXT NOT NULL,
    status TEXT NOT NULL, total INTEGER NOT NULL, completed INTEGER NOT NULL, failed INTEGER NOT NULL,
    output_bytes INTEGER NOT NULL, error_bytes INTEGER NOT NULL, about BLOB NOT NULL);
CREATE INDEX batches_of ON batches (client, seq);
CREATE INDEX batches_in ON batches (status);
CREATE TABLE items (id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, model TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL, custom_id TEXT NOT NULL, content BLOB, tries INTEGER NOT NULL DEFAULT 0);
CREATE TABLE parts (batch INTEGER NOT NULL, model TEXT NOT NULL, left INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL, PRIMARY KEY (batch, model)) WITHOUT ROWID;
"""

_FILE = "id, client, purpose, filename, bytes, created_s, expires_s, batch, results"
_BATCH = "seq, status, total, completed, failed, about"


class SqliteStore:
    """`contract.Store` in the database at `path`, which is made if it is not there. Raises `StoreError`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        with _errors(path):
            self._db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
        try:
            with _errors(path):
                self._open()
        except StoreError:
            self._db.close()
            raise

    def _open(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA foreign_keys = OFF")
        self._db.execute("PRAGMA secure_delete = OFF")
        with self._commit():
            [version] = self._db.execute("PRAGMA user_version").fetchone()
            if not version:
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {VERSION}")
            elif version == 1:
                self._db.execute("ALTER TABLE items ADD COLUMN tries INTEGER NOT NULL DEFAULT 0")
                self._db.execute(f"PRAGMA user_version = {VERSION}")
            elif version != VERSION:
                raise StoreDamaged(f"{self._path}: its format is {version}, not {VERSION}")

    # -- files

    def add_file(self, file: StoredFile) -> None:
        with self._commit():
            self._add_file(file)

    def file(self, client: str, name: str) -> StoredFile | None:
        with self._reading():
            return self._file(client, name)

    def files(
        self, client: str, *, purpose: Purpose | None, after: str | None, limit: int, newest_first: bool
    ) -> list[StoredFile] | None:
        with self._reading():
            behind = self._seq("files", client, after)
            if behind is None:
                return None
            seq, order = ("seq < ?", "DESC") if newest_first else ("seq > ?", "ASC")
            rows = self._db.execute(
                f"SELECT {_FILE} FROM files WHERE client = ? AND (? OR {seq}) AND (? IS NULL OR purpose = ?)"
                f" ORDER BY seq {order} LIMIT ?",
                (client, not after, behind, purpose, purpose, limit),
            )
            return [_file(row) for row in rows]

    def file_bytes(self, client: str) -> int:
        with self._reading():
            [size] = self._db.execute(
                "SELECT coalesce(sum(bytes), 0) FROM files WHERE client = ? AND purpose = 'batch'", (client,)
            ).fetchone()
            return int(size)

    def remove_file(self, client: str, name: str) -> bool:
        with self._commit():
            file = self._file(client, name)
            if file is None:
                return False
            if name in self._being_read():
                raise FileInUse("a batch that is being validated still reads the file")
            self._forget_file(file)
            return True

    def results(self, file: StoredFile, after: int, most_bytes: int) -> tuple[bytes, int | None]:
        with self._reading():
            base = self._base(file.batch)
            found: list[bytes] = []
            size, last = 0, after
            for number, line in self._db.execute(
                "SELECT id, content FROM items WHERE id > ? AND id < ? AND kind = ? ORDER BY id",
                (base + after, base + MOST_NUMBER, DONE if file.results == "output" else FAILED),
            ):
                if size >= most_bytes:
                    return b"".join(found), last
                found.append(line + b"\n")
                size, last = size + len(line) + 1, number - base
            return b"".join(found), None

    # -- batches

    def add_batch(self, batch: StoredBatch) -> None:
        with self._commit():
            self._db.execute(
                "INSERT INTO batches (id, client, status, total, completed, failed, output_bytes, error_bytes, about)"
                " VALUES (?, ?, ?, 0, 0, 0, 0, 0, ?)",
                (batch.id, batch.client, batch.status, msgspec.json.encode(batch)),
            )

    def batch(self, client: str, name: str) -> StoredBatch | None:
        with self._reading():
            return self._batch(client, name)

    def batches(self, client: str, *, after: str | None, limit: int) -> list[StoredBatch] | None:
        with self._reading():
            behind = self._seq("batches", client, after)
            if behind is None:
                return None
            rows = self._db.execute(
                f"SELECT {_BATCH} FROM batches WHERE client = ? AND (? OR seq < ?) ORDER BY seq DESC LIMIT ?",
                (client, not after, behind, limit),
            )
            return [_batch(row) for row in rows]

    def cancel(self, client: str, name: str, now_s: int) -> StoredBatch | None:
        with self._commit():
            batch = self._batch(client, name)
            return None if batch is None else self._write(cancelled(batch, now_s))

    # -- the feeder's

    def open_batches(self) -> list[StoredBatch]:
        with self._reading():
            rows = self._db.execute(
                f"SELECT {_BATCH} FROM batches WHERE status IN ({', '.join('?' * len(OPEN))}) ORDER BY seq",
                OPEN,
            )
            return [_batch(row) for row in rows]

    def forget_items(self, batch: str) -> None:
        with self._commit():
            self._forget_items(self._base(batch))

    def accept(self, batch: str, items: Sequence[Item]) -> bool:
        with self._commit():
            if not self._is_validating(batch):
                return False
            base = self._base(batch)
            self._db.executemany(
                "INSERT INTO items (id, kind, model, prompt_tokens, output_tokens, custom_id, content)"
                f" VALUES (?, {WAITS}, ?, ?, ?, ?, ?)",
                [
                    (
                        base + one.number,
                        one.model,
                        one.prompt_tokens,
                        one.output_tokens,
                        one.custom_id,
                        one.body,
                    )
                    for one in items
                ],
            )
            for model in {one.model for one in items}:
                of = [one for one in items if one.model == model]
                self._add_to_part(
                    base, model, len(of), sum(x.prompt_tokens for x in of), sum(x.output_tokens for x in of)
                )
            self._db.execute("UPDATE batches SET total = total + ? WHERE id = ?", (len(items), batch))
            return True

    def start(self, batch: str, now_s: int) -> bool:
        with self._commit():
            if not self._is_validating(batch):
                return False
            self._write(moved(self._known(batch), "in_progress", now_s))
            return True

    def fail(self, batch: str, issues: Sequence[Issue], now_s: int) -> bool:
        with self._commit():
            if not self._is_validating(batch):
                return False
            self._forget_items(self._base(batch))
            self._write(failed(self._known(batch), issues, now_s))
            return True

    def parts(self) -> list[Part]:
        with self._reading():
            rows = self._db.execute(
                "SELECT batches.id, model, left, prompt_tokens, output_tokens FROM batches JOIN parts"
                " ON parts.batch = batches.seq WHERE status = 'in_progress' AND left > 0 ORDER BY seq, model"
            )
            return [Part(*row) for row in rows]

    def items(self, batch: str, model: str, after: int, limit: int) -> list[Item]:
        with self._reading():
            base = self._base(batch)
            rows = self._db.execute(
                "SELECT id - ?, custom_id, model, content, prompt_tokens, output_tokens, tries FROM items"
                " WHERE id > ? AND id < ? AND kind = ? AND model = ? ORDER BY id LIMIT ?",
                (base, base + after, base + MOST_NUMBER, WAITS, model, limit),
            )
            return [Item(*row) for row in rows]

    def tried(self, batch: str, tries: Mapping[int, int]) -> None:
        with self._commit():
            base = self._base(batch)
            self._db.executemany(
                f"UPDATE items SET tries = ? WHERE id = ? AND kind = {WAITS}",
                [(count, base + number) for number, count in tries.items()],
            )

    def finish(self, endings: Sequence[Ending], now_s: int) -> int:
        count = 0
        with self._commit():
            for batch in dict.fromkeys(one.batch for one in endings):
                count += self._finish(batch, [one for one in endings if one.batch == batch], now_s)
        return count

    def close(self, batch: str, now_s: int, most: int) -> bool:
        with self._commit():
            found = self._known(batch)
            if found.is_over:
                return True
            found = self._write(closing(found, now_s))
            base = self._base(batch)
            rows = self._db.execute(
                "SELECT id - ?, custom_id FROM items WHERE id > ? AND id < ? AND kind = ? ORDER BY id LIMIT ?",
                (base, base, base + MOST_NUMBER, WAITS, most),
            ).fetchall()
            self._finish(batch, [closed(found, *row) for row in rows], now_s)
            return self._known(batch).is_over

    def totals(self) -> Mapping[str, ClientTotals]:
        with self._reading():
            rows = self._db.execute(
                "SELECT client, sum(total - completed - failed), sum(completed), sum(failed) FROM batches"
                " WHERE status != 'failed' GROUP BY client"
            )
            return {client: ClientTotals(*counts) for client, *counts in rows}

    def sweep(self, now_s: int, ended_before_s: int) -> list[str]:
        gone = []
        with self._commit():
            busy = self._being_read()
            for row in self._db.execute(
                f"SELECT {_FILE} FROM files WHERE expires_s <= ? AND purpose = 'batch'", (now_s,)
            ).fetchall():
                file = _file(row)
                if file.id not in busy:
                    self._forget_file(file)
                    gone.append(file.id)
            rows = self._db.execute(
                f"SELECT {_BATCH} FROM batches WHERE status NOT IN ({', '.join('?' * len(OPEN))})", OPEN
            ).fetchall()
        for row in rows:
            batch = _batch(row)
            if max(batch.times.values(), default=batch.created_s) < ended_before_s:
                with self._commit():  # one at a time: others want to write, too
                    self._forget_items(self._base(batch.id))
                    self._db.execute("DELETE FROM files WHERE batch = ?", (batch.id,))
                    self._db.execute("DELETE FROM batches WHERE id = ?", (batch.id,))
        return gone

    def uploaded(self) -> set[str]:
        with self._reading():
            return {name for [name] in self._db.execute("SELECT id FROM files WHERE purpose = 'batch'")}

    def check(self) -> None:
        with self._reading():
            self._db.execute("SELECT count(*) FROM files").fetchone()
            if self._path.stat().st_size <= CHECKED_BYTES:
                [found] = self._db.execute("PRAGMA quick_check(1)").fetchone()
                if found != "ok":
                    raise StoreDamaged(f"{self._path}: {found}")

    def shut(self) -> None:
        with self._lock:
            self._db.close()

    # -- inside

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock, _errors(self._path):
            yield

    @contextmanager
    def _commit(self) -> Iterator[None]:
        """One transaction: whatever is raised inside undoes it. At its end it is on the disk."""
        with self._lock, _errors(self._path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk may have ended it
                    self._db.execute("ROLLBACK")
                raise

    def _add_file(self, file: StoredFile) -> None:
        values = msgspec.structs.asdict(file)
        self._db.execute(
            f"INSERT INTO files ({_FILE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", [*values.values()]
        )

    def _file(self, client: str, name: str) -> StoredFile | None:
        row = self._db.execute(
            f"SELECT {_FILE} FROM files WHERE id = ? AND client = ?", (name, client)
        ).fetchone()
        return None if row is None else _file(row)

    def _being_read(self) -> set[str]:
        rows = self._db.execute(f"SELECT {_BATCH} FROM batches WHERE status = 'validating'").fetchall()
        return {_batch(row).input_file for row in rows}

    def _forget_file(self, file: StoredFile) -> None:
        if file.results:
            base = self._base(file.batch)
            self._db.execute(
                "DELETE FROM items WHERE id > ? AND id < ? AND kind = ?",
                (base, base + MOST_NUMBER, DONE if file.results == "output" else FAILED),
            )
        self._db.execute("DELETE FROM files WHERE id = ?", (file.id,))

    def _seq(self, table: str, client: str, after: str | None) -> int | None:
        """The place of what has this id; 0 without one; None if there is none."""
        if after is None:
            return 0
        found = self._db.execute(f"SELECT seq FROM {table} WHERE id = ? AND client = ?", (after, client))
        row = found.fetchone()
        return None if row is None else int(row[0])

    def _batch(self, client: str, name: str) -> StoredBatch | None:
        row = self._db.execute(
            f"SELECT {_BATCH} FROM batches WHERE id = ? AND client = ?", (name, client)
        ).fetchone()
        return None if row is None else _batch(row)

    def _known(self, name: str) -> StoredBatch:
        row = self._db.execute(f"SELECT {_BATCH} FROM batches WHERE id = ?", (name,)).fetchone()
        if row is None:
            raise StoreError(f"there is no batch {name}")
        return _batch(row)

    def _base(self, name: str) -> int:
        """The items of a batch have the ids above it."""
        row = self._db.execute("SELECT seq FROM batches WHERE id = ?", (name,)).fetchone()
        if row is None:
            raise StoreError(f"there is no batch {name}")
        return int(row[0]) * MOST_NUMBER

    def _is_validating(self, name: str) -> bool:
        row = self._db.execute("SELECT status FROM batches WHERE id = ?", (name,)).fetchone()
        return row is not None and row[0] == "validating"

    def _write(self, batch: StoredBatch) -> StoredBatch:
        """All but its counts."""
        self._db.execute(
            "UPDATE batches SET status = ?, about = ? WHERE id = ?",
            (batch.status, msgspec.json.encode(batch), batch.id),
        )
        return batch

    def _forget_items(self, base: int) -> None:
        self._db.execute("DELETE FROM items WHERE id > ? AND id < ?", (base, base + MOST_NUMBER))
        self._db.execute("DELETE FROM parts WHERE batch = ?", (base // MOST_NUMBER,))
        self._db.execute(
            "UPDATE batches SET total = 0, completed = 0, failed = 0, output_bytes = 0, error_bytes = 0"
            " WHERE seq = ?",
            (base // MOST_NUMBER,),
        )

    def _add_to_part(self, base: int, model: str, *more: int) -> None:
        self._db.execute(
            "INSERT INTO parts VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET left = left + excluded.left,"
            " prompt_tokens = prompt_tokens + excluded.prompt_tokens,"
            " output_tokens = output_tokens + excluded.output_tokens",
            (base // MOST_NUMBER, model, *more),
        )

    def _finish(self, batch: str, endings: Sequence[Ending], now_s: int) -> int:
        row = self._db.execute("SELECT seq FROM batches WHERE id = ?", (batch,)).fetchone()
        if row is None:
            return 0
        base = int(row[0]) * MOST_NUMBER
        counts, sizes = [0, 0], [0, 0]
        ended: dict[str, list[int]] = {}
        for one in endings:
            changed = self._db.execute(
                f"UPDATE items SET kind = ?, content = ? WHERE id = ? AND kind = {WAITS}"
                " RETURNING model, prompt_tokens, output_tokens",
                (DONE if one.is_ok else FAILED, one.line, base + one.number),
            ).fetchall()
            for model, *tokens in changed:
                counts[one.is_ok] += 1
                sizes[one.is_ok] += len(one.line) + 1
                of = ended.setdefault(model, [0, 0, 0])
                for index, amount in enumerate((1, *tokens)):
                    of[index] -= amount
        for model, amounts in ended.items():
            self._add_to_part(base, model, *amounts)
        self._db.execute(
            "UPDATE batches SET completed = completed + ?, failed = failed + ?, output_bytes = output_bytes + ?,"
            " error_bytes = error_bytes + ? WHERE id = ?",
            (counts[1], counts[0], sizes[1], sizes[0], batch),
        )
        self._end_if_over(batch, now_s)
        return sum(counts)

    def _end_if_over(self, name: str, now_s: int) -> None:
        batch = self._known(name)
        if not is_ending(batch):
            return
        sizes = self._db.execute("SELECT output_bytes, error_bytes FROM batches WHERE id = ?", (name,))
        output_bytes, error_bytes = sizes.fetchone()
        over, files = ended(batch, output_bytes, error_bytes, now_s)
        for file in files:
            self._add_file(file)
        self._write(over)


def _file(row: Sequence[Any]) -> StoredFile:
    return StoredFile(**dict(zip(StoredFile.__struct_fields__, row, strict=True)))


def _batch(row: Sequence[Any]) -> StoredBatch:
    _, status, total, completed, failed, about = row
    found = msgspec.json.decode(about, type=StoredBatch)
    return msgspec.structs.replace(found, status=status, total=total, completed=completed, failed=failed)


_FULL_CODES = (sqlite3.SQLITE_FULL,)
_DAMAGED_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """SQLite's errors as the contract has them."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        kind: Callable[[str], StoreError] = StoreError
        if code in _FULL_CODES:
            kind = StoreFull
        elif code in _DAMAGED_CODES:
            kind = StoreDamaged
        raise kind(f"{path}: {error}") from None
