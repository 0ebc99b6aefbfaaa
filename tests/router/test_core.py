"""The router's state machine: what it answers, and that every request is accounted exactly once."""

import gc
import json
import random

import msgspec
import numpy as np
import pytest

from router.core import Router
from router.events import (
    LARGEST_CAPACITY,
    LEAST_CAPACITY,
    Arrive,
    Cleared,
    Done,
    Place,
    Progress,
    ProtocolError,
    Query,
    Refuse,
    Removed,
    Snapshot,
    Stored,
    WorkerDown,
    WorkerHealth,
    WorkerUp,
    decode_answer,
    decode_event,
    encode,
)
from router.placement import PLACEMENTS, build
from router.placement.d2lpm import D2lpm
from router.wire import pack_tokens
from tests.router.model import Model
from tests.support.budget import seeds
from tests.support.tree_check import holdings

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
    made.handle(WorkerHealth("a", False), 0.0)
    assert ask(made, "2").reason == "no worker takes requests: each drains or does not answer"
    assert counts(made)["refused"] == 3


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_whatever_comes_and_is_lost_each_request_is_answered_and_ends_once(placement):
    """And a worker is sick while any peer calls it so; whoever asks again gets the same; see `model`."""
    held = 0
    for seed in seeds(20):
        tight = {"slots": 1, "kv_tokens": 64, "chunk_tokens": 0, "tiers": False} if seed % 2 else {}
        model = Model(placement, **tight).walk(seed, 100)
        held += model.held
    assert (held > 0) is model.is_holding


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


# -- workers and loads


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
    place = made.placement.place
    made.placement.place = lambda request, *more: seen.append(request.stands_for) or place(request, *more)
    for name, more in (("1", {}), ("2", {"stands_for": 12_500})):
        ask(made, name, **more)
    assert seen == [1, 12_500]
