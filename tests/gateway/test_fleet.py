"""What a gateway decides by itself: where requests go without a router, and what it tells one that is back."""

from hypothesis import given
from hypothesis import strategies as st

from router.events import (
    MOST_BEGUN,
    Arrive,
    Begun,
    Difference,
    Done,
    Place,
    Running,
    WorkerDrain,
    Workers,
    WorkerUp,
    decode_event,
    encode,
)
from router.gateway.routing.fleet import MAX_ENDED, Fleet
from router.gateway.routing.routers import SLACK, choose
from sglang_fair.core.interactions import Interaction

clients = st.text("abcdef", min_size=1, max_size=3)


@given(st.lists(clients, max_size=80), st.lists(st.floats(0.5, 4), min_size=1, max_size=6))
def test_no_load_is_far_above_the_mean(arrivals: list[str], capacities: list[float]) -> None:
    capacity = {f"r{index}": one for index, one in enumerate(capacities)}
    loads = dict.fromkeys(capacity, 0)
    for client in arrivals:
        loads[choose(client, loads, capacity)] += 1
        mean = sum(loads.values()) / sum(capacity.values())
        for name, load in loads.items():
            assert load <= (1 + SLACK) * mean * capacity[name] + 1


# -- tables


def up(name: str) -> WorkerUp:
    return WorkerUp(name, f"http://{name}")


def test_a_router_that_was_started_anew_is_told_of_the_workers_that_answer() -> None:
    sick = {"r2"}
    fleet = Fleet(lambda name: name not in sick)
    assert (
        fleet.side().learn(
            Workers("", (up("r0"), up("r1"), up("r2")), draining=("r1",), sick=("r2",), router="a")
        )
        == []
    )
    assert fleet.side().learn(Workers("", (up("r0"), up("r2")), sick=("r2",), router="a")) == []
    assert list(fleet.workers) == ["r0", "r2"], "the same router knows better"
    fleet.side().learn(
        Workers("", (up("r0"), up("r1"), up("r2")), draining=("r1",), sick=("r2",), router="a")
    )
    assert fleet.side().learn(Workers("", (up("r3"),), router="b")) == [up("r0"), up("r1"), WorkerDrain("r1")]
    assert list(fleet.workers) == ["r0", "r1", "r3"]
    place = fleet.place(Arrive("x", "c", b""))
    assert place is not None
    assert place.worker in ("r0", "r3"), "r1 drains"
    assert fleet.place(Arrive("x", "c", b"", exclude=("r0", "r3"))) is None


def test_another_router_is_told_of_the_interactions_under_way_in_parts() -> None:
    under_way = [(Interaction("c", "chat", str(number)), 2) for number in range(2 * MOST_BEGUN + 1)]
    fleet = Fleet(lambda name: True, lambda: under_way)
    assert fleet.side().learn(Workers("", (), router="a")) == [], "nothing was served before the first one"
    assert fleet.side().learn(Workers("", (), router="a")) == []
    told = fleet.side().learn(Workers("", (), router="b"))
    assert [len(part.interactions) for part in told if isinstance(part, Begun)] == [MOST_BEGUN, MOST_BEGUN, 1]
    assert [decode_event(encode(part)) for part in told] == told
    assert fleet.side().learn(Workers("", (), router="b")) == []


def test_an_end_that_is_long_past_is_told_as_aborted() -> None:
    fleet = Fleet(lambda name: True)
    for number in range(MAX_ENDED + 1):
        fleet.end(Done(f"{number}", output_tokens=5))
    told = fleet.side().settle(Difference("", (), ("0", "1")))
    assert told == [Done("0", outcome="aborted"), Done("1", output_tokens=5)]


def test_what_the_router_never_heard_of_is_not_ended_there() -> None:
    fleet = Fleet(lambda name: True)
    fleet.side().learn(Workers("", (up("r0"),), router="a"))
    arrive = Arrive("x", "c", b"")
    fleet.begin(arrive, Place("x", "r0", "http://r0", 0), None)
    assert not fleet.end(Done("x"))
    fleet.begin(arrive, Place("x", "r0", "http://r0", 0), None)
    assert fleet.side().settle(Difference("", ("x",), ())) == [Running("x", "c", b"", worker="r0")]
    assert fleet.side().settle(Difference("", (), ("x",))) == [], "it runs: an answer to an old table"
    assert fleet.end(Done("x")), "it has been told"
