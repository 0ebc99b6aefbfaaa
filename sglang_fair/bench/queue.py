"""How long a placement with queues takes: an arrival, a pull and an end among many that wait; a look at all models.

    sglang-fair bench queue [--quick] [--json FILE]

The placements `deadline` and `qlm` are called as the router's core calls them; what a prompt matches costs nothing.
Times are CPU time, with `--requests` of a hundred clients waiting for `WORKERS` full workers of `MODELS` models; the
garbage collector is set as in the router's own process.

* arrive_us: a request comes to wait. pull_us: a worker with room gets its next one. end_us: one is over
* look_ms: a look of `deadline` at all models, of which there is one each half second. plans: of `qlm`, of groups of
  which about half cannot be in time, so that the search goes on until its work is over
* bytes_per_request: how much Python allocates for one that waits
"""

import gc
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar, cast

from router.placement import build
from router.placement.contract import Ended, Equipment, Request, WorkerView
from router.placement.deadline.rule import Deadline
from router.placement.qlm.problem import Demand, Problem, Queue, edf, worth
from router.placement.qlm.search import plan
from router.process import collect_young_only
from router.radix import Match
from sglang_fair.bench import BenchOptions, Show, bench_command, conditions, percentile
from sglang_fair.common.deadlines import DEFAULT_CLASSES, Promise
from sglang_fair.settings import commands
from sglang_fair.settings.commands import Option

PLACEMENTS = ("deadline", "qlm")
SIZES = ((40, 8), (400, 50))
"""Groups and queues of a plan."""
PLANNED = ("m0", "m1", "m2", "m3")
MODELS, WORKERS, CLIENTS = 16, 50, 100
KV_TOKENS, CHUNK_TOKENS = 60_000, 8_192
COUNTED, LOOKS = 2_000, 20
NO_MATCH = Match()

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class QueueOptions(BenchOptions):
    requests: Annotated[
        int | None,
        Option(min=1, metavar="N", help="Requests that wait.", show_default="400000; 40000 if quick"),
    ] = None


def a_view(name: str) -> Any:
    return SimpleNamespace(**{**dict.fromkeys(WorkerView.__annotations__, 0), "name": name, "capacity": 1.0})


def a_problem(groups: int, queues: int, seed: int) -> Problem:
    """Groups of 2 to 30 seconds, which many more workers would have to serve to be in time."""
    rng = Random(seed)
    swap_s = dict.fromkeys(PLANNED, 8.0)
    workers = [Queue(f"w{number}", rng.choice(PLANNED), swap_s) for number in range(queues)]
    demands = []
    for number in range(groups):
        drain_s = rng.uniform(2, 30)
        demands.append(
            Demand(
                number=number,
                model=rng.choice(PLANNED),
                slack_s=rng.uniform(0, 6 * groups / queues),
                drain_s={one.worker: drain_s * rng.uniform(0.7, 1.3) for one in workers},
                tail_s={one.worker: 5.0 for one in workers},
            )
        )
    return Problem(demands, workers)


def measure_plan(groups: int, queues: int, seed: int) -> dict[str, float]:
    """CPU seconds of one plan of `qlm`, and seconds of lateness in it and in EDF: what the time buys."""
    problem = a_problem(groups, queues, seed)
    began = time.thread_time()
    planned = plan(problem, solver="search", seed=seed)
    plan_s = time.thread_time() - began
    late_s = {"late_s": planned.late_s, "edf_late_s": worth(problem, edf(problem)).late_s}
    return {"groups": groups, "queues": queues, "plan_s": round(plan_s, 3), **late_s}


class Site:
    """A placement with its workers, and requests that come one after the other."""

    def __init__(self, placement: str, seed: int) -> None:
        self.placement = cast(Any, build(placement))
        self.views = [a_view(f"w{at:02}") for at in range(WORKERS)]
        self.models = {view.name: f"m{at % MODELS}" for at, view in enumerate(self.views)}
        self.views_of = {
            f"m{at}": [view for view in self.views if self.models[view.name] == f"m{at}"]
            for at in range(MODELS)
        }
        self.sent: list[tuple[Request, str]] = []
        self.now_s, self._rng, self._count = 0.0, Random(seed), 0
        for view in self.views:
            self.placement.worker_up(view.name)
            swap_s = {f"m{at}": 8.0 for at in range(MODELS)}
            has = Equipment(self.models[view.name], swap_s, KV_TOKENS, CHUNK_TOKENS)
            self.placement.equip(view.name, has, 0.0)
        self.placement.taking([view.name for view in self.views])

    def request(self) -> Request:
        rng, self._count, self.now_s = self._rng, self._count + 1, self.now_s + 1e-3
        slo_class, slo_s = rng.choice(list(DEFAULT_CLASSES.items()))
        client, model = f"client-{rng.randrange(CLIENTS)}", f"m{rng.randrange(MODELS)}"
        tokens = rng.randrange(20, 2_000)
        promise = Promise(slo_class, slo_s, self.now_s + 50 * slo_s)
        return Request(f"{self._count:032x}", client, b"", tokens, 0, 300.0, model=model, promise=promise)

    def arrive(self, request: Request) -> bool:
        """Whether it waits."""
        chosen = self.placement.place(request, NO_MATCH, self.views_of[request.model], self.now_s)
        if chosen is not None:
            self._place(request, chosen)
        return chosen is None

    def pull(self) -> Request | None:
        found = self.placement.next(self.views, lambda _: NO_MATCH, self._may, self.now_s)
        if found is not None:
            self._place(*found)
        return None if found is None else found[0]

    def end(self) -> None:
        """The one that was sent first is over."""
        request, worker = self.sent.pop(0)
        self.now_s += 1e-3
        self.placement.done(Ended(request, worker, 0, 300, "ok", 1.0, 0.02), self.now_s)

    def look(self) -> None:
        """At all models. A plan of `qlm` is measured by itself."""
        if isinstance(self.placement, Deadline):
            self.placement.models.look(self.now_s)

    def _place(self, request: Request, worker: str) -> None:
        self.placement.placed(request, worker, NO_MATCH, self.now_s)
        self.sent.append((request, worker))

    def _may(self, request: Request, worker: str) -> bool:
        return self.models[worker] == request.model


def measure(placement: str, requests: int, seed: int) -> dict[str, Any]:
    """Arrivals until so many wait, then ends and pulls of a tenth of them, then looks."""
    times: dict[str, list[float]] = {"arrive": [], "pull": [], "end": [], "look": []}

    def timed(kind: str, call: Callable[..., Answer], *arguments: Any) -> Answer:
        began = time.thread_time_ns()
        answer = call(*arguments)
        times[kind].append((time.thread_time_ns() - began) / 1e3)
        return answer

    site = Site(placement, seed)
    tracemalloc.start()
    while sum(site.arrive(site.request()) for _ in range(100)) < 100:
        pass
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(COUNTED):
        site.arrive(site.request())
    size = (tracemalloc.get_traced_memory()[0] - before) // COUNTED
    tracemalloc.stop()
    gc.collect()
    for _ in range(requests):
        timed("arrive", site.arrive, site.request())
    while len(times["pull"]) < max(1, requests // 10) and site.sent:
        timed("end", site.end)
        while timed("pull", site.pull) is not None:
            pass
        times["pull"].pop()
    for _ in range(LOOKS):
        site.now_s += 1.0
        timed("look", site.look)
    found = {f"{kind}_us_{name}": round(percentile(times[kind], part), 2)
             for kind in ("arrive", "pull", "end") for name, part in (("p50", 50), ("p99", 99))}  # fmt: skip
    found["groups"] = site.placement.report(site.now_s)["groups"]
    return {**found, "look_ms": round(max(times["look"]) / 1e3, 2), "bytes_per_request": size}


def run(given: QueueOptions, show: Show) -> dict[str, Any]:
    """How long an arrival, a pull and an end take under placements deadline and qlm among many requests that wait."""
    collect_young_only()
    requests = given.requests or (40_000 if given.quick else 400_000)
    record: dict[str, Any] = {"bench": "queue", **conditions(given.seed), "requests": requests}
    for name in PLACEMENTS:
        found = record[name] = measure(name, requests, given.seed)
        show(
            f"{name}, {requests:,} wait: p99 of an arrival {found['arrive_us_p99']} µs, of a pull "
            f"{found['pull_us_p99']}, of an end {found['end_us_p99']}; {found['look_ms']} ms for a look; "
            f"{found['bytes_per_request']} bytes each"
        )
    record["plans"] = [measure_plan(*size, given.seed) for size in SIZES]
    for one in record["plans"]:
        words = "{groups} groups, {queues} queues: {plan_s} s, late by {late_s:.0f} s (EDF {edf_late_s:.0f})"
        show(words.format(**one))
    return record


main = bench_command(QueueOptions, run)


if __name__ == "__main__":
    sys.exit(commands.run(main, "sglang-fair bench queue"))
