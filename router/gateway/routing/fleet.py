"""What a gateway knows by itself: the workers, its own requests in flight there, and how its latest ones ended.

Routers own this knowledge while they answer. The gateway's copy serves while none does, and when one is back: then the
two tables are compared, and each side tells the other what it lacks (`Side`). A router that was restarted is told of
the workers that it does not know and that answer this gateway, of the interactions under way, and of limits that an
operator has set. One that takes clients over from another is told of their interactions, too. Each request in flight is
counted by one router: the one that placed it, and when that is lost, the one that decides for its client from then on,
which takes it over. Messages may be lost or come twice; each names a request, so a repeated one changes nothing.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec

from router.events import (
    MOST_BEGUN,
    Arrive,
    Begun,
    Difference,
    Done,
    Due,
    Event,
    Place,
    Posted,
    Running,
    Table,
    WorkerDrain,
    WorkerHealth,
    Workers,
    WorkerUp,
)
from router.gateway.routing.routers import Routers, choose
from router.models import meant
from sglang_fair.core.interactions import Interaction

MAX_ENDED = 8192
"""How many ended requests are remembered, in case a router missed one. Older ones are reported as aborted."""

ONE = ("router",)


class Side:
    """What the gateway tells one router, and what it has heard from it."""

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
        self._sent_limits: Posted | None = None
        """In this run of it."""
        self._sick: frozenset[str] = frozenset()

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
        events: list[Event] = self._limits_for(workers, is_restarted)
        known = {up.worker: up for up in workers.workers}
        drained = set(workers.draining)
        if is_restarted:
            lost = [up for name, up in fleet.workers.items() if name not in known and fleet.is_well(name)]
            for up in lost:
                events.append(up)
                known[up.worker] = up
                if up.worker in fleet.draining:
                    events.append(WorkerDrain(up.worker))
                    drained.add(up.worker)
            events += self._remembered(fleet.begun())
        for event in self.ordered.values():
            events.append(event)
            if isinstance(event, WorkerUp):
                known[event.worker] = event
            else:
                drained.add(event.worker)
        self.ordered.clear()
        self._run = workers.router
        self.workers, self.draining, self.has_named = known, frozenset(drained), True
        self._sick = frozenset(workers.sick)
        fleet.workers_changed()
        return events + self.health()

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
            self._sent_limits = None
        if workers.router == self._run or workers.limits is not None:
            self.limits = workers.limits
        if latest is None or latest in (workers.limits, self._sent_limits):
            return []
        if workers.limits is not None and workers.limits.at_s >= latest.at_s:
            return []
        self._sent_limits = latest
        return [latest]

    def _remembered(self, begun: Iterable[tuple[Interaction, int]]) -> list[Event]:
        rows = [(*name, calls, self._fleet.due(name)) for name, calls in begun]
        return [Begun(tuple(rows[at : at + MOST_BEGUN])) for at in range(0, len(rows), MOST_BEGUN)]


class Fleet:
    """State and decisions, no I/O: `link` sends the events that the methods return."""

    def __init__(
        self,
        is_well: Callable[[str], bool],
        begun: Callable[[], Iterable[tuple[Interaction, int]]] = tuple,
        due: Callable[[Interaction], Due | None] = lambda name: None,
        routers: Sequence[str] = ONE,
    ) -> None:
        """`is_well` says whether a worker answers this gateway, `begun` which interactions are under way, and how many
        calls of each were accepted, `due` by when further ones are due. `routers` are the addresses of the routers."""
        self.workers: dict[str, WorkerUp] = {}
        """Those that routers which answer have named; while none answers, as they did last."""
        self.draining: frozenset[str] = frozenset()
        self.in_flight: Counter[str] = Counter()
        self.routers = Routers(routers)
        self.is_well = is_well
        self.begun = begun
        self.due = due
        self._asked: dict[str, tuple[Arrive, str]] = {}
        """Questions under way, each with the router that is asked."""
        self._running: dict[str, Running] = {}
        self._placed_by: dict[str, str] = {}
        """The router that counts each request which runs. Those that are not in it were placed without any."""
        self._ended: OrderedDict[str, Done] = OrderedDict()
        self._sides = {name: Side(name, self) for name in routers}

    def side(self, router: str = ONE[0]) -> Side:
        """What is told to `router`, and heard from it."""
        return self._sides[router]

    # -- requests

    def ask(self, arrive: Arrive, router: str) -> None:
        """`router` is about to be asked where this request goes."""
        self._asked[arrive.id] = arrive, router

    def begin(self, arrive: Arrive, place: Place, router: str | None) -> None:
        """A request goes to a worker, as `router` has said; None: the gateway has placed it."""
        self._asked.pop(arrive.id, None)
        self._running[arrive.id] = Running(
            arrive.id,
            arrive.client,
            arrive.tokens,
            arrive.max_output_tokens,
            arrive.namespace,
            arrive.weight,
            arrive.weight_version,
            arrive.app,
            arrive.interaction,
            arrive.last,
            (place.call or arrive.begun + 1) if arrive.interaction else 0,
            place.worker,
        )
        if router is not None:
            self._placed_by[arrive.id] = router
        self.in_flight[place.worker] += 1

    def placed_itself(self, request: str) -> bool:
        """Whether it is in flight and no router knows of it."""
        return request in self._running and request not in self._placed_by

    def teller(self, request: str) -> str | None:
        """The router that counts it; None if it is not in flight, or none does."""
        return self._placed_by.get(request)

    def end(self, done: Done) -> str | None:
        """A request has ended, or will not be sent. The router that must be told, if any."""
        _, router = self._asked.pop(done.id, (None, None))
        running = self._running.pop(done.id, None)
        if running is not None:
            self.in_flight[running.worker] -= 1
            if not self.in_flight[running.worker]:
                del self.in_flight[running.worker]
            router = self._placed_by.pop(done.id, None)
            if router is None:
                return None
        self._ended[done.id] = done
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        return router

    def moved(self, request: str, worker: str) -> Running | None:
        """A request in flight turns out to be at another worker than it was sent to: what the router that counts it is
        told then. None: it is not in flight, or at no worker that is known."""
        running = self._running.get(request)
        if running is None or worker not in self.workers:
            return None
        self.in_flight[running.worker] -= 1
        if not self.in_flight[running.worker]:
            del self.in_flight[running.worker]
        self.in_flight[worker] += 1
        found = self._running[request] = msgspec.structs.replace(running, worker=worker)
        return found

    def refused(self, request: str) -> None:
        self._asked.pop(request, None)

    def place(self, arrive: Arrive) -> Place | None:
        """The gateway's own choice of a worker; None if no known one can take the request."""
        able = [name for name in self.having(arrive.model) if name not in arrive.exclude]
        if not able:
            return None
        capacity = {name: self.workers[name].capacity for name in able}
        worker = choose(arrive.client, {name: self.in_flight[name] for name in able}, capacity)
        call = arrive.begun + (arrive.attempt == 0) if arrive.interaction else 0
        up = self.workers[worker]
        return Place(arrive.id, worker, up.url, 0, call, model=up.loaded if len(up.models) > 1 else "")

    def takes_more(self, worker: str) -> bool:
        """Whether the worker is well, and not being drained."""
        return worker not in self.draining and self.is_well(worker)

    def having(self, model: str) -> list[str]:
        """The workers that have `model` and can take a request for it."""
        models = {one for up in self.workers.values() for one in (*up.models, up.loaded) if one}
        needed = meant(model, models)
        return [
            name
            for name, up in self.workers.items()
            if self.takes_more(name)
            and (up.loaded or not up.models)  # else it loads one
            and meant(up.loaded, models) == needed is not None
        ]

    # -- for the sides

    def requests_of(self, router: str) -> Iterator[str]:
        """All requests that `router` should know about: those that it is asked about, those that it counts, and those
        that it is to take over."""
        for name, (_, asked) in self._asked.items():
            if asked == router:
                yield name
        for name, running in self._running.items():
            if self._counter_of(running) == router:
                yield name

    def _counter_of(self, running: Running) -> str | None:
        """The router that counts it, or should; None if none of several answers."""
        if len(self.routers.names) == 1:
            return self.routers.names[0]
        placed_by = self._placed_by.get(running.id)
        if placed_by is not None and self.routers.is_up(placed_by):
            return placed_by
        return self.routers.first(running.client) or placed_by

    def taken_over(self, request: str, router: str) -> Running | None:
        """What `router`, which does not know `request` but should, is told of it; None if it should not."""
        running = self._running.get(request)
        if running is None or self._counter_of(running) not in (router, None):
            return None
        self._placed_by[request] = router
        return running

    def ended(self, request: str, router: str) -> Done | None:
        """How `request` has ended for `router`, which takes it to be under way; None if it is."""
        asked, running = self._asked.get(request), self._running.get(request)
        if asked is not None and asked[1] == router:
            return None
        if running is not None and self._counter_of(running) in (router, None):
            return None
        return self._ended.get(request) or Done(request, outcome="aborted")

    def limits(self) -> Posted | None:
        """Those that an operator has set last, at any router."""
        posted = [side.limits for side in self._sides.values() if side.limits is not None]
        return max(posted, key=lambda one: one.at_s, default=None)

    def workers_changed(self) -> None:
        """A router names others, has come or was lost."""
        sides = [side for side in self._sides.values() if side.has_named]
        if sides:
            found = {up.worker: up for side in reversed(sides) for up in side.workers.values()}
            self.workers = dict(sorted(found.items()))
            self.draining = frozenset().union(*(side.draining for side in sides))

    # -- all routers

    def counted_by(self) -> Counter[str]:
        return Counter(self._placed_by.values())

    def order(self, event: WorkerUp | WorkerDrain) -> list[str]:
        """An operator adds or drains a worker: the routers to tell at once. The others are told when they answer."""
        for side in self._sides.values():
            if not self.routers.is_up(side.router):
                side.ordered[event.worker] = event
        return [name for name in self._sides if self.routers.is_up(name)]

    def view(self, sick: Collection[str]) -> dict[str, object]:
        return {
            name: {
                "url": up.url,
                "model": up.loaded,
                "in_flight": self.in_flight[name],
                "state": "draining" if name in self.draining else "sick" if name in sick else "up",
            }
            for name, up in self.workers.items()
        }
