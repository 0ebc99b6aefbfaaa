"""The agent's steps: whatever fails, and whenever it or the replica is killed, no request meets the wrong weights."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.agent.steps import EMPTY_S, Answer, Do, Steps, read_ahead
from sglang_fair.common.swapping import HEADER_MODEL, HEADER_PROBE, Gate, Seen, seen
from tests.support.budget import examples

MODELS = ("a", "b")
SWAP_S = dict.fromkeys(MODELS, 1.0)
MIX = "?"
"""Weights that are no model's."""


@dataclass
class Replica:
    """A gate, and the weights behind it."""

    run: int = 0
    weights: str = "a"
    is_paused: bool = False
    cached: set[str] = field(default_factory=set)
    """Models whose prefixes are cached."""
    bad: frozenset[str] = frozenset()
    """Models that cannot be loaded."""
    is_up: bool = True

    def __post_init__(self) -> None:
        self.gate = Gate(f"run {self.run}", "a")

    def restart(self) -> None:
        self.run += 1
        self.weights, self.is_paused, self.cached = "a", False, set()
        self.__post_init__()

    def enter(self, model: str) -> bool:
        """A request that must be answered by `model`; whether it is inside."""
        if not self.is_up or self.gate.refuses({HEADER_MODEL: model}) is not None:
            return False
        assert (self.weights, self.is_paused) == (model, False), "answered by the wrong weights"
        assert self.cached <= {model}, "continued from another model's prefix"
        self.cached.add(model)
        self.gate.inside += 1
        return True

    def do(self, do: Do, most: int = 9) -> str:
        """Why it fails; "": it does not. The agent may be killed when so many parts of it are done."""
        match do.step:
            case "empties" | "loads" | "serves":
                if do.step == "loads":
                    assert not self.gate.inside, "a request would go on under other weights"
                self.gate.set({"state": do.step, "model": do.model})
            case "load":
                assert self.gate.state == "loads"
                assert not self.gate.inside
                self.is_paused = True
                if most and do.model in self.bad:
                    self.weights = MIX
                    return "damaged"
                self.weights = do.model if most else self.weights
                if most > 1:
                    self.cached.clear()
                self.is_paused = most < 3
            case "probe":
                assert self.gate.refuses({HEADER_PROBE: self.gate.run}) is None
                if self.weights != do.model or self.is_paused:
                    return "wrong"
                self.cached.add(do.model)
            case _:
                pass
        return ""


def look(replica: Replica) -> Seen | None:
    return seen(replica.gate.says()) if replica.is_up else None


def turn(steps: Steps, replica: Replica, now_s: float = 0.0) -> Do:
    """One step of the agent."""
    do = steps.next()
    if do.step == "look":
        steps.answer(Answer(look(replica)), now_s)
    elif not replica.is_up and do.step != "check":
        steps.answer(Answer(error="gone", is_gone=True), now_s)
    else:
        steps.answer(Answer(error=replica.do(do)), now_s)
    return do


def run(steps: Steps, replica: Replica, until: Callable[[], bool], now_s: float = 0.0) -> list[str]:
    done = []
    for _ in range(60):
        if until():
            return done
        done.append(turn(steps, replica, now_s).step)
    raise AssertionError(f"without end: {done}")


def started() -> tuple[Steps, Replica]:
    steps, replica = Steps(SWAP_S), Replica()
    turn(steps, replica)
    return steps, replica


def test_an_order_in_its_steps() -> None:
    steps, replica = started()
    assert steps.loaded == "a"
    steps.order(1, "b", 0.0)
    assert (steps.loaded, steps.busy, steps.ordered) == ("", 1, "b")
    assert run(steps, replica, lambda: steps.next().step == "loads") == ["check", "empties", "look"]
    assert run(steps, replica, lambda: steps.done == 1, 4.0) == ["loads", "load", "probe", "serves", "look"]
    assert steps.swap_s == {"a": 1.0, "b": pytest.approx(1.9)}, "the gate was shut for 4 s"
    assert (steps.loaded, steps.error, replica.weights) == ("b", "", "b")
    steps.order(1, "a", 0.0)
    assert steps.next().step == "look", "an order that is over is over"
    steps.order(2, "b", 0.0)
    assert (steps.done, steps.error) == (2, ""), "it has that already"


def test_a_replica_that_does_not_answer_is_asked_again_and_not_at_once() -> None:
    steps = Steps(SWAP_S)
    assert steps.next() == Do("look")
    for _ in range(3):
        steps.answer(Answer(), 0.0)
        assert steps.next().after_s > 0
        assert steps.loaded == ""
    steps, replica = started()
    replica.is_up = False
    turn(steps, replica)
    assert steps.loaded == "a", "it may be slow; whoever has died has a successor, which says what it has"
    assert steps.next().after_s > 0


def test_requests_inside_finish_first() -> None:
    steps, replica = started()
    assert replica.enter("a")
    steps.order(1, "b", 0.0)
    for _ in range(20):
        turn(steps, replica, 1.0)
    assert replica.gate.state == "empties"
    assert not replica.enter("a")
    replica.gate.inside -= 1
    run(steps, replica, lambda: steps.done == 1, 2.0)
    assert replica.enter("b")


def test_requests_that_do_not_end_keep_their_model() -> None:
    steps, replica = started()
    assert replica.enter("a")
    steps.order(1, "b", 0.0)
    for _ in range(5):
        turn(steps, replica, 1.0)
    run(steps, replica, lambda: steps.done == 1, EMPTY_S + 2.0)
    assert steps.error == "1 requests still ran after 120 s"
    assert replica.enter("a")


def test_weights_that_do_not_fit_are_not_touched() -> None:
    steps, replica = started()
    steps.order(1, "b", 0.0)
    steps.answer(Answer(error="truncated"), 0.0)
    run(steps, replica, lambda: steps.done == 1)
    assert (steps.error, steps.loaded, replica.gate.state) == ("truncated", "a", "serves")
    steps.order(2, "c", 0.0)
    assert (steps.done, steps.error) == (2, "there is no model 'c' here")


def test_what_cannot_be_loaded_leaves_the_old_model() -> None:
    steps, replica = started()
    replica.bad = frozenset("b")
    steps.order(1, "b", 0.0)
    run(steps, replica, lambda: steps.done == 1)
    assert (steps.error, steps.loaded, replica.weights) == ("damaged", "a", "a")
    assert replica.enter("a")


def test_while_neither_can_be_loaded_nobody_is_let_in() -> None:
    steps, replica = started()
    replica.bad = frozenset("ab")
    steps.order(1, "b", 0.0)
    waits = []
    run(steps, replica, lambda: replica.gate.state == "loads")
    for _ in range(60):
        waits.append(steps.next().after_s)
        turn(steps, replica)
        assert not replica.enter("a")
        assert not replica.enter("b")
    assert max(waits) > 2.0, "each time it waits longer"
    replica.bad = frozenset("b")
    run(steps, replica, lambda: steps.done == 1)
    assert (steps.loaded, steps.error) == ("a", "damaged")


@pytest.mark.parametrize("moment", range(9))
def test_a_replica_that_was_restarted_has_its_first_model_and_the_order_has_failed(moment: int) -> None:
    steps, replica = started()
    steps.order(1, "b", 0.0)
    for _ in range(moment):
        turn(steps, replica)
    was_done = steps.done
    replica.is_up = False
    for _ in range(3):
        turn(steps, replica)
    replica.is_up = True
    replica.restart()
    run(steps, replica, lambda: steps.loaded == "a")
    assert was_done or (steps.done, steps.error) == (1, "the replica was restarted")
    assert replica.enter("a")


KINDS = st.sampled_from(
    ["turn"] * 8
    + ["enter a", "enter b", "leave", "order a", "order b", "agent 0", "agent 1", "agent 2", "agent 9"]
    + ["down", "up", "bad", "good"]
)


@settings(max_examples=examples(300))
@given(kinds=st.lists(KINDS, max_size=120))
def test_no_request_meets_the_wrong_weights(kinds: list[str]) -> None:
    steps, replica, number = Steps(SWAP_S), Replica(), 0
    for at, kind in enumerate(kinds):
        now_s = float(at)
        match kind.split():
            case ["turn"]:
                turn(steps, replica, now_s)
            case ["enter", model]:
                replica.enter(model)
            case ["leave"] if replica.gate.inside:
                replica.gate.inside -= 1
            case ["order", model]:
                number += 1
                steps.order(number, model, now_s)
            case ["agent", parts]:
                if steps.next().step != "look" and replica.is_up:
                    replica.do(steps.next(), int(parts))
                steps = Steps(SWAP_S)
            case ["down"]:
                replica.is_up = False
            case ["up"] if not replica.is_up:
                replica.is_up = True
                replica.restart()
            case ["bad"]:
                replica.bad = frozenset("b")
            case ["good"]:
                replica.bad = frozenset()
            case _:
                pass
    if not replica.is_up:
        replica.is_up = True
        replica.restart()
    replica.gate.inside, replica.bad = 0, frozenset()
    run(steps, replica, lambda: bool(steps.loaded), 1e6)
    assert replica.enter(steps.loaded)
    assert not steps.busy, "each order has ended"


SIZES = {"a": 10, "b": 20, "c": 30}


def test_the_next_models_are_read_ahead_in_their_order() -> None:
    assert read_ahead(["b", "c"], "a", SIZES, 1000) == ("b", "c")
    assert read_ahead(["a", "c", "b", "c", "x"], "a", SIZES, 1000) == ("c", "b")
    assert read_ahead(["b", "c"], "a", SIZES, 60) == ("b",)
    assert read_ahead(["c", "b"], "a", SIZES, 30) == (), (
        "what comes later would take the room of what comes next"
    )
