"""When a plan is asked for, and what happens while nobody answers."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.queues.replan import Replans


def test_it_is_asked_when_somebody_is_late_at_most_once_a_second_and_after_the_answer() -> None:
    replans = Replans()
    assert replans.due(False, 0.0) == []
    assert replans.due(True, 5.0) == ["ask"]
    assert replans.due(True, 7.0) == [], "it has not answered"
    assert replans.accept(1)
    assert replans.due(False, 8.0) == []
    assert replans.due(True, 8.0) == ["ask"]
    assert replans.accept(2)
    assert replans.due(True, 8.5) == []
    assert replans.due(True, 9.0) == ["ask"]


def test_answers_to_other_questions_count_for_nothing() -> None:
    replans = Replans()
    replans.due(True, 0.0)
    assert [replans.accept(number) for number in (0, 2, -1, 1, 1)] == [False, False, False, True, False]
    assert replans.stale == 4


def test_a_dead_planner_is_replaced_by_edf_until_one_answers() -> None:
    replans = Replans(every_s=1.0, patience_s=3.0)
    assert replans.due(True, 0.0) == ["ask"]
    assert [replans.due(True, now_s) for now_s in (1.0, 2.9)] == [[], []]
    assert replans.due(True, 3.0) == ["ask", "edf"]
    assert replans.due(True, 3.5) == []
    assert replans.due(True, 4.0) == ["edf"]
    assert replans.is_dead(4.0)
    assert replans.due(False, 6.0) == [], "nobody is late"
    assert replans.due(True, 6.0) == ["ask", "edf"]
    assert not replans.accept(1), "the answer to what was asked long ago"
    assert replans.is_dead(6.0)
    assert replans.accept(3)
    assert not replans.is_dead(6.0)
    assert replans.due(True, 7.0) == ["ask"]


@given(st.integers(0, 2**32))
def test_queues_are_planned_once_in_a_while_whatever_the_planner_does(seed: int) -> None:
    """With somebody late all the time: never two questions within a second, and never longer than the planner's
    patience and a second without a plan of either sort."""
    rng, replans = Random(seed), Replans(every_s=1.0, patience_s=3.0)
    asked_s, planned_s, now_s = -10.0, 0.0, 0.0
    for _ in range(300):
        now_s += rng.choice([0.05, 0.2, 0.5])
        for step in replans.due(True, now_s):
            if step == "ask":
                assert now_s - asked_s >= 1.0 - 1e-9
                asked_s = now_s
            else:
                planned_s = now_s
        if rng.random() < 0.05 and replans.accept(rng.choice([replans.asked, replans.asked - 1])):
            planned_s = now_s
        assert now_s - planned_s <= 1.0 + 3.0 + 1.0


@pytest.mark.parametrize(("every_s", "patience_s"), [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_times_are_positive(every_s: float, patience_s: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Replans(every_s, patience_s)
