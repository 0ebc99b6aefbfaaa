"""The programs that clients run: single requests, conversations, trees of thoughts, judges, questions about documents.

Each class is the shape of a program; `program` begins one, and `requests` is how many requests it has in all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from random import Random

from workloads.programs.call import Call, Program, Prompt, Reply
from workloads.programs.codec import Codec
from workloads.programs.prose import PASSAGES, draw


@dataclass(frozen=True, slots=True)
class Single:
    """One request and its answer: the traffic of the VTC paper, and of traces, which have lengths alone."""

    output_tokens: int
    requests: int = 1

    def program(self, prompt: Prompt) -> Program:
        """Ask once. Returns the answer's text, None where there was none."""
        reply: Reply = yield Call(prompt, self.output_tokens, "single")
        return reply.text if reply.ok else None


# ---- conversations

LONGEST_TOKENS = 1024
"""Of words and of answers."""

_WORDS_SPREAD = 1.0
"""Standard deviation of the logarithm of the words' length."""
_ANSWER_SHAPE = 1.5


@dataclass(frozen=True, slots=True)
class Turn:
    """What is said in one turn, and when."""

    words: Prompt
    answer_tokens: int
    think_s: float = 0.0
    """From the last answer to these words."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A kind of conversation, by the averages of its turns. A turn's prompt is all that was said so far, as the model
    wrote it, and new words; between an answer and the next words their writer thinks.

    Lengths are those of DLPM's Table 2 for Chatbot Arena, 56 tokens of prefix and 142 of answer on average: the first
    words are 56 tokens, and with geometrically many turns, 1.28 on average, a request also shares 56 tokens with the
    turns before it, so both readings of the table hold. The rest is assumed: words are log-normal, answers Gamma with
    shape 1.5, thinking is exponential.
    """

    turns: float = 1.28
    words_tokens: float = 56.0
    answer_tokens: float = 142.0
    think_s: float = 20.0

    def draw(self, rng: Random, codec: Codec) -> tuple[Turn, ...]:
        count = 1
        if self.turns > 1:
            count += int(log(1 - rng.random()) / log(1 - 1 / self.turns))
        return tuple(self._turn(rng, codec, first=k == 0) for k in range(count))

    def program(self, turns: Sequence[Turn], codec: Codec) -> Program:
        """Hold the conversation. Returns how many turns were answered; one that failed ends it."""
        said: list[Prompt] = []
        for answered, turn in enumerate(turns):
            said.append(turn.words)
            prompt = codec.join(*said)
            reply: Reply = yield Call(prompt, turn.answer_tokens, "turn", after_s=turn.think_s)
            if not reply.ok:
                return answered
            said = [prompt, codec.answer(reply), codec.encode("\n")]
        return len(turns)

    def _turn(self, rng: Random, codec: Codec, *, first: bool) -> Turn:
        words = self.words_tokens * exp(rng.gauss(0.0, _WORDS_SPREAD) - _WORDS_SPREAD**2 / 2)
        answer = rng.gammavariate(_ANSWER_SHAPE, self.answer_tokens / _ANSWER_SHAPE)
        think_s = 0.0 if first or not self.think_s else rng.expovariate(1 / self.think_s)
        return Turn(draw(PASSAGES, rng, codec, _within(words)), _within(answer), think_s)


def _within(tokens: float) -> int:
    return min(max(1, round(tokens)), LONGEST_TOKENS)


# ---- trees of thoughts

STAGES = ("plan", "execute", "reflect", "answer")
"""What the thoughts of each level are for; deeper trees go on reflecting before they answer."""

INSTRUCTIONS = {
    "plan": "Plan {k}: outline one way to solve this.",
    "execute": "Attempt {k}: carry the plan out.",
    "reflect": "Review {k}: look for a mistake.",
    "answer": "Answer {k}: the result is",
}


@dataclass(frozen=True, slots=True)
class TreeOfThought:
    """A question is the root, and every node's thought branches into b further thoughts: b + b² + b³ + b⁴ requests with
    the height 4 of DLPM §7.1 (over GSM8K), 30, 120 and 340 for b = 2, 3, 4.

    A child's prompt is its parent's whole path (question and all thoughts so far, as the model wrote them) and an
    instruction of its own, so siblings share everything but their last tokens. A child starts when its parent has
    finished; subtrees do not wait for each other.
    """

    branches: int = 2
    height: int = 4
    thought_tokens: int = 256

    @property
    def requests(self) -> int:
        return sum(self.branches**level for level in range(1, self.height + 1))

    def stage(self, level: int) -> str:
        """The name of `level`, 1 at the root's children."""
        if level == self.height:
            return STAGES[-1]
        return STAGES[min(level, len(STAGES) - 1) - 1]

    def program(self, question: Prompt, codec: Codec) -> Program:
        """One tree over `question`. Returns the number of thoughts that the model finished.

        A thought that failed has no children: there is nothing to go on from.
        """
        finished = yield self._children(question, 1, codec)
        return sum(finished)

    def _children(self, path: Prompt, level: int, codec: Codec) -> tuple[Program, ...]:
        return tuple(self._thought(path, level, k, codec) for k in range(1, self.branches + 1))

    def _thought(self, path: Prompt, level: int, k: int, codec: Codec) -> Program:
        stage = self.stage(level)
        prompt = codec.join(path, codec.encode("\n" + INSTRUCTIONS[stage].format(k=k) + "\n"))
        reply: Reply = yield Call(prompt, self.thought_tokens, stage)
        if not reply.ok:
            return 0
        if level == self.height:
            return 1
        finished = yield self._children(codec.join(prompt, codec.answer(reply)), level + 1, codec)
        return 1 + sum(finished)


# ---- judges

DIMENSIONS = (
    "clarity", "accuracy", "relevance", "depth", "originality", "coherence", "tone", "evidence",
    "structure", "completeness", "fairness", "brevity", "grammar", "usefulness", "consistency", "style",
)  # fmt: skip
"""What articles are judged by; a program with more dimensions starts over with a number behind the name."""


@dataclass(frozen=True, slots=True)
class Judge:
    """LLM as a judge: branch, solve, merge (Saha et al. 2023; DLPM §7.1).

    One article is branched into dimensions; each is solved, a judgement of the article on that dimension, all side by
    side and with the article as their common prefix; then one call merges the judgements into a verdict. The
    dimensions are given, not asked of the model, as in DLPM's set-up, so that the number of requests does not depend
    on what a model answers.
    """

    dimensions: int = 2
    judgement_tokens: int = 256
    """Output tokens of each request, the merge included."""

    @property
    def requests(self) -> int:
        return self.dimensions + 1

    @property
    def names(self) -> list[str]:
        """Of the dimensions."""
        rounds = [divmod(k, len(DIMENSIONS)) for k in range(self.dimensions)]
        return [DIMENSIONS[place] + (f" {turn + 1}" if turn else "") for turn, place in rounds]

    def program(self, article: Prompt, codec: Codec) -> Program:
        """Judge one article. Returns the verdict's text, None where no judgement or no verdict was had.

        A dimension that failed is left out of the merge.
        """
        names = self.names
        replies: tuple[Reply, ...] = yield tuple(
            Call(codec.join(article, codec.encode(f"\nJudge the {name}.\n")), self.judgement_tokens, "solve")
            for name in names
        )
        judgements = [
            codec.join(codec.encode(f"\nOn {name}: "), codec.answer(reply))
            for name, reply in zip(names, replies, strict=True)
            if reply.ok
        ]
        if not judgements:
            return None
        merge = codec.join(article, *judgements, codec.encode("\nMerge the judgements into a verdict.\n"))
        verdict: Reply = yield Call(merge, self.judgement_tokens, "merge")
        return verdict.text if verdict.ok else None


# ---- questions about documents


@dataclass(frozen=True, slots=True)
class DocumentQa:
    """Several questions about one document, side by side (DLPM §6.1, over LooGLE, with 8 to a document).

    The document is their common prefix, and answers are short: 21,449 and 15 tokens on average (DLPM Table 2), so
    nearly all the work is the document's prefill, once where it stays cached.
    """

    questions: int = 8
    answer_tokens: int = 15

    @property
    def requests(self) -> int:
        return self.questions

    def program(self, document: Prompt, questions: Sequence[Prompt], codec: Codec) -> Program:
        """Ask about `document`. Returns how many questions were answered."""
        assert len(questions) == self.questions, "the questions are as many as the shape says"
        replies: tuple[Reply, ...] = yield tuple(
            Call(codec.join(document, question), self.answer_tokens, "question") for question in questions
        )
        return sum(reply.ok for reply in replies)
