"""The protocol between a program and whatever runs it.

A program is a generator. It yields a *step* and is resumed with the step's answer:

- a `Call` is one request to the model; its answer is a `Reply`;
- a tuple is a set of calls and programs that run side by side; its answer is the tuple of their answers,
  in the same order, once all have ended. The answer of a program is the value it returns.

So a subtree that should go on by itself is a program inside the tuple: it is resumed as soon as its own
call has ended, whatever its siblings do. Programs hold no clock, no socket and no randomness of their
own: the simulator and the live driver run the same generator.
"""

from collections.abc import Generator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

Prompt: TypeAlias = str | tuple[int, ...] | bytes
"""Text, or token ids of the served model, or token ids packed as little-endian uint32."""


class Outcome(StrEnum):
    """The one way in which a request, or a program, ended."""

    OK = "ok"
    FAILED = "failed"
    """Refused, broken or timed out; the record's `error` says how."""
    CANCELLED = "cancelled"
    """The driver ended the run first."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `stage` names its place in the program, for application-aware policies and for tables."""

    prompt: Prompt
    max_output_tokens: int
    stage: str = ""
    output_tokens: int | None = None
    """Length of the answer, where a modelled engine makes it up. None: as long as it may be."""
    last: bool = False
    """Its answer is the one that the user sees."""
    system_tokens: int = 0
    """Of the prompt, from its beginning: those of the system prompt."""
    after_s: float = 0.0
    """How long the one who asks thinks first: the driver sends the request so many seconds after the step
    that holds it is taken, and latency counts from then."""

    def __post_init__(self) -> None:
        if self.max_output_tokens < 1:
            raise ValueError(f"a call needs at least 1 output token, not {self.max_output_tokens}")
        if self.output_tokens is not None and not 1 <= self.output_tokens <= self.max_output_tokens:
            raise ValueError(
                f"an answer has from 1 to {self.max_output_tokens} tokens, as the call allows, "
                f"not {self.output_tokens}"
            )
        if not 0 <= self.after_s < float("inf"):
            raise ValueError(f"a call is made after 0 s or more, not {self.after_s!r}")
        if not self.prompt:
            raise ValueError("a call needs a prompt that is not empty")


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. `tokens` is empty when the server tells only text, `packed` when it is a real one."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    outcome: Outcome = Outcome.OK
    packed: bytes = b""
    """The tokens as little-endian uint32."""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK


Program: TypeAlias = Generator["Step", Any, Any]
"""Yields steps, receives their answers, returns its own answer."""

Step: TypeAlias = Call | tuple["Call | Program", ...]
