"""How long the queues of groups take: a plan, by groups and queues; a request's arrival and its pull among many.

    sglang-fair bench queue [--quick] [--json FILE]

Everything runs in one process and one thread, on the pure code of `router.placement.qlm`.

* plan_s: CPU time of one plan (`plan`, with the search) for groups of four models of which about half cannot be in
  time, so that the search goes on until its work is over. `late_s` and `edf_late_s` are the lateness of tier 0 in the
  plan and in EDF with the same groups: what the time buys.
* arrive_us: a request gets its tier and its group. pull_us: a worker gets its next request, and a few come into another
  tier because of that. end_us: it is over. All CPU times, with `--requests` of four models and a hundred clients
  waiting; the garbage collector is set as in the router's own process.
* bytes_per_request: how much Python allocates for one that waits, its tag and its place included.
"""

import gc
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Annotated, Any, TypeVar

from router.collector import collect_young_only
from router.placement.qlm.estimate import Estimator
from router.placement.qlm.groups import Entry, Groups
from router.placement.qlm.plan import plan
from router.placement.qlm.problem import Demand, Problem, Queue, edf, worth
from router.placement.qlm.queues import VirtualQueues, Worker
from router.queues.shares import Shares
from sglang_fair.bench import Show, carry_out
from sglang_fair.bench.router import quantile
from sglang_fair.common.provenance import machine
from sglang_fair.settings import commands
from sglang_fair.settings.commands import Option

SIZES = ((40, 8), (400, 50))
"""Groups and queues."""
MODELS = ("m0", "m1", "m2", "m3")
CLIENTS = 100
WORKERS = 50
BATCH, DELTA = 250, 4.0
KV_TOKENS = 60_000
JUDGED = 1
"""Requests that come into another tier with one pull, at most."""
COUNTED = 2_000
"""Requests whose memory is measured."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class PlanTimes:
    """One plan; seconds. `work` as `search` counts it."""

    groups: int
    queues: int
    plan_s: float
    edf_s: float
    late_s: float
    edf_late_s: float


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Microseconds of one call."""

    requests: int
    groups: int
    arrive_us_p50: float
    arrive_us_p99: float
    pull_us_p50: float
    pull_us_p99: float
    end_us_p50: float
    end_us_p99: float


def a_problem(groups: int, queues: int, seed: int) -> Problem:
    """Groups of 2 to 30 seconds, which many more workers would have to serve to be in time."""
    rng = Random(seed)
    swap_s = dict.fromkeys(MODELS, 8.0)
    workers = [Queue(f"w{number}", rng.choice(MODELS), swap_s) for number in range(queues)]
    demands = []
    for number in range(groups):
        drain_s = rng.uniform(2, 30)
        demands.append(
            Demand(
                number=number,
                model=rng.choice(MODELS),
                slack_s=rng.uniform(0, 6 * groups / queues),
                drain_s={one.worker: drain_s * rng.uniform(0.7, 1.3) for one in workers},
                tail_s={one.worker: 5.0 for one in workers},
                tier=rng.choice([0, 0, 1]),
            )
        )
    return Problem(demands, workers)


def measure_plan(groups: int, queues: int, seed: int) -> PlanTimes:
    """Time one plan, and EDF beside it."""
    problem = a_problem(groups, queues, seed)
    began = time.thread_time()
    orders = edf(problem)
    between = time.thread_time()
    planned = plan(problem, solver="search", seed=seed)
    ended = time.thread_time()
    return PlanTimes(
        groups,
        queues,
        round(ended - between, 3),
        round(between - began, 4),
        round(planned.late_s, 1),
        round(worth(problem, orders).late_s, 1),
    )


class Site:
    """Queues and tags of `WORKERS` workers, and requests that come one after the other."""

    def __init__(self, seed: int) -> None:
        self.queues = VirtualQueues(Groups(DELTA, BATCH), Estimator())
        self.shares = Shares()
        self._rng = Random(seed)
        self._count = 0
        swap_s = dict.fromkeys(MODELS, 8.0)
        for number in range(WORKERS):
            loaded = MODELS[number % len(MODELS)]
            self.queues.worker_up(Worker(f"w{number}", loaded, KV_TOKENS, swap_s=swap_s))

    def request(self) -> Entry:
        """The next one."""
        self._count += 1
        rng, at_s = self._rng, self._count / 100
        tokens = rng.randrange(20, 2_000)
        client, model = f"client-{rng.randrange(CLIENTS)}", rng.choice(MODELS)
        return Entry(
            f"{self._count:032x}",
            client,
            model,
            "batch",
            tokens,
            300.0,
            at_s,
            at_s + 3_600,
            9e4,
        )

    def arrive(self, request: Entry) -> None:
        tier = self.shares.arrive(
            request.id,
            request.client,
            request.model,
            request.prompt_tokens,
            request.expected_output_tokens,
            request.deadline_s,
        )
        self.queues.groups.add(request, tier)
        self.queues.settle()

    def pull(self, worker: str) -> Entry | None:
        request = self.queues.pull(worker)
        if request is not None:
            self.shares.go(request.id)
            for name, tier in self.shares.drain_changed(JUDGED):
                self.queues.judge(name, tier)
        return request

    def end(self, request: Entry) -> None:
        self.shares.end(request.id, request.prompt_tokens, request.expected_output_tokens)
        self.queues.ended(request.id)

    def load_what_is_wanted(self, worker: str) -> None:
        self.queues.loaded(worker, self.queues.wanted(worker))


def measure_requests(requests: int, seed: int) -> RequestTimes:
    """Time arrivals until so many wait, then as many pulls and ends as are a tenth of them."""
    site = Site(seed)
    arrived: list[float] = []
    pulled: list[float] = []
    ended: list[float] = []

    def timed(times: list[float], call: Callable[..., Answer], *arguments: Any) -> Answer:
        began = time.thread_time_ns()
        answer = call(*arguments)
        times.append((time.thread_time_ns() - began) / 1e3)
        return answer

    gc.collect()
    for _ in range(requests):
        timed(arrived, site.arrive, site.request())
    groups = len(site.queues.groups)
    workers = list(site.queues.orders())
    while len(ended) < max(1, requests // 10):
        for worker in workers:
            request = timed(pulled, site.pull, worker)
            if request is None:
                pulled.pop()
                site.load_what_is_wanted(worker)
            else:
                timed(ended, site.end, request)
    return RequestTimes(
        requests,
        groups,
        *(quantile(times, part) for times in (arrived, pulled, ended) for part in (0.5, 0.99)),
    )


def bytes_per_request(seed: int) -> int:
    """What Python allocates for each of `COUNTED` requests that wait."""
    site = Site(seed)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(COUNTED):
        site.arrive(site.request())
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) // COUNTED


def run(requests: int, seed: int, show: Show) -> dict[str, Any]:
    """Measures everything. `plans` of the result are `PlanTimes`; the other fields those of `RequestTimes`."""
    record: dict[str, Any] = {
        "bench": "queue",
        "seed": seed,
        "versions": {name: version(name) for name in ("numpy", "scipy", "sglang-fair")},
        "machine": machine(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    collect_young_only()
    plans = []
    for groups, queues in SIZES:
        times = measure_plan(groups, queues, seed)
        plans.append(asdict(times))
        show(
            f"{groups} groups on {queues} queues: {times.plan_s} s, late by {times.late_s} s "
            f"(EDF: {times.edf_s} s, late by {times.edf_late_s} s)"
        )
    memory = bytes_per_request(seed)
    calls = measure_requests(requests, seed)
    show(
        f"{requests:,} requests in {calls.groups} groups: arrival p99 {calls.arrive_us_p99} µs, pull p99 "
        f"{calls.pull_us_p99}, end p99 {calls.end_us_p99}, {memory} bytes each"
    )
    return {**record, "plans": plans, **asdict(calls), "bytes_per_request": memory}


def main(
    json: Annotated[Path | None, Option(metavar="FILE", help="Write the last line to FILE too.")] = None,
    quick: Annotated[bool, Option("--quick", help="A tenth of the requests.")] = False,
    requests: Annotated[
        int | None,
        Option(min=1, metavar="N", help="Requests that wait.", show_default="400000; 40000 if quick"),
    ] = None,
    seed: Annotated[int, Option(help="Of groups and requests.")] = 1,
) -> None:
    """How long a plan of queues of groups takes, and a request's arrival and pull among many that wait.

    What was measured goes to stderr. The result is the last line of stdout, as JSON.
    """
    carry_out(lambda show: run(requests or (40_000 if quick else 400_000), seed, show), json)


if __name__ == "__main__":
    sys.exit(commands.run(main, "sglang-fair bench queue"))
