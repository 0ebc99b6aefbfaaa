"""Who sends what: clients, and the scenarios in which one of them misbehaves.

All clients of a scenario send programs at the same rate (DLPM Table 3). The badly behaved one's programs
are larger: in S1 they hold more requests, in S2 their prefixes are longer. Prompts depend on nothing but
(seed, client, index of the program), arrivals on (seed, client): every scheduler sees the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from workloads.arrivals import GammaArrivals
from workloads.programs.call import Program
from workloads.programs.codec import Codec
from workloads.programs.judge import Judge
from workloads.programs.prose import Articles, Source, WordProblems, draw, seeded
from workloads.programs.tree_of_thought import TreeOfThought


@dataclass(frozen=True, slots=True)
class Client:
    """One client of a run. `program(k)` begins its k-th program, afresh each time it is called."""

    name: str
    program: Callable[[int], Program]
    arrivals: GammaArrivals
    seed: str
    """Names the random stream of its arrivals."""
    app: str = ""
    well_behaved: bool = True
    requests: int | None = None
    """Requests in one of its programs, where that is fixed."""

    def arrival_times(self, *, until_s: float, most: int | None = None) -> tuple[float, ...]:
        """When its programs arrive, in seconds from the start of the run."""
        return self.arrivals.schedule(seeded(self.seed, self.name, "arrivals"), until_s=until_s, most=most)


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the scenarios' programs; the defaults are DLPM's (Tables 2 and 3). Lengths in tokens."""

    good_clients: int = 3
    question_tokens: int | None = 546
    """None: as long as the questions are."""
    thought_tokens: int = 256
    height: int = 4
    good_branches: int = 2
    bad_branches: int = 4
    bad_question_factor: int = 10
    article_tokens: int | None = 2701
    judgement_tokens: int = 256
    good_dimensions: int = 2
    bad_dimensions: int = 16
    bad_preamble_tokens: int = 600

    def __post_init__(self) -> None:
        if self.good_clients < 1:
            raise ValueError("a scenario needs at least one well-behaved client")


@dataclass(frozen=True, slots=True)
class Texts:
    """Where questions and articles come from."""

    questions: Source = field(default_factory=WordProblems)
    articles: Source = field(default_factory=Articles)


@dataclass(frozen=True, slots=True)
class _Tot:
    tree: TreeOfThought
    question_tokens: int | None
    factor: int = 1

    @property
    def requests(self) -> int:
        return self.tree.requests

    def begin(self, seed: str, client: str, index: int, texts: Texts, codec: Codec) -> Program:
        rng = seeded(seed, client, "question", index)
        if self.question_tokens is not None:
            return self.tree.program(
                draw(texts.questions, rng, codec, self.question_tokens * self.factor), codec
            )
        parts = [draw(texts.questions, rng, codec) for _ in range(self.factor)]
        return self.tree.program(codec.join(*parts), codec)


@dataclass(frozen=True, slots=True)
class _Judging:
    judge: Judge
    article_tokens: int | None
    preamble_tokens: int = 0

    @property
    def requests(self) -> int:
        return self.judge.requests

    def begin(self, seed: str, client: str, index: int, texts: Texts, codec: Codec) -> Program:
        article = draw(texts.articles, seeded(seed, client, "article", index), codec, self.article_tokens)
        if self.preamble_tokens:
            rng = seeded(seed, client, "preamble", index)
            article = codec.join(draw(texts.articles, rng, codec, self.preamble_tokens), article)
        return self.judge.program(article, codec)


_Shape = _Tot | _Judging


@dataclass(frozen=True, slots=True)
class Scenario:
    """One well-behaved and one badly behaved kind of client, as a function of the scale."""

    app: str
    good: Callable[[Scale], _Shape]
    bad: Callable[[Scale], _Shape]

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
        """`good-0`, `good-1`, ... and `bad`, each with `rate_per_s` programs a second."""
        given = texts or Texts()
        arrivals = GammaArrivals(rate_per_s, cv, first_s)

        def client(name: str, shape: _Shape, well_behaved: bool) -> Client:
            return Client(
                name=name,
                program=lambda index: shape.begin(seed, name, index, given, codec),
                arrivals=arrivals,
                seed=seed,
                app=self.app,
                well_behaved=well_behaved,
                requests=shape.requests,
            )

        good = [client(f"good-{k}", self.good(scale), True) for k in range(scale.good_clients)]
        return (*good, client("bad", self.bad(scale), False)) if with_bad else tuple(good)


def _good_tot(scale: Scale) -> _Tot:
    tree = TreeOfThought(scale.good_branches, scale.height, scale.thought_tokens)
    return _Tot(tree, scale.question_tokens)


def _many_branches(scale: Scale) -> _Tot:
    good = _good_tot(scale)
    return replace(good, tree=replace(good.tree, branches=scale.bad_branches))


def _long_question(scale: Scale) -> _Tot:
    return replace(_good_tot(scale), factor=scale.bad_question_factor)


def _good_judge(scale: Scale) -> _Judging:
    return _Judging(Judge(scale.good_dimensions, scale.judgement_tokens), scale.article_tokens)


def _many_dimensions(scale: Scale) -> _Judging:
    good = _good_judge(scale)
    return replace(good, judge=replace(good.judge, dimensions=scale.bad_dimensions))


def _long_article(scale: Scale) -> _Judging:
    return replace(_good_judge(scale), preamble_tokens=scale.bad_preamble_tokens)


SCENARIOS: Mapping[str, Scenario] = {
    "tot-s1": Scenario("tot", _good_tot, _many_branches),
    "judge-s1": Scenario("judge", _good_judge, _many_dimensions),
    "tot-s2": Scenario("tot", _good_tot, _long_question),
    "judge-s2": Scenario("judge", _good_judge, _long_article),
}
