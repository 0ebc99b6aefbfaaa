"""One session of load (`workloads.session`) on a simulated cluster (`cluster`): the live driver's session, with a heap
of events for a clock. Requests have no time-out.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import assert_never

from router.events import TOKEN_BYTES
from sglang_fair.core import option_values
from sglang_fair.sim.replica import SimRequest
from workloads.clients import Client, client_facts
from workloads.programs import Outcome, Reply
from workloads.records import METERS, End, Manifest, Records, Run, Sample
from workloads.session import (
    RUN_ENDED,
    Action,
    Cancel,
    Ending,
    Plan,
    Record,
    Request,
    Send,
    Session,
    Timer,
    Wait,
)
from workloads.simulation.cluster import Cluster, Flight, complete
from workloads.simulation.site import Site

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
            "options": dict(option_values(policy)),
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
) -> Run:
    """Run the programs of `clients` (built with a `PackedCodec`) to the plan's end, in virtual seconds.

    The run is like the live driver's: `measures.summarize`, reports and plots take it unchanged. Equal arguments
    give equal runs. `manifest` in place of `describe`'s own; `path` is where the records are written besides.

    Raises ValueError for a site or clients that make no sense, and RuntimeError when programs wait for ever.
    """
    made = manifest or describe(site, clients, plan, seed=seed, workload=workload)
    with Records(path, made) as records, _few_collections():
        Simulation(site, clients, plan, records, seed=seed).run()
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
    ) -> None:
        self.session = Session(clients, plan)
        self.cluster = Cluster(site, self._over, step_s=plan.token_step_s or TOKEN_STEP_S)
        self.replicas, self.routers = self.cluster.replicas, self.cluster.routers
        self._site = site
        self._clients = clients
        self._plan = plan
        self._records = records
        self._ingress = Random(f"{seed} ingress")
        self._router_of: list[int] = []
        """Each program's router, by the program's number."""

    def run(self) -> None:
        """Run to the plan's end. Raises RuntimeError if programs wait for what never comes."""
        session, cluster = self.session, self.cluster
        self._carry_out(session.start())
        cluster.every(self._plan.sample_s, self._sample, 0)
        cluster.begin()
        while not session.over and cluster.step():
            pass
        if not session.over:
            raise RuntimeError(
                f"at {cluster.now_s:g} s {len(session.under_way)} requests wait for what will never happen"
            )
        self._cut_off()

    # ---- the session

    def _due(self, what: Timer) -> None:
        self._carry_out(self.session.due(what, self.cluster.now_s))

    def _end(self, request: Request, ending: Ending) -> None:
        self._carry_out(self.session.ended(request, ending, self.cluster.now_s))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Wait(until_s, what):
                    if isinstance(what, Request):
                        what.id = str(self.cluster.scheduled)  # unique; `vtc-noisy` draws its errors from it
                    self.cluster.at(until_s, self._due, what)
                case Send(request):
                    self._send(request)
                case Cancel(request):
                    self.cluster.give_up(request.id)
                case Record(row):
                    self._records.add(row)
                case _:
                    assert_never(action)

    def _cut_off(self) -> None:
        """The run has ended: cancel what is under way, requests whose time was this instant included."""
        for what in self.cluster.rest():
            if isinstance(what, Request):
                self._due(what)
        for place in range(len(self.replicas)):
            self.cluster.advance(place)
        for request in list(self.session.under_way):
            self._end(request, self._cancelled(request))
        self._carry_out(self.session.cut_off())
        self._records.add(End(round(self.cluster.now_s, 6)))

    def _cancelled(self, request: Request) -> Ending:
        """How far a request had come when the run ended; some never got a connection."""
        flight, ending = (
            self.cluster.flights.get(request.id),
            Ending(Reply(outcome=Outcome.CANCELLED), error=RUN_ENDED),
        )
        if flight is not None and flight.worker is not None:
            ending.worker = self.cluster.workers[flight.worker]
            job = self.replicas[flight.worker].queue.find(request.id) if flight.token_times else None
            if job is not None:
                ending.cached_tokens, ending.output_tokens = job.cached_tokens, job.output_tokens
                complete(flight.token_times, self.cluster.now_s, job.output_tokens)
        return self._known(request, flight, ending)

    # ---- requests

    def _send(self, request: Request) -> None:
        call, client = request.call, request.program.client
        if not isinstance(call.prompt, bytes):
            raise ValueError("a modelled engine takes packed tokens: give the programs a PackedCodec")
        asked = SimRequest(
            request.id,
            request.client,
            call.prompt,
            call.max_output_tokens,
            call.max_output_tokens,
            expected_output_tokens=call.max_output_tokens,
            app=client.app,
            interaction=str(request.program.index),
            stage=call.stage,
            system_tokens=call.system_tokens,
        )
        self.cluster.send(asked, request, router=self._router(request.program.number), last=call.last)

    def _over(self, flight: Flight, ending: Ending) -> None:
        self._end(flight.owner, self._known(flight.owner, flight, ending))

    def _router(self, program: int) -> int:
        """The router of a program: drawn for each in the order in which programs began."""
        if len(self.routers) == 1:
            return 0
        while len(self._router_of) <= program:
            self._router_of += self._ingress.choices(range(len(self.routers)), self._site.ingress)
        return self._router_of[program]

    def _known(self, request: Request, flight: Flight | None, ending: Ending) -> Ending:
        ending.prompt_tokens = len(request.call.prompt) // TOKEN_BYTES
        ending.token_times = [] if flight is None else flight.token_times
        ending.waited_s = self._waited_s(request, flight)
        return ending

    def _waited_s(self, request: Request, flight: Flight | None) -> float | None:
        """Before it was admitted for the first time, or given up."""
        if not self._plan.waits or flight is None or flight.worker is None or not flight.is_there:
            return None
        found = self.replicas[flight.worker].record.find(request.id)
        return round(found[0]["waited_s"] - found[0]["waited_again_s"], 3) if found else None

    def _sample(self, count: int) -> None:
        """Ask all replicas, as the driver asks for their `/fair`."""
        for place, replica in enumerate(self.replicas):
            self.cluster.advance(place)
            state = replica.queue.status()
            known = {
                client.name: {meter: account[meter] for meter in METERS}
                for client in self._clients
                if (account := state["clients"].get(client.name)) is not None
            }
            worker, now_s = self.cluster.workers[place], round(self.cluster.now_s, 6)
            self._records.add(Sample(count, now_s, worker, known, state["bound"]))
