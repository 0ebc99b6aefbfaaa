"""D2LPM's theorems over several replicas: the real router, any placement, engine models with a queue and books each.

A worker's life runs from its start to its end; one that comes back is another life, with a new queue and an empty
cache. Clients that wait at every worker differ by what they differ at each, so the sum of the workers' own bounds is
at most 2·|W|·(U + Q^u), with U of the worker where it is largest (Theorem 5.1).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Router
from router.events import (
    Arrive,
    Done,
    Event,
    Held,
    Place,
    Progress,
    Refuse,
    Removed,
    Stored,
    WorkerDown,
    WorkerUp,
)
from router.placement import PLACEMENTS, build, parameters
from sglang_fair.common.weights import Weights
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.fcfs import Lpm
from sglang_fair.core.job import Job
from sglang_fair.core.policy import Policy
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.vtc import Vtc
from tests.support.budget import examples
from tests.support.engine_model import (
    ClientHabit,
    EngineCase,
    EngineModel,
    Request,
    ServedState,
    Tokens,
    Trace,
    Traffic,
)

pytestmark = pytest.mark.slow

THEOREMS = settings(max_examples=examples(6))
INF = float("inf")
CREDITED = ("d2lpm", "d2lpm-queue")


# ---- the cluster


@dataclass(slots=True)
class Flight:
    """A request at its worker, and the steps in which it was sent and made its first token."""

    request: Request
    worker: str
    job: Job
    sent: int
    first: int | None = None


class Everywhere(Trace):
    """Of a cluster: a client's service is the sum over all lives; it waits when it does at every worker that is up."""

    replica: "Cluster"

    def __call__(self) -> None:
        up, lives = self.replica.replicas.values(), self.replica.lives()
        self.rows.append(
            ServedState(
                tuple(
                    sum([life.service[name] for life in lives]) / self.weights.get(name, 1.0)
                    for name in self.clients
                ),
                tuple(all(replica.waiting[name] for replica in up) for name in self.clients),
                tuple(any(replica.running[name] for replica in up) for name in self.clients),
            )
        )


class Cluster:
    """A router and its workers, in steps of a second; what a gateway does is here.

    The pool of a worker is that of the case times its capacity. With `kv` the workers tell what they cache;
    without, the router believes what it sent.
    """

    def __init__(
        self,
        case: EngineCase,
        router: Router,
        policy: Callable[[], Policy],
        *,
        capacities: tuple[int, ...] = (1, 1),
        weights: dict[str, float] | None = None,
        kv: bool = True,
    ) -> None:
        self.case, self.router = case, router
        self.steps = 0
        self.replicas: dict[str, EngineModel] = {}
        """Those that are up."""
        self.histories: dict[str, list[Trace]] = {}
        """Of each worker: its lives, the last one last."""
        self.whole = Everywhere(self, case.clients, weights or {})
        self._policy, self._kv = policy, kv
        self._capacity = {f"w{number}": capacity for number, capacity in enumerate(capacities)}
        self._asked: dict[str, Request] = {}
        self._flights: dict[str, Flight] = {}
        self._cached: dict[str, set[Tokens]] = {}
        self._hashes: dict[Tokens, int] = {}
        for worker in self._capacity:
            self.start(worker)

    # -- workers

    def start(self, worker: str) -> None:
        case, capacity = self.case, self._capacity[worker]
        replica = self.replicas[worker] = EngineModel(
            FairQueue(self._policy()),
            pool_tokens=case.pool_tokens * capacity,
            cache_tokens=case.cache_tokens,
            page_tokens=case.page_tokens,
            step_tokens=case.step_tokens,
            block_tokens=case.block_tokens,
        )
        history = Trace(replica, case.clients, self.whole.weights)
        replica.watchers += [history, self.whole]
        self.histories.setdefault(worker, []).append(history)
        self._cached[worker] = set()
        self._tell(WorkerUp(worker, "", "tcp://kv" if self._kv else None, None, float(capacity)))
        self.whole()

    def stop(self, worker: str) -> None:
        """It dies. What it had not begun to answer is sent again, the rest fails."""
        del self.replicas[worker]
        lost = [flight for flight in self._flights.values() if flight.worker == worker]
        self._tell(WorkerDown(worker))
        for flight in lost:
            del self._flights[flight.request.id]
            if flight.job.output_tokens:
                self._tell(Done(flight.request.id, flight.job.output_tokens, outcome="failed"))
            else:
                self._ask(flight.request)

    def lives(self) -> list[EngineModel]:
        return [history.replica for lives in self.histories.values() for history in lives]

    # -- clients

    def arrive(self, request: Request) -> None:
        self._ask(request)

    def abort(self, request_id: str) -> None:
        if request_id in self._asked:
            del self._asked[request_id]
            self._tell(Done(request_id, outcome="aborted"))
        elif (flight := self._flights.get(request_id)) is not None:
            self.replicas[flight.worker].abort(request_id)
            self._settle(flight.worker)

    def has(self, request_id: str) -> bool:
        return request_id in self._asked or request_id in self._flights

    def waiting(self, client: str) -> int:
        held = sum(request.client == client for request in self._asked.values())
        return held + sum(replica.waiting[client] for replica in self.replicas.values())

    def least_waiting(self, client: str) -> int:
        """At the worker where the fewest of its requests wait."""
        return min(replica.waiting[client] for replica in self.replicas.values())

    # -- time

    def step(self) -> None:
        self.steps += 1
        for worker, replica in list(self.replicas.items()):
            replica.step()
            self._tell_cache(worker, replica)
            self._settle(worker)
        for flight in self._flights.values():
            if flight.job.output_tokens:
                flight.first = flight.first or self.steps
                self._tell(Progress(flight.request.id, flight.job.output_tokens))

    def bound(self) -> float:
        """The sum of the workers' own, of the life where it is largest."""
        return sum(
            max(life.replica.queue.account.bound() for life in lives) for lives in self.histories.values()
        )

    def printed_bound(self, quantum: float) -> float:
        """2·|W|·(U + Q^u), with the longest prompt and the pools."""
        pools = [self.case.pool_tokens * capacity for capacity in self._capacity.values()]
        return sum(2 * (self.case.longest_prompt + 2 * pool + quantum) for pool in pools)

    # -- the wire

    def _ask(self, request: Request) -> None:
        self._asked[request.id] = request
        tokens = np.asarray(request.tokens, "<u4").tobytes()
        self._tell(Arrive(request.id, request.client, tokens, request.max_output_tokens))

    def _tell(self, event: Event) -> None:
        for _, answer in self.router.handle(event, float(self.steps)):
            if isinstance(answer, Held):
                continue
            request = self._asked.pop(answer.id)
            if isinstance(answer, Place):
                self._send(request, answer.worker)
            else:
                assert isinstance(answer, Refuse)

    def _send(self, request: Request, worker: str) -> None:
        replica = self.replicas[worker]
        replica.arrive(request)
        job = replica.queue.find(request.id)
        self._flights[request.id] = Flight(request, worker, job, self.steps)

    def _settle(self, worker: str) -> None:
        """Tells what has ended there."""
        ended = self.replicas[worker].ended
        while ended:
            flight = self._flights.pop(ended.pop(0))
            request, output_tokens = flight.request, flight.job.output_tokens
            outcome = "ok" if output_tokens == request.output_tokens else "aborted"
            first = flight.first or self.steps
            tpot_s = (self.steps - first) / (output_tokens - 1) if output_tokens > 1 else None
            cached = flight.job.cached_tokens
            self._tell(Done(request.id, output_tokens, cached, outcome, first - flight.sent + 1.0, tpot_s))

    def _tell_cache(self, worker: str, replica: EngineModel) -> None:
        if not self._kv:
            return
        cached = {*replica.cache._pages, *replica.cache._pinned}
        before, self._cached[worker] = self._cached[worker], cached
        page = self.case.page_tokens
        for prefix in sorted(cached - before, key=len):
            above = self._hash(prefix[:-page]) if len(prefix) > page else None
            block = np.asarray(prefix[-page:], "<u4").tobytes()
            self._tell(Stored(worker, (self._hash(prefix),), above, block, page))
        for prefix in sorted(before - cached, key=lambda prefix: (-len(prefix), prefix)):
            self._tell(Removed(worker, (self._hash(prefix),)))

    def _hash(self, prefix: Tokens) -> int:
        return self._hashes.setdefault(prefix, len(self._hashes))


class Clients(Traffic):
    """`depth` is of the requests that wait at each worker if a load floods, in all if not; never more than `most`."""

    def __init__(self, case: EngineCase, *, everywhere: bool = True, most: int = 60) -> None:
        super().__init__(case)
        self._everywhere, self._most = everywhere, most

    def step(self, cluster: Cluster) -> None:
        for load in self._case.loads:
            random, alive = self._random[load.client], self._alive[load.client]
            alive[:] = [id for id in alive if cluster.has(id)]
            if cluster.replicas and self._sends(load, cluster.steps, alive):
                while self._wants_more(load, cluster):
                    request = self._request(load, random)
                    alive.append(request.id)
                    cluster.arrive(request)
                    if not cluster.has(request.id):
                        break  # refused
            if load.abort_every:
                for id in list(alive):
                    if random.randrange(load.abort_every) == 0:
                        cluster.abort(id)

    def _wants_more(self, load: ClientHabit, cluster: Cluster) -> bool:
        waiting = cluster.waiting(load.client)
        if self._everywhere and not (load.closed or load.pause_steps):
            return waiting < self._most and cluster.least_waiting(load.client) < load.depth
        return waiting < load.depth


def run(
    cluster: Cluster, *, everywhere: bool = True, churn: Callable[[Cluster], None] | None = None
) -> Cluster:
    """The cluster's case to its end. `churn` acts before each step."""
    clients = Clients(cluster.case, everywhere=everywhere)
    for _ in range(cluster.case.steps):
        if churn is not None:
            churn(cluster)
        clients.step(cluster)
        cluster.step()
    return cluster


def router_of(
    placement: str, case: EngineCase, quantum: float, weights: dict[str, float] | None = None
) -> Router:
    given = {
        "worker_quantum": quantum,
        "client_weights": weights or {},
        "cache_tokens": case.cache_tokens or 1,
    }
    known = {name: value for name, value in given.items() if name in parameters(placement)}
    return Router(build(placement, **known), page_size=case.page_tokens, max_tree_tokens=2000)


# ---- any clients, any cluster


@dataclass(frozen=True)
class Plan:
    """Two clients that want everything, and perhaps one that comes and goes."""

    case: EngineCase
    capacities: tuple[int, ...]
    kv: bool
    quantum: int
    worker_quantum: int
    weights: dict[str, float]

    def cluster(self, placement: str, policy: Callable[[], Policy] | None = None) -> Cluster:
        return Cluster(
            self.case,
            router_of(placement, self.case, self.worker_quantum, self.weights),
            policy or (lambda: Dlpm(quantum=self.quantum, weights=Weights(self.weights))),
            capacities=self.capacities,
            weights=self.weights,
            kv=self.kv,
        )


@st.composite
def plans(draw) -> Plan:
    loads = []
    for client in "fgh"[: draw(st.sampled_from([2, 2, 3]))]:
        floods = client != "h"
        longest, most = draw(st.integers(1, 6)), draw(st.integers(2, 4))
        loads.append(
            ClientHabit(
                client,
                depth=8 if floods else draw(st.integers(1, 8)),
                busy_steps=1 if floods else draw(st.integers(1, 8)),
                pause_steps=0 if floods else draw(st.integers(0, 8)),
                closed=not floods,
                start=draw(st.sampled_from([0, 0, 7])),
                prompt_tokens=(draw(st.integers(1, longest)), longest),
                output_tokens=(draw(st.integers(2, most)), most),
                families=draw(st.integers(1, 3)),
                shared_tokens=draw(st.sampled_from([0, 4, 8])),
                private=draw(st.booleans()),
                abort_every=draw(st.sampled_from([0, 0, 16])),
            )
        )
    largest = max(load.shared_tokens + load.prompt_tokens[1] + load.output_tokens[1] for load in loads)
    case = EngineCase(
        tuple(loads),
        pool_tokens=largest + draw(st.integers(0, 2 * largest)),
        cache_tokens=draw(st.sampled_from([0, 32, 128])),
        page_tokens=draw(st.sampled_from([1, 2])),
        step_tokens=draw(st.sampled_from([None, None, 4])),
        block_tokens=draw(st.sampled_from([None, 1])),
        seed=draw(st.integers(0, 2**20)),
        steps=40,
    )
    return Plan(
        case,
        capacities=tuple(draw(st.lists(st.sampled_from([1, 1, 2]), min_size=2, max_size=3))),
        kv=draw(st.booleans()),
        quantum=draw(st.sampled_from([1, 10, 30])),
        worker_quantum=draw(st.sampled_from([5, 40, 200])),
        weights=draw(st.fixed_dictionaries({name: st.sampled_from([1.0, 1.0, 0.5, 2.0]) for name in "fgh"})),
    )


@pytest.mark.parametrize("placement", sorted(PLACEMENTS))
@settings(THEOREMS, max_examples=examples(4))
@given(plan=plans())
def test_backlogged_clients_differ_by_at_most_the_bound_of_all_workers(placement, plan):
    """Theorems 5.1 (both wait everywhere) and 5.2 (one does), whatever the placement is."""
    cluster = run(plan.cluster(placement))
    bound = cluster.bound()
    assert bound <= cluster.printed_bound(plan.quantum) / min(1.0, *plan.weights.values())
    assert cluster.whole.gap_between_backlogged() <= bound + 1e-6
    assert cluster.whole.lag_of_backlogged() <= bound + 1e-6
    check_each_worker(cluster)


def check_each_worker(cluster: Cluster) -> None:
    """Theorems 4.1, 4.2 and A.2 where a client waits, wherever else it does; for each life."""
    for lives in cluster.histories.values():
        for life in lives:
            bound = life.replica.queue.account.bound()
            assert life.gap_between_backlogged() <= bound + 1e-6
            assert life.lag_of_backlogged() <= bound + 1e-6
            assert life.service_before_dispatch() <= (len(life.clients) - 1) * bound + 1e-6


@THEOREMS
@given(plan=plans())
def test_a_cache_blind_turn_adds_the_bounds_up_too(plan):
    """Theorem A.6: VTC behind each client's own round robin."""
    cluster = run(plan.cluster("client_round_robin", lambda: Vtc(weights=Weights(plan.weights))))
    assert cluster.whole.gap_between_backlogged() <= cluster.bound() + 1e-6


# ---- workers that die and come back


@settings(THEOREMS, max_examples=examples(8))
@given(
    plan=plans(),
    placement=st.sampled_from((*CREDITED, "round_robin")),
    stop=st.integers(5, 20),
    away=st.integers(1, 15),
)
def test_a_worker_s_death_moves_nobody_s_bound(plan, placement, stop, away):
    """Each life keeps its own bound, the survivors' run on through death and return. While two clients wait at all
    that are up, they differ by at most 2·|W|·(U + Q^u), the worker that dies on the way counted; such a time ends when
    a worker joins, where at first nobody waits."""
    cluster = run(plan.cluster(placement), churn=dies_and_returns("w0", stop, stop + away))
    check_each_worker(cluster)
    assert [len(lives) for lives in cluster.histories.values()][:2] == [2, 1]
    assert cluster.whole.gap_between_backlogged() <= cluster.bound() + 1e-6
    assert cluster.whole.lag_of_backlogged() <= cluster.bound() + 1e-6


def dies_and_returns(worker: str, stop: int, back: int) -> Callable[[Cluster], None]:
    def churn(cluster: Cluster) -> None:
        if cluster.steps == stop:
            cluster.stop(worker)
        elif cluster.steps == back:
            cluster.start(worker)

    return churn


FLOOD = EngineCase(
    loads=(
        ClientHabit("f", 8, prompt_tokens=(2, 2), output_tokens=(4, 4), families=1, shared_tokens=12),
        ClientHabit("g", 8, prompt_tokens=(14, 14), output_tokens=(4, 4), families=1, shared_tokens=0),
    ),
    pool_tokens=54,
    cache_tokens=128,
    page_tokens=2,
    step_tokens=None,
    block_tokens=1,
    seed=1,
    steps=80,
)
"""f has a hot prefix, g has none, both want everything: by the cache alone f would have it."""


def fair() -> Policy:
    return Dlpm(quantum=20)


def flood(
    placement: str, policy: Callable[[], Policy] = fair, case: EngineCase = FLOOD, quantum: float = 60
) -> Cluster:
    return Cluster(case, router_of(placement, case, quantum), policy)


@pytest.mark.parametrize("placement", CREDITED)
def test_survivors_are_fair_without_a_break(placement):
    """Both clients wait at w1 from the first step to the last; w0 dies at step 20 and is back at step 40."""
    cluster = run(flood(placement), churn=dies_and_returns("w0", 20, 40))
    (survivor,) = cluster.histories["w1"]
    bound = survivor.replica.queue.account.bound()
    assert all(all(row.waiting) for row in survivor.rows[60:])
    assert min(survivor.rows[-1].service) > 3 * bound
    assert survivor.gap_between_backlogged() <= bound
    assert min(cluster.histories["w0"][1].rows[-1].service) > bound


# ---- what the theorems need


@pytest.mark.parametrize("placement", [*CREDITED, "round_robin"])
def test_no_placement_is_fair_over_replicas_that_are_not(placement):
    kept, greedy = run(flood(placement)), run(flood(placement, Lpm))
    bound = kept.bound()
    assert all(all(row.waiting) for row in kept.whole.rows[60:])
    assert min(kept.whole.rows[-1].service) > 3 * bound
    assert kept.whole.gap_between_backlogged() <= bound
    assert greedy.whole.gap_between_backlogged() > 2 * greedy.printed_bound(20)


def gaps(placement: str, quantum: float) -> tuple[Cluster, list[float]]:
    """|W_f - W_g| after half the steps and after all, with as many of each waiting in all; no matter where."""
    seen: list[float] = []

    def look(cluster: Cluster) -> None:
        if cluster.steps == FLOOD.steps // 2:
            seen.append(difference(cluster))

    deep = replace(FLOOD, loads=tuple(replace(load, depth=40) for load in FLOOD.loads))
    cluster = flood(placement, case=deep, quantum=quantum)
    run(cluster, everywhere=False, churn=look)
    return cluster, [*seen, difference(cluster)]


def difference(cluster: Cluster) -> float:
    f, g = cluster.whole.rows[-1].service
    return abs(f - g)


def test_who_never_leaves_its_prefix_falls_behind_without_end():
    """Theorem A.5: with Q^w infinite f has one worker, and half of it, however long it goes on. Theorem 5.1 is not
    broken, as f does not wait everywhere. A finite Q^w sends f to both."""
    sticky, (half, all_of_it) = gaps("d2lpm", INF)
    assert sorted(life.service["f"] > 0 for life in sticky.lives()) == [False, True]
    assert not any(row.waiting[0] for row in sticky.whole.rows)
    assert half > sticky.bound()
    assert all_of_it == pytest.approx(2 * half, rel=0.1)
    spread, differences = gaps("d2lpm", 60)
    assert all(all(row.waiting) for row in spread.whole.rows[100:])
    assert max(differences) <= spread.bound()
    assert max(differences) < half / 4


# ---- the books
