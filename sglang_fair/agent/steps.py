"""In which order an agent exchanges a replica's model, and what it does when something fails. Pure.

There is a goal, the model that the replica is to have. Each look at the replica says how far it is from that, and the
steps that follow are taken one by one; each is a `Do`, and what came of it is told by `did`:

    the replica            what follows
    serves the goal        nothing: it is reached
    serves another one     check (the weights are there and fit), empties (the gate is shut), and look again
    empties, holds some    look again: what is inside finishes. One left queued would go on under the wrong weights
    empties                loads (the weights are nobody's from here on), pause, load, flush, resume, probe, serves
    empties, has the goal  resume, serves: nothing was changed
    loads                  as after `empties`: whoever began this has not finished it
    is another process     it has its first model: the order has failed

An order makes its model the goal. If a step from `loads` on fails, the old model is the goal, then the ordered one
again, and so on until one is loaded: nobody is let in meanwhile. What the replica is like is asked, not remembered, so
an agent that was killed is followed by one that goes on where the replica is: a gate that was shut is opened again,
weights that are nobody's are loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_fair.common.swapping import Seen

Step = Literal["look", "check", "empties", "loads", "pause", "load", "flush", "resume", "probe", "serves"]

LOADING: tuple[Step, ...] = ("loads", "pause", "load", "flush", "resume", "probe", "serves")

EMPTY_S = 120.0
"""Longest wait for requests inside. The router knows of none by then; others came past it."""

LOOK_S, EMPTIES_S = 1.0, 0.02
"""Between two looks at the replica: usually, and while it empties."""

RETRY_S, LONGEST_RETRY_S = 0.5, 30.0
"""Before something is loaded again; twice as long each time."""


@dataclass(frozen=True)
class Do:
    """One thing to do, after a wait of `after_s`. `model` is what it is about."""

    step: Step
    model: str = ""
    after_s: float = 0.0


@dataclass(frozen=True)
class Ended:
    """An order is over. `error`: why it failed; "": it did not."""

    number: int
    model: str
    error: str
    shut_s: float
    """From when the gate was shut until it opened."""


class Steps:
    """What one agent does next. `now_s` is of a clock that never goes back."""

    def __init__(self, models: Sequence[str]) -> None:
        """`models` are those that the replica can load."""
        self._models = tuple(models)
        self._seen: Seen | None = None
        self._goal = ""
        self._plan: list[Do] = []
        self._number = self._done = 0
        self._ordered = self._before = ""
        """What was ordered, and what was loaded then."""
        self._fault = self._error = ""
        """Why the order under way is being undone, and why the last one failed."""
        self._failures = 0
        """Of loading, since something was last loaded."""
        self._since_s = 0.0
        """When the goal was set."""
        self._shut_s = 0.0
        self.ended: list[Ended] = []
        """Orders that are over, for whoever takes them from here."""

    # -- what is known

    @property
    def loaded(self) -> str:
        """What the replica serves; "": nothing, or that is not known."""
        is_settled = self._seen is not None and self._seen.state == "serves" and not self._goal
        return self._seen.loaded if is_settled and self._seen is not None else ""

    @property
    def done(self) -> int:
        """The last order that is over."""
        return self._done

    @property
    def error(self) -> str:
        """Why that one failed; "": it did not."""
        return self._error

    @property
    def busy(self) -> int:
        """The order that is carried out, 0: none."""
        return self._number

    @property
    def ordered(self) -> str:
        """What that is to load."""
        return self._ordered if self._number else ""

    # -- what happens

    def order(self, number: int, model: str, now_s: float) -> None:
        """The router says what to load. While something is under way, and if it is over already, that changes
        nothing: it is said again."""
        if number <= self._done or self._goal or self._seen is None:
            return
        self._number, self._ordered, self._before = number, model, self._seen.loaded
        self._fault = ""
        if model not in self._models:
            self._shut_s = now_s
            self._end(f"there is no model {model[:100]!r} here", now_s)
            return
        self._aim(model, now_s)
        self._decide(self._seen, now_s)

    def next(self) -> Do:
        """What to do now."""
        if self._plan:
            return self._plan[0]
        return Do("look", self._goal, 0.0 if self._seen is None else LOOK_S)

    def saw(self, seen: Seen | None, now_s: float) -> None:
        """The replica says how it is; None: it does not answer."""
        if seen is None:  # what it was it may still be; if it has died, its successor says so
            self._plan = [Do("look", self._goal, LOOK_S)]
            return
        before, self._seen = self._seen, seen
        self._plan = []
        if before is not None and before.run != seen.run:
            self._goal, self._failures = "", 0
            if self._number:
                self._end("the replica was restarted", now_s)
        self._decide(seen, now_s)

    def did(self, do: Do, error: str, now_s: float, *, is_gone: bool = False) -> None:
        """A step other than `look` was done, or failed because of `error`; `is_gone`: the replica did not answer, and
        is looked at before anything else."""
        if not self._plan or self._plan[0].step != do.step:
            return
        if not error:
            self._plan.pop(0)
            if do.step == "empties" and self._number and not self._fault:
                self._shut_s = now_s
            if do.step == "serves":
                self._plan = [Do("look", do.model)]
            return
        if do.step == "check":
            self._give_up(error, now_s)
        elif do.step in LOADING and do.step != "serves":
            self._failures += 1
            self._fault = self._fault or error
            self._aim(self._other(do.model), now_s)
        self._plan = [Do("look", self._goal, RETRY_S if is_gone or do.step == "serves" else 0.0)]

    # -- inside

    def _aim(self, goal: str, now_s: float) -> None:
        self._goal, self._since_s = goal, now_s

    def _other(self, model: str) -> str:
        """What to load where `model` could not be."""
        if not self._before:
            return self._models[(self._models.index(model) + 1) % len(self._models)]
        return self._before if model != self._before else self._ordered or model

    def _give_up(self, error: str, now_s: float) -> None:
        """Nothing has been changed, and nothing is going to be."""
        self._fault = error
        self._aim(self._before, now_s)

    def _decide(self, seen: Seen, now_s: float) -> None:
        """What follows from how the replica is."""
        if not self._goal and seen.state != "serves":
            found = seen.loaded or seen.target
            self._before = ""
            self._aim(found if found in self._models else self._models[0], now_s)
        goal = self._goal
        if not goal:
            return
        if seen.state == "serves" and seen.loaded == goal:
            self._reached(now_s)
        elif seen.state == "serves":
            self._plan = [Do("check", goal), Do("empties", goal), Do("look", goal)]
        elif seen.state == "empties" and seen.loaded == goal:
            self._plan = [Do("resume", goal), Do("serves", goal)]
        elif seen.state == "empties" and seen.in_flight:
            if now_s - self._since_s > EMPTY_S:
                self._give_up(f"{seen.in_flight} requests still ran after {EMPTY_S:g} s", now_s)
                self._decide(seen, now_s)
            else:
                self._plan = [Do("look", goal, EMPTIES_S)]
        else:
            steps = [Do(step, goal) for step in LOADING]
            self._plan = [Do(LOADING[0], goal, self._pause_s()), *steps[1:]]

    def _pause_s(self) -> float:
        """Before another attempt at loading. The first two, of the model that was ordered and of the old one, come at
        once."""
        if self._failures < 2:
            return 0.0
        return min(LONGEST_RETRY_S, RETRY_S * 2.0 ** min(self._failures - 2, 30))

    def _reached(self, now_s: float) -> None:
        self._goal, self._failures = "", 0
        if self._number:
            self._end(
                "" if self._seen is not None and self._seen.loaded == self._ordered else self._fault, now_s
            )

    def _end(self, error: str, now_s: float) -> None:
        self.ended.append(Ended(self._number, self._ordered, error, max(0.0, now_s - self._shut_s)))
        self._done, self._number, self._error = self._number, 0, error
        self._ordered = self._fault = self._before = ""
