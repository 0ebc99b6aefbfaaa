"""Clients that send programs, described as JSON: the traffic of the experiments beside DLPM's Figure 7.

A sender is {"name", "shape", "arrivals", "well_behaved"}. Shapes, with lengths in tokens:

    {"kind": "tot", "branches": 3, "question": 546}          trees of thoughts of height 4, 256 a thought
    {"kind": "judge", "dimensions": 2, "article": 2701}      judgements of 256
    {"kind": "chat"}                                         conversations like those of Chatbot Arena
    {"kind": "chat", "system": 1024, "turns": 4, "think_s": 0}
                                                             others, all behind one system prompt
    {"kind": "shared", "prefix": 4096, "of": "library", "input": 200, "output": 100, "requests": 4}
                                                             requests side by side; the k-th program of all that
                                                             name the same `of` begins with the same prefix

With "instructions": N, each question or article begins with N tokens that are the client's own. Arrivals are
[programs a second, until so many seconds], one after another, Gamma-distributed with the variation of a Poisson
process; {"even": rate, "first_s": t} has equal gaps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from workloads.arrivals import Arrivals, EvenArrivals, GammaArrivals, PhasedArrivals
from workloads.clients import Client
from workloads.experiments.contract import Json
from workloads.programs import PackedCodec
from workloads.programs.call import Call, Program, Reply
from workloads.programs.chat import Chat
from workloads.programs.judge import Judge
from workloads.programs.prose import Articles, WordProblems, draw, filler, seeded
from workloads.programs.tree_of_thought import TreeOfThought

CODEC = PackedCodec()

QUESTION_TOKENS, ARTICLE_TOKENS = 546, 2701
"""DLPM, Table 2."""

FOREVER_S = 1e9


def tot(branches: int, question: int = QUESTION_TOKENS, instructions: int = 0) -> dict[str, Json]:
    """Trees of thoughts."""
    return {"kind": "tot", "branches": branches, "question": question, "instructions": instructions}


def judge(dimensions: int, article: int = ARTICLE_TOKENS, instructions: int = 0) -> dict[str, Json]:
    """Judgements of articles."""
    return {"kind": "judge", "dimensions": dimensions, "article": article, "instructions": instructions}


CHAT: Mapping[str, Json] = {"kind": "chat"}


def conversations(system: int, turns: float) -> dict[str, Json]:
    """Conversations that all begin with one system prompt, of so many turns on average, without a pause."""
    return {"kind": "chat", "system": system, "turns": turns, "think_s": 0.0}


def sender(
    name: str,
    shape: Mapping[str, Json],
    *phases: tuple[float, float] | float,
    well_behaved: bool = True,
) -> dict[str, Json]:
    """One client: a rate in programs a second, or several phases, each (rate, the second until which it holds)."""
    arrivals = [[phase, FOREVER_S] if isinstance(phase, int | float) else list(phase) for phase in phases]
    return {"name": name, "shape": dict(shape), "arrivals": arrivals, "well_behaved": well_behaved}


def client(sender: Mapping[str, Json], seed: str) -> Client:
    """The client that a sender describes. Its programs raise ValueError for an unknown shape."""
    name, shape = sender["name"], sender["shape"]

    def program(index: int) -> Program:
        return _program(shape, seed, name, index)

    return Client(
        name,
        program,
        _arrivals(sender["arrivals"]),
        seed,
        app=shape["kind"],
        well_behaved=sender["well_behaved"],
        requests=_requests(shape),
    )


def _requests(shape: Mapping[str, Json]) -> int | None:
    match shape["kind"]:
        case "tot":
            return TreeOfThought(shape["branches"]).requests
        case "judge":
            return Judge(shape["dimensions"]).requests
        case "shared":
            return int(shape["requests"])
        case _:
            return None


def _arrivals(given: Sequence[Sequence[float]] | Mapping[str, float]) -> Arrivals:
    if isinstance(given, Mapping):
        return EvenArrivals(given["even"], given["first_s"])
    if len(given) == 1:
        return GammaArrivals(given[0][0])
    phases, start_s = [], 0.0
    for rate_per_s, until_s in given:
        phases.append((GammaArrivals(rate_per_s), until_s - start_s))
        start_s = until_s
    return PhasedArrivals(phases)


def _program(shape: Mapping[str, Json], seed: str, name: str, index: int) -> Program:
    match shape["kind"]:
        case "tot":
            rng = seeded(seed, name, "question", index)
            question = draw(WordProblems(), rng, CODEC, shape["question"])
            return TreeOfThought(shape["branches"]).program(_instructed(question, shape, seed, name), CODEC)
        case "judge":
            article = draw(Articles(), seeded(seed, name, "article", index), CODEC, shape["article"])
            return Judge(shape["dimensions"]).program(_instructed(article, shape, seed, name), CODEC)
        case "chat":
            return _chat(shape, seeded(seed, name, "chat", index))
        case "shared":
            return _shared(shape, seed, name, index)
        case kind:
            raise ValueError(f"no programs of kind {kind!r}")


def _chat(shape: Mapping[str, Json], rng: Random) -> Program:
    chat = Chat(**{key: shape[key] for key in ("turns", "think_s") if key in shape})
    first, *others = chat.draw(rng, CODEC)
    if "system" in shape:
        first = replace(first, words=CODEC.join(filler_tokens("system prompt", shape["system"]), first.words))
    return chat.program((first, *others), CODEC)


def _instructed(prompt: object, shape: Mapping[str, Json], seed: str, name: str) -> bytes:
    assert isinstance(prompt, bytes)
    tokens = shape["instructions"]
    return filler_tokens(f"{seed}/{name}/instructions", tokens) + prompt if tokens else prompt


def filler_tokens(name: str, tokens: int) -> bytes:
    """`tokens` packed tokens: the same for the same name, and different from those of all other names."""
    made = filler(name, CODEC, tokens)
    assert isinstance(made, bytes)
    return made


def _shared(shape: Mapping[str, Json], seed: str, name: str, index: int) -> Program:
    """Requests side by side that share one prefix. Returns how many were answered."""
    prefix = filler_tokens(f"{seed}//{shape['of']}/{index}", shape["prefix"])
    replies: tuple[Reply, ...] = yield tuple(
        Call(
            prefix + filler_tokens(f"{seed}/{name}/{index}/{k}", shape["input"]),
            shape["output"],
            "request",
        )
        for k in range(shape["requests"])
    )
    return sum(reply.ok for reply in replies)
