"""Batches in the queues: the router asks a feeder for an item when a worker has room for it, and never for more."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.core import Router
from router.events import (
    Action,
    Arrive,
    Backlog,
    BacklogRow,
    Done,
    Due,
    Held,
    PeerGone,
    Place,
    Pull,
    Query,
    Refuse,
    Snapshot,
    WorkerDown,
    WorkerUp,
)
from router.placement import build
from router.placement.qlm import Qlm
from router.queues.backlog import MOST, PATIENCE_S, STAND_INS
from router.wire import pack_tokens
from tests.support.budget import examples

FEEDER, GATEWAY = b"feeder", b"gateway"
KV_TOKENS = 2_000
"""Of a worker: twenty items of a hundred tokens."""


def row(group: str = "b/", client: str = "gold", waiting: int = 100, left_s: float = 3600.0) -> BacklogRow:
    return BacklogRow(group, client, "", Due("batch-2", 3600.0, left_s), waiting, 0, 50.0, 50.0)


class World:
    """A router with queues, and what it has said."""

    def __init__(self, workers: int = 1, placement: str = "qlm", **options: Any) -> None:
        options = {"kv_tokens": KV_TOKENS, "chunk_tokens": 500, **options} if placement == "qlm" else options
        self.placement = build(placement, **options)
        self.router = Router(self.placement, name=placement)
        self.now_s = 0.0
        self.pulls: dict[str, str] = {}
        """Id -> group, that were not answered."""
        self.places: dict[str, Place] = {}
        self.held: set[str] = set()
        self.refused: dict[str, Refuse] = {}
        for index in range(workers):
            self.tell(WorkerUp(f"r{index}", f"http://r{index}"))

    def tell(self, event: Any, peer: bytes = b"") -> list[Action]:
        actions = self.router.handle(event, self.now_s, peer)
        for to, answer in actions:
            match answer:
                case Pull(name, group):
                    assert to == FEEDER
                    self.pulls[name] = group
                case Place():
                    assert to == GATEWAY
                    self.places[answer.id] = answer
                    self.held.discard(answer.id)
                case Held(name):
                    self.held.add(name)
                case Refuse():
                    self.refused[answer.id] = answer
        return actions

    def backlog(self, *rows: BacklogRow, may_pull: bool = True) -> None:
        self.tell(Backlog(rows, (), may_pull), FEEDER)

    def item(self, pull: str, client: str = "gold", tokens: int = 50) -> str:
        """The item that was asked for comes."""
        self.pulls.pop(pull, None)
        self.arrive(f"for {pull}", client, tokens, pulled=pull)
        return f"for {pull}"

    def arrive(self, name: str, client: str = "gold", tokens: int = 50, pulled: str = "") -> None:
        number = sum(map(ord, name))
        self.tell(
            Arrive(
                name, client, pack_tokens([number + one for one in range(tokens)]), 50, pulled=pulled,
                may_hold=True, due=Due("interactive", 20.0, 20.0),
            ),
            GATEWAY,
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        self.tell(Query("q"))  # with which it does what is due
        [state] = [one.state for _, one in self.tell(Query("q")) if isinstance(one, Snapshot)]
        return state

    def in_flight_tokens(self, worker: str = "r0") -> float:
        assert isinstance(self.placement, Qlm)
        return self.placement.queues.of(worker).in_flight_tokens


def test_a_worker_is_filled_with_items_and_no_further() -> None:
    world = World()
    world.backlog(row(waiting=1000))
    # Items ahead of the share of their client, or within it: at most the KV cache and the last chunk.
    assert KV_TOKENS / 100 <= len(world.pulls) <= (KV_TOKENS + 500) / 100 + 1
    assert set(world.pulls.values()) == {"b/"}
    before = len(world.pulls)
    for _ in range(5):
        world.backlog(row(waiting=1000))
    assert len(world.pulls) == before


def test_an_item_gets_the_room_that_was_kept_for_it() -> None:
    world = World(workers=2)
    world.backlog(row(waiting=1000))
    tokens = world.in_flight_tokens("r0") + world.in_flight_tokens("r1")
    pulls, asked = list(world.pulls), len(world.pulls)
    for pull in pulls:
        assert world.item(pull) in world.places
    assert not world.held
    assert len(world.pulls) < asked / 2  # items may take less than was thought, which leaves room
    assert world.in_flight_tokens("r0") + world.in_flight_tokens("r1") <= tokens + 200
    state = world.state()
    assert (state["in_flight"], state["batches"]["asked"]) == (asked, len(world.pulls))
    world.tell(Done(f"for {pulls[0]}", 50), GATEWAY)
    assert len(world.pulls) > state["batches"]["asked"]  # its place is filled


def test_only_so_many_are_asked_for_as_there_are() -> None:
    world = World()
    world.backlog(row(waiting=3))
    assert len(world.pulls) == 3
    for pull in list(world.pulls):
        world.item(pull)
    world.backlog(row(waiting=0))
    assert not world.pulls
    for pull in list(world.places):
        world.tell(Done(pull, 10), GATEWAY)
    assert not world.pulls
    assert world.in_flight_tokens() == 0


def test_an_item_that_does_not_come_keeps_no_room() -> None:
    world = World()
    world.backlog(row(waiting=1000))
    before = world.in_flight_tokens()
    lost = set(world.pulls)
    world.now_s += PATIENCE_S + 0.1
    world.backlog(row(waiting=1000))
    assert len(set(world.pulls) - lost) == len(lost)
    assert world.in_flight_tokens() == before
    assert world.state()["batches"]["pulled items that did not come"] == len(lost)
    name = world.item(next(iter(lost)))  # one that comes late is a request as any other
    assert name in world.places or name in world.held


def test_without_a_worker_nothing_is_asked_for_and_with_one_it_is() -> None:
    world = World(workers=0)
    world.backlog(row(waiting=10))
    assert not world.pulls
    world.tell(WorkerUp("r0", "http://r0"))
    assert len(world.pulls) == 10
    world.tell(WorkerDown("r0"))
    world.tell(WorkerUp("r0", "http://r0"))
    world.backlog(row(waiting=10))
    assert len(world.pulls) == 20  # the room that was kept for ten is lost


def test_a_feeder_that_sends_by_itself_is_asked_for_nothing() -> None:
    world = World()
    world.backlog(row(), may_pull=False)
    assert not world.pulls


def test_a_placement_without_queues_asks_for_nothing() -> None:
    world = World(placement="d2lpm")
    world.backlog(row())
    assert not world.pulls
    assert world.state()["batches"]["waiting"] == 100


def test_half_a_million_items_are_a_few_thousand_stand_ins() -> None:
    world = World(workers=4)
    rows = tuple(row(f"b{index}/", f"client {index % 50}", 1500, 3600.0 + index) for index in range(300))
    world.backlog(*rows)
    state = world.state()["batches"]
    assert state["waiting"] == 450_000
    assert state["stand_ins"] <= MOST
    assert state["stand_ins"] > STAND_INS


def test_a_chat_goes_before_another_clients_batch() -> None:
    world = World()
    world.backlog(row(waiting=100_000))
    for pull in list(world.pulls):
        world.item(pull)
    before = set(world.pulls)
    world.arrive("chat", "silver", 50)
    for name in list(world.places):
        if "chat" in world.places:
            break
        world.tell(Done(name, 50), GATEWAY)
    assert "chat" in world.places
    assert set(world.pulls) <= before


class Feeders(RuleBasedStateMachine):
    """Backlogs, items, workers and deaths in any order."""

    @initialize()
    def begin(self) -> None:
        self.world = World(workers=2)
        self.waiting = {"a/": 0, "b/": 0}
        self.arrivals = 0

    @rule(group=st.sampled_from(["a/", "b/"]), count=st.integers(0, 60))
    def tell(self, group: str, count: int) -> None:
        self.waiting[group] = count
        outstanding = set(self.world.pulls.values())
        rows = [
            row(name, name[0], left) for name, left in self.waiting.items() if left or name in outstanding
        ]
        self.world.backlog(*rows)

    @rule(late=st.booleans(), count=st.integers(1, 10))
    def items_come(self, late: bool, count: int) -> None:
        for pull in list(self.world.pulls)[:count]:
            group = self.world.pulls[pull]
            self.waiting[group] = max(0, self.waiting[group] - 1)
            self.world.item(pull, group[0])

    @rule(client=st.sampled_from("abc"))
    def chat(self, client: str) -> None:
        self.arrivals += 1
        self.world.arrive(f"chat {self.arrivals}", client)

    @rule(count=st.integers(1, 8))
    def some_end(self, count: int) -> None:
        for name in list(self.world.places)[:count]:
            del self.world.places[name]
            self.world.tell(Done(name, 20), GATEWAY)

    @rule(seconds=st.sampled_from([0.5, PATIENCE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds
        if seconds > PATIENCE_S:
            self.world.pulls.clear()

    @rule(worker=st.sampled_from(["r0", "r1"]), is_up=st.booleans())
    def worker(self, worker: str, is_up: bool) -> None:
        if is_up:
            self.world.tell(WorkerUp(worker, f"http://{worker}"))
        else:
            self.world.tell(WorkerDown(worker))

    @rule()
    def feeder_dies(self) -> None:
        self.world.tell(PeerGone(), FEEDER)
        self.world.pulls.clear()
        self.waiting = {"a/": 0, "b/": 0}

    @invariant()
    def nothing_is_asked_for_that_is_not_there(self) -> None:
        if hasattr(self, "world"):
            state = self.world.state()["batches"]
            assert state["stand_ins"] <= sum(self.waiting.values())

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.tell(PeerGone(), FEEDER)
        world.tell(PeerGone(), GATEWAY)
        world.now_s += PATIENCE_S + 1
        state = world.state()
        assert (state["batches"]["stand_ins"], state["batches"]["asked"]) == (0, 0)
        assert (state["in_flight"], state["waiting"]) == (0, 0)
        assert isinstance(world.placement, Qlm)
        for name in world.placement.queues.orders():
            assert world.in_flight_tokens(name) == 0
        assert len(world.placement.queues.groups) == 0


TestFeeders = Feeders.TestCase
TestFeeders.settings = settings(max_examples=examples(60), stateful_step_count=30)


@pytest.mark.parametrize("name", ["stand-in 1", "made up"])
def test_nobody_gains_by_a_made_up_pull(name: str) -> None:
    """A gateway tells on what it was asked with only for the feeder; and a wrong one is no better than none."""
    world = World(ahead=200.0)
    for index in range(60):
        world.arrive(f"flood {index}", "flood")
    world.arrive("chat", "flood")
    assert "chat" in world.held
    world.arrive("liar", "flood", pulled=name)
    assert "liar" in world.held
