"""DLPM, Table 2: lengths and common prefixes of the workloads' programs, without any engine."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import NamedTuple

from workloads.arrivals import GammaArrivals
from workloads.clients import SCENARIOS, Client, Scale, chat_client
from workloads.experiments.claims import Part
from workloads.experiments.contract import Cell, Experiment, Measured, Result, Row, TrafficSpec, medians
from workloads.programs import PackedCodec
from workloads.session import Plan
from workloads.simulation import Site
from workloads.statistics import statistics


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
