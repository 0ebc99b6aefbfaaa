"""Virtual queues: every group is in one whatever a plan says, a worker pulls until its memory is full."""

from collections import Counter
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.placement.contract import Request
from router.placement.qlm.estimate import Estimator
from router.placement.qlm.groups import Group, Groups
from router.placement.qlm.problem import Demand, Queue, slots, stays
from router.placement.qlm.queues import LAST, OVERDUE_EVERY, VirtualQueues, Worker
from router.placement.qlm.search import plan
from sglang_fair.common.deadlines import Promise
from tests.support.budget import examples
from tests.support.queue_problems import faults

SWAPS = {"a": 10.0, "b": 10.0}


def add(
    site: VirtualQueues,
    name: str,
    model: str = "a",
    *,
    tokens: int = 100,
    output: float = 100.0,
    now_s: float = 0.0,
    slo_s: float = 60.0,
    exclude: tuple[str, ...] = (),
) -> None:
    request = Request(name, "c", b"", tokens, 0, output, model=model, exclude=exclude)
    site.groups.add(request, Promise("k", slo_s, now_s + slo_s))
    site.settle()


def a_site(
    workers: str = "vw", *, kv_tokens: int = 2_000, delta: float = 4.0, batch: float = 2.0
) -> VirtualQueues:
    made = VirtualQueues(Groups(delta, batch), Estimator(output_s=0.01, token_s=0.01, longest_tokens=200))
    for name in workers:
        made.worker_up(Worker(name, "a", kv_tokens, 200, SWAPS))
    return made


def check(site: VirtualQueues) -> None:
    """Each group is in one queue or stranded; sums are those of what is there."""
    numbers = [number for order in site.orders().values() for number in order] + site.stranded
    assert Counter(numbers) == Counter(list(site.groups.by_number))
    for name, order in site.orders().items():
        groups = [site.groups.by_number[number] for number in order]
        assert all(site.workers[name].can_serve(group) for group in groups)
        for group in groups:
            assert not len(group) or group.urgency == _urgency(group)
        held = site.workers[name].in_flight.values()
        assert site.workers[name].tokens == pytest.approx(sum(tokens for _, tokens, _ in held))


def _urgency(group: Group) -> tuple[bool, float, int]:
    """By definition."""
    late = group.kind.late
    at_s = group.line[0].key[0] if late else min(one.promise.due_s for one in group.line)
    return late, at_s, group.number


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(st.integers(0, 2**32))
def test_every_group_is_in_one_queue(seed: int) -> None:
    """Requests come and go, workers come and go, models change, and plans are stale or made up."""
    rng, site = Random(seed), a_site()
    running: dict[str, str] = {}
    waiting: set[str] = set()
    served: Counter[str] = Counter()
    stale = dict(site.orders())
    for number in range(120):
        step, name = rng.random(), str(number)
        workers = list(site.orders())
        if step < 0.45:
            waiting.add(name)
            add(
                site, name, rng.choice("ab"), now_s=number, slo_s=rng.choice([5, 60]), output=rng.uniform(1, 300),
                exclude=rng.choice([(), (), (), ("v",)]),
            )  # fmt: skip
        elif step < 0.65 and workers:
            worker = rng.choice(workers)
            room = site.workers[worker].tokens < 2_200
            pulled = site.pull(worker, rng.choice([-inf, float(number)]))
            assert pulled is None or room
            if pulled is not None:
                assert pulled.model == site.workers[worker].loaded
                assert worker not in pulled.exclude
                running[pulled.id] = worker
                waiting.remove(pulled.id)
                served[pulled.id] += 1
        elif step < 0.75 and running:
            name = rng.choice(list(running))
            del running[name]
            site.ended(name)
        elif step < 0.78 and workers:
            assert site.pull(rng.choice(workers), float(number), lambda *_: False) is None
        elif step < 0.82 and waiting:
            name = rng.choice(sorted(waiting))
            waiting.remove(name)
            site.ended(name)
        elif step < 0.9 and workers:
            site.loaded(rng.choice(workers), rng.choice(["a", "b", None]))
        elif step < 0.93:
            name = rng.choice("vwx")
            if name in workers and rng.random() < 0.5:
                site.worker_down(name)
                running = {one: at for one, at in running.items() if at != name or site.ended(one)}
            elif name not in workers:
                site.worker_up(Worker(name, rng.choice("ab"), 2_000, 200, SWAPS))
        elif step < 0.97 and workers:
            problem = site.problem(float(number))
            planned = plan(problem, solver="search", most_work=200_000)
            assert faults(problem, planned.orders) == []
            site.apply(stale if rng.random() < 0.5 else planned.orders)
            stale = dict(planned.orders)
        else:
            numbers = list(range(30))
            rng.shuffle(numbers)
            site.apply({"v": numbers[:10] * 2, "nowhere": numbers[10:20], "w": numbers[15:]})
        check(site)
        assert {one.request.id for group in site.groups for one in group.line} == waiting
    assert set(served.values()) <= {0, 1}


def test_a_plan_that_names_what_is_not_there_is_ignored_and_counted() -> None:
    site = a_site()
    for number in range(3):
        add(site, str(number), "ab"[number % 2])
    before = site.orders()
    first = next(iter(site.groups)).number
    site.apply({"nowhere": [first], "v": [999, first, first]})
    assert site.ignored == 3
    check(site)
    assert first in site.orders()["v"]
    site.apply({})
    assert site.ignored == 3
    assert {number for order in before.values() for number in order} == set(site.groups.by_number)


def test_a_plan_cannot_move_what_has_begun() -> None:
    site = a_site(batch=1.0, delta=1.0)
    add(site, "begun")
    add(site, "another")
    assert site.pull("v").id == "begun"  # type: ignore[union-attr]
    (begun,) = [group for group in site.groups if group.begun_on == "v"]
    site.apply({"w": [begun.number]})
    assert site.ignored == 1
    assert begun.number in site.orders()["v"]
    check(site)


def test_a_worker_pulls_until_its_memory_and_a_chunk_are_promised() -> None:
    """Of its first group, then of the next one of the same model; not of another model before that is loaded."""
    site = a_site("v", kv_tokens=1_000, batch=1.0)
    for number in range(4):
        add(site, f"a{number}", "a", slo_s=10)
    for number in range(4):
        add(site, f"b{number}", "b", slo_s=1_000)
    for number in range(4, 12):
        add(site, f"a{number}", "a", slo_s=20)
    site.apply({"v": [group.number for group in sorted(site.groups, key=lambda one: one.kind.model)]})
    pulled = [request.id for _ in range(20) if (request := site.pull("v")) is not None]
    assert pulled == [f"a{number}" for number in range(6)], (
        "1,200 tokens are below 1,000 and a chunk of 200 until then"
    )
    site.ended("a0")
    assert site.pull("v").id == "a6"  # type: ignore[union-attr]
    for number in range(7):
        site.ended(f"a{number}")
    rest = [request.id for _ in range(20) if (request := site.pull("v")) is not None]
    assert rest == [f"a{number}" for number in range(7, 12)]
    assert (site.pull("v"), site.wanted("v")) == (None, "b")
    site.loaded("v", "b")
    assert site.pull("v").id == "b0"  # type: ignore[union-attr]


def test_a_new_group_goes_where_it_would_start_first_and_the_newer_half_behind_the_older() -> None:
    site = a_site(batch=1.0, delta=2.0)
    site.loaded("w", "b")
    for number in range(5):
        add(site, str(number), "a")
    assert [len(order) for order in site.orders().values()] == [3, 0], "a swap takes longer than these"
    numbers = list(site.orders()["v"])
    names = [[one.request.id for one in site.groups.by_number[number].line] for number in numbers]
    assert [name for group in names for name in group] == list("01234")


def test_waits_and_lateness_follow_the_queues() -> None:
    site = a_site("v", kv_tokens=1_000)
    add(site, "first", slo_s=5.0)
    assert site.wait("first", 0.0) == (0.0, 0.0), "it fits into free memory"
    for number in range(7):
        add(site, str(number), slo_s=5.0, now_s=0.1)
    wait = site.wait("6", 0.0)
    assert wait is not None
    assert wait.likely_s > wait.mean_s > 1.0
    assert site.wait("nobody", 0.0) is None
    assert sum(site.pull("v") is not None for _ in range(8)) == 6
    assert site.late(0.0) == [], "two are left, of a second each: the last one begins after one"
    assert [slot.late_s for slot in site.late(7.0)] == [pytest.approx(2.02 + 7.0 - 5.1)]
    add(site, "other", "b", slo_s=5.0)
    assert [slot.swaps for slot in site.late(0.0)] == [True]
    other = site.wait("other", 0.0)
    assert other is not None
    assert other.mean_s > 10.0


def test_what_nobody_can_serve_waits_for_a_worker() -> None:
    site = VirtualQueues(Groups(), Estimator())
    add(site, "x", "b")
    assert site.stranded == [1]
    site.worker_up(Worker("v", "a", 1_000))
    assert (site.stranded, site.problem(0.0).demands) == ([1], [])
    site.worker_up(Worker("w", "b", 1_000))
    assert site.stranded == []
    assert site.pull("w").id == "x"  # type: ignore[union-attr]
    site.worker_down("w")
    assert site.stranded == [1]
    site.ended("x")
    assert (site.stranded, len(site.groups)) == ([], 0)


# ---- workers that take requests back


def test_an_urgent_request_goes_beyond_the_window_of_those_that_may_be_taken_back_for_it() -> None:
    """And by as much as they hold only; what is due with them waits."""
    for evicts in (False, True):
        site = a_site("w")
        site.workers["w"].evicts = evicts
        for number in range(20):
            add(site, f"batch {number}", slo_s=3600.0)
        pulled = 0
        while site.pull("w", 0.0) is not None:
            pulled += 1
        assert pulled == 11  # 200 tokens each, up to 2,000 and a chunk of 200
        for number in range(20):
            add(site, f"chat {number}", slo_s=20.0)
        chats = []
        while (one := site.pull("w", 0.0)) is not None:
            chats.append(one.id)
        assert chats == ([f"chat {number}" for number in range(10)] if evicts else [])


def test_what_is_over_counts_no_more_against_the_urgent() -> None:
    worker = Worker("w", "a", 1_000, 0, evicts=True)
    for number in range(5):
        worker.send(f"batch {number}", 200.0, 3600.0)
    assert worker.has_room(20.0)
    assert not worker.has_room(3590.0)
    assert not worker.has_room()
    for number in range(5):
        worker.land(f"batch {number}")
    assert worker.held == 0
    for number in range(5):
        worker.send(f"chat {number}", 200.0, 20.0)
    assert not worker.has_room(15.0)


def test_who_is_found_to_be_late_when_it_is_their_turn_goes_first() -> None:
    site = VirtualQueues(Groups(), Estimator())
    site.worker_up(Worker("v", "a", 100_000))
    add(site, "late", "a", now_s=0.0, slo_s=1.0)
    add(site, "later", "a", now_s=1.0, slo_s=4.0)
    pulled = site.pull("v", 2.0)
    assert pulled is not None
    assert pulled.id == "later"
    pulled = site.pull("v", 2.0)
    assert pulled is not None
    assert pulled.id == "late"
    add(site, "next", "a", now_s=3.0, slo_s=4.0)
    add(site, "in time", "a", now_s=5.0, slo_s=100.0)
    site.workers["v"].pulls = OVERDUE_EVERY - 1
    pulled = site.pull("v", 20.0)
    assert pulled is not None
    assert pulled.id == "next"


def test_who_is_late_does_not_starve_beside_requests_in_time_without_end() -> None:
    site = a_site("v")
    add(site, "late", now_s=0.0, slo_s=1.0)
    for number in range(2 * OVERDUE_EVERY):
        now_s = 10.0 + number
        add(site, f"in time {number}", now_s=now_s, slo_s=60.0)
        pulled = site.pull("v", now_s)
        assert pulled is not None
        if pulled.id == "late":
            return
        site.ended(pulled.id)
    pytest.fail("it was never its turn")


# ---- idle workers

SWAP_S = 5.0
PAIR = {"a": SWAP_S, "b": SWAP_S}


def idle_site(models: str, *, batch: float = 2.0) -> VirtualQueues:
    """Workers w0, w1, … with these models loaded. A request of a thousand output tokens takes ten seconds."""
    made = VirtualQueues(Groups(2.0, batch), Estimator(output_s=0.01, token_s=0.01, longest_tokens=100))
    for number, model in enumerate(models):
        made.worker_up(Worker(f"w{number}", model, 1_500, 0, PAIR))
    return made


def crowd(site: VirtualQueues, count: int, model: str = "a", now_s: float = 0.0) -> None:
    for number in range(count):
        add(site, f"{model}{now_s}{number}", model, output=1_000.0, now_s=now_s, slo_s=1e5)


@pytest.mark.parametrize(("models", "after_s"), [("abb", SWAP_S), ("ab", LAST * SWAP_S)])
def test_an_idle_worker_loads_what_waits_elsewhere_once_it_was_idle_long_enough(
    models: str, after_s: float
) -> None:
    site = idle_site(models)
    crowd(site, 12)
    assert site.pull("w0", 0.0) is not None
    assert not site.take_over(0.0)
    assert not site.take_over(after_s - 0.1)
    assert site.take_over(after_s + 0.1) == len(models) - 1
    assert site.wanted("w1", after_s + 0.2) == "a"
    check(site)


def test_who_works_or_gains_nothing_takes_nothing_over() -> None:
    site = idle_site("abb")
    site.send("w1", Request("runs", "c", b"", 100), 100.0)
    add(site, "short", "a", output=10.0)
    for now_s in range(0, 100, 2):
        assert not site.take_over(float(now_s)), "it starts at once where it is"
    crowd(site, 12, now_s=100.0)
    for now_s in range(100, 200, 2):
        site.take_over(float(now_s))
        assert site.workers["w1"].groups == [], "a request runs there"
    assert site.wanted("w2") == "a"


def test_half_of_a_group_that_has_begun_is_taken_over() -> None:
    site = idle_site("abb", batch=20.0)
    crowd(site, 12)
    assert site.pull("w0", 0.0) is not None
    site.take_over(0.0)
    assert site.take_over(2 * SWAP_S) >= 1
    waiting = {
        name: sum(len(site.groups.by_number[n]) for n in order) for name, order in site.orders().items()
    }
    assert sum(waiting.values()) == 11
    assert min(waiting.values()) >= 2, "half went to one, and half of what was left to the other"
    check(site)


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32), st.sampled_from(["ab", "abb", "aabb"]))
def test_whatever_is_asked_for_and_when_swaps_are_bounded(seed: int, models: str) -> None:
    """The adversary sees every state, and asks for the model that has just been given up."""
    rng = Random(seed)
    site, now_s = idle_site(models, batch=rng.choice([1.0, 20.0])), 0.0
    taken, number = 0, 0
    running: list[tuple[float, str]] = []
    while now_s < 200:
        now_s += rng.choice([0.5, 1.0, 3.0])
        for at_s, name in list(running):
            if at_s <= now_s:
                running.remove((at_s, name))
                site.ended(name)
        absent = [
            model for model in "ab" if all(site.workers[name].loaded != model for name in site.orders())
        ]
        for _ in range(rng.choice([0, 0, 1, 8])):
            number += 1
            model = rng.choice(absent or ["a", "b"])
            output = rng.choice([1.0, 300.0, 1_000.0])
            add(site, str(number), model, output=output, now_s=now_s, slo_s=1e5)
        taken += site.take_over(now_s)
        check(site)
        for name in site.orders():
            wanted = site.wanted(name, now_s)
            if (
                wanted is not None
                and wanted != site.workers[name].loaded
                and not site.workers[name].in_flight
            ):
                site.loaded(name, wanted)
            while (pulled := site.pull(name, now_s)) is not None:
                running.append((now_s + pulled.expected_output_tokens / 100, pulled.id))
    assert taken <= len(models) * (now_s / SWAP_S + 1)


def test_who_has_served_somebody_between_two_looks_was_not_idle() -> None:
    site = idle_site("abb")
    crowd(site, 12)
    assert site.pull("w0", 0.0) is not None
    site.take_over(0.0)
    for name in ("w1", "w2"):
        site.send(name, Request(f"at {name}", "c", b"", 10), 10.0)
        site.ended(f"at {name}")
    assert not site.take_over(SWAP_S + 0.1)
    assert site.take_over(2 * SWAP_S + 0.2)


# ---- which model first


def demand(number: int, model: str, slack_s: float, drain_s: float = 10.0) -> Demand:
    return Demand(number, model, slack_s, {"w": drain_s}, {"w": 1.0}, last_slack_s=slack_s + 2 * drain_s)


def queue(loaded: str = "a") -> Queue:
    return Queue("w", loaded, PAIR, 0.0, 0.0)


def test_it_stays_while_the_others_have_time() -> None:
    assert stays(queue(), [demand(1, "b", 100.0), demand(2, "a", 100.0)])
    assert not stays(queue(), [demand(1, "b", 15.0), demand(2, "a", 100.0)]), "10 s, a swap, and one to spare"
    assert stays(queue(), [demand(1, "b", 21.0), demand(2, "a", 100.0)])


def test_there_is_nothing_to_stay_for() -> None:
    assert not stays(queue(), [])
    assert not stays(queue(), [demand(1, "b", 100.0)])
    assert not stays(queue(), [demand(1, "a", 100.0), demand(2, "b", 1.0)]), "its own is first anyway"
    assert not stays(Queue("w", "a", {}, 0.0, 0.0), [demand(1, "b", 100.0), demand(2, "a", 100.0)])


@given(
    rows=st.lists(st.tuples(st.sampled_from("ab"), st.floats(-10.0, 200.0), st.floats(0.1, 30.0)), max_size=8)
)
def test_none_of_another_model_is_later_by_it(rows: list[tuple[str, float, float]]) -> None:
    order = [demand(number, *row) for number, row in enumerate(rows)]
    if not stays(queue(), order):
        return
    mine, others = ([one for one in order if (one.model == "a") == is_mine] for is_mine in (True, False))
    before = {slot.demand.number: slot.late_s for slot in slots(queue(), order)}
    after = {slot.demand.number: slot.late_s for slot in slots(queue(), [*mine, *others])}
    assert all(after[one.number] <= before[one.number] for one in others)
