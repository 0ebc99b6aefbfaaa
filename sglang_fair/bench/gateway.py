"""What the gateway costs a request, in front of an engine that answers at once (`instant`): only the way is measured.

    sglang-fair bench gateway [--quick] [--json FILE] [--envoy PROGRAM]

With an Envoy the same is measured through it alone, which deals requests out in turn, and through it with the endpoint
picker beside it; Envoy has one worker thread.

The load is by wrk (apt install wrk). Each prompt begins with one of 64 prefixes of 3,000 characters and goes on with
1,000 characters of its own. Numbers are medians over the rounds.

    added_ms     latency of one request at a time, less the engine's median: median and P99
    max_rps      requests per second over 32 connections, each with a request always under way
    stream       tokens per second over 32 connections, in streams of 64 tokens, one event a token
    cpu_ms       CPU time of gateway and router per request, measured with max_rps; with streams, per token. Through
                 Envoy: that of picker and router, and Envoy's own
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
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from sglang_fair.bench import BenchOptions, Show, bench_command, conditions
from sglang_fair.bench.children import Child, Children, cost, free_ports, until_served
from sglang_fair.bench.envoy import config
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
    envoy: Annotated[Path | None, Option(exists=True, dir_okay=False, help="Envoy's program.")] = None


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


@dataclass(frozen=True)
class Way:
    """To the engine: where requests are sent, and the processes that they pass, ours and Envoy."""

    port: int
    ours: Sequence[Child]
    envoy: Sequence[Child] = ()


class Setting:
    """Engine, router, gateway, and what Envoy needs. Raises `children.DidNotStart`."""

    def __init__(self, children: Children, envoy: Path | None, folder: Path) -> None:
        """Configurations are written to `folder`."""
        self.engine, other, port, router, asked, alone, picker = free_ports(7)
        first = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1}).encode()
        request = (
            b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
        )
        request %= PATH.encode(), len(first), first

        def start(module: str, *words: str) -> Child:
            return children.start(sys.executable, "-m", module, *words)

        def start_envoy(port: int, picker: int | None) -> Child:
            file = folder / f"envoy-{port}.json"
            file.write_text(json.dumps(config(port, (self.engine, other), picker)))
            words = "--concurrency", "1", "--disable-hot-restart", "--log-level", "error", "-c", str(file)
            return children.start(str(envoy), *words)

        engine = start("sglang_fair.bench.instant", "--ports", f"{self.engine},{other}")
        asyncio.run(until_served(self.engine, request, [engine]))
        address, quiet = f"ipc://@sglang-fair/bench/{router}", ("--log-level", "warning")
        workers = (f"--worker=r{port},http=http://127.0.0.1:{port}" for port in (self.engine, other))
        decides = start("router", "--bind", address, *quiet, *workers)
        same = "--model-name", MODEL, "--router", address, "--tokenizer", find("default").path, *quiet
        ours = [decides, start("router.gateway", "--port", str(port), *same)]
        self.ways = {"gateway": Way(port, ours)}
        if envoy is not None:
            picks = [decides, start("router.picker", "--port", str(picker), "--plaintext", *same)]
            self.ways["envoy"] = Way(alone, (), [start_envoy(alone, None)])
            self.ways["picker"] = Way(asked, picks, [start_envoy(asked, picker)])
        for way in self.ways.values():
            asyncio.run(until_served(way.port, request, [*way.ours, *way.envoy]))

    def measure(self, way: Way, folder: Path, seed: int, seconds: float) -> dict[str, float]:
        whole, streams = folder / "whole", folder / "streams"
        write_bodies(whole, seed, stream=False)
        write_bodies(streams, seed, stream=True)
        wrk(way.port, whole, CONNECTIONS, seconds / 4)
        (began_s, _), (envoy_began_s, _) = cost(way.ours), cost(way.envoy)
        full = wrk(way.port, whole, CONNECTIONS, seconds)
        (between_s, _), (envoy_between_s, _) = cost(way.ours), cost(way.envoy)
        streamed = wrk(way.port, streams, CONNECTIONS, seconds)
        (ended_s, memory_mb), (envoy_ended_s, _) = cost(way.ours), cost(way.envoy)
        alone, own = wrk(way.port, whole, 1, seconds), wrk(self.engine, whole, 1, seconds)
        tokens = streamed["served"] * STREAM_TOKENS
        envoys = {
            "envoy_cpu_ms_per_request": round(1e3 * (envoy_between_s - envoy_began_s) / full["served"], 3),
            "envoy_cpu_us_per_token": round(1e6 * (envoy_ended_s - envoy_between_s) / tokens, 2),
        }
        return (envoys if way.envoy else {}) | {
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
    children, found, made = Children(), dict[str, list[dict[str, float]]](), conditions(given.seed)
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as folder:
        try:
            setting = Setting(children, given.envoy, Path(folder))
            for number in range(rounds):
                for name, way in setting.ways.items():
                    row = setting.measure(way, Path(folder), given.seed + number, seconds)
                    found.setdefault(name, []).append(row)
                    show(f"round {number + 1}, {name}: {row}")
        finally:
            children.close()
    medians = {
        name: {key: statistics.median(one[key] for one in rows) for key in rows[0]}
        for name, rows in found.items()
    }
    made |= {"rounds": rounds, "seconds": seconds, "row": medians.pop("gateway")}
    return {"bench": "gateway", **made, **medians}


main = bench_command(GatewayOptions, run)


if __name__ == "__main__":
    sys.exit(run_command(main, "sglang-fair bench gateway"))
