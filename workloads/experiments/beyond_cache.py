"""Whose prefixes a replica keeps: fair eviction and LRU beside a client that streams, and on Mooncake's trace."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from sglang_fair.core.eviction import FairEviction, LeastRecentlyUsed
from sglang_fair.sim.cache import PrefixCache
from workloads.arrivals import EvenArrivals
from workloads.clients import Client
from workloads.experiments.claims import Part, Table, at_least, claim, graded
from workloads.experiments.contract import SEEDS, Cell, Json, Measured, Result, Simulated, Size, TrafficSpec
from workloads.experiments.program_senders import filler_tokens
from workloads.measures import summarize
from workloads.programs.call import Call, Program, Reply
from workloads.records import Run
from workloads.session import Plan
from workloads.simulation import Site
from workloads.table import Requests
from workloads.traces.mooncake import mooncake
from workloads.traces.trace import BLOCK_TOKENS, Trace

POOL_TOKENS = 400_000
CHATS, CONVERSATIONS, HISTORY_TOKENS = 3, 20, 4_000
"""Each client's conversations fill a fifth of the pool."""
WORDS_TOKENS, ANSWER_TOKENS = 50, 50
CHAT_RATE_PER_S = 0.2
EVERY_S = CONVERSATIONS / CHAT_RATE_PER_S
"""How often a conversation goes on."""
STREAM_TOKENS, STREAM_RATE_PER_S = 8_000, 0.8

KEPT = 0.95
"""Part of its hit rate alone that a client must keep beside the stream."""

TOTAL, NEARLY = 0.98, 0.95
"""Parts of LRU's hit rate that all clients together must keep, and that count as nearly so."""
LENGTH_S = 900.0

MOONCAKE_POOLS = {"large": 3_200_000, "middle": 2_300_000, "small": 1_500_000}
"""Tokens; the largest is that of eight A100 (8B)."""
MOONCAKE_FILE = Path(__file__).resolve().parents[3] / "shared" / "data" / "mooncake_conversation_trace.jsonl"
"""Where it is absent, a stand-in with the trace's statistics takes its place, and the record says so."""

EVICTIONS = {"lru": "LRU", "fair": "fair eviction"}


def chat(name: str, seed: str) -> Client:
    """A client that goes on with its conversations in turn. Their histories do not grow, so that what it uses is a
    fifth of the pool throughout."""

    def program(index: int) -> Program:
        history = filler_tokens(f"{seed}/{name}/{index % CONVERSATIONS}", HISTORY_TOKENS)
        words = filler_tokens(f"{seed}/{name}/words/{index}", WORDS_TOKENS)
        return _ask(history + words, ANSWER_TOKENS)

    return Client(name, program, EvenArrivals(CHAT_RATE_PER_S), seed, app="chat", requests=1)


def stream(seed: str) -> Client:
    """A client whose prompts have nothing in common."""

    def program(index: int) -> Program:
        return _ask(filler_tokens(f"{seed}/stream/{index}", STREAM_TOKENS), 1)

    return Client(
        "stream", program, EvenArrivals(STREAM_RATE_PER_S), seed, app="stream", well_behaved=False, requests=1
    )


def _ask(prompt: bytes, answer_tokens: int) -> Program:
    replies: tuple[Reply, ...] = yield (Call(prompt, answer_tokens, "request"),)
    return sum(reply.ok for reply in replies)


def replay(trace: Trace, order: LeastRecentlyUsed, capacity: int) -> float:
    """The part of the prompts that a cache of `capacity` blocks has when they come, one request after another."""
    cache = PrefixCache(1, order, events=False)
    found = asked = 0
    for request in trace.requests:
        blocks, size = np.array(request.blocks, "<u4").tobytes(), len(request.blocks)
        node = cache.match(blocks, size - 1)
        found, asked = found + node.end, asked + size
        cache.use(request.client, node)
        cache.lock(node)
        cache.evict(cache.tokens + size - node.end - capacity)
        leaf, there = cache.insert(blocks, size, node)
        cache.use(request.client, leaf, size - there)
        cache.unlock(node)
    return found / asked


class Cache(Simulated):
    id = "beyond-cache"
    title = "Fair in the cache: what others use stays"
    source = "beyond the papers"
    about = f"""Llama-3.1-8B on one A100 under DLPM for {LENGTH_S:.0f} s, with a pool of {POOL_TOKENS:,} tokens.
        Three clients hold {CONVERSATIONS} conversations of {HISTORY_TOKENS:,} tokens each, a fifth of the pool; each
        conversation goes on every {EVERY_S:.0f} s. A fourth client streams prompts of {STREAM_TOKENS:,} tokens that
        nobody sends again, {STREAM_RATE_PER_S} a second. Besides, Mooncake's conversation trace, with a hundred
        clients after Zipf, goes through a cache alone, one request after another. Hit rates are those of the client
        that finds least."""

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        length_s, seeds = (LENGTH_S, SEEDS) if full else (240.0, SEEDS[:1])
        plan = Plan(length_s, drain_s=None)
        chats = [
            Cell(
                name,
                Site(policy="dlpm", kv_tokens=POOL_TOKENS, cache_share=share, stall_ms=0.0),
                TrafficSpec("chats", {"stream": streams}),
                plan,
                seeds,
                label,
            )
            for name, label, share, streams in (
                ("solo", "alone, LRU", False, False),
                ("lru", "beside the stream, LRU", False, True),
                ("fair", "beside the stream, fair eviction", True, True),
            )
        ]
        pools = MOONCAKE_POOLS if full else {"small": MOONCAKE_POOLS["small"]}
        return chats + [
            Cell(
                f"mooncake-{pool}-{name}",
                Site(kv_tokens=tokens, cache_share=name == "fair", stall_ms=0.0),
                TrafficSpec("mooncake", {"pool_tokens": tokens, "eviction": name}),
                plan,
                seeds,
                f"Mooncake, {tokens:,} tokens, {label}",
            )
            for pool, tokens in pools.items()
            for name, label in EVICTIONS.items()
        ]

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        chats = [chat(f"chat {number}", seed) for number in range(1, CHATS + 1)]
        return [*chats, stream(seed)] if cell.traffic.arguments["stream"] else chats

    def run(self, cell: Cell, seed: str) -> Measured:
        if cell.traffic.name != "mooncake":
            return super().run(cell, seed)
        file = MOONCAKE_FILE if MOONCAKE_FILE.is_file() else None
        trace = mooncake(file, seed=seed)
        capacity = cell.traffic.arguments["pool_tokens"] // BLOCK_TOKENS
        order = FairEviction(capacity) if cell.site.cache_share else LeastRecentlyUsed()
        rate = replay(trace, order, capacity)
        return Measured({"hit_rate": rate, "from_file": file is not None}, trace.duration_s)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        table, found = Requests(run), summarize(run)
        return {
            "hit_rate": table.hit_rate(~table.of["stream"]),
            "least_hit_rate": min(
                rate
                for k in range(1, CHATS + 1)
                if (rate := table.hit_rate(table.of[f"chat {k}"])) is not None
            ),
            "ttft_p50_s": found.ttft_p50_s,
            "ttft_p99_s": found.ttft_p99_s,
            "tokens_per_s": found.throughput_tokens_per_s,
        }

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        solo, lru, fair = (at[name]["least_hit_rate"] for name in ("solo", "lru", "fair"))
        pools = [pool for pool in MOONCAKE_POOLS if f"mooncake-{pool}-lru" in at]
        ratios = [
            at[f"mooncake-{pool}-fair"]["hit_rate"] / at[f"mooncake-{pool}-lru"]["hit_rate"] for pool in pools
        ]
        whence = "the trace" if at[f"mooncake-{pools[0]}-lru"].first["from_file"] else "a stand-in"
        yield claim(
            f"""Beside a client that streams unique prompts, three with a fifth of the pool each keep at least {KEPT}
                of the hit rate that they have alone""",
            paper="our own question",
            ours=f"fair eviction {fair / solo:.3f}, LRU {lru / solo:.3f} of {solo:.3f}",
            holds=graded(fair / solo >= KEPT, fair > lru),
            why="LRU keeps what was used last, whoever used it.",
        )
        yield claim(
            f"On Mooncake's conversation trace the hit rate is at least {TOTAL} of LRU's",
            paper="our own question",
            ours=f"{whence}: {min(ratios):.3f} to {max(ratios):.3f} of LRU's, by the size of the pool",
            holds=at_least(min(ratios), TOTAL, NEARLY),
            why="What small clients used is kept for longer, and what the largest used for less long.",
        )
        yield Table(
            "Medians over seeds",
            "run | hit rate | TTFT P50, s | P99, s | tokens/s",
            [one.row("hit_rate", "ttft_p50_s", "ttft_p99_s", "tokens_per_s") for one in at.values()],
        )
