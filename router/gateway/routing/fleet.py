"""What a gateway knows by itself: the workers, its own requests in flight there, and how its latest ones ended.

Routers own this knowledge while they answer. The gateway's copy serves while none does, and when one is back: then the
two tables are compared, and each side tells the other what it lacks (`side`). Each request in flight is counted by one
router: the one that placed it, and when that is lost, the one that decides for its client from then on, which takes it
over. Messages may be lost or come twice; each names a request, so a repeated one changes nothing.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from router.events import Arrive, Done, Due, Place, Posted, Running, WorkerDrain, WorkerUp
from router.gateway.routing.fallback import choose
from router.gateway.routing.routers import Routers
from router.gateway.routing.side import Side
from router.models import meant
from sglang_fair.core.interactions import Interaction

MAX_ENDED = 8192
"""How many ended requests are remembered, in case a router missed one. Older ones are reported as aborted."""

ONE = ("router",)


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
            place.worker,
            arrive.tokens,
            arrive.max_output_tokens,
            arrive.namespace,
            weight=arrive.weight,
            weight_version=arrive.weight_version,
            app=arrive.app,
            interaction=arrive.interaction,
            last=arrive.last,
            begun=(place.call or arrive.begun + 1) if arrive.interaction else 0,
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

    def refused(self, request: str) -> None:
        self._asked.pop(request, None)

    def place(self, arrive: Arrive) -> Place | None:
        """The gateway's own choice of a worker; None if no known one can take the request."""
        models = {model for up in self.workers.values() for model in (*up.models, up.loaded) if model}
        model = meant(arrive.model, models)
        able = [
            name
            for name, up in self.workers.items()
            if name not in arrive.exclude
            and name not in self.draining
            and self.is_well(name)
            and (up.loaded or not up.models)  # else it loads one
            and meant(up.loaded, models) == model
        ]
        if model is None or not able:
            return None
        capacity = {name: self.workers[name].capacity for name in able}
        worker = choose(arrive.client, {name: self.in_flight[name] for name in able}, capacity)
        call = arrive.begun + (arrive.attempt == 0) if arrive.interaction else 0
        up = self.workers[worker]
        return Place(arrive.id, worker, up.url, 0, call, model=up.loaded if len(up.models) > 1 else "")

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
