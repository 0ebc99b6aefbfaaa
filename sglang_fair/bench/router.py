"""How long one placement decision takes, by placement, prompt length and workers; the tree's events and memory.

    sglang-fair bench router [--quick] [--json FILE]

Everything runs in one process and one thread on the router's real core, without sockets: `Router.handle` is
timed, from an `Arrive` to its `Place`. Not in it: decoding and encoding the messages.

The tree is built from KV events of `--tree-tokens` tokens, which is also its limit, so that every new prompt
evicts: 16 heads of half a prompt for each prompt length, each cached by up to four workers, and below them
conversations of 512 tokens at one worker each. A prompt is one of the heads and a half of its own. Its worker
confirms it by an event; four requests a worker are in flight, and with each decision the oldest ends.

* decisions/s: one over the mean time of a decision and the end of a request together. p50, p99, max: of the
  decision alone.
* events: conversations come and go at the tree's full size. Each is stored by two events, a prompt of 512 tokens
  and an answer of 128, and removed by one with all its blocks, as SGLang sends them. Tokens per second counts those
  stored and those removed.
* bytes per token: growth of the process's resident memory over the tokens in the tree when it has been built,
  each counted once however many workers hold it; block hashes and nodes are in it.

The machine's own noise stands beside them: the p50 and p99 of a fixed piece of work, timed alike.

Times are CPU time of the thread, of the calls during which no other process took the processor away (`preempted`
counts the rest: to find the caches cold is not the decision's doing); `wall_us_p50` and `wall_us_p99` are by the
clock on the wall, of all calls. Python's garbage collector is as in the router's own process.
"""

import argparse
import gc
import os
import platform
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from router.collector import collect_young_only
from router.core import Router
from router.events import Arrive, Done, Event, Place, Query, Removed, Stored, WorkerUp
from router.placement import PLACEMENTS, build
from sglang_fair.bench import carry_out, numbers
from sglang_fair.common.provenance import processor

PAGE = 16
HEADS = 16
HOLDERS = 4
TAIL_TOKENS, ANSWER_TOKENS = 512, 128
CLIENTS = 100
IN_FLIGHT_PER_WORKER = 4
VOCABULARY = 128_000
PROMPT_TOKENS, WORKERS = (1_000, 10_000, 100_000), (8, 64)

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result. Times in microseconds, of a decision; `end_us_p50` of the end of a request."""

    placement: str
    prompt_tokens: int
    workers: int
    decisions_per_s: float
    us_p50: float
    us_p99: float
    us_max: float
    wall_us_p50: float
    wall_us_p99: float
    end_us_p50: float
    matched_share: float
    decisions: int
    preempted: int


@dataclass(frozen=True, slots=True)
class EventRow:
    """What applying KV events costs at the tree's full size, and what building it cost."""

    workers: int
    tokens_per_s: float
    us_p50: float
    us_p99: float
    us_max: float
    build_tokens_per_s: float
    tree_tokens: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Head:
    """A prefix that is cached from the beginning."""

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

    def conversation(self) -> tuple[Stored, Stored, Removed]:
        """A prompt and its answer below one of the heads, and their end: the answer goes first."""
        head = self._all[int(self._rng.integers(len(self._all)))]
        worker = head.workers[int(self._rng.integers(len(head.workers)))]
        asked, answered = self._hashes(TAIL_TOKENS), self._hashes(ANSWER_TOKENS)
        return (
            Stored(worker, asked, head.hashes[-1], self._tokens(TAIL_TOKENS), PAGE),
            Stored(worker, answered, asked[-1], self._tokens(ANSWER_TOKENS), PAGE),
            Removed(worker, answered + asked),
        )

    def request(self, prompt_tokens: int) -> tuple[Arrive, Head]:
        heads = self.heads[prompt_tokens]
        head = heads[int(self._rng.integers(len(heads)))]
        tokens = head.tokens + self._tokens(prompt_tokens - len(head.tokens) // 4)
        self._requests += 1
        client = f"client-{int(self._rng.integers(CLIENTS))}"
        return Arrive(f"{self._requests:032x}", client, tokens, 128), head

    def confirmation(self, arrive: Arrive, head: Head, place: Place) -> Stored:
        """The worker has prefilled the prompt: it says what it had not cached before."""
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


class Clock:
    """CPU and wall time of single calls, in microseconds; CPU time only of those that kept the processor."""

    def __init__(self) -> None:
        self.cpu_us: list[float] = []
        self.wall_us: list[float] = []

    def time(self, call: Callable[[Event, float], Any], event: Event, now_s: float) -> Any:
        lost = _times_preempted()
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        answer = call(event, now_s)
        spent = time.thread_time_ns() - cpu
        self.wall_us.append((time.perf_counter_ns() - wall) / 1e3)
        if _times_preempted() == lost:
            self.cpu_us.append(spent / 1e3)
        return answer

    @property
    def preempted(self) -> int:
        """Calls during which another process took the processor."""
        return len(self.wall_us) - len(self.cpu_us)


def filled(placement: str, traffic: Traffic, tree_tokens: int) -> tuple[Router, float]:
    """A router whose tree is full, and the tokens per second of CPU time at which events filled it."""
    router = Router(build(placement), name=placement, page_size=PAGE, max_tree_tokens=tree_tokens)
    for worker in traffic.workers:
        router.handle(WorkerUp(worker, f"http://{worker}", kv=f"tcp://{worker}"), 0.0)
    clock, tokens = Clock(), 0
    for head in traffic.heads_stored():
        clock.time(router.handle, head, 0.0)
        tokens += len(head.tokens) // 4
    while router.tree.tokens < tree_tokens - (TAIL_TOKENS + ANSWER_TOKENS):
        for event in traffic.conversation()[:2]:
            clock.time(router.handle, event, 0.0)
            tokens += len(event.tokens) // 4
    return router, tokens / (sum(clock.cpu_us) / 1e6)


def measure(router: Router, traffic: Traffic, prompt_tokens: int, *, decisions: int, warm_up: int) -> Row:
    """The time of decisions, after `warm_up` others."""
    asked, ended = Clock(), Clock()
    flights: deque[str] = deque()
    matched = tokens = 0
    gc.collect()
    for number in range(warm_up + decisions):
        if number == warm_up:
            asked, ended = Clock(), Clock()
            matched = tokens = 0
        now_s = number / 500
        arrive, head = traffic.request(prompt_tokens)
        ((_, place),) = asked.time(router.handle, arrive, now_s)
        assert isinstance(place, Place), place
        matched += place.matched_tokens
        tokens += prompt_tokens
        router.handle(traffic.confirmation(arrive, head, place), now_s)
        flights.append(arrive.id)
        if len(flights) > IN_FLIGHT_PER_WORKER * len(traffic.workers):
            done = Done(flights.popleft(), 100, 0, "ok", 0.2, 0.02)
            ended.time(router.handle, done, now_s)
    for request in flights:
        router.handle(Done(request, 100), now_s)
    mean_us = statistics.fmean(asked.cpu_us) + statistics.fmean(ended.cpu_us or [0.0])
    return Row(
        placement=str(router.state()["placement"]),
        prompt_tokens=prompt_tokens,
        workers=len(traffic.workers),
        decisions_per_s=round(1e6 / mean_us, 1),
        us_p50=quantile(asked.cpu_us, 0.5),
        us_p99=quantile(asked.cpu_us, 0.99),
        us_max=quantile(asked.cpu_us, 1.0),
        wall_us_p50=quantile(asked.wall_us, 0.5),
        wall_us_p99=quantile(asked.wall_us, 0.99),
        end_us_p50=quantile(ended.cpu_us or [0.0], 0.5),
        matched_share=round(matched / tokens, 4),
        decisions=decisions,
        preempted=asked.preempted,
    )


def measure_events(traffic: Traffic, tree_tokens: int, conversations: int) -> EventRow:
    """The time of events at the tree's full size, in which nothing is evicted: the workers say what goes."""
    router, build_rate = filled("round_robin", traffic, tree_tokens)
    router.tree.max_tree_tokens *= 2
    clock, tokens = Clock(), 0
    ends: deque[Removed] = deque()
    gc.collect()
    for _ in range(conversations):
        asked, answered, removed = traffic.conversation()
        ends.append(removed)
        stored: list[Event] = [asked, answered]
        if len(ends) > 64:
            stored.append(ends.popleft())
            tokens += TAIL_TOKENS + ANSWER_TOKENS
        for event in stored:
            clock.time(router.handle, event, 0.0)
        tokens += TAIL_TOKENS + ANSWER_TOKENS
    return EventRow(
        workers=len(traffic.workers),
        tokens_per_s=round(tokens / (sum(clock.cpu_us) / 1e6)),
        us_p50=quantile(clock.cpu_us, 0.5),
        us_p99=quantile(clock.cpu_us, 0.99),
        us_max=quantile(clock.cpu_us, 1.0),
        build_tokens_per_s=round(build_rate),
        tree_tokens=router.tree.tokens,
        nodes=router.tree.nodes,
    )


def bytes_per_token(traffic: Traffic, tree_tokens: int) -> float:
    """Resident memory that a full tree takes. To be asked first: memory that was freed before hides it."""
    gc.collect()
    before = _resident_bytes()
    router, _ = filled("round_robin", traffic, tree_tokens)
    gc.collect()
    return round((_resident_bytes() - before) / router.tree.tokens, 2)


def noise() -> dict[str, float]:
    """A fixed piece of work of some 25 µs, timed as decisions are: what the machine itself adds to a p99."""
    clock = Clock()
    for _ in range(5_000):
        clock.time(lambda _event, _now_s: sum(range(1_500)), Query(""), 0.0)
    return {"us_p50": quantile(clock.cpu_us, 0.5), "us_p99": quantile(clock.cpu_us, 0.99)}


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


def table(rows: Sequence[Row]) -> str:
    """One line a placement; in each column decisions per second, and p50 / p99 in microseconds."""
    columns = sorted({(row.prompt_tokens, row.workers) for row in rows})
    lines = [
        "decisions/s (p50 / p99 of one, µs)",
        f"{'prompt tokens':18}" + "".join(f"{tokens:>24,}" for tokens, _ in columns),
        f"{'workers':18}" + "".join(f"{workers:>24,}" for _, workers in columns),
    ]
    for placement in dict.fromkeys(row.placement for row in rows):
        found = {(row.prompt_tokens, row.workers): row for row in rows if row.placement == placement}
        cells = [
            f"{row.decisions_per_s:,.0f} ({row.us_p50:.0f} / {row.us_p99:.0f})"
            if (row := found.get(column))
            else "-"
            for column in columns
        ]
        lines.append(f"{placement:18}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def setting(options: argparse.Namespace) -> dict[str, Any]:
    """What a reader needs to run it again, and to judge the figures."""
    return {
        "seed": options.seed,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", "msgspec", "sglang-fair")},
        },
        "machine": {
            "cpu": processor(),
            "cores": os.cpu_count(),
            "load_before": [round(load, 2) for load in os.getloadavg()],
        },
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "tree_tokens": options.tree_tokens,
        "page_size": PAGE,
        "in_flight_per_worker": IN_FLIGHT_PER_WORKER,
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sglang-fair bench router",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the last line to FILE too")
    parser.add_argument(
        "--quick", action="store_true", help="a small tree, fewer decisions: under two minutes"
    )
    parser.add_argument("--placements", metavar="A,B", help="only these (default: all)")
    parser.add_argument("--prompt-tokens", metavar="N,N", type=numbers, help="prompt lengths")
    parser.add_argument("--workers", metavar="N,N", type=numbers, help="numbers of workers")
    parser.add_argument("--tree-tokens", type=int, metavar="N", help="default: 10 million; 2 if quick")
    parser.add_argument("--decisions", type=int, metavar="N", help="per row (default: 3000; 500 if quick)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    options = parser.parse_args(arguments)
    options.prompt_tokens = options.prompt_tokens or PROMPT_TOKENS
    options.workers = options.workers or WORKERS
    options.tree_tokens = options.tree_tokens or (2_000_000 if options.quick else 10_000_000)
    options.decisions = options.decisions or (500 if options.quick else 3_000)
    if min(options.prompt_tokens) < 4 * PAGE:
        parser.error(f"--prompt-tokens must be at least {4 * PAGE}")
    heads = HEADS * sum(options.prompt_tokens) // 2
    if options.tree_tokens < heads or options.decisions < 1:
        parser.error(f"--tree-tokens must hold the heads of all prompts, {heads}; --decisions at least one")
    return options


def choose(names: str | None) -> list[str]:
    """The placements called `names`. ValueError for a name that there is not."""
    wanted = names.split(",") if names else list(PLACEMENTS)
    unknown = [name for name in wanted if name not in PLACEMENTS]
    if unknown:
        raise ValueError(f"unknown placement {', '.join(unknown)}; there are {', '.join(PLACEMENTS)}")
    return wanted


def run(options: argparse.Namespace, show: Show) -> dict[str, Any]:
    """The result, whose `rows` are as in `Row`."""
    chosen = choose(options.placements)
    record: dict[str, Any] = {"bench": "router", **setting(options)}

    def traffic(workers: int) -> Traffic:
        return Traffic(options.seed, workers, options.prompt_tokens)

    per_token = bytes_per_token(traffic(options.workers[0]), options.tree_tokens)
    show(f"{per_token} bytes per token in the tree")
    events = []
    for workers in options.workers:
        row = measure_events(traffic(workers), options.tree_tokens, conversations=options.decisions)
        events.append(row)
        show(
            f"{workers} workers: {row.tokens_per_s:,} event tokens/s "
            f"(an event: p50 {row.us_p50} µs, p99 {row.us_p99}, max {row.us_max})"
        )
    rows: list[Row] = []
    collect_young_only()
    for workers in options.workers:
        for placement in chosen:
            source = traffic(workers)
            router, _ = filled(placement, source, options.tree_tokens)
            for tokens in options.prompt_tokens:
                decisions = max(100, min(options.decisions, 10 * options.decisions * 1_000 // tokens))
                row = measure(router, source, tokens, decisions=decisions, warm_up=max(100, decisions // 5))
                rows.append(row)
                show(
                    f"{placement:18} {workers:>3} workers  {tokens:>7,} tokens  {row.decisions_per_s:>9,.0f}/s  "
                    f"p50 {row.us_p50:.1f} µs, p99 {row.us_p99:.1f}, max {row.us_max:.1f}"
                )
    record["machine"]["noise"] = noise()
    show(f"the machine's noise: fixed work takes {record['machine']['noise']} µs")
    record["machine"]["load_after"] = [round(load, 2) for load in os.getloadavg()]
    show(table(rows))
    return {
        **record,
        "rows": [asdict(row) for row in rows],
        "bytes_per_token": per_token,
        "event_tokens_per_s": min(row.tokens_per_s for row in events),
        "events": [asdict(row) for row in events],
    }


def _times_preempted() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(arguments: Sequence[str] | None = None) -> int:
    """Table and progress on stderr; the result is the last line of stdout."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    result = carry_out("router", lambda show: run(options, show), options.json)
    return 2 if result is None else 0


if __name__ == "__main__":
    sys.exit(main())
