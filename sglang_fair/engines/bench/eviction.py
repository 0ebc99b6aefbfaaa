"""`sglang-fair bench eviction`: what fair eviction costs in a replica, beside SGLang's own trees of LRU.

SGLang's cache is filled with prompts of two pages, which many clients use, until the tree has so many nodes. Then, in
CPU time of the scheduler's thread, these are timed: freeing the room of a prefill step and of a decode step, a look-up,
and the insertion of a prompt with its use. `rust` is SGLang's default tree, `python` its other one, from which ours,
`fair`, derives. `rule` is the rule alone (`core.eviction`) on the simulator's tree, `lru` plain LRU there.

`part_of_prefill_step` and `part_of_decode_step` compare with an A100 (8B) by its cost model: a prefill step of 8,192
tokens, a decode step of 32 requests.
"""

import os
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from json import dumps, loads
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np

from sglang_fair.bench import Show, carry_out
from sglang_fair.core.eviction import FairEviction, LeastRecentlyUsed
from sglang_fair.engines.bench.scheduler import setting
from sglang_fair.settings.commands import Mistake, Numbers, Option, numbers, run
from sglang_fair.sim.cache import PrefixCache
from sglang_fair.sim.cost_model import make_cost_model

CORES = {"rust": "fcfs", "python": "fcfs", "fair": "dlpm"}
"""SGLang's tree cores, each with a --schedule-policy that has it."""
RULES: dict[str, Callable[[int], LeastRecentlyUsed]] = {
    "lru": lambda _: LeastRecentlyUsed(),
    "rule": FairEviction,
}
PAGE_TOKENS = 16
PROMPT_TOKENS = 2 * PAGE_TOKENS
PREFILL_TOKENS, DECODING = 8192, 32
REPEATS = 20
NODES = Numbers(10_000, 100_000)


@dataclass(frozen=True)
class Tree:
    """What is timed of a tree. A prompt is any object that `prompt` makes."""

    prompt: Callable[[], Any]
    insert: Callable[[Any, str], object]
    """Caches a prompt, as a use of this client."""
    match: Callable[[Any], object]
    evict: Callable[[int], object]
    """Frees so many tokens."""


def sglang_tree(core: str, pool_tokens: int, rng: random.Random) -> Tree:
    """The cache of SGLang's scheduler. The process is then used up: it can hold one engine."""
    if core == "fair":
        os.environ["SGLANG_FAIR_CACHE_SHARE"] = "on"
    else:
        os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = core
    from sglang_fair.engines.bench.one_process import Engine

    engine = Engine(8, 0, policy=CORES[core], pool_tokens=pool_tokens)
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    cache = engine._scheduler.tree_cache
    pool = engine._scheduler.token_to_kv_pool_allocator

    def prompt() -> Any:
        return RadixKey(array("q", (rng.randrange(100_000) for _ in range(PROMPT_TOKENS))), None)

    def insert(prompt: Any, client: str) -> None:
        places = pool.alloc(PROMPT_TOKENS)
        assert places is not None
        cache.insert(InsertParams(key=prompt, value=places))
        if core == "fair":
            node = cache.match_prefix(MatchPrefixParams(key=prompt)).last_device_node
            cache.tree_core.use(client, node)

    def match(prompt: Any) -> object:
        return cache.match_prefix(MatchPrefixParams(key=prompt))

    return Tree(prompt, insert, match, lambda tokens: cache.evict(EvictParams(num_tokens=tokens)))


def simulated_tree(rule: str, pool_tokens: int, rng: random.Random) -> Tree:
    """The cache of a simulated replica, which does little but ask the rule."""
    cache = PrefixCache(PAGE_TOKENS, RULES[rule](pool_tokens), events=False)

    def prompt() -> bytes:
        return np.array([rng.randrange(100_000) for _ in range(PROMPT_TOKENS)], "<u4").tobytes()

    def match(prompt: bytes) -> Any:
        return cache.match(prompt, PROMPT_TOKENS)

    def insert(prompt: bytes, client: str) -> None:
        leaf, there = cache.insert(prompt, PROMPT_TOKENS, match(prompt))
        cache.use(client, leaf, PROMPT_TOKENS - there)

    return Tree(prompt, insert, match, cache.evict)


def measure(core: str, nodes: int, clients: int, seed: int) -> dict[str, Any]:
    """One row."""
    rng = random.Random(seed)
    pool_tokens = nodes * PROMPT_TOKENS + 2 * PREFILL_TOKENS
    tree = (simulated_tree if core in RULES else sglang_tree)(core, pool_tokens, rng)

    def insert(prompt: Any) -> None:
        tree.insert(prompt, f"client {rng.randrange(clients)}")

    known = [tree.prompt() for _ in range(nodes)]
    for prompt in known:
        insert(prompt)

    def timed(action: Callable[[], object], times: int) -> list[float]:
        taken = []
        for _ in range(times):
            started = time.thread_time()
            action()
            taken.append(1e3 * (time.thread_time() - started))
        return taken

    evictions = timed(lambda: tree.evict(PREFILL_TOKENS), REPEATS)
    evict_ms = median(evictions)
    evict_decode_ms = median(timed(lambda: tree.evict(DECODING * PAGE_TOKENS), REPEATS))
    latest = known[-nodes // 2 :]
    match_ms = median(timed(lambda: tree.match(rng.choice(latest)), 1000))
    fresh = [tree.prompt() for _ in range(1000)]
    insert_ms = median(timed(lambda: insert(fresh.pop()), 1000))
    gpu = make_cost_model("a100-80g/llama-3.1-8b")
    return {
        "core": core,
        "nodes": nodes,
        "clients": clients,
        "evict_prefill_ms": evict_ms,
        "evict_prefill_max_ms": max(evictions),
        "evict_decode_ms": evict_decode_ms,
        "match_us": 1e3 * match_ms,
        "insert_us": 1e3 * insert_ms,
        "part_of_prefill_step": evict_ms / (1e3 * gpu.prefill_s([(PREFILL_TOKENS, 0)])),
        # A page for each request, once in as many steps as a page has tokens.
        "part_of_decode_step": evict_decode_ms
        / PAGE_TOKENS
        / (1e3 * gpu.decode_run_s(DECODING, DECODING * 1000, 1)),
    }


def bench(nodes: tuple[int, ...], clients: int, seed: int, show: Show) -> dict[str, Any]:
    """Each row in a process of its own."""
    rows = []
    for count in nodes:
        for core in (*CORES, *RULES):
            command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--row", core]
            command += ["--nodes", str(count), "--clients", str(clients), "--seed", str(seed)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise Mistake(f"{core}: {done.stderr[-2000:]}")
            rows.append(loads(done.stdout.splitlines()[-1]))
            row = rows[-1]
            show(
                f"{count:>8,} nodes  {core:7} evict {row['evict_prefill_ms']:8.2f} ms a prefill step"
                f" ({row['part_of_prefill_step']:.1%}; at most {row['evict_prefill_max_ms']:.2f} ms),"
                f" {row['evict_decode_ms']:7.2f} ms 32 pages,"
                f" look-up {row['match_us']:6.1f} us, insertion {row['insert_us']:6.1f} us"
            )
    return {"bench": "eviction", **setting(seed), "rows": rows}


def main(
    json: Annotated[Path | None, Option(metavar="FILE", help="Write the result to FILE too.")] = None,
    nodes: Annotated[Numbers, numbers("Nodes of the tree.")] = NODES,
    clients: Annotated[int, Option(help="Clients that use it.", min=1)] = 100,
    seed: Annotated[int, Option(help="Of prompts and clients.")] = 1,
    row: Annotated[str | None, Option(metavar="CORE", help="Only this one, in this process.")] = None,
) -> None:
    """Time the eviction of SGLang's prefix cache: its own trees, and ours, which is fair among clients.

    Prints its progress on stderr, and the result as JSON in the last line of stdout.
    """
    if row is not None:
        print(dumps(measure(row, nodes[0], clients, seed)))
        return
    carry_out(lambda show: bench(nodes, clients, seed, show), json)


if __name__ == "__main__":
    code = run(main, "sglang-fair bench eviction")
    sys.stdout.flush()
    os._exit(code)  # SGLang's threads and sockets would keep the process alive
