"""SGLang's scheduler with three clients whose prompts come back and one whose never do: what the three find cached.

    python -m tests.support.crowded_cache on|off

One line of JSON: each client's part of its prompts that was found, the tree's class, what each client holds, and
whether the books agree in the end. SGLang has checked its tree then.
"""

import json
import os
import random
import sys
from array import array

POOL_TOKENS, PROMPT_TOKENS = 16_000, 800
ROUNDS = 8


def main() -> None:
    os.environ["SGLANG_FAIR_CACHE_SHARE"] = sys.argv[1]
    from sglang_fair.engines.bench.one_process import Engine

    engine = Engine(8, 0, policy="dlpm", pool_tokens=POOL_TOKENS)
    rng = random.Random(1)

    def prompt() -> "array[int]":
        return array("q", (rng.randrange(300, 100_000) % 250 for _ in range(PROMPT_TOKENS)))

    own = {f"chat {k}": [prompt() for _ in range(4)] for k in range(3)}  # a fifth of the pool each
    found: dict[str, list[int]] = {client: [] for client in own}
    sent = 0

    def serve(client: str, tokens: "array[int]") -> int:
        nonlocal sent
        sent += 1
        request = engine.request(f"{sent}", client, tokens, 1)
        engine.arrive([request])
        while engine.waiting:
            engine.step()
        return int(request.cached_tokens)

    for round in range(ROUNDS):
        for client, prompts in own.items():
            for tokens in prompts:
                cached = serve(client, tokens)
                if round:
                    found[client].append(cached)
        for _ in range(30):  # 1.5 times the pool
            serve("stream", prompt())
    cache = engine._scheduler.tree_cache
    cache.sanity_check()
    status = engine._scheduler.fair.status([])
    print(
        json.dumps(
            {
                "found": {c: sum(f) / (len(f) * PROMPT_TOKENS) for c, f in found.items()},
                "core": engine.cache()[1],
                "holds": status["cache_tokens"],
                "mismatches": status["conservation"]["mismatches"],
                "corrections": status["corrections"],
            }
        )
    )


if __name__ == "__main__":
    main()
