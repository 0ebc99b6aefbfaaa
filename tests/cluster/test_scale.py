"""When a cluster starts one more replica: only while a shortage lasts, one at a time, never more than it may."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.cluster.control import Refused, Say
from sglang_fair.cluster.scale import ScaleUp
from sglang_fair.cluster.workers import scale_up
from tests.support.budget import examples

SHORT = {"more": 2, "least": 1, "models": {"b": 1, "a": 1, "c": 0}, "why": "work", "for_s": 3.0}


def test_a_shortage_must_last() -> None:
    rule = ScaleUp(5)
    assert [rule.look(SHORT, second) for second in range(10)] == [None] * 10
    assert rule.look(SHORT, 10) == "a"
    assert rule.look(None, 11) is None
    assert rule.look(SHORT, 12) == "a", "one look without it does not begin anew"
    assert rule.look(None, 60) is None
    assert [rule.look(SHORT, second) for second in range(61, 70)] == [None] * 9
    assert rule.look(SHORT, 70) == "a"


def test_bursts_with_long_pauses_need_nobody_and_one_that_comes_and_goes_does() -> None:
    rule = ScaleUp(1)
    assert not any(rule.look(SHORT if second % 30 < 5 else None, second) for second in range(600))
    rule = ScaleUp(1)
    assert any(rule.look(SHORT if second % 10 < 4 else None, second) for second in range(600))


@pytest.mark.parametrize(
    "shortage",
    [
        None,
        {},
        {"more": 0, "least": 0, "models": {}},
        {"more": None, "least": 0, "models": {}},
        {"more": "many", "least": None, "models": "all"},
        {"more": -3, "least": -1},
    ],
)
def test_what_needs_nobody(shortage: dict[str, Any] | None) -> None:
    rule = ScaleUp(5, lasts_s=0)
    assert [rule.look(shortage, second) for second in range(100)] == [None] * 100
    assert rule.look({"more": None, "least": 3, "models": {}}, 100) == "", "whichever is rarest"


@settings(max_examples=examples(200))
@given(
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from([None, SHORT]), st.floats(0, 60), st.booleans()), max_size=80),
)
def test_never_more_than_it_may_and_never_two_within_the_time(
    most: int, steps: list[tuple[dict[str, Any] | None, float, bool]]
) -> None:
    rule, now_s, starts, lasting, not_before_s = ScaleUp(most), 0.0, 0, 0.0, 0.0
    for shortage, wait_s, works in steps:
        now_s += wait_s
        lasting += wait_s if shortage else 0.0
        if rule.look(shortage, now_s) is None:
            continue
        assert lasting >= rule.lasts_s
        assert now_s >= not_before_s
        lasting = 0.0
        if works:
            rule.started(now_s)
            starts, not_before_s = starts + 1, now_s + rule.settle_s
        else:
            rule.failed(now_s)
            not_before_s = now_s + rule.retry_s
    assert starts == rule.added <= most


def test_replicas_are_started_and_what_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_fair.cluster.workers.LOOK_S", 0.0)
    said: list[str] = []
    asked: list[str | None] = []

    async def shortage() -> dict[str, Any]:
        return {"shortage": SHORT}

    async def add(say: Say, model: str | None) -> SimpleNamespace:
        asked.append(model)
        if len(asked) == 1:
            raise Refused("no GPU is free")
        say("r2 is being started")
        return SimpleNamespace(name="r2")

    async def run() -> None:
        rule = ScaleUp(1, lasts_s=0, settle_s=0, retry_s=0)
        scaling = asyncio.create_task(scale_up(rule, shortage, add, said.append))
        async with asyncio.timeout(60):
            while rule.added < 1:
                await asyncio.sleep(0.001)
            for _ in range(50):
                await asyncio.sleep(0)
        scaling.cancel()
        await asyncio.gather(scaling, return_exceptions=True)

    asyncio.run(run())
    assert asked == ["a", "a"]
    assert [line for line in said if "no GPU is free" in line] == [said[1]]
    assert said[-2:] == ["r2 is being started", "scale-up: r2 serves; 0 more may be started"]
