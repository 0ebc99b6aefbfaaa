"""LLM as a judge: branch, solve, merge (Saha et al. 2023; DLPM §7.1).

One article is branched into dimensions; each is solved, a judgement of the article on that dimension, all
side by side and with the article as their common prefix; then one call merges the judgements into a
verdict: dimensions + 1 requests. The dimensions are given, not asked of the model, as in DLPM's set-up, so
that the number of requests does not depend on what a model answers.
"""

from dataclasses import dataclass

from workloads.programs.call import Call, Program, Prompt, Reply
from workloads.programs.codec import Codec

DIMENSIONS = (
    "clarity",
    "accuracy",
    "relevance",
    "depth",
    "originality",
    "coherence",
    "tone",
    "evidence",
    "structure",
    "completeness",
    "fairness",
    "brevity",
    "grammar",
    "usefulness",
    "consistency",
    "style",
)
"""What articles are judged by; a program with more dimensions starts over with a number behind the name."""


@dataclass(frozen=True, slots=True)
class Judge:
    """The shape of a judgement; `program` judges one article."""

    dimensions: int = 2
    judgement_tokens: int = 256
    """Output tokens of each request, the merge included."""

    def __post_init__(self) -> None:
        if self.dimensions < 1:
            raise ValueError(f"a judge needs at least 1 dimension, not {self.dimensions}")

    @property
    def requests(self) -> int:
        """Requests for one article."""
        return self.dimensions + 1

    def program(self, article: Prompt, codec: Codec) -> Program:
        """Judge one article. Returns the verdict's text, None where no judgement or no verdict was had.

        A dimension that failed is left out of the merge.
        """
        solves = tuple(
            Call(codec.join(article, codec.encode(f"\nJudge the {name}.\n")), self.judgement_tokens, "solve")
            for name in self._names()
        )
        replies: tuple[Reply, ...] = yield solves
        judgements = [
            codec.join(codec.encode(f"\nOn {name}: "), codec.answer(reply))
            for name, reply in zip(self._names(), replies, strict=True)
            if reply.ok
        ]
        if not judgements:
            return None
        merge = codec.join(article, *judgements, codec.encode("\nMerge the judgements into a verdict.\n"))
        verdict: Reply = yield Call(merge, self.judgement_tokens, "merge")
        return verdict.text if verdict.ok else None

    def _names(self) -> list[str]:
        rounds = [divmod(k, len(DIMENSIONS)) for k in range(self.dimensions)]
        return [DIMENSIONS[place] + (f" {turn + 1}" if turn else "") for turn, place in rounds]
