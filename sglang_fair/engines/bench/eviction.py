"""`sglang-fair bench eviction`: what fair eviction costs in a replica, beside SGLang's own trees of LRU.

SGLang's cache is filled with prompts of two pages, which many clients use, until the tree has so many nodes. Then, in
CPU time of the scheduler's thread, these are timed: freeing the room of a prefill step and of a decode step, a look-up,
and the insertion of a prompt with its use. `rust` is SGLang's default tree, `python` its other one, from which ours,
`fair`, derives.

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
from json import dumps, loads
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from sglang_fair.bench import Show, carry_out
from sglang_fair.engines.bench.scheduler import setting
from sglang_fair.settings.commands import Mistake, Numbers, Option, numbers, run
from sglang_fair.sim.cost_model import make_cost_model

CORES = {"rust": "fcfs", "python": "fcfs", "fair": "dlpm"}
"""The tree cores, each with a --schedule-policy that has it."""
CLIENTS = 100
PAGE_TOKENS = 16
PREFILL_TOKENS, DECODING = 8192, 32
REPEATS = 20
NODES = Numbers(10_000, 100_000)


def measure(core: str, nodes: int, seed: int) -> dict[str, Any]:
    """One row. The process is then used up: it can hold one engine."""
    if core != "fair":
        os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = core
    from sglang_fair.engines.bench.one_process import Engine

    page, rng = PAGE_TOKENS, random.Random(seed)
    prompt_tokens = 2 * page
    pool_tokens = nodes * prompt_tokens + 2 * PREFILL_TOKENS
    engine = Engine(8, seed, policy=CORES[core], pool_tokens=pool_tokens)
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    cache = engine._scheduler.tree_cache
    pool = engine._scheduler.token_to_kv_pool_allocator

    def key() -> Any:
        return RadixKey(array("q", (rng.randrange(100_000) for _ in range(prompt_tokens))), None)

    def insert(prompt: Any) -> None:
        places = pool.alloc(prompt_tokens)
        assert places is not None
        cache.insert(InsertParams(key=prompt, value=places))
        if core == "fair":
            node = cache.match_prefix(MatchPrefixParams(key=prompt)).last_device_node
            cache.tree_core.use(f"client {rng.randrange(CLIENTS)}", node)

    known = [key() for _ in range(nodes)]
    for prompt in known:
        insert(prompt)

    def timed(action: Callable[[], object], times: int) -> float:
        taken = []
        for _ in range(times):
            started = time.thread_time()
            action()
            taken.append(1e3 * (time.thread_time() - started))
        return median(taken)

    evict_ms = timed(lambda: cache.evict(EvictParams(num_tokens=PREFILL_TOKENS)), REPEATS)
    evict_decode_ms = timed(lambda: cache.evict(EvictParams(num_tokens=DECODING * page)), REPEATS)
    latest = known[-nodes // 2 :]
    match_ms = timed(lambda: cache.match_prefix(MatchPrefixParams(key=rng.choice(latest))), 1000)
    fresh = [key() for _ in range(1000)]
    insert_ms = timed(lambda: insert(fresh.pop()), 1000)
    gpu = make_cost_model("a100-80g/llama-3.1-8b")
    return {
        "core": core,
        "nodes": nodes,
        "evict_prefill_ms": evict_ms,
        "evict_decode_ms": evict_decode_ms,
        "match_us": 1e3 * match_ms,
        "insert_us": 1e3 * insert_ms,
        "part_of_prefill_step": evict_ms / (1e3 * gpu.prefill_s([(PREFILL_TOKENS, 0)])),
        # A page for each request, once in as many steps as a page has tokens.
        "part_of_decode_step": evict_decode_ms
        / PAGE_TOKENS
        / (1e3 * gpu.decode_run_s(DECODING, DECODING * 1000, 1)),
    }


def bench(nodes: tuple[int, ...], seed: int, show: Show) -> dict[str, Any]:
    """Each row in a process of its own."""
    rows = []
    for count in nodes:
        for core in CORES:
            command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--row", core]
            command += ["--nodes", str(count), "--seed", str(seed)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise Mistake(f"{core}: {done.stderr[-2000:]}")
            rows.append(loads(done.stdout.splitlines()[-1]))
            row = rows[-1]
            show(
                f"{count:>8,} nodes  {core:7} evict {row['evict_prefill_ms']:8.2f} ms a prefill step"
                f" ({row['part_of_prefill_step']:.1%}), {row['evict_decode_ms']:7.2f} ms 32 pages,"
                f" look-up {row['match_us']:6.1f} us, insertion {row['insert_us']:6.1f} us"
            )
    return {"bench": "eviction", **setting(seed), "rows": rows}


def main(
    json: Annotated[Path | None, Option(metavar="FILE", help="Write the result to FILE too.")] = None,
    nodes: Annotated[Numbers, numbers("Nodes of the tree.")] = NODES,
    seed: Annotated[int, Option(help="Of prompts and clients.")] = 1,
    row: Annotated[str | None, Option(metavar="CORE", help="Only this one, in this process.")] = None,
) -> None:
    """Time the eviction of SGLang's prefix cache: its own trees, and ours, which is fair among clients.

    Prints its progress on stderr, and the result as JSON in the last line of stdout.
    """
    if row is not None:
        print(dumps(measure(row, nodes[0], seed)))
        return
    carry_out(lambda show: bench(nodes, seed, show), json)


if __name__ == "__main__":
    code = run(main, "sglang-fair bench eviction")
    sys.stdout.flush()
    os._exit(code)  # SGLang's threads and sockets would keep the process alive
