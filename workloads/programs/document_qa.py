"""Long-context question answering: several questions about one document (DLPM §6.1, over LooGLE).

The document is the common prefix of all its requests, and answers are short: 21,449 and 15 tokens on
average (DLPM Table 2), so nearly all the work is the document's prefill, once where it stays cached. The
questions do not depend on each other and are asked side by side. LooGLE has 6,448 of them about 776
documents, 8 to a document.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from workloads.programs.call import Call, Program, Prompt, Reply
from workloads.programs.codec import Codec


@dataclass(frozen=True, slots=True)
class DocumentQa:
    """What is asked of each document; `program` asks it of one."""

    questions: int = 8
    answer_tokens: int = 15

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise ValueError(f"a document needs at least 1 question, not {self.questions}")

    @property
    def requests(self) -> int:
        """Requests for one document."""
        return self.questions

    def program(self, document: Prompt, questions: Sequence[Prompt], codec: Codec) -> Program:
        """Ask about `document`. Returns how many questions were answered."""
        assert len(questions) == self.questions, "the questions are as many as the shape says"
        replies: tuple[Reply, ...] = yield tuple(
            Call(codec.join(document, question), self.answer_tokens, "question") for question in questions
        )
        return sum(reply.ok for reply in replies)
