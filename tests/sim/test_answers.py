"""Answers of a model that computes nothing."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_fair.sim.answers import LETTERS, TOKEN_BYTES, answer
from tests.support.budget import examples

TOKENS = st.one_of(st.sampled_from(LETTERS), st.integers(0, 2**32 - 1))


def packed(tokens: list[int]) -> bytes:
    return np.array(tokens, "<u4").tobytes()


@settings(max_examples=examples(200))
@given(st.lists(TOKENS, max_size=3000), st.integers(0, 60), st.integers(0, 60))
@example([5, *LETTERS], 7, 9)
@example([97] * 1100, 7, 9)
@example([], 7, 9)
def test_it_goes_on_behind_any_part_of_it_as_if_it_had_not_been_cut(
    prompt: list[int], said: int, more: int
) -> None:
    whole = answer(packed(prompt), said + more)
    assert answer(packed(prompt) + whole[: said * TOKEN_BYTES], more) == whole[said * TOKEN_BYTES :]
    assert set(np.frombuffer(whole, "<u4")) <= set(LETTERS)


def test_answers_stay_what_they_are_and_keep_to_a_vocabulary() -> None:
    assert answer(b"", 4).hex() == "71000000660000007800000076000000"
    assert set(np.frombuffer(answer(b"", 100, range(5, 7)), dtype="<u4").tolist()) == {5, 6}


@given(st.lists(TOKENS, max_size=50), st.integers(0, 31), st.integers(123, 200))
def test_another_prompt_has_another_answer(prompt: list[int], one: int, other: int) -> None:
    assert answer(packed([*prompt, one]), 40) != answer(packed([*prompt, other]), 40)
