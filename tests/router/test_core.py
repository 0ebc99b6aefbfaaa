"""The router's state machine: what it answers, and that every request is accounted exactly once."""

import gc
import json
import random
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Router
from router.events import (
    LARGEST_CAPACITY,
    LEAST_CAPACITY,
    Arrive,
    Cleared,
    Difference,
    Done,
    Due,
    Held,
    PeerGone,
    Place,
    Progress,
    ProtocolError,
    Query,
    Refuse,
    Removed,
    Running,
    Snapshot,
    Stored,
    Table,
    Undelivered,
    WorkerDown,
    WorkerDrain,
    WorkerHealth,
    WorkerUp,
    decode_answer,
    decode_event,
    encode,
)
from router.placement import PLACEMENTS, build
from router.placement.contract import Holding
from router.placement.d2lpm import D2lpm
from router.wire import pack_tokens
from tests.support.budget import examples
from tests.support.tree_check import check, holdings

PROMPT = np.arange(64, dtype="<u4").tobytes()


def router(*workers: str, kv: str | None = "tcp://kv", **values) -> Router:
    made = Router(D2lpm(worker_quantum=1000), name="d2lpm", page_size=16, **values)
    for worker in workers:
        made.handle(WorkerUp(worker, f"http://{worker}", kv), 0.0)
    return made


def ask(made: Router, request: str, now_s: float = 0.0, peer: bytes = b"g", **values) -> Place | Refuse:
    ((to, answer),) = made.handle(Arrive(request, "c", PROMPT, **values), now_s, peer)
    assert to == peer
    assert answer.id == request
    return answer


def counts(made: Router) -> dict[str, int]:
    return made.state()["counts"]


def test_refuses_without_a_worker():
    made = router()
    assert ask(made, "1") == Refuse("1", "no worker is up", True)
    made.handle(WorkerUp("a", "http://a"), 0.0)
    assert ask(made, "1", exclude=("a",)) == Refuse("1", "every worker that is up is excluded", True)
    assert ask(made, "1") == Place("1", "a", "http://a", 0)
    made.handle(WorkerDown("a"), 0.0)
    assert ask(made, "2").retry
    assert counts(made)["refused"] == 3


def test_a_dispatched_prompt_is_matched_at_once_and_gone_when_nothing_confirms_it():
    made = router("a", "b", linger_s=1.0)
    assert ask(made, "1") == Place("1", "a", "http://a", 0)
    assert ask(made, "2") == Place("2", "a", "http://a", 64)
    made.handle(Done("1"), 1.0)
    made.handle(Done("2"), 1.0)
    assert made.tree.match(PROMPT).tokens == 64
    made.handle(Query("q"), 2.0)
    assert made.tree.match(PROMPT).tokens == 0
    assert made.state()["tree"]["nodes"] == 0


def test_a_confirmed_prefix_is_gone_when_its_worker_says_so():
    made = router("a", linger_s=1000.0)
    ask(made, "1")
    for event in (Stored("a", (1, 2, 3, 4), None, PROMPT, 16), Done("1")):
        made.handle(event, 1.0, b"g")
    assert made.tree.match(PROMPT).of("a") == 64
    made.handle(Removed("a", (1, 2, 3, 4)), 2.0)
    assert made.tree.match(PROMPT).of("a") == 0


def test_what_events_confirm_stays_until_they_say_otherwise():
    made = router("a", "b", linger_s=0.0)
    ask(made, "1")
    made.handle(Stored("a", (11, 12, 13), None, PROMPT[: 48 * 4], 16), 0.1)
    made.handle(Done("1", 5, 0), 0.2)
    assert holdings(made.tree, "a") == {("", tuple(range(48)))}
    assert ask(made, "2", 0.3) == Place("2", "a", "http://a", 48)
    made.handle(Done("2", 5, 47), 0.4)
    made.handle(Removed("a", (13,)), 0.5)
    assert made.tree.match(PROMPT).tokens == 32
    assert ask(made, "3", 0.5, namespace="other model").matched_tokens == 0
    made.handle(Cleared("a"), 0.6)
    assert holdings(made.tree, "a") == set()
    assert made.state()["hits"] == {
        "input_tokens": 192,
        "predicted_tokens": 48,
        "measured_input_tokens": 128,
        "measured_predicted_tokens": 48,
        "measured_cached_tokens": 47,
    }


def test_a_worker_without_events_keeps_what_it_served_and_not_what_failed():
    made = router("a", kv=None)
    ask(made, "1")
    made.handle(Done("1", outcome="failed"), 0.0)
    assert made.tree.match(PROMPT).tokens == 0
    ask(made, "2")
    made.handle(Done("2", 3), 0.0)
    assert made.tree.match(PROMPT).tokens == 64


def test_a_second_done_and_an_unknown_one_are_ignored():
    made = router("a")
    ask(made, "1")
    for _ in range(2):
        made.handle(Done("1", 7), 0.0)
    made.handle(Done("2", 7), 0.0)
    made.handle(Progress("2", 7), 0.0)
    assert counts(made)["ended ok"] == 1
    assert counts(made)["output_tokens"] == 7
    assert counts(made)["done ignored"] == 2
    assert counts(made)["progress ignored"] == 1
    assert made.state()["workers"]["a"]["in_flight"] == 0
    assert made.state()["deficits"] == {"c": {"a": 1000 - 64 - 14}}


def test_requests_end_with_their_worker_and_only_once():
    made = router("a")
    ask(made, "1")
    ask(made, "2")
    made.handle(Progress("1", 5), 0.0)
    made.handle(WorkerDown("a"), 1.0)
    assert made.state()["in_flight"] == 0
    assert counts(made)["ended failed"] == 2
    made.handle(Done("1", 9, outcome="failed"), 1.0)
    made.handle(Done("1", 9, outcome="failed"), 1.0)
    assert counts(made)["done after its worker"] == 1
    assert counts(made)["done ignored"] == 1
    assert counts(made)["output_tokens"] == 5
    made.handle(WorkerUp("a", "http://a"), 2.0)
    # asked again under its id before the old end was reported: the late report must not end the new one
    assert ask(made, "2", 2.0) == Place("2", "a", "http://a", 0)
    assert made.state()["in_flight"] == 1
    assert made.state()["workers"]["a"]["in_flight"] == 1
    check(made.tree)


def test_a_failed_dispatch_is_asked_again_elsewhere_and_costs_no_credit():
    made = router("a", "b")
    first = ask(made, "1")
    made.handle(Done("1", outcome="failed"), 0.0)
    second = ask(made, "1", exclude=(first.worker,))
    assert {first.worker, second.worker} == {"a", "b"}
    assert made.state()["deficits"] == {"c": {first.worker: 1000, second.worker: 1000 - 64}}
    assert made.tree.match(PROMPT).holders == (second.worker,)


# -- peers


def state_of(made: Router, worker: str = "a") -> str:
    return made.state()["workers"][worker]["state"]


def test_a_new_process_of_a_worker_is_well():
    made = router("a")
    made.handle(WorkerHealth("a", False), 0.0, b"g")
    made.handle(WorkerUp("a", "http://a", "tcp://kv"), 0.0)
    assert state_of(made) == "sick"
    made.handle(WorkerUp("a", "http://elsewhere", "tcp://kv"), 0.0)
    assert state_of(made) == "up"
    made.handle(WorkerHealth("a", False), 0.0, b"g")
    assert state_of(made) == "sick"


def test_a_peer_that_comes_back_tells_what_it_has_in_flight():
    made = router("a")
    ask(made, "1")
    made.handle(PeerGone(), 1.0, b"g")
    ((_, difference),) = made.handle(Table("t", ("1",)), 2.0, b"g")
    assert difference == Difference("t", missing=("1",), unsettled=())
    made.handle(Running("1", "c", PROMPT, worker="a", output_tokens=3), 2.0, b"g")
    made.handle(Done("1", 9), 3.0, b"g")
    made.handle(PeerGone(), 4.0, b"g")
    assert (counts(made)["ended aborted"], counts(made)["ended ok"]) == (1, 1)


def test_what_was_lost_with_its_worker_is_forgotten_with_its_peer():
    made = router("a")
    ask(made, "1", peer=b"g")
    ask(made, "2", peer=b"h")
    made.handle(WorkerDown("a"), 0.0)
    made.handle(PeerGone(), 1.0, b"g")
    for request in "12":
        made.handle(Done(request), 2.0)
    assert (counts(made)["done ignored"], counts(made)["done after its worker"]) == (1, 1)


def test_the_last_request_of_a_gone_peer_ends_a_drain():
    made = router("a", "b")
    placed = ask(made, "1").worker
    made.handle(WorkerDrain(placed), 0.0)
    made.handle(PeerGone(), 1.0, b"g")
    assert placed not in made.state()["workers"]


def test_requests_of_a_gone_peer_do_not_wait():
    made = Router(build("centralized_dlpm", slots=1), page_size=16)
    made.handle(WorkerUp("a", "http://a", "tcp://kv"), 0.0)
    assert ask(made, "1", peer=b"g") == Place("1", "a", "http://a", 0)
    for request, peer in (("2", b"g"), ("3", b"h"), ("4", b"g")):
        assert made.handle(Arrive(request, "c", PROMPT), 0.0, peer) == [(peer, Held(request))]
    assert made.handle(PeerGone(), 1.0, b"g") == [(b"h", Place("3", "a", "http://a", 64))]
    assert (made.state()["in_flight"], made.state()["waiting"]) == (1, 0)
    assert counts(made)["given up"] == 2


def test_centralized_dlpm_hears_what_is_placed_and_nothing_is_known_by_what_is_given_up():
    placement, admitted = build("centralized_dlpm", slots=1), []
    placement._dlpm.admitted = lambda job, *_: admitted.append(job.id)
    made = Router(placement, page_size=16)
    made.handle(WorkerUp("a", "http://a", "tcp://kv"), 0.0)
    ask(made, "1")
    for request in ("given up", "3"):
        made.handle(Arrive(request, "c", PROMPT), 0.0, b"g")
    for request in ("given up", "1", "3"):
        made.handle(Done(request), 1.0, b"g")
    assert admitted == ["1", "3"]


HOLDING = {
    "centralized_dlpm": {"slots": 1},
    "deadline": {"kv_tokens": 64, "chunk_tokens": 0, "tiers": False},
    "qlm": {"kv_tokens": 64, "chunk_tokens": 0},
}
"""Placements that hold requests, such that a worker has one at a time."""


def test_every_placement_that_holds_is_tried():
    assert {name for name in PLACEMENTS if isinstance(build(name), Holding)} == set(HOLDING)


def holding(*workers: str, slots: int = 1) -> Router:
    """A router that holds what has no free slot."""
    return made_to_hold("centralized_dlpm", *workers, slots=slots)


def made_to_hold(placement: str, *workers: str, **options) -> Router:
    made = Router(build(placement, **HOLDING[placement] | options), page_size=16)
    for worker in workers:
        made.handle(WorkerUp(worker, f"http://{worker}", "tcp://kv"), 0.0)
    return made


def test_what_waits_is_said_to_be_held():
    made = holding("a")
    assert ask(made, "1") == Place("1", "a", "http://a", 0)
    assert ask(made, "2") == ask(made, "2") == Held("2")
    [(_, found)] = made.handle(Table("t", ("1", "2", "3")), 0.0, b"g")
    assert found == Difference("t", missing=("3",), unsettled=(), held=("2",))
    [(_, found)] = made.handle(Table("t", ("1",)), 0.0, b"g")
    assert found == Difference("t", (), unsettled=("2",)), "the gateway does not wait for it any more"
    [(_, found)] = made.handle(Table("t", ("2",)), 0.0, b"h")
    assert found == Difference("t", (), ()), "it is not its request"
    assert not ask(made, "2", peer=b"h").retry, "nor may it ask for it"
    assert made.handle(Done("1"), 1.0) == [(b"g", Place("2", "a", "http://a", 64))]


def test_what_waits_for_nobody_is_refused():
    made = holding("a", "b")
    for name in "12":
        ask(made, name)
    ask(made, "3", exclude=("a",))
    ask(made, "4")
    [(peer, refused)] = made.handle(WorkerDrain("b"), 1.0)
    assert (peer, refused.id, refused.retry) == (b"g", "3", True)
    [(_, refused)] = made.handle(WorkerHealth("a", ok=False), 2.0, b"g")
    assert refused == Refuse("4", "no worker takes requests: each drains or does not answer", True)
    assert made.state()["waiting"] == 0
    assert ask(made, "4") == refused, "as if it had come now"


@settings(max_examples=examples(200))
@given(
    st.sampled_from(sorted(HOLDING)),
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "ask", "ask again", "end", "give up", "down", "up", "sick", "well",
                             "restart", "compare"]),
            st.integers(0, 99),
            st.booleans(),
        ),
        max_size=60,
    ),
)  # fmt: skip
def test_every_question_is_answered_or_held_whatever_is_lost(placement, steps):
    """A gateway as the protocol asks of it: it repeats what is not held, and after a comparison what is held no more.

    Messages are lost in both directions, workers and routers come and go. In the end each request has its answer, or
    is one that the router does hold.
    """
    made, now_s = made_to_hold(placement, "a", "b"), 0.0
    asked: dict[str, Arrive] = {}
    is_held: dict[str, bool] = {}
    running: list[str] = []

    def take(actions) -> None:
        for _, answer in actions:
            match answer:
                case Held(name) if name in asked:
                    is_held[name] = True
                case Place(name) if name in asked:
                    del asked[name], is_held[name]
                    running.append(name)
                case Refuse(name) if name in asked:
                    del asked[name], is_held[name]

    def send(event, *, lost: bool) -> None:
        answers = made.handle(event, now_s, b"g")
        if not lost:
            take(answers)

    def compare() -> None:
        [(_, found), *more] = made.handle(Table("", (*asked, *running)), now_s, b"g")
        take(more)
        for name in found.unsettled:
            send(Done(name, outcome="aborted"), lost=False)
        for name in [name for name in asked if is_held[name] and name not in found.held]:
            is_held[name] = False
            send(asked[name], lost=False)

    for number, (what, at, lost) in enumerate(steps):
        now_s += 1.0
        names = list(asked)
        if what == "ask":
            exclude = ("a",) if at % 4 == 0 else ()
            due = (None, Due("interactive", 20.0, 2.0), Due("batch", 60.0, 60.0))[at % 3]
            asked[str(number)] = Arrive(str(number), f"c{at % 3}", PROMPT, exclude=exclude, due=due)
            is_held[str(number)] = False
            send(asked[str(number)], lost=lost)
        elif what == "ask again" and names:
            name = names[at % len(names)]
            if not is_held[name]:
                send(asked[name], lost=lost)
        elif what == "give up" and names:
            name = names[at % len(names)]
            del asked[name], is_held[name]
            if not lost:
                send(Done(name, outcome="failed"), lost=False)
        elif what == "end" and running:
            send(Done(running.pop(at % len(running))), lost=lost)
        elif what in ("down", "up", "sick", "well"):
            worker = "ab"[at % 2]
            event = {
                "down": WorkerDown(worker), "up": WorkerUp(worker, f"http://{worker}"),
                "sick": WorkerHealth(worker, ok=False), "well": WorkerHealth(worker, ok=True),
            }[what]  # fmt: skip
            send(event, lost=lost)
        elif what == "restart":
            made = made_to_hold(placement, "a", "b")
        elif what == "compare":
            compare()
    for _ in range(2):
        compare()
        for name in [name for name in asked if not is_held[name]]:
            send(asked[name], lost=False)
    waiting = {request.id for request, _ in made.waiting.by_id.values()}
    assert set(asked) == {name for name, held in is_held.items() if held} == waiting
    if not any(worker["in_flight"] for worker in made.state()["workers"].values()):
        assert not waiting, "nobody waits for an idle worker"


def test_only_the_peer_s_own_request_is_undone_when_it_cannot_be_reached():
    made = router("a")
    ask(made, "1", peer=b"g")
    made.handle(Undelivered("1"), 0.0, b"h")
    made.handle(Undelivered("2"), 0.0, b"g")
    assert made.state()["in_flight"] == 1
    for _ in range(2):
        made.handle(Undelivered("1"), 0.0, b"g")
    assert made.state()["in_flight"] == 0
    assert counts(made)["ended aborted"] == 1


PEERS = (b"g", b"h", b"i")
REQUESTS = tuple("12345678")
peers_say = st.tuples(
    st.one_of(
        st.builds(lambda request: Arrive(request, "c", PROMPT), st.sampled_from(REQUESTS)),
        st.builds(Done, st.sampled_from(REQUESTS)),
        st.builds(
            lambda request, worker: Running(request, "c", PROMPT, worker=worker),
            st.sampled_from(REQUESTS),
            st.sampled_from("ab"),
        ),
        st.builds(WorkerHealth, st.sampled_from("ab"), st.booleans()),
        st.builds(WorkerUp, st.sampled_from("ab"), st.just("http://x")),
        st.builds(WorkerDown, st.sampled_from("ab")),
        st.builds(Undelivered, st.sampled_from(REQUESTS)),
        st.builds(PeerGone),
    ),
    st.sampled_from(PEERS),
)


@settings(max_examples=examples(300))
@given(st.lists(peers_say, max_size=60))
def test_votes_and_requests_belong_to_their_peers(said):
    """Beside a model of two maps: worker -> the peers that call it sick, request -> its peer and worker."""
    made = Router(build("round_robin"), page_size=16)
    votes: dict[str, set[bytes]] = {}
    flights: dict[str, tuple[bytes, str]] = {}
    for now_s, (event, peer) in enumerate(said):
        answers = made.handle(event, float(now_s), peer)
        match event:
            case WorkerUp():
                votes.setdefault(event.worker, set())
            case WorkerDown():
                votes.pop(event.worker, None)
                flights = {name: flight for name, flight in flights.items() if flight[1] != event.worker}
            case WorkerHealth() if event.worker in votes:
                (votes[event.worker].discard if event.ok else votes[event.worker].add)(peer)
            case Arrive():
                ((to, answer),) = answers
                assert to == peer
                if isinstance(answer, Place):
                    assert flights.get(event.id, (peer, ""))[0] == peer
                    assert not votes[answer.worker]
                    flights[event.id] = peer, answer.worker
                elif answer.retry:  # asked again, and there is nobody to take it
                    flights.pop(event.id, None)
            case Running() if event.worker in votes and event.id not in flights:
                if made.requests_of(peer) > sum(holder == peer for holder, _ in flights.values()):
                    flights[event.id] = peer, event.worker  # unless it was lost with its worker
            case Done():
                flights.pop(event.id, None)
            case Undelivered() if flights.get(event.id, (b"", ""))[0] == peer:
                del flights[event.id]
            case PeerGone():
                flights = {name: flight for name, flight in flights.items() if flight[0] != peer}
                for callers in votes.values():
                    callers.discard(peer)
        workers = made.state()["workers"]
        assert {name: worker["state"] == "sick" for name, worker in workers.items()} == {
            name: bool(callers) for name, callers in votes.items()
        }
        assert {name: worker["in_flight"] for name, worker in workers.items()} == {
            name: sum(worker == name for _, worker in flights.values()) for name in votes
        }
        assert [made.requests_of(peer) for peer in PEERS] == [
            sum(holder == peer for holder, _ in flights.values()) for peer in PEERS
        ]
    begun = Counter(counts(made))["placed"] + Counter(counts(made))["taken over"]
    ended = sum(count for name, count in counts(made).items() if name.startswith("ended "))
    assert begun - ended == made.state()["in_flight"] == len(flights)


# -- workers and loads


def test_a_worker_that_says_up_again_is_the_same_unless_it_moved():
    made = router("a")
    ask(made, "1")
    made.handle(WorkerUp("a", "http://a", "tcp://kv", capacity=2.0), 0.0)
    assert made.state()["in_flight"] == 1
    assert made.state()["workers"]["a"]["capacity"] == 2.0
    made.handle(WorkerUp("a", "http://elsewhere", "tcp://kv"), 0.0)
    assert made.state()["in_flight"] == 0
    assert ask(made, "2").url == "http://elsewhere"


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.filterwarnings("error")
def test_any_capacity_that_may_be_given_leaves_finite_numbers(name: str):
    """POST /workers takes it from anybody who may call it."""
    made = Router(build(name), page_size=16)
    for worker, capacity in (("a", LEAST_CAPACITY), ("b", LARGEST_CAPACITY), ("c", 1.0)):
        made.handle(WorkerUp(worker, "", capacity=capacity), 0.0)
    for number in range(60):
        made.handle(Arrive(str(number), f"c{number % 3}", PROMPT), float(number))
        if number == 30:
            made.handle(WorkerUp("b", "", capacity=LEAST_CAPACITY), 30.0)
    json.dumps(made.state(), allow_nan=False)


def test_a_changed_capacity_changes_load_and_quantum():
    made = router("a", "b")
    ask(made, "1")
    made.handle(WorkerUp("a", "http://a", "tcp://kv", capacity=0.5), 0.0)
    assert made.state()["deficits"] == {"c": {"a": 500, "b": 1000}}
    made.handle(Stored("b", (1, 2, 3, 4), None, PROMPT, 16), 0.0)
    for number in range(2, 4):
        ask(made, str(number))
    workers = made.state()["workers"]
    assert {name: worker["in_flight"] for name, worker in workers.items()} == {"a": 1, "b": 2}


def test_loads_in_tokens_follow_the_request():
    made = router("a")
    ask(made, "1", max_output_tokens=40)

    def loads() -> tuple[int, float]:
        worker = made.state()["workers"]["a"]
        return worker["prefill_tokens"], worker["decode_tokens"]

    assert loads() == (64, 40)
    ask(made, "2", max_output_tokens=10)
    assert loads() == (64, 50)  # its prompt is taken to be cached by then
    made.handle(Progress("1", 30), 0.0)
    assert loads() == (0, 20)
    made.handle(Progress("1", 20), 0.0)
    assert loads() == (0, 20)
    made.handle(Progress("1", 60), 0.0)
    assert loads() == (0, 11)  # longer than expected: not done yet
    made.handle(Done("1", 61), 0.0)
    made.handle(Done("2", 3), 0.0)
    assert loads() == (0, 0)


@pytest.mark.slow
def test_the_core_makes_no_garbage_in_cycles():
    """So a process that serves it need not look for any: `router.process`. Other threads may make some meanwhile."""
    assert any(garbage_of_the_core() == 0 for _ in range(3))


def garbage_of_the_core() -> int:
    made = router("a", "b", kv="tcp://kv", max_tree_tokens=640)
    rng = random.Random(1)
    gc.collect()
    gc.disable()
    try:
        for number in range(500):
            tokens = np.full(16 * rng.randrange(1, 9), rng.randrange(9), "<u4").tobytes()
            made.handle(Arrive(str(number), f"c{number % 7}", tokens), float(number))
            worker = rng.choice("ab")
            hashes = tuple(100 * tokens[0] + page for page in range(len(tokens) // 64))
            made.handle(Stored(worker, hashes, None, tokens, 16), float(number))
            if number % 3:
                made.handle(Done(str(number - 1)), float(number))
                made.handle(Removed(worker, hashes[-2:]), float(number))
            if number % 50 == 49:
                made.handle(Cleared("a"), float(number))
                made.handle(WorkerDown("b"), float(number))
                made.handle(WorkerUp("b", "", "tcp://kv"), float(number))
        assert made.tree.evicted_tokens
        return gc.collect()
    finally:
        gc.enable()


def test_ties_do_not_all_go_to_the_first_worker():
    made = router("a", "b", "c", "d")
    for number in range(40):
        tokens = np.full(32, number, "<u4").tobytes()
        made.handle(Arrive(str(number), "c", tokens), 0.0)
        made.handle(Done(str(number)), 0.0)
    assert [worker["dispatched"] for worker in made.state()["workers"].values()] == [10] * 4


def test_the_snapshot_is_json_and_lists_few_clients():
    made = Router(build("d2lpm", worker_quantum=float("inf")), name="d2lpm")
    made.handle(WorkerUp("a", "http://a"), 0.0)
    for number in range(300):
        made.handle(Arrive(str(number), f"client {number}", PROMPT), 0.0)
    ((to, snapshot),) = made.handle(Query("q"), 0.0, b"peer")
    assert to == b"peer"
    assert isinstance(snapshot, Snapshot)
    assert decode_answer(encode(snapshot)) == snapshot
    state = msgspec.json.decode(msgspec.json.encode(snapshot.state))
    assert state["placement"] == "d2lpm"
    assert state["parameters"]["worker_quantum"] is None
    assert len(state["deficits"]) == 100
    assert state["deficits"]["client 299"] == {"a": None}
    assert state["decisions"] == state["in_flight"] == 300


def test_messages_survive_the_wire_and_nonsense_does_not():
    for event in (
        Arrive("1", "c", PROMPT, 5, "m", exclude=("a",)),
        Done("1", 3, None, "aborted", 0.5, None),
    ):
        assert decode_event(encode(event)) == event
    nonsense = (
        b"",
        b"\xc1",
        b"\x81\xa4type\xa1\xff",
        encode(Place("1", "a", "u", 0)),
        msgspec.msgpack.encode({"type": "Done", "id": "1", "outcome": "lost"}),
        msgspec.msgpack.encode({"type": "Done", "id": "1", "output_tokens": -1}),
        msgspec.msgpack.encode({"type": "Arrive", "id": "1", "client": "c", "tokens": b"123"}),
        msgspec.msgpack.encode({"type": "WorkerUp", "worker": "a", "url": "u", "capacity": 0}),
    )
    for data in nonsense:
        with pytest.raises(ProtocolError, match="not an event"):
            decode_event(data)
    with pytest.raises(ProtocolError, match="not an answer"):
        decode_answer(encode(Query("q")))


def test_long_prompts_of_one_client_leave_what_the_others_have_cached():
    router = Router(build("d2lpm"), page_size=1, max_tree_tokens=6400)
    router.handle(WorkerUp("a", "http://a", "tcp://a"), 0.0)
    prompts = [pack_tokens(range(number * 100, number * 100 + 100)) for number in range(40)]
    for number, prompt in enumerate(prompts):
        router.handle(Stored("a", (number,), None, prompt, 100), 1.0)
    for number in range(3):
        long = pack_tokens(range(10_000 * number + 100_000, 10_000 * number + 106_400))
        router.handle(Arrive(f"g{number}", "greedy", long, 1), 2.0, b"g")
    router.handle(Done("g0", outcome="aborted"), 3.0)
    router.handle(Stored("a", (1000,), None, pack_tokens(range(50, 150)), 100), 3.0)
    assert all(router.tree.match(prompt).tokens == 100 for prompt in prompts)


def test_a_placement_hears_how_many_requests_one_stands_for():
    made, seen = router("a"), []
    place = made.placements.first.place
    made.placements.first.place = lambda request, *more: (
        seen.append(request.stands_for) or place(request, *more)
    )
    for name, more in (("1", {}), ("2", {"stands_for": 12_500})):
        ask(made, name, **more)
    assert seen == [1, 12_500]
