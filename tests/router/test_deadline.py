"""Placement `deadline` by itself: who is next, which model a replica loads, and what nobody gains by trying."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Router
from router.events import Arrive, Done, Due, Event, Place, Running, WorkerUp
from router.placement import build
from router.placement.contract import Ended, Equipment, Request
from router.placement.deadline.line import SLICES, Job, Line
from router.placement.deadline.models import Models, in_time
from router.placement.deadline.replica import Replica
from router.placement.deadline.rule import Deadline
from router.placement.shares import Shares
from router.radix import Match
from sglang_fair.common.deadlines import Promise
from tests.router.model import Model
from tests.support.budget import examples, seeds
from tests.support.worker_view import View

KV, CHUNK = 4_000, 400
TOKEN_S = 0.001
"""A replica computes and writes so fast, one request after the other."""


@dataclass(eq=False)
class Serving(View):
    """It serves what it was sent in turn, `TOKEN_S` a token."""

    running: list[Request] = field(default_factory=list)
    free_s: float = 0.0


class Driver:
    """Drives a placement as the router's core does, in steps of a tenth of a second."""

    def __init__(
        self, replicas: int = 1, models: tuple[str, ...] = ("a",), swap_s: float = 1.0, **options: object
    ) -> None:
        self.rule = Deadline(**{"kv_tokens": KV, "chunk_tokens": CHUNK, "ahead": 2_000.0, **options})  # type: ignore[arg-type]
        self.now_s, self.models, self.swap_s = 0.0, models, swap_s
        self.views = {f"w{at}": Serving(f"w{at}") for at in range(replicas)}
        self.has: dict[str, str | None] = {}
        self.comes: dict[str, tuple[float, str]] = {}
        self.ends: list[tuple[float, str, Request]] = []
        self.waiting: dict[str, Request] = {}
        self.sent: list[tuple[float, Request, str]] = []
        self.swapping_s: dict[str, float] = dict.fromkeys(self.views, 0.0)
        for at, name in enumerate(self.views):
            self.up(name, models[at % len(models)])

    @property
    def taking(self) -> list[Serving]:
        found = [view for name, view in self.views.items() if self.has.get(name) is not None]
        if found != getattr(self, "_taking", None):
            self._taking = found
        return self._taking

    def up(self, name: str, model: str) -> None:
        self.has[name] = model
        self.rule.worker_up(name)
        self.equip(name)
        self.rule.taking(list(self.has))

    def equip(self, name: str) -> None:
        swap_s = dict.fromkeys(self.models, self.swap_s) if len(self.models) > 1 else {}
        self.rule.equip(name, Equipment(self.has[name], swap_s, KV, CHUNK), self.now_s)

    def down(self, name: str) -> None:
        """It dies; who it had comes again."""
        lost = [end for end in self.ends if end[1] == name]
        self.ends = [end for end in self.ends if end[1] != name]
        for _, _, request in lost:
            self.over(request, name, "failed")
        self.rule.worker_down(name)
        del self.has[name]
        self.comes.pop(name, None)
        for _, _, request in lost:
            self.ask(request)

    def ask(self, request: Request) -> None:
        self.waiting[request.id] = request
        views = [view for view in self.taking if self.has[view.name] == request.model]
        chosen = self.rule.place(request, Match(), views, self.now_s)
        if chosen is not None:
            self.send(request, chosen)
        self.pump()

    def send(self, request: Request, name: str) -> None:
        assert self.waiting.pop(request.id, None) is not None
        assert self.has[name] == request.model
        self.rule.placed(request, name, Match(), self.now_s)
        view = self.views[name]
        view.prefill_tokens += request.input_tokens
        view.decode_tokens += request.expected_output_tokens
        view.free_s = max(view.free_s, self.now_s) + TOKEN_S * (
            request.input_tokens + request.expected_output_tokens
        )
        self.ends.append((view.free_s, name, request))
        self.sent.append((self.now_s, request, name))

    def over(self, request: Request, name: str, outcome: str = "ok") -> None:
        view, output = self.views[name], int(request.expected_output_tokens)
        view.prefill_tokens -= request.input_tokens
        view.decode_tokens -= request.expected_output_tokens
        view.prefilled_tokens += request.input_tokens
        view.produced_tokens += output
        self.rule.done(Ended(request, name, 0, output, outcome, 0.1, TOKEN_S), self.now_s)  # type: ignore[arg-type]

    def pump(self) -> None:
        while self.waiting:
            found = self.rule.next(
                self.taking, lambda _: Match(), lambda one, name: self.has[name] == one.model, self.now_s
            )
            if found is None:
                break
            self.send(*found)
        for name in [name for name, model in self.has.items() if model is not None]:
            wanted = self.rule.wanted(name)
            if wanted not in (None, self.has[name]):
                for end in [end for end in self.ends if end[1] == name]:  # taken back: they come again
                    self.ends.remove(end)
                    self.over(end[2], name, "aborted")
                    self.comes.setdefault(f"again {end[2].id}", (self.now_s, ""))
                    self.waiting[end[2].id] = end[2]
                    self.rule.place(end[2], Match(), [], self.now_s)
                self.comes[name] = self.now_s + self.swap_s, wanted
                self.has[name] = None
                self.swapping_s[name] += self.swap_s
                self.views[name].free_s = self.now_s + self.swap_s
                self.equip(name)

    def run(self, until_s: float, each: Callable[[float], None] = lambda _: None) -> None:
        while self.now_s < until_s:
            self.now_s = round(self.now_s + 0.1, 3)
            each(self.now_s)
            for end in [end for end in self.ends if end[0] <= self.now_s]:
                self.ends.remove(end)
                self.over(end[2], end[1])
            for name, (at_s, model) in list(self.comes.items()):
                if at_s <= self.now_s and not name.startswith("again"):
                    del self.comes[name]
                    self.has[name] = model
                    self.equip(name)
            self.pump()


NUMBERS = iter(range(10**9))


def a_request(
    slo_s: float, now_s: float = 0.0, *, client: str = "c", model: str = "a", size: int = 500, **more: object
) -> Request:
    promise = Promise("k", slo_s, now_s + slo_s)
    name = f"{next(NUMBERS):08}"
    return Request(name, client, b"", size // 2, 0, size / 2, model=model, promise=promise, **more)  # type: ignore[arg-type]


def filled(**options: object) -> Driver:
    """A replica without room, for as long as nothing ends there."""
    driver = Driver(**options)
    driver.ask(a_request(5_000.0, client="first", size=KV + CHUNK))
    return driver


def order_of(driver: Driver, asked: list[Request]) -> list[Request]:
    for request in asked:
        driver.ask(request)
    driver.run(400.0)
    return [request for _, request, _ in driver.sent[1:]]


def test_who_is_due_first_goes_first_and_in_a_step_who_is_least_work() -> None:
    late, soon, small = a_request(90.0), a_request(30.0, size=900), a_request(30.5, size=200)
    asked = [late, soon, small]
    assert order_of(filled(tiers=False), asked) == [small, soon, late]


def test_who_would_miss_anyway_goes_last_but_each_eighth_pull() -> None:
    driver = filled(tiers=False)
    hopeless = [a_request(0.5, size=400) for _ in range(4)]
    good = [a_request(300.0, size=400) for _ in range(20)]
    order = order_of(driver, [*hopeless, *good])
    places = [order.index(request) for request in hopeless]
    assert places == [7, 15, 22, 23]


def test_a_deadline_orders_only_what_a_client_is_entitled_to() -> None:
    """A flood claims half a second. Whoever holds little waits for what it may have beyond its share."""
    driver = filled(ahead=1_000.0)
    flood = [a_request(20.0, client="flood", size=400) for _ in range(30)]
    polite = a_request(60.0, client="polite", size=KV)
    order = order_of(driver, [*flood, polite])
    assert order.index(polite) <= 4


def test_a_client_with_little_is_sent_beyond_a_full_window() -> None:
    driver = filled(ahead=1e6)
    for _ in range(3):
        driver.ask(a_request(1.0, client="flood", size=3_000))
    polite = a_request(2.0, client="polite", size=600)
    driver.ask(polite)
    assert driver.sent[-1][1] is polite
    for number in range(100):
        driver.ask(a_request(1.0, client=f"name {number}", size=600))
    assert driver.rule.replicas["w0"].held < 2 * KV + 600, "names have no part that is large enough"


def test_a_days_batch_is_behind_every_chat_and_is_spread() -> None:
    driver = filled(tiers=False)
    batch, chat = a_request(86_400.0, stands_for=400_000), a_request(20.0)
    assert order_of(driver, [batch, chat]) == [chat, batch]
    line = Line(Shares())
    line.put(Job(batch, 1, 0.0, 86_400.0, 86_400.0, 1.0, 0))
    dues, _ = line.dues(0.0)
    assert [round(count) for _, count, _, _ in dues] == [400_000 // SLICES] * SLICES
    assert dues[0][0] < 86_400 / SLICES * 1.05


@given(st.lists(st.tuples(st.floats(1, 50), st.integers(1, 5), st.integers(1, 900)), min_size=1, max_size=8))
def test_in_time_is_what_a_replica_that_serves_by_due_time_gets_done(
    rows: list[tuple[float, int, int]],
) -> None:
    """By the definition, request by request; and more capacity is never less."""
    line = Line(Shares())
    for due_s, count, size in rows:
        for _ in range(count):
            request = a_request(10.0, due_s - 10.0, size=2 * size)
            line.put(Job(request, next(NUMBERS), 0.0, due_s, 10.0, 1.0, 0))
    dues = line.dues(0.0)
    one = 5.0, 300.0, 100.0, 1e9
    found = in_time(dues, [one])
    used = written = 0.0
    for due_s, count, tokens, _ in dues[0]:
        room = 300.0 + 100.0 * (due_s - 5.0) - used if due_s > 5.0 else 0.0
        part = max(0.0, min(1.0, room / tokens))
        used, written = used + part * tokens, written + part * count
    assert found == pytest.approx(written)
    assert found <= in_time(dues, [one, one]) + 1e-9
    assert found <= in_time(dues, [(1.0, *one[1:])]) + 1e-9
    assert in_time(dues, []) == 0


# ---- models


def test_nothing_is_loaded_while_nothing_waits_for_another_model() -> None:
    driver = Driver(2, ("a", "b"))
    driver.run(60.0, lambda now_s: driver.ask(a_request(5.0, now_s, model="a", size=80)))
    assert driver.has == {"w0": "a", "w1": "b"}
    assert not any(driver.swapping_s.values())


def test_a_model_is_loaded_where_nothing_waits_and_at_once_for_who_would_be_late() -> None:
    driver = Driver(2, ("a", "b", "c"))
    driver.ask(a_request(10.0, model="c"))
    driver.run(12.0)
    assert "c" in driver.has.values()
    ((_, request, _),) = driver.sent
    assert (request.model, driver.waiting) == ("c", {})


@pytest.mark.parametrize("slo_s", [2.0, 30.0])
def test_a_model_that_nobody_has_is_fed_and_half_of_the_time_is_the_most_for_loading(slo_s: float) -> None:
    """One replica, a chat that never pauses, and one request of another model that is worth less than what it costs."""
    driver = Driver(1, ("a", "b"), tiers=False)
    rare = a_request(slo_s, model="b", size=200)

    def chat(now_s: float) -> None:
        for _ in range(2):
            driver.ask(a_request(2.0, now_s, size=80))
        if now_s == 20.0:
            driver.ask(rare)

    driver.run(20.0 + 4 * 60.0 + 20.0, chat)
    assert any(request is rare for _, request, _ in driver.sent)
    assert driver.swapping_s["w0"] <= driver.now_s / 2


def test_a_replica_that_cannot_load_a_model_any_more_goes_on_with_its_own() -> None:
    driver = Driver(1, ("a", "b"))
    driver.ask(a_request(5.0, model="b"))
    driver.comes.clear()
    driver.has["w0"] = "a"
    driver.rule.equip("w0", Equipment("a", {"a": 1.0}), 0.0)
    driver.run(60.0, lambda now_s: driver.ask(a_request(5.0, now_s, size=80)))
    assert driver.has["w0"] == "a"
    assert {request.model for _, request, _ in driver.sent} == {"a"}
    driver.rule.equip("w0", Equipment("a", {"a": 1.0, "b": 1.0}), 60.0)
    driver.run(70.0)
    assert driver.waiting == {}


def models_of(*, waiting_a: int, waiting_b: int, flights: int = 0, absence_s: float = 0.0) -> Models:
    """One replica with model a since time 0, at time 5; b waits, due at 8."""
    lines, number = (
        {
            "a": Line(Shares(), mean_s=10.0, slowest_s=100.0, absence_s=absence_s),
            "b": Line(Shares(), fed_s=4.0),
        },
        iter(range(1_000)),
    )
    one = Replica("w0", "a", 4_000, 400, swap_s={"a": 1.0, "b": 1.0}, since_s=0.0, empty_s=None)
    one.rates = {"a": 1_000.0, "b": 1_000.0}
    for model, count in (("a", waiting_a), ("b", waiting_b)):
        for _ in range(count):
            request = a_request(3.0, 5.0, model=model)
            lines[model].put(Job(request, next(number), 5.0, 8.0, 3.0, 1.0, 0))
    for _ in range(flights):
        one.send(Job(a_request(4.0), 0, 0.0, 0.0, 4.0, 1.0, 0), 0.0)
    return Models(lines, {"w0": one}, finish_s=0.0)


@pytest.mark.parametrize(("waiting_a", "swaps"), [(0, True), (1, True), (30, False)])
def test_who_is_served_in_time_is_not_given_up_for_fewer(waiting_a: int, swaps: bool) -> None:
    assert bool(models_of(waiting_a=waiting_a, waiting_b=12).look(5.0)) == swaps


@pytest.mark.parametrize(("absence_s", "swaps"), [(1.9, True), (2.1, False)])
def test_a_replica_stays_as_long_as_its_streams_need(absence_s: float, swaps: bool) -> None:
    """Answers of 10 s whose clients wait 4 s for a first token: an absence of 2 s may come every 5 s."""
    made = models_of(waiting_a=0, waiting_b=12, flights=1, absence_s=absence_s)
    assert bool([swap for swap in made.look(5.0) if swap.rank == 2]) == swaps


# ---- whatever happens


@pytest.mark.parametrize("evicts", [False, True])
def test_nothing_is_left_of_what_came_and_went(evicts: bool) -> None:
    for seed in seeds(20):
        router = Model("deadline", evicts=evicts).walk(seed, 100).router
        rule: Any = router.placement
        assert not rule._waiting | rule._leaving
        assert rule.replicas.keys() == router.state()["workers"].keys()  # type: ignore[attr-defined]
        for line in rule.lines.values():
            assert not any((line.count, line.counts, round(line.tokens, 6), line._queues))
            assert not any(map(len, (*line._heads, line._ahead)))


@settings(max_examples=examples(10))
@given(st.integers(0, 2**32), st.sampled_from(["claims", "lies", "trickles"]))
def test_a_flood_takes_no_more_than_it_may_have_ahead(seed: int, kind: str) -> None:
    """Beside a client that waits all the time it is served at most `ahead` and a request of each more, and one that had
    gone before its tier was judged anew."""
    rng, size = Random(seed), 20 if kind == "trickles" else 400
    driver = filled(ahead=1_500.0)
    served = {"flood": 0.0, "polite": 0.0}

    def more(now_s: float) -> None:
        while sum(one.client == "flood" for one in driver.waiting.values()) < 20:
            driver.ask(a_request(0.01 if kind == "lies" else 1.0, now_s, client="flood", size=size))
        while sum(one.client == "polite" for one in driver.waiting.values()) < 4:
            driver.ask(a_request(30.0, now_s, client="polite", size=rng.randrange(100, 600)))

    driver.run(40.0, more)
    for _, request, _ in driver.sent[1:]:
        served[request.client] += request.input_tokens + 2 * request.expected_output_tokens
        assert served["flood"] - served["polite"] <= 1_500.0 + 3 * 900


def test_what_is_shown_counts_all_that_wait() -> None:
    driver = filled(tiers=False)
    for slo_s in (0.5, 30.0, 30.0, 500.0):
        driver.ask(a_request(slo_s))
    driver.now_s = 1.0
    driver.rule.next(driver.taking, lambda _: Match(), lambda *_: True, 1.0)
    report = driver.rule.report(1.0)
    assert sum(row["requests"] for row in report["waiting"]) == 4  # type: ignore[attr-defined]
    standing = driver.rule.standing(list(driver.waiting)[-1], 1.0)
    assert standing is not None
    assert (standing["requests_before"], standing["with"], standing["worker"]) == (2, 3, "w0"), (
        "who is hopeless goes last"
    )
    assert driver.rule.standing("nobody", 1.0) is None


def test_it_says_how_many_replicas_would_do() -> None:
    driver = filled(tiers=False)
    for _ in range(60):
        driver.ask(a_request(20.0, size=1_000))
    driver.run(3.0)
    shortage = driver.rule.report(driver.now_s)["shortage"]
    assert shortage["more"] > 0  # type: ignore[index]
    assert shortage["models"] == {"a": shortage["more"]}  # type: ignore[index]
    assert list(driver.rule.late(driver.now_s)) == ["w0"]
    driver.run(120.0)
    assert driver.rule.report(driver.now_s)["shortage"] is None
    assert not driver.rule.late(driver.now_s)


def test_another_router_goes_on_with_what_runs_and_what_waits() -> None:
    """After a restart, or where the first of two routers has died: it is told what runs and asked again for what waits.
    It sends no worker more than that has room for, and all of it in the order of the first one."""

    def made() -> Router:
        core = Router(build("deadline", chunk_tokens=CHUNK, ahead=1e9), name="deadline", linger_s=0.0)
        core.handle(WorkerUp("w0", "http://w0", kv_tokens=KV, chunk_tokens=CHUNK), 0.0)
        return core

    def placed(core: Router, event: Event, now_s: float) -> list[str]:
        return [one.id for _, one in core.handle(event, now_s, b"g") if isinstance(one, Place)]

    rng, first, second = Random(1), made(), made()
    asked = {}
    for number in range(30):
        slo_s, tokens = rng.choice([100.0, 300.0, 4_000.0]), 4 * bytes([number]) * 500
        asked[str(number)] = Arrive(str(number), "c", tokens, 500, due=Due("k", slo_s, slo_s))
    running = [name for one in asked.values() for name in placed(first, one, 1.0)]
    assert 3 < len(running) < 10
    for name in running:
        assert not placed(second, Running(name, "c", asked[name].tokens, 500, worker="w0"), 2.0)
    for name in [name for name in asked if name not in running]:
        assert not placed(second, asked[name], 2.0), "there is room that the first one did not have"
    orders: list[list[str]] = []
    for core in (first, second):
        order = list(running)
        for at in range(30):
            order += placed(core, Done(order[at], 500, ttft_s=0.1, tpot_s=0.01), 3.0 + at / 10)
        orders.append(order)
    assert sorted(orders[0]) == sorted(asked)
    assert orders[0] == orders[1]
