"""Weights that requests tell the router, and cache groups in its tree."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.core import Router
from router.events import Arrive, Done, Place, ProtocolError, Running, Stored, WorkerUp, decode_event, encode
from router.placement import PLACEMENTS, build
from router.placement.contract import Placement
from router.placement.queues import Queues
from router.wire import namespace
from sglang_fair.common.caller import GROUP_MARK, salted
from sglang_fair.common.weights import KEPT, MOST_WEIGHT, Weights
from tests.support.budget import examples

PROMPT = np.arange(64, dtype="<u4").tobytes()
WEIGHED = sorted(name for name in PLACEMENTS if build(name).weights is not None)


def made(placement: Placement | None = None) -> Router:
    router = Router(placement or build("d2lpm"), page_size=16)
    for worker in "ab":
        router.handle(WorkerUp(worker, f"http://{worker}", "tcp://kv"), 0.0)
    return router


def of(router: Router, client: str) -> list[float]:
    """Its weight, as the placements with weights know it."""
    return [one.weights.of(client) for one in router.workers.placements if one.weights is not None]


def test_the_placements_with_shares_are_known():
    shared = {"d2lpm", "d2lpm-queue", "centralized_dlpm", "deadline"}
    assert shared == set(WEIGHED)


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
def test_requests_tell_the_weight_and_the_later_file_wins(name):
    router = made(build(name))
    known = int(name in WEIGHED)
    for number, (weight, version, then) in enumerate(
        [(3.0, 5, 3.0), (9.0, 4, 3.0), (None, 9, 3.0), (0.5, 6, 0.5)]
    ):
        router.handle(Arrive(f"{number}", "c", PROMPT, weight=weight, weight_version=version), 0.0, b"g")
        assert of(router, "c") == [then] * known
    router.handle(Running("r", "c", PROMPT, worker="a", weight=7.0, weight_version=7), 0.0, b"g")
    assert of(router, "c") == [7.0] * known, "a router that was started anew hears it of what is in flight"


def test_what_a_gateway_says_is_checked():
    told = Arrive("1", "c", PROMPT, weight=2.0, weight_version=1_763_809_200_000_000_000)
    assert decode_event(encode(told)) == told
    assert encode(Arrive("1", "c", PROMPT)) == encode(Arrive("1", "c", PROMPT, weight=None, weight_version=0))
    for weight in (0.0, -1.0, float("nan"), float("inf"), 2 * MOST_WEIGHT, 0.5 / MOST_WEIGHT):
        with pytest.raises(ProtocolError):
            decode_event(encode(Arrive("1", "c", PROMPT, weight=weight)))


@pytest.mark.slow
def test_ten_thousand_names_with_weights_leave_little():
    router = made()
    for number in range(10_000):
        name = f"{number}"
        router.handle(Arrive(name, name, PROMPT, weight=2.0, weight_version=1), 0.0, b"g")
        if number:
            router.handle(Done(name), 0.0, b"g")
        weights = router.placement.weights
        assert weights is not None
        assert len(weights.items()) <= KEPT + 2
    assert of(router, "0") == [2.0], "it is in flight"


# ---- what follows from a change


WEIGHT = st.sampled_from([0.01, 0.5, 1.0, 3.0, 700.0])


@settings(max_examples=examples(200))
@given(
    sent=st.lists(st.tuples(st.sampled_from("fgh"), st.integers(0, 1), st.floats(1, 1e6)), max_size=20),
    changes=st.lists(st.tuples(st.integers(0, 20), st.sampled_from("fgh"), WEIGHT), max_size=8),
    more=st.floats(1, 1e6),
)
def test_queues_are_as_if_the_weight_had_always_been_this_one(sent, changes, more):
    weights = Weights()
    queues = Queues(weights, 100)
    for worker in "ab":
        queues.worker_up(worker, 1.0)
    for number, (client, column, units) in enumerate([*sent, ("f", 0, 1.0)]):
        queues.begin(queues.of(client), column, units, units / 3)
        for when, whose, weight in changes:
            if when == number:
                weights.set(whose, weight)
                queues.reweighed(whose)
    fresh = Queues(Weights(weights.items()), 100)
    for worker in "ab":
        fresh.worker_up(worker, 1.0)
    for client, column, units in [*sent, ("f", 0, 1.0)]:
        fresh.begin(fresh.of(client), column, units, units / 3)
    for client in "fgh":
        units = np.array([more, more])
        assert queues.delays(queues.of(client), units) == pytest.approx(fresh.delays(fresh.of(client), units))


@settings(max_examples=examples(100))
@given(steps=st.lists(st.tuples(st.sampled_from("fg"), WEIGHT, st.integers(1, 400)), max_size=30))
def test_credit_is_never_above_the_quantum_of_now(steps):
    placement = build("d2lpm", worker_quantum=100.0)
    router = made(placement)
    for number, (client, weight, tokens) in enumerate(steps):
        prompt = np.full(tokens, number, "<u4").tobytes()
        router.handle(Arrive(f"{number}", client, prompt, weight=weight, weight_version=number), 0.0, b"g")
        for credit in placement.credits(9)[client].values():
            assert credit <= 100.0 * weight * (1 + 1e-9)


# ---- groups


PARTS = st.text(alphabet="ag\x1d\x1e\x1f\\s", max_size=5)


@settings(max_examples=examples(500))
@given(one=st.tuples(PARTS, PARTS, PARTS), other=st.tuples(PARTS, PARTS, PARTS))
@example(("", "a\x1fb", ""), ("", "a", "b\x1f"))
@example(("", "a", "b\x1f"), ("", "a\x1fb", ""))
@example(("\\", "s", ""), ("\x1f", "", ""))
def test_no_adapter_salt_or_key_makes_the_namespace_of_another(one, other):
    assert (namespace(*one) == namespace(*other)) == (one == other)


def test_a_group_matches_what_its_own_have_cached_and_nobody_else_does():
    router = made()
    salt = salted("team", None)
    event = Stored("a", tuple(range(4)), None, PROMPT, 16, namespace(None, salt, None))
    router.handle(event, 0.0)
    for number, (space, matched) in enumerate(
        [
            (namespace(None, salt, None), 64),
            ("", 0),
            (namespace(None, salted("other", None), None), 0),
            (namespace(None, salted(None, salt), None), 0),
            (namespace(None, salted(None, "team"), None), 0),
            (namespace(f"\x1f{GROUP_MARK}team{GROUP_MARK}\x1f", None, None), 0),
        ]
    ):
        ((_, place),) = router.handle(Arrive(f"{number}", "c", PROMPT, namespace=space), 0.0, b"g")
        assert isinstance(place, Place)
        assert place.matched_tokens == matched, space
        router.handle(Done(f"{number}", outcome="failed"), 0.0, b"g")
