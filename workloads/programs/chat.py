"""A conversation: each turn's prompt is all that was said so far, as the model wrote it, and new words.

So a turn's prefix is its predecessor's prompt and answer. Between an answer and the next words their writer
thinks. Lengths are those of DLPM's Table 2 for Chatbot Arena, 56 tokens of prefix and 142 of answer on
average: the first words are 56 tokens, and with geometrically many turns, 1.28 on average, a request also
shares 56 tokens with the turns before it, so both readings of the table hold. The rest is assumed: words are
log-normal, answers Gamma with shape 1.5, thinking is exponential.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from random import Random

from workloads.programs.call import Call, Program, Prompt, Reply
from workloads.programs.codec import Codec
from workloads.programs.prose import Passages, draw

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
    """A kind of conversation: the averages of its turns."""

    turns: float = 1.28
    words_tokens: float = 56.0
    answer_tokens: float = 142.0
    think_s: float = 20.0

    def __post_init__(self) -> None:
        if not 1 <= self.turns < float("inf") or not 0 <= self.think_s < float("inf"):
            raise ValueError(
                f"a chat has 1 turn or more and thinks for 0 s or more: {self.turns!r}, {self.think_s!r}"
            )

    def draw(self, rng: Random, codec: Codec) -> tuple[Turn, ...]:
        """One conversation of this kind."""
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
        return Turn(draw(Passages(), rng, codec, _within(words)), _within(answer), think_s)


def _within(tokens: float) -> int:
    return min(max(1, round(tokens)), LONGEST_TOKENS)
