"""The feeder's decisions over a store: whatever comes back, whenever it dies, each accepted item has one result."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.batches.model import Ending, Item, StoredBatch
from router.feeder.answers import MOST_TRIES, Answer
from router.feeder.core import (
    LOADED,
    MOST_IN_FLIGHT,
    MOST_UNWRITTEN,
    Abort,
    Action,
    Close,
    Feeder,
    Keep,
    Load,
    Send,
    Write,
)
from tests.support.budget import examples
from tests.support.memory_store import MemoryStore

CLASSES = {"interactive": 20.0, "batch-1": 60.0, "batch-2": 3600.0}
NOW_S = 1_000_000
OK = Answer(200, b'{"choices": []}')


class World:
    """A store, a feeder, and what is between them and a gateway."""

    def __init__(self, replicas: int = 2, most_in_flight: int = 4) -> None:
        self.store = MemoryStore()
        self.now_s = float(NOW_S)
        self.accepted: dict[str, list[int]] = {}
        self._replicas, self._most_in_flight = replicas, most_in_flight
        self.born()

    def born(self) -> None:
        """A feeder that knows nothing; what the one before had in hand is lost."""
        self.core = Feeder(CLASSES, self._most_in_flight)
        self.core.replicas({"": self._replicas})
        self.loads: list[Load] = []
        self.sent: dict[tuple[str, int], Send] = {}
        self.to_write: list[tuple[Ending, str]] = []
        self.closing: list[str] = []

    def add(
        self, name: str, client: str, items: int, window: str = "1h", models: Sequence[str] = ("m",)
    ) -> None:
        """A batch that runs."""
        seconds = {"1s": 1, "10s": 10, "1h": 3600}[window]
        self.store.add_batch(
            StoredBatch(
                id=name, client=client, endpoint="/v1/completions", input_file="f", window=window,
                created_s=int(self.now_s), expires_s=int(self.now_s) + seconds, models=tuple(models),
            )
        )  # fmt: skip
        made = [
            Item(number, f"id {number}", models[number % len(models)], b"{}", 5, 7)
            for number in range(1, items + 1)
        ]
        self.store.accept(name, made)
        self.store.start(name, int(self.now_s))
        self.accepted[name] = [one.number for one in made]

    def look(self) -> None:
        self.do(self.core.look(self.store.open_batches(), self.store.parts(), self.now_s))

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Load():
                    self.loads.append(action)
                case Send(key, item):
                    assert (key[0], item.number) not in self.sent, "it is in flight already"
                    self.sent[key[0], item.number] = action
                case Abort(key, number):
                    del self.sent[key[0], number]
                case Write(ending, model):
                    self.to_write.append((ending, model))
                case Keep(batch, number, tries):
                    self.store.tried(batch, {number: tries})
                case Close(batch):
                    self.closing.append(batch)

    def load(self) -> None:
        load = self.loads.pop(0)
        self.do(self.core.loaded(load, self.store.items(*load.key, load.after, load.limit), self.now_s))

    def answer(self, name: tuple[str, int], answer: Answer) -> None:
        self.do(self.core.answered(self.sent.pop(name), answer, 10, self.now_s))

    def write(self, most: int = 1 << 20) -> None:
        taken, self.to_write = self.to_write[:most], self.to_write[most:]
        self.store.finish([one for one, _ in taken], int(self.now_s))
        models = {(one.batch, one.number): model for one, model in taken}
        self.do(self.core.written([one for one, _ in taken], models, self.now_s))

    def close(self, most: int = 3) -> bool:
        batch = self.closing[0]
        if not self.store.close(batch, int(self.now_s), most):
            return False
        self.core.closed(self.closing.pop(0))
        return True

    def finish(self) -> None:
        """All goes well from here on."""
        for _ in range(10_000):
            self.now_s += 0.5
            self.look()
            while self.loads:
                self.load()
            for name in list(self.sent):
                if name in self.sent:
                    self.answer(name, OK)
            self.write()
            while self.closing and not self.close(100):
                pass
            if not self.store.open_batches():
                return
        raise AssertionError(f"it does not end: {self.store.open_batches()}")

    def lines(self, name: str) -> list[str]:
        """The custom ids in both files of a batch."""
        [batch] = [one for one in self.store._batches.values() if one.id == name]
        found = []
        for file in (batch.output_file, batch.error_file):
            if file is not None:
                kept = self.store.file(batch.client, file)
                assert kept is not None
                content, _ = self.store.results(kept, 0, 1 << 30)
                found += [json.loads(line)["custom_id"] for line in content.splitlines()]
        return found


class Deaths(RuleBasedStateMachine):
    """Answers of all kinds, deaths and cancellations at any moment."""

    @initialize(replicas=st.integers(0, 3))
    def begin(self, replicas: int) -> None:
        self.world = World(max(1, replicas))
        self.made = 0

    @rule(
        client=st.sampled_from("abc"), items=st.integers(1, 12), window=st.sampled_from(["1s", "10s", "1h"]),
        models=st.sampled_from([("m",), ("m", "n")]),
    )  # fmt: skip
    def batch(self, client: str, items: int, window: str, models: Sequence[str]) -> None:
        self.made += 1
        self.world.add(f"b{self.made}", client, items, window, models)

    @rule()
    def look(self) -> None:
        self.world.look()

    @rule(seconds=st.sampled_from([0.1, 1.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds

    @precondition(lambda self: self.world.loads)
    @rule()
    def load(self) -> None:
        self.world.load()

    @precondition(lambda self: self.world.loads)
    @rule()
    def the_store_cannot_be_read(self) -> None:
        self.world.core.not_loaded(self.world.loads.pop(0))

    @precondition(lambda self: self.world.sent)
    @rule(data=st.data(), status=st.sampled_from([200, 200, 200, 400, 429, 500, 502, 503, 0, 1]))
    def answer(self, data: st.DataObject, status: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.sent)))
        self.world.answer(name, Answer(status, b'{"a": 1}'))

    @precondition(lambda self: self.world.to_write)
    @rule(most=st.integers(1, 5))
    def write(self, most: int) -> None:
        self.world.write(most)

    @precondition(lambda self: self.world.to_write)
    @rule()
    def die_when_it_was_written(self) -> None:
        """The results are kept, and nobody knows."""
        self.world.store.finish([one for one, _ in self.world.to_write], int(self.world.now_s))
        self.world.born()

    @precondition(lambda self: self.world.closing)
    @rule()
    def close(self) -> None:
        self.world.close(2)

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = f"b{data.draw(st.integers(1, self.made))}"
        for client in "abc":
            self.world.store.cancel(client, name, int(self.world.now_s))

    @rule()
    def die(self) -> None:
        self.world.born()

    @rule(count=st.integers(0, 3))
    def replicas_come_and_go(self, count: int) -> None:
        self.world.core.replicas({"": count})

    @invariant()
    def what_it_counts_is_there(self) -> None:
        if hasattr(self, "world"):
            assert self.world.core.in_flight == len(self.world.sent)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.core.replicas({"": 2})
        self.world.finish()
        for name, numbers in self.world.accepted.items():
            assert Counter(self.world.lines(name)) == Counter(f"id {number}" for number in numbers)


TestDeaths = Deaths.TestCase
TestDeaths.settings = settings(max_examples=examples(150), stateful_step_count=40)


# ---- who is next


def in_flight(world: World) -> Counter[str]:
    return Counter(send.client for send in world.sent.values())


def test_a_client_s_many_batches_send_no_more_than_another_s_one() -> None:
    world = World(replicas=4, most_in_flight=8)
    for index in range(20):
        world.add(f"flood {index}", "flood", 30)
    world.add("one", "gold", 100)
    world.look()
    served: Counter[str] = Counter()
    for turn in range(300):
        while world.loads:
            world.load()
        name = next(iter(world.sent))
        served[world.sent[name].client] += 1
        world.answer(name, OK)
        world.write()
        counts = in_flight(world)
        if turn > 40 and world.store.batch("gold", "one").left > sum(counts.values()):  # type: ignore[union-attr]
            assert abs(counts["gold"] - counts["flood"]) <= 1, counts
    assert served["gold"] == 100


def test_who_has_long_items_holds_no_more_than_half() -> None:
    world = World(replicas=1, most_in_flight=8)
    world.add("long", "flood", 500)
    world.add("short", "gold", 500)
    world.look()
    for turn in range(200):
        while world.loads:
            world.load()
        wanted = "gold" if turn % 10 else "flood"  # whose items take ten times as long
        name = next((one for one, send in world.sent.items() if send.client == wanted), None)
        world.answer(name or next(iter(world.sent)), OK)
    counts = in_flight(world)
    assert counts["flood"] <= 5, counts


def test_what_ends_first_goes_first() -> None:
    world = World(replicas=1)
    world.add("late", "a", 20, "1h")
    world.add("soon", "a", 20, "10s")
    world.look()
    while world.loads:
        world.load()
    world.look()
    first = list(world.sent)
    while len([one for one in first if one[0] == "soon"]) < 20 and world.sent:
        world.answer(next(iter(world.sent)), OK)
        while world.loads:
            world.load()
        first += [one for one in world.sent if one not in first]
    assert sum(one[0] == "late" for one in first[:20]) <= 8  # those that went before "soon" was loaded


@pytest.mark.parametrize(
    ("window", "slo_class"), [("1s", "interactive"), ("10s", "interactive"), ("1h", "batch-2")]
)
def test_the_class_is_the_window_s(window: str, slo_class: str) -> None:
    world = World()
    world.add("b", "a", 1, window)
    world.look()
    world.load()
    [send] = world.sent.values()
    assert (send.slo_class, send.due_s) == (slo_class, NOW_S + {"1s": 1, "10s": 10, "1h": 3600}[window])


def test_a_client_that_has_had_enough_waits_alone() -> None:
    world = World(replicas=1)
    world.add("a", "a", 50)
    world.add("b", "b", 50)
    world.look()
    while world.loads:
        world.load()
    name = next(one for one, send in world.sent.items() if send.client == "a")
    world.answer(name, Answer(429, retry_after_s=20.0))
    for _ in range(10):
        name = next(one for one, send in world.sent.items())
        world.answer(name, OK)
    assert in_flight(world)["a"] == 0
    assert in_flight(world)["b"] > 0
    world.now_s += 21
    world.look()
    for _ in range(10):
        world.answer(next(iter(world.sent)), OK)
    assert in_flight(world)["a"] > 0


def test_a_client_with_a_limit_is_seldom_sent_more_than_it_may_have() -> None:
    world = World(replicas=4, most_in_flight=8)
    world.add("b", "a", 200)
    world.look()
    refused = 0
    for _ in range(1000):
        while world.loads:
            world.load()
        if len(world.sent) > 2:  # what its tenant may have at a time
            refused += 1
            world.answer(list(world.sent)[-1], Answer(429, retry_after_s=1.0))
        elif world.sent:
            world.answer(next(iter(world.sent)), OK)
            world.write()
        else:
            world.now_s += 1.0
            world.look()
    found = world.store.batch("a", "b")
    assert found is not None
    assert found.completed == 200
    assert refused < 150


@pytest.mark.slow
def test_a_thousand_names_leave_nothing_behind() -> None:
    world = World()
    for index in range(1000):
        world.add(f"b{index}", f"client {index}", 1)
        world.look()
        while world.loads:
            world.load()
        world.answer(next(iter(world.sent)), Answer(429, retry_after_s=0.1))
        world.finish()
        world.look()
    core = world.core
    kept = core._parts, core._served, core._caps, core._client_waits, core._in_flight
    assert kept == ({}, {}, {}, {}, {})


@pytest.mark.parametrize("restarts", [False, True])
def test_what_replicas_die_of_is_given_up(restarts: bool) -> None:
    world = World()
    world.add("b", "a", 1)
    world.look()
    world.load()
    for _ in range(MOST_TRIES):
        assert world.sent
        world.answer(("b", 1), Answer(502, b'{"error": {}}'))
        world.now_s += 60
        if restarts and not world.to_write:
            world.born()
        world.look()
        while world.loads:
            world.load()
    assert not world.sent
    world.write()
    found = world.store.batch("a", "b")
    assert found is not None
    assert (found.status, found.failed) == ("completed", 1)


@pytest.mark.slow
def test_nothing_is_sent_while_too_many_results_wait() -> None:
    world = World(replicas=100, most_in_flight=100)
    world.add("b", "a", MOST_UNWRITTEN + MOST_IN_FLIGHT + 1000)
    world.look()
    for _ in range(MOST_UNWRITTEN):
        while world.loads:
            world.load()
        if not world.sent:
            break
        for name in list(world.sent):
            world.answer(name, OK)
    assert len(world.to_write) >= MOST_UNWRITTEN
    assert len(world.to_write) <= MOST_UNWRITTEN + MOST_IN_FLIGHT
    assert not world.sent
    world.write()
    assert world.sent or world.loads


def test_few_items_are_in_memory() -> None:
    world = World(replicas=1, most_in_flight=4)
    for index in range(40):
        world.add(f"b{index}", f"c{index}", 500)
    world.look()
    for _ in range(50):
        while world.loads:
            world.load()
        world.answer(next(iter(world.sent)), OK)
    assert max(part.held for part in world.core._parts.values()) <= 2 * LOADED


def test_without_a_replica_nothing_is_sent() -> None:
    world = World()
    world.core.replicas({"other": 3})
    world.add("b", "a", 3)
    world.look()
    assert not world.sent


def test_an_answer_that_is_no_json_is_an_error_of_the_item() -> None:
    world = World()
    world.add("b", "a", 1)
    world.look()
    world.load()
    world.answer(("b", 1), Answer(200, b"<html>"))
    [(ending, _)] = world.to_write
    assert not ending.is_ok
    line: dict[str, Any] = json.loads(ending.line)
    assert line["error"]["code"] == "bad_answer"


def test_rows_are_what_is_left() -> None:
    world = World(replicas=1)
    world.add("b", "a", 100, models=("m", "n"))
    world.look()
    while world.loads:
        world.load()
    rows = world.core.backlog(world.now_s, 10)
    assert sum(row.waiting + row.running for row in rows) == 100
    assert sum(row.running for row in rows) == len(world.sent)
    assert [send.stands_for for send in world.sent.values()][:2] == [50, 25]
    assert {(row.client, row.model, row.prompt_tokens, row.output_tokens) for row in rows} == {
        ("a", "m", 5.0, 7.0), ("a", "n", 5.0, 7.0),
    }  # fmt: skip
    assert len(world.core.backlog(world.now_s, 1)) == 1
