"""A replica's gate: a request that names another model is never let in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.common.swapping import HEADER_MODEL, HEADER_PROBE, Gate, seen


def test_only_what_is_loaded_is_answered() -> None:
    gate = Gate("run", "a")
    assert gate.refuses({}) is None
    assert gate.refuses({HEADER_MODEL: "a"}) is None
    assert gate.refuses({HEADER_MODEL: "b"}) == "this replica has model a, not b"
    gate.set({"state": "empties", "model": "b"})
    assert gate.refuses({}) == gate.refuses({HEADER_MODEL: "a"}) == "this replica is to load model b"
    gate.set({"state": "loads", "model": "b"})
    assert gate.refuses({HEADER_MODEL: "b"}) is not None
    assert gate.refuses({HEADER_MODEL: "b", HEADER_PROBE: "another run"}) is not None
    assert gate.refuses({HEADER_MODEL: "b", HEADER_PROBE: "run"}) is None
    with pytest.raises(ValueError, match="nothing is loaded"):
        gate.set({"state": "empties", "model": "a"})
    gate.set({"state": "serves", "model": "b"})
    assert gate.refuses({HEADER_MODEL: "b"}) is None


@pytest.mark.parametrize(
    "asked",
    [None, [], {}, {"state": "serves"}, {"state": "x", "model": "a"}, {"state": "serves", "model": ""},
     {"state": "serves", "model": 1}, {"state": "serves", "model": "a", "more": 1}, {"state": [], "model": "a"}],
)  # fmt: skip
def test_what_cannot_be_asked_changes_nothing(asked: object) -> None:
    gate = Gate("run", "a")
    with pytest.raises(ValueError, match=r"[Ee]xpected|missing required|Invalid enum|unknown field"):
        gate.set(asked)
    assert gate.refuses({HEADER_MODEL: "a"}) is None


@given(steps=st.lists(st.tuples(st.sampled_from(["serves", "empties", "loads"]), st.sampled_from("ab"))))
def test_it_says_what_it_does(steps: list[tuple[str, str]]) -> None:
    gate = Gate("run", "a")
    for state, model in steps:
        if gate.loaded or state != "empties":
            gate.set({"state": state, "model": model})
    said = seen(gate.says(3))
    assert said.in_flight == 3
    assert (said.state == "serves") is (gate.refuses({}) is None)
    assert bool(said.loaded) is (said.state != "loads")
    for model in "ab":
        if gate.refuses({HEADER_MODEL: model}) is None:
            assert said.loaded == model


def test_what_is_no_gate_is_not_read_as_one() -> None:
    for answer in (
        None,
        [],
        {},
        {"state": "open"},
        {"state": "serves", "run": 1},
        {"state": "serves", "in_flight": "x"},
    ):
        with pytest.raises(ValueError, match="not what a replica says"):
            seen(answer)
