"""What has become of each replica of a fleet, and what follows. Pure.

    asked       Ray has been asked for its actor, which has no node yet, or has lost it
    starts      its process runs on a node
    up          it has answered that it is ready; only then, and as long as that, it is listed
    draining    it is listed no more, and finishes what it has
    given up    it ended too often, each time before it was ready, and is not the last of its model

A replica that ends by itself is started again after a wait (`cluster.restart`); its actor ends with it, so that Ray may
place it anew. One whose actor is gone, as with its node, is no early death: Ray starts it again where there is room.
Whoever ends before all were ready once ends the attempt, because a wrong argument would be wrong again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from sglang_fair.cluster.plan import Asked, Worker
from sglang_fair.cluster.restart import Deaths, RestartRule, is_last


@dataclass(frozen=True)
class Place:
    """Where a replica's process is. `life` is another one each time that it is started."""

    worker: Worker
    node: str
    pid: int
    life: str


@dataclass
class State:
    """One replica. Times are the caller's."""

    asked: Asked
    state: str = "asked"
    place: Place | None = None
    up_s: float | None = None
    deaths: Deaths = field(default_factory=Deaths)


class Fleet:
    """The replicas by name, and what to do about those that end."""

    def __init__(self, rule: RestartRule | None = None) -> None:
        self._rule = rule or RestartRule()
        self._states: dict[str, State] = {}
        self.was_up = False
        """Whether all have been ready at some time."""

    def __iter__(self) -> Iterator[State]:
        return iter(self._states.values())

    def __contains__(self, name: object) -> bool:
        return name in self._states

    def __getitem__(self, name: str) -> State:
        return self._states[name]

    def ask(self, asked: Asked) -> None:
        """One more."""
        assert asked.name not in self._states
        self._states[asked.name] = State(asked)

    def starts(self, name: str, place: Place) -> None:
        """Its process has been started."""
        one = self._states[name]
        one.place, one.up_s = place, None
        if one.state != "draining":
            one.state = "starts"

    def is_ready(self, name: str, now_s: float) -> None:
        """It has answered."""
        one = self._states[name]
        one.up_s = now_s
        if one.state != "draining":
            one.state = "up"
        self.was_up = self.was_up or all(one.state == "up" for one in self)

    def ended(self, name: str, now_s: float) -> float | None:
        """Its process has ended by itself: the seconds to wait before it is started again. None: never, it is given
        up."""
        one = self._states[name]
        served_s = 0.0 if one.up_s is None else now_s - one.up_s
        one.deaths = self._rule.after(one.deaths, served_s, is_replica=True)
        others = [each.asked.all_models for each in self if each is not one and each.state != "given up"]
        last = is_last(one.asked.all_models, others)
        delay_s = None if not self.was_up else self._rule.delay_s(one.deaths, is_last=last)
        self.lost(name)
        if delay_s is None:
            one.state = "given up"
        return delay_s

    def lost(self, name: str) -> None:
        """Its actor is gone, or about to go. Ray starts it again."""
        one = self._states[name]
        one.place = one.up_s = None
        if one.state != "draining":
            one.state = "asked"

    def drain(self, name: str) -> None:
        """It is to finish."""
        self._states[name].state = "draining"

    def stays(self, name: str) -> None:
        """It is not to finish after all."""
        one = self._states[name]
        one.state = "asked" if one.place is None else "starts" if one.up_s is None else "up"

    def forget(self, name: str) -> None:
        """It is gone for good."""
        self._states.pop(name, None)

    def listed(self) -> list[Worker]:
        """Those that may get requests."""
        return [one.place.worker for one in self if one.state == "up" and one.place is not None]

    def is_lost(self) -> bool:
        """Whether nothing can be served any more, or the first start has failed."""
        given_up = [one.state == "given up" for one in self]
        return bool(given_up) and (all(given_up) or (any(given_up) and not self.was_up))
