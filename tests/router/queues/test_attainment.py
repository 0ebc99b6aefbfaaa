"""QLM in virtual time: with one model it is no worse than EDF by request, nobody idles, and fair shares hold."""

from collections.abc import Sequence
from random import Random

import pytest

from router.placement.qlm import Qlm
from tests.router.queues.cluster import Asked, ByEdf, ByQlm, Engine, attained, lengths, serve

CLASSES = (("interactive", 20.0), ("batch-1", 60.0), ("batch-2", 3_600.0))


def engines(count: int = 2, kv_tokens: int = 20_000) -> list[Engine]:
    return [Engine(f"w{number}", kv_tokens, 2_048) for number in range(count)]


def mix(seed: int, rate: float, seconds: float, clients: int = 20) -> list[Asked]:
    """Requests of three classes, as many of each."""
    rng, at_s, made = Random(seed), 0.0, list[Asked]()
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        slo_class, slo_s = rng.choice(CLASSES)
        client = f"c{rng.randrange(clients)}"
        made.append(Asked(f"{len(made):05}", client, slo_class, slo_s, at_s, *lengths(rng), 330.0))
    return made


def in_time(asked: Sequence[Asked], slo_class: str) -> float:
    return attained([one for one in asked if one.slo_class == slo_class])


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("rate", [10.0, 16.0])
def test_with_one_model_it_is_no_worse_than_edf_by_request(rate: float, tiers: bool) -> None:
    """Queues of workers lose nothing to one queue for all: not where all can be in time, nor where a third cannot.
    Nor do shares, where clients send alike: what each needs soon is within its share, not its backlog."""
    ours, theirs = mix(1, rate, 150.0), mix(1, rate, 150.0)
    made = engines()
    serve(ByQlm(Qlm(tiers=tiers), made), made, ours)
    serve(ByEdf(), engines(), theirs)
    assert all(one.first_s is not None for one in ours), "nobody is left behind"
    assert attained(ours) >= attained(theirs) - 0.01


@pytest.mark.slow
def test_urgent_requests_do_not_wait_for_their_own_queue_while_another_has_time() -> None:
    """Four queues, and all could be in time: without lending one in thirty is late."""
    ours = mix(1, 22.0, 150.0)
    made = engines(4)
    serve(ByQlm(Qlm(tiers=False), made), made, ours)
    assert attained(ours) >= 0.995


@pytest.mark.slow
def test_who_is_late_already_does_not_make_others_late() -> None:
    """Far beyond what can be served EDF serves those who have just missed their deadline, all the time."""
    ours, theirs = mix(2, 20.0, 150.0), mix(2, 20.0, 150.0)
    made = engines()
    serve(ByQlm(Qlm(tiers=False), made), made, ours)
    serve(ByEdf(), engines(), theirs)
    assert attained(ours) >= attained(theirs) + 0.1


@pytest.mark.slow
def test_no_worker_has_room_while_somebody_waits() -> None:
    """Whom a worker with room could serve with its model: in tier 0 up to the last chunk, in tier 1 below the cache."""
    made = engines(3)
    qlm = Qlm(ahead=5_000.0)
    asked = mix(3, 20.0, 60.0, clients=5)

    def watch(now_s: float) -> None:
        waiting = qlm.queues.groups.waiting
        for engine in made:
            worker = qlm.queues.of(engine.name)
            worker.overrun_tokens = engine.overrun_tokens
            if worker.has_room(0):
                assert not waiting.get(("a", 0), 0) + waiting.get(("a", 1), 0)
            if worker.has_room(1):
                assert not waiting

    serve(ByQlm(qlm, made), made, asked, watch)
    assert all(one.first_s is not None for one in asked)
