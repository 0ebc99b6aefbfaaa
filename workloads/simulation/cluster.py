"""A cluster in virtual time: the real routers, agents that load models, simulated replicas, and what gateways say.

Everything that decides is the real code: the router with its placement, and in each replica a fair queue with its
policy. Modelled are the engine's time and memory (`sglang_fair.sim`), loading, how long a plan takes (`Fleet.plan_s`),
and the gateway, which is a delay of `hop_s` and the moments at which it reports to the router. Who sends requests, and
is told how each of them ended, is the owner: a session of load (`run`), or requests with deadlines
(`workloads.deadlines`).

Events are taken in the order of (time, number); the number counts up as events are scheduled, so the order is total.
What a request causes at the same instant is scheduled and never called, so the router has heard all that one event
says of a replica before the next request arrives there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any, assert_never

from router import events as message
from router.core import Router
from sglang_fair.common.deadlines import Promise
from sglang_fair.sim.replica import Event, Finished, Progress, Refused, Removed, Replica, SimRequest, Stored
from workloads.programs import Outcome, Reply
from workloads.session import TIMED_OUT, Ending
from workloads.simulation.fleet import Fleet, Shelf
from workloads.simulation.site import Site

PROGRESS_S = 1.0
"""How often a gateway tells the router of a running answer, by default."""

LOAD_S = 0.2
"""How often a replica says how much it has to do, where the router throttles by that."""

TICK_S = 0.25
"""How often the router looks at the clock, where there are several models or deadlines."""

LONGEST_S = 40_000.0
"""A run of a fleet that lasts longer goes nowhere."""


FAILED = Reply(outcome=Outcome.FAILED)


@dataclass(slots=True, eq=False)
class Flight:
    """One request on its way through the cluster."""

    name: str
    request: SimRequest
    """What of it is left: if it was cut off, it goes on after the tokens of its answer that are known."""
    owner: Any
    router: int
    """Number of the router that places it."""
    model: str
    promise: Promise | None
    last: bool
    begun: int
    """As in `Arrive`."""
    sent_s: float
    worker: int | None = None
    token_times: list[tuple[float, int]] = field(default_factory=list)
    """When how many tokens had come."""
    reported_s: float = 0.0
    """When the router last heard of its output."""
    placed_s: float | None = None
    """When it was sent to a replica first."""
    written: int = 0
    """Tokens of its answer before it was cut off."""
    parts: int = 0
    given_up: bool = False
    """Its sender waits for it no more."""
    is_cut: bool = False
    """It is to go on elsewhere."""
    is_there: bool = False
    """Its replica has it."""


class Clock:
    """Events in the order of (time, number). Whose it is schedules them (`at`, `every`) and turns it (`step`)."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.scheduled = 0
        """Events so far."""
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._repeated = 0
        """What is done at even times."""

    def at(self, time_s: float, action: Callable[[Any], None], argument: Any) -> None:
        self.scheduled += 1
        heappush(self._events, (time_s, self.scheduled, action, argument))

    def every(self, every_s: float, action: Callable[[int], None], first: int = 1) -> None:
        """At even times from number `first` on, unless nothing is to come but such things. `action` has the number."""
        self._repeated += 1
        self.at(first * every_s, self._again, (every_s, action, first))

    def step(self) -> bool:
        """The next event, if there is one."""
        if not self._events:
            return False
        self.now_s, _, action, argument = heappop(self._events)
        action(argument)
        return True

    def rest(self) -> list[Any]:
        """What should still happen at this instant, and now does not: the events' arguments."""
        found = []
        while self._events and self._events[0][0] <= self.now_s:
            found.append(heappop(self._events)[3])
        return found

    def _again(self, what: tuple[float, Callable[[int], None], int]) -> None:
        every_s, action, number = what
        action(number)
        if self._waits() or len(self._events) >= self._repeated:
            self.at((number + 1) * every_s, self._again, (every_s, action, number + 1))
        else:
            self._repeated -= 1

    def _waits(self) -> bool:
        """Even times go on although nothing else is to come."""
        return False


class Cluster(Clock):
    """The parts stay, to be looked into."""

    def __init__(
        self,
        site: Site,
        over: Callable[[Flight, Ending], None],
        *,
        step_s: float,
        report_s: float = PROGRESS_S,
    ) -> None:
        """`over` is called as each request ends. An answer's tokens are recorded when the first and the last comes,
        and at even times `step_s` apart; at these the router hears of it, `report_s` after the last time or later."""
        super().__init__()
        self.flights: dict[str, Flight] = {}
        """Requests that have been sent and have not ended, by the name that the router knows."""
        self.replicas: list[Replica] = [
            site.make_replica(place, events=site.tells_caches) for place in range(site.replicas)
        ]
        self.routers: list[Router] = [site.make_router() for _ in site.ingress]
        self.workers = site.workers
        self.plans = 0
        self._site = site
        self._over = over
        self._step_s, self._report_s = step_s, report_s
        self.places = {worker: place for place, worker in enumerate(site.workers)}
        self._tells_output = site.kind.uses_progress
        self._wakes_s = [inf] * site.replicas
        """When each replica's turn comes next."""
        self._agents = None if site.fleet is None else Agents(self, site, site.fleet)

    def begin(self) -> None:
        """Agents and routers begin, and what is looked at at even times. To be called once."""
        self.every(self._step_s, self._look)
        if self._site.throttle == "oit":
            self.every(LOAD_S, self._tell_loads)
        if self._agents is not None:
            self._agents.begin()

    def _waits(self) -> bool:
        return self._agents is not None and bool(self.flights) and self.now_s < LONGEST_S

    # ---- requests: what a gateway does

    def send(
        self,
        request: SimRequest,
        owner: Any,
        *,
        router: int = 0,
        model: str = "",
        promise: Promise | None = None,
        last: bool = False,
        begun: int = 0,
    ) -> None:
        """Ask that router for a worker, and have the request served. What the router says of its call, its deadline and
        its tier, it is told in place of what `request` has."""
        flight = Flight(request.id, request, owner, router, model, promise, last, begun, self.now_s)
        self._ask(flight)

    def _ask(self, flight: Flight) -> None:
        request = flight.request
        self.flights[request.id] = flight
        arrive = message.Arrive(
            request.id,
            request.client,
            request.tokens,
            request.max_output_tokens,
            app=request.app,
            interaction=request.interaction,
            stage=request.stage,
            last=flight.last,
            attempt=flight.parts,
            begun=flight.begun,
            model=flight.model,
            due=None if flight.promise is None else message.Due.of(flight.promise, self.now_s),
            goes_on=flight.written > 0,
        )
        self.tell(flight.router, arrive)

    def give_up(self, name: str) -> None:
        """Its sender waits no longer: what a gateway does when a client hangs up."""
        flight = self.flights.get(name)
        if flight is None or flight.given_up:
            return
        flight.given_up = True
        self._abort(flight)

    def _abort(self, flight: Flight) -> None:
        if flight.is_there and flight.worker is not None:
            place = flight.worker
            self.take(place, self.replicas[place].abort(flight.request.id, self.now_s))
        elif flight.worker is None:  # it waits at the router
            self._stopped(flight, None, 0, b"")

    def _stopped(self, flight: Flight, cached_tokens: int | None, output_tokens: int, answer: bytes) -> None:
        """A request that was given up, or cut off, has ended where it was."""
        request = flight.request
        self.flights.pop(request.id, None)
        self.tell(flight.router, message.Done(request.id, output_tokens=output_tokens, outcome="aborted"))
        if flight.given_up:
            written = flight.written + output_tokens
            self._end(flight, FAILED, error=TIMED_OUT, cached_tokens=cached_tokens, output_tokens=written)
            return
        flight.parts += 1
        flight.written += output_tokens
        if flight.written and flight.promise is not None:
            flight.promise = flight.promise.renewed(self.now_s)
        flight.worker, flight.is_there, flight.is_cut = None, False, False
        flight.request = request._replace(
            id=f"{flight.name}/{flight.parts}",
            tokens=request.tokens + answer,
            output_tokens=request.output_tokens - output_tokens,
            max_output_tokens=request.max_output_tokens - output_tokens,
        )
        self._ask(flight)

    def _deliver(self, flight: Flight) -> None:
        place = flight.worker
        assert place is not None
        if flight.given_up or flight.is_cut:
            self._stopped(flight, None, 0, b"")
            return
        flight.is_there = True
        self.take(place, self.replicas[place].arrive(flight.request, self.now_s))

    # ---- routers

    def tell(self, router: int, event: message.Event) -> None:
        """Give the router an event, and carry out what it answers."""
        for _, answer in self.routers[router].handle(event, self.now_s):
            match answer:
                case message.Place():
                    self._placed(answer)
                case message.Refuse():
                    self._refuse(self.flights.pop(answer.id), 429 if answer.code else 503, answer.reason)
                case message.Cut():
                    self._cut(answer.id)
                case message.Held():
                    pass
                case message.Exchange():
                    if answer.number and self._agents is not None:
                        self._agents.load(answer)
                case _:
                    raise AssertionError(answer)
        if self._agents is not None:
            self._agents.plan(self.routers[router])

    def _placed(self, place: message.Place) -> None:
        flight = self.flights[place.id]
        request, flight.worker = flight.request, self.places[place.worker]
        if flight.placed_s is None:
            flight.placed_s = self.now_s
        due_s = None if place.due is None else place.due.promise(self.now_s).due_s
        flight.request = request._replace(call=place.call or 1, tier=place.tier, deadline_s=due_s)
        self.at(self.now_s + self._site.hop_s, self._deliver, flight)

    def _cut(self, name: str) -> None:
        flight = self.flights[name]
        if not flight.given_up:
            flight.is_cut = True
            self._abort(flight)

    # ---- what replicas say

    def _tell_loads(self, number: int) -> None:
        for place, replica in enumerate(self.replicas):
            self.advance(place)
            load = message.Load(self.workers[place], *replica.load())
            for router in range(len(self.routers)):
                self.tell(router, load)

    def _wake(self, place: int) -> None:
        if self.now_s == self._wakes_s[place]:  # else its turn was put off or moved up
            self._wakes_s[place] = inf
            self.advance(place)

    def advance(self, place: int) -> None:
        self.take(place, self.replicas[place].advance(self.now_s))

    def take(self, place: int, events: Sequence[Event]) -> None:
        """Pass on what a replica has said, each thing when it has come to whom it concerns."""
        worker = self.workers[place]
        for event in events:
            if isinstance(event, Stored | Removed):
                change = _for_router(worker, event)
                for router in range(len(self.routers)):
                    self.tell(router, change)
            else:
                self._hear(event)
        next_s = self.replicas[place].next_s
        if next_s != self._wakes_s[place]:
            self._wakes_s[place] = next_s
            if next_s < inf:
                self.at(next_s, self._wake, place)

    def _hear(self, event: Progress | Finished | Refused) -> None:
        flight = self.flights.get(event.id)
        assert flight is not None, event
        match event:
            case Progress():
                if not flight.token_times:
                    flight.reported_s = event.t_s
                    flight.token_times.append((round(event.t_s, 6), event.output_tokens))
            case Finished(aborted=True) if (
                flight.given_up or event.output_tokens < flight.request.output_tokens
            ):
                if event.output_tokens:
                    complete(flight.token_times, event.t_s, flight.written + event.output_tokens)
                # Without output nobody can tell whether its prompt was computed.
                cached_tokens = event.cached_tokens if event.output_tokens else None
                self._stopped(flight, cached_tokens, event.output_tokens, event.answer)
            case Finished():
                del self.flights[event.id]
                self._finish(flight, event)
            case Refused():
                del self.flights[event.id]
                self.tell(flight.router, message.Done(event.id, outcome="failed"))
                self._refuse(flight, 429 if self.replicas[0].queue.policy.may_refuse else 400, event.reason)
            case _:
                assert_never(event)

    def _look(self, number: int) -> None:
        """Note what the running requests have received, at even times."""
        t_s, flights = round(self.now_s, 6), self.flights
        for place, replica in enumerate(self.replicas):
            self.advance(place)
            for job in replica.queue.running():
                output_tokens = job.output_tokens
                if output_tokens:
                    flight = flights[job.id]
                    times, written = flight.token_times, flight.written + output_tokens
                    if written > times[-1][1]:
                        times.append((t_s, written))
                        if self._tells_output and t_s - flight.reported_s >= self._report_s:
                            flight.reported_s = t_s
                            self.tell(flight.router, message.Progress(job.id, output_tokens))

    def _finish(self, flight: Flight, event: Finished) -> None:
        times, t_s = flight.token_times, event.t_s
        output_tokens, written = event.output_tokens, flight.written + event.output_tokens
        complete(times, t_s, written)
        first_s = times[0][0]
        is_whole = not flight.parts
        self.tell(
            flight.router,
            message.Done(
                event.id,
                output_tokens=output_tokens,
                cached_tokens=event.cached_tokens,
                ttft_s=max(0.0, first_s - flight.sent_s) if is_whole else None,
                tpot_s=max(0.0, t_s - first_s) / (written - 1) if is_whole and written > 1 else None,
            ),
        )
        self._end(
            flight,
            Reply(packed=event.answer),
            status=200,
            cached_tokens=event.cached_tokens,
            output_tokens=written,
        )

    def _refuse(self, flight: Flight, status: int, reason: str) -> None:
        self._end(flight, FAILED, status=status, error=f"HTTP {status}: {reason}")

    def _end(self, flight: Flight, reply: Reply, **more: Any) -> None:
        worker = None if flight.worker is None else self.workers[flight.worker]
        self._over(flight, Ending(reply, token_times=flight.token_times, worker=worker, **more))


def complete(token_times: list[tuple[float, int]], t_s: float, output_tokens: int) -> None:
    """The last tokens have come by then, if not before."""
    if not token_times or token_times[-1][1] < output_tokens:
        token_times.append((round(t_s, 6), output_tokens))


def _for_router(worker: str, event: Stored | Removed) -> message.Stored | message.Removed:
    if isinstance(event, Removed):
        return message.Removed(worker, event.hashes)
    return message.Stored(worker, event.hashes, event.parent, event.tokens, event.block_tokens)


class Agents:
    """What only a fleet has: agents that load models, and the time that its router's plans take."""

    def __init__(self, cluster: Cluster, site: Site, fleet: Fleet) -> None:
        self._cluster, self._site, self._fleet = cluster, site, fleet
        self._first = [fleet.begins_with(place) for place in range(site.replicas)]
        self._shelves = [Shelf(fleet, first) for first in self._first]

    def begin(self) -> None:
        for place, first in enumerate(self._first):
            self._report(place, first, 0)
        self._cluster.every(TICK_S, lambda _: self._cluster.tell(0, message.Tick()))

    def plan(self, router: Router) -> None:
        """If the router has asked for a plan, make it; it is there later."""
        cluster = self._cluster
        if (asked := router.question(cluster.now_s)) is not None:
            cluster.plans += 1
            number, work = asked
            planned = message.Planned(number, work())
            cluster.at(cluster.now_s + self._fleet.plan_s, lambda plan: cluster.tell(0, plan), planned)

    def load(self, order: message.Exchange) -> None:
        """The replica, which has no request, loads a model."""
        cluster, model = self._cluster, order.model
        place = cluster.places[order.worker]
        takes_s = self._shelves[place].swap_s(model)
        self._shelves[place].load(model)
        cost, settings = self._site.cost_of(place, model), self._site.settings(place, model)
        cluster.take(place, cluster.replicas[place].swap(cost, settings, takes_s, cluster.now_s))
        cluster.at(cluster.now_s + takes_s, self._loaded, (place, model, order.number))

    def _loaded(self, what: tuple[int, str, int]) -> None:
        place, model, number = what
        cluster = self._cluster
        cluster.tell(0, message.Load(cluster.workers[place], *cluster.replicas[place].load()))
        self._report(place, model, number)

    def _report(self, place: int, model: str, number: int) -> None:
        """The agent says what its replica has, and which order it has carried out. Alone it is no agent."""
        loadable = self._fleet.loadable(place)
        if len(loadable) > 1:
            swap_s = {one: self._shelves[place].swap_s(one) for one in loadable}
            agent = message.Agent(
                "", self._cluster.workers[place], loaded=model, number=number, swap_s=swap_s
            )
            self._cluster.tell(0, agent)
