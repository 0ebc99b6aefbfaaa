"""What a swap means for the requests: the router's core asks here after everything that happens. Pure.

`router.swaps` knows in which state each worker is. This sees to it that the workers' table follows, that the placement
is asked which models it wants, and that what is in flight ends before a worker loads:

    want        a worker that serves, and whose queue needs another model, gets nothing new
    cut         what is in flight there for longer than it may is given back, if another worker can go on with it
    emptied     with the last one the agent gets its order, and the worker serves nothing
    told        it serves what its agent says, with an empty cache
"""

from collections.abc import Callable, Iterable
from math import inf

import msgspec

from router.events import Action, Agent, Cut, Exchange
from router.placement.contract import Placement, Swapping
from router.swaps import Swaps
from router.workers import Flight, Worker, WorkerTable

ASK_S = 0.05
"""Between two questions about a worker that is at work: each looks at its queue."""

Rehome = Callable[[Worker, str, float], None]
"""Has a worker serve another model; "": none."""


class ModelChanges:
    """The swaps of one router."""

    def __init__(
        self,
        swaps: Swaps,
        workers: WorkerTable,
        placement: Placement,
        rehome: Rehome,
        flights: Callable[[], Iterable[Flight]],
    ) -> None:
        self.swaps = swaps
        self._workers = workers
        self._placement = placement if isinstance(placement, Swapping) else None
        self._rehome = rehome
        self._flights = flights
        self._told: dict[str, dict[str, float]] = {}
        """By worker, what its placement was told that it can load."""
        self._asked_s: dict[str, float] = {}
        """By worker, when the placement was last asked what it wants there."""
        self._busy: list[Worker] = []
        self._quiet_until_s = -inf
        """Until then nothing is asked while these, which are all that may be asked about, are at work."""

    def may_come(self, model: str, exclude: Iterable[str]) -> bool:
        """Whether a worker, other than `exclude`, may be made to load `model`."""
        return self._placement is not None and any(
            model in self.swaps.can_load(worker.name) and not worker.draining
            for worker in self._workers
            if worker.name not in exclude and not (worker.sick and self.swaps.takes(worker.name))
        )

    def told(self, said: Agent, now_s: float, peer: bytes) -> list[Action]:
        """An agent has said what its worker has; the answer to it. Of a worker that is not up nothing is kept, and what
        it cannot load it does not have."""
        worker = self._workers.get(said.worker)
        if worker is None:
            complaint = f"there is no worker {said.worker[:100]!r}"
            return [(peer, Exchange(said.id, said.worker, complaint=complaint))]
        complaint = ""
        if said.loaded and said.loaded not in (said.swap_s or worker.models):
            complaint = f"{said.loaded[:100]!r} is none of the models that worker {said.worker} can load"
            said = msgspec.structs.replace(said, loaded="")
        self.swaps.told(said, now_s, peer)
        self.align(said.worker, now_s)
        ahead = () if self._placement is None else self._placement.next_models(said.worker)
        order = self.swaps.order(said.worker, said.id, ahead)
        return [(peer, msgspec.structs.replace(order, complaint=complaint) if complaint else order)]

    def ask(self, name: str, model: str, now_s: float) -> str | None:
        """As `Swaps.ask`, of a worker that is up."""
        if self._workers.get(name) is None:
            return f"there is no worker {name[:100]!r}"
        reason = self.swaps.ask(name, model, now_s)
        self.align(name, now_s)
        return reason

    def gone(self, name: str, now_s: float) -> None:
        """A worker is gone."""
        self._told.pop(name, None)
        self._asked_s.pop(name, None)
        self.swaps.gone(name, now_s)

    def peer_gone(self, peer: bytes, now_s: float) -> None:
        """An agent, or somebody else, is gone."""
        names = [worker.name for worker in self._workers if self.swaps.peer(worker.name) == peer]
        self.swaps.peer_gone(peer, now_s)
        for name in names:
            self.align(name, now_s)
        if names:
            self._workers.look_again()

    def after(self, now_s: float) -> list[Action]:
        """What is to be sent after something has happened. Costs next to nothing where there are no agents."""
        if self.swaps.is_empty:
            return []
        if self._placement is not None:
            self._ask_placement(self._placement, now_s)
        actions: list[Action] = []
        for name in self.swaps.emptying():
            worker = self._workers.get(name)
            if worker is None:
                continue
            if worker.in_flight:
                actions += self._cuts(worker, now_s)
            elif self.swaps.emptied(name, now_s):
                self.align(name, now_s)
                actions += self._order(name)
        return actions

    def _ask_placement(self, placement: Swapping, now_s: float) -> None:
        """Which models it wants; of a worker that is at work not more often than every `ASK_S`."""
        if now_s < self._quiet_until_s and all(worker.in_flight for worker in self._busy):
            return
        known = [worker for name in self.swaps.serving() if (worker := self._workers.get(name)) is not None]
        self._busy, self._quiet_until_s = known, inf
        for worker in known:
            name = worker.name
            next_s = self._asked_s.get(name, -inf) + ASK_S
            if worker.in_flight and now_s < next_s:
                self._quiet_until_s = min(self._quiet_until_s, next_s)
                continue
            self._asked_s[name] = now_s
            self._quiet_until_s = min(self._quiet_until_s, now_s + ASK_S)
            wanted = placement.wanted(name)
            if wanted is not None and self.swaps.want(name, wanted, now_s):
                self.align(name, now_s)

    def align(self, name: str, now_s: float) -> None:
        """Makes the table say of a worker what is known of its model."""
        worker = self._workers.get(name)
        if worker is None or not self.swaps.knows(name):
            return
        self._quiet_until_s = -inf
        models = tuple(self.swaps.can_load(name)) or worker.models
        served = self.swaps.served(name)
        self._workers.set_models(worker, models, is_swapping=not self.swaps.takes(name))
        can_load = dict(self.swaps.can_load(name))
        if self._placement is not None and self._told.get(name, {}) != can_load:
            self._told[name] = can_load
            self._placement.can_load(name, can_load, now_s)
        # One that has not said its models was taken to have the only one; it has none if its agent serves none.
        has_none = not served and bool(models) and worker.pool is not self._workers.nobody
        if worker.loaded != served or has_none:
            self._rehome(worker, served, now_s)

    def _order(self, name: str) -> list[Action]:
        peer = self.swaps.peer(name)
        order: Exchange = self.swaps.order(name)
        return [] if peer is None else [(peer, order)]

    def _cuts(self, worker: Worker, now_s: float) -> list[Action]:
        if not self.swaps.is_impatient(worker.name, now_s):
            return []
        actions: list[Action] = []
        for flight in self._flights():
            if flight.worker is worker and not flight.is_cut and self._may_go_on(flight):
                flight.is_cut = True
                actions.append((flight.peer, Cut(flight.request.id)))
        return actions

    def _may_go_on(self, flight: Flight) -> bool:
        """Whether there is somebody who could serve the rest of it."""
        others = flight.worker.pool.taking
        return bool(others) or self.may_come(flight.request.model, ())
