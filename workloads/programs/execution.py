"""A program's progress as a state machine: replies in, the calls that may now start out.

Both drivers step programs through this one interpreter, so a simulated run and a live one issue the same
calls in the same order. Calls are numbered in the order in which they become ready.
"""

from dataclasses import dataclass, field
from typing import Any

from workloads.programs.call import Call, Outcome, Program, Reply, Step

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
    """One run of one program. `start` once, then `reply` once for each call that was handed out."""

    def __init__(self, program: Program) -> None:
        self.calls = 0
        """Calls handed out so far."""
        self.outcome: Outcome | None = None
        """None while the program runs; then the worst outcome of its calls."""
        self._worst = Outcome.OK
        self._root = _Frame(program)
        self._waiting: dict[int, tuple[_Frame, int]] = {}

    @property
    def running(self) -> int:
        """Calls handed out and not yet answered."""
        return len(self._waiting)

    def start(self) -> list[Ready]:
        """The calls that the program begins with."""
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
        """Run `frame` until it waits or returns."""
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
