"""In which order an agent exchanges a replica's model, and what it does when something fails. Pure.

The steps come one by one from a generator, which reads as the order in which they are taken; what came of each is its
`Answer`. There is a goal, the model that the replica is to have, and each look says how far it is from that:

    serves another one     check (the weights are there and fit), empties (the gate is shut)
    empties, holds some    wait: what is inside finishes. One left queued would go on under the wrong weights
    empties                loads (the weights are no model's from here on), load, probe, serves
    empties, has the goal  serves: nothing was changed
    loads                  as after `empties`: whatever began this has not finished it
    is another process     it has its first model: the order has failed

If a step from `loads` on fails, the old model is the goal, then the ordered one again, and so on until one is loaded:
no request is let in meanwhile. What the replica is like is asked, not remembered, so an agent that was killed is
followed by one that goes on where the replica is.
"""

import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sglang_fair.common.swapping import Seen

log = logging.getLogger("agent")

Step = Literal["look", "check", "empties", "loads", "load", "probe", "serves"]

LOADING: tuple[Step, ...] = ("loads", "load", "probe", "serves")

EMPTY_S = 120.0
"""Longest wait for requests inside. The router knows of none by then; others came past it."""
LOOK_S, EMPTIES_S = 1.0, 0.02
"""Between two looks at the replica: usually, and while it empties."""
RETRY_S, LONGEST_RETRY_S = 0.5, 30.0
"""Before something is loaded again; twice as long each time."""
LEARNT = 0.3
"""Weight of the latest swap in what is expected of the next."""
KEPT_FREE = 0.25
"""Part of the memory that is available in which no model is read ahead."""


@dataclass(frozen=True)
class Do:
    """One thing to do, after a wait of `after_s`. `model` is what it is about."""

    step: Step
    model: str = ""
    after_s: float = 0.0


class Answer(NamedTuple):
    """What came of a step: how the replica is, after a look; why the step failed, and whether it did not answer."""

    seen: Seen | None = None
    error: str = ""
    is_gone: bool = False


_Take = Generator[Do, Answer, Seen]


class Steps:
    """What one agent does next. `now_s` is of a clock that never goes back."""

    def __init__(self, swap_s: Mapping[str, float]) -> None:
        """`swap_s`: the models that the replica can load, each with about how many seconds that takes."""
        self._models, self.swap_s = tuple(swap_s), dict(swap_s)
        self.loaded = ""
        """What the replica serves; "": nothing, or that is not known."""
        self.busy = self.done = 0
        """The order that is carried out, 0: none; and the last one that is over."""
        self.ordered = ""
        """What the order under way is to load."""
        self.error = ""
        """Why the last order failed; "": it did not."""
        self._now_s = self._shut_s = 0.0
        self._fault = ""
        """Why the order under way is being undone."""
        self._steps = self._serve()
        self._do = next(self._steps)

    def next(self) -> Do:
        """What to do now; the same object until its answer, or an order, has come."""
        return self._do

    def answer(self, answer: Answer, now_s: float) -> None:
        """What came of `next`."""
        self._now_s = now_s
        self._do = self._steps.send(answer)

    def order(self, number: int, model: str, now_s: float) -> None:
        """The router says what to load. While something is under way, and if it is over already, that changes nothing:
        it is said again."""
        if number > self.done and self.loaded and not self.busy:
            self.busy, self.ordered, self._fault, self._shut_s = number, model, "", now_s
            self.answer(Answer(), now_s)

    # -- inside

    def _serve(self) -> Generator[Do, Answer, None]:
        """For ever. An order ends the wait between two looks."""
        seen = yield from self._look()
        while True:
            before = seen.loaded
            if seen.state != "serves":
                found = seen.loaded or seen.target
                self.loaded = ""
                seen = yield from self._bring(seen, found if found in self._models else self._models[0], "")
            elif self.busy and self.ordered not in self._models:
                self._end(f"there is no model {self.ordered[:100]!r} here")
            elif self.busy:
                self.loaded = ""
                seen = yield from self._bring(seen, self.ordered, before)
                self._end(self._fault)
            else:
                self.loaded = seen.loaded
                answer = yield Do("look", after_s=LOOK_S)
                seen = answer.seen or seen  # if it does not answer, what it was it may still be

    def _look(self, model: str = "", after_s: float = 0.0) -> _Take:
        """Until it answers."""
        while True:
            answer = yield Do("look", model, after_s)
            if answer.seen is not None:
                return answer.seen
            after_s = LOOK_S

    def _bring(self, seen: Seen, goal: str, before: str) -> _Take:
        """Until the replica serves `goal`, or the model that it had `before`; or is another process."""
        run, since_s, failures = seen.run, self._now_s, 0
        while seen.state != "serves" or seen.loaded != goal:
            answer = Answer()
            if seen.state == "serves":
                answer = yield Do("check", goal)
                if answer.error:  # nothing has been changed, and nothing is going to be
                    self._fault = answer.error
                    return seen
                answer = yield Do("empties", goal)
                self._shut_s = self._now_s
            elif seen.state == "empties" and seen.loaded == goal:
                answer = yield Do("serves", goal)
            elif seen.state == "empties" and seen.in_flight:
                if self._now_s - since_s > EMPTY_S:
                    self._fault = f"{seen.in_flight} requests still ran after {EMPTY_S:g} s"
                    goal = seen.loaded
                    continue
                seen = yield from self._look(goal, EMPTIES_S)
                continue
            else:
                pause_s = (
                    min(LONGEST_RETRY_S, RETRY_S * 2.0 ** min(failures - 2, 30)) if failures > 1 else 0.0
                )
                for step in LOADING:
                    answer = yield Do(step, goal, pause_s if step == "loads" else 0.0)
                    if answer.error:
                        break
                if answer.error and step != "serves":
                    failures += 1
                    self._fault = self._fault or answer.error
                    goal = self._other(goal, before)
            seen = yield from self._look(goal, RETRY_S if answer.is_gone else 0.0)
            if seen.run != run:
                self._fault = "the replica was restarted"
                return seen
        if goal == self.ordered:
            self._fault = ""
        return seen

    def _other(self, model: str, before: str) -> str:
        """What to load where `model` could not be."""
        if not before:
            return self._models[(self._models.index(model) + 1) % len(self._models)]
        return before if model != before else self.ordered or model

    def _end(self, error: str) -> None:
        shut_s = max(0.0, self._now_s - self._shut_s)
        if error:
            log.warning("order %d, to load %s, has failed: %s", self.busy, self.ordered, error)
        elif shut_s:
            log.info("%s is loaded after %.2f s", self.ordered, shut_s)
            self.swap_s[self.ordered] += LEARNT * (shut_s - self.swap_s[self.ordered])
        self.done, self.busy, self.error, self.ordered = self.busy, 0, error, ""


def read_ahead(
    ahead: Sequence[str], loaded: str, sizes: Mapping[str, int], available_bytes: int
) -> tuple[str, ...]:
    """Of `ahead`, the models that are needed soonest first, those that fit into the memory that is available. What is
    loaded needs no reading. A model that does not fit ends the list: what comes after it is needed later."""
    room = int(available_bytes * (1 - KEPT_FREE))
    chosen: list[str] = []
    for model in dict.fromkeys(ahead):
        if model == loaded or model not in sizes:
            continue
        if sizes[model] > room:
            break
        room -= sizes[model]
        chosen.append(model)
    return tuple(chosen)
