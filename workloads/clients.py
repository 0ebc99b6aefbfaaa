"""Who sends what: clients, and the scenarios in which one of them misbehaves.

All clients of a scenario send programs at the same rate (DLPM Table 3). The programs of the one that misbehaves are
larger: in S1 they have more requests, in S2 longer prefixes. Document questions come in no larger program, so in
their S1 the bad client sends more of them. Prompts depend only on (seed, client, index of the program) and arrivals
only on (seed, client), so every scheduler sees the same load.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import exp
from typing import Any, NamedTuple

from workloads.arrivals import Arrivals, GammaArrivals
from workloads.programs.call import Program
from workloads.programs.codec import Codec
from workloads.programs.kinds import Chat, DocumentQa, Judge, Single, TreeOfThought
from workloads.programs.prose import ARTICLES, PASSAGES, WORD_PROBLEMS, Source, draw, filler, seeded


@dataclass(frozen=True, slots=True)
class Client:
    """One client of a run. `program(k)` begins its k-th program, afresh each time it is called."""

    name: str
    program: Callable[[int], Program]
    arrivals: Arrivals
    seed: str
    """Names the random stream of its arrivals."""
    app: str = ""
    well_behaved: bool = True
    requests: int | None = None
    """Requests in one of its programs, where that is fixed."""

    def arrival_times(self, *, until_s: float, most: int | None = None) -> tuple[float, ...]:
        """When its programs arrive, in seconds from the start of the run."""
        return self.arrivals.schedule(seeded(self.seed, self.name, "arrivals"), until_s=until_s, most=most)


def client_facts(clients: Iterable[Client]) -> dict[str, dict[str, Any]]:
    """What a manifest says of each client, by name. Rate and variation are None where its arrivals have none."""
    return {
        client.name: {
            "well_behaved": client.well_behaved,
            "app": client.app,
            "requests": client.requests,
            "rate_per_s": getattr(client.arrivals, "rate_per_s", None),
            "cv": getattr(client.arrivals, "cv", None),
        }
        for client in clients
    }


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the scenarios' programs; the defaults are DLPM's (Tables 2 and 3). Lengths in tokens."""

    good_clients: int = 3
    question_tokens: int = 546
    thought_tokens: int = 256
    height: int = 4
    good_branches: int = 2
    bad_branches: int = 4
    bad_question_factor: int = 10
    article_tokens: int = 2701
    judgement_tokens: int = 256
    good_dimensions: int = 2
    bad_dimensions: int = 16
    bad_preamble_tokens: int = 600
    document_tokens: int = 21449
    document_spread: float = 0.25
    """Standard deviation of the logarithm of a document's length; 0: all are equally long."""
    questions: int = 8
    document_question_tokens: int = 24
    document_answer_tokens: int = 15
    bad_document_factor: int = 2
    bad_rate_factor: float = 4.0
    """Rate of the bad client of qa-s1, as a multiple; DLPM only says "higher request rate"."""

    def __post_init__(self) -> None:
        if self.good_clients < 1:
            raise ValueError("a scenario needs at least one well-behaved client")


SMALL = Scale(
    question_tokens=256,
    thought_tokens=16,
    article_tokens=1200,
    judgement_tokens=32,
    bad_preamble_tokens=270,
)
"""Lengths for the `bench` model on two cores. DLPM's are for an A100; its proportions are kept where a
decoded token costs about ten prefilled ones: prompts to outputs, and S2's preamble to the article."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Sources of the texts that prompts are made of."""

    questions: Source = WORD_PROBLEMS
    articles: Source = ARTICLES


class Shape(NamedTuple):
    """A kind of program: how many requests it has, and how one begins, of (seed, client, index)."""

    requests: int
    begin: Callable[[str, str, int, Texts, Codec], Program]


def _tot(scale: Scale, *, branches: int | None = None, questions: int = 1) -> Shape:
    """`questions` are in one prompt."""
    tree = TreeOfThought(branches or scale.good_branches, scale.height, scale.thought_tokens)

    def begin(seed: str, client: str, index: int, texts: Texts, codec: Codec) -> Program:
        rng = seeded(seed, client, "question", index)
        return tree.program(draw(texts.questions, rng, codec, scale.question_tokens * questions), codec)

    return Shape(tree.requests, begin)


def _judge(scale: Scale, *, dimensions: int | None = None, preamble_tokens: int = 0) -> Shape:
    judge = Judge(dimensions or scale.good_dimensions, scale.judgement_tokens)

    def begin(seed: str, client: str, index: int, texts: Texts, codec: Codec) -> Program:
        article = draw(texts.articles, seeded(seed, client, "article", index), codec, scale.article_tokens)
        if preamble_tokens:
            rng = seeded(seed, client, "preamble", index)
            article = codec.join(draw(texts.articles, rng, codec, preamble_tokens), article)
        return judge.program(article, codec)

    return Shape(judge.requests, begin)


def _qa(scale: Scale, *, documents: int = 1) -> Shape:
    """A document is as long as so many."""
    qa, spread = DocumentQa(scale.questions, scale.document_answer_tokens), scale.document_spread
    mean_tokens = scale.document_tokens * documents

    def begin(seed: str, client: str, index: int, texts: Texts, codec: Codec) -> Program:
        rng = seeded(seed, client, "document", index)
        factor = exp(spread * rng.gauss(0.0, 1.0) - spread**2 / 2)
        document = draw(PASSAGES, rng, codec, max(1, round(mean_tokens * factor)))
        questions = [draw(PASSAGES, rng, codec, scale.document_question_tokens) for _ in range(qa.questions)]
        return qa.program(document, questions, codec)

    return Shape(qa.requests, begin)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One well-behaved and one badly behaved kind of client, as a function of the scale."""

    app: str
    good: Callable[[Scale], Shape]
    bad: Callable[[Scale], Shape]
    bad_rate: Callable[[Scale], float] = lambda scale: 1.0
    """The bad client's rate, as a multiple of a good client's."""

    def clients(
        self,
        *,
        scale: Scale,
        rate_per_s: float,
        codec: Codec,
        cv: float = 1.0,
        first_s: float | None = None,
        seed: str = "0",
        texts: Texts | None = None,
        with_bad: bool = True,
    ) -> tuple[Client, ...]:
        """`good-0`, `good-1`, ... with `rate_per_s` programs per second each, and `bad` with `bad_rate` times that."""
        sources = texts or Texts()

        def client(name: str, shape: Shape, well_behaved: bool) -> Client:
            rate = rate_per_s if well_behaved else rate_per_s * self.bad_rate(scale)
            return Client(
                name=name,
                program=lambda index: shape.begin(seed, name, index, sources, codec),
                arrivals=GammaArrivals(rate, cv, first_s),
                seed=seed,
                app=self.app,
                well_behaved=well_behaved,
                requests=shape.requests,
            )

        good = [client(f"good-{k}", self.good(scale), True) for k in range(scale.good_clients)]
        return (*good, client("bad", self.bad(scale), False)) if with_bad else tuple(good)


SCENARIOS: Mapping[str, Scenario] = {
    "tot-s1": Scenario("tot", _tot, lambda scale: _tot(scale, branches=scale.bad_branches)),
    "judge-s1": Scenario("judge", _judge, lambda scale: _judge(scale, dimensions=scale.bad_dimensions)),
    "tot-s2": Scenario("tot", _tot, lambda scale: _tot(scale, questions=scale.bad_question_factor)),
    "judge-s2": Scenario(
        "judge", _judge, lambda scale: _judge(scale, preamble_tokens=scale.bad_preamble_tokens)
    ),
    "qa-s1": Scenario("qa", _qa, _qa, lambda scale: scale.bad_rate_factor),
    "qa-s2": Scenario("qa", _qa, lambda scale: _qa(scale, documents=scale.bad_document_factor)),
}


def fixed_length_client(
    name: str,
    *,
    input_tokens: int,
    output_tokens: int,
    arrivals: Arrivals,
    codec: Codec,
    prefix_tokens: int = 0,
    seed: str = "0",
    app: str = "",
) -> Client:
    """A client whose requests all have these lengths, as in the VTC paper (§5.1).

    Prompts are unique but for their first `prefix_tokens` (of the `input_tokens`), which all of the client's have.
    Raises ValueError where nothing would be left to tell prompts apart.
    """
    if output_tokens < 1 or not 0 <= prefix_tokens < input_tokens:
        raise ValueError(
            f"{name}: a request needs output and, beyond its prefix, input: "
            f"{output_tokens} and {input_tokens} tokens with {prefix_tokens} of prefix"
        )
    single = Single(output_tokens)
    common = [filler(f"{seed}/{name}/prefix", codec, prefix_tokens)] if prefix_tokens else []

    def program(index: int) -> Program:
        own = filler(f"{seed}/{name}/{index}", codec, input_tokens - prefix_tokens)
        return single.program(codec.join(*common, own))

    return Client(name, program, arrivals, seed, app, True, single.requests)


def chat_client(
    name: str,
    *,
    arrivals: Arrivals,
    codec: Codec,
    seed: str = "0",
) -> Client:
    """A client that begins conversations; `arrivals` are their first turns."""
    kind = Chat()

    def program(index: int) -> Program:
        return kind.program(kind.draw(seeded(seed, name, "chat", index), codec), codec)

    return Client(name, program, arrivals, seed, "chat")
