"""Every store of files and batches keeps the contract; and SQLite's keeps it on a disk that is full or damaged."""

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from router.batches import amqp
from router.batches.amqp import AmqpStore
from router.batches.contract import FileInUse, Store, StoreDamaged, StoreError, StoreFull
from router.batches.journal import Change, Journal, Logged
from router.batches.model import Ending, Issue, Item, StoredBatch, StoredFile
from router.batches.sqlite import SqliteStore
from tests.support.broker import Broker, broker_url, why_none, why_none_to_kill
from tests.support.budget import examples
from tests.support.memory_store import MemoryStore
from tests.support.ports import free_port


def of_broker(folder: Path) -> Store:
    return AmqpStore(folder / "batches.db", os.environ[URL], f"test-{uuid4().hex}")


class LocalLog(Logged):
    """A log that nobody else has: each change is the next message."""

    def _say(self, method: str, *arguments: Any) -> Any:
        change = Change(uuid4().hex, method, arguments)
        return self.outcome(self.apply(self.next, msgspec.msgpack.encode(change)))


STORES: dict[str, Callable[[Path], Store]] = {
    "sqlite": lambda folder: SqliteStore(folder / "batches.db"),
    "journal": lambda folder: LocalLog(folder / "batches.db"),
    "amqp": of_broker,
}
URL = "SGLANG_FAIR_TEST_BROKER"
"""Of the broker of this run, once it is there."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if why := why_none():
        pytest.skip(why)
    with broker_url(tmp_path_factory.mktemp("broker")) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv(URL, url)
        yield url


GOLD, SILVER = "gold", "silver"
NOW_S = 1_000


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "amqp")) for name in STORES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "amqp":
        request.getfixturevalue("broker")
    made = STORES[request.param](tmp_path)
    yield made
    made.shut()


def file(name: str, client: str = GOLD, **more: Any) -> StoredFile:
    return StoredFile(
        id=name, client=client, filename=f"{name}.jsonl", **{"bytes": 7, "created_s": NOW_S, **more}
    )


def batch(name: str, client: str = GOLD, **more: Any) -> StoredBatch:
    return StoredBatch(
        id=name, client=client, endpoint="/v1/completions", input_file=f"file-of-{name}", window="1h",
        created_s=NOW_S, expires_s=NOW_S + 3600, models=("tiny",), **more,
    )  # fmt: skip


def item(number: int, model: str = "tiny") -> Item:
    return Item(number, f"id {number}", model, b'{"prompt": "a"}', 10, 5)


def ending(name: str, number: int, is_ok: bool = True) -> Ending:
    return Ending(name, number, is_ok, b'{"custom_id": "id %d"}' % number)


def running(store: Store, name: str, count: int, client: str = GOLD) -> None:
    store.add_batch(batch(name, client))
    assert store.accept(name, [item(number) for number in range(1, count + 1)])
    assert store.start(name, NOW_S + 1)


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


@pytest.mark.parametrize("newest_first", [True, False])
def test_files_are_listed_in_pages(store: Store, newest_first: bool) -> None:
    names = [f"file-{index}" for index in range(7)]
    for name in names:
        store.add_file(file(name))
    expected = names[::-1] if newest_first else names
    found, after = [], None
    while page := store.files(GOLD, purpose="batch", after=after, limit=3, newest_first=newest_first):
        found += [one.id for one in page]
        after = found[-1]
    assert found == expected
    assert store.files(GOLD, purpose="batch_output", after=None, limit=3, newest_first=newest_first) == []


def test_a_file_that_is_being_validated_stays(store: Store) -> None:
    store.add_file(file("file-of-b"))
    store.add_batch(batch("b"))
    with pytest.raises(FileInUse):
        store.remove_file(GOLD, "file-of-b")
    store.start("b", NOW_S)
    assert store.remove_file(GOLD, "file-of-b")


# ---- batches


def test_batches_are_their_clients_alone(store: Store) -> None:
    store.add_batch(batch("b", metadata={"a": "b"}))
    assert store.batch(GOLD, "b") == batch("b", metadata={"a": "b"})
    assert store.batch(SILVER, "b") is None
    assert store.cancel(SILVER, "b", NOW_S) is None
    assert store.batches(SILVER, after=None, limit=9) == []
    assert store.batches(SILVER, after="b", limit=9) is None
    assert kept(store).status == "validating"


def test_a_batch_ends_with_the_last_of_its_items(store: Store) -> None:
    running(store, "b", 3)
    assert store.finish([ending("b", 2), ending("b", 1, is_ok=False)], NOW_S + 5) == 2
    found = kept(store)
    assert (found.status, found.total, found.completed, found.failed) == ("in_progress", 3, 1, 1)
    assert found.output_file is None
    assert store.finish([ending("b", 3)], NOW_S + 9) == 1
    found = kept(store)
    assert (found.status, found.completed, found.failed) == ("completed", 2, 1)
    assert found.times == {"in_progress": NOW_S + 1, "finalizing": NOW_S + 9, "completed": NOW_S + 9}
    for most_bytes in (1, 1 << 20):
        assert lines_of(store, GOLD, found.output_file, most_bytes) == [2, 3]
        assert lines_of(store, GOLD, found.error_file, most_bytes) == [1]
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
    assert (found.status, found.completed, found.failed, found.error_file) == ("completed", 2, 0, None)
    assert lines_of(store, GOLD, found.output_file) == [1, 2]


def test_nothing_is_run_before_all_is_accepted(store: Store) -> None:
    store.add_batch(batch("b"))
    assert store.accept("b", [item(1)])
    assert store.parts() == []
    assert store.start("b", NOW_S)
    assert not store.start("b", NOW_S)
    assert not store.accept("b", [item(2)])
    assert [(part.left, part.prompt_tokens, part.output_tokens) for part in store.parts()] == [(1, 10, 5)]


def test_what_is_wrong_with_a_batch_leaves_no_items(store: Store) -> None:
    store.add_batch(batch("b"))
    store.accept("b", [item(1)])
    issues = (Issue("invalid_json_line", "no JSON", 2), Issue("empty_file", "nothing"))
    assert store.fail("b", issues, NOW_S)
    found = kept(store)
    assert (found.status, found.total, found.issues) == ("failed", 0, issues)
    assert store.items("b", "tiny", 0, 9) == []
    assert not store.start("b", NOW_S)
    assert not store.fail("b", issues, NOW_S)


def test_validation_begins_anew(store: Store) -> None:
    store.add_batch(batch("b"))
    store.accept("b", [item(1), item(2)])
    store.forget_items("b")
    assert store.accept("b", [item(1)])
    with pytest.raises(StoreError):
        store.accept("b", [item(2), item(1)])
    store.start("b", NOW_S)
    assert store.items("b", "tiny", 0, 9) == [item(1)]


def test_parts_are_by_model_and_items_in_order(store: Store) -> None:
    store.add_batch(batch("b"))
    store.accept("b", [item(1, "x"), item(2, "y"), item(3, "x"), item(4, "x")])
    store.start("b", NOW_S)
    running(store, "c", 1, SILVER)
    assert [(part.batch, part.model, part.left) for part in store.parts()] == [
        ("b", "x", 3), ("b", "y", 1), ("c", "tiny", 1),
    ]  # fmt: skip
    assert [one.number for one in store.items("b", "x", 0, 2)] == [1, 3]
    assert [one.number for one in store.items("b", "x", 1, 9)] == [3, 4]
    store.finish([ending("b", 3)], NOW_S)
    assert [one.number for one in store.items("b", "x", 0, 9)] == [1, 4]
    assert [(part.batch, part.left, part.prompt_tokens) for part in store.parts()] == [
        ("b", 2, 20), ("b", 1, 10), ("c", 1, 10),
    ]  # fmt: skip


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_batch_that_closes_gives_each_item_a_line(store: Store, cancelled: bool) -> None:
    running(store, "b", 5)
    store.finish([ending("b", 2)], NOW_S)
    if cancelled:
        found = store.cancel(GOLD, "b", NOW_S + 1)
        assert found is not None
        assert found.status == "cancelling"
    assert store.parts() == [] or not cancelled
    assert not store.close("b", NOW_S + 2, 3)
    assert store.finish([ending("b", 5)], NOW_S + 3) == 1  # one that was under way
    assert store.close("b", NOW_S + 3, 3)
    assert store.close("b", NOW_S + 4, 3)
    found = kept(store)
    assert (found.status, found.completed, found.failed) == ("cancelled" if cancelled else "expired", 2, 3)
    assert found.output_file is not None
    assert lines_of(store, GOLD, found.output_file) == [2, 5]
    errors = store.file(GOLD, found.error_file or "")
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
    assert not store.accept("c", [item(1)])
    assert not store.start("c", NOW_S)
    assert not store.fail("c", (), NOW_S)
    assert store.close("c", NOW_S, 9)
    found = kept(store, "c")
    assert (found.status, found.error_file) == ("cancelled", None)


def test_what_is_old_is_forgotten_and_what_runs_is_not(store: Store) -> None:
    store.add_file(file("file-old", expires_s=NOW_S + 5))
    store.add_file(file("file-of-read", expires_s=NOW_S + 5))
    store.add_file(file("file-new", expires_s=NOW_S + 50))
    store.add_batch(batch("read"))
    running(store, "b", 1)
    running(store, "c", 1)
    store.finish([ending("b", 1)], NOW_S + 2)
    assert store.sweep(NOW_S + 5, NOW_S + 2) == ["file-old"]
    assert store.batch(GOLD, "b") is not None
    assert store.uploaded() == {"file-of-read", "file-new"}
    assert store.sweep(NOW_S + 5, NOW_S + 3) == []
    assert store.batch(GOLD, "b") is None
    assert [one.id for one in store.open_batches()] == ["read", "c"]
    assert [one.purpose for one in store.files(GOLD, purpose=None, after=None, limit=9, newest_first=True) or ()] == [
        "batch", "batch",
    ]  # fmt: skip


def test_a_file_of_results_goes_with_its_results(store: Store) -> None:
    running(store, "b", 2)
    store.finish([ending("b", 1), ending("b", 2, is_ok=False)], NOW_S)
    found = kept(store)
    assert found.output_file is not None
    assert store.remove_file(GOLD, found.output_file)
    assert store.finish([ending("b", 1)], NOW_S) == 0
    assert lines_of(store, GOLD, found.error_file) == [2]


class TwoStores(RuleBasedStateMachine):
    """Whatever is asked of it, in whatever order, a store is as the one in memory."""

    folder: Path
    kind = "sqlite"
    made = 0

    def __init__(self) -> None:
        super().__init__()
        TwoStores.made += 1
        self.path = self.folder / f"{TwoStores.made}.db"
        self.stream = f"test-{uuid4().hex}"
        self.sqlite: Store = self.opened()
        self.memory: Store = MemoryStore()
        self.now_s = NOW_S
        self.names: list[str] = []

    def teardown(self) -> None:
        self.sqlite.shut()

    def opened(self) -> Store:
        made = {
            "sqlite": lambda: SqliteStore(self.path),
            "journal": lambda: LocalLog(self.path),
            "amqp": lambda: AmqpStore(self.path, os.environ[URL], self.stream),
        }[self.kind]()
        made._db.execute("PRAGMA synchronous = OFF")  # nobody pulls the plug here
        return made

    def both(self, ask: Callable[[Store], Any]) -> Any:
        """What both answer, alike."""
        answers = []
        for one in (self.sqlite, self.memory):
            try:
                answers.append(ask(one))
            except StoreError as error:
                answers.append(type(error))
        assert answers[0] == answers[1]
        return answers[0]

    @rule()
    def time_passes(self) -> None:
        self.now_s += 1

    @rule(client=st.sampled_from([GOLD, SILVER]))
    def upload_and_add(self, client: str) -> None:
        name = f"b{len(self.names)}"
        self.names.append(name)
        self.both(lambda store: store.add_file(file(f"file-of-{name}", client)))
        self.both(lambda store: store.add_batch(batch(name, client)))

    @rule(data=st.data(), first=st.integers(1, 4), count=st.integers(0, 4))
    def accept(self, data: st.DataObject, first: int, count: int) -> None:
        items = [item(number, f"m{number % 2}") for number in range(first, first + count)]
        name = self._one(data)
        self.both(lambda store: store.accept(name, items))

    @rule(
        data=st.data(),
        what=st.sampled_from(["start", "fail", "cancel", "close", "forget", "remove", "sweep", "try"]),
    )
    def move(self, data: st.DataObject, what: str) -> None:
        name, now_s = self._one(data), self.now_s
        moves: dict[str, Callable[[Store], Any]] = {
            "start": lambda store: store.start(name, now_s),
            "fail": lambda store: store.fail(name, (Issue("a", "b", 1),), now_s),
            "cancel": lambda store: store.cancel(GOLD, name, now_s),
            "close": lambda store: store.close(name, now_s, 2) if self._is_there(store, name) else None,
            "forget": lambda store: store.forget_items(name) if self._validates(store, name) else None,
            "try": lambda store: store.tried(name, {1: 2, 3: 1}) if self._is_there(store, name) else None,
            "remove": lambda store: store.remove_file(GOLD, f"file-of-{name}"),
            "sweep": lambda store: store.sweep(now_s, now_s - 3),
        }
        self.both(moves[what])

    @rule(data=st.data(), numbers=st.lists(st.tuples(st.integers(1, 8), st.booleans()), max_size=5))
    def finish(self, data: st.DataObject, numbers: list[tuple[int, bool]]) -> None:
        name = self._one(data)
        endings = [ending(name, number, is_ok) for number, is_ok in numbers]
        self.both(lambda store: store.finish(endings, self.now_s))

    @rule()
    def open_again(self) -> None:
        """As after a death."""
        self.sqlite.shut()
        self.sqlite = self.opened()

    @invariant()
    def both_are_alike(self) -> None:
        self.both(lambda store: store.parts())
        self.both(lambda store: store.open_batches())
        self.both(lambda store: dict(store.totals()))
        for client in (GOLD, SILVER):
            self.both(lambda store, client=client: store.batches(client, after=None, limit=99))
            found = self.both(
                lambda store, client=client: store.files(
                    client, purpose=None, after=None, limit=99, newest_first=False
                )
            )
            for one in found:
                if one.results:
                    content, rest = self.both(lambda store, one=one: store.results(one, 0, 1 << 20))
                    assert rest is None
                    assert len(content) == one.bytes

    def _one(self, data: st.DataObject) -> str:
        return str(data.draw(st.sampled_from(self.names or ["none"])))

    def _is_there(self, store: Store, name: str) -> bool:
        return any(store.batch(client, name) is not None for client in (GOLD, SILVER))

    def _validates(self, store: Store, name: str) -> bool:
        return name in {one.id for one in store.open_batches() if one.status == "validating"}


@pytest.mark.parametrize("kind", ["sqlite", "journal", pytest.param("amqp", marks=pytest.mark.slow)])
def test_a_store_is_as_memory(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "amqp":
        request.getfixturevalue("broker")
    TwoStores.folder, TwoStores.kind = tmp_path, kind
    run_state_machine_as_test(
        TwoStores,
        settings=settings(
            max_examples=examples(5 if kind == "amqp" else 25), stateful_step_count=25,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


# ---- logs


def test_a_message_is_applied_once_and_in_order_whoever_does_it(tmp_path: Path) -> None:
    """Two processes of one machine, and another machine that comes later."""
    said: list[bytes] = []

    def say(store: Journal, method: str, *arguments: Any, name: str = "") -> Change:
        said.append(msgspec.msgpack.encode(Change(name or uuid4().hex, method, arguments)))
        return store.apply(len(said) - 1, said[-1])

    one, same = Journal(tmp_path / "a.db"), Journal(tmp_path / "a.db")
    say(one, "add_batch", batch("b"))
    say(same, "accept", "b", [item(number) for number in range(1, 4)])
    say(one, "start", "b", NOW_S)
    ended = say(same, "finish", [ending("b", 1), ending("b", 2)], NOW_S, name="twice")
    assert one.outcome(ended) == same.outcome(ended) == 2
    again = say(one, "finish", [ending("b", 1), ending("b", 2)], NOW_S, name="twice")
    assert one.outcome(again) == 2, "it was sent twice, and is one"
    late = say(one, "finish", [ending("b", 2, is_ok=False), ending("b", 3)], NOW_S)
    assert same.outcome(late) == 1
    refused = say(one, "close", "nowhere", NOW_S, 5)
    with pytest.raises(StoreError, match="there is no batch nowhere"):
        same.outcome(refused)
    other = Journal(tmp_path / "b.db")
    for place, message in enumerate(said):
        other.apply(place, message)
        other.apply(max(0, place - 1), said[max(0, place - 1)])
    assert other.next == one.next == len(said)
    assert other.batch(GOLD, "b") == one.batch(GOLD, "b")
    found = kept(other)
    assert lines_of(other, GOLD, found.output_file) == [1, 2, 3]
    with pytest.raises(ValueError, match="no change of a store"):
        one.apply(len(said), b"what")
    for store in (one, same, other):
        store.shut()


def test_a_disk_that_is_full_does_not_follow_and_then_does(tmp_path: Path) -> None:
    store = LocalLog(tmp_path / "a.db")
    store.add_batch(batch("b"))
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 4}")
    large = [msgspec.structs.replace(item(number), body=b"x" * 5000) for number in range(2, 60)]
    message = msgspec.msgpack.encode(Change("large", "accept", ("b", large)))
    place = store.next
    with pytest.raises(StoreFull):
        store.apply(place, message)
    assert store.next == place
    store._db.execute("PRAGMA max_page_count = 3000")
    assert store.outcome(store.apply(place, message))
    store.shut()


def test_a_folder_with_batches_of_its_own_follows_no_log(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db")
    store.add_batch(batch("b"))
    store.shut()
    with pytest.raises(StoreError, match="it has batches that are in no broker's log"):
        LocalLog(tmp_path / "a.db")


@pytest.mark.parametrize("url", ["nowhere", "http://host/", "amqp://", "amqp://h:port/"])
def test_what_is_no_broker_is_said_in_a_line(tmp_path: Path, url: str) -> None:
    with pytest.raises(StoreError, match="SGLANG_FAIR_BROKER is no URL"):
        AmqpStore(tmp_path / "a.db", url)


def test_a_broker_that_is_not_there_is_said_in_a_line_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amqp, "WAIT_S", 0.5)
    with pytest.raises(StoreError) as caught:
        AmqpStore(tmp_path / "a.db", f"amqp://me:secret@127.0.0.1:{free_port()}/v")
    assert "\n" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.slow
def test_machines_of_one_broker_are_alike_and_another_log_is_refused(broker: str, tmp_path: Path) -> None:
    stream = f"test-{uuid4().hex}"
    one, other = AmqpStore(tmp_path / "1.db", broker, stream), AmqpStore(tmp_path / "2.db", broker, stream)
    running(one, "b", 2)
    assert other.finish([ending("b", 1)], NOW_S) == 1
    assert one.finish([ending("b", 1, is_ok=False), ending("b", 2)], NOW_S) == 1
    assert other.close("b", NOW_S, 9), "it is over, and a change is applied after all before it"
    assert other.batch(GOLD, "b") == one.batch(GOLD, "b")
    late = AmqpStore(tmp_path / "3.db", broker, stream)
    assert late.batch(GOLD, "b") == one.batch(GOLD, "b")
    for store in (one, other, late):
        store.shut()
    with pytest.raises(StoreError, match="another log"):
        AmqpStore(tmp_path / "1.db", broker, f"test-{uuid4().hex}")


@pytest.mark.slow
def test_a_reader_that_is_gone_comes_back(
    broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = AmqpStore(tmp_path / "1.db", broker, f"test-{uuid4().hex}")
    store.add_batch(batch("b"))
    monkeypatch.setattr(amqp, "WAIT_S", 2.0)

    async def cancel() -> None:
        channel = await store._channel.get_underlay_channel()
        for tag in list(channel.consumers):
            await channel.basic_cancel(tag)

    asyncio.run_coroutine_threadsafe(cancel(), store._loop).result()
    with pytest.raises(StoreError, match="not within 2 s"):
        store.accept("b", [item(1)])
    monkeypatch.setattr(amqp, "WAIT_S", 30.0)
    assert store.start("b", NOW_S)
    store.shut()


@pytest.mark.slow
@pytest.mark.skipif(bool(why_none_to_kill()), reason=why_none_to_kill())
def test_a_broker_that_is_killed_loses_nothing_that_was_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amqp, "WAIT_S", 90.0)
    made = Broker(tmp_path)
    made.start()
    store = AmqpStore(tmp_path / "a.db", made.url)
    try:
        made.stop()  # RabbitMQ 3.10 does not find its first stream again if it is killed in its first seconds
        made.start()
        running(store, "b", 200)
        assert store.finish([ending("b", number) for number in range(1, 101)], NOW_S) == 100
        made.kill()
        made.start()
        fresh = AmqpStore(tmp_path / "fresh.db", made.url)
        assert fresh.parts() == store.parts()
        assert fresh.finish([ending("b", number) for number in range(50, 201)], NOW_S) == 100
        assert store.finish([ending("b", 1)], NOW_S) == 0
        assert store.batch(GOLD, "b") == fresh.batch(GOLD, "b")
        fresh.shut()
    finally:
        store.shut()
        made.kill()


# ---- disks


@pytest.mark.slow
def test_what_was_committed_is_there_after_a_kill(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from router.batches.sqlite import SqliteStore
from tests.batches.test_stores import batch, ending, item
store = SqliteStore(Path({str(tmp_path / "a.db")!r}))
store.add_batch(batch("b"))
store.accept("b", [item(number) for number in range(1, 501)])
store.start("b", 1)
store.finish([ending("b", number) for number in range(1, 101)], 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    store = SqliteStore(tmp_path / "a.db")
    store.check()
    [part] = store.parts()
    assert part.left == 400
    assert [one.number for one in store.items("b", "tiny", 0, 1)] == [101]
    store.shut()


def test_two_processes_of_one_store(tmp_path: Path) -> None:
    one, other = SqliteStore(tmp_path / "a.db"), SqliteStore(tmp_path / "a.db")
    running(one, "b", 2)
    assert other.finish([ending("b", 1)], NOW_S) == 1
    assert one.finish([ending("b", 1, is_ok=False), ending("b", 2)], NOW_S) == 1
    assert kept(other).status == "completed"
    one.shut()
    other.shut()


def test_a_full_disk_accepts_nothing(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db")
    store.add_batch(batch("b"))
    store.accept("b", [item(1)])
    store._db.execute("PRAGMA max_page_count = 30")
    large = [msgspec.structs.replace(item(number), body=b"x" * 5000) for number in range(2, 60)]
    with pytest.raises(StoreFull):
        store.accept("b", large)
    store._db.execute("PRAGMA max_page_count = 3000")
    found = kept(store)
    assert found.total == 1
    assert store.accept("b", large)
    store.check()
    store.shut()


def test_what_is_no_database_is_said_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(random.Random(1).randbytes(10_000))
    with pytest.raises(StoreDamaged) as caught:
        SqliteStore(path)
    assert "\n" not in str(caught.value)
    assert "a.db" in str(caught.value)


def test_a_damaged_page_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    store = SqliteStore(path)
    running(store, "b", 2000)
    store.shut()
    content = bytearray(path.read_bytes())
    for at in range(len(content) // 2, len(content) // 2 + 9000):
        content[at] = 0xA5
    path.write_bytes(bytes(content))
    store = SqliteStore(path)
    with pytest.raises(StoreDamaged):
        store.check()
    store.shut()


def test_the_format_without_tries_is_read_and_another_one_is_refused(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "a.db").shut()
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.execute("ALTER TABLE items DROP COLUMN tries")
    connection.execute("PRAGMA user_version = 1")
    connection.close()
    store = SqliteStore(tmp_path / "a.db")
    store.add_batch(batch("b"))
    store.accept("b", [item(1)])
    store.tried("b", {1: 2})
    store.shut()
    store = SqliteStore(tmp_path / "a.db")
    assert [one.tries for one in store.items("b", "tiny", 0, 9)] == [2]
    store.shut()
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreDamaged, match="format is 99"):
        SqliteStore(tmp_path / "a.db")
