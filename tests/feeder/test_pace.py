"""How many lines a feeder has in flight, where their tokens are to come in time."""

import json
from pathlib import Path

import pytest

from router.feeder.answers import Answer
from router.feeder.pace import Pace
from tests.feeder.world import World, quick_store


def answer(took_s: float, tokens: int = 100, prompt_tokens: int = 0) -> Answer:
    usage = {"completion_tokens": tokens, "prompt_tokens": prompt_tokens}
    return Answer(200, json.dumps({"usage": usage, "choices": []}).encode(), took_s=took_s)


class Engine:
    """A token takes `base_s`, and `more_s` more for each line in flight. All of them are answered in turns."""

    def __init__(self, most_s: float, base_s: float, more_s: float) -> None:
        self.pace, self.limit = Pace(most_s), 1.0
        self.base_s, self.more_s = base_s, more_s

    def turns(self, count: int) -> None:
        for _ in range(count):
            in_flight = -(-self.limit // 1)
            token_s = self.base_s + self.more_s * in_flight
            for _ in range(int(in_flight)):
                self.limit = min(500, self.pace.limit(self.limit, int(in_flight), answer(100 * token_s)))


def test_as_many_are_in_flight_as_leave_a_token_its_time():
    engine = Engine(most_s=0.020, base_s=0.010, more_s=0.0005)
    engine.turns(200)
    assert engine.limit == pytest.approx(20, rel=0.3)
    engine.base_s = 0.016  # others have come
    engine.turns(100)
    assert engine.limit == pytest.approx(8, rel=0.4)
    engine.base_s = 0.030
    engine.turns(100)
    assert engine.limit < 3, "one is always sent: it is how the feeder knows"
    engine.base_s = 0.010
    engine.turns(200)
    assert engine.limit == pytest.approx(20, rel=0.3), "they have gone"


def test_one_turn_of_late_answers_counts_once():
    pace, limit = Pace(0.010), 64.0
    for _ in range(64):
        limit = pace.limit(limit, 64, answer(100.0))
    assert limit == 32.0


def test_what_is_not_used_does_not_grow():
    pace, limit = Pace(0.010), 8.0
    for _ in range(100):
        limit = pace.limit(limit, 3, answer(0.5))
    assert limit == 8.0


def test_a_prompt_counts_as_tokens_too():
    pace = Pace(0.010)
    pace.limit(1.0, 1, answer(0.08, tokens=1, prompt_tokens=900))
    assert pace.token_s == pytest.approx(0.008)


@pytest.mark.parametrize(
    "bad", [Answer(400, b"{}"), Answer(200, b"no JSON"), Answer(200, b"{}"), Answer(200, b'{"usage": null}')]
)
def test_answers_without_tokens_say_nothing(bad):
    pace = Pace(0.010)
    assert pace.limit(5.0, 5, bad._replace(took_s=9.0)) == 5.0
    assert pace.token_s == 0.0


def test_a_feeder_keeps_the_pace(tmp_path: Path):
    """It begins with one, and sends more while tokens come in time, and one only where they never do."""
    store = quick_store(tmp_path / "a.db")
    world = World(store, most_in_flight=16, token_s=0.02)
    world.add("b", "alice", 400)
    sizes = []
    for took_s in (*(0.5,) * 8, *(8.0,) * 8):
        world.one.look()
        world.one.turn()
        sizes.append(len(world.one.sent))
        for key in list(world.one.sent):
            world.one.answer(key, answer(took_s))
    assert sizes[:3] == [1, 2, 3]
    assert max(sizes) == 16, "no more than may be in flight"
    assert sizes[-1] == 1
    world.finish()
    assert len(world.lines("b")) == 400
    store.shut()
