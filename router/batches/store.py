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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection, make_url

from router.batches.changes import cancelled, closed, closing, ended, failed, is_ending, moved
from router.batches.model import (
    MOST_NUMBER,
    OPEN,
    ClientTotals,
    Ending,
    FileInUse,
    Issue,
    Item,
    Part,
    Purpose,
    StoreDamaged,
    StoredBatch,
    StoredFile,
    StoreError,
    StoreFull,
)

FORMAT = 3
"""Of the tables. 1 and 2 were of SQLite alone."""
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
    "files", _seq(), sa.Column("expires_s", sa.BigInteger), sa.UniqueConstraint("id"), sa.Index("files_of", "client"),
    texts="id client purpose filename batch results", numbers="bytes created_s",
)  # fmt: skip
_BATCHES = _table(
    "batches", _seq(), sa.Column("about", sa.LargeBinary, nullable=False),
    sa.Column("owner", sa.Text),  # the feeder that validates it
    sa.UniqueConstraint("id"), sa.Index("batches_of", "client"), sa.Index("batches_in", "status"),
    texts="id client status", numbers="total completed failed output_bytes error_bytes",
)  # fmt: skip
_ITEMS = _table(
    "items",
    sa.Column("id", _ID, primary_key=True, autoincrement=False),  # above that of its batch, see `_base`
    sa.Column("content", sa.LargeBinary, nullable=False),
    sa.Column("owner", sa.Text),  # the feeder that leases it
    _when(WAITS, "items_waiting", "model", "id"), _when(LEASED, "items_leased", "owner", "model"),
    texts="model custom_id", numbers="state tries",
)  # fmt: skip
_PARTS = _table("parts", sa.PrimaryKeyConstraint("batch", "model"), texts="model", numbers="batch left")
_FEEDERS = _table("feeders", sa.Column("owner", sa.Text, primary_key=True), sa.Column("until_s", sa.Double))
_F, _B, _I, _P, _O = (one.c for one in (_FILES, _BATCHES, _ITEMS, _PARTS, _FEEDERS))

_FILE = [_F[name] for name in StoredFile.__struct_fields__]
_NO_COUNTS = dict.fromkeys(("total", "completed", "failed", "output_bytes", "error_bytes"), 0)
_BATCH = [_B[name] for name in ("seq", "status", "total", "completed", "failed", "about")]


class Store:
    """Of a SQLite file that is made if it is not there, or of a database at `postgresql://…`. Raises `StoreError`.
    Whoever names a client sees only what is that client's. Threads may share it."""

    def __init__(self, where: Path | str) -> None:
        self._path = where if isinstance(where, Path) else None
        if self._path is not None:
            url, options = f"sqlite:///{where}", {"timeout": BUSY_S, "check_same_thread": False}
            self.name, style = str(where), "named"
        else:
            url, options = str(where).replace("postgresql:", "postgresql+psycopg:", 1), {"connect_timeout": 5}
            style = "pyformat"
            try:
                self.name = make_url(url).render_as_string().replace("+psycopg", "", 1)
            except (sa.exc.ArgumentError, ValueError):
                raise StoreError("this is no URL of a database") from None
        self._db = sa.create_engine(
            url, connect_args=options, paramstyle=style, pool_pre_ping=style != "named"
        )
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
                of = _of(_base(db, file.batch))
                db.execute(_ITEMS.delete().where(of, _I.state == _kind(file)))
            db.execute(_FILES.delete().where(_F.id == name))
            return True

    def results(self, file: StoredFile, after: int, most_bytes: int) -> tuple[bytes, int | None]:
        """Lines of a file of results, behind that of item `after`, in the order of items: some, not far above
        `most_bytes` together, and the number of the last; None: these are the last."""
        with self._reading() as db:
            base = _base(db, file.batch)
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
        named = {name: getattr(batch, name) for name in ("id", "client", "status")}
        with self._commit() as db:
            db.execute(_BATCHES.insert().values(**named, about=msgspec.json.encode(batch), **_NO_COUNTS))

    def batch(self, client: str, name: str) -> StoredBatch | None:
        """The batch of this id."""
        with self._reading() as db:
            return _batch(db, name, client)

    def batches(self, client: str, *, after: str | None, limit: int) -> list[StoredBatch] | None:
        """At most `limit`, the newest first, behind the one of id `after`; None if there is no such batch."""
        with self._reading() as db:
            found = _page(db, _BATCHES, _BATCH, client, after, newest_first=True)
            return None if found is None else [_stored(row) for row in db.execute(found.limit(limit))]

    def cancel(self, client: str, name: str, now_s: int) -> StoredBatch | None:
        """The batch as it is then: cancelling, unless it was over; None if there is none."""
        with self._commit() as db:
            batch = _batch(db, name, client, lock=True)
            return None if batch is None else _write(db, cancelled(batch, now_s))

    def open_batches(self) -> list[StoredBatch]:
        """Of all clients: those that are not over, the oldest first."""
        with self._reading() as db:
            return _open(db)

    def totals(self) -> Mapping[str, ClientTotals]:
        """By client."""
        counts = (_B.total - _B.completed - _B.failed, _B.completed, _B.failed)
        sums = sa.select(_B.client, *map(sa.func.sum, counts)).where(_B.status != "failed")
        leases = sa.select(_B.client, sa.func.count()).join(_ITEMS, _B.seq == _I.id // MOST_NUMBER)
        leases = leases.where(_I.state == LEASED).group_by(_B.client)
        with self._reading() as db:
            running: dict[str, int] = dict(db.execute(leases).all())
            return {
                name: ClientTotals(int(left), int(completed), int(failed), running.get(name, 0))
                for name, left, completed, failed in db.execute(sums.group_by(_B.client))
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
            _forget_items(db, _base(db, name))
            db.execute(_BATCHES.update().where(_B.id == name).values(owner=owner))
            return _batch(db, name)

    def accept(self, batch: str, owner: str, items: Sequence[Item]) -> bool:
        """Further items of a batch that `owner` validates. False, and nothing is kept, if it does not any more."""
        with self._commit() as db:
            if not _is_validating(db, batch, owner):
                return False
            base = _base(db, batch)
            names = ("id", "model", "custom_id", "content")
            rows = ((base + one.number, one.model, one.custom_id, one.body) for one in items)
            _many(db, _NEW, [dict(zip(names, row, strict=True)) for row in rows])
            for model, count in Counter(one.model for one in items).items():
                if not _add_to_part(db, base, model, count):
                    db.execute(_PARTS.insert().values(batch=base // MOST_NUMBER, model=model, left=count))
            total = _B.total + len(items)
            db.execute(_BATCHES.update().where(_B.id == batch).values(total=total))
            return True

    def start(self, batch: str, owner: str, now_s: int) -> bool:
        """All its items are accepted, and may be answered. False if `owner` does not validate it any more."""
        with self._commit() as db:
            if not _is_validating(db, batch, owner):
                return False
            _write(db, moved(_known(db, batch), "in_progress", now_s))
            return True

    def fail(self, batch: str, owner: str, issues: Sequence[Issue], now_s: int) -> bool:
        """It was validated, and nothing of it is run. False if `owner` does not validate it any more."""
        with self._commit() as db:
            if not _is_validating(db, batch, owner):
                return False
            _forget_items(db, _base(db, batch))
            _write(db, failed(_known(db, batch), issues, now_s))
            return True

    # -- leasing

    def parts(self) -> list[Part]:
        """Of all batches that are in progress: what is left, and how much of that is leased, by batch and model."""
        of = _I.id // MOST_NUMBER
        leases = sa.select(of, _I.model, sa.func.count()).where(_I.state == LEASED)
        left = sa.select(_B.id, _P.batch, _P.model, _P.left).join(_PARTS, _P.batch == _B.seq)
        running = left.where(_B.status == "in_progress", _P.left > 0)
        with self._reading() as db:
            leased = {
                (batch, model): count for batch, model, count in db.execute(leases.group_by(of, _I.model))
            }
            return [
                Part(name, model, count, leased.get((batch, model), 0))
                for name, batch, model, count in db.execute(running.order_by(_B.seq, _P.model))
            ]

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
                _many(db, _TRIED, [{"key": key, "count": count} for key, count in sorted(tries.items())])
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
            found = _batch(db, batch, lock=True)
            if found is None or found.is_over:
                return True
            found = _write(db, closing(found, now_s))
            base = _base(db, batch)
            left = sa.select(_I.id - base, _I.custom_id).where(_of(base), _I.state < DONE)
            rows = db.execute(left.order_by(_I.id).limit(most)).all()
            _finish(db, [closed(found, *row) for row in rows], now_s, batch)
            return _known(db, batch).is_over

    # -- keeping house

    def sweep(self, now_s: int, ended_before_s: int) -> list[str]:
        """Forgets files that have expired and are not being read, and batches that were over before `ended_before_s`,
        with their results. The files that were uploaded and are gone, by id."""
        with self._commit() as db:
            busy, old = _being_read(db), (_F.expires_s <= now_s, _F.purpose == "batch")
            gone = [name for name in db.scalars(sa.select(_F.id).where(*old)) if name not in busy]
            db.execute(_FILES.delete().where(_F.id.in_(gone)))
            rows = db.execute(sa.select(*_BATCH).where(_B.status.not_in(OPEN))).all()
        for batch in map(_stored, rows):
            if max(batch.times.values(), default=batch.created_s) < ended_before_s:
                with self._commit() as db:  # one at a time: others want to write, too
                    if _batch(db, batch.id, lock=True) is not None:
                        _forget_items(db, _base(db, batch.id))
                        db.execute(_FILES.delete().where(_F.batch == batch.id))
                        db.execute(_BATCHES.delete().where(_B.id == batch.id))
        return gone

    def uploaded(self) -> set[str]:
        """The ids of all files that were uploaded."""
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
        with self._errors(self.name), self._db.begin() as db:
            yield db

    @contextmanager
    def _commit(self) -> Iterator[Connection]:
        """One transaction: whatever is raised inside undoes it. At its end it is on the disk."""
        with self._errors(self.name), self._writing.begin() as db:
            yield db

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """The database's errors as the module's head has them."""
        try:
            yield
        except (sa.exc.SQLAlchemyError, sqlite3.Error) as error:
            found = getattr(error, "orig", None) or error
            raise _kind_of(found)(f"{name}: {str(found).strip().partition(chr(10))[0]}") from None


def _connected(db: sqlite3.Connection, _: object) -> None:
    db.isolation_level = None  # transactions begin in `_begin`
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = OFF"):
        db.execute(f"PRAGMA {pragma}")


def _begin(db: Connection) -> None:
    db.exec_driver_sql("BEGIN IMMEDIATE" if db.get_execution_options().get("writes") else "BEGIN")


_FULL = (sqlite3.SQLITE_FULL, "53100")
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, "XX001", "XX002")


def _kind_of(error: BaseException) -> Callable[[str], StoreError]:
    code = getattr(error, "sqlstate", None) or getattr(error, "sqlite_errorcode", 0) & 0xFF
    return StoreFull if code in _FULL else StoreDamaged if code in _DAMAGED else StoreError


def _many(db: Connection, statement: sa.UpdateBase, rows: Sequence[Mapping[str, object]]) -> None:
    """By the driver itself, which takes the values as they are: half the time of a commit of hundreds."""
    db.exec_driver_sql(str(statement.compile(dialect=db.dialect)), rows)


def _page(
    db: Connection, table: sa.Table, columns: list[Any], client: str, after: str | None, *, newest_first: bool
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
    return {batch.input_file for batch in _open(db) if batch.status == "validating"}


def _open(db: Connection) -> list[StoredBatch]:
    rows = db.execute(sa.select(*_BATCH).where(_B.status.in_(OPEN)).order_by(_B.seq))
    return [_stored(row) for row in rows]


def _batch(db: Connection, name: str, client: str | None = None, *, lock: bool = False) -> StoredBatch | None:
    found = sa.select(*_BATCH).where(_B.id == name)
    if client is not None:
        found = found.where(_B.client == client)
    row = db.execute(found.with_for_update() if lock else found).first()
    return None if row is None else _stored(row)


def _stored(row: Sequence[Any]) -> StoredBatch:
    _, status, total, completed, failed, about = row
    found = msgspec.json.decode(about, type=StoredBatch)
    return msgspec.structs.replace(found, status=status, total=total, completed=completed, failed=failed)


def _known(db: Connection, name: str) -> StoredBatch:
    found = _batch(db, name)
    if found is None:
        raise StoreError(f"there is no batch {name}")
    return found


def _base(db: Connection, name: str) -> int:
    """The items of a batch have the ids above it."""
    seq = db.scalar(sa.select(_B.seq).where(_B.id == name))
    if seq is None:
        raise StoreError(f"there is no batch {name}")
    return int(seq) * MOST_NUMBER


def _of(base: int) -> sa.ColumnElement[bool]:
    return _I.id.between(base + 1, base + MOST_NUMBER - 1)


def _one_of(keys: Collection[int]) -> sa.ColumnElement[bool]:
    """Written out: hundreds of parameters take longer than the statement. No keys are NULL, which equals nothing."""
    return _I.id.op("IN", is_comparison=True)(sa.literal_column(f"({','.join(map(str, keys)) or 'NULL'})"))


def _is_validating(db: Connection, name: str, owner: str) -> bool:
    mine = sa.select(_B.seq).where(_B.id == name, _B.status == "validating", _B.owner == owner)
    return db.scalar(mine.with_for_update()) is not None


def _write(db: Connection, batch: StoredBatch) -> StoredBatch:
    """All but its counts. What is not being validated belongs to no feeder."""
    about = msgspec.json.encode(batch)
    db.execute(
        _BATCHES.update().where(_B.id == batch.id).values(status=batch.status, about=about, owner=None)
    )
    return batch


def _forget_items(db: Connection, base: int) -> None:
    db.execute(_ITEMS.delete().where(_of(base)))
    db.execute(_PARTS.delete().where(_P.batch == base // MOST_NUMBER))
    db.execute(_BATCHES.update().where(_B.seq == base // MOST_NUMBER).values(_NO_COUNTS))


def _add_to_part(db: Connection, base: int, model: str, more: int) -> bool:
    """Whether there is such a part."""
    part = _PARTS.update().where(_P.batch == base // MOST_NUMBER, _P.model == model)
    return bool(db.execute(part.values(left=_P.left + more)).rowcount)


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
_LESS = (
    _PARTS.update()
    .where(_P.batch == sa.bindparam("seq"), _P.model == sa.bindparam("of"))
    .values(left=_P.left - sa.bindparam("count"))
)
_ENDED = ("failed", "completed", "error_bytes", "output_bytes")
_MORE = (
    _BATCHES.update()
    .where(_B.seq == sa.bindparam("of"))
    .values({name: _B[name] + sa.bindparam(f"{name}_more") for name in _ENDED})
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
    names = sorted({*also, *(one.batch for one in endings)})
    held = sa.select(_B.id, _B.seq).where(_B.id.in_(names)).order_by(_B.seq)
    seqs: dict[str, int] = dict(db.execute(held.with_for_update()).all())
    first = {
        seqs[one.batch] * MOST_NUMBER + one.number: one for one in reversed(endings) if one.batch in seqs
    }
    rows: list[dict[str, object]] = []
    parts, more = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    left = sa.select(_I.id, _I.model).where(_one_of(first), _I.state < DONE)
    for key, model in db.execute(left.order_by(_I.id)).all():
        one, seq = first[key], key // MOST_NUMBER
        rows.append({"key": key, "end": 2 if one.is_ok else 3, "line": one.line})
        parts[seq, model] += 1
        more[seq, _ENDED[one.is_ok]] += 1
        more[seq, _ENDED[one.is_ok + 2]] += len(one.line) + 1
    if rows:
        _many(db, _END, rows)
        db.execute(_LESS, [{"seq": seq, "of": model, "count": parts[seq, model]} for seq, model in parts])
        changed = {seq: {f"{name}_more": more[seq, name] for name in _ENDED} for seq, _ in parts}
        db.execute(_MORE, [{"of": seq, **counts} for seq, counts in changed.items()])
    of = sa.select(*_BATCH, _B.output_bytes, _B.error_bytes).where(_B.id.in_(names))
    for *row, output_bytes, error_bytes in db.execute(of).all():
        if is_ending(batch := _stored(row)):
            over, files = ended(batch, output_bytes, error_bytes, now_s)
            for file in files:
                _add_file(db, file)
            _write(db, over)
    return len(rows)
