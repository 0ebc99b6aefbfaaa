"""Whatever messages come, in whatever order and with whatever in them: the core raises nothing, and what it answers can
be sent and read.

Messages are made from their own types, so one that is added is tried too. Texts, numbers and order are drawn such that
messages are about the same few things, and take up what the core has answered.
"""

import json
from math import inf, nan
from random import Random
from typing import Any, get_args

import msgspec
import msgspec.inspect as types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Router
from router.events import (
    Agent,
    Arrive,
    Event,
    Explained,
    Follow,
    ProtocolError,
    Refuse,
    SetLimits,
    Snapshot,
    WorkerUp,
    decode_answer,
    decode_event,
    encode,
)
from router.placement import PLACEMENTS, build
from router.throttling import BAD_LIMITS, KINDS, Throttling
from sglang_fair.core.throttle import Rules
from tests.support.budget import examples

TEXTS = ("", "a", "b", "c", Throttling()._start)
INTEGERS = (0, 1, 2, 3, 40, 2**31, 2**32, 2**53, 2**63 - 1, 2**64 - 1, -1, -(2**63))
FLOATS = (0.0, 0.5, 1.0, 30.0, 1e-300, 1e300, inf, -inf, nan, -1.0)
TOKENS = (b"", bytes(8), bytes(64), bytes(range(256)), b"\xff" * 400)
JSON = (b'{"user": 1}', b'{"user": 1' + b"0" * 26 + b"}", b'{"apps": {"a": 2, "*": 1}}', b"{", b"[" * 10_000)
PEERS = (b"p", b"q")
MESSAGES = {kind.__name__: types.type_info(kind) for kind in get_args(Event)}
LASTING = sorted(MESSAGES.keys() - {"WorkerDown", "WorkerDrain", "WorkerHealth", "PeerGone"})
"""The others make an end to much: were they as frequent, little would come of anything."""


class Talk:
    """Messages that take up what was heard."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.integers: list[int] = []

    def say(self, rng: Random) -> dict[str, Any]:
        name = rng.choice(sorted(MESSAGES) if rng.random() < 0.3 else LASTING)
        return {"type": name} | self._fields(MESSAGES[name], rng)

    def hear(self, value: Any) -> None:
        """Of an answer as it was sent."""
        if isinstance(value, str):
            self.texts.append(value)
        elif isinstance(value, int):
            self.integers.append(value)
        elif isinstance(value, dict):
            for key, one in value.items():
                self.hear(key)
                self.hear(one)
        elif isinstance(value, list | tuple):
            for one in value:
                self.hear(one)
        del self.texts[:-40], self.integers[:-40]

    def _fields(self, kind: Any, rng: Random) -> dict[str, Any]:
        return {
            one.encode_name: self._draw(one.type, rng)
            for one in kind.fields
            if one.required or rng.random() < 0.6
        }

    def _draw(self, kind: Any, rng: Random) -> Any:
        match kind:
            case types.Metadata():
                return self._draw(kind.type, rng)
            case types.StrType():
                return rng.choice(self.texts) if self.texts and rng.random() < 0.3 else rng.choice(TEXTS)
            case types.BytesType():
                return rng.choice(TOKENS if rng.random() < 0.8 else JSON)
            case types.BoolType():
                return rng.random() < 0.5
            case types.NoneType() | types.AnyType():
                return None
            case types.IntType():
                if self.integers and rng.random() < 0.4:
                    return rng.choice(self.integers)
                edges = [one for one in (kind.ge, kind.le) if one is not None]
                return rng.choice([*INTEGERS[: 5 if rng.random() < 0.97 else None], *edges])
            case types.FloatType():
                edges = [one for one in (kind.ge, kind.gt, kind.le) if one is not None]
                return rng.choice([*FLOATS[: 4 if rng.random() < 0.97 else None], *edges])
            case types.LiteralType():
                return rng.choice(kind.values)
            case types.UnionType():
                return self._draw(rng.choice(kind.types), rng)
            case types.VarTupleType():
                return [self._draw(kind.item_type, rng) for _ in range(rng.randrange(4))]
            case types.TupleType():
                return [self._draw(one, rng) for one in kind.item_types]
            case types.DictType():
                return {
                    self._draw(kind.key_type, rng): self._draw(kind.value_type, rng)
                    for _ in range(rng.randrange(4))
                }
            case types.StructType(array_like=True):
                return [self._draw(one.type, rng) for one in kind.fields]
            case types.StructType():
                return self._fields(kind, rng)
            case _:
                raise AssertionError(f"no value of {kind} can be drawn yet")


def routers(placement: str, rng: Random) -> Router:
    return Router(
        build(placement),
        page_size=4,
        max_tree_tokens=rng.choice((200, 8_000_000)),
        throttling=Throttling(rng.choice(KINDS), Rules(2)),
        swap_finish_s=rng.choice((0.0, 5.0)),
    )


@pytest.mark.slow
@settings(max_examples=examples(600))
@given(st.sampled_from(sorted(PLACEMENTS)), st.integers(0, 2**32))
def test_no_message_raises_and_every_answer_can_be_sent_and_read(placement: str, seed: int) -> None:
    rng, talk = Random(seed), Talk()
    made, now_s = routers(placement, rng), 0.0
    models = rng.choice(((), ("a", "b")))
    for worker in "ab":
        made.handle(WorkerUp(worker, "http://w", models=models, loaded="".join(models[:1])), now_s)
    for _ in range(100):
        now_s += rng.choice((0.0, 0.01, 1.0, 20.0))
        try:
            event = decode_event(msgspec.msgpack.encode(talk.say(rng)))
        except ProtocolError:
            continue
        for _, answer in made.handle(event, now_s, rng.choice(PEERS)):
            sent = encode(answer)
            assert encode(decode_answer(sent)) == sent
            if isinstance(answer, Snapshot | Explained):  # which a gateway shows
                json.dumps(msgspec.to_builtins(answer), allow_nan=False)
            talk.hear(msgspec.msgpack.decode(sent))


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (b'{"user": 100000000000000000000000000}', "user"),
        (b'{"apps": {"a": 1000000001}}', "apps"),
    ],
)
def test_limits_that_no_peer_could_be_told_are_refused(said: bytes, field: str) -> None:
    made = Router(build("d2lpm"), throttling=Throttling("oit"))
    ((_, answer),) = made.handle(SetLimits("s", said), 0.0, b"p")
    assert isinstance(answer, Refuse)
    assert answer.code == BAD_LIMITS
    assert field in answer.reason


def test_a_worker_whose_agent_has_loaded_nothing_has_no_model() -> None:
    made = Router(build("qlm"))
    made.handle(WorkerUp("a", "http://a"), 0.0)
    made.handle(WorkerUp("b", "http://b", models=("m",), loaded="m"), 0.0)
    made.handle(Agent("s", "a", swap_s={"n": 1.0, "o": 1.0}), 0.0, b"p")
    for number in range(9):
        made.handle(Arrive(f"r{number}", "c", bytes(64), model="m"), 1.0 + number, b"g")
    assert made.state()["workers"]["a"]["model"] == ""  # type: ignore[index]


def test_what_an_agent_cannot_have_loaded_is_not_believed_and_said() -> None:
    made = Router(build("d2lpm"))
    ((_, answer),) = made.handle(Agent("s", "a"), 0.0, b"p")
    assert answer.complaint == "there is no worker 'a'"
    made.handle(WorkerUp("a", "http://a", models=("m0",), loaded="m0"), 0.0)
    for swap_s, complaint in (
        ({}, "'m1' is none of the models that worker a can load"),
        ({"m1": 1.0}, ""),
        ({"m0": 1.0}, "'m1' is none of the models that worker a can load"),
    ):
        ((_, answer),) = made.handle(Agent("s", "a", "m1", swap_s=swap_s), 0.0, b"p")
        assert answer.complaint == complaint
        ((_, known),) = made.handle(Follow("f"), 0.0, b"p")
        assert [up.loaded for up in known.workers] == ["" if complaint else "m1"]


@pytest.mark.parametrize("swap_s", [inf, nan, 1e11, -1.0])
def test_times_that_are_none_are_no_message(swap_s: float) -> None:
    with pytest.raises(ProtocolError):
        decode_event(encode(Agent("s", "a", swap_s={"m": swap_s})))
