"""Cost functions: charges telescope, grow and sum to the closed forms; the bounds bound; texts are read."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.core.cost import COSTS, Cost, Linear, Profiled, Quadratic, Tiered, describe, make_cost

EXAMPLES: Sequence[Cost] = (
    Linear(),
    Linear(0.0, 1.5),
    Profiled(),
    Quadratic(),
    Quadratic(d=50, context=True),
    Quadratic(d=math.inf),
    Tiered(threshold=300),
    Tiered(threshold=0, factor=3, extend_weight=0.5),
)

COST = st.sampled_from(EXAMPLES)
TOKENS = st.integers(0, 1500)


def charges(
    cost: Cost, extends: Sequence[int], outputs: Sequence[int], cached: int
) -> list[tuple[int, int, float]]:
    """(extend, output, units) of each piece of work, charged as the difference that it makes."""
    found, extend, output = [], 0, 0
    for more_extend, more_output in [*((n, 0) for n in extends), *((0, n) for n in outputs)]:
        before = cost(extend, output, cached)
        extend, output = extend + more_extend, output + more_output
        found.append((more_extend, more_output, cost(extend, output, cached) - before))
    return found


# ---- the contract


@given(COST, TOKENS)
def test_nothing_computed_costs_nothing(cost: Cost, cached: int) -> None:
    assert cost(0, 0) == cost(0, 0, cached) == 0


@given(COST, TOKENS, TOKENS, TOKENS)
def test_it_never_falls(cost: Cost, extend: int, output: int, cached: int) -> None:
    here = cost(extend, output, cached)
    assert cost(extend + 1, output, cached) >= here
    assert cost(extend, output + 1, cached) >= here


@given(COST, TOKENS, TOKENS)
def test_a_cached_prefix_is_never_dearer_than_computing_it(cost: Cost, prompt: int, output: int) -> None:
    whole = cost(prompt, output)
    for cached in (0, prompt // 3, prompt):
        assert cost(prompt - cached, output, cached) <= whole + 1e-9


@given(COST, st.integers(0, 2**32))
def test_the_dearest_bounds_random_prompts_and_random_owed_tokens(cost: Cost, seed: int) -> None:
    """Requests of one client at any point of their way, some of them close to their end."""
    rng = random.Random(seed)
    longest_input, longest_output = rng.randint(1, 1000), rng.randint(1, 1000)
    owed_tokens, owed_units = 0, 0.0
    prompts = []
    for _ in range(rng.randint(1, 12)):
        prompt, output = rng.randint(1, longest_input), rng.randint(1, longest_output)
        cached = rng.randint(0, prompt - 1)
        made = rng.choice((0, output - 1, rng.randint(0, output)))
        prompts.append(cost(prompt - cached, 0, cached))
        owed_tokens += output - made
        owed_units += cost(prompt - cached, output, cached) - cost(prompt - cached, made, cached)
    most_input, most_output = cost.dearest(longest_input, longest_output, owed_tokens)
    assert max(prompts) <= most_input + 1e-9
    assert owed_units <= most_output * (1 + 1e-12) + 1e-9


@given(COST, st.integers(1, 1000), st.integers(1, 1000))
def test_the_dearest_is_reached(cost: Cost, longest_input: int, longest_output: int) -> None:
    most_input, most_output = cost.dearest(longest_input, longest_output, 1)
    last = cost(longest_input, longest_output) - cost(longest_input, longest_output - 1)
    assert most_input == pytest.approx(cost(longest_input, 0))
    assert most_output == pytest.approx(last, rel=1e-6)


# ---- the functions


def test_profiled_is_the_papers_formula() -> None:
    """With nothing cached; the constant comes with the first token."""
    for n_p, n_q in ((1, 0), (256, 256), (100, 1), (2048, 7)):
        papers = 2.1 * n_p + n_q + 0.04 * n_p * n_q + 0.032 * n_q**2 + 11.46
        assert Profiled()(n_p, n_q) == pytest.approx(papers)
    assert Profiled()(1, 0) == pytest.approx(2.1 + 11.46)
    assert Profiled()(2, 0) - Profiled()(1, 0) == pytest.approx(2.1)
    token = Profiled()(300, 5) - Profiled()(300, 4)
    assert token == pytest.approx(1 + 0.04 * 300 + 0.032 * (2 * 5 - 1))


def test_quadratic_is_the_sum_of_its_prices_per_token() -> None:
    """Output token k costs w_o (1 + k/d); input tokens cost w_i [g(full) - g(cached)], g(x) = x + x²/d."""
    d, w_i, w_o, extend, output, cached = 700.0, 1.5, 2.5, 90, 60, 410

    def g(x: float) -> float:
        return x + x * x / d

    prompt = w_i * (g(cached + extend) - g(cached))
    assert Quadratic(d, w_i, w_o)(extend, output, cached) == pytest.approx(
        prompt + sum(w_o * (1 + k / d) for k in range(1, output + 1))
    )
    assert Quadratic(d, w_i, w_o, context=True)(extend, output, cached) == pytest.approx(
        prompt + sum(w_o * (1 + (cached + extend + k) / d) for k in range(1, output + 1))
    )


def test_quadratic_has_the_papers_numbers() -> None:
    """Two clients of equal linear demand, 2304 units/s, whose quadratic demand is 2698 and 5450 units/s."""
    assert 3.0 * Linear()(256, 256) == 0.375 * Linear()(2048, 2048) == 2304
    assert Quadratic()(256, 256) == pytest.approx(899.3, abs=0.05)
    assert Quadratic()(2048, 2048) == pytest.approx(14_534.7, abs=0.05)
    assert 3.0 * Quadratic()(256, 256) == pytest.approx(2698, abs=0.5)
    assert 0.375 * Quadratic()(2048, 2048) == pytest.approx(5450, abs=0.6)
    assert Quadratic()(1024, 0) / Linear()(1024, 0) == pytest.approx(2.02, abs=0.005)
    assert Quadratic()(1024, 1024) / Linear()(1024, 1024) == pytest.approx(1.68, abs=0.005)
    assert Quadratic()(0, 1024) / Linear()(0, 1024) == pytest.approx(1.51, abs=0.005)


def test_the_tier_is_the_whole_prompts_from_the_chunk_that_crosses() -> None:
    cost = Tiered(threshold=1000)
    parts = charges(cost, [600, 400, 1, 99], [1, 1], 0)
    assert [units for _, _, units in parts] == [600, 400, 1002, 198, 4, 4]
    assert cost(1000, 2) == 1004
    assert cost(500, 0, cached_tokens=501) == 1000, "a long prompt is long although half of it was cached"


# ---- texts


@pytest.mark.parametrize(
    ("text", "cost"),
    [
        ("linear", Linear()),
        ("linear:1,2", Linear(1, 2)),
        ("linear:output_weight=3", Linear(1, 3)),
        (" profiled ", Profiled()),
        ("quadratic:d=500", Quadratic(500)),
        ("quadratic:500,1,4,true", Quadratic(500, 1, 4, context=True)),
        ("quadratic:d=1e3, context=True", Quadratic(1000, context=True)),
        ("tiered:threshold=4096,factor=2", Tiered(4096, 2)),
        ("tiered:inf", Tiered(math.inf)),
    ],
)
def test_a_text_names_a_cost(text: str, cost: Cost) -> None:
    assert make_cost(text) == cost


def test_a_cost_is_described_by_a_text_that_names_it() -> None:
    assert {type(cost).__name__.lower() for cost in EXAMPLES} == set(COSTS)
    for cost in EXAMPLES:
        assert make_cost(describe(cost)) == cost


def test_the_weights_apart_belong_to_the_plain_linear_cost() -> None:
    assert make_cost("linear", 3, None) == Linear(3, 2)
    assert make_cost("linear", None, 0.5) == Linear(1, 0.5)
    for text in ("quadratic", "linear:1,2", "profiled"):
        with pytest.raises(ValueError, match=f"belong to the cost linear, not to '{text}'"):
            make_cost(text, None, 1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "unknown cost ''; there are linear, profiled, quadratic, tiered"),
        ("cheap", "unknown cost 'cheap'"),
        ("linear:1,2,3", "unknown parameter '3'; there are extend_weight, output_weight"),
        ("linear:one", "extend_weight must be a number, not 'one'"),
        ("linear:-1", "extend weight must be a finite number, at least 0, not -1.0"),
        ("linear:0,0", "cannot both be 0"),
        ("linear:1,inf", "output weight must be a finite number"),
        ("linear:1,extend_weight=2", "extend_weight is given twice"),
        ("quadratic:d=0", "d must be at least 1 token, not 0.0"),
        ("quadratic:,", "d must be a number, not ''"),
        ("quadratic:w=1", "unknown parameter 'w=1'; there are d, extend_weight, output_weight, context"),
        ("quadratic:context=maybe", "context must be true or false, not 'maybe'"),
        ("tiered", "cost tiered: needs threshold"),
        ("tiered:5,0.5", "factor must be a finite number, at least 1, not 0.5"),
    ],
)
def test_a_bad_text_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refusal:
        make_cost(text)
    assert said in str(refusal.value)
