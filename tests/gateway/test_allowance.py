"""What a request takes of the gateway's capacity is given back, in whose name ever it was taken."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.gateway.errors import ApiError
from router.gateway.sharing.allowance import Allowance, Capacity

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), st.integers(0, 120)), st.tuples(st.just("move"), st.sampled_from("abc"))
    ),
    max_size=8,
)


@given(st.lists(st.tuples(st.sampled_from("abc"), STEPS), max_size=6))
def test_everything_is_given_back(requests: list[tuple[str, list[tuple[str, object]]]]) -> None:
    capacity = Capacity(max_in_flight=4, max_held_bytes=300, max_body_bytes=100)
    allowances = []
    for share, steps in requests:
        allowance = Allowance(capacity)
        allowances.append(allowance)
        with suppress(ApiError):
            allowance.enter(share)
            for what, value in steps:
                getattr(allowance, what)(value)
        assert capacity.requests.taken <= 4
        assert capacity.body_bytes.taken <= 300
    for allowance in allowances:
        allowance.release()
        allowance.release()
    assert (capacity.requests.taken, capacity.body_bytes.taken) == (0, 0)


def test_a_body_counts_once_and_moves_with_its_client() -> None:
    capacity = Capacity(max_in_flight=4, max_held_bytes=300, max_body_bytes=100)
    allowance = Allowance(capacity)
    allowance.enter("(127.0.0.1)")
    allowance.hold(60)
    allowance.hold(40)
    allowance.move("alice")
    assert (capacity.body_bytes.held("alice"), capacity.body_bytes.taken) == (60, 60)
    assert (capacity.requests.held("alice"), capacity.requests.taken) == (1, 1)
    with pytest.raises(ApiError, match="larger than 100 bytes"):
        allowance.hold(101)
