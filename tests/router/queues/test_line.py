"""The order inside a group, against a count of who overtook whom."""

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.queues.line import Entry, Line, Queued


def queued(name: str, prefix: str | None = None, since_s: float = 0.0) -> Queued:
    return Queued(name, "c", "m", "k", 10, 10.0, since_s, since_s + 20, prefix=prefix, prefix_tokens=5)


@dataclass
class Counted:
    """Who overtook whom, by looking at all."""

    waiting: list[Entry] = field(default_factory=list)
    overtaken: dict[str, int] = field(default_factory=dict)

    def put(self, entry: Entry) -> None:
        self.waiting.append(entry)
        self.overtaken[entry.request.id] = 0

    def take(self, entry: Entry) -> None:
        self.waiting.remove(entry)
        for other in self.waiting:
            if other.key < entry.key:
                self.overtaken[other.request.id] += 1


@given(st.integers(0, 2**32), st.sampled_from([1, 3, 10]), st.sampled_from([1, 2, 8]))
def test_nobody_is_overtaken_more_often_than_allowed(seed: int, most: int, prefixes: int) -> None:
    """Calls of old interactions come into the middle, some give up, some come back to the front, lines are split."""
    rng, lines, counts = Random(seed), [Line(most)], [Counted()]
    number, served = 0, []
    for _ in range(150):
        at = rng.randrange(len(lines))
        line, counted = lines[at], counts[at]
        step = rng.random()
        if step < 0.6:
            number += 1
            since_s = number if rng.random() < 0.8 else rng.randrange(number)
            prefix = rng.choice([None, *map(str, range(prefixes))])
            entry = Entry((rng.choice([0, 1, 1, 1]), since_s, number), queued(str(number), prefix))
            line.put(entry)
            counted.put(entry)
        elif step < 0.9:
            waiting = list(counted.waiting)
            taken = line.take()
            assert (taken is None) == (not waiting)
            if taken is not None:
                counted.take(taken)
                served.append(taken.request.id)
        elif step < 0.95 and counted.waiting:
            entry = rng.choice(counted.waiting)
            line.remove(entry)
            counted.waiting.remove(entry)
        elif len(line) > 1:
            lines.append(line.split())
            kept = {entry.request.id for entry in line}
            counts.append(
                Counted([one for one in counted.waiting if one.request.id not in kept], counted.overtaken)
            )
            counted.waiting = [one for one in counted.waiting if one.request.id in kept]
        for own, count in zip(lines, counts, strict=True):
            assert [one.key for one in own] == sorted(one.key for one in count.waiting)
            assert all(count.overtaken[one.request.id] <= most for one in count.waiting)
    assert len(served) == len(set(served))


def test_those_that_share_a_prefix_go_together() -> None:
    line = Line()
    for number in range(9):
        line.put(Entry((1, number, number), queued(str(number), "abc"[number % 3])))
    order = [entry.request.id for _ in range(9) if (entry := line.take()) is not None]
    assert order == ["0", "3", "6", "1", "4", "7", "2", "5", "8"]


def test_what_was_overtaken_before_a_split_is_forgotten_with_those_who_were() -> None:
    line = Line(1)
    for number, prefix in enumerate("pqrp"):
        line.put(Entry((1, number, number), queued(str(number), prefix)))
    assert [entry.request.id for _ in range(2) if (entry := line.take()) is not None] == ["0", "3"]
    newer = line.split()
    assert [entry.request.id for one in (line, newer) if (entry := one.take()) is not None] == ["1", "2"]
    for number, prefix in enumerate("xq", 4):
        line.put(Entry((1, number, number), queued(str(number), prefix)))
    assert [entry.request.id for _ in range(2) if (entry := line.take()) is not None] == ["5", "4"]


@pytest.mark.parametrize(
    "odd",
    [
        {"prompt_tokens": -1},
        {"expected_output_tokens": float("nan")},
        {"output_variance": float("inf")},
        {"prefix_tokens": -5},
        {"deadline_s": float("nan")},
        {"since_s": float("inf")},
    ],
)
def test_numbers_that_no_request_has_are_refused(odd: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="request 'x'"):
        replace(queued("x"), **odd)


def test_without_prefixes_it_is_first_come_first_served() -> None:
    line = Line(0)
    for number in range(9):
        line.put(Entry((1, number, number), queued(str(number), "ab"[number % 2])))
    assert [entry.request.id for _ in range(9) if (entry := line.take()) is not None] == [*map(str, range(9))]
    assert line.take() is None
    with pytest.raises(ValueError, match="at least 0"):
        Line(-1)
