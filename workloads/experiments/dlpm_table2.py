"""DLPM, Table 2: lengths and common prefixes of the workloads' programs, without any engine."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from workloads.arrivals import GammaArrivals
from workloads.clients import SCENARIOS, Client, Scale, chat_client
from workloads.experiments.claims import Entry, Part, Table
from workloads.experiments.contract import Cell, Experiment, Measured, Result, Row, TrafficSpec
from workloads.programs import PackedCodec
from workloads.session import Plan
from workloads.simulation import Site
from workloads.statistics import statistics


@dataclass(frozen=True, slots=True)
class TableWorkload:
    """A row of the paper's table, and a client that sends such programs."""

    title: str
    prefix_tokens: float
    output_tokens: float
    client: Callable[[str], Client]


def _scenario(name: str, place: int = 0) -> Callable[[str], Client]:
    return lambda seed: SCENARIOS[name].clients(
        scale=Scale(), rate_per_s=1.0, codec=PackedCodec(), seed=seed
    )[place]


def _chat(seed: str) -> Client:
    return chat_client("chat", arrivals=GammaArrivals(1.0), codec=PackedCodec(), seed=seed)


WORKLOADS: Mapping[str, TableWorkload] = {
    "qa": TableWorkload("long-document QA", 21_449, 15, _scenario("qa-s1")),
    "tot": TableWorkload("tree of thoughts", 546, 256, _scenario("tot-s1")),
    "judge": TableWorkload("LLM as a judge", 2701, 256, _scenario("judge-s1")),
    "chat": TableWorkload("multi-turn chat", 56, 142, _chat),
}

BAD: Mapping[str, tuple[str, Callable[[str], Client]]] = {
    f"{name}-bad": (text, _scenario(name, -1))
    for name, text in (
        ("tot-s1", "S1 trees: 4 branches"),
        ("judge-s1", "S1 judge: 16 dimensions"),
        ("qa-s2", "S2 QA: documents twice as long"),
        ("tot-s2", "S2 trees: questions 10 times as long"),
        ("judge-s2", "S2 judge: 600 more tokens before each article"),
    )
}
"""Misbehaving clients' programs (Table 3)."""


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
        for name in (*WORKLOADS, *BAD):
            sent = TrafficSpec(name, {"programs": programs.get(name, 20)})
            yield Row(name, Site(stall_ms=0.0), sent, plan=Plan(1.0))

    def run(self, cell: Cell, seed: str) -> Measured:
        name = cell.traffic.name
        client = (WORKLOADS[name].client if name in WORKLOADS else BAD[name][1])(seed)
        found = statistics(client.program(index) for index in range(cell.traffic.arguments["programs"]))
        derived = {"requests_per_program": found.requests_per_program, "hit_rate": found.hit_rate}
        return Measured(asdict(found) | derived, 0.0)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        named: dict[str, tuple[str, float | None, float | None]] = {
            **{name: (row.title, row.prefix_tokens, row.output_tokens) for name, row in WORKLOADS.items()},
            **{name: (title, None, None) for name, (title, _) in BAD.items()},
        }

        def row(name: str) -> list[Entry]:
            title, prefix, output = named[name]
            paths = (f"{what}_tokens" for what in ("prompt", "common", "shared", "output"))
            numbers = at[name].row("requests_per_program", *paths, digits=4)
            _, requests, prompt, common, shared, answer = numbers
            hits = 100 * at[name]["hit_rate"]
            return [title, requests, prompt, common, prefix, shared, answer, output, hits]

        yield Table(
            "Averages over requests, in tokens",
            """workload | requests a program | prompt | common prefix | prefix, paper | shared prefix | output |
                output, paper | most hits, %""",
            [row(name) for name in named],
            digits=4,
        )
