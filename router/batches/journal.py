"""A store whose changes are messages of a log that several machines follow: SQLite is what follows from them so far.

A message names a method of the store and its arguments. It is applied in the order of the log, in one transaction with
its place there and with what it returned, so each is applied once, whichever process of a machine does it and whatever
dies. Applying is deterministic: what a method changes follows from the database and its arguments alone. So all
databases that have come equally far are equal.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from router.batches.contract import FileInUse, StoreDamaged, StoreError, StoreFull
from router.batches.model import Ending, Issue, Item, StoredBatch, StoredFile
from router.batches.sqlite import SqliteStore

METHODS: dict[str, tuple[Any, Any]] = {
    "add_file": (tuple[StoredFile], None),
    "remove_file": (tuple[str, str], bool),
    "add_batch": (tuple[StoredBatch], None),
    "cancel": (tuple[str, str, int], StoredBatch | None),
    "forget_items": (tuple[str], None),
    "accept": (tuple[str, list[Item]], bool),
    "start": (tuple[str, int], bool),
    "fail": (tuple[str, list[Issue], int], bool),
    "tried": (tuple[str, dict[int, int]], None),
    "finish": (tuple[list[Ending], int], int),
    "close": (tuple[str, int, int], bool),
    "sweep": (tuple[int, int], list[str]),
}
"""What changes a store: the types of the arguments, and of what is returned."""

KEPT = 10_000
"""Messages whose outcome is remembered: who has sent one asks for it at once."""

_ERRORS: dict[str, type[StoreError]] = {one.__name__: one for one in (StoreError, FileInUse)}
"""What a method may refuse. A disk that is full refuses to follow, which is another thing."""


class Change(msgspec.Struct, frozen=True, array_like=True):
    """A message. `id` is nobody else's; one that was sent twice is applied once. `method` "": nothing changes."""

    id: str
    method: str = ""
    arguments: Any = ()


class _Outcome(msgspec.Struct, frozen=True, array_like=True):
    value: Any = None
    error: str = ""
    text: str = ""


class Journal(SqliteStore):
    """Applies changes. ValueError for a message that is none; `StoreDamaged` for a place behind which it is already,
    unless another process of this machine has come there first."""

    _applies = False

    def _open(self) -> None:
        super()._open()
        with self._commit():
            self._db.execute("CREATE TABLE IF NOT EXISTS log (next INTEGER NOT NULL)")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS outcomes (place INTEGER PRIMARY KEY, id TEXT UNIQUE, outcome BLOB)"
            )
            if self._db.execute("SELECT next FROM log").fetchone() is None:
                [batches] = self._db.execute("SELECT count(*) FROM batches").fetchone()
                if batches:
                    raise StoreError(f"{self._path}: it has batches that are in no broker's log")
                self._db.execute("INSERT INTO log VALUES (0)")

    @property
    def next(self) -> int:
        """The place in the log of the first message that was not applied."""
        with self._reading():
            return int(self._db.execute("SELECT next FROM log").fetchone()[0])

    def apply(self, place: int, message: bytes) -> Change:
        """The message at this place of the log; nothing happens if it was applied. Raises `StoreError` if it could not
        be: then it is to be applied again, before any other."""
        try:
            change = msgspec.msgpack.decode(message, type=Change)
            arguments = msgspec.convert(change.arguments, METHODS[change.method][0]) if change.method else ()
        except (msgspec.MsgspecError, KeyError):
            raise ValueError(f"message {place} of the log is no change of a store") from None
        if place < self.next:
            return change
        with self._commit():
            [following] = self._db.execute("SELECT next FROM log").fetchone()
            if place >= following:
                if not self._is_known(change.id):
                    self._remember(place, change, self._outcome(change.method, arguments))
                self._db.execute("UPDATE log SET next = ?", (place + 1,))
        return change

    def outcome(self, change: Change) -> Any:
        """What a change that was applied has returned, or raises what it has raised."""
        with self._reading():
            row = self._db.execute("SELECT outcome FROM outcomes WHERE id = ?", (change.id,)).fetchone()
        if row is None:
            raise StoreError(f"{self._path}: what became of a change is not known any more")
        found = msgspec.msgpack.decode(row[0], type=_Outcome)
        if found.error:
            raise _ERRORS[found.error](found.text)
        return msgspec.convert(found.value, METHODS[change.method][1]) if change.method else None

    # -- inside

    @contextmanager
    def _commit(self) -> Iterator[None]:
        """Methods that are applied are part of the transaction of their message."""
        if self._applies:
            yield
            return
        with super()._commit():
            yield

    def _outcome(self, method: str, arguments: Sequence[Any]) -> _Outcome:
        if not method:
            return _Outcome()
        self._db.execute("SAVEPOINT change")
        self._applies = True
        try:
            return _Outcome(getattr(SqliteStore, method)(self, *arguments))
        except (StoreFull, StoreDamaged):
            raise
        except StoreError as error:
            self._db.execute("ROLLBACK TO change")
            return _Outcome(None, type(error).__name__, str(error))
        finally:
            self._applies = False

    def _is_known(self, name: str) -> bool:
        return self._db.execute("SELECT 1 FROM outcomes WHERE id = ?", (name,)).fetchone() is not None

    def _remember(self, place: int, change: Change, outcome: _Outcome) -> None:
        self._db.execute(
            "INSERT INTO outcomes VALUES (?, ?, ?)", (place, change.id, msgspec.msgpack.encode(outcome))
        )
        self._db.execute("DELETE FROM outcomes WHERE place <= ?", (place - KEPT,))


class Logged(Journal):
    """A store whose changes go through the log: whoever keeps that says how."""

    def _say(self, method: str, *arguments: Any) -> Any:
        """Appends a change to the log, and waits until it is applied here; what it has returned or raised."""
        raise NotImplementedError

    # -- what changes it

    def add_file(self, file: StoredFile) -> None:
        self._say("add_file", file)

    def remove_file(self, client: str, name: str) -> bool:
        return bool(self._say("remove_file", client, name))

    def add_batch(self, batch: StoredBatch) -> None:
        self._say("add_batch", batch)

    def cancel(self, client: str, name: str, now_s: int) -> StoredBatch | None:
        found: StoredBatch | None = self._say("cancel", client, name, now_s)
        return found

    def forget_items(self, batch: str) -> None:
        self._say("forget_items", batch)

    def accept(self, batch: str, items: Sequence[Item]) -> bool:
        return bool(self._say("accept", batch, items))

    def tried(self, batch: str, tries: Mapping[int, int]) -> None:
        self._say("tried", batch, dict(tries))

    def start(self, batch: str, now_s: int) -> bool:
        return bool(self._say("start", batch, now_s))

    def fail(self, batch: str, issues: Sequence[Issue], now_s: int) -> bool:
        return bool(self._say("fail", batch, issues, now_s))

    def finish(self, endings: Sequence[Ending], now_s: int) -> int:
        return int(self._say("finish", endings, now_s))

    def close(self, batch: str, now_s: int, most: int) -> bool:
        return bool(self._say("close", batch, now_s, most))

    def sweep(self, now_s: int, ended_before_s: int) -> list[str]:
        gone: list[str] = self._say("sweep", now_s, ended_before_s)
        return gone
