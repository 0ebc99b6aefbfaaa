"""Programs: what a client's application asks of a model. Pure generators; drivers run them."""

from workloads.programs.call import Call, Outcome, Program, Prompt, Reply, Step
from workloads.programs.chat import Chat, Turn
from workloads.programs.codec import Codec, PackedCodec, TextCodec, TokenCodec
from workloads.programs.document_qa import DocumentQa
from workloads.programs.execution import Execution, Ready
from workloads.programs.judge import Judge
from workloads.programs.single import Single
from workloads.programs.tree_of_thought import TreeOfThought

__all__ = [
    "Call",
    "Chat",
    "Codec",
    "DocumentQa",
    "Execution",
    "Judge",
    "Outcome",
    "PackedCodec",
    "Program",
    "Prompt",
    "Ready",
    "Reply",
    "Single",
    "Step",
    "TextCodec",
    "TokenCodec",
    "TreeOfThought",
    "Turn",
]
