"""A request that is made to wait by each cause, on SGLang's real scheduler: what the record says of it.

The model takes no time; the scheduler's clock goes on by a second with each step. `python -m
tests.support.waiting_causes` prints, by cause, the record of the request that waited, as JSON; the scheduler has to be
alone in its process.
"""

import json
import os
from array import array
from collections.abc import Callable
from typing import Any

from sglang_fair.engines.bench.one_process import MOST_RUNNING

POOL_TOKENS = 4_000
ADMITTED_PER_STEP = 3
STEP_S = 1.0
PREFILL_S, DECODE_S = 0.5, 0.010
"""Where the rule for steps is what makes somebody wait."""


class Scene:
    """The scheduler with an empty queue and a clock of ours."""

    def __init__(self, engine: Any, policy: str, pool_tokens: int = POOL_TOKENS, **settings: str) -> None:
        for name in ("QUANTUM", "STALL_MS", "TARGET_TPOT_MS", "OPTIONS"):
            os.environ.pop(f"SGLANG_FAIR_{name}", None)
        os.environ.update({f"SGLANG_FAIR_{name}": value for name, value in settings.items()})
        from sglang_fair.overlay.clock import Clock

        self.engine, self.now_s, self._sent = engine, 0.0, 0
        engine.use(policy, overlay=True, options=settings.get("OPTIONS", ""))
        engine.limit_pool(pool_tokens)
        self.scheduler = engine._scheduler
        self.scheduler.clock = Clock(is_shared=False, read=lambda: self.now_s)

    def send(self, id: str, client: str, prompt: int, output: int, shared: int = 0) -> Any:
        """A request whose prompt begins with `shared` tokens that others have too."""
        self._sent += 1
        own = [(self._sent * 131 + at * 7) % 251 for at in range(prompt - shared)]
        request = self.engine.request(id, client, array("q", [*([3] * shared), *own]), output)
        self.scheduler.process_input_requests([])  # an iteration begins; it receives the request
        self.engine.arrive([request])
        return request

    def steps(self, number: int, step_s: float = STEP_S) -> None:
        for _ in range(number):
            self.engine.step()
            self.now_s += step_s

    def rest(self) -> None:
        """Nothing runs any more."""
        while self.scheduler.waiting_queue or not self.scheduler.running_batch.is_empty():
            self.steps(1)

    def record(self, id: str) -> dict[str, Any]:
        [found] = self.scheduler.fair.explain(id, None)
        return dict(found)


def memory(engine: Any, policy: str = "dlpm") -> dict[str, Any]:
    """What is left of the pool is less than its prompt and its longest answer."""
    scene = Scene(engine, policy)
    scene.send("runs", "a", 2_000, 20)
    scene.steps(1)
    scene.send("waits", "b", 2_000, 20)
    scene.rest()
    return scene.record("waits")


def batch(engine: Any) -> dict[str, Any]:
    """As many run as may."""
    scene = Scene(engine, "dlpm", pool_tokens=50_000)
    for number in range(MOST_RUNNING):
        scene.send(f"runs {number}", "a", 4, 60)
    while scene.scheduler.waiting_queue:
        scene.steps(1)
    scene.send("waits", "b", 4, 5)
    scene.rest()
    return scene.record("waits")


def prompts(engine: Any) -> dict[str, Any]:
    """A step takes three prompts, and eight came before it."""
    scene = Scene(engine, "fair-fcfs")
    for number in range(8):
        scene.send(f"before {number}", "a", 20, 1)
    scene.send("waits", "b", 20, 1)
    scene.rest()
    return scene.record("waits")


def prefix(engine: Any) -> dict[str, Any]:
    """Another one computes a prefix of 200 tokens that both begin with, and that is new."""
    scene = Scene(engine, "dlpm")
    scene.send("first", "a", 240, 1, shared=200)
    scene.send("waits", "b", 240, 1, shared=200)
    scene.rest()
    return scene.record("waits")


def running(engine: Any) -> dict[str, Any]:
    """Prompts have taken so much time that those who run have their turn."""
    scene = Scene(engine, "dlpm", STALL_MS="100")
    for number in range(3):
        scene.send(f"runs {number}", f"runs {number}", 20, 60)
    scene.steps(4, DECODE_S)
    for number in range(3):
        scene.send(f"before {number}", "prompts", 20, 1)
    scene.steps(1, PREFILL_S)
    scene.send("waits", "prompts", 20, 1)
    scene.steps(20, DECODE_S)
    return scene.record("waits")


def target(engine: Any) -> dict[str, Any]:
    """Its client runs more than its share, and a token takes longer than the target."""
    scene = Scene(engine, "dlpm", STALL_MS="100", TARGET_TPOT_MS="5")
    for number in range(6):
        scene.send(f"flood {number}", "flood", 20, 60)
    scene.send("light", "light", 20, 60)
    scene.steps(10, DECODE_S)
    scene.send("waits", "flood", 20, 1)
    scene.steps(20, DECODE_S)
    return scene.record("waits")


def rate(engine: Any) -> dict[str, Any]:
    """Its client has had its one request of this minute."""
    scene = Scene(engine, "rpm", OPTIONS="limit=1,excess=delay")
    scene.send("before", "a", 20, 1)
    scene.send("waits", "a", 20, 1)
    scene.rest()
    return scene.record("waits")


def passed_over(engine: Any) -> dict[str, Any]:
    """SGLang itself passes it over: its answer is read out in another way than that of the one before it."""
    scene = Scene(engine, "fair-fcfs")
    scene.send("first", "a", 20, 1)
    waits = scene.send("waits", "b", 20, 1)
    waits.token_indices_to_pool = [0]
    scene.steps(1)
    waits.token_indices_to_pool = None
    scene.rest()
    return scene.record("waits")


SCENES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "memory": memory,
    "batch": batch,
    "prompts": prompts,
    "prefix": prefix,
    "running": running,
    "target": target,
    "rate": rate,
    "engine": passed_over,
    "memory, in SGLang's own order": lambda engine: memory(engine, "fcfs"),  # only the books are ours
}


def main() -> None:
    from sglang_fair.engines.bench.one_process import Engine

    engine = Engine(admit_per_step=ADMITTED_PER_STEP, seed=0)
    print(json.dumps({name: scene(engine) for name, scene in SCENES.items()}))


if __name__ == "__main__":
    main()
