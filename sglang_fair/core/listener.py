"""What happens to the jobs of a replica, for all that follows them: `Admission` notifies its listeners in turn.

The queue and its account, which the engine's charges go through, have each event before the listeners, except `admit`:
that is noted before anything of it is charged.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sglang_fair.core.job import Job


class Listener:
    """Each method is an event; a listener has those that matter to it."""

    def tick(self, now_s: float) -> None:
        """It is `now_s`, by a clock that never goes back."""

    def refused(self, job: Job, reason: str) -> None:
        """`job` may not wait here."""

    def arrive(self, job: Job) -> None:
        """`job` waits."""

    def leave(self, job: Job) -> None:
        """`job`, which waited, was given up."""

    def admit(self, job: Job) -> None:
        """`job` is in the batch that is formed."""

    def cached(self, job: Job) -> None:
        """What the last step computed of the prompt of `job`, which runs, is in the cache."""

    def computed(self, job: Job) -> None:
        """The prompt of `job` is computed: it decodes."""

    def retract(self, job: Job) -> None:
        """`job`, which ran, was taken back and waits again, before all others."""

    def evict(self, job: Job, urgent: Job) -> None:
        """`job`, which ran, was taken back for `urgent`, and waits again as others of its client do."""

    def finish(self, job: Job, outcome: str) -> None:
        """`job`, which ran, has ended."""

    def step(self, duration_s: float, extended: Mapping[str, int], *, decoded: int, requests: int) -> None:
        """A step is over; the arguments are those of `Steps.step`."""

    def end_pass(self, cause: str, turns: Mapping[str, bool]) -> None:
        """A pass is over, and nothing else was admitted because of `cause` (`waits`). `turns`: the clients that have
        become eligible, or are so no more."""


EVENTS = tuple(name for name in vars(Listener) if not name.startswith("_"))


class Listeners:
    """Those of one replica, in turn."""

    def __init__(self, *listeners: Listener) -> None:
        self._have: dict[str, list[Callable[..., None]]] = {event: [] for event in EVENTS}
        for listener in listeners:
            self.add(listener)

    def add(self, listener: Listener) -> None:
        """It comes after those that are there."""
        for event, methods in self._have.items():
            if getattr(type(listener), event) is not getattr(Listener, event):
                methods.append(getattr(listener, event))

    def notify(self, event: str, *arguments: Any, **more: Any) -> None:
        for method in self._have[event]:
            method(*arguments, **more)
