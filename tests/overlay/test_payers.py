"""Who pays for a shared prefix on a real replica: two clients with one system prompt, split to the unit."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_fair.overlay import config
from tests.overlay.test_charges import prompt
from tests.support.live import Replica
from tests.support.waiting import wait_until

SHARED = 192
"""Tokens of the system prompt: three blocks of 64."""


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    """Chunks end in the middle of blocks."""
    with Replica(
        "--policy", "dlpm", "--", "--fair-payer", "equal", "--chunked-prefill-size", "96"
    ) as running:
        yield running


def books(replica: Replica) -> dict[str, Any]:
    """Of the idle engine."""

    def state() -> Any:
        report = replica.fair()
        return None if report["totals"]["waiting"] or report["totals"]["running"] else report

    found: dict[str, Any] = wait_until(state, "an idle engine")
    return found


@pytest.mark.engine
def test_two_clients_share_the_price_of_a_system_prompt(replica: Replica) -> None:
    tokens = prompt(random.Random(5), SHARED + 3 * 40)
    system, questions = tokens[:SHARED], [tokens[at : at + 40] for at in range(SHARED, len(tokens), 40)]
    first = replica.generate("alice", system + questions[0], 3)
    second = replica.generate("bob", system + questions[1], 3)
    third = replica.generate("bob", system + questions[2], 3)
    assert [answer.cached_tokens for answer in (first, second, third)] == [0, SHARED, SHARED]
    report = books(replica)
    assert report["conservation"]["ok"], report["conservation"]
    alice, bob = (report["clients"][name] for name in ("alice", "bob"))
    assert (alice["service"], bob["service"]) == (SHARED + 40 + 2 * 3, 2 * (40 + 2 * 3))
    assert (alice["transferred_units"], bob["transferred_units"]) == (-SHARED / 2, SHARED / 2)
    assert report["totals"]["transferred_units"] == 0
    assert alice["counter"] + alice["service"] + alice["transferred_units"] == pytest.approx(2000)
    assert report["bound"] > 2 * 2000

    replica.generate("carol", system + questions[0], 3)
    report = books(replica)
    paid = {name: report["clients"][name]["transferred_units"] for name in ("alice", "bob", "carol")}
    assert paid["carol"] == pytest.approx(SHARED / 3)
    assert paid["bob"] == pytest.approx(SHARED / 3)
    assert paid["alice"] == pytest.approx(SHARED / 3 - SHARED)
    assert report["conservation"]["ok"], report["conservation"]


@pytest.mark.engine
def test_a_prompt_that_the_cache_lost_is_paid_for_again(replica: Replica) -> None:
    before = books(replica)
    tokens = prompt(random.Random(5), SHARED + 3 * 40)[: SHARED + 40]
    replica.flush()
    assert replica.generate("bob", tokens, 1).cached_tokens == 0
    after = books(replica)
    assert after["clients"]["bob"]["service"] - before["clients"]["bob"]["service"] == SHARED + 40 + 2
    for name, usage in before["clients"].items():
        assert after["clients"][name]["transferred_units"] == usage["transferred_units"], name
    assert after["conservation"]["ok"], after["conservation"]


def test_the_rule_is_a_setting():
    assert config.read({}).payer == "first"
    assert config.read({"SGLANG_FAIR_PAYER": "per-use"}).payer == "per-use"
    with pytest.raises(ValueError, match="unknown payer 'nobody'; there are first, equal, per-use"):
        config.read({"SGLANG_FAIR_PAYER": "nobody"})
