"""A placement with queues in the router: plans that lie, fail or never come change who goes first, and nothing else."""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from io import StringIO
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from router.core import Router
from router.events import (
    Arrive,
    Done,
    Due,
    Explain,
    Explained,
    Held,
    Load,
    Place,
    Planned,
    Refuse,
    Tick,
    WorkerUp,
)
from router.placement import build
from router.placement.contract import Placement, Request, Work
from router.placement.qlm.search import Answer
from router.throttling import Throttling
from sglang_fair.cluster import explain
from sglang_fair.cluster.status import MOST_ROWS, render
from sglang_fair.core.throttle import PREDICTED_S, make_rules
from tests.support.budget import examples

MODELS = ("a", "b")


class Site:
    """A router with queues, workers that serve what they are given, and plans."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_s = 0.0
        self.core = Router(
            build("qlm", delta=0.1, solver="search", plan_work=100_000), name="qlm", linger_s=0.0
        )
        for number in range(3):
            model = MODELS[number % 2]
            self.core.handle(
                WorkerUp(f"w{number}", f"http://w{number}", models=(model,), loaded=model,
                         kv_tokens=400, chunk_tokens=100), 0.0,
            )  # fmt: skip
        self.placed: dict[str, str] = {}
        self.running: deque[str] = deque()
        self.asked: list[tuple[int, partial]] = []
        self.arrived = 0

    def handle(self, event: object, peer: bytes = b"g") -> None:
        for to, answer in self.core.handle(event, self.now_s, peer):
            if isinstance(answer, Place):
                assert to == b"g"
                assert answer.id not in self.placed
                self.placed[answer.id] = answer.worker
                self.running.append(answer.id)
            else:
                assert isinstance(answer, Held), answer
        if (question := self.core.question(self.now_s)) is not None:
            self.asked.append(question)

    def arrive(self) -> None:
        self.arrived += 1
        name, slo_s = str(self.arrived), self.random.choice([0.5, 5.0, 600.0])
        tokens = np.array([self.random.randrange(50) for _ in range(100)], "<u4").tobytes()
        client = self.random.choice(["x", "y", "z"])
        due = Due(f"c{slo_s:g}", slo_s, slo_s)
        model = self.random.choice(MODELS)
        self.handle(Arrive(name, client, tokens, 50, due=due, model=model))

    def end(self) -> None:
        if self.running:
            self.handle(Done(self.running.popleft(), 40, ttft_s=0.1, tpot_s=0.01))

    def answer(self, lie: int) -> None:
        """To the last question, as it should be or otherwise."""
        if not self.asked:
            return
        number, work = self.asked[-1]
        random, problem = self.random, work.args[0]
        numbers = [demand.number for demand in problem.demands]
        workers = [queue.worker for queue in problem.queues]
        orders: dict[str, tuple[int, ...]]
        match lie:
            case 0:
                self.handle(Planned(number, work()))
                return
            case 1:  # groups twice, at any worker, in any order
                orders = {one: tuple(random.choices(numbers, k=len(numbers))) for one in workers}
            case 2:
                orders = {"nobody": tuple(numbers), "w0": (10**12, -1)}
            case 3:
                self.handle(Planned(number - 1, Answer({"w0": tuple(numbers)})))
                return
            case 4:
                self.handle(Planned(number, None))
                return
            case _:  # all at one worker, backwards
                orders = {random.choice(workers): tuple(reversed(numbers))}
        self.handle(Planned(number, Answer(orders)))

    def drain(self) -> None:
        for _ in range(10 * self.arrived + 10):
            self.now_s += 0.3
            self.handle(Tick(), b"")
            self.end()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive")),
        st.tuples(st.just("end")),
        st.tuples(st.just("wait"), st.floats(0, 3)),
        st.tuples(st.just("answer"), st.integers(0, 5)),
    ),
    max_size=120,
)


@settings(max_examples=examples(120))
@given(STEPS, st.integers(0, 2**32))
def test_whatever_a_plan_says_each_request_is_served_once(steps: list[tuple], seed: int) -> None:
    site = Site(seed)
    for step in steps:
        match step:
            case ("arrive",):
                site.arrive()
            case ("end",):
                site.end()
            case ("wait", seconds):
                site.now_s += seconds
                site.handle(Tick(), b"")
            case ("answer", lie):
                site.answer(lie)
        json.dumps(site.core.state(), allow_nan=False)
    site.drain()
    assert len(site.placed) == site.arrived
    state = site.core.state()
    assert (state["in_flight"], state["waiting"]) == (0, 0)
    assert state["queues"]["groups"] == 0


def crowded(seed: int = 1) -> Site:
    """Many wait, and a plan has come."""
    site = Site(seed)
    for _ in range(60):
        site.arrive()
    site.now_s = 2.0
    site.handle(Tick(), b"")
    site.answer(0)
    return site


def test_without_any_plan_as_much_is_served_as_with_plans() -> None:
    served = []
    for kind in ("planned", "late", "failed"):
        site = Site(3)
        for _ in range(60):
            site.arrive()
        for _ in range(40):
            site.now_s += 0.5
            site.handle(Tick(), b"")
            if kind != "late":
                site.answer(0 if kind == "planned" else 4)
                site.asked.clear()
            site.end()
        served.append(len(site.placed))
        plans = site.core.state()["queues"]["plans"]
        assert bool(plans["answered"]) == (kind == "planned")
        assert bool(plans["failed"]) == (kind == "failed")
        assert bool(plans["unanswered"]) == (kind == "late")
    assert served[1] == served[2] > 30
    assert served[0] > 30


def test_a_question_waits_for_its_answer_as_long_as_a_plan_may_take() -> None:
    site = Site(3)
    for _ in range(60):
        site.arrive()
    numbers = []
    for second in range(30):
        site.now_s = float(second)
        site.asked.clear()
        site.handle(Tick(), b"")
        numbers += [(second, number) for number, _ in site.asked]
    assert numbers == [(1, 1), (11, 2), (21, 3)], "after `patience_s`"
    assert site.core.state()["queues"]["plans"]["edf"] == 29, "until a plan has come"
    site.now_s = 31.0
    site.asked.clear()
    site.handle(Tick(), b"")
    site.answer(0)
    before = site.core.state()["queues"]["plans"]
    site.now_s = 32.0
    site.handle(Tick(), b"")
    after = site.core.state()["queues"]["plans"]
    assert (after["asked"], after["edf"]) == (before["asked"] + 1, before["edf"])


def test_late_is_where_nobody_could_help_for_two_looks() -> None:
    site = Site(5)
    qlm = site.core.placement
    for number in range(60):  # of as many clients: all are within their share
        tokens = np.array([number] * 100, "<u4").tobytes()
        due = Due("c", 6.0, 6.0)
        site.handle(Arrive(str(number), f"c{number}", tokens, 5_000, due=due, model="a"))
    site.arrived = 60
    assert not qlm.late(site.now_s)
    seen = []
    for _ in range(6):
        site.now_s += 0.5
        site.handle(Tick(), b"")
        seen.append(bool(qlm.late(site.now_s)))
    assert seen[:2] == [False, False], "late at the first look that finds any, which orders the queues anew"
    assert any(seen)
    assert set(qlm.late(site.now_s)) <= {"w0", "w2"}
    site.drain()
    assert not qlm.late(site.now_s)


@pytest.mark.slow
def test_the_report_counts_all_that_wait() -> None:
    site = crowded()
    report = site.core.state()["queues"]
    waiting = site.core.state()["waiting"]
    assert waiting > 20
    assert sum(row["requests"] for row in report["waiting"]) == waiting
    assert sum(worker["waiting"] for worker in report["workers"].values()) == waiting
    assert {row["class"] for row in report["waiting"]} <= {"c0.5", "c5", "c600", "(late)"}
    for worker in report["workers"].values():
        starts = [row["starts_s"] for row in worker["groups"]]
        assert starts == sorted(starts)
        assert all(row["model"] == worker["loaded"] for row in worker["groups"])


def explained(site: Site, name: str) -> dict:
    ((_, answer),) = site.core.handle(Explain("e", name), site.now_s, b"x")
    assert isinstance(answer, Explained)
    (placement,) = answer.placements
    return placement


def test_who_waits_is_told_behind_what() -> None:
    site = crowded()
    name = next(str(number) for number in range(60, 0, -1) if str(number) not in site.placed)
    placement = explained(site, name)
    assert placement["stands"]["class"] in ("c0.5", "c5", "c600", "(late)")
    group = placement["stands"]["group"]
    before = placement["stands"]["requests_before"]
    report = site.core.state()["queues"]["workers"][placement["stands"]["worker"]]
    counted = 0
    for row in report["groups"]:
        if row["group"] == group:
            break
        counted += row["waiting"]
    assert counted == before
    site.drain()
    assert "stands" not in explained(site, name)


def test_status_and_explain_show_queues_in_words() -> None:
    site = crowded()
    report = {"gateway": site.core.state(), "replicas": {}}
    console = Console(width=140, record=True, file=StringIO())
    console.print(render(report))
    text = console.export_text()
    queues = site.core.state()["queues"]
    assert f"queues: groups {queues['groups']}" in text
    assert "queues, shortage: " in text
    for name, worker in queues["workers"].items():
        hidden = len(worker["groups"]) - MOST_ROWS
        assert f"queues, workers of {name}, groups{f', {hidden} more' if hidden > 0 else ''}" in text
    name = next(str(number) for number in range(60, 0, -1) if str(number) not in site.placed)
    assert "it waits in group" in "\n".join(explain._placement(explained(site, name)))
    site.drain()
    assert ", because" in "\n".join(explain._placement(explained(site, name)))


# -- any such placement


class Queues(Placement):
    """Lets `let_go` of what waits go, in order; has `work` done once while it `asks`; is late while `is_late`."""

    holds = plans = True

    def __init__(self, work: Work = dict) -> None:
        self.work = work
        self.asks = self.is_late = False
        self.answered: list[tuple[int, object]] = []
        self.waiting: list[Request] = []
        self.let_go = 0

    def place(self, request: Request, match: object, workers: Sequence[object], now_s: float) -> str | None:
        self.waiting.append(request)
        return None

    def next(self, workers: Sequence, match: object, may: object, *_: object) -> tuple[Request, str] | None:
        if not (self.let_go and self.waiting):
            return None
        self.let_go -= 1
        return self.waiting.pop(0), workers[0].name

    def give_up(self, request: Request) -> None:
        self.waiting.remove(request)

    def question(self, now_s: float) -> tuple[int, Work] | None:
        asks, self.asks = self.asks, False
        return (1, self.work) if asks else None

    def answer(self, number: int, found: object, now_s: float) -> None:
        self.answered.append((number, found))

    def late(self, now_s: float) -> Sequence[str]:
        return ("a",) if self.is_late else ()

    def report(self, now_s: float) -> Mapping[str, object]:
        return {"waiting": len(self.waiting)}

    def standing(self, request_id: str, now_s: float, *, ahead: bool = True) -> Mapping[str, object] | None:
        return {"group": 1, "ahead": ahead}


def router() -> tuple[Router, Queues]:
    made = Queues()
    core = Router(made, name="queues")
    core.handle(WorkerUp("a", "http://a"), 0.0)
    return core, made


def test_who_waits_is_explained() -> None:
    made, held = router()
    made.handle(Arrive("1", "c", b""), 0.0, b"g")
    made.handle(Arrive("2", "c", b""), 0.001, b"g")
    (one,), (two,) = (made.record.find(name, None, 0.0) for name in "12")
    assert (one["standing"], two["standing"]) == ({"group": 1, "ahead": True}, {"group": 1, "ahead": False})
    assert made.waiting.with_standing(one, 0.0)["stands"] == {"group": 1, "ahead": True}
    held.let_go = 2
    assert {type(answer) for _, answer in made.handle(Tick(), 1.0)} == {Place}
    assert "stands" not in made.waiting.with_standing(one, 0.0)


def test_time_alone_places_what_waits() -> None:
    made, held = router()
    assert made.handle(Arrive("1", "c", b""), 0.0, b"g") == [(b"g", Held("1"))]
    held.let_go = 1
    ((peer, answer),) = made.handle(Tick(), 1.0)
    assert (peer, type(answer)) == (b"g", Place)


def test_deadlines_that_will_be_missed_are_overload() -> None:
    held = Queues()
    rules = make_rules({"user": 1}, "limits")
    made = Router(held, name="queues", throttling=Throttling("oit", rules))
    made.handle(WorkerUp("a", "http://a"), 0.0)
    made.handle(Load("a", 0, 0, 100), 0.0)
    names = iter(range(100))

    def refused(now_s: float) -> Refuse | None:
        actions = made.handle(Arrive(str(next(names)), "c", b""), now_s, b"g")
        return next((one for _, one in actions if isinstance(one, Refuse)), None)

    made.handle(Tick(), 0.5)
    assert [refused(1.0) for _ in range(3)] == [None] * 3
    held.is_late = True
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
    held.is_late = False
    made.handle(Tick(), 11.0)
    assert refused(11.0) is None
