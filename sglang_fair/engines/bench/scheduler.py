"""How long one turn of the scheduler takes, by policy, queue length, clients and prompt length.

    sglang-fair bench scheduler [--quick] [--rounds N] [--json FILE]

Everything runs in one process on SGLang's real scheduler, requests and tree cache (see `one_process`).

A turn is one iteration of SGLang's event loop that forms a batch of prompts, all of it but the model: the policy's
`calc_priority`, the look-up and admission of each candidate, the batch's tensors, the processing of the results, the
load report, and the overlay's hooks around all of that. Its `step` is the call of
`Scheduler._get_new_batch_prefill_raw` without the tensors, its `build` those and SGLang's count of the waiting tokens.
Arrivals are shown separately. Times are CPU time of the scheduler's thread.

The queue keeps its length: each step admits four requests, which end with their first token, and four new ones
arrive, so the tree changes in every step. Half of each prompt is one of 64 shared prefixes, all of them cached at
first; the other half is the request's own. The pool is too small for everything, so prefixes are evicted and
computed again. 32 requests are running.

Policies: `fcfs`, `lpm`, … are ours. `sglang:fcfs` and `sglang:lpm` are stock SGLang without any hook of ours; stock
LPM falls back to FCFS above 128 waiting requests. `sglang:lpm-naive` is stock LPM without that limit.

With `--rounds` all policies are measured in turn, so often, and a row is the round whose median turn was the shortest:
beside other work on the machine the others say more of that than of the scheduler.
"""

import gc
import os
import random
import statistics
import sys
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated, Any

import numpy as np

from sglang_fair.bench import BenchOptions, Show, bench_command, choose, conditions, grid, percentile
from sglang_fair.settings.commands import Numbers, Option, numbers, run

PREFIXES = 64
ADMITTED_PER_STEP = 4
RUNNING = 32
UNLIMITED = 10**9


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions(BenchOptions):
    policies: Annotated[str | None, Option(metavar="A,B", help="Only these (default: all).")] = None
    queued: Annotated[Numbers | None, numbers("Queue lengths.")] = None
    clients: Annotated[Numbers | None, numbers("Numbers of clients.")] = None
    prompt_tokens: Annotated[Numbers | None, numbers("Prompt lengths, 64 to 16000 tokens.")] = None
    known: Annotated[
        Numbers | None, numbers("Numbers of clients that were served before and are gone (default: 0).")
    ] = None
    rounds: Annotated[
        int, Option(metavar="N", min=1, help="Times that each row is measured (default: 1).")
    ] = 1
    steps: Annotated[
        int | None, Option(metavar="N", min=1, help="Steps per row (default: 300; 100 if quick).")
    ] = None

    def __post_init__(self) -> None:
        if any(not 64 <= shape.prompt_tokens <= 16_000 for shape in self.shapes):
            raise ValueError("--prompt-tokens must lie between 64 and 16000")

    @property
    def shapes(self) -> "list[QueueShape]":
        given = (self.prompt_tokens, self.clients, self.queued, self.known)
        queued = self.queued or (128, 10_000)
        clients = self.clients or ((1_000,) if self.quick else (10, 1_000))
        prompt_tokens = self.prompt_tokens or ((1_000,) if self.quick else (1_000, 8_000))
        known = self.known or (0,)
        shapes = [QueueShape(q, c, p, k) for p, c, k, q in product(prompt_tokens, clients, known, queued)]
        return shapes if self.quick or any(given) else [*shapes, *LARGEST]


@dataclass(frozen=True)
class QueueShape:
    """A queue that is kept at its length, and the prompts in it."""

    queued: int
    clients: int
    prompt_tokens: int
    known: int = 0
    """Clients beside those that wait, which were served before."""

    @property
    def prefix_tokens(self) -> int:
        return self.prompt_tokens // 2

    @property
    def free_tokens(self) -> int:
        """Room in the pool: all prefixes, the running requests, and a dozen prompts."""
        return PREFIXES * self.prefix_tokens + (RUNNING + 12) * self.prompt_tokens


LARGEST = (
    QueueShape(queued=100_000, clients=1_000, prompt_tokens=1_000),
    QueueShape(queued=10_000, clients=10_000, prompt_tokens=1_000, known=100_000),
)


@dataclass(frozen=True)
class Contender:
    """A policy to measure. `server_name` is its --schedule-policy; `overlay`: with our hooks attached."""

    label: str
    server_name: str
    overlay: bool
    options: str = ""
    match_limit: int | None = None


OPTIONS = {"rpm": f"limit={UNLIMITED}"}
"""Options by policy: with its default limit RPM would refuse the queue that we measure."""

STOCK = (
    Contender("sglang:fcfs", "fcfs", overlay=False),
    Contender("sglang:lpm", "lpm", overlay=False),
    Contender("sglang:lpm-naive", "lpm", overlay=False, match_limit=UNLIMITED),
)


def contenders() -> tuple[Contender, ...]:
    """Stock SGLang, then every policy in the registry."""
    from sglang_fair.overlay.config import SERVER_POLICIES

    return STOCK + tuple(
        Contender(ours, name, overlay=True, options=OPTIONS.get(ours, ""))
        for name, ours in SERVER_POLICIES.items()
    )


class Prompts:
    """Seeded clients and prompts. Each client uses the same few of the shared prefixes."""

    def __init__(self, shape: QueueShape, seed: int) -> None:
        self._shape = shape
        self._rng = random.Random(f"{seed}/{shape.queued}/{shape.clients}/{shape.prompt_tokens}")
        self.prefixes = [self._tokens(shape.prefix_tokens) for _ in range(PREFIXES)]

    def __iter__(self) -> Iterator[tuple[str, "array[int]"]]:
        shape, rng = self._shape, self._rng
        choices = max(1, PREFIXES // shape.clients)
        while True:
            client = rng.randrange(shape.clients)
            prefix = self.prefixes[(client + shape.clients * rng.randrange(choices)) % PREFIXES]
            yield f"client-{client}", prefix + self._tokens(shape.prompt_tokens - shape.prefix_tokens)

    def _tokens(self, count: int) -> "array[int]":
        values = np.frombuffer(self._rng.randbytes(count), dtype=np.uint8)
        return array("q", values.astype(np.int64).tobytes())


def measure(
    engine: Any, contender: Contender, shape: QueueShape, *, seed: int, steps: int, limit_s: float
) -> dict[str, Any]:
    """Times of up to `steps` steps: after `limit_s` seconds it stops early, but not before five steps.

    `arrival_us` is per request; `build_ms_p50` is part of a turn, but not of its step. `cached_tokens_share` is the
    part of the admitted prompts' tokens that the cache had.
    """
    engine.use(
        contender.server_name,
        overlay=contender.overlay,
        options=contender.options,
        match_limit=contender.match_limit,
    )
    if contender.overlay:
        engine.stop_clock()  # or steps for those that run would stand between those that we measure
        engine.remember(shape.known)
    engine.limit_pool(shape.free_tokens)
    prompts = Prompts(shape, seed)
    draw = iter(prompts)
    count = 0

    def requests(number: int) -> list[Any]:
        nonlocal count
        count += number
        return [engine.request(f"{count - n:032x}", *next(draw)) for n in range(number)]

    _fill_cache(engine, prompts, draw)
    engine.arrive(requests(shape.queued))
    # The first passes look up all that has just arrived. We measure the steady state behind them.
    until = time.perf_counter() + limit_s
    for _ in range(8 + (shape.queued // 48 if contender.overlay else 0)):
        engine.arrive(requests(_turn(engine)[1]))
        if time.perf_counter() > until:
            break
    gc.collect()
    gc.freeze()  # as SGLang's servers do; the collector still runs for objects that the steps make
    taken: list[Any] = []
    arrivals_ms, arrived = 0.0, 0
    hits, tokens = 0, 0
    until = time.perf_counter() + limit_s
    while len(taken) < steps and (len(taken) < 5 or time.perf_counter() < until):
        step, left = _turn(engine)
        taken.append(step)
        hits, tokens = hits + step.cached_tokens, tokens + step.prompt_tokens
        arrivals_ms += engine.arrive(requests(left))
        arrived += left
    times_ms, turns_ms = [step.order_ms for step in taken], [step.turn_ms for step in taken]
    return {
        "policy": contender.label,
        **asdict(shape),
        "cached": "partly",
        "turn_ms_p50": round(statistics.median(turns_ms), 4),
        "turn_ms_p99": round(percentile(turns_ms, 99), 4),
        "turn_ms_min": round(min(turns_ms), 4),
        "step_ms_p50": round(statistics.median(times_ms), 4),
        "step_ms_p99": round(percentile(times_ms, 99), 4),
        "arrival_us": round(1e3 * arrivals_ms / max(1, arrived), 2),
        "build_ms_p50": round(statistics.median(step.build_ms for step in taken), 4),
        "cached_tokens_share": round(hits / max(1, tokens), 4),
        "steps": len(taken),
    }


def _fill_cache(engine: Any, prompts: Prompts, draw: Iterator[tuple[str, "array[int]"]]) -> None:
    """Puts the shared prefixes into the tree, and starts requests that run through the whole measurement."""
    warm = [engine.request(f"warm{n:028x}", "warm", prefix[:]) for n, prefix in enumerate(prompts.prefixes)]
    running = [engine.request(f"run{n:029x}", *next(draw), output_tokens=64) for n in range(RUNNING)]
    for requests in (warm, running):
        engine.arrive(requests)
        while engine.waiting:
            _turn(engine)


def _turn(engine: Any) -> tuple[Any, int]:
    """One step, and how many requests left the queue in it."""
    before = engine.waiting
    step = engine.step()
    assert step is not None, "the engine formed no batch"
    return step, before - engine.waiting


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Medians and, in brackets, 99th percentiles: one line for each policy."""

    def cells(what: str) -> str:
        columns = ("prompt_tokens", "clients", "known", "queued")
        return grid(
            rows, "policy", columns, lambda row: f"{row[f'{what}_ms_p50']:.2f} ({row[f'{what}_ms_p99']:.2f})"
        )

    lines = ["turn, ms, median (99th percentile)", cells("turn"), "of it: step", cells("step")]
    for ours in (True, False):
        group = [row["arrival_us"] for row in rows if row["policy"].startswith("sglang:") is not ours]
        if group:
            name = "with our books" if ours else "stock"
            lines.append(f"one arrival, {name}: {statistics.median(group):.1f} µs")
    return "\n".join(lines)


def run_bench(given: SchedulerOptions, show: Show) -> dict[str, Any]:
    """Time one turn of the scheduler, by policy, queue length, clients and prompt length."""
    from sglang_fair.engines.bench.one_process import Engine

    record: dict[str, Any] = {
        "bench": "scheduler",
        **conditions(given.seed),
        "admitted_per_step": ADMITTED_PER_STEP,
        "running": RUNNING,
        "shared_prefixes": PREFIXES,
    }
    known = {contender.label: contender for contender in contenders()}
    chosen = choose(given.policies, known, "policy")
    show("starting SGLang's scheduler")
    engine = Engine(ADMITTED_PER_STEP, given.seed)
    rows: list[dict[str, Any]] = []
    steps, limit_s = given.steps or (100 if given.quick else 300), 4.0 if given.quick else 15.0
    for shape in given.shapes:
        measured: dict[str, list[dict[str, Any]]] = {policy: [] for policy in chosen}
        for _, policy in product(range(given.rounds), chosen):
            row = measure(engine, known[policy], shape, seed=given.seed, steps=steps, limit_s=limit_s)
            measured[policy].append(row)
            show(
                f"{shape.queued:>7,} queued  {shape.clients:>6,} clients  {shape.known:>7,} known"
                f"  {shape.prompt_tokens:>5,} tokens  {policy:16} turn {row['turn_ms_p50']:8.2f} ms"
                f"  (step {row['step_ms_p50']:.2f}, {row['steps']} turns)"
            )
        for of_policy in measured.values():
            best = min(of_policy, key=lambda row: row["turn_ms_p50"])
            rows.append({**best, "rounds_ms": [row["turn_ms_p50"] for row in of_policy]})
    show(table(rows))
    return {**record, "cache": engine.cache(), "rows": rows}


main = bench_command(SchedulerOptions, run_bench)


if __name__ == "__main__":
    code = run(main, "sglang-fair bench scheduler")
    sys.stdout.flush()
    os._exit(code)  # SGLang's threads and sockets would keep the process alive
