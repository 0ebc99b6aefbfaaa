"""The same requests through SGLang's real scheduler and through the simulated replica: what each did, call by call.

A load names its requests and the steps before which they come; a step is one batch, and in the simulation a second.
The trace is what reached the fair queue: who was admitted with how many computed and cached tokens, every further
chunk, who was taken back, and who ended, in order. `python -m tests.support.sim_traces` prints the real traces as
JSON; the scheduler has to be alone in its process. Every answer is made of token 0, as the model that is left out
says it.
"""

import json
import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from sglang_fair.common.weights import Weights
from sglang_fair.core.options import make, shipped
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.steps import make_steps
from sglang_fair.sim import pool
from sglang_fair.sim.decoding import WARM_UP_STEPS
from sglang_fair.sim.replica import Replica, Settings, SimRequest

PAGE_TOKENS = 16
MOST_RUNNING = 128
QUANTUM = 300.0
RATIO_DECAY_STEPS = 7
"""Few, so that retractions are many."""
STALL_MS, SHORT_STALL_MS = 2000.0, 300.0
"""Where those that run have their turn. A step takes a second: half of the one, too long for the other."""

Call = list[Any]


@dataclass(frozen=True)
class Arrival:
    """A request that comes before step number `step`."""

    step: int
    id: str
    client: str
    tokens: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True)
class TraceLoad:
    """What is sent to which replica. `ratio` is the new-token ratio at first."""

    arrivals: tuple[Arrival, ...]
    aborts: Mapping[str, int] = field(default_factory=dict)
    """Before which step a request is given up."""
    policy: str = "dlpm"
    kv_tokens: int = 100_000
    chunked_prefill_tokens: int | None = None
    ignore_eos: bool = True
    ratio: float = 0.7
    steps: int = 600
    stall_ms: float = 0.0
    target_tpot_ms: float = 0.0
    mixed_chunk: bool = False


def _writers(seed: str, until_step: int) -> tuple[Arrival, ...]:
    return tuple(_arrivals(seed, requests=40, until_step=until_step, longest_answer=400))


def _loads() -> Iterator[tuple[str, TraceLoad]]:
    def crowd(name: str) -> tuple[Arrival, ...]:
        return tuple(_arrivals(f"crowd {name}", requests=60, until_step=20))

    yield "light", TraceLoad(tuple(_arrivals("light", requests=25, until_step=400)))
    yield "overload", TraceLoad(crowd("overload"), kv_tokens=2400)
    some = crowd("aborts")
    yield "aborts", TraceLoad(some, _aborts(some), kv_tokens=4000, chunked_prefill_tokens=128)
    writes: dict[str, Any] = {
        "kv_tokens": 2400, "chunked_prefill_tokens": 256, "ignore_eos": False, "steps": 4000
    }  # fmt: skip
    yield "retraction", TraceLoad(_writers("retraction", 200), **writes)
    yield "steps retracted", TraceLoad(_writers("steps retracted", 200), **writes, stall_ms=STALL_MS)
    # What is left of a prompt is kept, or those that run would have to be taken back.
    writes |= {"kv_tokens": 1600, "chunked_prefill_tokens": 64, "ratio": 0.3, "stall_ms": STALL_MS}
    yield "steps cut", TraceLoad(_writers("steps cut 1", 60), policy="vtc", **writes)
    # Without aborts, which the real queue hears of before the last step is told, and ours after.
    fair = {"kv_tokens": 6000, "chunked_prefill_tokens": 480, "stall_ms": SHORT_STALL_MS}
    yield "steps", TraceLoad(crowd("steps"), **fair)
    yield (
        "steps vtc",
        TraceLoad(crowd("steps vtc"), policy="vtc", chunked_prefill_tokens=256, stall_ms=STALL_MS),
    )
    yield "mixed", TraceLoad(crowd("mixed"), kv_tokens=6000, chunked_prefill_tokens=256, mixed_chunk=True)
    yield "mixed steps", TraceLoad(crowd("mixed steps"), **fair, mixed_chunk=True)
    writes |= {"kv_tokens": 2400, "chunked_prefill_tokens": 256, "ratio": 0.7, "stall_ms": 0.0}
    yield "mixed retracted", TraceLoad(_writers("mixed retracted", 200), **writes, mixed_chunk=True)
    # No step takes less, so all above their share are held back.
    yield "target", TraceLoad(crowd("target"), stall_ms=STALL_MS, target_tpot_ms=STALL_MS / 4)


def _aborts(arrivals: tuple[Arrival, ...]) -> dict[str, int]:
    return {one.id: one.step + n % 17 for n, one in enumerate(arrivals) if n % 3}


def _arrivals(seed: str, *, requests: int, until_step: int, longest_answer: int = 60) -> Iterator[Arrival]:
    """Three clients, whose prompts share heads; every fourth request goes on where an earlier one ended."""
    random = Random(seed)
    heads = [tuple(random.randrange(1, 1000) for _ in range(160)) for _ in range(4)]
    sent: list[Arrival] = []
    for number, step in enumerate(sorted(random.randrange(until_step) for _ in range(requests))):
        own = tuple(random.randrange(1, 1000) for _ in range(random.randint(1, 200)))
        if sent and number % 4 == 3:
            before = random.choice(sent)
            tokens = before.tokens + (0,) * before.output_tokens + own[:30]
        else:
            tokens = random.choice(heads)[: random.randint(0, 160)] + own
        sent.append(
            Arrival(step, f"{number:04}", "abc"[number % 3], tokens[:700], random.randint(1, longest_answer))
        )
        yield sent[-1]


LOADS = dict(_loads())


class Traced:
    """One load, to be carried out on either side."""

    def __init__(self, load: TraceLoad) -> None:
        self.load = load

    def simulate(self) -> list[Call]:
        """By the simulated replica."""
        load = self.load
        settings = Settings(
            kv_tokens=load.kv_tokens,
            page_tokens=PAGE_TOKENS,
            max_running=MOST_RUNNING,
            chunked_prefill_tokens=load.chunked_prefill_tokens,
            max_prefill_tokens=600_000,
            mixed_chunk=load.mixed_chunk,
            ignore_eos=load.ignore_eos,
            new_token_ratio=load.ratio,
            least_new_token_ratio=0.0,
            ratio_decay_steps=RATIO_DECAY_STEPS,
        )
        options = shipped(load.policy, "")
        queue = FairQueue(make(load.policy, options, quantum=QUANTUM, weights=Weights()))
        trace = calls(queue)
        steps = make_steps(queue.policy, load.stall_ms, load.target_tpot_ms, mixes=load.mixed_chunk)
        replica = Replica(queue, _Second(), settings, steps=steps)
        answer, pool.answer = pool.answer, lambda prompt, tokens: bytes(4 * tokens)
        try:
            for step in range(load.steps):
                # They come during the step before; an idle replica begins when somebody comes.
                now_s = step if replica.next_s == inf else step - 0.5
                for arrival in load.arrivals:
                    if arrival.step == step:
                        replica.arrive(_sim_request(arrival), now_s)
                for id, at in load.aborts.items():
                    if at == step:
                        replica.abort(id, now_s)
                replica.advance(step)
        finally:
            pool.answer = answer
        assert replica.next_s == inf, "the load was not done in its steps"
        return trace

    def real(self, engine: Any) -> list[Call]:
        """By SGLang's scheduler. `engine` is a `engines.bench.one_process.Engine`."""
        from sglang.srt.managers.io_struct import AbortReq

        from sglang_fair.overlay.clock import Clock

        load, scheduler, now_s = self.load, engine._scheduler, 0.0
        os.environ["SGLANG_FAIR_STALL_MS"] = str(load.stall_ms)
        os.environ["SGLANG_FAIR_TARGET_TPOT_MS"] = str(load.target_tpot_ms)
        scheduler.is_mixed_chunk = load.mixed_chunk
        engine.use(load.policy, overlay=True)
        scheduler.clock = Clock(is_shared=False, read=lambda: now_s)
        engine.limit_pool(load.kv_tokens)
        sender = SimpleNamespace(send_output=lambda *_: None)
        object.__setattr__(scheduler.ipc_channels, "send_to_tokenizer", sender)
        scheduler.chunked_prefill_size = load.chunked_prefill_tokens
        ratio = scheduler.new_token_ratio_tracker
        ratio.init = ratio.current = load.ratio
        ratio.min, ratio.decay = 0.0, load.ratio / RATIO_DECAY_STEPS
        # This engine has no server that answers a request of its own first.
        scheduler.fair._admission.step(float(WARM_UP_STEPS), decoded=WARM_UP_STEPS, requests=1)
        trace = calls(scheduler.fair.queue)
        for step in range(load.steps):
            now_s = float(step)
            for arrival in load.arrivals:
                if arrival.step == step:
                    request = engine.request(
                        arrival.id, arrival.client, array("q", arrival.tokens), arrival.output_tokens
                    )
                    request.sampling_params.ignore_eos = load.ignore_eos
                    engine.arrive([request])
            for id, at in load.aborts.items():
                if at == step:
                    scheduler.abort_request(AbortReq(rid=id))
            engine.step()
        return trace


def calls(queue: FairQueue) -> list[Call]:
    """What is said to `queue` from here on."""
    trace: list[Call] = []

    def tracing(owner: Any, name: str, line: Any) -> None:
        original = getattr(owner, name)

        def traced(*args: Any, **kwargs: Any) -> Any:
            trace.append([name, *line(*args, **kwargs)])
            return original(*args, **kwargs)

        setattr(owner, name, traced)

    tracing(
        queue, "admit", lambda job, extend_tokens, cached_tokens, path: [job.id, extend_tokens, cached_tokens]
    )
    tracing(queue.account, "extend", lambda job, tokens: [job.id, tokens])
    tracing(queue, "retract", lambda job: [job.id])
    tracing(queue, "finish", lambda job_id: [job_id])
    return trace


class _Second:
    """Every step takes one."""

    def prefill_s(self, extends: Any, requests: int = 0, context_tokens: int = 0) -> float:
        return 1.0

    def decode_s(self, requests: int, context_tokens: int, steps: int = 1) -> float:
        return float(steps)


def _sim_request(arrival: Arrival) -> SimRequest:
    tokens = np.array(arrival.tokens, dtype="<u4").tobytes()
    return SimRequest(arrival.id, arrival.client, tokens, arrival.output_tokens, arrival.output_tokens)


def main() -> None:
    os.environ["SGLANG_FAIR_QUANTUM"] = str(QUANTUM)
    from sglang_fair.engines.bench.one_process import Engine

    engine = Engine(admit_per_step=10_000, seed=0)
    print(json.dumps({name: Traced(load).real(engine) for name, load in LOADS.items()}))


if __name__ == "__main__":
    main()
