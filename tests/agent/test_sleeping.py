"""Servers that share a GPU take turns: never two in its memory, and nobody is let in where nothing is loaded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.agent.sleeping import Do, Turns
from tests.support.budget import examples

SERVERS = ("a", "b", "c")


class Gpu:
    """Room for one server."""

    def __init__(self, holder: str = "a") -> None:
        self.holders = {holder}
        self.open = {holder}
        self.inside = dict.fromkeys(SERVERS, 0)
        self.is_flushed = dict.fromkeys(SERVERS, True)

    def do(self, do: Do) -> str:
        match do.act:
            case "shut":
                self.open.discard(do.server)
            case "empty":
                if self.inside[do.server]:
                    return "somebody is inside"
            case "release":
                assert do.server not in self.open
                assert not self.inside[do.server], "SGLang asserts that it is idle"
                self.holders.discard(do.server)
            case "resume":
                assert self.holders <= {do.server}, "two do not fit"
                self.holders.add(do.server)
                self.is_flushed[do.server] = False
            case "flush":
                self.is_flushed[do.server] = True
            case "probe":
                assert do.server in self.holders
            case "open":
                assert do.server in self.holders
                assert self.is_flushed[do.server], "its cache was released"
                self.open = {do.server}
        return ""


def turn(turns: Turns, gpu: Gpu, *, fails: bool = False) -> str:
    do = turns.next()
    if do is None:
        return ""
    turns.did(do, "no" if fails else gpu.do(do))
    return f"{do.act} {do.server}"


def run(turns: Turns, gpu: Gpu) -> list[str]:
    done = []
    for _ in range(100):
        if not (what := turn(turns, gpu)):
            return done
        done.append(what)
    raise AssertionError(done)


def test_one_turn() -> None:
    turns, gpu = Turns(SERVERS, "a"), Gpu()
    assert turns.next() is None
    turns.wake("b")
    assert run(turns, gpu) == [
        "shut a", "empty a", "release a", "resume b", "flush b", "probe b", "open b",
    ]  # fmt: skip
    assert (turns.open, gpu.holders, gpu.open) == ("b", {"b"}, {"b"})
    turns.wake("b")
    assert turns.is_settled


def test_whoever_cannot_be_woken_leaves_the_gpu_to_the_one_before() -> None:
    for act in ("resume", "flush", "probe"):
        turns, gpu = Turns(SERVERS, "a"), Gpu()
        turns.wake("b")
        while (do := turns.next()) is not None and (do.act, do.server) != (act, "b"):
            turn(turns, gpu)
        turn(turns, gpu, fails=True)
        run(turns, gpu)
        assert (turns.open, turns.error) == ("a", f"b: {act}: no")


def test_whoever_does_not_go_to_sleep_serves_on() -> None:
    turns, gpu = Turns(SERVERS, "a"), Gpu()
    turns.wake("b")
    turn(turns, gpu)
    turn(turns, gpu)
    turn(turns, gpu, fails=True)
    run(turns, gpu)
    assert (turns.open, turns.error) == ("a", "a: release: no")


def test_where_nothing_is_known_all_others_are_put_to_sleep_first() -> None:
    turns, gpu = Turns(SERVERS), Gpu("b")
    done = run(turns, gpu)
    assert done[:6] == ["shut b", "empty b", "release b", "shut c", "empty c", "release c"]
    assert turns.open == "a"


def test_requests_inside_finish() -> None:
    turns, gpu = Turns(SERVERS, "a"), Gpu()
    gpu.inside["a"] = 1
    turns.wake("b")
    for _ in range(5):
        turn(turns, gpu)
    assert turns.next() == Do("empty", "a", 4.0)
    gpu.inside["a"] = 0
    run(turns, gpu)
    assert turns.open == "b"


def test_names_are_names() -> None:
    with pytest.raises(ValueError, match="names of their own"):
        Turns(("a", "a"))
    with pytest.raises(ValueError, match="names of their own"):
        Turns(("a",), "b")
    with pytest.raises(KeyError):
        Turns(("a",), "a").wake("b")


@settings(max_examples=examples(300))
@given(
    steps=st.lists(
        st.sampled_from(["turn"] * 6 + ["fail", "wake a", "wake b", "wake c", "enter", "leave", "agent"]),
        max_size=120,
    )
)
def test_never_two_are_awake(steps: list[str]) -> None:
    turns, gpu = Turns(SERVERS, "a"), Gpu()
    for step in steps:
        match step.split():
            case ["turn"]:
                turn(turns, gpu)
            case ["fail"]:
                turn(turns, gpu, fails=True)
            case ["wake", server]:
                turns.wake(server)
            case ["enter"]:
                for server in gpu.open:
                    assert server in gpu.holders
                    gpu.inside[server] += 1
            case ["leave"]:
                gpu.inside = dict.fromkeys(SERVERS, 0)
            case _:
                turns = Turns(SERVERS)
        assert len(gpu.holders) <= 1
        assert gpu.open <= gpu.holders
    gpu.inside = dict.fromkeys(SERVERS, 0)
    run(turns, gpu)
    assert gpu.open == {turns.open}
