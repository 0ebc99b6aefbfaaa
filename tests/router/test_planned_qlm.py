"""Placement qlm in the router with a planner that lies, dies and comes back: each request is served, once."""

import json
from collections import deque
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
    PeerGone,
    Place,
    Plan,
    Planner,
    Replan,
    Tick,
    WorkerUp,
)
from router.placement import build
from router.planner import answers
from sglang_fair.cluster import explain, queues
from sglang_fair.cluster.status import render
from tests.support.budget import examples

MODELS = ("a", "b")


class Site:
    """A router with queues, workers that serve what they are given, and a planner."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_s = 0.0
        self.core = Router(build("qlm", delta=0.1), name="qlm", linger_s=0.0)
        for number in range(3):
            model = MODELS[number % 2]
            self.core.handle(
                WorkerUp(f"w{number}", f"http://w{number}", models=(model,), loaded=model,
                         kv_tokens=400, chunk_tokens=100), 0.0,
            )  # fmt: skip
        self.placed: dict[str, str] = {}
        self.running: deque[str] = deque()
        self.asked: list[tuple[bytes, Replan]] = []
        self.arrived = 0

    def handle(self, event: object, peer: bytes = b"g") -> None:
        for to, answer in self.core.handle(event, self.now_s, peer):
            if isinstance(answer, Place):
                assert to == b"g"
                assert answer.id not in self.placed
                self.placed[answer.id] = answer.worker
                self.running.append(answer.id)
            elif isinstance(answer, Replan):
                self.asked.append((to, answer))
            else:
                assert isinstance(answer, Held), answer

    def arrive(self) -> None:
        self.arrived += 1
        name, slo_s = str(self.arrived), self.random.choice([0.5, 5.0, 600.0])
        tokens = np.array([self.random.randrange(50) for _ in range(100)], "<u4").tobytes()
        client = self.random.choice(["x", "y", "z"])
        due = Due(f"c{slo_s:g}", slo_s, slo_s)
        model = self.random.choice(MODELS)
        self.handle(Arrive(name, client, tokens, 50, may_hold=True, due=due, model=model))

    def end(self) -> None:
        if self.running:
            self.handle(Done(self.running.popleft(), 40, ttft_s=0.1, tpot_s=0.01))

    def answer(self, lie: int) -> None:
        """To the last question, as it should be or otherwise."""
        if not self.asked:
            return
        peer, replan = self.asked[-1]
        problem, random = replan.problem, self.random
        numbers = [demand.number for demand in problem.demands]
        workers = [queue.worker for queue in problem.queues]
        orders: dict[str, tuple[int, ...]]
        match lie:
            case 0:
                found = answers.planned(replan, "search")
                self.handle(answers.answer(replan, found, 0.1, None), peer)
                return
            case 1:  # groups twice, at any worker, in any order
                orders = {one: tuple(random.choices(numbers, k=len(numbers))) for one in workers}
            case 2:
                orders = {"nobody": tuple(numbers), "w0": (10**12, -1)}
            case 3:
                orders = {"w0": tuple(range(100_000))}
            case 4:
                orders = {}
            case _:  # all at one worker, backwards
                orders = {random.choice(workers): tuple(reversed(numbers))}
        self.handle(Plan(replan.number, orders), peer)

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
        st.tuples(st.just("hello"), st.sampled_from([b"p", b"q"])),
        st.tuples(st.just("gone"), st.sampled_from([b"p", b"q"])),
        st.tuples(st.just("answer"), st.integers(0, 5)),
    ),
    max_size=120,
)


@settings(max_examples=examples(120))
@given(STEPS, st.integers(0, 2**32))
def test_whatever_a_planner_says_each_request_is_served_once(steps: list[tuple], seed: int) -> None:
    site = Site(seed)
    site.handle(Planner(), b"p")
    for step in steps:
        match step:
            case ("arrive",):
                site.arrive()
            case ("end",):
                site.end()
            case ("wait", seconds):
                site.now_s += seconds
                site.handle(Tick(), b"")
            case ("hello", peer):
                site.handle(Planner(), peer)
            case ("gone", peer):
                site.handle(PeerGone(), peer)
            case ("answer", lie):
                site.answer(lie)
        json.dumps(site.core.state(), allow_nan=False)
    site.drain()
    assert len(site.placed) == site.arrived
    state = site.core.state()
    assert (state["in_flight"], state["waiting"]) == (0, 0)
    assert state["queues"]["groups"] == 0


def crowded(seed: int = 1) -> Site:
    """Many wait, a planner is there, and a plan has come."""
    site = Site(seed)
    site.handle(Planner("host/7"), b"p")
    for _ in range(60):
        site.arrive()
    site.now_s = 2.0
    site.handle(Tick(), b"")
    site.answer(0)
    return site


def test_with_a_planner_that_hangs_as_much_is_served_as_without_any() -> None:
    served = []
    for with_planner in (False, True):
        site = Site(3)
        if with_planner:
            site.handle(Planner(), b"p")
        for _ in range(60):
            site.arrive()
        for _ in range(40):
            site.now_s += 0.5
            site.handle(Tick(), b"")
            site.end()
        served.append(len(site.placed))
        assert bool(site.asked) == with_planner
    assert served[0] == served[1] > 30


def test_late_is_where_nobody_could_help_for_two_looks() -> None:
    site = Site(5)
    qlm = site.core._placement
    for number in range(60):  # of as many clients: all are within their share
        tokens = np.array([number] * 100, "<u4").tobytes()
        due = Due("c", 6.0, 6.0)
        site.handle(Arrive(str(number), f"c{number}", tokens, 5_000, may_hold=True, due=due, model="a"))
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
    site.handle(PeerGone(), b"p")
    console.print(render(report | {"gateway": site.core.state()}))
    text = console.export_text()
    assert "planner host/7; 1 plans asked, 1 answered" in text
    assert f"queues: {site.core.state()['waiting']} requests wait in" in text
    assert "no planner" in text
    name = next(str(number) for number in range(60, 0, -1) if str(number) not in site.placed)
    assert "it waits in group" in "\n".join(explain._placement(explained(site, name)))
    site.drain()
    assert ", because" in "\n".join(explain._placement(explained(site, name)))
    assert queues.rendered(Router(build("d2lpm"), name="d2lpm").state()) == []
    short = {"least": 1, "models": {"m": 2}, "why": "work", "for_s": 12.0}
    for more, words in ((2, "2 more replicas"), (None, "no number"), (0, "the replicas that are there")):
        assert words in queues.told_shortage(short | {"more": more})
