"""Throttling by overload and interaction: what is promised (FS-P1 to FS-P4), under adversaries."""

from math import inf
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.core.interactions import Interaction
from sglang_fair.core.throttle import (
    MOST_REMEMBERED,
    SILENT_S,
    BadLoad,
    Counts,
    Overload,
    Refusal,
    Rules,
    Throttle,
)

COUNTS: tuple[Counts, ...] = get_args(Counts)


def overloaded(throttle: Throttle, now_s: float) -> None:
    throttle.overload.report("r0", 1000, 0, 1000, now_s)


def test_an_app_s_limit_may_be_that_of_all_together() -> None:
    throttle = Throttle(Rules(None, {"chat": 2}, app_total=True))
    overloaded(throttle, 0.0)
    judged = [throttle.judge(Interaction(client, "chat", ""), ["r0"], 0.0) for client in "abc"]
    assert judged[:2] == [1, 1]
    assert isinstance(judged[2], Refusal)


def test_retries_lock_nobody_out_unless_arrivals_count() -> None:
    """Who tries again every second has its limit each minute; by the paper's letter it has nothing ever again."""
    let_in = {}
    for counts in COUNTS:
        throttle = Throttle(Rules(5, counts=counts))
        let_in[counts] = 0
        for second in range(600):
            overloaded(throttle, float(second))
            found = throttle.judge(Interaction("a", "chat", ""), ["r0"], float(second))
            let_in[counts] += not isinstance(found, Refusal)
    assert let_in == {"accepted": 50, "arrivals": 5}


def test_siblings_of_a_refused_call_are_refused_until_it_may_come_again() -> None:
    throttle = Throttle(Rules(1))
    overloaded(throttle, 0.0)
    throttle.judge(Interaction("a", "chat", "0"), ["r0"], 0.0)
    overloaded(throttle, 10.0)
    first = throttle.judge(Interaction("a", "chat", "1"), ["r0"], 10.0)
    throttle.rules = Rules(100)
    assert isinstance(first, Refusal)
    assert first.retry_after_s == 50
    overloaded(throttle, 30.0)
    sibling = throttle.judge(Interaction("a", "chat", "1"), ["r0"], 30.0)
    assert isinstance(sibling, Refusal)
    assert sibling.retry_after_s == 30
    assert throttle.judge(Interaction("a", "chat", "2"), ["r0"], 30.0) == 1
    overloaded(throttle, 60.0)
    assert throttle.judge(Interaction("a", "chat", "1"), ["r0"], 60.0) == 1


def test_a_restarted_router_cuts_no_interaction() -> None:
    throttle = Throttle(Rules(1))
    overloaded(throttle, 0.0)
    throttle.judge(Interaction("a", "chat", "0"), ["r0"], 0.0)
    assert isinstance(throttle.judge(Interaction("a", "chat", "1"), ["r0"], 0.0), Refusal)
    assert throttle.judge(Interaction("a", "chat", "2"), ["r0"], 0.0, begun=3) == 4
    assert throttle.judge(Interaction("a", "chat", "2"), ["r0"], 0.0) == 5


@pytest.mark.slow
def test_a_hundred_thousand_refused_ids_take_bounded_memory() -> None:
    throttle = Throttle(Rules(1))
    throttle.interactions.most = 100
    overloaded(throttle, 0.0)
    for id in range(120_000):
        throttle.judge(Interaction("a", "chat", str(id)), ["r0"], 0.0)
    assert len(throttle._siblings) == 100_000
    assert throttle.nearest(59.0) == [("a", 1, 1)]
    assert throttle.nearest(60.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("invented", ["app", "client"])
@pytest.mark.parametrize("counts", COUNTS)
def test_a_hundred_thousand_names_a_minute_take_bounded_memory(counts: Counts, invented: str) -> None:
    throttle = Throttle(Rules(None, {"*": 1}, counts=counts))
    for number in range(MOST_REMEMBERED + 2_000):
        names = {"client": "c", "app": "chat"} | {invented: f"new {number}"}
        throttle.judge(Interaction(**names, id=""), ["r0"], number / 2_000)
    assert len(throttle._had.counts()) == MOST_REMEMBERED
    assert len(throttle.nearest(51.0)) == (1 if invented == "app" else 10)


def test_overload_begins_high_and_ends_low() -> None:
    overload = Overload(0.9, 0.5)
    seen = []
    for now_s, (used, waiting) in enumerate([(800, 0), (800, 100), (600, 0), (500, 0), (499, 0), (899, 0)]):
        overload.report("r0", used, waiting, 1000, now_s)
        seen.append(overload.is_overloaded(["r0"], now_s))
    assert seen == [False, True, True, True, False, False]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.5, 2.0, 6.0]), st.sampled_from("abc"), st.sampled_from([80, 88, 96])
        ),
        max_size=40,
    ),
    st.lists(st.sampled_from("abc"), unique=True),
)
def test_overload_is_what_the_rule_says(reports: list[tuple[float, str, int]], workers: list[str]) -> None:
    """Against the whole history of each replica, read from its beginning every time."""
    overload, heard, now_s = Overload(), dict[str, list[tuple[float, int]]](), 0.0

    def literal(worker: str) -> bool:
        found, last_s = False, -inf
        for at_s, used in heard.get(worker, []):
            found = used >= (85 if found and at_s - last_s < SILENT_S else 95)
            last_s = at_s
        return found and now_s - last_s < SILENT_S

    for seconds, worker, used in reports:
        now_s += seconds
        assert overload.is_overloaded(workers, now_s) == (bool(workers) and all(map(literal, workers)))
        overload.report(worker, used, 0, 100, now_s)
        heard.setdefault(worker, []).append((now_s, used))
        assert overload.is_overloaded(workers, now_s) == (bool(workers) and all(map(literal, workers)))


def test_since_when_is_said_of_each_model_s_replicas() -> None:
    overload = Overload()
    for now_s in (0.0, 1.0, 2.0):
        for name in ("a0", "a1", "b0"):
            full = name != "a1" or now_s > 0
            overload.report(name, 1000 if full else 0, 0, 1000, now_s)
        of_a = overload.overloaded_since_s(["a0", "a1"], now_s)
        assert of_a == (None if now_s == 0 else 1.0)
        assert overload.overloaded_since_s(["b0"], now_s) == 0.0
    assert overload.overloaded_since_s(["a0"], 2.0) == 0.0, "a1 left"
    overload.report("b0", 0, 0, 1000, 2.0)
    assert overload.overloaded_since_s(["b0"], 2.0) is None
    overload.report("b0", 1000, 0, 1000, 3.0)
    assert overload.overloaded_since_s(["b0"], 3.0) == 3.0


def test_a_cluster_is_overloaded_when_all_that_take_requests_are() -> None:
    overload = Overload()
    overload.report("r0", 1000, 500, 1000, 0.0)
    assert overload.is_overloaded(["r0"], 0.0)
    assert not overload.is_overloaded(["r0", "r1"], 0.0), "r1 has said nothing"
    assert not overload.is_overloaded([], 0.0)
    overload.report("r1", 990, 0, 1000, 1.0)
    assert overload.is_overloaded(["r0", "r1"], 1.0)
    assert overload.pressure(["r0", "r1"], 1.0) == 0.99
    assert not overload.is_overloaded(["r0", "r1"], SILENT_S), "r0 is silent"
    overload.forget("r0")
    overload.report("r0", 860, 0, 1000, 6.0)
    assert not overload.is_overloaded(["r0"], 6.0), "it was forgotten, and is below high"


@pytest.mark.parametrize("load", [(-1, 0, 10), (0, -1, 10), (21, 0, 10), (0, 0, 0)])
def test_loads_that_cannot_be(load: tuple[int, int, int]) -> None:
    with pytest.raises(BadLoad, match="of"):
        Overload().report("r0", *load, 0.0)
