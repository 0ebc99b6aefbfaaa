"""Placement qlm and swaps together: two models on one worker are served in turn, whatever a plan says."""

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest

from router.core import Router
from router.events import Agent, Arrive, Cut, Done, Due, Exchange, Place, Progress, Refuse, WorkerUp
from router.placement.qlm import Qlm
from router.wire import pack_tokens

SWAP_S = {"a": 2.0, "b": 2.0, "c": 2.0}
AT_ONCE = 4


class Site:
    """A router with workers that serve so many requests at a time, each for `serve_s`, and swap in two seconds."""

    def __init__(self, names: list[str], *, serve_s: float = 0.5, has: str = "a", **options: Any) -> None:
        self.placement = Qlm(chunk_tokens=0, **options)
        self.router = Router(self.placement, page_size=4, swap_finish_s=5.0)
        self.now_s = 0.0
        self._serve_s = serve_s
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()
        self.loaded = dict.fromkeys(names, has)
        self.number = dict.fromkeys(names, 0)
        self._busy: set[str] = set()
        self.models: dict[str, str] = {}
        self.running: dict[str, list[str]] = {name: [] for name in names}
        self.began: dict[str, float] = {}
        self.refused: set[str] = set()
        self.swaps: list[tuple[float, str, int]] = []
        """When, to which model, and how many were served since the one before."""
        self.served_since = dict.fromkeys(names, 0)
        self.meddle: Callable[[], None] = lambda: None
        for name in names:
            self.tell(
                WorkerUp(name, f"http://{name}", models=tuple(SWAP_S), kv_tokens=AT_ONCE * 40), b"supervisor"
            )
            self._report(name)
            self._tick(name)

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time_s, next(self._count), do))

    def ask(self, request: str, model: str, client: str = "c", slo_s: float = 60.0) -> None:
        self.models[request] = model
        arrive = Arrive(
            request, client, pack_tokens(range(20)), max_output_tokens=20, model=model, may_hold=True,
            due=Due("x", slo_s, slo_s),
        )  # fmt: skip
        self.tell(arrive, b"g")

    def tell(self, event: Any, peer: bytes) -> None:
        for to, answer in self.router.handle(event, self.now_s, peer):
            match answer:
                case Place():
                    assert self.loaded[answer.worker] == self.models[answer.id]
                    assert answer.worker not in self._busy
                    self.running[answer.worker].append(answer.id)
                    self.began[answer.id] = self.now_s
                    self.served_since[answer.worker] += 1
                    self.at(self.now_s + self._serve_s, lambda one=answer: self._end(one.worker, one.id))
                case Refuse():
                    self.refused.add(answer.id)
                case Exchange(number=number) if number > self.number[answer.worker]:
                    self._load(answer)
                case Cut():
                    assert to == b"g"
        if not isinstance(event, Progress):
            self.meddle()

    def run(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, do = heapq.heappop(self._due)
            do()

    def _end(self, worker: str, request: str) -> None:
        self.running[worker].remove(request)
        self.tell(Done(request, output_tokens=20), b"g")

    def _load(self, order: Exchange) -> None:
        name = order.worker
        if name in self._busy:
            return
        assert not self.running[name], "nothing of the old model is left"
        self._busy.add(name)
        self.swaps.append((self.now_s, order.model, self.served_since[name]))
        self.served_since[name] = 0

        def done() -> None:
            self._busy.discard(name)
            self.loaded[name], self.number[name] = order.model, order.number
            self._report(name)

        self.at(self.now_s + SWAP_S[order.model], done)

    def _report(self, name: str) -> None:
        loaded = "" if name in self._busy else self.loaded[name]
        busy = self.number[name] + 1 if name in self._busy else 0
        self.tell(
            Agent("?", name, loaded, self.number[name], busy=busy, swap_s=SWAP_S), f"agent {name}".encode()
        )

    def _tick(self, name: str) -> None:
        self._report(name)
        self.at(self.now_s + 1.0, lambda: self._tick(name))


def warmed(names: list[str], **options: Any) -> Site:
    """One that has learnt how long answers are: half a minute was spent on each model."""
    site = Site(names, **options)
    for at, model in enumerate("ab"):
        for number in range(60):
            site.at(
                40.0 * at + number * 0.5, lambda name=f"w{model}{number}", model=model: site.ask(name, model)
            )
    site.run(100.0)
    assert set(site.began) == set(site.models)
    site.swaps.clear()
    return site


@pytest.mark.parametrize("options", [{"tiers": False}, {"ahead": 2_000.0}])
def test_two_models_on_one_worker_are_served_in_turn_within_their_deadlines(options: dict[str, Any]) -> None:
    site = warmed(["r0"], **options)
    for number in range(60):
        site.ask(f"q{number}", "ab"[number % 2], f"c{number % 3}", slo_s=60.0)
    site.run(160.0)
    assert site.refused == set()
    assert set(site.began) == set(site.models), "all are served"
    assert max(site.began.values()) <= 160.0
    assert len(site.swaps) <= 2, "what can wait waits until its model is loaded anyway"


@pytest.mark.parametrize("options", [{"tiers": False}, {"ahead": 2_000.0}])
def test_requests_for_both_that_keep_coming_are_served_in_turn(options: dict[str, Any]) -> None:
    site = warmed(["r0"], **options)
    for number in range(120):
        come = partial(site.ask, f"q{number}", "ab"[number % 2], f"c{number % 5}", 30.0)
        site.at(100.0 + number * 0.5, come)
    site.run(260.0)
    assert set(site.began) == set(site.models)
    came_s = {f"q{number}": 100.0 + number * 0.5 for number in range(120)}
    assert max(site.began[name] - at_s for name, at_s in came_s.items()) <= 30.0


@pytest.mark.parametrize("workers", [["r0"], ["r0", "r1"]])
def test_a_plan_that_always_wants_another_model_starves_nobody(workers: list[str]) -> None:
    """Whatever is loaded or being loaded, its plans put the groups of all other models first."""
    site = Site(workers)

    def meddle() -> None:
        queues = site.placement.queues
        by_number = queues.groups.by_number
        orders = {
            name: tuple(sorted(order, key=lambda one: by_number[one].kind.model == site.loaded[name]))
            for name, order in queues.orders().items()
        }
        queues.apply(orders)

    site.meddle = meddle
    for number in range(60):
        site.ask(f"q{number}", "abc"[number % 3], f"c{number % 4}", slo_s=30.0)
    site.run(600.0)
    assert site.refused == set()
    assert set(site.began) == set(site.models), "everybody is served"
    if len(workers) == 1:
        assert all(served for _, _, served in site.swaps[1:]), (
            "each model that was loaded has served somebody"
        )
    assert len(site.swaps) < len(site.models), "where another worker has served those, it may go on at once"


def test_workers_go_over_to_where_the_work_is() -> None:
    site = Site(["r0", "r1"])
    for number in range(40):
        site.ask(f"q{number}", "b", f"c{number % 4}", slo_s=60.0)
    site.run(60.0)
    assert set(site.began) == set(site.models)
    assert [model for _, model, _ in site.swaps] in (["b"], ["b", "b"])


def test_a_model_that_cannot_be_loaded_is_waited_for_and_others_are_served() -> None:
    site = Site(["r0"])

    def fails(order: Exchange) -> None:
        site.number[order.worker] = order.number
        said = Agent("?", order.worker, "a", order.number, "damaged", swap_s=SWAP_S)
        site.at(site.now_s + 0.5, lambda: site.tell(said, b"agent r0"))

    site._load = fails  # type: ignore[method-assign]
    site.ask("b", "b")
    for number in range(100):
        site.at(float(number), lambda number=number: site.ask(f"q{number}", "a"))
    site.run(130.0)
    assert set(site.began) == set(site.models) - {"b"}
    state: Any = site.router.state()
    assert 3 < state["swaps"]["r0"]["failed"] < 10, "less and less often"
