"""Who plans for a router, what of the answers is believed, and that nothing waits for a planner."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Router
from router.events import (
    Arrive,
    Held,
    Lengths,
    Load,
    PeerGone,
    Place,
    Plan,
    Planner,
    Progress,
    ProtocolError,
    Query,
    Refuse,
    Replan,
    Shortage,
    Tick,
    WorkerUp,
    decode_answer,
    decode_event,
    encode,
)
from router.placement.contract import Planning
from router.planner import answers
from router.planning import LENGTHS_EVERY_S, LOOK_S, MOST_PLANNERS, OLD_S, SILENT_S
from router.queues.centres import centres
from router.queues.plan import plan
from router.queues.problem import FAR_S, Demand, Problem, Queue
from router.silence import OwnTime
from router.throttling import Throttling
from sglang_fair.core.throttle import PREDICTED_S, make_rules
from tests.support.budget import examples
from tests.support.planned_queues import GROUPS, Queues, small
from tests.support.queue_problems import a_problem, faults

NOTHING = Progress("nobody's", 1)


def router() -> tuple[Router, Queues]:
    queues = Queues()
    assert isinstance(queues, Planning)
    made = Router(queues, name="queues")
    made.handle(WorkerUp("a", "http://a"), 0.0)
    return made, queues


def counts(made: Router) -> dict[str, int]:
    state = made.state()["planner"]
    assert isinstance(state, dict)
    return state["counts"]


def question(actions: list) -> tuple[bytes, Replan]:
    (found,) = [(peer, one) for peer, one in actions if isinstance(one, Replan)]
    return found


def asked(made: Router, now_s: float) -> tuple[bytes, Replan]:
    return question(made.handle(NOTHING, now_s))


def orders_of(problem: Problem) -> dict[str, tuple[int, ...]]:
    return {"a": tuple(demand.number for demand in problem.demands), "b": ()}


def reply(replan: Replan, **more: object) -> Plan:
    return Plan(replan.number, orders_of(replan.problem), **more)


def test_the_question_goes_out_whatever_happens_next() -> None:
    made, queues = router()
    made.handle(Planner(), 0.0, b"p")
    queues.is_late = True
    assert question(made.handle(Arrive("1", "c", b"", may_hold=True), 0.0, b"g"))[0] == b"p"


def test_the_first_planner_counts_and_the_next_takes_over() -> None:
    made, queues = router()
    for name in ("p", "q"):
        made.handle(Planner(name), 0.0, name.encode())
    queues.is_late = True
    state = made.state()["planner"]
    assert isinstance(state, dict)
    assert (state["up"], state["name"], state["standing_by"]) == (True, "p", 1)
    to, replan = asked(made, 1.0)
    assert to == b"p"
    made.handle(reply(replan), 1.1, b"q")  # which was not asked
    assert queues.applied == []
    assert question(made.handle(PeerGone(), 1.2, b"p")) == (b"q", replan)
    made.handle(reply(replan), 1.3, b"p")
    assert queues.applied == []
    made.handle(reply(replan), 1.4, b"q")
    assert [number for number, _ in queues.applied] == [1]
    assert counts(made) == {
        "asked": 2, "answered": 1, "stale": 2, "refused": 0, "unanswered": 0, "gone": 1,
    }  # fmt: skip


def test_one_that_hangs_is_not_asked_again_while_another_stands_by() -> None:
    made, queues = router()
    for name in ("p", "q"):
        made.handle(Planner(name), 0.0, name.encode())
    queues.is_late = True
    assert asked(made, 0.0)[0] == b"p"
    to, second = asked(made, queues.replans.patience_s)
    assert to == b"q"
    made.handle(reply(second), queues.replans.patience_s, b"q")
    assert asked(made, 12.0)[0] == b"q"
    assert counts(made)["unanswered"] == 1


def test_one_that_is_silent_is_gone_until_it_speaks_again() -> None:
    made, queues = router()
    made.handle(Planner("p"), 0.0, b"p")
    made.handle(Planner("q"), 1.0, b"q")
    queues.is_late = True
    to, replan = asked(made, 1.0)
    assert to == b"p"
    for now_s in (2.0, 3.0, SILENT_S):
        assert made.handle(Tick(), now_s) == []
    assert question(made.handle(Tick(), SILENT_S + 0.1)) == (b"q", replan)
    assert made.handle(Tick(), 4.3) == made.handle(Tick(), 5.0) == []
    assert queues.attended == [True, False]
    made.handle(Planner("p"), 5.0, b"p")
    assert queues.attended == [True, False, True]


def test_a_planner_that_comes_back_is_asked_again() -> None:
    made, queues = router()
    made.handle(Planner(), 0.0, b"p")
    queues.is_late = True
    _, old = asked(made, 0.0)
    made.handle(PeerGone(), 1.0, b"p")
    made.handle(reply(old), 1.5, b"p")
    assert queues.applied == []
    to, fresh = question(made.handle(Planner(), 20.0, b"p"))
    assert (to, fresh.number) == (b"p", 2)


def test_plans_that_cannot_be_are_refused_whole() -> None:
    made, queues = router()
    made.handle(Planner(), 0.0, b"p")
    queues.is_late = True
    lies = (
        lambda problem: {"a": tuple(range(10_000))},
        lambda problem: {str(number): () for number in range(GROUPS + 3)},
        lambda problem: {"a": (1,) * 3, "b": (1,) * 3},
    )
    for second, lie in enumerate(lies):
        _, replan = asked(made, 20.0 * second)
        made.handle(Plan(replan.number, lie(replan.problem)), 20.0 * second, b"p")
    assert queues.applied == []
    assert counts(made)["refused"] == len(lies)
    _, replan = asked(made, 100.0)
    for late_s in (float("nan"), float("inf")):
        made.handle(Plan(replan.number, {}, 0, late_s), 100.0, b"p")
    assert queues.applied == []


def test_many_planners_are_not_remembered() -> None:
    made, _ = router()
    for number in range(1_000):
        made.handle(Planner("x" * 10_000), 0.0, str(number).encode())
    state = made.state()["planner"]
    assert isinstance(state, dict)
    assert state["standing_by"] == MOST_PLANNERS - 1
    assert len(msgspec.json.encode(state)) < 2_000


def test_a_shortage_lasts_as_long_as_plans_say_so() -> None:
    made, queues = router()
    made.handle(Planner(), 0.0, b"p")
    queues.is_late = True

    def shortage(now_s: float) -> object:
        queues.is_late = False
        made.handle(Query("q"), now_s, b"x")
        queues.is_late = True
        state = made.state()["planner"]
        assert isinstance(state, dict)
        return state["shortage"]

    short = Shortage(2, 1, {"m": 2}, "work")
    for second in (1, 2, 3):
        _, replan = asked(made, second)
        assert shortage(second) is None or second > 1
        made.handle(reply(replan, late=1, late_s=4.0, needed=short), second, b"p")
    assert shortage(3.5) == {"more": 2, "least": 1, "models": {"m": 2}, "why": "work", "for_s": 2.5}
    assert shortage(3.0 + OLD_S + 0.1) is None
    _, replan = asked(made, 30.0)
    made.handle(reply(replan, late=1, late_s=4.0, needed=short), 30.0, b"p")
    found = shortage(31.0)
    assert isinstance(found, dict)
    assert found["for_s"] == 1.0  # it had ended in between
    _, replan = asked(made, 32.0)
    made.handle(reply(replan), 32.0, b"p")
    assert shortage(32.0) is None


def test_lengths_are_told_now_and_then_and_kinds_come_back() -> None:
    made, queues = router()
    made.handle(Planner(), 0.0, b"p")
    queues.is_late = True
    told = []
    for second in range(int(LENGTHS_EVERY_S) + 2):
        _, replan = asked(made, second)
        if replan.lengths:
            told.append(second)
            good = Lengths("m", "interactive", ((1.0, 2.0),))
            made.handle(reply(replan, centres=(good, Lengths("m", "x", ()))), second, b"p")
        else:
            made.handle(reply(replan), second, b"p")
    assert told == [0, LENGTHS_EVERY_S]
    assert queues.kinds == [("m", "interactive")] * 2
    assert counts(made)["refused"] == 2  # of kinds; the plans counted
    assert counts(made)["answered"] == LENGTHS_EVERY_S + 2


def test_who_waits_is_explained() -> None:
    made, queues = router()
    made.handle(Arrive("1", "c", b"", may_hold=True), 0.0, b"g")
    made.handle(Arrive("2", "c", b"", may_hold=True), 0.001, b"g")
    (one,), (two,) = (made._record.find(name, None, 0.0) for name in "12")
    assert (one["standing"], two["standing"]) == ({"group": 1, "ahead": True}, {"group": 1, "ahead": False})
    assert made._with_standing(one)["stands"] == {"group": 1, "ahead": True}
    queues.let_go = 2
    assert {type(answer) for _, answer in made.handle(Tick(), 1.0)} == {Place}
    assert "stands" not in made._with_standing(one)


def test_time_alone_places_what_waits() -> None:
    made, queues = router()
    assert made.handle(Arrive("1", "c", b"", may_hold=True), 0.0, b"g") == [(b"g", Held("1"))]
    queues.let_go = 1
    ((peer, answer),) = made.handle(Tick(), 1.0)
    assert (peer, type(answer)) == (b"g", Place)


PEERS = st.sampled_from([b"p", b"q", b"r"])


@settings(max_examples=examples(150))
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("hello"), PEERS),
            st.tuples(st.just("gone"), PEERS),
            st.tuples(st.just("plan"), PEERS, st.integers(0, 6)),
            st.tuples(st.just("late"), st.booleans()),
            st.tuples(st.just("wait"), st.floats(0, LOOK_S) | st.floats(0, 15)),
            st.tuples(st.just("tick")),
        ),
        max_size=60,
    )
)
def test_whatever_planners_do_each_question_is_answered_once_by_who_was_asked(steps: list[tuple]) -> None:
    made, queues = router()
    now_s, there, sent, taken = 0.0, dict[bytes, float](), dict[int, list[bytes]](), 0
    time = OwnTime(LOOK_S)
    for step in steps:
        before = len(queues.applied)
        match step:
            case ("hello", peer):
                actions = made.handle(Planner(), now_s, peer)
                there[peer] = time.look(now_s)
            case ("gone", peer):
                actions = made.handle(PeerGone(), now_s, peer)
                there.pop(peer, None)
            case ("plan", peer, number):
                actions = made.handle(Plan(number, {"a": (10 * number,)}), now_s, peer)
                if len(queues.applied) > before:
                    assert sent[number][-1] == peer
                    assert number == max(sent)
                    taken += 1
            case ("late", is_late):
                queues.is_late = is_late
                actions = made.handle(NOTHING, now_s)
            case ("wait", seconds):
                now_s += seconds
                actions = made.handle(NOTHING, now_s)
            case _:
                actions = made.handle(Tick(), now_s)
                own_s = time.look(now_s)
                there = {peer: heard_s for peer, heard_s in there.items() if own_s - heard_s <= SILENT_S}
        for peer, answer in actions:
            assert isinstance(answer, Replan)
            assert peer in there
            sent.setdefault(answer.number, []).append(peer)
        if there:
            assert queues.attended[-1]
        else:
            assert not any(queues.attended[-1:])
    numbers = [number for number, _ in queues.applied]
    assert numbers == sorted(set(numbers))
    assert counts(made)["answered"] == taken == len(numbers)


def test_deadlines_that_will_be_missed_are_overload() -> None:
    queues = Queues()
    rules = make_rules({"user": 1}, "limits")
    made = Router(queues, name="queues", throttling=Throttling("oit", rules))
    made.handle(WorkerUp("a", "http://a"), 0.0)
    made.handle(Load("a", 0, 0, 100), 0.0)
    names = iter(range(100))

    def refused(now_s: float) -> Refuse | None:
        actions = made.handle(Arrive(str(next(names)), "c", b"", may_hold=True), now_s, b"g")
        return next((one for _, one in actions if isinstance(one, Refuse)), None)

    made.handle(Tick(), 0.5)
    assert [refused(1.0) for _ in range(3)] == [None] * 3
    queues.is_late = True
    made.handle(Tick(), 2.0)
    found = refused(2.0)
    assert found is not None
    assert "deadlines of clients within their share will be missed" in found.reason
    throttle = made.state()["throttle"]
    assert isinstance(throttle, dict)
    assert throttle["overloaded_for_s"] == 0.0
    assert refused(2.0 + PREDICTED_S) is None, "a router that does not look any more says nothing"
    made.handle(Tick(), 10.0)
    assert refused(10.0) is not None
    queues.is_late = False
    made.handle(Tick(), 11.0)
    assert refused(11.0) is None


# -- messages


@pytest.mark.parametrize(
    "broken",
    [
        {"type": "Plan", "number": -1, "orders": {}},
        {"type": "Plan", "number": 1, "orders": {"a": [1.5]}},
        {"type": "Plan", "number": 1, "orders": {}, "late_s": -1.0},
        {"type": "Plan", "number": 1, "orders": {}, "needed": {"more": -1, "least": 0}},
        {"type": "Plan", "number": 1, "orders": {}, "needed": {"more": 10**9, "least": 0}},
        {"type": "Plan", "number": 1, "orders": {}, "needed": {"more": 1, "least": 0, "why": "x" * 10_000}},
        {"type": "Plan", "number": 1, "orders": {}, "centres": [["m", "c", [[float("inf"), 0.0]]]]},
        {"type": "Plan", "number": 1, "orders": {}, "centres": [["m", "c", [[0.0, 0.0]] * 10_000]]},
        {"type": "Planner", "name": 1},
    ],
)
def test_messages_that_cannot_be_are_refused(broken: dict) -> None:
    with pytest.raises(ProtocolError):
        decode_event(msgspec.msgpack.encode(broken))


def test_a_question_that_cannot_be_planned_is_refused() -> None:
    whole = msgspec.msgpack.decode(encode(Replan(3, small())))
    whole["problem"]["demands"][0]["slack_s"] = float("nan")
    with pytest.raises(ProtocolError):
        decode_answer(msgspec.msgpack.encode(whole))


# -- answers


@settings(max_examples=examples(40))
@given(st.integers(0, 2**32), st.integers(0, 8), st.integers(1, 4))
def test_the_answer_is_the_plan_and_a_shortage_is_told_if_there_is_one(
    seed: int, groups: int, workers: int
) -> None:
    problem = a_problem(Random(seed), groups, workers, tight=1.5)
    question = Replan(5, problem)
    found = plan(problem, solver="search", most_work=1_000_000)
    short = Shortage(1, 1)
    answer = answers.answer(question, found, 0.5, short)
    assert answer.number == 5
    assert faults(problem, answer.orders) == []
    assert (answer.needed is None) == found.is_feasible  # nothing here is late already
    assert decode_event(encode(answer)) == answer


@pytest.mark.slow
def test_kinds_are_those_of_the_lengths() -> None:
    points = ((1.0, 1.0),) * 20 + ((6.0, 6.0),) * 20
    question = Replan(1, small(), (Lengths("m", "c", points), Lengths("m", "d", ())))
    answer = answers.answer(question, answers.planned(question, "search"), 0.0, None)
    assert answer.centres == (Lengths("m", "c", centres(points)),)


def needs(demands: Sequence[Demand], queues: Sequence[Queue]) -> Shortage:
    found = answers.shortage(Problem(demands, queues))
    assert found is not None
    return found


def test_as_many_replicas_as_do_of_the_model_that_is_late() -> None:
    queues = [Queue("a", "x"), Queue("b", "y")]
    drains = {"a": 10.0}
    busy = [Demand(number, "x", 12.0, drains) for number in range(6)]
    calm = [Demand(10, "y", 12.0, {"b": 1.0})]
    found = needs(busy + calm, queues)
    assert found.more == 2  # three queues begin two groups each within 12 s
    assert found.models == {"x": 2}


def test_what_is_late_whatever_is_added_still_asks_for_help() -> None:
    queues = [Queue("a", "x")]
    late = [Demand(number, "x", -100.0, {"a": 30.0}) for number in range(8)]
    found = needs(late, queues)
    assert found.more == 2  # 30 s each, begun within 60 s: three at each queue
    assert "8 groups are late already" in found.why


def test_what_is_late_counts_as_if_it_came_now() -> None:
    queues = [Queue("a", "x")]
    late = [Demand(number, "x", FAR_S, {"a": 4.0}, promised=(3.0, 1.0)) for number in range(4)]
    problem = Problem(late, queues)
    found = plan(problem, solver="search")
    assert found.is_feasible
    assert answers.is_short(problem, found)
    assert needs(late, queues).more == 7  # each is shared by two, which end within 3 s
    ahead = [replace(demand, tier=1) for demand in late]
    problem = Problem(ahead, queues)
    assert not answers.is_short(problem, plan(problem, solver="search"))
    assert answers.shortage(problem) is None
    mixed = [replace(demand, promised=(3.0, 0.25)) for demand in late]
    assert needs(mixed, queues).more == 1  # four seconds of it are urgent
    few = Problem(late[:1], queues)
    assert not answers.is_short(few, plan(few, solver="search"))


def test_a_group_that_is_too_large_for_one_replica_is_shared() -> None:
    queues = [Queue("a", "x")]
    found = needs([Demand(1, "x", 3.0, {"a": 8.0}, last_slack_s=3.0, begun_on="a")], queues)
    assert found.more == 2  # 8 s of work that end within 3 s
    found = needs([Demand(1, "x", 0.0, {"a": 8.0}, last_slack_s=0.0)], queues)
    assert found.more == 15


def test_replicas_that_keep_their_model_are_not_thought_to_swap() -> None:
    queues = [Queue("a", "x"), Queue("b", "y")]
    demands = [Demand(number, "x", 1.0, {"a": 10.0}) for number in range(2)]
    demands += [Demand(10 + number, "y", 1.0, {"b": 10.0}) for number in range(2)]
    found = needs(demands, queues)
    assert found.models == {"x": 1, "y": 1}
    assert found.more == 2


def test_a_new_replica_serves_one_model_after_the_other_only_if_it_can() -> None:
    demands = [Demand(number, "x", 1.0, {"a": 10.0}) for number in range(2)]
    demands += [
        Demand(10 + number, "y", second, {"b": 10.0}) for number, second in enumerate((1.0, 12.0, 12.0))
    ]
    swap_s = {"x": 1.0, "y": 1.0}
    assert needs(demands, [Queue("a", "x"), Queue("b", "y")]).more == 2
    swapping = [Queue("a", "x", swap_s), Queue("b", "y", swap_s)]
    assert needs(demands, swapping).more == 1


def test_names_of_workers_are_not_taken() -> None:
    queues = [Queue("new", "x"), Queue("new+", "x")]
    problem, like = answers.one_more(Problem([Demand(1, "x", 1.0, {"new": 2.0, "new+": 4.0})], queues))
    assert like.worker == "new++"
    assert problem.demands[0].drain_s["new++"] == 3.0
