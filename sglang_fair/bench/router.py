"""How long one placement decision takes, by placement, prompt length and workers; the tree's events and memory.

    sglang-fair bench router [--quick] [--json FILE]

`Router.handle` is timed in one thread, without sockets and messages' encoding: from an `Arrive` to its `Place`, and the
`Done`. The tree is built from KV events of `--tree-tokens` tokens, which is also its limit, so every new prompt evicts:
16 heads of half a prompt for each prompt length, each cached by up to four workers, and below them conversations of 512
tokens at one worker each. A prompt is one of the heads and as many tokens of its own, which its worker confirms by an
event. Four requests per worker are in flight; with each decision the oldest ends.

* decisions/s: one over the mean time of a decision and the end of a request together. p50, p99 and max are of the
  decision alone. CPU time of the thread, with the garbage collector set as in the router's own process
* event tokens per second: how fast the KV events are taken in that build the tree
* bytes per token: growth of resident memory while the tree is built, over its tokens, each counted once
"""

import gc
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product, takewhile
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from router.core import Router
from router.events import Arrive, Done, Event, Load, Place, Stored, WorkerUp
from router.placement import PLACEMENTS, build
from router.process import collect_young_only
from sglang_fair.bench import BenchOptions, Show, bench_command, choose, conditions, grid, percentile
from sglang_fair.settings import commands
from sglang_fair.settings.commands import Numbers, Option, numbers

PAGE = 16
HEADS = 16
HOLDERS = 4
TAIL_TOKENS, ANSWER_TOKENS = 512, 128
CLIENTS = 100
IN_FLIGHT_PER_WORKER = 4
VOCABULARY = 128_000
DECISIONS_PER_S = 500
"""By the router's clock."""
FULL_TOKENS = 1_000_000
"""Of the KV cache of a worker, all in use."""
LOAD_EVERY = 100
"""Decisions between two loads that replicas report."""
PROMPT_TOKENS, WORKERS = Numbers(1_000, 10_000, 100_000), Numbers(8, 64)


@dataclass(frozen=True, kw_only=True)
class RouterOptions(BenchOptions):
    placements: Annotated[str | None, Option(metavar="A,B", help="Only these.", show_default="all")] = None
    prompt_tokens: Annotated[Numbers, numbers("Prompt lengths.")] = PROMPT_TOKENS
    workers: Annotated[Numbers, numbers("Numbers of workers.")] = WORKERS
    tree_tokens: Annotated[
        int | None,
        Option(min=1, metavar="N", help="Size of the tree.", show_default="10 million; 2 if quick"),
    ] = None
    decisions: Annotated[
        int | None,
        Option(
            min=1, metavar="N", help="Decisions in a row of the table.", show_default="3000; 500 if quick"
        ),
    ] = None

    def __post_init__(self) -> None:
        if min(self.prompt_tokens) < 4 * PAGE:
            raise ValueError(f"--prompt-tokens must be at least {4 * PAGE}")
        heads = HEADS * sum(self.prompt_tokens) // 2
        if self.size < heads:
            raise ValueError(f"--tree-tokens must hold the heads of all prompts: at least {heads}")
        choose(self.placements, PLACEMENTS, "placement")

    @property
    def size(self) -> int:
        return self.tree_tokens or (2_000_000 if self.quick else 10_000_000)

    def rows(self, prompt_tokens: int) -> int:
        """Decisions in a row of the table."""
        decisions = self.decisions or (500 if self.quick else 3_000)
        return max(100, min(decisions, 10 * decisions * 1_000 // prompt_tokens))


@dataclass(frozen=True, slots=True)
class Head:
    """A prefix that `workers` cache from the beginning."""

    tokens: bytes
    hashes: tuple[int, ...]
    workers: tuple[str, ...]


class Traffic:
    """Seeded events and requests for one number of workers."""

    def __init__(self, seed: int, workers: int, prompt_tokens: Sequence[int]) -> None:
        self._rng = np.random.default_rng([seed, workers])
        self.workers = [f"w{number:02}" for number in range(workers)]
        self.heads = {tokens: [self._head(tokens // 2) for _ in range(HEADS)] for tokens in prompt_tokens}
        self._all = [head for heads in self.heads.values() for head in heads]
        self._requests = 0

    def heads_stored(self) -> Iterator[Stored]:
        for head in self._all:
            for worker in head.workers:
                yield Stored(worker, head.hashes, None, head.tokens, PAGE)

    def conversations(self) -> Iterator[Stored]:
        """Prompts and their answers below the heads, without end."""
        while True:
            yield from self._conversation()

    def _conversation(self) -> tuple[Stored, Stored]:
        head = self._all[int(self._rng.integers(len(self._all)))]
        worker = head.workers[int(self._rng.integers(len(head.workers)))]
        asked, answered = self._hashes(TAIL_TOKENS), self._hashes(ANSWER_TOKENS)
        return (
            Stored(worker, asked, head.hashes[-1], self._tokens(TAIL_TOKENS), PAGE),
            Stored(worker, answered, asked[-1], self._tokens(ANSWER_TOKENS), PAGE),
        )

    def request(self, prompt_tokens: int) -> tuple[Arrive, Head]:
        heads = self.heads[prompt_tokens]
        head = heads[int(self._rng.integers(len(heads)))]
        tokens = head.tokens + self._tokens(prompt_tokens - len(head.tokens) // 4)
        self._requests += 1
        client = int(self._rng.integers(CLIENTS))
        return Arrive(f"{self._requests:032x}", f"client-{client}", tokens, 128), head

    def confirmation(self, arrive: Arrive, head: Head, place: Place) -> Stored:
        """The KV event of a worker that has prefilled the prompt: what it did not cache before."""
        pages = len(arrive.tokens) // (4 * PAGE)
        fresh = self._hashes((pages - len(head.hashes)) * PAGE)
        if place.worker in head.workers:
            tokens = arrive.tokens[len(head.tokens) : pages * 4 * PAGE]
            return Stored(place.worker, fresh, head.hashes[-1], tokens, PAGE)
        return Stored(place.worker, head.hashes + fresh, None, arrive.tokens[: pages * 4 * PAGE], PAGE)

    def _head(self, tokens: int) -> Head:
        tokens -= tokens % PAGE
        count = min(HOLDERS, len(self.workers))
        holders = self._rng.choice(self.workers, size=count, replace=False)
        return Head(self._tokens(tokens), self._hashes(tokens), tuple(map(str, holders)))

    def _tokens(self, count: int) -> bytes:
        return self._rng.integers(VOCABULARY, size=count, dtype="<u4").tobytes()

    def _hashes(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(-(2**63), 2**63 - 1, size=tokens // PAGE).tolist())


def filled(placement: str, traffic: Traffic, tree_tokens: int) -> tuple[Router, float]:
    """A router whose tree is full, and how many tokens per second of CPU time the events added."""
    router = Router(build(placement), name=placement, page_size=PAGE, max_tree_tokens=tree_tokens)
    for worker in traffic.workers:
        router.handle(WorkerUp(worker, f"http://{worker}", kv=f"tcp://{worker}"), 0.0)
    most = tree_tokens - (TAIL_TOKENS + ANSWER_TOKENS)
    tokens, spent_us = 0, 0.0
    fits = takewhile(lambda _: router.tree.tokens < most, traffic.conversations())
    for event in chain(traffic.heads_stored(), fits):
        spent_us += timed(router, event, 0.0)[1]
        tokens += len(event.tokens) // 4
    return router, tokens / (spent_us / 1e6)


def timed(router: Router, event: Event, now_s: float) -> tuple[Any, float]:
    """What the router answers, and the microseconds that this took."""
    began_ns = time.thread_time_ns()
    answer = router.handle(event, now_s)
    return answer, (time.thread_time_ns() - began_ns) / 1e3


def measure(
    router: Router, traffic: Traffic, prompt_tokens: int, *, decisions: int, warm_up: int
) -> dict[str, Any]:
    """`decisions` decisions in microseconds, after `warm_up` others; `end_us_p50` is of the end of a request."""
    decided_us, ended_us = list[float](), list[float]()
    flights: deque[str] = deque()
    matched = 0
    gc.collect()
    for number in range(warm_up + decisions):
        if number == warm_up:
            decided_us, ended_us, matched = [], [], 0
        now_s = number / DECISIONS_PER_S
        arrive, head = traffic.request(prompt_tokens)
        if number % LOAD_EVERY == 0:
            for worker in traffic.workers:
                router.handle(Load(worker, FULL_TOKENS, 0, FULL_TOKENS), now_s)
        ((_, place),), took_us = timed(router, arrive, now_s)
        assert isinstance(place, Place), place
        decided_us.append(took_us)
        matched += place.matched_tokens
        router.handle(traffic.confirmation(arrive, head, place), now_s)
        flights.append(arrive.id)
        if len(flights) > IN_FLIGHT_PER_WORKER * len(traffic.workers):
            done = Done(flights.popleft(), 100, 0, "ok", 0.2, 0.02)
            ended_us.append(timed(router, done, now_s)[1])
    for request in flights:
        router.handle(Done(request, 100), now_s)
    ended_us = ended_us or [0.0]
    parts = {"us_p50": 50, "us_p99": 99, "us_max": 100}
    return {
        "placement": str(router.state()["placement"]),
        "prompt_tokens": prompt_tokens,
        "workers": len(traffic.workers),
        "decisions_per_s": round(1e6 / (statistics.fmean(decided_us) + statistics.fmean(ended_us)), 1),
        **{name: round(percentile(decided_us, percent), 2) for name, percent in parts.items()},
        "end_us_p50": round(percentile(ended_us, 50), 2),
        "matched_share": round(matched / (decisions * prompt_tokens), 4),
        "decisions": decisions,
    }


def bytes_per_token(traffic: Traffic, tree_tokens: int) -> float:
    """Resident memory of a full tree. Measure it first: memory that was freed before would hide it."""
    gc.collect()
    before = _resident_bytes()
    router, _ = filled("round_robin", traffic, tree_tokens)
    gc.collect()
    return round((_resident_bytes() - before) / router.tree.tokens, 2)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each placement: decisions per second, and p50 / p99 in microseconds."""
    return "decisions/s (p50 / p99 of one, µs)\n" + grid(
        rows,
        "placement",
        ("prompt_tokens", "workers"),
        lambda row: f"{row['decisions_per_s']:,.0f} ({row['us_p50']:.0f} / {row['us_p99']:.0f})",
    )


def run(given: RouterOptions, show: Show) -> dict[str, Any]:
    """How long one placement decision takes, by placement, prompt length and workers; the tree's events and memory."""
    record: dict[str, Any] = {
        "bench": "router",
        **conditions(given.seed),
        "tree_tokens": given.size,
        "page_size": PAGE,
        "in_flight_per_worker": IN_FLIGHT_PER_WORKER,
    }
    first = Traffic(given.seed, given.workers[0], given.prompt_tokens)
    show(f"{(per_token := bytes_per_token(first, given.size))} bytes per token in the tree")
    rows, rates = list[dict[str, Any]](), list[float]()
    collect_young_only()
    for workers, placement in product(given.workers, choose(given.placements, PLACEMENTS, "placement")):
        source = Traffic(given.seed, workers, given.prompt_tokens)
        router, rate = filled(placement, source, given.size)
        rates.append(rate)
        for tokens in given.prompt_tokens:
            decisions = given.rows(tokens)
            row = measure(router, source, tokens, decisions=decisions, warm_up=max(100, decisions // 5))
            rows.append(row)
            show(
                f"{placement:18} {workers:>3} workers  {tokens:>7,} tokens  {row['decisions_per_s']:>9,.0f}/s  "
                f"p50 {row['us_p50']:.1f} µs, p99 {row['us_p99']:.1f}, max {row['us_max']:.1f}"
            )
    show(table(rows))
    return {**record, "rows": rows, "bytes_per_token": per_token, "event_tokens_per_s": round(min(rates))}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


main = bench_command(RouterOptions, run)


if __name__ == "__main__":
    sys.exit(commands.run(main, "sglang-fair bench router"))
