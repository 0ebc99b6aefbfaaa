"""What a gateway knows by itself: the workers, its own requests in flight there, and how its latest ones ended.

The router owns this knowledge while it answers. The gateway's copy serves while it does not, and when it is back:
then the two tables are compared, and each side tells the other what it lacks. A router that was restarted is told of
the workers, too. Messages may be lost or come twice; each names a request, so a repeated one changes nothing.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable

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
from router.gateway.routing.fallback import choose
from router.models import meant
from sglang_fair.core.interactions import Interaction

MAX_ENDED = 8192
"""How many ended requests are remembered, in case the router missed one. Older ones are reported as aborted."""


class Fleet:
    """State and decisions, no I/O: `link` sends the events that the methods return."""

    def __init__(
        self,
        is_well: Callable[[str], bool],
        begun: Callable[[], Iterable[tuple[Interaction, int]]] = tuple,
        due: Callable[[Interaction], Due | None] = lambda name: None,
    ) -> None:
        """`is_well` says whether a worker answers this gateway, `begun` which interactions are under way, and how many
        calls of each were accepted, `due` by when further ones are due."""
        self.workers: dict[str, WorkerUp] = {}
        self.draining: frozenset[str] = frozenset()
        self.in_flight: Counter[str] = Counter()
        self._is_well = is_well
        self._begun = begun
        self._due = due
        self._router = ""
        self._limits: Posted | None = None
        """Limits that an operator has set, as the router said last."""
        self._sick: frozenset[str] = frozenset()
        self._asked: dict[str, Arrive] = {}
        self._running: dict[str, Running] = {}
        self._untold: set[str] = set()
        self._ended: OrderedDict[str, Done] = OrderedDict()

    # -- requests

    def ask(self, arrive: Arrive) -> None:
        """The router is about to be asked where this request goes."""
        self._asked[arrive.id] = arrive

    def begin(self, arrive: Arrive, place: Place, *, told: bool) -> None:
        """A request goes to a worker; `told`: the router knows about it."""
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
        if not told:
            self._untold.add(arrive.id)
        self.in_flight[place.worker] += 1

    def placed_itself(self, request: str) -> bool:
        """Whether the gateway has placed it, without a router."""
        return request in self._untold

    def end(self, done: Done) -> bool:
        """A request has ended, or will not be sent. True if the router must be told."""
        self._asked.pop(done.id, None)
        running = self._running.pop(done.id, None)
        if running is not None:
            self.in_flight[running.worker] -= 1
            if not self.in_flight[running.worker]:
                del self.in_flight[running.worker]
        if done.id in self._untold:
            self._untold.remove(done.id)
            return False
        self._ended[done.id] = done
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        return True

    def refused(self, request: str) -> None:
        """The router has named no worker for it."""
        self._asked.pop(request, None)

    def place(self, arrive: Arrive) -> Place | None:
        """The gateway's own choice of a worker; None if no known one can take the request."""
        models = {up.loaded for up in self.workers.values() if up.loaded}
        model = meant(arrive.model, models)
        able = [
            name
            for name, up in self.workers.items()
            if name not in arrive.exclude
            and name not in self.draining
            and self._is_well(name)
            and meant(up.loaded, models) == model
        ]
        if model is None or not able:
            return None
        capacity = {name: self.workers[name].capacity for name in able}
        worker = choose(arrive.client, {name: self.in_flight[name] for name in able}, capacity)
        call = arrive.begun + (arrive.attempt == 0) if arrive.interaction else 0
        return Place(arrive.id, worker, self.workers[worker].url, 0, call)

    # -- comparing with the router

    def table(self, name: str) -> Table:
        """All requests that the router should know about."""
        return Table(name, (*self._asked, *self._running))

    def settle(self, difference: Difference) -> list[Event]:
        """The events that the router lacks."""
        told: list[Event] = [self._running[name] for name in difference.missing if name in self._running]
        self._untold.difference_update(difference.missing)
        told += [
            self._ended.get(name) or Done(name, outcome="aborted")
            for name in difference.unsettled
            if name not in self._running and name not in self._asked
        ]
        return told

    def learn(self, workers: Workers) -> list[Event]:
        """Takes over the router's list of workers. Returns what the router must be told in return.

        A restarted router is told of the workers that it does not know and that answer this gateway, of the
        interactions under way, and of limits that an operator has set.
        """
        told: list[Event] = []
        if self._limits is not None and self._router and workers.router != self._router:
            told.append(self._limits)  # first, so that all that it answers knows of them
        known = {up.worker: up for up in workers.workers}
        if self._router and workers.router != self._router:
            lost = [up for name, up in self.workers.items() if name not in known and self._is_well(name)]
            for up in lost:
                told.append(up)
                known[up.worker] = up
                if up.worker in self.draining:
                    told.append(WorkerDrain(up.worker))
            told += self._remembered()
            drained = {up.worker for up in lost} & self.draining
        else:
            drained = set()
        if workers.router == self._router or workers.limits is not None:
            self._limits = workers.limits
        self._router = workers.router
        self.workers = dict(sorted(known.items()))
        self.draining = frozenset(workers.draining) | drained
        self._sick = frozenset(workers.sick)
        return told + self.health()

    def _remembered(self) -> list[Event]:
        rows = [((*name, calls), self._due(name)) for name, calls in self._begun()]
        parts = [rows[at : at + MOST_BEGUN] for at in range(0, len(rows), MOST_BEGUN)]
        return [Begun(tuple(row for row, _ in part), tuple(due for _, due in part)) for part in parts]

    def health(self) -> list[Event]:
        """The workers whose health the router sees differently."""
        return [
            WorkerHealth(name, self._is_well(name))
            for name in self.workers
            if self._is_well(name) is (name in self._sick)
        ]

    def view(self, sick: Collection[str]) -> dict[str, object]:
        """The workers, as `/status` shows them while no router answers."""
        return {
            name: {
                "url": up.url,
                "model": up.loaded,
                "in_flight": self.in_flight[name],
                "state": "draining" if name in self.draining else "sick" if name in sick else "up",
            }
            for name, up in self.workers.items()
        }
