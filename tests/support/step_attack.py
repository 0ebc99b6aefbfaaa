"""Requests that run, and a trickle of prompts beside them, on SGLang's real scheduler.

24 requests of four clients run. From then on one request of a fifth client comes in every step, of 40 prompt tokens and
one output token. The model takes no time; the scheduler's clock shows the time of a GPU that takes `PREFILL_S` for a
batch of prompts and `DECODE_S` for a decode step. `python -m tests.support.step_attack` prints what each client was
given, for several policies, as JSON; the scheduler has to be alone in its process.
"""

import json
import os
from array import array
from typing import Any

VICTIMS = 4
RUNNING = 24
STEPS = 300
PREFILL_S, DECODE_S = 0.014, 0.010
CASES = {
    "dlpm": ("dlpm", 100.0, True),
    "vtc": ("vtc", 100.0, True),
    "dlpm, prompts first": ("dlpm", 0.0, True),
    "vtc, prompts first": ("vtc", 0.0, True),
    "dlpm, without a trickle": ("dlpm", 100.0, False),
}
"""Policy, --stall-ms, and whether there is a trickle."""


def attack(engine: Any, policy: str, stall_ms: float, trickle: bool) -> dict[str, Any]:
    """What happened in `STEPS` steps: output tokens of each victim, the trickle's requests, seconds, and the state of
    the rule."""
    from sglang_fair.overlay.clock import Clock

    now_s, sent = 0.0, 0
    os.environ["SGLANG_FAIR_STALL_MS"] = str(stall_ms)
    engine.use(policy, overlay=True)
    scheduler = engine._scheduler
    scheduler.clock = Clock(is_shared=False, read=lambda: now_s)

    def send(client: str, prompt_tokens: int, output_tokens: int) -> None:
        nonlocal sent
        sent += 1
        prompt = array("q", [sent, *range(1, prompt_tokens)])
        engine.arrive([engine.request(f"{sent:08}", client, prompt, output_tokens)])

    def step() -> None:
        nonlocal now_s
        engine.step()
        batch = scheduler.last_batch
        assert batch is not None, "the engine stood still"
        now_s += PREFILL_S if batch.forward_mode.is_extend() else DECODE_S

    for number in range(RUNNING):
        send(f"victim {number % VICTIMS}", 100, 10_000)
    while scheduler.waiting_queue:
        step()
    ledger, began_s = scheduler.fair.queue.account.ledger, now_s
    at_first = {name: usage.output_tokens for name, usage in ledger.accounts().items()}
    for _ in range(STEPS):
        if trickle:
            send("trickle", 40, 1)
        step()
    accounts = ledger.accounts()
    steps = scheduler.fair.status(scheduler.waiting_queue)["steps"]
    return {
        "output": {name: accounts[name].output_tokens - tokens for name, tokens in at_first.items()},
        "trickle": accounts["trickle"].requests if trickle else 0,
        "seconds": now_s - began_s,
        "steps": steps,
        "conserved": ledger.ok,
    }


def main() -> None:
    from sglang_fair.engines.bench.one_process import Engine

    engine = Engine(admit_per_step=10_000, seed=0)
    print(json.dumps({name: attack(engine, *case) for name, case in CASES.items()}))


if __name__ == "__main__":
    main()
