"""On the simulated replica, clients with a fifth of the pool each keep their conversations beside a stream."""

import pytest

from workloads.experiments.beyond_cache import Cache


@pytest.fixture(scope="module")
def hit_rates() -> dict[str, float]:
    experiment = Cache()
    return {
        cell.name: experiment.run(cell, "0").values["least_hit_rate"]
        for cell in experiment.cells("quick")
        if cell.traffic.name == "chats"
    }


@pytest.mark.slow
def test_fair_eviction_keeps_all_that_they_would_have_alone(hit_rates: dict[str, float]) -> None:
    assert hit_rates["solo"] > 0.5, "each conversation goes on at least once"
    assert hit_rates["fair"] >= 0.95 * hit_rates["solo"]


def test_lru_does_not(hit_rates: dict[str, float]) -> None:
    assert hit_rates["lru"] < 0.5 * hit_rates["solo"]
