"""Programs: what a client's application asks of a model. Pure generators; drivers run them."""

from workloads.programs.call import Call, Outcome, Program, Prompt, Reply, Step
from workloads.programs.codec import Codec, PackedCodec, TextCodec, TokenCodec
from workloads.programs.execution import Execution, Ready
from workloads.programs.judge import Judge
from workloads.programs.tree_of_thought import TreeOfThought

__all__ = [
    "Call",
    "Codec",
    "Execution",
    "Judge",
    "Outcome",
    "PackedCodec",
    "Program",
    "Prompt",
    "Ready",
    "Reply",
    "Step",
    "TextCodec",
    "TokenCodec",
    "TreeOfThought",
]
