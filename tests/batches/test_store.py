"""The store of files and batches keeps what its module promises, on SQLite and on PostgreSQL alike; and on a disk that
is full or damaged."""

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import sqlalchemy as sa

from router.batches import folder
from router.batches.model import (
    BatchCounts,
    BatchIssue,
    BatchIssues,
    Ending,
    FileInUse,
    Item,
    StoreDamaged,
    StoredBatch,
    StoredFile,
    StoreError,
    StoreFull,
)
from router.batches.store import Store
from tests.support.postgres import Postgres, why_none

GOLD, SILVER = "gold", "silver"
NOW_S = 1_000
Opened = Callable[[], Store]


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    if why := why_none():
        pytest.skip(why)
    with Postgres() as made:
        yield made


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    """Opens one more connection to the test's own database."""
    made: list[Store] = []
    where: Path | str = tmp_path / "batches.db"
    if request.param == "postgresql":
        where = request.getfixturevalue("server").database(f"test_{uuid4().hex}")

    def one() -> Store:
        made.append(Store(where))
        return made[-1]

    yield one
    for store in made:
        store.shut()


@pytest.fixture
def store(opened: Opened) -> Store:
    made = opened()
    made.renew("f", NOW_S + 9)
    return made


def file(name: str, client: str = GOLD, **more: Any) -> StoredFile:
    return StoredFile(
        id=name, client=client, filename=f"{name}.jsonl", **{"bytes": 7, "created_at": NOW_S, **more}
    )


def batch(name: str, client: str = GOLD, **more: Any) -> StoredBatch:
    return StoredBatch(
        id=name, client=client, endpoint="/v1/completions", input_file_id=f"file-of-{name}", completion_window="1h",
        created_at=NOW_S, expires_at=NOW_S + 3600, models=("tiny",), **more,
    )  # fmt: skip


def item(number: int, model: str = "tiny") -> Item:
    return Item(number, f"id {number}", model, b'{"prompt": "a"}')


def ending(name: str, number: int, is_ok: bool = True) -> Ending:
    return Ending(name, number, is_ok, b'{"custom_id": "id %d"}' % number)


def claimed(store: Store, name: str, client: str = GOLD, *items: Item) -> None:
    store.add_batch(batch(name, client))
    found = store.claim("f", ())
    assert found is not None
    assert found.id == name
    if items:
        assert store.accept(name, "f", items)


def running(store: Store, name: str, count: int, client: str = GOLD) -> None:
    claimed(store, name, client, *(item(number) for number in range(1, count + 1)))
    assert store.settle(name, "f", (), NOW_S + 1)


def leased(
    store: Store, owner: str, name: str, limit: int, model: str = "tiny", most: int = 1 << 20
) -> list[Item]:
    return [one for _, one in store.turn(owner, NOW_S, wanted={(name, model): limit}, most_bytes=most)]


def waiting(store: Store, name: str, model: str = "tiny") -> list[int]:
    """Numbers of items that wait; none are leased by asking."""
    found = leased(store, "f", name, 99, model)
    store.turn("f", NOW_S, released=[one.key for one in found])
    return [one.number for one in found]


def kept(store: Store, name: str = "b") -> StoredBatch:
    found = store.batch(GOLD, name)
    assert found is not None
    return found


def lines_of(store: Store, client: str, name: str | None, most_bytes: int = 1 << 20) -> list[int]:
    """The numbers in a file of results, read piece by piece."""
    assert name is not None
    found = store.file(client, name)
    assert found is not None
    content, after = b"", 0
    while True:
        piece, last = store.results(found, after, most_bytes)
        content += piece
        if last is None:
            break
        assert last > after
        after = last
    assert len(content) == found.bytes
    return [int(msgspec.json.decode(line)["custom_id"].split()[1]) for line in content.splitlines()]


# ---- files


def test_files_are_their_clients_alone(store: Store) -> None:
    store.add_file(file("file-1"))
    assert store.file(GOLD, "file-1") == file("file-1")
    assert store.file(SILVER, "file-1") is None
    assert not store.remove_file(SILVER, "file-1")
    assert store.files(SILVER, purpose=None, after=None, limit=9, newest_first=True) == []
    assert store.files(SILVER, purpose=None, after="file-1", limit=9, newest_first=True) is None
    assert (store.file_bytes(GOLD), store.file_bytes(SILVER)) == (7, 0)
    assert store.remove_file(GOLD, "file-1")
    assert store.file(GOLD, "file-1") is None
    assert not store.remove_file(GOLD, "file-1")


def test_a_file_that_is_being_validated_stays(store: Store) -> None:
    store.add_file(file("file-of-b"))
    claimed(store, "b")
    with pytest.raises(FileInUse):
        store.remove_file(GOLD, "file-of-b")
    store.settle("b", "f", (), NOW_S)
    assert store.remove_file(GOLD, "file-of-b")


# ---- batches


def test_batches_are_their_clients_alone(store: Store) -> None:
    store.add_batch(batch("b", metadata={"a": "b"}))
    assert store.batch(GOLD, "b") == batch("b", metadata={"a": "b"}, seq=1)
    assert store.batch(SILVER, "b") is None
    assert store.cancel(SILVER, "b", NOW_S) is None
    assert store.batches(SILVER, after=None, limit=9) == []
    assert store.batches(SILVER, after="b", limit=9) is None
    assert kept(store).status == "validating"


def test_a_batch_ends_with_the_last_of_its_items(store: Store) -> None:
    running(store, "b", 3)
    assert store.finish([ending("b", 2), ending("b", 1, is_ok=False)], NOW_S + 5) == 2
    found = kept(store)
    assert (found.status, found.request_counts) == ("in_progress", BatchCounts(3, 1, 1))
    assert found.output_file_id is None
    assert store.finish([ending("b", 3)], NOW_S + 9) == 1
    found = kept(store)
    assert (found.status, found.request_counts) == ("completed", BatchCounts(3, 2, 1))
    assert (found.in_progress_at, found.finalizing_at, found.completed_at) == (
        NOW_S + 1,
        NOW_S + 9,
        NOW_S + 9,
    )
    for most_bytes in (1, 1 << 20):
        assert lines_of(store, GOLD, found.output_file_id, most_bytes) == [2, 3]
        assert lines_of(store, GOLD, found.error_file_id, most_bytes) == [1]
    assert store.open_batches() == []
    assert [one.purpose for one in store.files(GOLD, purpose=None, after=None, limit=9, newest_first=True) or ()] == [
        "batch_output", "batch_output",
    ]  # fmt: skip


def test_an_item_has_the_first_result_that_it_gets(store: Store) -> None:
    running(store, "b", 2)
    assert store.finish([ending("b", 1), ending("b", 1, is_ok=False)], NOW_S) == 1
    assert store.finish([ending("b", 1, is_ok=False)], NOW_S) == 0
    assert store.finish([ending("b", 7), ending("nobody's", 1)], NOW_S) == 0
    assert store.finish([ending("b", 2), ending("b", 1, is_ok=False)], NOW_S) == 1
    assert store.finish([ending("b", 2, is_ok=False)], NOW_S) == 0
    found = kept(store)
    assert (found.status, found.request_counts, found.error_file_id) == ("completed", BatchCounts(2, 2), None)
    assert lines_of(store, GOLD, found.output_file_id) == [1, 2]


def test_what_is_wrong_with_a_batch_leaves_no_items(store: Store) -> None:
    claimed(store, "b", GOLD, item(1))
    issues = (BatchIssue("invalid_json_line", "no JSON", 2), BatchIssue("empty_file", "nothing"))
    assert store.settle("b", "f", issues, NOW_S)
    found = kept(store)
    assert (found.status, found.request_counts, found.left) == ("failed", BatchCounts(), {})
    assert found.errors == BatchIssues(issues)
    assert waiting(store, "b") == []
    assert not store.settle("b", "f", (), NOW_S)
    assert not store.settle("b", "f", issues, NOW_S)


def test_one_feeder_validates_a_batch_and_the_next_begins_anew(store: Store) -> None:
    claimed(store, "b", GOLD, item(1), item(2))
    store.renew("g", NOW_S + 90)
    assert store.claim("g", ()) is None
    store.reclaim(NOW_S + 10)
    assert not store.accept("b", "f", [item(3)])
    assert store.claim("g", (GOLD,)) is None
    found = store.claim("g", (SILVER,))
    assert found is not None
    assert store.accept("b", "g", [item(1)])
    with pytest.raises(StoreError):
        store.accept("b", "g", [item(2), item(1)])
    assert not store.settle("b", "f", (), NOW_S)
    assert store.settle("b", "g", (), NOW_S)
    store.renew("f", NOW_S)
    assert waiting(store, "b") == [1]


def test_items_are_leased_once_and_in_order(store: Store) -> None:
    claimed(store, "b", GOLD, item(1, "x"), item(2, "y"), item(3, "x"), item(4, "x"))
    store.settle("b", "f", (), NOW_S)
    running(store, "c", 1, SILVER)
    store.renew("g", NOW_S + 9)
    first = leased(store, "f", "b", 2, "x")
    assert [(one.number, one.custom_id, one.body, one.tries) for one in first] == [
        (1, "id 1", item(1).body, 0), (3, "id 3", item(3).body, 0),
    ]  # fmt: skip
    assert [one.number for one in leased(store, "g", "b", 9, "x")] == [4]
    assert store.leased() == {("b", "x"): 3}
    assert store.totals()[GOLD].running == 3
    store.turn("g", NOW_S, tries={first[0].key: 2}, released=[first[0].key])
    assert waiting(store, "b", "x") == [], "it is another's"
    store.turn("f", NOW_S, released=[first[0].key])
    [again] = leased(store, "g", "b", 9, "x")
    assert (again.number, again.tries) == (1, 2)
    store.turn("g", NOW_S, keep=[again.key])
    assert waiting(store, "b", "x") == [4]
    store.finish([ending("b", 3)], NOW_S)
    assert store.leased() == {("b", "x"): 1}
    assert [one.left for one in store.open_batches()] == [{"x": 2, "y": 1}, {"tiny": 1}]


def test_few_bytes_are_leased_at_a_time(store: Store) -> None:
    running(store, "b", 9)
    assert [one.number for one in leased(store, "f", "b", 9, most=len(item(1).body) + 1)] == [1, 2]


def test_a_feeder_that_is_late_has_lost_its_leases(store: Store) -> None:
    running(store, "b", 3)
    leased(store, "f", "b", 2)
    store.reclaim(NOW_S + 9)
    assert store.leased() == {("b", "tiny"): 2}
    store.reclaim(NOW_S + 10)
    assert store.leased() == {}
    assert leased(store, "f", "b", 2) == []
    store.renew("g", NOW_S + 30)
    assert [one.number for one in leased(store, "g", "b", 9)] == [1, 2, 3]
    assert store.finish([ending("b", 1)], NOW_S) == 1, "a late one's result counts if it is the first"
    assert store.finish([ending("b", number) for number in (1, 2, 3)], NOW_S) == 2


@pytest.mark.parametrize("what", ["lease", "finish"])
def test_many_at_once_take_each_item_once(opened: Opened, store: Store, what: str) -> None:
    """Feeders in threads of their own, each with its connection."""
    count, feeders = 120, 4
    running(store, "b", count)
    found: list[int] = []

    def feed(number: int) -> None:
        mine, name = opened(), f"f{number}"
        mine.renew(name, NOW_S + 99)
        for start in range(0, count, 10):
            if what == "lease":
                got = leased(mine, name, "b", 10)
                found.extend(one.number for one in got)
                mine.finish([ending("b", one.number) for one in got], NOW_S)
            else:
                found.append(mine.finish([ending("b", start + one) for one in range(1, 11)], NOW_S))

    threads = [threading.Thread(target=feed, args=(number,)) for number in range(feeders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sorted(found) == [*range(1, count + 1)]) if what == "lease" else (sum(found) == count)
    assert kept(store).status == "completed"
    assert len([*(store.files(GOLD, purpose=None, after=None, limit=9, newest_first=True) or ())]) == 1


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_batch_that_closes_gives_each_item_a_line(store: Store, cancelled: bool) -> None:
    running(store, "b", 5)
    store.finish([ending("b", 2)], NOW_S)
    if cancelled:
        found = store.cancel(GOLD, "b", NOW_S + 1)
        assert found is not None
        assert found.status == "cancelling"
    leased(store, "f", "b", 1)
    assert not store.close("b", NOW_S + 2, 3)
    assert store.finish([ending("b", 5)], NOW_S + 3) == 1  # one that was under way
    assert store.close("b", NOW_S + 3, 3)
    assert store.close("b", NOW_S + 4, 3)
    found = kept(store)
    assert (found.status, found.request_counts) == (
        "cancelled" if cancelled else "expired",
        BatchCounts(5, 2, 3),
    )
    assert found.output_file_id is not None
    assert lines_of(store, GOLD, found.output_file_id) == [2, 5]
    errors = store.file(GOLD, found.error_file_id or "")
    assert errors is not None
    content, _ = store.results(errors, 0, 1 << 20)
    code = "batch_cancelled" if cancelled else "batch_expired"
    assert [msgspec.json.decode(line)["error"]["code"] for line in content.splitlines()] == [code] * 3


def test_what_is_over_is_not_cancelled_and_what_is_cancelled_is_not_validated(store: Store) -> None:
    running(store, "b", 1)
    store.finish([ending("b", 1)], NOW_S)
    found = store.cancel(GOLD, "b", NOW_S)
    assert found is not None
    assert found.status == "completed"
    store.add_batch(batch("c"))
    store.cancel(GOLD, "c", NOW_S)
    assert store.claim("f", ()) is None
    for refused in (
        store.accept("c", "f", [item(1)]), store.settle("c", "f", (), NOW_S),
    ):  # fmt: skip
        assert not refused
    assert store.close("c", NOW_S, 9)
    found = kept(store, "c")
    assert (found.status, found.error_file_id) == ("cancelled", None)


def test_what_is_old_is_forgotten_and_what_runs_is_not(store: Store) -> None:
    store.add_file(file("file-old", expires_at=NOW_S + 5))
    store.add_file(file("file-of-read", expires_at=NOW_S + 5))
    store.add_file(file("file-new", expires_at=NOW_S + 50))
    running(store, "b", 1)
    running(store, "c", 1)
    store.add_batch(batch("read"))
    store.finish([ending("b", 1)], NOW_S + 2)
    assert store.sweep(NOW_S + 5, NOW_S + 2) == {"file-of-read", "file-new"}
    assert store.batch(GOLD, "b") is not None
    store.sweep(NOW_S + 5, NOW_S + 3)
    assert store.batch(GOLD, "b") is None
    assert [one.id for one in store.open_batches()] == ["c", "read"]
    assert [one.purpose for one in store.files(GOLD, purpose=None, after=None, limit=9, newest_first=True) or ()] == [
        "batch", "batch",
    ]  # fmt: skip


def test_a_file_of_results_goes_with_its_results(store: Store) -> None:
    running(store, "b", 2)
    store.finish([ending("b", 1), ending("b", 2, is_ok=False)], NOW_S)
    found = kept(store)
    assert found.output_file_id is not None
    assert store.remove_file(GOLD, found.output_file_id)
    assert store.finish([ending("b", 1)], NOW_S) == 0
    assert lines_of(store, GOLD, found.error_file_id) == [2]


# ---- disks


@pytest.mark.slow
def test_what_was_committed_is_there_after_a_kill(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from router.batches.store import Store
from tests.batches.test_store import ending, running
store = Store(Path({str(tmp_path / "a.db")!r}))
store.renew("f", 1e9)
running(store, "b", 500)
store.finish([ending("b", number) for number in range(1, 101)], 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    store = Store(tmp_path / "a.db")
    store.check()
    assert kept(store).left == {"tiny": 400}
    assert waiting(store, "b")[0] == 101
    store.shut()


@pytest.mark.slow
def test_a_server_that_lost_its_power_has_what_was_committed(server: Postgres, tmp_path: Path) -> None:
    store = Store(server.database(f"test_{uuid4().hex}"))
    store.renew("f", NOW_S + 9)
    running(store, "b", 500)
    store.finish([ending("b", number) for number in range(1, 101)], NOW_S)
    server.stop()
    with pytest.raises(StoreError, match="refused"):
        store.finish([ending("b", 101)], NOW_S)
    server.start()
    assert kept(store).left == {"tiny": 400}
    store.shut()


def test_a_full_disk_accepts_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.db")
    store.renew("f", NOW_S + 9)
    claimed(store, "b", GOLD, item(1))
    pages = limit_pages(store, 4)
    large = [msgspec.structs.replace(item(number), body=b"x" * 5000) for number in range(2, 60)]
    with pytest.raises(StoreFull):
        store.accept("b", "f", large)
    limit_pages(store, pages + 3000)
    assert kept(store).request_counts.total == 1
    assert store.accept("b", "f", large)
    store.check()
    store.shut()


def limit_pages(store: Store, more: int) -> int:
    """The database has room for so many more pages; how many it has."""
    with store._db.connect() as db:
        pages = int(db.exec_driver_sql("PRAGMA page_count").scalar() or 0)
    store._db.dispose()
    sa.event.listen(store._db, "connect", lambda db, _: db.execute(f"PRAGMA max_page_count = {pages + more}"))
    return pages


def test_what_is_no_database_is_said_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(random.Random(1).randbytes(10_000))
    with pytest.raises(StoreDamaged) as caught:
        Store(path)
    assert "\n" not in str(caught.value)
    assert "a.db" in str(caught.value)


@pytest.mark.parametrize(
    ("batches", "uploads", "why"),
    [
        ("postgresql://me:secret@127.0.0.1:1/x", "{}", "refused"),
        ("postgresql://me:secret@127.0.0.1:port/x", "{}", "no URL"),
        ("postgresql://127.0.0.1/x", None, "needs --batch-files"),
        ("mysql://127.0.0.1/x", "{}", "a folder, or postgresql"),
        ("/dev/null/x", None, "Not a directory"),
    ],
)
def test_what_cannot_be_had_is_said_in_a_line_without_its_password(
    tmp_path: Path, batches: str, uploads: str | None, why: str
) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        folder.check(batches, uploads and uploads.format(tmp_path))
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_damaged_page_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    store = Store(path)
    store.renew("f", NOW_S + 9)
    running(store, "b", 2000)
    store.shut()
    content = bytearray(path.read_bytes())
    for at in range(len(content) // 2, len(content) // 2 + 9000):
        content[at] = 0xA5
    path.write_bytes(bytes(content))
    store = Store(path)
    with pytest.raises(StoreDamaged):
        store.check()
    store.shut()


@pytest.mark.parametrize("change", ["DROP TABLE format", "UPDATE format SET version = 99"])
def test_another_format_is_refused(tmp_path: Path, change: str) -> None:
    store = Store(tmp_path / "a.db")
    with store._writing.begin() as db:
        db.exec_driver_sql(change)
    store.shut()
    with pytest.raises(StoreDamaged, match=r"older version|format is 99"):
        Store(tmp_path / "a.db")
