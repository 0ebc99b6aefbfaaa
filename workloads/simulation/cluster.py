"""One run of clients' programs on a simulated cluster: the live driver's run, with a heap of events for a clock.

What decides is the real thing: the router with its placement, and in each replica a fair queue with its policy.
What is modelled is the engine's time and memory (`sglang_fair.sim`) and the gateway between them, which is a delay
of `hop_s` and the times that it tells the router. Programs arrive, open-loop or closed, and a client's connections
are bounded as in the driver; requests have no time-out.

Events are taken in the order of (time, number), the number counting up as they are scheduled: a total order. What
a request causes at the same instant is scheduled, never called, so whatever one event says of a replica is told to
the router before the next request arrives there.
"""

import gc
from collections import deque
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
from sglang_fair.core.options import shown
from sglang_fair.sim.replica import Event, Finished, Progress, Refused, Removed, Replica, SimRequest, Stored
from workloads import driver
from workloads.clients import Client
from workloads.driver import Plan
from workloads.programs import Call, Execution, Outcome, Ready, Reply
from workloads.records import End, Manifest, Records, RequestRecord, Run, Sample
from workloads.simulation.site import Site

PROGRESS_S = 1.0
"""How often a gateway tells the router of a running answer, by default."""

TOKEN_STEP_S = 1.0
"""How far apart an answer's tokens are recorded, but for the first and the last, if the plan does not say. They are
recorded at even times, so service is exact at each of these."""

_COLLECTION_OBJECTS = 100_000
"""New objects after which Python looks for garbage."""

REFUSING = ("rpm",)
"""Policies that refuse requests; else it is the engine that cannot take one."""


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
        clients={
            client.name: {
                "well_behaved": client.well_behaved,
                "app": client.app,
                "requests": client.requests,
                "rate_per_s": getattr(client.arrivals, "rate_per_s", None),
                "cv": getattr(client.arrivals, "cv", None),
            }
            for client in clients
        },
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
    watch: Callable[[driver.Progress], None] | None = None,
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
class _Active(driver.Active):
    """Its requests go through router number `router`."""

    router: int = 0


@dataclass(slots=True, eq=False)
class _Flight:
    """One request, as far as it has come."""

    id: str
    active: _Active
    number: int
    call: Call
    t_intended_s: float
    t_start_s: float | None = None
    worker: int | None = None
    token_times: list[tuple[float, int]] = field(default_factory=list)
    told_s: float = 0.0
    """When the router last heard of its output."""


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
        watch: Callable[[driver.Progress], None] | None = None,
    ) -> None:
        """See `simulate`."""
        names = [client.name for client in clients]
        if len(set(names)) < len(names) or not names:
            raise ValueError(f"a run needs clients with names of their own, not {names}")
        if not plan.at_once.keys() <= set(names):
            raise ValueError(
                f"no such clients for the closed loop: {sorted(plan.at_once.keys() - set(names))}"
            )
        self.now_s = 0.0
        self.progress = driver.Progress()
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
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._scheduled = 0
        self._wakes_s = [inf] * site.replicas
        """When each replica's turn comes next."""
        self._active: dict[_Active, None] = {}
        self._flights: dict[str, _Flight] = {}
        """Requests whose time has come, and that have not ended."""
        self._open = dict.fromkeys(names, 0)
        self._queued: dict[str, deque[_Flight]] = {name: deque() for name in names}
        """Requests that wait for one of their client's connections."""
        self._begun = dict.fromkeys(plan.at_once, 0)
        """Programs of the closed loop's clients so far."""
        self._open_loop = True
        """Programs are still to come that follow their client's arrivals."""
        self._awaited = 0
        """Programs under way that the run does not end without, unless time is up."""
        self._draining = False
        self._stopping = False

    def run(self) -> None:
        """To the plan's end. Raises RuntimeError if programs wait for what never comes."""
        self._schedule_arrivals()
        self._at(0.0, self._sample, 0)
        self._at(self._step_s, self._look, 1)
        events = self._events
        while events and not self._stopping:
            self.now_s, _, action, argument = heappop(events)
            action(argument)
        if not self._stopping:
            raise RuntimeError(
                f"at {self.now_s:g} s {len(self._flights)} requests wait for what will never happen"
            )
        self._cut_off()

    # ---- the clock

    def _at(self, time_s: float, action: Callable[[Any], None], argument: Any) -> None:
        self._scheduled += 1
        heappush(self._events, (time_s, self._scheduled, action, argument))

    def _again(self, every_s: float, action: Callable[[int], None], count: int) -> None:
        """The next of the two actions at even times, unless nothing is to come but the other one."""
        if len(self._events) > 1:
            self._at((count + 1) * every_s, action, count + 1)

    # ---- when programs begin and the run ends

    def _schedule_arrivals(self) -> None:
        plan = self._plan
        due = driver.arrivals(self._clients, plan)
        self.progress.programs_due = len(due)
        for client in self._clients:
            for _ in range(plan.at_once.get(client.name, 0)):
                self._at(0.0, self._take_place, client)
        for time_s, client, index in due:
            self._at(time_s, self._begin, (client, index))
        last_s = due[-1][0] if due else 0.0
        self._at(last_s if plan.programs_per_client is not None else plan.duration_s, self._close, None)
        self._at(plan.duration_s, self._end_arrivals, None)

    def _begin(self, due: tuple[Client, int]) -> None:
        client, index = due
        routers = range(len(self.routers))
        [router] = self._ingress.choices(routers, self._site.ingress) if len(routers) > 1 else [0]
        active = _Active(client, index, self.now_s, Execution(client.program(index)), router=router)
        self._active[active] = None
        self._awaited += self._is_awaited(active)
        self._launch(active, active.execution.start())
        self._settle(active)

    def _take_place(self, client: Client) -> None:
        """The next program of a client of the closed loop, unless it has had its last."""
        if self._more(client.name):
            index = self._begun[client.name]
            self._begun[client.name] = index + 1
            self.progress.programs_due += 1
            self._begin((client, index))
        self._end_arrivals(None)

    def _more(self, name: str) -> bool:
        most = self._plan.programs_per_client
        return self.now_s < self._plan.duration_s and (most is None or self._begun[name] < most)

    def _close(self, _: None) -> None:
        """The last program that follows its client's arrivals has begun."""
        self._open_loop = False
        self._end_arrivals(None)

    def _end_arrivals(self, _: None) -> None:
        """No program will come any more, if that is so."""
        if not (self._draining or self._open_loop or any(self._more(name) for name in self._begun)):
            self._drain()

    def _drain(self) -> None:
        self._draining = True
        if self._plan.drain_s is not None:
            self._at(self.now_s + self._plan.drain_s, self._stop, None)
        self._stop_if_done()

    def _stop_if_done(self) -> None:
        if self._draining and not self._awaited:
            self._stop(None)

    def _stop(self, _: None) -> None:
        self._stopping = True

    def _is_awaited(self, active: _Active) -> bool:
        return self._plan.drain_for == "all" or active.client.well_behaved

    def _cut_off(self) -> None:
        """The run has ended: what is under way is cancelled, requests whose time was this instant included."""
        while self._events and self._events[0][0] <= self.now_s:
            _, _, action, argument = heappop(self._events)
            if action == self._connect:
                action(argument)
        for place in range(len(self.replicas)):
            self._advance(place)
        for flight in self._flights.values():
            self._cancel(flight)
        for active in self._active:
            self._records.add(active.record(None, Outcome.CANCELLED))
        self._records.add(End(round(self.now_s, 6)))

    def _cancel(self, flight: _Flight) -> None:
        job = None if flight.worker is None else self.replicas[flight.worker].queue.find(flight.id)
        cached_tokens = output_tokens = None
        if flight.token_times and job is not None:
            cached_tokens, output_tokens = job.cached_tokens, job.output_tokens
            _complete(flight.token_times, self.now_s, output_tokens)
        self._record(flight, Outcome.CANCELLED, cached_tokens, output_tokens or 0, error="the run ended")

    # ---- programs

    def _launch(self, active: _Active, ready: Sequence[Ready]) -> None:
        """These calls may be sent, each after its own time."""
        for number, call in ready:
            flight = _Flight(str(self._scheduled), active, number, call, self.now_s + call.after_s)
            self._at(flight.t_intended_s, self._connect, flight)

    def _connect(self, flight: _Flight) -> None:
        """It is a request's time: it takes one of its client's connections, or waits for one."""
        self.progress.in_flight += 1
        self._flights[flight.id] = flight
        name = flight.active.client.name
        if self._open[name] < self._plan.connections_per_client:
            self._open[name] += 1
            self._send(flight)
        else:
            self._queued[name].append(flight)

    def _end(self, flight: _Flight, reply: Reply) -> None:
        """A request has ended and is recorded: its connection is free, its program goes on."""
        active = flight.active
        name = active.client.name
        if self._queued[name]:
            self._at(self.now_s, self._send, self._queued[name].popleft())
        else:
            self._open[name] -= 1
        active.failed += reply.outcome is Outcome.FAILED
        if self._stopping:
            return
        self._launch(active, active.execution.reply(flight.number, reply))
        self._settle(active)

    def _settle(self, active: _Active) -> None:
        """Record the program if it has ended."""
        if active.execution.outcome is not None and active in self._active:
            del self._active[active]
            self._records.add(active.record(self.now_s, active.execution.outcome))
            self.progress.programs_done += 1
            self._awaited -= self._is_awaited(active)
            if active.client.name in self._begun:
                delay_s = driver.AFTER_FAILURE_S if active.failed else 0.0
                self._at(self.now_s + delay_s, self._take_place, active.client)
            self._stop_if_done()

    # ---- requests: what a gateway does

    def _send(self, flight: _Flight) -> None:
        """Ask the router for a worker."""
        call, active = flight.call, flight.active
        if not isinstance(call.prompt, bytes):
            raise ValueError("a modelled engine takes packed tokens: give the programs a PackedCodec")
        flight.t_start_s = self.now_s
        self._tell(
            active.router,
            message.Arrive(flight.id, active.client.name, call.prompt, call.max_output_tokens),
        )

    def _tell(self, router: int, event: message.Event) -> None:
        """Tell the router, and carry out what it answers."""
        for _, said in self.routers[router].handle(event, self.now_s):
            if isinstance(said, message.Place):
                flight = self._flights[said.id]
                flight.worker = self._places[said.worker]
                self._at(self.now_s + self._site.hop_s, self._deliver, flight)
            else:
                assert isinstance(said, message.Refuse), said
                self._fail(self._flights.pop(said.id), 503, said.reason)

    def _deliver(self, flight: _Flight) -> None:
        """The request reaches its replica."""
        call, place = flight.call, flight.worker
        assert place is not None
        assert isinstance(call.prompt, bytes)
        output_tokens = call.max_output_tokens if call.output_tokens is None else call.output_tokens
        request = SimRequest(
            flight.id,
            flight.active.client.name,
            call.prompt,
            output_tokens,
            call.max_output_tokens,
            expected_output_tokens=output_tokens,
        )
        self._take(place, self.replicas[place].arrive(request, self.now_s))

    def _fail(self, flight: _Flight, status: int, reason: str) -> None:
        self._record(flight, Outcome.FAILED, None, 0, status=status, error=f"HTTP {status}: {reason}")
        self._end(flight, Reply(outcome=Outcome.FAILED))

    # ---- what replicas say

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
                    flight.told_s = event.t_s
                    flight.token_times.append((round(event.t_s, 6), event.output_tokens))
            case Finished():
                del self._flights[event.id]
                self._finish(flight, event)
            case Refused():
                del self._flights[event.id]
                self._tell(flight.active.router, message.Done(event.id, outcome="failed"))
                self._fail(flight, 429 if self._site.policy in REFUSING else 400, event.reason)
            case _:
                assert_never(event)

    def _look(self, count: int) -> None:
        """What the running requests have received, at even times."""
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
                        if self._tells_output and t_s - flight.told_s >= PROGRESS_S:
                            flight.told_s = t_s
                            self._tell(flight.active.router, message.Progress(job.id, output_tokens))
        self._again(self._step_s, self._look, count)

    def _finish(self, flight: _Flight, event: Finished) -> None:
        times, t_s, output_tokens = flight.token_times, event.t_s, event.output_tokens
        _complete(times, t_s, output_tokens)
        assert flight.t_start_s is not None
        assert isinstance(flight.call.prompt, bytes)
        first_s = times[0][0]
        self._tell(
            flight.active.router,
            message.Done(
                flight.id,
                output_tokens=output_tokens,
                cached_tokens=event.cached_tokens,
                ttft_s=max(0.0, first_s - flight.t_start_s),
                tpot_s=None if output_tokens < 2 else max(0.0, t_s - first_s) / (output_tokens - 1),
            ),
        )
        self._record(flight, Outcome.OK, event.cached_tokens, output_tokens, status=200)
        self._end(flight, Reply(packed=event.answer))

    # ---- records

    def _record(
        self,
        flight: _Flight,
        outcome: Outcome,
        cached_tokens: int | None,
        output_tokens: int,
        *,
        status: int | None = None,
        error: str | None = None,
    ) -> None:
        active, call, times = flight.active, flight.call, flight.token_times
        self.progress.ended(outcome, output_tokens)
        self._records.add(
            RequestRecord(
                client=active.client.name,
                program=active.index,
                call=flight.number,
                stage=call.stage,
                t_intended_s=round(flight.t_intended_s, 6),
                t_start_s=None if flight.t_start_s is None else round(flight.t_start_s, 6),
                t_first_token_s=times[0][0] if times else None,
                t_done_s=round(self.now_s, 6),
                outcome=outcome.value,
                prompt_tokens=len(call.prompt) // message.TOKEN_BYTES,
                cached_tokens=cached_tokens,
                output_tokens=output_tokens,
                max_output_tokens=call.max_output_tokens,
                token_times=times,
                worker=None if flight.worker is None else self._workers[flight.worker],
                status=status,
                error=error,
            )
        )

    def _sample(self, count: int) -> None:
        """Ask all replicas, as the driver asks for their `/fair`."""
        for place, replica in enumerate(self.replicas):
            self._advance(place)
            state = replica.queue.status()
            known = {
                client.name: {meter: account[meter] for meter in driver.METERS}
                for client in self._clients
                if (account := state["clients"].get(client.name)) is not None
            }
            self._records.add(
                Sample(count, round(self.now_s, 6), self._workers[place], known, state["bound"])
            )
        self.progress.now_s = self.now_s
        if self._watch is not None:
            self._watch(self.progress)
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
