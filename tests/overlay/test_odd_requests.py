"""Nothing that a client sends, and nothing that SGLang does unseen, ends a scheduler or escapes the books."""

import json
from typing import Any

import pytest

from tests.support import fork_server
from tests.support.odd_requests import OUTPUT_TOKENS, SHARED_TOKENS

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def books() -> dict[str, Any]:
    """The books after each scenario of `odd_requests`."""
    done = fork_server.run("-m", "tests.support.odd_requests")
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def given(books: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """Computed, cached and output tokens of each client; the books agree with the engine, and nothing is left."""
    assert "killed" not in books, books["killed"]
    assert books["conservation"]["ok"], books["conservation"]
    assert (books["totals"]["waiting"], books["totals"]["running"]) == (0, 0)
    return {
        name: (client["extend_tokens"], client["cached_tokens"], client["output_tokens"])
        for name, client in books["clients"].items()
    }


def test_each_of_two_requests_with_one_id_is_charged_once(books: dict[str, Any]) -> None:
    found = books["two_requests_with_one_id"]
    assert given(found) == dict.fromkeys("abcd", (40, 0, OUTPUT_TOKENS))
    assert found["corrections"] == 0


def test_no_id_makes_a_request_the_servers_own(books: dict[str, Any]) -> None:
    found = given(books["an_id_like_a_health_checks"])
    assert set(found) == {"liar"}
    assert found["liar"][0] + found["liar"][1] == 3 * 40
    assert found["liar"][2] == 3 * OUTPUT_TOKENS


def test_the_price_of_a_shared_prompt_is_split_to_the_unit(books: dict[str, Any]) -> None:
    found = books["a_system_prompt_that_three_share"]
    assert given(found) == {
        "a": (SHARED_TOKENS + 40, 0, OUTPUT_TOKENS),
        "b": (2 * 40, 2 * SHARED_TOKENS, 2 * OUTPUT_TOKENS),
        "c": (40, SHARED_TOKENS, OUTPUT_TOKENS),
    }
    part = SHARED_TOKENS / 3
    paid = {name: client["transferred_units"] for name, client in found["clients"].items()}
    assert paid == pytest.approx({"a": part - SHARED_TOKENS, "b": part, "c": part})
    assert found["totals"]["transferred_units"] == pytest.approx(0)


def test_requests_that_join_unseen_are_entered(books: dict[str, Any]) -> None:
    found = books["requests_that_join_unseen"]
    assert given(found) == dict.fromkeys("abd", (40, 0, OUTPUT_TOKENS))
    assert found["corrections"] == 0, "that is how a prefill server works"


def test_one_that_joins_a_fair_queue_unseen_is_entered_and_counted(books: dict[str, Any]) -> None:
    found = books["requests_that_join_a_fair_queue_unseen"]
    assert given(found) == dict.fromkeys("ab", (40, 0, OUTPUT_TOKENS))
    assert found["corrections"] == 1


def test_a_decode_server_charges_the_output_that_it_makes(books: dict[str, Any]) -> None:
    found = books["requests_whose_prompt_another_server_computed"]
    assert given(found) == dict.fromkeys("ab", (0, 40, OUTPUT_TOKENS - 1))
    assert found["corrections"] == 0


def test_a_policy_that_fails_loses_its_counters_and_nothing_else(books: dict[str, Any]) -> None:
    found = books["a_policy_that_fails"]
    assert given(found) == {"a": (40, 40, OUTPUT_TOKENS), "b": (40, 0, OUTPUT_TOKENS)}
    assert found["corrections"] >= 1


def test_output_that_was_charged_is_not_charged_again_by_new_books(books: dict[str, Any]) -> None:
    found = books["books_that_begin_anew_before_a_retraction"]
    assert given(found)["a"][2] == OUTPUT_TOKENS
    assert found["corrections"] == 1


def test_a_cut_prompt_is_cut_where_the_kernels_want_it_beside_short_ones_too(books: dict[str, Any]) -> None:
    """SGLang asserts so for some models, in the scheduler's process."""
    cuts = books["a_cut_prompt_beside_short_ones"]["cuts"]
    assert all(cut % 64 == 0 for cut in cuts)
    assert cuts != list(range(512, 2000, 512)), "no room was left for the short ones"


def test_a_chunk_is_at_most_what_is_free_and_without_that_its_prompt_is_parked(books: dict[str, Any]) -> None:
    found = books["a_cut_prompt_without_room"]
    assert given(found) == {"a": (600, 0, OUTPUT_TOKENS)}
    assert found["ends"] == [128, 224, 224, 224, 224]


def test_the_policy_orders_a_queue_that_sglang_looks_at_before_it_admits(books: dict[str, Any]) -> None:
    """Regression: with --lora-drain-wait-threshold no request was admitted."""
    found = books["a_queue_that_a_drainer_of_adapters_looks_at"]
    assert given(found) == {"a": (80, 0, 2 * OUTPUT_TOKENS), "b": (40, 0, OUTPUT_TOKENS)}
    assert found["order"] == ["b", "a"], "a new client goes first"


def test_no_short_prompt_takes_the_memory_of_the_rest_of_a_cut_one(books: dict[str, Any]) -> None:
    found = books["a_short_prompt_behind_a_cut_one"]
    assert given(found) == {"a": (400, 0, OUTPUT_TOKENS), "b": (20, 0, OUTPUT_TOKENS)}
    assert not found["beside"]


@pytest.mark.parametrize(
    "scenario",
    [
        "decodes_in_the_steps_of_a_cut_prompt",
        "another_prompt_in_a_mixed_step_of_a_cut_one",
        "another_prompt_beside_a_parked_one",
    ],
)
def test_the_rest_of_a_cut_prompt_has_room_after_each_step(books: dict[str, Any], scenario: str) -> None:
    found = books[scenario]
    assert given(found)["a"] == (2000 + 12 * 32, 0, 13 * OUTPUT_TOKENS)
    assert found["lacking"] == 0


def test_nothing_is_taken_back_for_memory_that_a_cut_prompt_is_to_have(books: dict[str, Any]) -> None:
    found = books["an_urgent_prompt_beside_a_cut_one"]
    with_it, without = found["missing"]
    assert with_it - without == found["kept"]


def test_a_request_that_is_passed_over_gives_back_what_its_match_took(books: dict[str, Any]) -> None:
    """SGLang asserts that a slot is left for the next one. A stale state would be copied to who has another prefix."""
    found = books["twins_that_take_a_state_when_they_are_matched"]
    assert "killed" not in found, found["killed"]
    taken, back, stale = found["slots"]
    assert taken > 0
    assert (back, stale) == (taken, 0)
