"""What an answer means for an item, and how many are sent at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.feeder.answers import LONGEST_WAIT_S, LOST_TRIES, MOST_TRIES, Again, Answer, Result, judge
from router.feeder.pace import FIRST, LEAST, Pace
from router.suspects import ENDED, QUARANTINED


@pytest.mark.parametrize("status", [200, 201, 299])
def test_what_is_answered_is_over(status: int) -> None:
    assert judge(Answer(status), 1) == Result(True, status)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_what_is_refused_is_over(status: int) -> None:
    assert judge(Answer(status), 1) == Result(False, status)


def test_what_two_replicas_ended_with_is_over() -> None:
    assert judge(Answer(502, code=ENDED), 1) == Result(False, 502)


@pytest.mark.parametrize(
    ("status", "code", "holds"),
    [(0, "", "all"), (429, "", "client"), (503, "", "model"), (503, QUARANTINED, "client")],
)
def test_what_is_nobody_s_fault_is_never_over(status: int, code: str, holds: str) -> None:
    for tries in (1, 100):
        verdict = judge(Answer(status, code=code), tries)
        assert isinstance(verdict, Again)
        assert (verdict.holds, verdict.counts) == (holds, False)


def test_a_wrong_key_of_ours_is_not_the_item_s_fault() -> None:
    verdict = judge(Answer(401, code="invalid_feeder_key"), 1)
    assert isinstance(verdict, Again)
    assert (verdict.holds, verdict.counts) == ("all", False)


@pytest.mark.parametrize(("status", "most"), [(500, MOST_TRIES), (502, MOST_TRIES), (1, LOST_TRIES)])
def test_what_may_be_its_fault_is_tried_so_often(status: int, most: int) -> None:
    for tries in range(1, most):
        verdict = judge(Answer(status), tries)
        assert isinstance(verdict, Again)
        assert verdict.counts
    verdict = judge(Answer(status), most)
    assert isinstance(verdict, Result)
    assert not verdict.is_ok
    assert verdict.status >= 500


@given(st.integers(0, 599), st.integers(1, 50), st.one_of(st.none(), st.floats(0, 1e9)))
def test_waits_are_bounded(status: int, tries: int, retry_after_s: float | None) -> None:
    verdict = judge(Answer(status, retry_after_s=retry_after_s), tries)
    if isinstance(verdict, Again):
        assert 0 < verdict.after_s <= LONGEST_WAIT_S


# ---- pace


def served(pace: Pace, knee: int, seconds: float, start_s: float = 0.0, rate: float = 10.0) -> float:
    """A replica that gets faster up to `knee` items, at so many answers a second for each. The time at the end."""
    now_s, done, step_s = start_s, 0.0, 0.05
    pace.tick(now_s, 1, is_full=True)
    while now_s < start_s + seconds:
        now_s += step_s
        done += rate * min(pace.limit, knee) * step_s
        while done >= 1:
            done -= 1
            pace.answered(100)
        pace.tick(now_s, 1, is_full=True)
    return now_s


@pytest.mark.parametrize("knee", [4, 16, 64, 100])
def test_it_finds_as_many_as_make_the_replica_faster(knee: int) -> None:
    pace = Pace(256)
    now_s = served(pace, knee, 400.0)
    seen = []
    for _ in range(20):
        now_s = served(pace, knee, 10.0, now_s)
        seen.append(pace.limit)
    seen.sort()
    assert 0.6 * knee <= seen[10] <= 2.5 * knee, seen


def test_it_stays_within_its_bounds() -> None:
    pace = Pace(20)
    now_s = served(pace, 1000, 200.0)
    assert pace.limit == 20
    pace.trouble()
    assert pace.limit == LEAST
    served(pace, 1000, 20.0, now_s)
    assert pace.limit >= 13
    assert Pace(1).most == LEAST


def test_after_trouble_it_is_soon_where_it_was() -> None:
    pace = Pace(256)
    now_s = served(pace, 1000, 300.0)
    before = pace.limit
    assert before > 4 * FIRST
    pace.trouble()
    served(pace, 1000, 5.0, now_s)
    assert pace.limit >= before / 2


def test_without_more_to_send_nothing_is_learnt() -> None:
    pace = Pace(256)
    for second in range(200):
        for _ in range(1000):
            pace.answered(1)
        pace.tick(float(second), 1, is_full=False)
    assert pace.limit == 4 * FIRST
