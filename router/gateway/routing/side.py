"""What a gateway tells one router, and what it has heard from it: the part of `fleet` that each router has of its own.

A router that was restarted is told of the workers that it does not know and that answer this gateway, of the
interactions under way, and of limits that an operator has set. One that takes clients over from another is told of
their interactions, too.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from router.events import (
    MOST_BEGUN,
    Begun,
    Difference,
    Event,
    Posted,
    Table,
    WorkerDrain,
    WorkerHealth,
    Workers,
    WorkerUp,
)
from sglang_fair.core.interactions import Interaction

if TYPE_CHECKING:
    from router.gateway.routing.fleet import Fleet


class Side:
    """State and decisions, no I/O."""

    def __init__(self, router: str, fleet: "Fleet") -> None:
        """`router` is its address."""
        self.router = router
        self.workers: dict[str, WorkerUp] = {}
        """Those that it has named, and those that it was told of since."""
        self.draining: frozenset[str] = frozenset()
        self.has_named = False
        """It has named workers since it was lost last."""
        self.limits: Posted | None = None
        """Limits that an operator has set, as it said last."""
        self.ordered: dict[str, WorkerUp | WorkerDrain] = {}
        """What an operator has asked for while it did not answer, by worker."""
        self._fleet = fleet
        self._run = ""
        self._told_limits: Posted | None = None
        """In this run of it."""
        self._sick: frozenset[str] = frozenset()

    # -- whether it answers

    def answers(self, now_s: float) -> bool:
        """It has answered; whether clients go to it that went to another one, or to none."""
        return self._fleet.routers.answers(self.router, now_s)

    def lost(self) -> bool:
        """It cannot be reached; whether clients leave it by that."""
        if self.has_named:
            self.has_named = False
            self._fleet.workers_changed()
        return self._fleet.routers.lost(self.router)

    def plans(self, workers: Workers) -> bool:
        """It says whether it orders the replicas' queues; whether clients move by that."""
        return self._fleet.routers.says(self.router, plans=workers.plans)

    @property
    def is_refused(self) -> bool:
        """Another router orders the same queues, so it is not asked."""
        return self._fleet.routers.is_refused(self.router)

    def takeover(self) -> list[Event]:
        """Of the clients that are now this router's: the interactions under way, to be told to it."""
        mine = [row for row in self._fleet.begun() if self._fleet.routers.first(row[0].client) == self.router]
        return self._remembered(mine)

    # -- comparing

    def table(self, name: str) -> Table:
        """All requests that it should know about."""
        return Table(name, tuple(self._fleet.requests_of(self.router)))

    def settle(self, difference: Difference) -> list[Event]:
        running = [self._fleet.taken_over(name, self.router) for name in difference.missing]
        ended = [self._fleet.ended(name, self.router) for name in difference.unsettled]
        return [event for event in (*running, *ended) if event is not None]

    def learn(self, workers: Workers) -> list[Event]:
        """Takes over its list of workers. Returns what it must be told in return."""
        fleet = self._fleet
        is_restarted = bool(self._run) and workers.router != self._run
        told: list[Event] = self._limits_for(workers, is_restarted)
        known = {up.worker: up for up in workers.workers}
        drained = set(workers.draining)
        if is_restarted:
            lost = [up for name, up in fleet.workers.items() if name not in known and fleet.is_well(name)]
            for up in lost:
                told.append(up)
                known[up.worker] = up
                if up.worker in fleet.draining:
                    told.append(WorkerDrain(up.worker))
                    drained.add(up.worker)
            told += self._remembered(fleet.begun())
        for event in self.ordered.values():
            told.append(event)
            if isinstance(event, WorkerUp):
                known[event.worker] = event
            else:
                drained.add(event.worker)
        self.ordered.clear()
        self._run = workers.router
        self.workers, self.draining, self.has_named = known, frozenset(drained), True
        self._sick = frozenset(workers.sick)
        fleet.workers_changed()
        return told + self.health()

    def health(self) -> list[Event]:
        return [
            WorkerHealth(name, self._fleet.is_well(name))
            for name in self.workers
            if self._fleet.is_well(name) is (name in self._sick)
        ]

    def _limits_for(self, workers: Workers, is_restarted: bool) -> list[Event]:
        """Limits that it lacks, to be told before all else, so that all that it answers knows of them. Each once in a
        run of it, because one that was started with other rules keeps its own."""
        latest = self._fleet.limits()
        if is_restarted:
            self._told_limits = None
        if workers.router == self._run or workers.limits is not None:
            self.limits = workers.limits
        if latest is None or latest in (workers.limits, self._told_limits):
            return []
        if workers.limits is not None and workers.limits.at_s >= latest.at_s:
            return []
        self._told_limits = latest
        return [latest]

    def _remembered(self, begun: Iterable[tuple[Interaction, int]]) -> list[Event]:
        rows = [((*name, calls), self._fleet.due(name)) for name, calls in begun]
        parts = [rows[at : at + MOST_BEGUN] for at in range(0, len(rows), MOST_BEGUN)]
        return [Begun(tuple(row for row, _ in part), tuple(due for _, due in part)) for part in parts]
