"""DLPM, Table 2: lengths and common prefixes of the workloads' programs, without any engine.

Programs run one after another with made-up answers that share nothing; calls are answered in the order in which they
become ready. "Prefix" can be read in two ways, so there are two averages: what all requests of a program have in common
(the document, the question, the article), and what a request shares with any one before it, answer included, which is
what a cache that forgets nothing would save.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from string import ascii_lowercase
from typing import NamedTuple

import numpy as np

from workloads.arrivals import GammaArrivals
from workloads.clients import SCENARIOS, Client, Scale, chat_client
from workloads.experiments.claims import Part
from workloads.experiments.contract import Cell, Experiment, Measured, Result, Row, TrafficSpec, medians
from workloads.programs import PackedCodec
from workloads.programs.call import Call, Execution, Program, Prompt, Reply
from workloads.programs.codec import TOKEN_BYTES, TextCodec
from workloads.programs.prose import seeded
from workloads.session import Plan
from workloads.simulation import Site


class TableWorkload(NamedTuple):
    """A row of the paper's table, if it is in it, and a client that sends such programs."""

    title: str
    client: Callable[[str], Client]
    prefix_tokens: float | None = None
    output_tokens: float | None = None


def _scenario(name: str, place: int = 0) -> Callable[[str], Client]:
    return lambda seed: SCENARIOS[name].clients(
        scale=Scale(), rate_per_s=1.0, codec=PackedCodec(), seed=seed
    )[place]


def _chat(seed: str) -> Client:
    return chat_client("chat", arrivals=GammaArrivals(1.0), codec=PackedCodec(), seed=seed)


WORKLOADS: Mapping[str, TableWorkload] = {
    "qa": TableWorkload("long-document QA", _scenario("qa-s1"), 21_449, 15),
    "tot": TableWorkload("tree of thoughts", _scenario("tot-s1"), 546, 256),
    "judge": TableWorkload("LLM as a judge", _scenario("judge-s1"), 2701, 256),
    "chat": TableWorkload("multi-turn chat", _chat, 56, 142),
    "tot-s1-bad": TableWorkload("S1 trees: 4 branches", _scenario("tot-s1", -1)),
    "judge-s1-bad": TableWorkload("S1 judge: 16 dimensions", _scenario("judge-s1", -1)),
    "qa-s2-bad": TableWorkload("S2 QA: documents twice as long", _scenario("qa-s2", -1)),
    "tot-s2-bad": TableWorkload("S2 trees: questions 10 times as long", _scenario("tot-s2", -1)),
    "judge-s2-bad": TableWorkload("S2 judge: 600 more tokens before each article", _scenario("judge-s2", -1)),
}
"""Those of misbehaving clients are Table 3's."""


class Table2(Experiment):
    id = "dlpm-table2"
    title = "The workloads' lengths, and how much of them can be cached"
    source = "DLPM, Tables 2 and 3"
    about = """Programs are walked with made-up answers, without any engine. Texts are generated: questions,
        articles, documents and conversations have the paper's average lengths, not its data sets' words. The common
        prefix is what all requests of a program begin with; the shared one what a request has in common with any
        before it, and so what a cache that forgets nothing would save."""

    seeds = ("0",)

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        programs = {"chat": 4000, "qa": 200} if full else {}
        for name, one in WORKLOADS.items():
            sent = TrafficSpec(name, {"programs": programs.get(name, 20)})
            yield Row(name, Site(stall_ms=0.0), sent, one.title, Plan(1.0))

    def run(self, cell: Cell, seed: str) -> Measured:
        client = WORKLOADS[cell.traffic.name].client(seed)
        found = statistics(client.program(index) for index in range(cell.traffic.arguments["programs"]))
        derived = {"requests_per_program": found.requests_per_program, "hit_rate": found.hit_rate}
        return Measured(asdict(found) | derived, 0.0)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        columns = """workload | requests a program = requests_per_program | prompt = prompt_tokens |
            common prefix = common_tokens | prefix, paper = prefix | shared prefix = shared_tokens |
            output = output_tokens | output, paper = output | most hits, % = hits"""
        yield medians(
            "Averages over requests, in tokens",
            columns,
            at.values(),
            digits=4,
            prefix={name: one.prefix_tokens for name, one in WORKLOADS.items()},
            output={name: one.output_tokens for name, one in WORKLOADS.items()},
            hits={name: 100 * one["hit_rate"] for name, one in at.items()},
        )


# ---- statistics of programs

_CHARS_PER_TOKEN = TextCodec().chars_per_token


@dataclass(frozen=True, slots=True)
class Statistics:
    """Averages over requests, but `common_tokens`, which is one over programs. In tokens."""

    programs: int
    requests: int
    prompt_tokens: float
    common_tokens: float
    """Longest prefix of all requests of a program; of a program with one request, its prompt."""
    shared_tokens: float
    """Longest prefix that is also one of an earlier request, of this program or another, with its answer."""
    output_tokens: float

    @property
    def requests_per_program(self) -> float:
        return self.requests / self.programs

    @property
    def hit_rate(self) -> float:
        """The part of all prompt tokens that is shared: an upper bound for every cache."""
        return self.shared_tokens / self.prompt_tokens


def statistics(programs: Iterable[Program]) -> Statistics:
    """Run `programs` to their end. Tokens of text are estimated (`TextCodec`). Holds all prompts in memory.

    Raises ValueError where there is no request.
    """
    seen: list[bytes] = []
    common: list[float] = []
    prompts = shared = output = 0.0
    for program in programs:
        prefix: bytes | None = None
        execution = Execution(program)
        ready = execution.start()
        while ready:
            number, call = ready.pop(0)
            prompt, per_token = _units(call.prompt)
            reply = _answer(len(seen), call)
            prompts += len(prompt) / per_token
            shared += _longest(seen, prompt) / per_token
            output += call.max_output_tokens
            prefix = prompt if prefix is None else prefix[: _agreeing(prefix, prompt)]
            insort(seen, prompt + reply.packed)
            ready += execution.reply(number, reply)
        if prefix is not None:
            common.append(len(prefix) / per_token)
    if not seen:
        raise ValueError("there are no requests to tell anything about")
    requests = len(seen)
    return Statistics(
        programs=len(common),
        requests=requests,
        prompt_tokens=prompts / requests,
        common_tokens=sum(common) / len(common),
        shared_tokens=shared / requests,
        output_tokens=output / requests,
    )


def _units(prompt: Prompt) -> tuple[bytes, float]:
    """A prompt as four bytes for each character or token, and how many bytes are a token."""
    if isinstance(prompt, str):
        return prompt.encode("utf-32-le"), TOKEN_BYTES * _CHARS_PER_TOKEN
    return (prompt if isinstance(prompt, bytes) else array("I", prompt).tobytes()), TOKEN_BYTES


def _answer(number: int, call: Call) -> Reply:
    """As long as the call says, and unlike any other."""
    tokens = call.max_output_tokens
    chars = round(tokens * _CHARS_PER_TOKEN) if isinstance(call.prompt, str) else tokens
    text = "".join(seeded("answer", number).choices(ascii_lowercase, k=chars))
    return Reply(text, tuple(text.encode()), packed=text.encode("utf-32-le"))


def _longest(seen: list[bytes], prompt: bytes) -> int:
    """Bytes that `prompt` shares with one of `seen`, which are sorted: one of its neighbours shares most."""
    place = bisect_left(seen, prompt)
    return max((_agreeing(other, prompt) for other in seen[max(0, place - 1) : place + 1]), default=0)


def _agreeing(one: bytes, other: bytes) -> int:
    """Leading bytes that two have in common, in whole units."""
    units = min(len(one), len(other)) // TOKEN_BYTES
    differ = np.frombuffer(one, "<u4", units) != np.frombuffer(other, "<u4", units)
    return TOKEN_BYTES * (int(differ.argmax()) if differ.any() else units)
