"""What the gateway costs a request, in front of an engine that answers at once (`instant`): only the way is measured.

    sglang-fair bench gateway [--quick] [--json FILE]

The load is by wrk (apt install wrk). Each prompt begins with one of 64 prefixes of 3,000 characters and goes on with
1,000 characters of its own. Numbers are medians over the rounds.

    added_ms     latency of one request at a time, less the engine's median: median and P99
    max_rps      requests per second over 32 connections, each with a request always under way
    stream       tokens per second over 32 connections, in streams of 64 tokens, one event a token
    cpu_ms       CPU time of gateway and router per request, measured with max_rps; with streams, per token
"""

import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from sglang_fair.bench import Show, carry_out, conditions
from sglang_fair.bench.children import Child, Children, cost, free_ports, until_served
from sglang_fair.bench.instant import MODEL, STREAM_TOKENS
from sglang_fair.models.catalog import find
from sglang_fair.settings.commands import Mistake, Option
from sglang_fair.settings.commands import run as run_command

PATH = "/v1/completions"
PREFIXES, PREFIX_CHARS, OWN_CHARS = 64, 3_000, 1_000
PROMPTS = 2_000
"""Different ones; then they come again."""
CONNECTIONS = 32
SCRIPT = """
local bodies, at = {}, 0
function init(args)
  for line in io.lines(args[1]) do
    bodies[#bodies + 1] = wrk.format("POST", nil, {["content-type"] = "application/json"}, line)
  end
end
function request()
  at = at % #bodies + 1
  return bodies[at]
end
function done(summary, latency)
  local errors = summary.errors
  io.write(string.format('{"served": %d, "us": %d, "failed": %d, "p50": %f, "p99": %f}', summary.requests,
    summary.duration, errors.status + errors.connect + errors.read + errors.write + errors.timeout,
    latency:percentile(50.0), latency:percentile(99.0)))
end
"""


@dataclass(frozen=True)
class Load:
    """What wrk has measured. Latencies are in microseconds."""

    served: int
    us: int
    failed: int
    p50: float
    p99: float

    @property
    def per_s(self) -> float:
        return 1e6 * self.served / self.us


@dataclass(frozen=True)
class Cost:
    """One round."""

    added_ms_p50: float
    added_ms_p99: float
    max_rps: float
    cpu_ms_per_request: float
    stream_tokens_per_s: float
    cpu_us_per_token: float
    failed: int


def write_bodies(file: Path, seed: int, *, stream: bool) -> None:
    """A request on each line."""
    rng = random.Random(seed)
    syllables = [a + v + c for a in "bcdfglmnprst" for v in "aeiou" for c in ("", "n", "r", "s")]
    words = ["".join(rng.choices(syllables, k=1 + n % 3)) + " " for n in range(3_000)]
    weights = list(accumulate(1 / (n + 1) for n in range(len(words))))  # as words of a language are

    def text(characters: int) -> str:
        return "".join(rng.choices(words, cum_weights=weights, k=characters // 2))[:characters]

    prefixes = [text(PREFIX_CHARS) for _ in range(PREFIXES)]
    with file.open("w") as out:
        for _ in range(PROMPTS):
            prompt = rng.choice(prefixes) + text(OWN_CHARS)
            body = {"model": MODEL, "prompt": prompt, "max_tokens": STREAM_TOKENS, "stream": stream}
            out.write(json.dumps(body) + "\n")


def wrk(port: int, bodies: Path, connections: int, seconds: float) -> Load:
    """Raises ValueError if nothing is served."""
    script = bodies.with_name("script.lua")
    script.write_text(SCRIPT)
    command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "-s", str(script)]
    done = subprocess.run(
        [*command, f"http://127.0.0.1:{port}{PATH}", "--", str(bodies)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    load = Load(**json.loads(done.stdout[done.stdout.rindex("{") :]))
    if not load.served:
        raise ValueError(f"nothing is served at port {port}")
    return load


def start(children: Children, port: int, router_port: int, engines: Sequence[int]) -> list[Child]:
    """Router and gateway."""
    router = children.start(
        sys.executable, "-m", "router", "--bind", f"tcp://127.0.0.1:{router_port}", "--log-level", "warning",
        *(f"--worker=r{index},http=http://127.0.0.1:{engine}" for index, engine in enumerate(engines)),
    )  # fmt: skip
    gateway = children.start(
        sys.executable, "-m", "router.gateway", "--port", str(port), "--model-name", MODEL,
        "--router", f"tcp://127.0.0.1:{router_port}", "--tokenizer", find("default").path,
        "--log-level", "warning",
    )  # fmt: skip
    return [router, gateway]


def measure(port: int, engine: int, ours: Sequence[Child], folder: Path, seed: int, seconds: float) -> Cost:
    """One round."""
    whole, streams = folder / "whole", folder / "streams"
    write_bodies(whole, seed, stream=False)
    write_bodies(streams, seed, stream=True)
    wrk(port, whole, CONNECTIONS, seconds / 4)
    began_s, _ = cost(ours)
    full = wrk(port, whole, CONNECTIONS, seconds)
    between_s, _ = cost(ours)
    streamed = wrk(port, streams, CONNECTIONS, seconds)
    ended_s, _ = cost(ours)
    alone, own = wrk(port, whole, 1, seconds), wrk(engine, whole, 1, seconds)
    return Cost(
        round((alone.p50 - own.p50) / 1e3, 3),
        round((alone.p99 - own.p50) / 1e3, 3),
        round(full.per_s, 1),
        round(1e3 * (between_s - began_s) / full.served, 3),
        round(streamed.per_s * STREAM_TOKENS),
        round(1e6 * (ended_s - between_s) / (streamed.served * STREAM_TOKENS), 2),
        full.failed + streamed.failed + alone.failed,
    )


def run(seconds: float, rounds: int, seed: int, show: Show) -> dict[str, Any]:
    """`row` has the medians. Raises `children.DidNotStart` and ValueError."""
    children, costs, given = Children(), [], conditions(seed)
    first = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1}).encode()
    request = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
    request %= PATH.encode(), len(first), first
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as folder:
        try:
            engine, other, port, router = free_ports(4)
            canned = children.start(
                sys.executable, "-m", "sglang_fair.bench.instant", "--ports", f"{engine},{other}"
            )
            asyncio.run(until_served(engine, request, [canned]))
            ours = start(children, port, router, (engine, other))
            asyncio.run(until_served(port, request, ours))
            for number in range(rounds):
                costs.append(measure(port, engine, ours, Path(folder), seed + number, seconds))
                show(f"round {number + 1}: {costs[-1]}")
            memory = round(cost(ours)[1], 1)
        finally:
            children.close()
    row = {name: statistics.median(asdict(one)[name] for one in costs) for name in asdict(costs[0])}
    return {
        "bench": "gateway",
        **given,
        "rounds": rounds,
        "seconds": seconds,
        "row": {**row, "memory_mb": memory},
    }


def main(
    file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Write the last line to FILE, too.")
    ] = None,
    quick: Annotated[bool, Option("--quick", help="One round of short runs.")] = False,
    seconds: Annotated[float | None, Option(min=1, help="Length of each run (5; with --quick 2).")] = None,
    rounds: Annotated[
        int | None, Option(min=1, help="How often it is measured (3; with --quick once).")
    ] = None,
    seed: Annotated[int, Option(help="Of the prompts.")] = 1,
) -> None:
    """Measure what the gateway adds to a request, in front of an engine that answers at once.

    Progress goes to stderr; the result is the last line of stdout.
    """
    if shutil.which("wrk") is None:
        raise Mistake("wrk is not installed, which makes the load: apt install wrk")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    carry_out(
        lambda show: run(seconds or (2 if quick else 5), rounds or (1 if quick else 3), seed, show), file
    )


if __name__ == "__main__":
    sys.exit(run_command(main, "sglang-fair bench gateway"))
