"""One session of load on a simulated cluster: the live driver's session, with a heap of events for a clock.

Everything that decides is the real code: the session (`workloads.session`), the router with its placement, and in each
replica a fair queue with its policy. Modelled are the engine's time and memory (`sglang_fair.sim`) and the gateway,
which is a delay of `hop_s` and the moments at which it reports to the router. Requests have no time-out.

Events are taken in the order of (time, number); the number counts up as events are scheduled, so the order is total.
What a request causes at the same instant is scheduled and never called, so the router has heard all that one event
says of a replica before the next request arrives there.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from random import Random
from typing import Any, assert_never

from router import events as message
from router.core import Router
from router.placement import PLACEMENTS
from router.placement.contract import Holding
from sglang_fair.core import POLICIES
from sglang_fair.core.options import shown
from sglang_fair.sim.replica import Event, Finished, Progress, Refused, Removed, Replica, SimRequest, Stored
from workloads.clients import Client, client_facts
from workloads.programs import Outcome, Reply
from workloads.records import METERS, End, Manifest, Records, Run, Sample
from workloads.session import (
    RUN_ENDED,
    TIMED_OUT,
    Action,
    Cancel,
    Ending,
    Plan,
    Record,
    Request,
    Send,
    Session,
    SessionProgress,
    Timer,
    Wait,
)
from workloads.simulation.site import Site

PROGRESS_S = 1.0
"""How often a gateway tells the router of a running answer, by default."""

LOAD_S = 0.2
"""How often a replica says how much it has to do, where the router throttles by that."""

TOKEN_STEP_S = 1.0
"""How far apart an answer's tokens are recorded, but for the first and the last, if the plan does not say. They are
recorded at even times, so service is exact at each of these."""

_COLLECTION_OBJECTS = 100_000
"""New objects after which Python looks for garbage."""


def describe(
    site: Site, clients: Sequence[Client], plan: Plan, *, seed: str = "0", workload: str = "", repeat: int = 0
) -> Manifest:
    """What is about to be run, for its records; the caller may add versions and machine by `replace`.

    Raises ValueError, in one line, for a site that cannot be built.
    """
    cost, policy = site.service_cost(), site.make_policy()
    return Manifest(
        workload=workload,
        scheduler=site.scheduler,
        clients=client_facts(clients),
        duration_s=plan.duration_s,
        programs_per_client=plan.programs_per_client,
        workers=site.replicas,
        seed=seed,
        repeat=repeat,
        extend_weight=cost.extend_weight,
        output_weight=cost.output_weight,
        reported={
            "placement": site.placement,
            "parameters": site.make_router().state()["parameters"],
            "policy": policy.name,
            "quantum": getattr(policy, "quantum", None),
            "options": dict(shown(policy)),
        },
        case={"engine": "simulated", "site": asdict(site), "plan": asdict(plan)},
    )


def simulate(
    site: Site,
    clients: Sequence[Client],
    plan: Plan,
    *,
    seed: str = "0",
    workload: str = "",
    manifest: Manifest | None = None,
    path: Path | None = None,
    watch: Callable[[SessionProgress], None] | None = None,
) -> Run:
    """Run the programs of `clients` (built with a `PackedCodec`) to the plan's end, in virtual seconds.

    The run is like the live driver's: `measures.summarize`, reports and plots take it unchanged. Equal arguments
    give equal runs. `manifest` in place of `describe`'s own; `path` is where the records are written besides; `watch`
    hears after each round of samples.

    Raises ValueError for a site or clients that make no sense, and RuntimeError when programs wait for ever.
    """
    made = manifest or describe(site, clients, plan, seed=seed, workload=workload)
    with Records(path, made) as records, _few_collections():
        Simulation(site, clients, plan, records, seed=seed, watch=watch).run()
        return records.run


@contextmanager
def _few_collections() -> Iterator[None]:
    """A run keeps most of the objects that it makes and leaves no cycles behind: searched for them as often as usual,
    it would take a tenth longer."""
    usual = gc.get_threshold()
    gc.set_threshold(_COLLECTION_OBJECTS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


@dataclass(slots=True, eq=False)
class _Flight:
    """One request on its way through the cluster."""

    request: Request
    router: int
    """Number of the router that places it."""
    worker: int | None = None
    token_times: list[tuple[float, int]] = field(default_factory=list)
    reported_s: float = 0.0
    """When the router last heard of its output."""
    call: int = 1
    """Its number in its interaction."""
    given_up: bool = False
    """Its sender waits for it no more."""
    is_there: bool = False
    """Its replica has it."""


class Simulation:
    """One run: `run()` once. All rows go to `records`. The parts stay, to be looked into."""

    def __init__(
        self,
        site: Site,
        clients: Sequence[Client],
        plan: Plan,
        records: Records,
        *,
        seed: str = "0",
        watch: Callable[[SessionProgress], None] | None = None,
    ) -> None:
        """See `simulate`."""
        self.now_s = 0.0
        self.session = Session(clients, plan)
        self.replicas: list[Replica] = [
            site.make_replica(place, events=_tells_caches(site)) for place in range(site.replicas)
        ]
        self.routers: list[Router] = [site.make_router() for _ in site.ingress]
        self._site = site
        self._clients = clients
        self._plan = plan
        self._records = records
        self._step_s = plan.token_step_s or TOKEN_STEP_S
        self._watch = watch
        self._ingress = Random(f"{seed} ingress")
        self._workers = site.workers
        self._places = {worker: place for place, worker in enumerate(site.workers)}
        self._tells_output = PLACEMENTS[site.placement].uses_progress
        self._tells_loads = site.throttle == "oit"
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._scheduled = 0
        self._wakes_s = [inf] * site.replicas
        """When each replica's turn comes next."""
        self._flights: dict[str, _Flight] = {}
        """Requests that have been sent and have not ended."""
        self._router_of: list[int] = []
        """Each program's router, by the program's number."""

    def run(self) -> None:
        """Run to the plan's end. Raises RuntimeError if programs wait for what never comes."""
        self._carry_out(self.session.start())
        self._at(0.0, self._sample, 0)
        self._at(self._step_s, self._look, 1)
        if self._tells_loads:
            self._at(LOAD_S, self._tell_loads, 1)
        events, session = self._events, self.session
        while events and not session.over:
            self.now_s, _, action, argument = heappop(events)
            action(argument)
        if not session.over:
            raise RuntimeError(
                f"at {self.now_s:g} s {len(session.under_way)} requests wait for what will never happen"
            )
        self._cut_off()

    # ---- the clock

    def _at(self, time_s: float, action: Callable[[Any], None], argument: Any) -> None:
        self._scheduled += 1
        heappush(self._events, (time_s, self._scheduled, action, argument))

    def _again(self, every_s: float, action: Callable[[int], None], count: int) -> None:
        """The next of the actions at even times, unless nothing is to come but the others."""
        if len(self._events) > 1 + self._tells_loads:
            self._at((count + 1) * every_s, action, count + 1)

    # ---- the session

    def _due(self, what: Timer) -> None:
        self._carry_out(self.session.due(what, self.now_s))

    def _end(self, request: Request, ending: Ending) -> None:
        self._carry_out(self.session.ended(request, ending, self.now_s))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Wait(until_s, what):
                    if isinstance(what, Request):
                        what.id = str(self._scheduled)  # unique; `vtc-noisy` draws its errors from it
                    self._at(until_s, self._due, what)
                case Send(request):
                    self._send(request)
                case Cancel(request):
                    self._give_up(request)
                case Record(row):
                    self._records.add(row)
                case _:
                    assert_never(action)

    def _cut_off(self) -> None:
        """The run has ended: cancel what is under way, requests whose time was this instant included."""
        while self._events and self._events[0][0] <= self.now_s:
            _, _, _, what = heappop(self._events)
            if isinstance(what, Request):
                self._due(what)
        for place in range(len(self.replicas)):
            self._advance(place)
        for request in list(self.session.under_way):
            self._end(request, self._cancelled(request))
        self._carry_out(self.session.cut_off())
        self._records.add(End(round(self.now_s, 6)))

    def _cancelled(self, request: Request) -> Ending:
        """How far a request had come when the run ended."""
        flight = self._flights.get(request.id)
        ending = self._ending(request, flight, Reply(outcome=Outcome.CANCELLED), error=RUN_ENDED)
        if flight is not None and flight.worker is not None and flight.token_times:
            job = self.replicas[flight.worker].queue.find(request.id)
            if job is not None:
                ending.cached_tokens, ending.output_tokens = job.cached_tokens, job.output_tokens
                _complete(flight.token_times, self.now_s, job.output_tokens)
        return ending

    # ---- requests: what a gateway does

    def _send(self, request: Request) -> None:
        """Ask the program's router for a worker."""
        call, router = request.call, self._router(request.program.number)
        if not isinstance(call.prompt, bytes):
            raise ValueError("a modelled engine takes packed tokens: give the programs a PackedCodec")
        self._flights[request.id] = _Flight(request, router)
        arrive = message.Arrive(
            request.id,
            request.client,
            call.prompt,
            call.max_output_tokens,
            app=request.program.client.app,
            interaction=str(request.program.index),
            stage=call.stage,
            last=call.last,
        )
        self._tell(router, arrive)

    def _give_up(self, request: Request) -> None:
        """Its sender waits no longer: what a gateway does when a client hangs up."""
        flight = self._flights.get(request.id)
        if flight is None or flight.given_up:
            return
        flight.given_up = True
        if flight.is_there and flight.worker is not None:
            self._take(flight.worker, self.replicas[flight.worker].abort(request.id, self.now_s))
        elif flight.worker is None:  # it waits at the router
            self._drop(flight)

    def _drop(self, flight: _Flight, *, cached_tokens: int | None = None, output_tokens: int = 0) -> None:
        """A request that was given up has ended."""
        request = flight.request
        self._flights.pop(request.id, None)
        self._tell(flight.router, message.Done(request.id, output_tokens=output_tokens, outcome="aborted"))
        ending = self._ending(
            request,
            flight,
            Reply(outcome=Outcome.FAILED),
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            error=TIMED_OUT,
        )
        self._end(request, ending)

    def _router(self, program: int) -> int:
        """The router of a program: drawn for each in the order in which programs began."""
        if len(self.routers) == 1:
            return 0
        while len(self._router_of) <= program:
            self._router_of += self._ingress.choices(range(len(self.routers)), self._site.ingress)
        return self._router_of[program]

    def _tell(self, router: int, event: message.Event) -> None:
        """Give the router an event, and carry out what it answers."""
        for _, answer in self.routers[router].handle(event, self.now_s):
            if isinstance(answer, message.Place):
                flight = self._flights[answer.id]
                flight.worker, flight.call = self._places[answer.worker], answer.call
                self._at(self.now_s + self._site.hop_s, self._deliver, flight)
            else:
                assert isinstance(answer, message.Refuse), answer
                self._fail(self._flights.pop(answer.id), 429 if answer.code else 503, answer.reason)

    def _deliver(self, flight: _Flight) -> None:
        """The request reaches its replica."""
        request, place = flight.request, flight.worker
        call = request.call
        assert place is not None
        if flight.given_up:
            self._drop(flight)
            return
        flight.is_there = True
        assert isinstance(call.prompt, bytes)
        output_tokens = call.max_output_tokens if call.output_tokens is None else call.output_tokens
        arrived = SimRequest(
            request.id,
            request.client,
            call.prompt,
            output_tokens,
            call.max_output_tokens,
            expected_output_tokens=output_tokens,
            app=request.program.client.app,
            interaction=str(request.program.index),
            stage=call.stage,
            call=flight.call or 1,
            system_tokens=call.system_tokens,
        )
        self._take(place, self.replicas[place].arrive(arrived, self.now_s))

    def _fail(self, flight: _Flight, status: int, reason: str) -> None:
        reply, error = Reply(outcome=Outcome.FAILED), f"HTTP {status}: {reason}"
        self._end(flight.request, self._ending(flight.request, flight, reply, status=status, error=error))

    def _ending(
        self,
        request: Request,
        flight: _Flight | None,
        reply: Reply,
        *,
        cached_tokens: int | None = None,
        output_tokens: int = 0,
        status: int | None = None,
        error: str | None = None,
    ) -> Ending:
        """How a request ended; `flight` is None for one that never got a connection."""
        return Ending(
            reply,
            prompt_tokens=len(request.call.prompt) // message.TOKEN_BYTES,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            token_times=[] if flight is None else flight.token_times,
            worker=None if flight is None or flight.worker is None else self._workers[flight.worker],
            status=status,
            error=error,
            waited_s=self._waited_s(request, flight),
        )

    def _waited_s(self, request: Request, flight: _Flight | None) -> float | None:
        """Before it was admitted for the first time, or given up."""
        if not self._plan.waits or flight is None or flight.worker is None or not flight.is_there:
            return None
        found = self.replicas[flight.worker].record.find(request.id)
        return round(found[0]["waited_s"] - found[0]["waited_again_s"], 3) if found else None

    # ---- what replicas say

    def _tell_loads(self, count: int) -> None:
        """Each replica says how much it has to do."""
        for place, replica in enumerate(self.replicas):
            self._advance(place)
            load = message.Load(self._workers[place], *replica.load())
            for router in range(len(self.routers)):
                self._tell(router, load)
        self._again(LOAD_S, self._tell_loads, count)

    def _wake(self, place: int) -> None:
        if self.now_s == self._wakes_s[place]:  # else its turn was put off or moved up
            self._wakes_s[place] = inf
            self._advance(place)

    def _advance(self, place: int) -> None:
        self._take(place, self.replicas[place].advance(self.now_s))

    def _take(self, place: int, events: Sequence[Event]) -> None:
        """Pass on what a replica has said, each thing when it has come to whom it concerns."""
        lag_s, worker = self._site.events_lag_s, self._workers[place]
        for event in events:
            if isinstance(event, Stored | Removed):
                change = _for_router(worker, event)
                if lag_s:
                    self._at(event.t_s + lag_s, self._cache_changed, change)
                else:
                    self._cache_changed(change)
            else:
                self._hear(event)
        self._reschedule(place)

    def _reschedule(self, place: int) -> None:
        next_s = self.replicas[place].next_s
        if next_s != self._wakes_s[place]:
            self._wakes_s[place] = next_s
            if next_s < inf:
                self._at(next_s, self._wake, place)

    def _cache_changed(self, event: message.Stored | message.Removed) -> None:
        for router in range(len(self.routers)):
            self._tell(router, event)

    def _hear(self, event: Progress | Finished | Refused) -> None:
        """A gateway hears of one of its requests."""
        flight = self._flights.get(event.id)
        assert flight is not None, event
        match event:
            case Progress():
                if not flight.token_times:
                    flight.reported_s = event.t_s
                    flight.token_times.append((round(event.t_s, 6), event.output_tokens))
            case Finished(aborted=True):
                if event.output_tokens:
                    _complete(flight.token_times, event.t_s, event.output_tokens)
                # Without output nobody can tell whether its prompt was computed.
                cached_tokens = event.cached_tokens if event.output_tokens else None
                self._drop(flight, cached_tokens=cached_tokens, output_tokens=event.output_tokens)
            case Finished():
                del self._flights[event.id]
                self._finish(flight, event)
            case Refused():
                del self._flights[event.id]
                self._tell(flight.router, message.Done(event.id, outcome="failed"))
                self._fail(flight, 429 if POLICIES[self._site.policy].may_refuse else 400, event.reason)
            case _:
                assert_never(event)

    def _look(self, count: int) -> None:
        """Note what the running requests have received, at even times."""
        t_s, flights = round(self.now_s, 6), self._flights
        for place, replica in enumerate(self.replicas):
            self._advance(place)
            for job in replica.queue.running():
                output_tokens = job.output_tokens
                if output_tokens:
                    flight = flights[job.id]
                    times = flight.token_times
                    if output_tokens > times[-1][1]:
                        times.append((t_s, output_tokens))
                        if self._tells_output and t_s - flight.reported_s >= PROGRESS_S:
                            flight.reported_s = t_s
                            self._tell(flight.router, message.Progress(job.id, output_tokens))
        self._again(self._step_s, self._look, count)

    def _finish(self, flight: _Flight, event: Finished) -> None:
        request, times, t_s = flight.request, flight.token_times, event.t_s
        output_tokens = event.output_tokens
        _complete(times, t_s, output_tokens)
        assert request.t_start_s is not None
        first_s = times[0][0]
        self._tell(
            flight.router,
            message.Done(
                request.id,
                output_tokens=output_tokens,
                cached_tokens=event.cached_tokens,
                ttft_s=max(0.0, first_s - request.t_start_s),
                tpot_s=None if output_tokens < 2 else max(0.0, t_s - first_s) / (output_tokens - 1),
            ),
        )
        ending = self._ending(
            request,
            flight,
            Reply(packed=event.answer),
            cached_tokens=event.cached_tokens,
            output_tokens=output_tokens,
            status=200,
        )
        self._end(request, ending)

    def _sample(self, count: int) -> None:
        """Ask all replicas, as the driver asks for their `/fair`."""
        for place, replica in enumerate(self.replicas):
            self._advance(place)
            state = replica.queue.status()
            known = {
                client.name: {meter: account[meter] for meter in METERS}
                for client in self._clients
                if (account := state["clients"].get(client.name)) is not None
            }
            self._records.add(
                Sample(count, round(self.now_s, 6), self._workers[place], known, state["bound"])
            )
        self.session.progress.now_s = self.now_s
        if self._watch is not None:
            self._watch(self.session.progress)
        self._again(self._plan.sample_s, self._sample, count)


def _tells_caches(site: Site) -> bool:
    """Whether what is cached can make a difference to the router. Where there is one replica, only if requests wait at
    the router for their turn."""
    placement = PLACEMENTS[site.placement]
    return placement.uses_caches and (site.replicas > 1 or issubclass(placement, Holding))


def _complete(token_times: list[tuple[float, int]], t_s: float, output_tokens: int) -> None:
    """The last tokens have come by then, if not before."""
    if not token_times or token_times[-1][1] < output_tokens:
        token_times.append((round(t_s, 6), output_tokens))


def _for_router(worker: str, event: Stored | Removed) -> message.Stored | message.Removed:
    """As the router reads it."""
    if isinstance(event, Removed):
        return message.Removed(worker, event.hashes)
    return message.Stored(
        worker, event.hashes, event.parent, event.tokens, event.block_tokens, event.namespace
    )
