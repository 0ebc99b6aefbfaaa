"""A cost that grows with position, on two data-parallel schedulers: exact in chunks and behind a cached prefix."""

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sglang_fair.core.cost import Quadratic
from tests.overlay.test_charges import prompt
from tests.support.live import Replica
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

COST = Quadratic(d=100, context=True)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Replica]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # SGLang wants to be told who shares a core
        with Replica(
            "--policy", "vtc", "--cost", "quadratic:d=100,context=true",
            "--", "--dp-size", "2", "--chunked-prefill-size", "64",
        ) as replica:  # fmt: skip
            yield replica


def ranks(replica: Replica) -> list[dict[str, Any]]:
    """The books of both schedulers once both are idle."""

    def state() -> Any:
        books = replica.fair()["data_parallel"]
        busy = [book for book in books if book["totals"]["waiting"] or book["totals"]["running"]]
        return None if busy else books

    found: list[dict[str, Any]] = wait_until(state, "idle schedulers")
    return found


def test_charges_sum_to_the_function_over_chunks_and_behind_a_cached_prefix(two_ranks: Replica) -> None:
    tokens = prompt(random.Random(3), 300)
    answers = [two_ranks.generate("a", tokens, 7) for _ in range(4)]
    assert {answer.cached_tokens for answer in answers} == {0, 288}, "once computed on each rank"
    books = ranks(two_ranks)
    for book in books:
        assert book["config"]["cost"] == (
            "quadratic:d=100.0,extend_weight=1.0,output_weight=2.0,context=True"
        )
        assert book["conservation"]["ok"], book["conservation"]
    expected = sum(COST(300 - answer.cached_tokens, 7, answer.cached_tokens) for answer in answers)
    assert sum(book["clients"]["a"]["service"] for book in books) == pytest.approx(expected, rel=1e-12)


def test_new_weights_reach_every_rank(two_ranks: Replica) -> None:
    answer = httpx.post(f"{two_ranks.url}/fair", json={"client_weights": {"gold": 2}}, timeout=30)
    assert answer.status_code == 200, answer.text
    assert [book["config"]["client_weights"] for book in answer.json()["data_parallel"]] == [
        {"gold": 2.0}
    ] * 2
