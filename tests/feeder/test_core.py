"""The feeder's decisions over a store: whatever comes back, whatever dies, each accepted item has one result."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from router.batches.model import Item, StoredBatch
from router.batches.store import Store
from router.feeder.answers import MOST_TRIES, Answer
from router.feeder.core import FIRST, MOST_BYTES, MOST_UNWRITTEN
from tests.feeder.world import NOW_S, OK, World, quick_store
from tests.support.budget import examples
from tests.support.postgres import Postgres, why_none


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = quick_store(tmp_path / "a.db")
    yield made
    made.shut()


class Deaths(RuleBasedStateMachine):
    """Two feeders. Answers of all kinds, deaths, cancellations and stalls at any moment."""

    store: Store
    made = 0

    @initialize()
    def begin(self) -> None:
        self.world = World(self.store, feeders=2, most_in_flight=4)

    @rule(
        client=st.sampled_from("abc"), items=st.integers(1, 12), window=st.sampled_from(["1s", "10s", "1h"]),
        models=st.sampled_from([("m",), ("m", "n")]),
    )  # fmt: skip
    def batch(self, client: str, items: int, window: str, models: tuple[str, ...]) -> None:
        Deaths.made += 1
        self.world.add(f"b{Deaths.made}", client, items, window, models)

    @rule(seconds=st.sampled_from([0.1, 1.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds

    @rule(
        index=st.integers(0, 1),
        what=st.sampled_from(["look", "turn", "turn", "unheard", "die", "die written"]),
    )
    def goes_on(self, index: int, what: str) -> None:
        one = self.world.feeders[index]
        match what:
            case "look":
                one.look()
            case "turn":
                one.turn()
            case "unheard":
                one.turn(is_heard=False)
            case "die written":
                one.write()
                self.world.die(index)
            case "die":
                self.world.die(index)

    @rule(
        index=st.integers(0, 1),
        data=st.data(),
        status=st.sampled_from([200, 200, 200, 400, 429, 500, 503, 0, 1]),
    )
    def answer(self, index: int, data: st.DataObject, status: int) -> None:
        one = self.world.feeders[index]
        if one.sent:
            one.answer(data.draw(st.sampled_from(sorted(one.sent))), Answer(status, b'{"a": 1}'))

    @rule(index=st.integers(0, 1))
    def close(self, index: int) -> None:
        if self.world.feeders[index].closing:
            self.world.feeders[index].close(2)

    @precondition(lambda self: self.world.accepted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.accepted)))
        self.store.cancel(self.world.accepted[name][0], name, int(self.world.now_s))

    def teardown(self) -> None:
        self.world.finish()
        for name, (_, count) in self.world.accepted.items():
            assert Counter(self.world.lines(name)) == Counter(
                f"id {number}" for number in range(1, count + 1)
            )


def test_each_item_has_one_result_whatever_dies(store: Store) -> None:
    Deaths.store = store
    quick = settings(
        max_examples=examples(50),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Deaths, settings=quick)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_none()), reason=why_none() or "")
def test_the_same_on_postgresql() -> None:
    with Postgres() as server:
        test_each_item_has_one_result_whatever_dies(made := Store(server.url))
        made.shut()


# ---- who is next


def in_flight(world: World) -> Counter[str]:
    return Counter(send.batch.client for send, _ in world.one.sent.values())


def first_of(world: World, client: str) -> int:
    return next(key for key, (send, _) in world.one.sent.items() if send.batch.client == client)


def test_a_client_s_many_batches_send_no_more_than_another_s_one(store: Store) -> None:
    world = World(store, most_in_flight=16)
    for index in range(20):
        world.add(f"flood {index}", "flood", 30)
    world.add("one", "gold", 40)
    world.one.look()
    for _ in range(30):
        world.one.turn()
        assert abs(in_flight(world)["gold"] - in_flight(world)["flood"]) <= 1
        world.one.answer(first_of(world, "flood"), OK)
        world.one.answer(first_of(world, "gold"), OK)


def test_what_ends_first_goes_first(store: Store) -> None:
    world = World(store, most_in_flight=8)
    world.add("late", "a", 20, "1h")
    world.add("soon", "a", 5, "10s")
    world.one.look()
    world.one.turn()
    assert Counter(send.batch.id for send, _ in world.one.sent.values()) == {"soon": 5, "late": 3}


@pytest.mark.parametrize(
    ("window", "slo_class"), [("1s", "interactive"), ("10s", "interactive"), ("1h", "batch-2")]
)
def test_the_class_is_the_window_s(store: Store, window: str, slo_class: str) -> None:
    world = World(store)
    world.add("b", "a", 1, window)
    world.one.look()
    world.one.turn()
    [(send, _)] = world.one.sent.values()
    assert (send.slo_class, send.batch.expires_at) == (
        slo_class,
        NOW_S + {"1s": 1, "10s": 10, "1h": 3600}[window],
    )


def test_each_says_for_how_many_it_stands(store: Store) -> None:
    world = World(store, most_in_flight=10)
    world.add("b", "a", 1000)
    world.one.look()
    world.one.turn()
    assert {send.stands_for for send, _ in world.one.sent.values()} == {100}


def test_nothing_is_sent_before_all_is_accepted(store: Store) -> None:
    world = World(store)
    world.add("b", "a", 1, is_whole=False)
    world.one.look()
    world.one.turn()
    assert not world.one.sent
    store.settle("b", "intake", (), NOW_S)
    world.one.look()
    world.one.turn()
    assert len(world.one.sent) == 1


# ---- how much at a time


def test_a_window_grows_with_answers_and_halves_with_refusals(store: Store) -> None:
    world = World(store, most_in_flight=10 * FIRST)
    world.add("b", "a", 20 * FIRST)
    world.one.look()
    world.one.turn()
    assert len(world.one.sent) == FIRST
    for key in list(world.one.sent):
        world.one.answer(key, OK)
    world.one.turn()
    assert len(world.one.sent) == 2 * FIRST
    world.one.answer(first_of(world, "a"), Answer(503, retry_after_s=5.0))
    world.now_s += 1
    world.one.turn()
    assert len(world.one.sent) == 2 * FIRST - 1, "nothing of the model is sent for the time being"
    for key in list(world.one.sent)[: FIRST + 10]:
        world.one.answer(key, Answer(400, b"{}"))
    world.now_s += 5
    world.one.look()
    world.one.turn()
    assert len(world.one.sent) == (2 * FIRST - 1) // 2 + FIRST + 10


def test_a_client_that_has_had_enough_waits_alone(store: Store) -> None:
    world = World(store)
    world.add("a", "a", 50)
    world.add("b", "b", 50)
    world.one.look()
    world.one.turn()
    world.one.answer(first_of(world, "a"), Answer(429, retry_after_s=20.0))
    for _ in range(3):
        world.one.answer(first_of(world, "a"), OK)
    world.one.turn()
    assert in_flight(world) == {"b": 8}
    world.now_s += 21
    world.one.look()
    for _ in range(3):
        world.one.answer(first_of(world, "b"), OK)
        world.one.turn()
    assert in_flight(world)["a"] > 0


def test_a_client_with_a_limit_is_seldom_sent_more_than_it_may_have(store: Store) -> None:
    world, refused = World(store, most_in_flight=32), 0
    world.add("b", "a", 100)
    for _ in range(400):
        world.now_s += 0.5
        world.one.look()
        world.one.turn()
        for key in list(world.one.sent)[2:]:  # more than its tenant may have at a time
            refused += 1
            world.one.answer(key, Answer(429, retry_after_s=1.0))
        for key in list(world.one.sent):
            world.one.answer(key, OK)
    found = store.batch("a", "b")
    assert found is not None
    assert found.request_counts.completed == 100
    assert refused < 100


def test_long_items_are_few_at_a_time(store: Store) -> None:
    world = World(store)
    of = StoredBatch(
        id="b", client="a", endpoint="/v1/completions", input_file_id="f", completion_window="1h", created_at=NOW_S,
        expires_at=NOW_S + 3600, models=("m",),
    )  # fmt: skip
    store.add_batch(of)
    store.claim("intake", ())
    store.accept("b", "intake", [Item(n, str(n), "m", b"x" * (MOST_BYTES // 2)) for n in range(1, 5)])
    store.settle("b", "intake", (), NOW_S)
    world.one.look()
    world.one.turn()
    assert len(world.one.sent) == 2
    world.one.turn()
    assert len(world.one.sent) == 2


def test_nothing_is_sent_while_too_many_results_wait(store: Store) -> None:
    world = World(store)
    world.add("b", "a", 20)
    world.one.look()
    world.one.core.unwritten = MOST_UNWRITTEN
    world.one.turn()
    assert not world.one.sent


# ---- what comes back


def test_names_leave_nothing_behind(store: Store) -> None:
    world = World(store)
    for index in range(20):
        world.add(f"b{index}", f"client {index}", 1)
        world.one.look()
        world.one.turn()
        world.one.answer(next(iter(world.one.sent)), Answer(429, retry_after_s=0.1))
        world.finish()
        world.one.look()
    core = world.one.core
    assert (core._parts, core._clients, core._bytes, core._models["m"].in_flight) == ({}, {}, 0, 0)


@pytest.mark.parametrize("restarts", [False, True])
def test_what_replicas_die_of_is_given_up(store: Store, restarts: bool) -> None:
    world = World(store)
    world.add("b", "a", 1)
    for _ in range(MOST_TRIES):
        world.one.look()
        world.one.turn()
        world.one.answer(next(iter(world.one.sent)), Answer(502, b'{"error": {}}'))
        world.now_s += 60
        if restarts and not world.one.endings:
            world.die()
    world.one.turn()
    assert not world.one.sent
    found = store.batch("a", "b")
    assert found is not None
    assert (found.status, found.request_counts.failed) == ("completed", 1)


def test_an_answer_that_is_no_json_is_an_error_of_the_item(store: Store) -> None:
    world = World(store)
    world.add("b", "a", 1)
    world.one.look()
    world.one.turn()
    world.one.answer(next(iter(world.one.sent)), Answer(200, b"<html>"))
    [ending] = world.one.endings
    assert not ending.is_ok
    assert json.loads(ending.line)["error"]["code"] == "bad_answer"
