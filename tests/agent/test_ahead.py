"""What is read ahead: what comes next, as far as it fits into memory."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.agent.ahead import read_ahead

SIZES = {"a": 10, "b": 20, "c": 30}


def test_the_next_models_in_their_order() -> None:
    assert read_ahead(["b", "c"], "a", SIZES, 1000) == ("b", "c")
    assert read_ahead(["a", "c", "b", "c", "x"], "a", SIZES, 1000) == ("c", "b")
    assert read_ahead(["b", "c"], "a", SIZES, 60) == ("b",)
    assert read_ahead(["c", "b"], "a", SIZES, 30) == (), (
        "what comes later would take the room of what comes next"
    )


@given(
    ahead=st.lists(st.sampled_from("abcx"), max_size=8),
    loaded=st.sampled_from("abc"),
    available=st.integers(0, 200),
)
def test_never_more_than_fits(ahead: list[str], loaded: str, available: int) -> None:
    chosen = read_ahead(ahead, loaded, SIZES, available)
    assert sum(SIZES[model] for model in chosen) <= available
    assert loaded not in chosen
    assert len(set(chosen)) == len(chosen)
