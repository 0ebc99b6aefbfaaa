"""Tree of Thoughts: a question is the root, and every node's thought branches into b further thoughts.

The tree has height 4 (DLPM §7.1, over GSM8K): the root's b children propose, then each level goes on from
its parent's thought: b + b² + b³ + b⁴ requests, 30, 120 and 340 for b = 2, 3, 4. A child's prompt is its
parent's whole path (question and all thoughts so far, as the model wrote them) and an instruction of its
own, so siblings share everything but their last tokens. A child starts when its parent has finished;
subtrees do not wait for each other.
"""

from dataclasses import dataclass

from workloads.programs.call import Call, Program, Prompt, Reply
from workloads.programs.codec import Codec

HEIGHT = 4
STAGES = ("plan", "execute", "reflect", "answer")
"""What the thoughts of each level are for; deeper trees go on reflecting before they answer."""

_INSTRUCTIONS = {
    "plan": "Plan {k}: outline one way to solve this.",
    "execute": "Attempt {k}: carry the plan out.",
    "reflect": "Review {k}: look for a mistake.",
    "answer": "Answer {k}: the result is",
}


@dataclass(frozen=True, slots=True)
class TreeOfThought:
    """The shape of a tree; `program` grows one over a question."""

    branches: int = 2
    height: int = HEIGHT
    thought_tokens: int = 256
    """Output tokens of each request."""

    def __post_init__(self) -> None:
        if self.branches < 1 or self.height < 1:
            raise ValueError(
                f"a tree needs branches and height of at least 1: {self.branches}, {self.height}"
            )

    @property
    def requests(self) -> int:
        """Requests in one whole tree."""
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
        prompt = codec.join(path, codec.encode("\n" + _INSTRUCTIONS[stage].format(k=k) + "\n"))
        reply: Reply = yield Call(prompt, self.thought_tokens, stage)
        if not reply.ok:
            return 0
        if level == self.height:
            return 1
        finished = yield self._children(codec.join(prompt, codec.answer(reply)), level + 1, codec)
        return 1 + sum(finished)
