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
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from sglang_fair.bench import BenchOptions, Show, bench_command, conditions
from sglang_fair.bench.children import Children, cost, free_ports, until_served
from sglang_fair.bench.instant import MODEL, STREAM_TOKENS
from sglang_fair.models.catalog import find
from sglang_fair.settings.commands import Option
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


@dataclass(frozen=True, kw_only=True)
class GatewayOptions(BenchOptions):
    seconds: Annotated[float | None, Option(min=1, help="Length of each run (5; with --quick 2).")] = None
    rounds: Annotated[int | None, Option(min=1, help="How often it is measured (3; with --quick once).")] = (
        None
    )


def write_bodies(file: Path, seed: int, *, stream: bool) -> None:
    """A request on each line. Words are as frequent as those of a language."""
    rng = random.Random(seed)
    syllables = [a + v + c for a in "bcdfglmnprst" for v in "aeiou" for c in ("", "n", "r", "s")]
    words = ["".join(rng.choices(syllables, k=1 + n % 3)) + " " for n in range(3_000)]
    weights = list(accumulate(1 / (n + 1) for n in range(len(words))))

    def text(characters: int) -> str:
        return "".join(rng.choices(words, cum_weights=weights, k=characters // 2))[:characters]

    prefixes = [text(PREFIX_CHARS) for _ in range(PREFIXES)]
    with file.open("w") as out:
        for _ in range(PROMPTS):
            prompt = rng.choice(prefixes) + text(OWN_CHARS)
            body = {"model": MODEL, "prompt": prompt, "max_tokens": STREAM_TOKENS, "stream": stream}
            out.write(json.dumps(body) + "\n")


def wrk(port: int, bodies: Path, connections: int, seconds: float) -> dict[str, float]:
    """`SCRIPT`'s numbers; latencies are in microseconds. Raises ValueError if nothing is served."""
    script = bodies.with_name("script.lua")
    script.write_text(SCRIPT)
    command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "-s", str(script)]
    done = subprocess.run(
        [*command, f"http://127.0.0.1:{port}{PATH}", "--", str(bodies)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    load: dict[str, float] = json.loads(done.stdout[done.stdout.rindex("{") :])
    if not load["served"]:
        raise ValueError(f"nothing is served at port {port}")
    return load


class Setting:
    """Engine, router and gateway. Raises `children.DidNotStart`."""

    def __init__(self, children: Children) -> None:
        self.engine, other, self.port, router = free_ports(4)
        first = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1}).encode()
        request = (
            b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
        )
        request %= PATH.encode(), len(first), first

        def start(module: str, *words: str) -> Any:
            return children.start(sys.executable, "-m", module, *words)

        engine = start("sglang_fair.bench.instant", "--ports", f"{self.engine},{other}")
        asyncio.run(until_served(self.engine, request, [engine]))
        address, quiet = f"ipc://@sglang-fair/bench/{router}", ("--log-level", "warning")
        workers = (f"--worker=r{port},http=http://127.0.0.1:{port}" for port in (self.engine, other))
        self.ours = [
            start("router", "--bind", address, *quiet, *workers),
            start(
                "router.gateway", "--port", str(self.port), "--model-name", MODEL, "--router", address,
                "--tokenizer", find("default").path, *quiet,
            ),
        ]  # fmt: skip
        asyncio.run(until_served(self.port, request, self.ours))

    def measure(self, folder: Path, seed: int, seconds: float) -> dict[str, float]:
        whole, streams = folder / "whole", folder / "streams"
        write_bodies(whole, seed, stream=False)
        write_bodies(streams, seed, stream=True)
        wrk(self.port, whole, CONNECTIONS, seconds / 4)
        began_s, _ = cost(self.ours)
        full = wrk(self.port, whole, CONNECTIONS, seconds)
        between_s, _ = cost(self.ours)
        streamed = wrk(self.port, streams, CONNECTIONS, seconds)
        ended_s, memory_mb = cost(self.ours)
        alone, own = wrk(self.port, whole, 1, seconds), wrk(self.engine, whole, 1, seconds)
        tokens = streamed["served"] * STREAM_TOKENS
        return {
            "added_ms_p50": round((alone["p50"] - own["p50"]) / 1e3, 3),
            "added_ms_p99": round((alone["p99"] - own["p50"]) / 1e3, 3),
            "max_rps": round(1e6 * full["served"] / full["us"], 1),
            "cpu_ms_per_request": round(1e3 * (between_s - began_s) / full["served"], 3),
            "stream_tokens_per_s": round(1e6 * tokens / streamed["us"]),
            "cpu_us_per_token": round(1e6 * (ended_s - between_s) / tokens, 2),
            "failed": full["failed"] + streamed["failed"] + alone["failed"],
            "memory_mb": round(memory_mb, 1),
        }


def run(given: GatewayOptions, show: Show) -> dict[str, Any]:
    """Measure what the gateway adds to a request, in front of an engine that answers at once."""
    if shutil.which("wrk") is None:
        raise ValueError("wrk is not installed, which makes the load: apt install wrk")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    seconds = given.seconds or (2 if given.quick else 5)
    rounds = given.rounds or (1 if given.quick else 3)
    children, found, made = Children(), list[dict[str, float]](), conditions(given.seed)
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as folder:
        try:
            setting = Setting(children)
            for number in range(rounds):
                found.append(setting.measure(Path(folder), given.seed + number, seconds))
                show(f"round {number + 1}: {found[-1]}")
        finally:
            children.close()
    row = {name: statistics.median(one[name] for one in found) for name in found[0]}
    return {"bench": "gateway", **made, "rounds": rounds, "seconds": seconds, "row": row}


main = bench_command(GatewayOptions, run)


if __name__ == "__main__":
    sys.exit(run_command(main, "sglang-fair bench gateway"))
