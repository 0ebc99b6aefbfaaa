"""Idle workers take groups over for which they load another model: soon enough, and never without end."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.queues.estimate import Estimator
from router.queues.groups import Groups
from router.queues.taking_over import LAST
from router.queues.virtual import VirtualQueues
from router.queues.worker import Worker
from tests.router.queues.test_virtual import add, check, queued
from tests.support.budget import examples

SWAP_S = 5.0
SWAPS = {"a": SWAP_S, "b": SWAP_S}


def a_site(models: str, *, batch: float = 2.0) -> VirtualQueues:
    """Workers w0, w1, … with these models loaded. A request of a thousand output tokens takes ten seconds."""
    made = VirtualQueues(Groups(2.0, batch), Estimator(output_s=0.01, token_s=0.01, longest_tokens=100))
    for number, model in enumerate(models):
        made.worker_up(Worker(f"w{number}", model, 1_500, 0, SWAPS))
    return made


def crowd(site: VirtualQueues, count: int, model: str = "a", now_s: float = 0.0) -> None:
    for number in range(count):
        add(site, queued(f"{model}{now_s}{number}", model, output=1_000.0, now_s=now_s, slo_s=1e5))


@pytest.mark.parametrize(("models", "after_s"), [("abb", SWAP_S), ("ab", LAST * SWAP_S)])
def test_an_idle_worker_loads_what_waits_elsewhere_once_it_was_idle_long_enough(
    models: str, after_s: float
) -> None:
    site = a_site(models)
    crowd(site, 12)
    assert site.pull("w0", 0.0) is not None
    assert not site.take_over(0.0)
    assert not site.take_over(after_s - 0.1)
    assert site.take_over(after_s + 0.1) == len(models) - 1
    assert site.wanted("w1", after_s + 0.2) == "a"
    check(site)


def test_who_works_or_gains_nothing_takes_nothing_over() -> None:
    site = a_site("abb")
    site.send("w1", "runs", 100.0, None, 0)
    add(site, queued("short", "a", output=10.0))
    for now_s in range(0, 100, 2):
        assert not site.take_over(float(now_s)), "it starts at once where it is"
    crowd(site, 12, now_s=100.0)
    for now_s in range(100, 200, 2):
        site.take_over(float(now_s))
        assert site.of("w1").groups == [], "a request runs there"
    assert site.wanted("w2") == "a"


def test_half_of_a_group_that_has_begun_is_taken_over() -> None:
    site = a_site("abb", batch=20.0)
    crowd(site, 12)
    assert site.pull("w0", 0.0) is not None
    site.take_over(0.0)
    assert site.take_over(2 * SWAP_S) >= 1
    waiting = {
        name: sum(len(site.groups.by_number()[n]) for n in order) for name, order in site.orders().items()
    }
    assert sum(waiting.values()) == 11
    assert min(waiting.values()) >= 2, "half went to one, and half of what was left to the other"
    check(site)


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32), st.sampled_from(["ab", "abb", "aabb"]))
def test_whatever_is_asked_for_and_when_swaps_are_bounded(seed: int, models: str) -> None:
    """The adversary sees every state, and asks for the model that has just been given up."""
    rng = Random(seed)
    site, now_s = a_site(models, batch=rng.choice([1.0, 20.0])), 0.0
    taken, number = 0, 0
    running: list[tuple[float, str]] = []
    while now_s < 200:
        now_s += rng.choice([0.5, 1.0, 3.0])
        for at_s, name in list(running):
            if at_s <= now_s:
                running.remove((at_s, name))
                site.ended(name)
        absent = [model for model in "ab" if all(site.of(name).loaded != model for name in site.orders())]
        for _ in range(rng.choice([0, 0, 1, 8])):
            number += 1
            model = rng.choice(absent or ["a", "b"])
            output = rng.choice([1.0, 300.0, 1_000.0])
            add(site, queued(str(number), model, output=output, now_s=now_s, slo_s=1e5), rng.choice([0, 1]))
        taken += site.take_over(now_s)
        check(site)
        for name in site.orders():
            wanted = site.wanted(name, now_s)
            if wanted is not None and wanted != site.of(name).loaded and not site.of(name).in_flight:
                site.loaded(name, wanted)
            while (pulled := site.pull(name, now_s)) is not None:
                running.append((now_s + pulled.expected_output_tokens / 100, pulled.id))
    assert taken <= len(models) * (now_s / SWAP_S + 1)


def test_who_has_served_somebody_between_two_looks_was_not_idle() -> None:
    site = a_site("abb")
    crowd(site, 12)
    assert site.pull("w0", 0.0) is not None
    site.take_over(0.0)
    for name in ("w1", "w2"):
        site.send(name, f"at {name}", 10.0, None, 0)
        site.ended(f"at {name}")
    assert not site.take_over(SWAP_S + 0.1)
    assert site.take_over(2 * SWAP_S + 0.2)
