"""What a client cannot get from `qlm` by withdrawing, sending again and failing."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.placement.contract import Ended, Equipment, Request
from router.placement.qlm import Qlm
from router.placement.qlm.search import Answer
from router.radix import Match
from sglang_fair.common.deadlines import Promise
from tests.support.budget import examples
from tests.support.worker_view import View


@settings(max_examples=examples(25))
@given(st.integers(0, 2**32))
def test_each_request_leaves_once_and_sending_again_gains_nothing(seed: int) -> None:
    """Arrivals, withdrawals, the same ids again, ends that fail, workers that go, plans of nonsense."""
    rng, qlm = Random(seed), Qlm(kv_tokens=1_000, chunk_tokens=100)
    views = {name: View(name) for name in "vw"}
    for name in views:
        qlm.worker_up(name)
        qlm.equip(name, Equipment("a", kv_tokens=1_000, chunk_tokens=100), 0.0)
    qlm.taking(sorted(views))
    waiting: dict[str, Request] = {}
    running: dict[str, tuple[Request, str]] = {}

    def leaves(request: Request, name: str, now_s: float) -> None:
        assert request.id not in running
        qlm.placed(request, name, Match(), now_s)
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
            qlm.answer(rng.randrange(3), Answer({"v": rng.sample(range(40), 20), "z": [1]}), now_s)
        else:
            qlm.question(now_s)
        while (found := qlm.next(taking, lambda _: Match(), lambda *_: True, now_s)) is not None:
            request, worker = found
            assert waiting.pop(request.id) is request
            assert worker not in request.exclude
            leaves(request, worker, now_s)
        assert sum(map(len, qlm.queues.groups)) == len(waiting)
        for worker in views:
            own = qlm.queues.workers[worker]
            mine = [request for request in waiting.values() if worker not in request.exclude]
            assert not (own.has_room() and mine)
    for request, worker in running.values():
        qlm.done(ended_of(request, worker, 1, "ok"), 100.0)
    for request in waiting.values():
        qlm.give_up(request)
    assert len(qlm.queues.groups) == len(qlm.queues.groups.entries) == 0
    assert all(qlm.queues.workers[worker].sent.tokens == 0 for worker in views)


def ended_of(request: Request, worker: str, output: int, outcome: str):
    return Ended(request, worker, 0, output, outcome, 1.0, 0.02)  # type: ignore[arg-type]
