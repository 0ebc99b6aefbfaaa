"""Clients described as JSON, of which an experiment's traffic is made.

A sender of single requests, as in the VTC papers, is {"name", "arrivals", "input", "output"}: lengths in tokens, and
arrivals in requests a minute:

    {"kind": "even", "rpm": 90, "waiting": 5}                    equal gaps; `waiting` more at the very start
    {"kind": "poisson", "rpm": 90}
    {"kind": "on-off", "rpm": 30, "on_s": 60, "off_s": 60}       equal gaps while ON, nothing while OFF
    {"kind": "ramp", "rpm": 12, "to_rpm": 120, "over_s": 600}    a rate that rises in a straight line
    {"kind": "phases", "phases": [[300, {...}], ...]}            one after the other, each for so many seconds

No two of its prompts have anything in common. A sender of programs, as in DLPM's, is {"name", "shape", "arrivals",
"well_behaved"}; shapes have lengths in tokens:

    {"kind": "tot", "branches": 3, "question": 546}       trees of thoughts of height 4, 256 a thought
    {"kind": "judge", "dimensions": 2, "article": 2701}   judgements of 256
    {"kind": "chat"}                                      conversations like those of Chatbot Arena
    {"kind": "chat", "system": 1024, "turns": 4, "think_s": 0}
                                                          others, all behind one system prompt

With "instructions": N, each question or article begins with N tokens that are the client's own. Arrivals are
[programs a second, until so many seconds], one after another, Gamma-distributed with the variation of a Poisson
process.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any, TypeAlias

from workloads.arrivals import (
    Arrivals,
    EvenArrivals,
    GammaArrivals,
    OnOffArrivals,
    PhasedArrivals,
    RampArrivals,
)
from workloads.clients import Client, fixed_length_client
from workloads.programs import PackedCodec
from workloads.programs.call import Program, Prompt
from workloads.programs.kinds import Chat, Judge, TreeOfThought
from workloads.programs.prose import ARTICLES, WORD_PROBLEMS, Source, draw, filler, seeded

MINUTE_S, START_S, FOREVER_S = 60.0, 1e-3, 1e9
CODEC = PackedCodec()
QUESTION_TOKENS, ARTICLE_TOKENS = 546, 2701
"""DLPM, Table 2."""


Json: TypeAlias = Any
"""None, bool, int, float, str, and lists and string-keyed dicts of these."""


@dataclass(frozen=True, slots=True)
class TrafficSpec:
    """Which clients there are: a name that an experiment's `clients` knows, and its arguments as JSON."""

    name: str
    arguments: Mapping[str, Json] = field(default_factory=dict)


def traffic(name: str, *senders: Mapping[str, Json]) -> TrafficSpec:
    return TrafficSpec(name, {"senders": [dict(one) for one in senders]})


def clients_of(spec: TrafficSpec, seed: str) -> tuple[Client, ...]:
    """The clients of a traffic. Raises ValueError for an unknown kind of arrivals or programs."""
    return tuple(
        (_of_programs if "shape" in one else _single)(one, seed) for one in spec.arguments["senders"]
    )


# ---- single requests


def single(name: str, arrivals: Mapping[str, Json], input_tokens: int, output_tokens: int) -> dict[str, Json]:
    return {"name": name, "arrivals": dict(arrivals), "input": input_tokens, "output": output_tokens}


def even(rpm: float, waiting: int = 0) -> dict[str, Json]:
    return {"kind": "even", "rpm": rpm, "waiting": waiting}


def poisson(rpm: float) -> dict[str, Json]:
    return {"kind": "poisson", "rpm": rpm}


def on_off(rpm: float, on_s: float = 60.0, off_s: float = 60.0) -> dict[str, Json]:
    return {"kind": "on-off", "rpm": rpm, "on_s": on_s, "off_s": off_s}


def _single(one: Mapping[str, Json], seed: str) -> Client:
    return fixed_length_client(
        one["name"],
        input_tokens=one["input"],
        output_tokens=one["output"],
        arrivals=_arrivals(one["arrivals"]),
        codec=CODEC,
        seed=seed,
    )


def _arrivals(given: Mapping[str, Json]) -> Arrivals:
    rate_per_s = given.get("rpm", 0.0) / MINUTE_S
    match given["kind"]:
        case "even" if waiting := given["waiting"]:
            start = EvenArrivals(waiting / START_S, first_s=0.0), START_S
            return PhasedArrivals([start, (EvenArrivals(rate_per_s), float("inf"))])
        case "even":
            return EvenArrivals(rate_per_s)
        case "poisson":
            return GammaArrivals(rate_per_s)
        case "on-off":
            return OnOffArrivals(EvenArrivals(rate_per_s), given["on_s"], given["off_s"])
        case "ramp":
            return RampArrivals(rate_per_s, given["to_rpm"] / MINUTE_S, given["over_s"])
        case "phases":
            return PhasedArrivals([(_arrivals(one), duration_s) for duration_s, one in given["phases"]])
        case kind:
            raise ValueError(f"no arrivals {kind!r}")


# ---- programs


def tot(branches: int, question: int = QUESTION_TOKENS, instructions: int = 0) -> dict[str, Json]:
    return {"kind": "tot", "branches": branches, "question": question, "instructions": instructions}


def judge(dimensions: int) -> dict[str, Json]:
    return {"kind": "judge", "dimensions": dimensions, "article": ARTICLE_TOKENS, "instructions": 0}


CHAT: Mapping[str, Json] = {"kind": "chat"}


def conversations(system: int, turns: float) -> dict[str, Json]:
    """Conversations that all begin with one system prompt, of so many turns on average, without a pause."""
    return {"kind": "chat", "system": system, "turns": turns, "think_s": 0.0}


def sender(
    name: str, shape: Mapping[str, Json], *phases: tuple[float, float] | float, well_behaved: bool = True
) -> dict[str, Json]:
    """One client: a rate in programs a second, or several phases, each (rate, the second until which it holds)."""
    arrivals = [[phase, FOREVER_S] if isinstance(phase, int | float) else list(phase) for phase in phases]
    return {"name": name, "shape": dict(shape), "arrivals": arrivals, "well_behaved": well_behaved}


def _of_programs(sender: Mapping[str, Json], seed: str) -> Client:
    name, kind = sender["name"], sender["shape"]["kind"]
    if len(sender["arrivals"]) == 1:
        arrivals: Arrivals = GammaArrivals(sender["arrivals"][0][0])
    else:
        ends = [0.0, *(until_s for _, until_s in sender["arrivals"])]
        lengths = (end - start for start, end in pairwise(ends))
        rates = (GammaArrivals(rate_per_s) for rate_per_s, _ in sender["arrivals"])
        arrivals = PhasedArrivals(list(zip(rates, lengths, strict=True)))
    program, requests = _programs(sender["shape"], seed, name)
    return Client(name, program, arrivals, seed, kind, sender["well_behaved"], requests)


def _programs(shape: Mapping[str, Json], seed: str, name: str) -> tuple[Callable[[int], Program], int | None]:
    """A client's programs by their index, and how many requests each has, where that is fixed."""
    own = filler_tokens(f"{seed}/{name}/instructions", shape.get("instructions", 0))

    def text(source: Source, what: str, index: int) -> Prompt:
        return CODEC.join(own, draw(source, seeded(seed, name, what, index), CODEC, shape[what]))

    match shape["kind"]:
        case "tot":
            tree = TreeOfThought(shape["branches"])
            return lambda index: tree.program(text(WORD_PROBLEMS, "question", index), CODEC), tree.requests
        case "judge":
            judge = Judge(shape["dimensions"])
            return lambda index: judge.program(text(ARTICLES, "article", index), CODEC), judge.requests
        case "chat":
            return lambda index: _chat(shape, seeded(seed, name, "chat", index)), None
        case kind:
            raise ValueError(f"no programs of kind {kind!r}")


def _chat(shape: Mapping[str, Json], rng: Random) -> Program:
    chat = Chat(**{key: shape[key] for key in ("turns", "think_s") if key in shape})
    first, *others = chat.draw(rng, CODEC)
    if "system" in shape:
        first = replace(first, words=CODEC.join(filler_tokens("system prompt", shape["system"]), first.words))
    return chat.program((first, *others), CODEC)


def filler_tokens(name: str, tokens: int) -> bytes:
    """`tokens` packed tokens: the same for the same name, and different from those of all other names."""
    if not tokens:
        return b""
    made = filler(name, CODEC, tokens)
    assert isinstance(made, bytes)
    return made
