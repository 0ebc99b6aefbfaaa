"""One run of requests with deadlines: a placement that holds them, and simulated replicas. Virtual time.

What decides is the real code: the placement and its plans, in each replica a fair queue with its policy.
Modelled are engines (`sglang_fair.sim`), the time that a plan takes, and loading. The placement hears what the router's
core would tell it, in the same order: `place` when a request comes, `next` after everything that happens, `placed`,
`done`; of each worker what it can load and what it has.

A worker whose queue needs another model is sent nothing more. What it runs ends, or is taken back if `swap_tail` is off
and comes again as a further part of the same answer; then the model is loaded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any, cast

from router import events as message
from router.placement import PLACEMENTS, build
from router.placement.contract import Ended, Placement, Request
from router.placement.outputs import ExpectedOutputs
from router.radix import Hold, Match, RadixTree
from router.throttling import Kind, Throttling
from sglang_fair.common.deadlines import Promise
from sglang_fair.common.weights import Weights
from sglang_fair.core import options as policy_options
from sglang_fair.core.cost import Linear
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.throttle import Refusal, make_rules
from sglang_fair.sim.answers import TOKEN_BYTES
from sglang_fair.sim.replica import Event, Finished, Progress, Refused, Removed, Replica, SimRequest, Stored
from workloads.deadlines.baselines import make_baseline
from workloads.deadlines.fleet import CHUNK_TOKENS, Fleet, Shelf
from workloads.deadlines.traffic import THINK_S, Asked

MOST_S = 40_000.0
"""A run that lasts longer goes nowhere."""

NO_SHARES = 1e12
"""A quantum that no client uses up: then the order does not depend on what anybody had."""

PROGRESS_S = 1.0
"""How often gateways tell the router how far answers are."""


@dataclass(slots=True)
class Served:
    """What became of one request."""

    asked: Asked
    placed_s: float | None = None
    """When a worker got it for the first time."""
    first_s: float | None = None
    """When its first token came."""
    ended_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    worker: str = ""
    tier: int = 0
    expected_tokens: float = 0.0
    """Of its answer, when it was sent."""
    is_refused: bool = False

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.asked.at_s

    @property
    def met(self) -> bool:
        """Its first token came in time."""
        return self.first_s is not None and self.first_s <= self.asked.due_s


@dataclass(slots=True, eq=False)
class SimWorker:
    """A replica and what the router knows of it: a `WorkerView`."""

    name: str
    place: int
    replica: Replica
    shelf: Shelf
    model: str
    """Loaded, or being loaded."""
    serves: bool = True
    target: str | None = None
    capacity: float = 1.0
    in_flight: int = 0
    prefill_tokens: int = 0
    decode_tokens: float = 0.0
    dispatched: int = 0
    dispatched_tokens: int = 0
    overrun_tokens: int = 0
    """By how much answers in flight are longer than expected, as was looked up last."""
    wakes_s: float = inf

    @property
    def load(self) -> float:
        return self.in_flight / self.capacity

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that it has computed."""
        return self.replica.meters.extend_tokens

    @property
    def produced_tokens(self) -> int:
        """Output tokens that it has written."""
        return self.replica.meters.output_tokens


@dataclass(slots=True, eq=False)
class _Flight:
    asked: Asked
    request: Request
    served: Served
    worker: SimWorker | None = None
    matched_tokens: int = 0
    hold: Hold | None = None
    said: bytes = b""
    """Of its answer, in parts before this one."""
    part: int = 0
    has_output: bool = False
    overrun_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run: all requests in order of arrival, when the last one ended, and what workers did."""

    served: Sequence[Served]
    end_s: float
    plans: int
    swaps: int
    swap_s: float
    evictions: int
    busy_s: float
    extend_tokens: int
    output_tokens: int
    cached_tokens: int
    report: Mapping[str, Any] = field(default_factory=dict)
    replicas: Sequence[Replica] = ()


class Cluster:
    """`run` once."""

    def __init__(
        self,
        fleet: Fleet,
        asked: Iterable[Asked],
        *,
        until_s: float = MOST_S,
        watch: Callable[["Cluster"], None] | None = None,
        watch_every_s: float = 1.0,
    ) -> None:
        self.fleet = fleet
        self.now_s = 0.0
        own = {"solver": "search", "plan_work": fleet.plan_work} if fleet.placement == "qlm" else {}
        evicts = own | ({"evicts": True} if fleet.evicts and fleet.placement == "qlm" else {})
        self.placement: Placement = (
            build(fleet.placement, **evicts, **fleet.options)
            if fleet.placement in PLACEMENTS
            else make_baseline(fleet.placement, fleet.options)
        )
        self._p: Any = self.placement
        self._uses_caches = self.placement.uses_caches and getattr(self.placement, "prefixes", True)
        self.tree = RadixTree(16, 8_000_000)
        self.served: list[Served] = []
        self.waiting: dict[str, _Flight] = {}
        self.flights: dict[str, _Flight] = {}
        self._throttling = Throttling(cast(Kind, fleet.throttle), make_rules(fleet.limits, "limits"))
        self._outputs = {model: ExpectedOutputs() for model in fleet.models}
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0
        self.plans = 0
        self._until_s, self._watch, self._watch_every_s = until_s, watch, watch_every_s
        self.workers = [self._worker(place) for place in range(len(fleet.gpus))]
        self._by_name = {worker.name: worker for worker in self.workers}
        self._taking = list(self.workers)
        for one in asked:
            self._at(one.at_s, self._arrive, one)

    def run(self) -> Outcome:
        """To the end of the last request, or to `until_s`."""
        self._at(PROGRESS_S, self._tell, None)
        if self._watch is not None:
            self._at(0.0, self._look, None)
        while self._events:
            self.now_s, _, action, argument = heappop(self._events)
            if self.now_s > self._until_s:
                break
            action(argument)
            self._pump()
        replicas = [worker.replica for worker in self.workers]
        meters = [replica.meters for replica in replicas]
        ends = [one.ended_s for one in self.served if one.ended_s is not None]
        report = self._p.report(self.now_s) if hasattr(self._p, "report") else {}
        return Outcome(
            self.served,
            max(ends, default=0.0),
            self.plans,
            sum(one.swaps for one in meters),
            sum(one.swap_s for one in meters),
            sum(one.evictions for one in meters),
            sum(one.busy_s for one in meters),
            sum(one.extend_tokens for one in meters),
            sum(one.output_tokens for one in meters),
            sum(one.cached_tokens for one in meters),
            report,
            replicas,
        )

    # ---- the clock

    def _at(self, time_s: float, action: Callable[[Any], None], argument: Any) -> None:
        self._count += 1
        heappush(self._events, (time_s, self._count, action, argument))

    def _look(self, _: None) -> None:
        assert self._watch is not None
        self._watch(self)
        if len(self._events) > 1 or self.flights:
            self._at(self.now_s + self._watch_every_s, self._look, None)

    def _tell(self, _: None) -> None:
        """Gateways tell how far answers are; not for ever, if nothing else is to come."""
        for worker in self.workers:
            if self._throttling.kind != "none":
                self._throttling.load(message.Load(worker.name, *worker.replica.load()), self.now_s)
            if worker.in_flight:
                self._take(worker, worker.replica.advance(self.now_s))
                for job in worker.replica.queue.running():
                    flight = self.flights[job.id]
                    more = job.output_tokens - int(flight.request.expected_output_tokens)
                    if more > flight.overrun_tokens:
                        worker.overrun_tokens += more - flight.overrun_tokens
                        flight.overrun_tokens = more
        if self.flights or len(self._events) > (self._watch is not None):
            self._at(self.now_s + PROGRESS_S, self._tell, None)

    # ---- workers

    def _worker(self, place: int) -> SimWorker:
        fleet, name = self.fleet, self.fleet.workers[place]
        model = fleet.begins_with(place)
        policy = policy_options.make(
            fleet.policy,
            fleet.policy_options,
            quantum=fleet.quantum if fleet.shares else NO_SHARES,
            weights=Weights({}),
        )
        queue = FairQueue(policy, Linear())
        replica = Replica(
            queue,
            fleet.cost(place, model),
            fleet.settings(place, model),
            events=self._uses_caches,
            place=place,
            places=len(fleet.gpus),
        )
        worker = SimWorker(name, place, replica, Shelf(fleet, model), model)
        self.tree.add_worker(name, has_events=True)
        self.placement.worker_up(name, 1.0)
        self._equip(worker)
        return worker

    def _equip(self, worker: SimWorker) -> None:
        kv_tokens = self.fleet.kv_tokens(worker.place, worker.model)
        self._p.equip(
            worker.name,
            loaded=worker.model if worker.serves else None,
            kv_tokens=kv_tokens,
            chunk_tokens=CHUNK_TOKENS,
            now_s=self.now_s,
        )
        self._p.can_load(worker.name, self._swap_s(worker), self.now_s)

    def _swap_s(self, worker: SimWorker) -> dict[str, float]:
        fleet = self.fleet
        if not fleet.swaps:
            return {}
        return {
            model: worker.shelf.swap_s(model) for model in fleet.models if fleet.fits(worker.place, model)
        }

    def _want(self, worker: SimWorker) -> None:
        """Begin to load what its queue needs, if that is another model."""
        wanted = self._p.wanted(worker.name)
        if wanted is None or wanted == worker.model or not self.fleet.swaps:
            return
        worker.serves, worker.target = False, wanted
        self._taking = [one for one in self.workers if one.serves]
        self._p.loaded(worker.name, None, self.now_s)
        if not self.fleet.swap_tail:
            for name in [name for name, flight in self.flights.items() if flight.worker is worker]:
                self._take(worker, worker.replica.abort(name, self.now_s))
        self._load(worker)

    def _load(self, worker: SimWorker) -> None:
        """Load its target once nothing runs there."""
        if worker.target is None or worker.in_flight:
            return
        model, worker.target = worker.target, None
        takes_s = worker.shelf.swap_s(model)
        worker.shelf.load(model)
        worker.model = model
        events = worker.replica.swap(
            self.fleet.cost(worker.place, model),
            self.fleet.settings(worker.place, model),
            takes_s,
            self.now_s,
        )
        self._take(worker, events)
        self._at(self.now_s + takes_s, self._loaded, worker)

    def _loaded(self, worker: SimWorker) -> None:
        worker.serves = True
        self._taking = [one for one in self.workers if one.serves]
        self._p.loaded(worker.name, worker.model, self.now_s)
        self._equip(worker)

    # ---- requests

    def _arrive(self, asked: Asked) -> None:
        served = Served(asked)
        self.served.append(served)
        due_s = asked.due_s
        if asked.interaction:
            arrive = message.Arrive(
                asked.id,
                asked.client,
                b"",
                app="app",
                interaction=asked.interaction,
                last=asked.call == asked.calls,
                begun=asked.call - 1,
            )
            verdict = self._throttling.judge(arrive, [one.name for one in self._taking], self.now_s)
            if isinstance(verdict, Refusal):
                served.is_refused = True
                self._throttling.ended(asked.id, self.now_s)
                return
            due = message.Due(asked.slo_class, asked.slo_s, asked.slo_s)
            due_s = self._throttling.promised(arrive, due, self.now_s).due_s
        self._ask(asked, served, asked.tokens if self._uses_caches else b"", 0, b"", due_s)

    def _ask(self, asked: Asked, served: Served, tokens: bytes, part: int, said: bytes, due_s: float) -> None:
        written = len(said) // TOKEN_BYTES
        request = Request(
            f"{asked.id}/{part}" if part else asked.id,
            asked.client,
            tokens,
            asked.prompt_tokens + written,
            asked.most_tokens - written,
            self._outputs[asked.model].of(asked.client, asked.most_tokens - written),
            asked.model,
            model=asked.model,
            promise=Promise(asked.slo_class, asked.slo_s, due_s),
        )
        flight = _Flight(asked, request, served, said=said, part=part)
        self.waiting[request.id] = flight
        allowed = [one for one in self._taking if one.model == asked.model]
        match = self._match(request)
        name = self.placement.place(request, match, allowed, self.now_s)
        if name is not None:
            self._send(flight, name)

    def _match(self, request: Request) -> Match:
        return self.tree.match(request.tokens, request.namespace)

    def _may(self, request: Request, worker: str) -> bool:
        one = self._by_name[worker]
        return one.serves and one.model == request.model

    def _pump(self) -> None:
        """What the core does after each event."""
        while self.waiting:
            chosen = self._p.next(self._taking, self._match, self._may, self.now_s)
            if chosen is None:
                break
            request, name = chosen
            self._send(self.waiting[request.id], name)
        for worker in self.workers:
            if worker.serves:
                self._want(worker)
        if hasattr(self._p, "question"):
            asked = self._p.question(self.now_s)
            if asked is not None:
                self.plans += 1
                number, work = asked
                self._at(self.now_s + self.fleet.plan_s, self._planned, (number, work()))

    def _planned(self, answer: tuple[int, object]) -> None:
        self._p.answer(*answer, self.now_s)

    def _send(self, flight: _Flight, name: str) -> None:
        worker, request, asked = self._by_name[name], flight.request, flight.asked
        del self.waiting[request.id]
        self.flights[request.id] = flight
        match = self._match(request)
        self.placement.placed(request, name, match, self.now_s)
        flight.worker, flight.matched_tokens = worker, match.of(name)
        if self._uses_caches:
            flight.hold = self.tree.hold(name, request.tokens, request.namespace, match, request.client)
        worker.in_flight += 1
        worker.prefill_tokens += request.input_tokens - flight.matched_tokens
        worker.decode_tokens += request.expected_output_tokens
        worker.dispatched += 1
        worker.dispatched_tokens += request.input_tokens
        served = flight.served
        served.worker = name
        if served.placed_s is None:
            served.placed_s = self.now_s
            served.expected_tokens = request.expected_output_tokens
        served.tier = self._p.tier(request.id) if hasattr(self._p, "tier") else 0
        written = len(flight.said) // TOKEN_BYTES
        sent = SimRequest(
            request.id,
            asked.client,
            asked.tokens + flight.said,
            asked.output_tokens - written,
            asked.most_tokens - written,
            namespace=asked.model,
            interaction=asked.interaction,
            deadline_s=None if request.promise is None else request.promise.due_s,
            call=asked.call,
            slo_class=asked.slo_class,
            tier=served.tier,
        )
        self._take(worker, worker.replica.arrive(sent, self.now_s))

    # ---- what replicas say

    def _wake(self, worker: SimWorker) -> None:
        if self.now_s == worker.wakes_s:
            worker.wakes_s = inf
            self._take(worker, worker.replica.advance(self.now_s))

    def _take(self, worker: SimWorker, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Stored():
                    self.tree.stored(
                        worker.name,
                        event.hashes,
                        event.parent,
                        event.tokens,
                        event.block_tokens,
                        event.namespace,
                    )
                case Removed():
                    self.tree.removed(worker.name, event.hashes)
                case Progress():
                    self._first(self.flights[event.id], event.t_s)
                case Finished():
                    self._finished(worker, event)
                case Refused():
                    raise AssertionError(f"{event.id}: {event.reason}")
        next_s = worker.replica.next_s
        if next_s != worker.wakes_s:
            worker.wakes_s = next_s
            if next_s < inf:
                self._at(next_s, self._wake, worker)

    def _first(self, flight: _Flight, t_s: float) -> None:
        """A request has output."""
        worker = flight.worker
        if worker is not None and not flight.has_output:
            flight.has_output = True
            worker.prefill_tokens -= flight.request.input_tokens - flight.matched_tokens
        if flight.served.first_s is None:
            flight.served.first_s = t_s

    def _finished(self, worker: SimWorker, event: Finished) -> None:
        flight = self.flights.pop(event.id)
        if not flight.has_output:
            worker.prefill_tokens -= flight.request.input_tokens - flight.matched_tokens
        worker.decode_tokens -= flight.request.expected_output_tokens
        worker.overrun_tokens -= flight.overrun_tokens
        served, request = flight.served, flight.request
        worker.in_flight -= 1
        if flight.hold is not None:
            self.tree.release(flight.hold)
        served.output_tokens += event.output_tokens
        served.cached_tokens += event.cached_tokens
        if served.first_s is None and event.output_tokens:
            served.first_s = event.t_s
        first_s = served.first_s
        tpot_s = None
        if not flight.part and first_s is not None and event.output_tokens > 1:
            tpot_s = (event.t_s - first_s) / (event.output_tokens - 1)
        ended = Ended(
            request,
            worker.name,
            flight.matched_tokens,
            event.output_tokens,
            "aborted" if event.aborted else "ok",
            None if first_s is None or flight.part else max(0.0, first_s - flight.asked.at_s),
            tpot_s,
        )
        self.placement.done(ended, self.now_s)
        if event.aborted and served.output_tokens < flight.asked.output_tokens:
            said = flight.said + event.answer
            tokens = flight.asked.tokens + said if self._uses_caches else b""
            due_s = flight.request.promise.due_s if flight.request.promise else flight.asked.due_s
            self._ask(flight.asked, served, tokens, flight.part + 1, said, due_s)
        else:
            served.ended_s = event.t_s
            if flight.asked.interaction:
                self._throttling.ended(flight.asked.id, self.now_s, is_served=True)
                if flight.asked.call < flight.asked.calls:
                    following = flight.asked.following(event.t_s + THINK_S, flight.said + event.answer)
                    self._at(following.at_s, self._arrive, following)
            self._outputs[flight.asked.model].learn(flight.asked.client, served.output_tokens)
        self._load(worker)


def simulate(fleet: Fleet, asked: Iterable[Asked], **how: Any) -> Outcome:
    """A run of `asked` on `fleet`. The same for the same arguments."""
    return Cluster(fleet, asked, **how).run()
