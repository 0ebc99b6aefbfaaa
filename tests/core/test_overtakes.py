"""Who was overtaken by how many, against a count of everybody."""

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.core.overtakes import LEAST_SLOTS, Overtaken, Overtakes


@dataclass
class Counted:
    """The same by looking at all requests."""

    batch: int = 0
    admitted: dict[int, int] = field(default_factory=dict)
    """Request -> the number of its batch. A request is the number of its arrival."""

    def of(self, item: int) -> Overtaken:
        later = [batch for other, batch in self.admitted.items() if other > item and batch < self.batch]
        return Overtaken(len(later), len(set(later)))


@pytest.mark.slow
@given(st.integers(0, 2**20), st.sampled_from([1, 5, 40]), st.sampled_from([0, 1, 5]))
def test_the_counts_are_those_of_everybody(seed: int, at_once: int, aborts: int) -> None:
    """Batches take requests at random, mostly late ones, so that some wait through many drops of unused slots."""
    rng, overtakes, counted = Random(seed), Overtakes[int](), Counted()
    waiting: list[int] = []
    arrived = 0
    for _ in range(60):
        for _ in range(rng.randrange(2 * at_once)):
            overtakes.arrive(arrived)
            waiting.append(arrived)
            arrived += 1
        for _ in range(min(len(waiting), rng.randrange(at_once + 1))):
            item = waiting.pop(max(rng.randrange(len(waiting)), rng.randrange(len(waiting))))
            assert overtakes.admit(item) == counted.of(item)
            counted.admitted[item] = counted.batch
            if rng.random() < 0.1:  # while a batch is formed others come
                overtakes.arrive(arrived)
                waiting.append(arrived)
                arrived += 1
        overtakes.end_batch()
        counted.batch += 1
        for _ in range(min(len(waiting), rng.randrange(aborts + 1))):
            overtakes.leave(waiting.pop(rng.randrange(len(waiting))))
        for item in rng.sample(waiting, min(len(waiting), 3)):
            assert overtakes.of(item) == counted.of(item)
    assert len(overtakes) == len(waiting)
    for item in waiting:
        assert overtakes.of(item) == counted.of(item)


def test_one_that_waits_for_ever_costs_no_memory() -> None:
    overtakes = Overtakes[int]()
    overtakes.arrive(0)
    for number in range(1, 20_000):
        overtakes.arrive(number)
        overtakes.admit(number)
        overtakes.end_batch()
    assert overtakes.of(0) == Overtaken(19_999, 19_999)
    assert len(overtakes._sums) == LEAST_SLOTS + 1
