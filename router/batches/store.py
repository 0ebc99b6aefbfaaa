"""The store of files and batches, by SQLAlchemy: a SQLite database for one machine, PostgreSQL for several.

Promise. What a call has changed is kept when it returns, whatever dies then: the process, or the machine. A call that
raises has changed nothing, unless the database was lost during its commit; then it may be made again. `StoreFull` is a
full disk; `StoreDamaged` is for an operator to repair. Any number of processes may have one store open.

Items. An item is accepted by `accept`, and ends once: by the first `finish` that names it, or by `close`. Its row has
its request while it has no result, and then its line of the result in the same place, so item, end and result are one
row, unique by batch and line. The batch is over in the same step as the last of its items: whatever ends items, or
moves a batch, holds the batch's row.

Leases. A feeder leases what it sends. Its leases last as long as its name in `feeders`, which it renews; `reclaim` has
the items of a feeder that is late wait again. A late feeder's results still count if they are the first.

On SQLite the write-ahead log is synced with each commit, so what was committed survives a loss of power, and writers
take turns (`BEGIN IMMEDIATE`). On PostgreSQL leases pass over what others lease (`SKIP LOCKED`).
"""

import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection, make_url

from router.batches import lines
from router.batches.model import (
    MOST_NUMBER,
    OPEN,
    BatchCounts,
    BatchIssue,
    BatchIssues,
    ClientTotals,
    Ending,
    FileInUse,
    Item,
    Purpose,
    Results,
    Status,
    StoreDamaged,
    StoredBatch,
    StoredFile,
    StoreError,
    StoreFull,
)

FORMAT = 4
"""Of the tables."""
BUSY_S = 30.0
"""Longest wait for another process's commit."""
CHECKED_BYTES = 1 << 30
"""A larger SQLite database is not read whole when it is checked: its first pages are."""
_CREATION = 0x5FA1
"""PostgreSQL's lock under which tables are made."""

WAITS, LEASED, DONE, FAILED = (sa.literal_column(one, sa.SmallInteger) for one in "0123")
"""An item's `state`. Literal, so that the indexes of some states are used."""

_STREAMED = {"stream_results": True, "max_row_buffer": 64}
_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_META = sa.MetaData()


def _table(name: str, *columns: sa.schema.SchemaItem, texts: str = "", numbers: str = "") -> sa.Table:
    """With columns of these names that have no null."""
    of = ((sa.Text, texts), (sa.BigInteger, numbers))
    more = (sa.Column(one, kind, nullable=False) for kind, names in of for one in names.split())
    return sa.Table(name, _META, *more, *columns, sqlite_autoincrement=name in ("files", "batches"))


def _when(state: sa.ColumnElement[int], name: str, *columns: str) -> sa.Index:
    """An index of items in one state."""
    where = sa.column("state") == state
    return sa.Index(name, *columns, sqlite_where=where, postgresql_where=where)


def _seq() -> sa.Column[int]:
    return sa.Column("seq", _ID, primary_key=True, autoincrement=True)


_FORMATS = _table("format", numbers="version")
_FILES = _table(
    "files", _seq(), sa.Column("expires_at", sa.BigInteger), sa.UniqueConstraint("id"), sa.Index("files_of", "client"),
    texts="id client purpose filename batch results", numbers="bytes created_at",
)  # fmt: skip
_BATCHES = _table(
    "batches", _seq(),
    sa.Column("about", sa.LargeBinary, nullable=False),  # all of it; the other columns are what is looked for
    sa.Column("owner", sa.Text),  # the feeder that validates it
    sa.UniqueConstraint("id"), sa.Index("batches_of", "client"), sa.Index("batches_in", "status"),
    texts="id client status", numbers="total completed failed",
)  # fmt: skip
_ITEMS = _table(
    "items",
    sa.Column("id", _ID, primary_key=True, autoincrement=False),  # above that of its batch
    sa.Column("content", sa.LargeBinary, nullable=False),
    sa.Column("owner", sa.Text),  # the feeder that leases it
    _when(WAITS, "items_waiting", "model", "id"), _when(LEASED, "items_leased", "owner", "model"),
    texts="model custom_id", numbers="state tries",
)  # fmt: skip
_FEEDERS = _table("feeders", sa.Column("owner", sa.Text, primary_key=True), sa.Column("until_s", sa.Double))
_F, _B, _I, _O = (one.c for one in (_FILES, _BATCHES, _ITEMS, _FEEDERS))

_FILE = [_F[name] for name in StoredFile.__struct_fields__]
_BATCH = _B.seq, _B.about


class Store:
    """Of a SQLite file that is made if it is not there, or of a database at `postgresql://…`. Raises `StoreError`.
    Whoever names a client sees only what is that client's. Threads may share it."""

    def __init__(self, where: Path | str) -> None:
        self._path = where if isinstance(where, Path) else None
        options: dict[str, Any]
        if self._path is not None:
            url, self.name = f"sqlite:///{where}", str(where)
            options = {"connect_args": {"timeout": BUSY_S, "check_same_thread": False}, "paramstyle": "qmark"}
        else:
            url = str(where).replace("postgresql:", "postgresql+psycopg:", 1)
            options = {"connect_args": {"connect_timeout": 5}, "paramstyle": "format", "pool_pre_ping": True}
            try:
                self.name = make_url(url).render_as_string().replace("+psycopg", "", 1)
            except (sa.exc.ArgumentError, ValueError):
                raise StoreError("this is no URL of a database") from None
        self._db = sa.create_engine(url, **options)
        if self._path is not None:
            sa.event.listen(self._db, "connect", _connected)
            sa.event.listen(self._db, "begin", _begin)
        self._writing = self._db.execution_options(writes=True)
        try:
            with self._commit() as db:
                self._make(db)
        except StoreError:
            self.shut()
            raise

    def _make(self, db: Connection) -> None:
        """The tables, unless they are there."""
        if self._path is None:
            db.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATION)))
        if not sa.inspect(db).has_table("format"):
            if sa.inspect(db).has_table("items"):
                raise StoreDamaged(f"{self.name}: it was made by an older version, and cannot be read")
            _META.create_all(db)
            db.execute(_FORMATS.insert().values(version=FORMAT))
        version = db.scalar(sa.select(_FORMATS.c.version))
        if version != FORMAT:
            raise StoreDamaged(f"{self.name}: its format is {version}, not {FORMAT}")

    # -- files

    def add_file(self, file: StoredFile) -> None:
        """Its content is kept already."""
        with self._commit() as db:
            _add_file(db, file)

    def file(self, client: str, name: str) -> StoredFile | None:
        """The file of this id."""
        with self._reading() as db:
            return _file(db, client, name)

    def files(
        self, client: str, *, purpose: Purpose | None, after: str | None, limit: int, newest_first: bool
    ) -> list[StoredFile] | None:
        """At most `limit` files behind the one of id `after`; None if there is no such file."""
        with self._reading() as db:
            found = _page(db, _FILES, _FILE, client, after, newest_first=newest_first)
            if found is None:
                return None
            if purpose is not None:
                found = found.where(_F.purpose == purpose)
            return [StoredFile(**row) for row in db.execute(found.limit(limit)).mappings()]

    def file_bytes(self, client: str) -> int:
        """Of all its files that were uploaded."""
        with self._reading() as db:
            size = sa.select(sa.func.sum(_F.bytes)).where(_F.client == client, _F.purpose == "batch")
            return int(db.scalar(size) or 0)

    def remove_file(self, client: str, name: str) -> bool:
        """With the results that it holds. False if there is none. Raises `FileInUse`."""
        with self._commit() as db:
            file = _file(db, client, name)
            if file is None:
                return False
            if name in _being_read(db):
                raise FileInUse("a batch that is being validated still reads the file")
            if file.results:
                of = _of(_known(db, file.batch).base)
                db.execute(_ITEMS.delete().where(of, _I.state == _kind(file)))
            db.execute(_FILES.delete().where(_F.id == name))
            return True

    def results(self, file: StoredFile, after: int, most_bytes: int) -> tuple[bytes, int | None]:
        """Lines of a file of results, behind that of item `after`, in the order of items: some, not far above
        `most_bytes` together, and the number of the last; None: these are the last."""
        with self._reading() as db:
            base = _known(db, file.batch).base
            rows = sa.select(_I.id, _I.content).where(
                _of(base), _I.id > base + after, _I.state == _kind(file)
            )
            found: list[bytes] = []
            size, last = 0, after
            with db.execute(rows.order_by(_I.id), execution_options=_STREAMED) as result:
                for item, line in result:
                    if size >= most_bytes:
                        return b"".join(found), last
                    found.append(line + b"\n")
                    size, last = size + len(line) + 1, item - base
            return b"".join(found), None

    # -- batches

    def add_batch(self, batch: StoredBatch) -> None:
        """It is to be validated."""
        with self._commit() as db:
            db.execute(_BATCHES.insert().values(client=batch.client, **_row(batch)))

    def batch(self, client: str, name: str) -> StoredBatch | None:
        """The batch of this id."""
        with self._reading() as db:
            return _batch(db, _B.id == name, _B.client == client)

    def batches(self, client: str, *, after: str | None, limit: int) -> list[StoredBatch] | None:
        """At most `limit`, the newest first, behind the one of id `after`; None if there is no such batch."""
        with self._reading() as db:
            found = _page(db, _BATCHES, _BATCH, client, after, newest_first=True)
            return None if found is None else [_stored(row) for row in db.execute(found.limit(limit))]

    def cancel(self, client: str, name: str, now_s: int) -> StoredBatch | None:
        """The batch as it is then: cancelling, unless it was over; None if there is none."""
        with self._commit() as db:
            batch = _batch(db, _B.id == name, _B.client == client, lock=True)
            if batch is None or batch.is_over or batch.closing:
                return batch
            return _write(db, _moved(batch, "cancelling", now_s, closing="cancelled"))

    def open_batches(self) -> list[StoredBatch]:
        """Of all clients: those that are not over, the oldest first."""
        with self._reading() as db:
            return _batches(db, _B.status.in_(OPEN))

    def totals(self) -> Mapping[str, ClientTotals]:
        """By client."""
        counts = (_B.total - _B.completed - _B.failed, _B.completed, _B.failed)
        sums = sa.select(_B.client, *map(sa.func.sum, counts)).group_by(_B.client)
        with self._reading() as db:
            running: dict[str, int] = dict(db.execute(_leases(_B.client)).all())
            return {
                name: ClientTotals(int(left), int(completed), int(failed), running.get(name, 0))
                for name, left, completed, failed in db.execute(sums)
            }

    # -- validating

    def claim(self, owner: str, besides: Collection[str]) -> StoredBatch | None:
        """The oldest batch that no other feeder validates, of a client that is none of `besides`: `owner`, who has
        renewed its name, validates it from its beginning."""
        is_free = _B.owner.is_(None) | (_B.owner == owner)
        mine = sa.select(_B.id).where(_B.status == "validating", is_free, _B.client.not_in(besides))
        with self._commit() as db:
            name = db.scalar(mine.order_by(_B.seq).limit(1).with_for_update(skip_locked=True))
            if name is None:
                return None
            db.execute(_BATCHES.update().where(_B.id == name).values(owner=owner))
            return _without_items(db, _known(db, name))

    def accept(self, batch: str, owner: str, items: Sequence[Item]) -> bool:
        """Further items of a batch that `owner` validates. False, and nothing is kept, if it does not any more."""
        with self._commit() as db:
            found = _validated(db, batch, owner)
            if found is None:
                return False
            base = found.base
            _many(db, _NEW, [(one.model, one.custom_id, base + one.number, one.body) for one in items])
            left = Counter(found.left) + Counter(one.model for one in items)
            _write(db, _changed(found, left=left, request_counts=BatchCounts(left.total())))
            return True

    def settle(self, batch: str, owner: str, issues: Sequence[BatchIssue], now_s: int) -> bool:
        """It was validated: all its items may be answered, or, with `issues`, nothing of it is run. False if `owner`
        does not validate it any more."""
        with self._commit() as db:
            found = _validated(db, batch, owner)
            if found is None:
                return False
            if issues:
                errors = BatchIssues(tuple(issues))
                _write(db, _moved(_without_items(db, found), "failed", now_s, errors=errors))
            else:
                _write(db, _moved(found, "in_progress", now_s))
            return True

    # -- leasing

    def leased(self) -> Mapping[tuple[str, str], int]:
        """How many items are leased, by batch and model."""
        with self._reading() as db:
            return {(batch, model): count for batch, model, count in db.execute(_leases(_B.id, _I.model))}

    def renew(self, owner: str, until_s: float) -> None:
        """Leases of `owner` last until then, at least."""
        with self._commit() as db:
            if not db.execute(_FEEDERS.update().where(_O.owner == owner).values(until_s=until_s)).rowcount:
                db.execute(_FEEDERS.insert().values(owner=owner, until_s=until_s))

    def turn(
        self,
        owner: str,
        now_s: int,
        endings: Sequence[Ending] = (),
        *,
        tries: Mapping[int, int] = {},
        released: Collection[int] = (),
        keep: Collection[int] | None = None,
        wanted: Mapping[tuple[str, str], int] = {},
        most_bytes: int = 1 << 62,
    ) -> list[tuple[str, Item]]:
        """What a feeder has to say and to ask for, in one step: results, as `finish`; how often items without a result
        were tried so far, by key; items that wait again, if they are leased to `owner`. With `keep`, so do all others
        that are: what a call that failed may have leased.

        Then, of each batch and model at most so many items as are `wanted`, that wait, in order, each with its batch,
        and together one more than `most_bytes` at most: they are leased to `owner`; none if its leases have run out.
        """
        with self._commit() as db:
            if endings:
                _finish(db, endings, now_s)
            if tries:
                _many(db, _TRIED, [(count, key) for key, count in sorted(tries.items())])
            if released:
                _let_go(db, owner, _I.id.in_(released))
            if keep is not None:
                _let_go(db, owner, _I.id.not_in(keep))
            return _lease(db, owner, wanted, most_bytes) if wanted else []

    def reclaim(self, now_s: float) -> None:
        """What is leased to feeders that have not renewed their names waits again."""
        late = sa.select(_O.owner).where(_O.until_s < now_s)
        with self._reading() as db:
            if db.scalar(late.limit(1)) is None:
                return
        with self._commit() as db:
            for owner in db.scalars(late.with_for_update(skip_locked=True)).all():
                _let_go(db, owner, sa.true())
                db.execute(_BATCHES.update().where(_B.owner == owner).values(owner=None))
                db.execute(_FEEDERS.delete().where(_O.owner == owner))

    def finish(self, endings: Sequence[Ending], now_s: int) -> int:
        """How many of these were without a result, and have it from here on."""
        with self._commit() as db:
            return _finish(db, endings, now_s)

    def close(self, batch: str, now_s: int, most: int) -> bool:
        """Ends at most `most` items of a batch that is cancelled, or whose window is over. True: it is over."""
        with self._commit() as db:
            found = _batch(db, _B.id == batch, lock=True)
            if found is None or found.is_over:
                return True
            if not found.closing:
                found = _write(db, _moved(found, "finalizing", now_s, closing="expired"))
            code, message = lines.EXPIRED if found.closing == "expired" else lines.CANCELLED
            left = sa.select(_I.id - found.base, _I.custom_id).where(_of(found.base), _I.state < DONE)
            ends = []
            for number, custom_id in db.execute(left.order_by(_I.id).limit(most)):
                item = Item(number, custom_id, "", b"")
                ends.append(Ending(batch, number, False, lines.unanswered(batch, item, code, message)))
            _finish(db, ends, now_s, batch)
            return _known(db, batch).is_over

    # -- keeping house

    def sweep(self, now_s: int, ended_before_s: int) -> set[str]:
        """Forgets files that have expired and are not being read, and batches that were over before `ended_before_s`,
        with their results. The uploads that are left, by id."""
        with self._commit() as db:
            old = _F.expires_at <= now_s, _F.purpose == "batch", _F.id.not_in(_being_read(db))
            db.execute(_FILES.delete().where(*old))
            over = _batches(db, _B.status.not_in(OPEN))
        for batch in over:
            if getattr(batch, f"{batch.status}_at") < ended_before_s:
                with self._commit() as db:  # one at a time: others want to write, too
                    db.execute(_BATCHES.delete().where(_B.id == batch.id))
                    db.execute(_FILES.delete().where(_F.batch == batch.id))
                    db.execute(_ITEMS.delete().where(_of(batch.base)))
        with self._reading() as db:
            return set(db.scalars(sa.select(_F.id).where(_F.purpose == "batch")))

    def check(self) -> None:
        """Raises `StoreDamaged`."""
        with self._reading() as db:
            db.scalar(sa.select(sa.func.count()).select_from(_FILES))
            if self._path is None or self._path.stat().st_size > CHECKED_BYTES:
                return
            if (found := db.exec_driver_sql("PRAGMA quick_check(1)").scalar()) != "ok":
                raise StoreDamaged(f"{self.name}: {found}")

    def shut(self) -> None:
        """Nothing more is asked of it."""
        self._db.dispose()

    # -- inside

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with _errors(self.name), self._db.begin() as db:
            yield db

    @contextmanager
    def _commit(self) -> Iterator[Connection]:
        """One transaction: whatever is raised inside undoes it. At its end it is on the disk."""
        with _errors(self.name), self._writing.begin() as db:
            yield db


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """The database's errors as the module's head has them."""
    try:
        yield
    except (sa.exc.SQLAlchemyError, sqlite3.Error) as error:
        found = getattr(error, "orig", None) or error
        code = getattr(found, "sqlstate", None) or getattr(found, "sqlite_errorcode", 0) & 0xFF
        kind = StoreFull if code in _FULL else StoreDamaged if code in _DAMAGED else StoreError
        raise kind(f"{name}: {str(found).strip().partition(chr(10))[0]}") from None


def _connected(db: sqlite3.Connection, _: object) -> None:
    db.isolation_level = None  # transactions begin in `_begin`
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = OFF"):
        db.execute(f"PRAGMA {pragma}")


def _begin(db: Connection) -> None:
    db.exec_driver_sql("BEGIN IMMEDIATE" if db.get_execution_options().get("writes") else "BEGIN")


_FULL = (sqlite3.SQLITE_FULL, "53100")
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, "XX001", "XX002")


@cache
def _text(statement: sa.UpdateBase, dialect: sa.Dialect) -> str:
    return str(statement.compile(dialect=dialect))


def _many(db: Connection, statement: sa.UpdateBase, rows: Sequence[tuple[object, ...]]) -> None:
    """By the driver itself, which takes the values as they are: half the time of a commit of hundreds. They stand in
    the order of the statement."""
    db.exec_driver_sql(_text(statement, db.dialect), rows)


def _page(
    db: Connection,
    table: sa.Table,
    columns: Sequence[Any],
    client: str,
    after: str | None,
    *,
    newest_first: bool,
) -> sa.Select[Any] | None:
    """A client's, behind what has this id; None if there is none."""
    found = sa.select(*columns).where(table.c.client == client)
    if after is not None:
        place = db.scalar(sa.select(table.c.seq).where(table.c.id == after, table.c.client == client))
        if place is None:
            return None
        found = found.where(table.c.seq < place if newest_first else table.c.seq > place)
    return found.order_by(table.c.seq.desc() if newest_first else table.c.seq)


def _add_file(db: Connection, file: StoredFile) -> None:
    db.execute(_FILES.insert().values(msgspec.structs.asdict(file)))


def _file(db: Connection, client: str, name: str) -> StoredFile | None:
    found = sa.select(*_FILE).where(_F.id == name, _F.client == client)
    row = db.execute(found).mappings().first()
    return None if row is None else StoredFile(**row)


def _kind(file: StoredFile) -> Any:
    return DONE if file.results == "output" else FAILED


def _being_read(db: Connection) -> set[str]:
    return {batch.input_file_id for batch in _batches(db, _B.status == "validating")}


def _batches(db: Connection, *which: sa.ColumnElement[bool], lock: bool = False) -> list[StoredBatch]:
    found = sa.select(*_BATCH).where(*which).order_by(_B.seq)
    return [_stored(row) for row in db.execute(found.with_for_update() if lock else found)]


def _batch(db: Connection, *which: sa.ColumnElement[bool], lock: bool = False) -> StoredBatch | None:
    return next(iter(_batches(db, *which, lock=lock)), None)


def _known(db: Connection, name: str) -> StoredBatch:
    if (found := _batch(db, _B.id == name)) is None:
        raise StoreError(f"there is no batch {name}")
    return found


def _validated(db: Connection, name: str, owner: str) -> StoredBatch | None:
    """The batch, if `owner` validates it."""
    return _batch(db, _B.id == name, _B.status == "validating", _B.owner == owner, lock=True)


_decoded = msgspec.json.Decoder(StoredBatch).decode
_changed = msgspec.structs.replace


def _stored(row: Sequence[Any]) -> StoredBatch:
    return _changed(_decoded(row[1]), seq=row[0])


def _row(batch: StoredBatch) -> dict[str, object]:
    counts = msgspec.structs.asdict(batch.request_counts)
    return {"id": batch.id, "status": batch.status, "about": msgspec.json.encode(batch), **counts}


def _write(db: Connection, batch: StoredBatch) -> StoredBatch:
    db.execute(_BATCHES.update().where(_B.seq == batch.seq).values(_row(batch)))
    return batch


def _moved(batch: StoredBatch, status: Status, now_s: int, **more: Any) -> StoredBatch:
    return _changed(batch, status=status, **{f"{status}_at": now_s}, **more)


def _without_items(db: Connection, batch: StoredBatch) -> StoredBatch:
    db.execute(_ITEMS.delete().where(_of(batch.base)))
    return _write(db, _changed(batch, left={}, request_counts=BatchCounts()))


def _leases(*by: sa.ColumnElement[Any]) -> sa.Select[Any]:
    count = sa.select(*by, sa.func.count()).join(_ITEMS, _B.seq == _I.id // MOST_NUMBER)
    return count.where(_I.state == LEASED).group_by(*by)


def _of(base: int) -> sa.ColumnElement[bool]:
    return _I.id.between(base + 1, base + MOST_NUMBER - 1)


def _let_go(db: Connection, owner: str, which: sa.ColumnElement[bool]) -> None:
    leased = _ITEMS.update().where(_I.state == LEASED, _I.owner == owner, which)
    db.execute(leased.values(state=WAITS, owner=None))


_NEW = _ITEMS.insert().values(
    state=WAITS, tries=WAITS, **{name: sa.bindparam(name) for name in ("id", "model", "custom_id", "content")}
)
_FREE = (
    sa.select(_I.id, sa.func.length(_I.content).label("size"))
    .where(_I.id.between(sa.bindparam("first"), sa.bindparam("last")), _I.state == WAITS)
    .where(_I.model == sa.bindparam("of"))
    .order_by(_I.id)
    .limit(sa.bindparam("most"))
    .with_for_update(skip_locked=True)
    .subquery()
)
_SUMMED = sa.select(
    _FREE.c.id, (sa.func.sum(_FREE.c.size).over(order_by=_FREE.c.id) - _FREE.c.size).label("before")
).subquery()
_TAKE = (
    _ITEMS.update()
    .where(_I.id.in_(sa.select(_SUMMED.c.id).where(_SUMMED.c.before < sa.bindparam("bytes"))))
    .values(state=LEASED, owner=sa.bindparam("to"))
    .returning(_I.id, _I.custom_id, _I.content, _I.tries)
)
_TRIED = (
    _ITEMS.update().where(_I.id == sa.bindparam("key"), _I.state < DONE).values(tries=sa.bindparam("count"))
)
_END = (
    _ITEMS.update()
    .where(_I.id == sa.bindparam("key"))
    .values(state=sa.bindparam("end"), content=sa.bindparam("line"), owner=sa.null())
)
_HELD = (
    sa.select(*_BATCH)
    .where(_B.id.in_(sa.bindparam("names", expanding=True)))
    .order_by(_B.seq)
    .with_for_update()
)


def _lease(
    db: Connection, owner: str, wanted: Mapping[tuple[str, str], int], most_bytes: int
) -> list[tuple[str, Item]]:
    name = sa.select(_O.owner).where(_O.owner == owner)
    if db.scalar(name.with_for_update()) is None:
        return []
    of = sa.select(_B.id, _B.seq).where(_B.id.in_({batch for batch, _ in wanted}))
    seqs: dict[str, int] = dict(db.execute(of).all())
    found: list[tuple[str, Item]] = []
    for (batch, model), most in wanted.items():
        if batch not in seqs or most_bytes <= 0:
            continue
        base = seqs[batch] * MOST_NUMBER
        which = {"first": base + 1, "last": base + MOST_NUMBER - 1, "of": model, "most": most}
        rows = db.execute(_TAKE, {**which, "bytes": most_bytes, "to": owner}).all()
        for key, custom_id, body, tries in sorted(rows, key=itemgetter(0)):
            found.append((batch, Item(key - base, custom_id, model, body, tries, key)))
            most_bytes -= len(body)
    return found


def _finish(db: Connection, endings: Sequence[Ending], now_s: int, *also: str) -> int:
    """Holds the rows of all their batches, in order."""
    rows = db.execute(_HELD, {"names": sorted({*also, *(one.batch for one in endings)})}).all()
    held = {batch.id: batch for batch in map(_stored, rows)}
    first = {held[one.batch].base + one.number: one for one in reversed(endings) if one.batch in held}
    ended: dict[str, list[tuple[str, Ending]]] = {name: [] for name in held}
    kept: list[tuple[object, ...]] = []
    if first:  # written out: hundreds of parameters take longer than the statement
        keys = ",".join(map(str, first))
        left = f"SELECT id, model FROM items WHERE id IN ({keys}) AND state < 2 ORDER BY id"
        for key, model in db.exec_driver_sql(left).all():
            one = first[key]
            kept.append((2 if one.is_ok else 3, one.line, key))
            ended[one.batch].append((model, one))
    if kept:
        _many(db, _END, kept)
    for name, batch in held.items():
        _write(db, _over(db, _counted(batch, ended[name]), now_s))
    return len(kept)


def _counted(batch: StoredBatch, ended: Sequence[tuple[str, Ending]]) -> StoredBatch:
    """With these items ended."""
    if not ended:
        return batch
    left, counts = Counter(batch.left), batch.request_counts
    left.subtract(model for model, _ in ended)
    good = [len(one.line) + 1 for _, one in ended if one.is_ok]
    bad = [len(one.line) + 1 for _, one in ended if not one.is_ok]
    return _changed(
        batch,
        left=+left,
        request_counts=BatchCounts(counts.total, counts.completed + len(good), counts.failed + len(bad)),
        output_bytes=batch.output_bytes + sum(good),
        error_bytes=batch.error_bytes + sum(bad),
    )


def _over(db: Connection, batch: StoredBatch, now_s: int) -> StoredBatch:
    """With its files, if all its items have results."""
    if batch.left or batch.status not in ("in_progress", "finalizing", "cancelling"):
        return batch

    def file(results: Results, size: int) -> str | None:
        name = f"file-{batch.id.removeprefix('batch_')}-{results}"
        if size:
            _add_file(
                db,
                StoredFile(
                    id=name, client=batch.client, purpose="batch_output", filename=f"{batch.id}_{results}.jsonl",
                    bytes=size, created_at=now_s, batch=batch.id, results=results,
                ),
            )  # fmt: skip
        return name if size else None

    output, errors = file("output", batch.output_bytes), file("error", batch.error_bytes)
    batch = batch if batch.closing else _moved(batch, "finalizing", now_s)
    return _moved(batch, batch.closing or "completed", now_s, output_file_id=output, error_file_id=errors)
