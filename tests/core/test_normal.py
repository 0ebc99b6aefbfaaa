"""What is normal for an application: what it learns, and how far one client can move it."""

from math import ceil, floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.core import normal
from sglang_fair.core.normal import ENOUGH, MOST_PAIRS, Normal
from tests.support.budget import examples


def price(extend: float, output: float) -> float:
    return extend + 2 * output


def test_the_mean_of_a_pair_s_clients() -> None:
    made = Normal(price)
    for _ in range(200):
        made.learn("a", "chat", "1", 100, 50)
    made.learn("b", "chat", "1", 200, 50)
    assert made.weight("chat", "1") == pytest.approx((200 + 300) / 2)
    assert made.usual() == pytest.approx(250)


def test_a_pair_that_is_new_weighs_as_its_app_and_an_app_as_all() -> None:
    made = Normal(price)
    assert made.weight("chat", "1") == 1200
    for _ in range(ENOUGH):
        made.learn("a", "chat", "1", 10, 5)
    assert made.weight("chat", "9") == made.weight("chat", "1") == pytest.approx(20)
    assert made.weight("code", "1") == pytest.approx(20)
    for _ in range(ENOUGH - 1):
        made.learn("b", "chat", "9", 40, 0)
    assert made.weight("chat", "9") == made.weight("chat", "7") != 40
    made.learn("b", "chat", "9", 40, 0)
    assert made.weight("chat", "9") == pytest.approx(40)


@settings(max_examples=examples(200))
@given(
    honest=st.lists(st.floats(1, 1000), min_size=3, max_size=normal.PAIR_CLIENTS - 1),
    lies=st.lists(st.sampled_from([0.0, 1.0, 1e4, 1e9]), min_size=1, max_size=300),
    spread=st.sampled_from([1.0, 2.0, 8.0]),
)
def test_one_client_moves_a_weight_by_its_part_of_the_clamp(
    honest: list[float], lies: list[float], spread: float
) -> None:
    """Its calls may be of any length and as many as it likes."""
    made = Normal(price, spread)
    for _ in range(ENOUGH):
        for number, tokens in enumerate(honest):
            made.learn(f"c{number}", "chat", "1", tokens, 0)
    for lie in lies:
        made.learn("liar", "chat", "1", lie, lie)
    least, most = made.clamp()
    order = sorted(honest)
    middle = (len(order) - 1) / 2
    assert order[ceil(middle - 1)] - 1e-6 <= made.usual() <= order[floor(middle + 1)] + 1e-6, "no liar's"
    same = [min(most, max(least, tokens)) for tokens in honest]
    alone = max(1.0, sum(same) / len(same))
    n = len(honest) + 1
    assert abs(made.weight("chat", "1") - alone) <= (most - least) / n + max(0.0, 1 - least) + 1e-6


def test_a_flood_counts_as_one_client() -> None:
    """It sends a thousand times as many calls, of the greatest length there is."""
    made = Normal(price)
    for _ in range(20):
        for client in range(9):
            made.learn(f"c{client}", "chat", "1", 100, 0)
    for _ in range(20_000):
        made.learn("flood", "chat", "1", 1e6, 1e6)
    assert made.usual() == pytest.approx(100)
    assert made.weight("chat", "1") == pytest.approx((9 * 100 + 800) / 10)


def test_ten_thousand_names_of_apps_take_bounded_memory() -> None:
    made = Normal(price)
    for number in range(12_000):
        made.learn("a", f"app {number}", "1", 10, 10)
        made.learn(f"c{number}", "chat", "1", 10, 10)
    assert len(made) == MOST_PAIRS
    assert len(made._pairs["chat", "1"].clients) == normal.PAIR_CLIENTS
    assert len(made._all.clients) == normal.ALL_CLIENTS


def test_of_a_pair_s_clients_those_count_that_ended_a_call_last() -> None:
    made = Normal(price, spread=1000)
    made.learn("stays", "chat", "1", 1000, 0)
    for number in range(normal.PAIR_CLIENTS - 1):
        made.learn(f"before {number}", "chat", "1", 500, 0)
    made.learn("stays", "chat", "1", 1000, 0)
    for number in range(normal.PAIR_CLIENTS - 1):
        made.learn(f"now {number}", "chat", "1", 10, 0)
    assert made.weight("chat", "1") == pytest.approx((1000 + 63 * 10) / 64)
    made.learn("now too", "chat", "1", 10, 0)
    assert made.weight("chat", "1") == pytest.approx(10)


def test_a_weight_is_at_least_one() -> None:
    made = Normal(price)
    for _ in range(ENOUGH):
        made.learn("a", "chat", "1", 0, 0.1)
    assert made.usual() == pytest.approx(0.2)
    assert made.weight("chat", "1") == 1


def test_an_old_habit_is_forgotten() -> None:
    made = Normal(price)
    for _ in range(100):
        made.learn("a", "chat", "1", 1000, 0)
    for _ in range(200):
        made.learn("a", "chat", "1", 10, 0)
    assert made.weight("chat", "1") == pytest.approx(10, abs=1)
