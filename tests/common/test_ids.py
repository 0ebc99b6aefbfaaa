"""Names of requests."""

from sglang_fair.common.ids import new_id


def test_each_is_another_one_of_32_digits() -> None:
    made = {new_id() for _ in range(2000)}
    assert len(made) == 2000
    assert all(len(one) == 32 and set(one) <= set("0123456789abcdef") for one in made)
