"""When the planner is asked, which of its answers count, and when it is taken for dead.

It is asked when somebody will be late, at most once in `every_s`, and not again before it has answered. Questions are
numbered; an answer counts if it is to the last one. Who has asked and has no answer after `patience_s` plans by EDF
itself, as often, until an answer comes; it goes on asking, so a planner that is started again is noticed.
"""

from dataclasses import dataclass, field
from typing import Literal

Step = Literal["ask", "edf"]


@dataclass
class Replans:
    """ValueError for times that are not positive."""

    every_s: float = 1.0
    patience_s: float = 10.0

    asked: int = field(default=0, init=False)
    """Questions so far; the number of the last one."""
    answered: int = field(default=0, init=False)
    """The last answer that counted."""
    stale: int = field(default=0, init=False)
    """Answers that did not."""
    _asked_s: float = field(default=float("-inf"), init=False)
    _silent_since_s: float | None = field(default=None, init=False)
    """When the first question without an answer was asked."""
    _edf_s: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        if not (self.every_s > 0 and self.patience_s > 0):
            raise ValueError(f"every_s and patience_s are above 0, not {self.every_s} and {self.patience_s}")

    def due(self, is_late: bool, now_s: float) -> list[Step]:
        """What to do now: "ask" for a plan with the number `asked`, plan by "edf", both or nothing."""
        steps: list[Step] = []
        if not is_late:
            return steps
        waits = self._silent_since_s is not None
        if now_s - self._asked_s >= (self.patience_s if waits else self.every_s):
            self.asked += 1
            self._asked_s = now_s
            if not waits:
                self._silent_since_s = now_s
            steps.append("ask")
        if self.is_dead(now_s) and now_s - self._edf_s >= self.every_s:
            self._edf_s = now_s
            steps.append("edf")
        return steps

    def accept(self, number: int) -> bool:
        """The planner has answered question `number`. Whether that plan counts."""
        if number != self.asked or number == self.answered:
            self.stale += 1
            return False
        self.answered, self._silent_since_s = number, None
        return True

    def restart(self) -> None:
        """Another planner is there, or none: what was asked is not answered any more, and nobody is silent."""
        self._asked_s = self._edf_s = float("-inf")
        self._silent_since_s = None
        self.answered = self.asked

    @property
    def is_silent(self) -> bool:
        """A question has no answer yet."""
        return self._silent_since_s is not None

    def is_dead(self, now_s: float) -> bool:
        """It has not answered for too long."""
        return self._silent_since_s is not None and now_s - self._silent_since_s >= self.patience_s
