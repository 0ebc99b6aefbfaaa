"""Several models behind one router: a request goes only to workers that have its model, whatever the placement."""

from typing import Any

import pytest

from router.core import Router
from router.events import (
    Arrive,
    Begun,
    Done,
    Due,
    Held,
    Load,
    Place,
    Refuse,
    Running,
    Stored,
    Table,
    WorkerDown,
    WorkerUp,
    decode_event,
    encode,
)
from router.models import meant
from router.placement import build
from router.throttling import Throttling
from router.wire import pack_tokens
from sglang_fair.core.throttle import Rules

PEER = b"g"
PROMPT = pack_tokens(range(64))


def up(name: str, model: str = "", **more: Any) -> WorkerUp:
    models = (model,) if model else ()
    return WorkerUp(name, f"http://{name}", models=models, loaded=model, **more)


def router(placement: str = "d2lpm-queue", *workers: WorkerUp, **options: Any) -> Router:
    made = Router(build(placement), name=placement, **options)
    for one in workers:
        made.handle(one, 0.0)
    return made


def ask(made: Router, name: str, model: str = "", now_s: float = 0.0, **more: Any) -> Place | Refuse:
    values = {"client": "c", "tokens": PROMPT} | more
    actions = made.handle(Arrive(name, model=model, **values), now_s, PEER)
    ((_, answer),) = [one for one in actions if not isinstance(one[1], Held)]
    assert isinstance(answer, Place | Refuse)
    return answer


def worker(made: Router, name: str, model: str = "", **more: Any) -> str:
    answer = ask(made, name, model, **more)
    assert isinstance(answer, Place), answer
    return answer.worker


# ---- the rule


def test_what_is_meant() -> None:
    assert meant("", ()) == "" == meant("anything", ()), "one model, which nobody has named"
    assert meant("", {"a"}) == "a" == meant("a", {"a"})
    assert meant("b", {"a"}) is None
    assert meant("a", {"a", "b"}) == "a"
    assert meant("", {"a", "b"}) is None, "who says nothing is not understood"


# ---- whatever the placement, and whatever comes


def test_turns_are_taken_among_the_workers_of_a_model() -> None:
    made = router("round_robin", up("w0", "a"), up("w1", "a"), up("w2", "b"), up("w3", "b"))
    placed = [worker(made, f"{number}", "ab"[number % 2]) for number in range(8)]
    assert [placed.count(f"w{number}") for number in range(4)] == [2, 2, 2, 2], (
        "one pointer for both would always be behind the same ones"
    )


@pytest.mark.parametrize("name", ["d2lpm", "d2lpm-queue"])
def test_what_a_client_uses_of_one_model_moves_it_nowhere_among_the_other_s_workers(name: str) -> None:
    """Deficits are of a client and a worker: those of `b` are as if there were no requests for `a`."""
    alone = Router(build(name, worker_quantum=3000.0), name=name, page_size=4)
    mixed = Router(build(name, worker_quantum=3000.0), name=name, page_size=4)
    for one in (up("b0", "b"), up("b1", "b")):
        alone.handle(one, 0.0)
    for one in (up("a0", "a"), up("a1", "a"), up("b0", "b"), up("b1", "b")):
        mixed.handle(one, 0.0)
    for number in range(60):
        tokens = pack_tokens(range(1000 * (number % 3), 1000 * (number % 3) + 200 + number))
        worker(mixed, f"a{number}", "a", tokens=tokens, max_output_tokens=5000)
        expected = worker(alone, f"b{number}", "b", tokens=tokens, max_output_tokens=64)
        assert worker(mixed, f"b{number}", "b", tokens=tokens, max_output_tokens=64) == expected
        for made in (alone, mixed):
            made.handle(Done(f"b{number}", output_tokens=64), 0.0, PEER)
    of_alone, of_mixed = alone.state()["deficits"]["c"], mixed.state()["deficits"]["c"]
    assert of_mixed.keys() == {"a0", "a1", "b0", "b1"}, "one account of the client, at all workers"
    assert {name: of_mixed[name] for name in of_alone} == of_alone


def test_one_queue_of_all_models_leaves_no_worker_idle() -> None:
    made = router("centralized_dlpm", up("w0", "a"), up("w1", "b"))
    slots = 64
    for number in range(slots):
        assert worker(made, f"a{number}", "a") == "w0"
    for number in range(5):
        actions = made.handle(Arrive(f"x{number}", "c", PROMPT, model="a"), 0.0, PEER)
        assert [type(answer) for _, answer in actions] == [Held]
    assert worker(made, "b", "b") == "w1", "those that wait for the other model are not in its way"
    ((_, place),) = made.handle(Done("a0"), 0.0, PEER)
    assert (place.id[0], place.worker) == ("x", "w0")


def test_what_waits_for_a_model_without_workers_is_refused() -> None:
    made = Router(build("centralized_dlpm", slots=1), name="centralized_dlpm")
    for one in (up("w0", "a"), up("w1", "b")):
        made.handle(one, 0.0)
    for model in "ab":
        assert isinstance(ask(made, f"{model}0", model), Place)
        assert made.handle(Arrive(f"{model}1", "c", PROMPT, model=model), 0.0, PEER)
    actions = made.handle(WorkerDown("w1"), 0.0, PEER)
    assert actions == [(PEER, Refuse("b1", "no worker of model b is up", True))]
    assert made.state()["waiting"] == 1


# ---- prefixes


def test_cached_prefixes_are_per_model() -> None:
    made = router("d2lpm-queue", up("w0", "a", kv="tcp://a"), up("w1", "b", kv="tcp://b"))
    made.handle(Stored("w0", (1, 2, 3, 4), None, PROMPT, 16), 0.0)
    assert ask(made, "1", "a") == Place("1", "w0", "http://w0", 64)
    assert ask(made, "2", "b") == Place("2", "w1", "http://w1", 0), "other tokens, whatever their numbers"
    assert made.tree.match(PROMPT).tokens == 0, "and under no name that says no model"
    salted = ask(made, "3", "a", namespace="salt")
    assert isinstance(salted, Place)
    assert salted.matched_tokens == 0


def test_another_model_at_an_address_is_another_process() -> None:
    made = router("d2lpm-queue", up("w0", "a"), up("w1", "b"))
    ask(made, "1", "a")
    made.handle(up("w0", "b"), 0.0)
    state = made.state()
    assert (state["in_flight"], state["counts"]["lost with their worker"]) == (0, 1)
    assert ask(made, "2", "a") == Refuse("2", "no worker of model a is up", True)
    assert ask(made, "3", "b").matched_tokens == 0  # type: ignore[union-attr]
    made.handle(up("w0"), 0.0)
    assert made.state()["workers"]["w0"]["model"] == "b", "who omits it says nothing new"


# ---- peers that know of one model


def test_peers_that_say_no_model_mean_the_only_one() -> None:
    made = router("d2lpm-queue", up("w0"), up("w1"))
    assert worker(made, "1") in ("w0", "w1")
    assert worker(made, "2", "whatever a gateway calls it") in ("w0", "w1")
    made.handle(up("w2", "a"), 0.0)
    assert {worker(made, f"x{number}", "a", client=f"c{number}") for number in range(30)} == {
        "w0",
        "w1",
        "w2",
    }
    assert worker(made, "3") in ("w0", "w1", "w2")
    assert isinstance(ask(made, "4", "b"), Refuse)
    made.handle(up("w3", "b"), 0.0)
    assert worker(made, "5", "b") == "w3"
    assert {worker(made, f"y{number}", "a", client=f"c{number}") for number in range(30)} == {"w2"}, (
        "nobody knows which of both w0 and w1 have"
    )
    assert ask(made, "6") == Refuse("6", "there are several models, and it names none", True)
    made.handle(WorkerDown("w3"), 0.0)
    assert ask(made, "7") == Refuse("7", "there are several models, and it names none", True), (
        "the other one is down, and it may be meant"
    )


def test_messages_of_before_are_understood_and_say_what_they_said() -> None:
    for event in (
        Arrive("1", "c", PROMPT),
        WorkerUp("w0", "http://w0"),
        Running("1", "c", PROMPT, worker="w0"),
    ):
        encoded = encode(event)
        assert decode_event(encoded) == event
        assert b"model" not in encoded
        assert b"loaded" not in encoded
        assert b"due" not in encoded


def test_a_worker_has_only_what_it_can_load() -> None:
    with pytest.raises(ValueError, match="none of its models"):
        decode_event(
            encode(WorkerUp("w0", "http://w0", models=("a",), loaded="a")).replace(b"\xa1a", b"\xa1b", 1)
        )
    made = router("d2lpm-queue", WorkerUp("w0", "http://w0", models=("a", "b")))
    assert isinstance(ask(made, "1", "a"), Refuse), "it has loaded nothing yet"


# ---- what else is per model


def test_a_call_is_throttled_by_how_full_its_model_s_workers_are() -> None:
    rules = Rules(user=1)
    made = router("d2lpm-queue", up("w0", "a"), up("w1", "b"), throttling=Throttling("oit", rules))
    made.handle(Load("w0", 1000, 0, 1000), 0.0)
    made.handle(Load("w1", 0, 0, 1000), 0.0)
    assert isinstance(ask(made, "1", "a"), Place)
    assert isinstance(ask(made, "2", "b"), Place)
    refused = ask(made, "3", "a")
    assert isinstance(refused, Refuse)
    assert refused.code == "throttled_user"
    assert isinstance(ask(made, "4", "b"), Place), "its workers have nothing to do"
    throttle = made.state()["throttle"]
    assert (throttle["overloaded_for_s"], throttle["pressure"]) == (0.0, 1.0), "of who is worst off"


def test_answers_of_one_model_say_nothing_of_another_s() -> None:
    made = router("least_tokens", up("w0", "a"), up("w1", "b"))
    for number in range(50):
        ask(made, f"{number}", "a")
        made.handle(Done(f"{number}", output_tokens=2000), 0.0, PEER)
    ask(made, "x", "a")
    ask(made, "y", "b")
    workers = made.state()["workers"]
    assert workers["w0"]["decode_tokens"] > 1500
    assert workers["w1"]["decode_tokens"] < 200


# ---- deadlines


def test_a_deadline_is_kept_by_the_router_s_clock_and_told_as_what_is_left() -> None:
    made = Router(build("centralized_dlpm", slots=1), name="centralized_dlpm")
    made.handle(up("w0"), 1000.0)
    ask(made, "1", now_s=1000.0)
    due = Due("batch-1", 60.0, 50.0)
    made.handle(Arrive("2", "c", PROMPT, due=due), 1000.0, PEER)
    ((_, place),) = made.handle(Done("1"), 1030.0, PEER)
    assert place.due == Due("batch-1", 60.0, 20.0)
    assert made.handle(Table("", ("2",)), 1031.0, PEER)
    again = ask(made, "2", now_s=1031.0)
    assert isinstance(again, Place)
    assert again.due == Due("batch-1", 60.0, 19.0)
    found = made.record.find("2", None, 1031.0)[0]
    assert found["slo"] == {"class": "batch-1", "slo_s": 60.0, "left_s": 20.0}


def test_later_calls_are_due_when_the_first_was() -> None:
    made = router("d2lpm-queue", up("w0"))
    interactive, batch = Due("interactive", 20.0, 20.0), Due("batch-2", 3600.0, 3600.0)
    first = ask(made, "1", interaction="i", due=interactive)
    later = ask(made, "2", interaction="i", due=batch, now_s=15.0)
    other = ask(made, "3", interaction="j", due=batch, now_s=15.0)
    alone = ask(made, "4", due=interactive, now_s=15.0)
    dues = [one.due for one in (first, later, other, alone) if isinstance(one, Place)]
    assert dues == [interactive, Due("interactive", 20.0, 5.0), batch, interactive]


def test_later_calls_keep_class_and_start_of_the_first_in_the_queues() -> None:
    """So they go before what has come since, whatever their own headers say, and stand in the group of the first."""
    made = Router(build("qlm", kv_tokens=64, chunk_tokens=0), name="qlm")
    made.handle(up("w0"), 0.0)
    interactive, batch = Due("interactive", 20.0, 20.0), Due("batch-2", 3600.0, 3600.0)
    assert isinstance(ask(made, "first", interaction="i", due=interactive), Place)
    made.handle(Done("first", 1), 1.0, PEER)
    assert isinstance(ask(made, "runs", client="other", due=batch, now_s=1.0), Place)
    for name, values in (
        ("since", {"due": interactive}),
        ("later", {"due": batch, "interaction": "i"}),
        ("alone", {"due": batch}),
    ):
        actions = made.handle(Arrive(name, "c", PROMPT, **values), 5.0, PEER)
        assert actions == [(PEER, Held(name))]
    groups = {name: made.placement.standing(name, 5.0)["group"] for name in ("since", "later", "alone")}
    assert groups["since"] == groups["later"] != groups["alone"]
    served = []
    name = "runs"
    for now_s in (6.0, 7.0, 8.0):
        ((_, place),) = made.handle(Done(name, 1), now_s, PEER)
        name = place.id
        served.append((name, place.due))
    assert [one for one, _ in served] == ["later", "since", "alone"]
    assert served[0][1] == Due("interactive", 20.0, 14.0)


def test_a_router_that_was_restarted_hears_when_interactions_are_due() -> None:
    """From the gateway that served their first calls; the next one may come through another gateway."""
    made = router("d2lpm-queue", up("w0"))
    first = Due("batch-1", 60.0, 10.0)
    rows = (("c", "", "i", 2, first), ("c", "", "j", 1, None), ("c", "", "k", 1, None))
    made.handle(decode_event(encode(Begun(rows))), 0.0, b"h")
    fresh = Due("interactive", 20.0, 20.0)
    asked = [ask(made, name, interaction=name, due=fresh) for name in "ijk"]
    assert [one.due for one in asked if isinstance(one, Place)] == [first, fresh, fresh]


def test_a_router_that_was_restarted_takes_the_gateway_s_word() -> None:
    made = router("d2lpm-queue", up("w0"))
    late = Due("interactive", 20.0, -40.0)
    answer = ask(made, "1", interaction="i", begun=3, due=late)
    assert isinstance(answer, Place)
    assert (answer.call, answer.due) == (4, late)
