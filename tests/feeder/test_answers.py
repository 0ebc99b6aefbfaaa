"""What an answer means for an item."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.feeder.answers import LONGEST_WAIT_S, LOST_TRIES, MOST_TRIES, Again, Answer, Result, judge
from router.suspects import ENDED, QUARANTINED
from sglang_fair.common.deadlines import EXPIRED_CODE


@pytest.mark.parametrize("status", [200, 201, 299, 400, 401, 404, 413, 422])
def test_what_is_answered_or_refused_is_over(status: int) -> None:
    assert judge(Answer(status), 1) == Result(status < 300, status)


@pytest.mark.parametrize(("status", "code"), [(502, ENDED), (504, EXPIRED_CODE)])
def test_what_two_replicas_ended_with_or_has_expired_is_over(status: int, code: str) -> None:
    assert judge(Answer(status, code=code), 1) == Result(False, status)


@pytest.mark.parametrize(
    ("status", "code", "holds"),
    [
        (0, "", "all"),
        (401, "invalid_feeder_key", "all"),
        (429, "", "client"),
        (503, "", "model"),
        (503, QUARANTINED, "client"),
    ],
)
def test_what_is_not_the_item_s_fault_is_never_over(status: int, code: str, holds: str) -> None:
    for tries in (1, 100):
        verdict = judge(Answer(status, code=code), tries)
        assert isinstance(verdict, Again)
        assert (verdict.holds, verdict.counts) == (holds, False)


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
