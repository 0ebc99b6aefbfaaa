"""What a client cannot get from `qlm` by claiming, flooding, inventing names, withdrawing, lying or coming piece by
piece; in virtual time."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.placement.contract import Request
from router.placement.qlm import Qlm
from router.radix import Match
from sglang_fair.common.deadlines import Promise
from tests.router.queues.cluster import Asked, ByQlm, Engine, lengths, serve
from tests.support.budget import examples


def engines(count: int = 2, kv_tokens: int = 20_000) -> list[Engine]:
    return [Engine(f"w{number}", kv_tokens, 2_048) for number in range(count)]


def light(rng: Random, seconds: float, every_s: float = 4.0) -> list[Asked]:
    """A request now and then, with a minute of time."""
    times = [5.0 + every_s * number for number in range(int((seconds - 5.0) / every_s))]
    return [Asked(f"light{at_s}", "light", "k", 60.0, at_s, *lengths(rng), 330.0) for at_s in times]


def flood(rng: Random, seconds: float, rate: float, kind: str) -> list[Asked]:
    made, at_s = list[Asked](), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        number, (prompt, output), expected, client = len(made), lengths(rng), 330.0, "flood"
        if kind == "lies":
            expected = 4.0
        elif kind == "piece by piece":
            prompt, output, expected = 8, 4, 4.0
        elif kind == "names":
            client = f"name{number}"
        made.append(Asked(f"f{number:06}", client, "x", 1.0, at_s, prompt, output, expected))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["claims a second", "lies", "piece by piece"])
def test_a_flood_delays_nobody_who_is_within_its_share(kind: str) -> None:
    """It asks for three times what the cluster can do, each within a second. A light client's request goes at once, or
    after what the flood may be served beyond its share."""
    rng = Random(1)
    asked = light(rng, 60.0) + flood(rng, 60.0, 400.0 if kind == "piece by piece" else 30.0, kind)
    made = engines()
    qlm = Qlm(ahead=5_000.0)
    served: dict[str, float] = {"flood": 0.0}
    since: dict[str, float] = {}
    scheduler = ByQlm(qlm, made)
    arrive, following = scheduler.arrive, scheduler.next

    def arrives(one: Asked, *rest: object) -> None:
        since[one.id] = served["flood"]
        arrive(one, *rest)  # type: ignore[arg-type]

    def goes(*arguments: object) -> tuple[Asked, Engine] | None:
        found = following(*arguments)  # type: ignore[arg-type]
        if found is not None:
            one = found[0]
            if one.client == "flood":
                served["flood"] += one.prompt + 2 * one.expected
            else:
                assert one.tier == 0
                largest = 2_048 + 2 * 330.0
                assert served["flood"] - since[one.id] <= 5_000.0 + largest
        return found

    scheduler.arrive, scheduler.next = arrives, goes  # type: ignore[method-assign, assignment]
    serve(scheduler, made, asked)
    mine = [one for one in asked if one.client == "light"]
    assert all(one.is_met for one in mine)
    assert all(one.first_s is not None for one in asked), "nobody starves, whatever it claimed"


def test_ten_thousand_names_share_alike_and_leave_nothing() -> None:
    """k invented names are k clients: each gets no more than one, and none is remembered that owes nothing."""
    rng = Random(2)
    asked = flood(rng, 25.0, 400.0, "names")
    for one in asked:
        one.prompt, one.output, one.expected = 20, 4, 4.0
    made = engines()
    qlm = Qlm(max_clients=100)
    serve(ByQlm(qlm, made), made, asked)
    assert len(asked) > 9_000
    assert all(one.first_s is not None for one in asked)
    assert qlm.shares.clients <= 101
    assert (len(qlm.queues.groups), len(qlm.shares)) == (0, 0)


@settings(max_examples=examples(25))
@given(st.integers(0, 2**32))
def test_each_request_leaves_once_and_sending_again_gains_nothing(seed: int) -> None:
    """Arrivals, withdrawals, the same ids again, ends that fail, workers that go, other tiers, plans of nonsense."""
    rng, qlm = Random(seed), Qlm(kv_tokens=1_000, chunk_tokens=100, ahead=800.0)
    views = {name: Engine(name, 1_000, 100) for name in "vw"}
    for name in views:
        qlm.worker_up(name)
        qlm.equip(name, loaded="a", kv_tokens=1_000, chunk_tokens=100, now_s=0.0)
    qlm.taking(sorted(views))
    waiting: dict[str, Request] = {}
    running: dict[str, tuple[Request, str]] = {}

    def leaves(request: Request, name: str, now_s: float) -> None:
        assert request.id not in running
        tier = qlm.tier(request.id)
        qlm.placed(request, name, Match(), now_s)
        assert qlm.tier(request.id) == tier
        running[request.id] = request, name

    for number in range(150):
        now_s, step, name = number / 10, rng.random(), str(rng.randrange(60))
        taking = [views[one] for one in sorted(views)]
        if step < 0.5 and name not in waiting and name not in running:
            slo_s = rng.choice([0.5, 20.0, 600.0])
            promise = Promise("k", slo_s, now_s + slo_s)
            request = Request(
                name, rng.choice("cde"), b"", rng.randrange(1, 400), 0, rng.uniform(0, 300), model="a",
                promise=promise, exclude=rng.choice([(), (), ("v",)]),
            )  # fmt: skip
            may = [one for one in taking if one.name not in request.exclude]
            placed = qlm.place(request, Match(), may, now_s)
            if placed is None:
                waiting[name] = request
            else:
                assert placed in {one.name for one in may}
                leaves(request, placed, now_s)
        elif step < 0.65 and waiting:
            qlm.give_up(waiting.pop(rng.choice(sorted(waiting))))
        elif step < 0.9 and running:
            request, worker = running.pop(rng.choice(sorted(running)))
            outcome = rng.choice(["ok", "ok", "failed", "aborted"])
            qlm.done(ended_of(request, worker, rng.randrange(500), outcome), now_s)
        elif step < 0.95:
            qlm.answer(rng.randrange(3), {"v": rng.sample(range(40), 20), "z": [1]}, now_s)
        else:
            qlm.question(now_s)
        while (found := qlm.next(taking, lambda _: Match(), lambda *_: True, now_s)) is not None:
            request, worker = found
            assert waiting.pop(request.id) is request
            assert worker not in request.exclude
            leaves(request, worker, now_s)
        counts = qlm.queues.groups.waiting
        assert sum(counts.values()) == len(waiting)
        for worker in views:
            own = qlm.queues.of(worker)
            mine = [request for request in waiting.values() if worker not in request.exclude]
            tiers = {qlm.queues.groups.of(request.id).kind.tier for request in mine}  # type: ignore[union-attr]
            assert not (own.has_room(0) and 0 in tiers)
            assert not (own.has_room(1) and tiers)
    for request, worker in running.values():
        qlm.done(ended_of(request, worker, 1, "ok"), 100.0)
    for request in waiting.values():
        qlm.give_up(request)
    assert (len(qlm.queues.groups), len(qlm.shares)) == (0, 0)
    assert all(qlm.queues.of(worker).in_flight_tokens == 0 for worker in views)


def ended_of(request: Request, worker: str, output: int, outcome: str):
    from router.placement.contract import Ended

    return Ended(request, worker, 0, output, outcome, 1.0, 0.02)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tiers", "goes"), [(True, True), (False, False)])
def test_only_shares_let_a_client_with_little_go_beyond_the_window(tiers: bool, goes: bool) -> None:
    """As in the paper, where nobody has a share, whoever comes waits for the window."""
    made = engines(1)
    qlm = Qlm(tiers=tiers, ahead=5_000.0)
    scheduler = ByQlm(qlm, made)
    asked = [Asked(f"f{number}", "flood", "x", 1.0, 0.0, 500, 100, 100.0) for number in range(80)]
    chat = Asked("chat", "light", "k", 60.0, 0.0, 500, 100, 100.0)
    for one in asked:
        scheduler.arrive(one, made, 0.0)
    while scheduler.next(made, 0.0) is not None:
        pass
    assert qlm.next(made, lambda _: Match(), lambda *_: True, 0.0) is None, (
        "after the orders of the last look"
    )
    assert qlm.queues.of("w0").held_tokens >= 20_000
    scheduler.arrive(chat, made, 0.0)
    assert (chat.id in qlm.queues.of("w0").in_flight) == goes
