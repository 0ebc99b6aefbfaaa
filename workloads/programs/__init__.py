"""Programs: what a client's application asks of a model. Pure generators; drivers run them."""

from workloads.programs.call import Call, Execution, Outcome, Program, Prompt, Ready, Reply, Step
from workloads.programs.codec import Codec, PackedCodec, TextCodec, TokenCodec
from workloads.programs.kinds import Chat, DocumentQa, Judge, Single, TreeOfThought, Turn

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
