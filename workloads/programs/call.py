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
from dataclasses import dataclass, field
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


# ---- a program's progress as a state machine: replies in, the calls that may now start out

Ready = tuple[int, Call]
"""A call that may start, with its number in the program."""


@dataclass(slots=True)
class _Frame:
    """A generator that waits for the answers of its last step."""

    program: Program
    parent: "_Frame | None" = None
    place: int = 0
    """Which answer of the parent's step this program's value is."""
    answers: list[Any] = field(default_factory=list)
    missing: int = 0
    alone: bool = False
    """The step was one call, not a tuple: answer with the reply itself."""


class Execution:
    """One run of one program: `start` once, then `reply` once for each call that was handed out.

    Both drivers step programs through this one interpreter, so a simulated run and a live one issue the same calls in
    the same order. Calls are numbered in the order in which they become ready.
    """

    def __init__(self, program: Program) -> None:
        self.calls = 0
        self.outcome: Outcome | None = None
        """None while the program runs; then the worst outcome of its calls."""
        self._worst = Outcome.OK
        self._root = _Frame(program)
        self._waiting: dict[int, tuple[_Frame, int]] = {}

    @property
    def running(self) -> int:
        return len(self._waiting)

    def start(self) -> list[Ready]:
        assert not self.calls, "an execution starts once"
        ready: list[Ready] = []
        self._resume(self._root, None, ready)
        return ready

    def reply(self, number: int, reply: Reply) -> list[Ready]:
        """Call `number` ended so. Returns the calls that may start because of it."""
        frame, place = self._waiting.pop(number)
        if _SEVERITY[reply.outcome] > _SEVERITY[self._worst]:
            self._worst = reply.outcome
        ready: list[Ready] = []
        self._answer(frame, place, reply, ready)
        return ready

    def _answer(self, frame: _Frame, place: int, answer: Any, ready: list[Ready]) -> None:
        frame.answers[place] = answer
        frame.missing -= 1
        if not frame.missing:
            self._resume(frame, frame.answers[0] if frame.alone else tuple(frame.answers), ready)

    def _resume(self, frame: _Frame, answer: Any, ready: list[Ready]) -> None:
        while True:
            try:
                step = frame.program.send(answer)
            except StopIteration as stop:
                return self._finish(frame, stop.value, ready)
            if step:
                return self._issue(frame, step, ready)
            answer = ()

    def _finish(self, frame: _Frame, value: Any, ready: list[Ready]) -> None:
        if frame.parent is None:
            self.outcome = self._worst
        else:
            self._answer(frame.parent, frame.place, value, ready)

    def _issue(self, frame: _Frame, step: Step, ready: list[Ready]) -> None:
        frame.alone = isinstance(step, Call)
        branches = (step,) if isinstance(step, Call) else step
        frame.answers = [None] * len(branches)
        frame.missing = len(branches)
        for place, branch in enumerate(branches):
            if isinstance(branch, Call):
                self._waiting[self.calls] = (frame, place)
                ready.append((self.calls, branch))
                self.calls += 1
            else:
                self._resume(_Frame(branch, frame, place), None, ready)


_SEVERITY = {Outcome.OK: 0, Outcome.FAILED: 1, Outcome.CANCELLED: 2}
