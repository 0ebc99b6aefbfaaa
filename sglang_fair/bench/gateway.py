"""What the gateway adds to a request, beside `sglang-router` over the same engine, in one run.

    sglang-fair bench gateway [--quick] [--json FILE] [--sglang-router PATH]

The engine answers at once (see `instant`), so only the path is measured. `ours` is one gateway process and one
router process with D2LPM; the other is the Rust router of PyPI (`python -m venv V && V/bin/pip install
sglang-router`, then `--sglang-router V/bin/smg`) with `cache_aware`; where it is not installed its row says
`absent`. Every prompt begins with one of 64 prefixes of 3,000 characters and ends in 1,000 of its own.

    added_ms     latency at a fixed rate, arrivals evenly spaced, less the engine's own median at the same rate, which
                 is measured in the same seconds; from the moment at which a request was due, so that waiting in our
                 own client counts, and counts on both sides (in P99 the engine's and the client's own is left in)
    max_rps      requests per second with 32 connections that always have one under way
    stream       tokens per second through 32 streams of 64 tokens, one event each
    cpu_ms       CPU time of all the gateway's processes per request, in the run for max_rps
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil

from sglang_fair.bench import Show, carry_out
from sglang_fair.bench.instant import MODEL, STREAM_TOKENS
from sglang_fair.common.processes import child_environment
from sglang_fair.common.provenance import processor
from sglang_fair.models.catalog import find

CONNECTIONS = 32
PREFIXES, PREFIX_CHARS, OWN_CHARS = 64, 3_000, 1_000
VOCABULARY = 3_000
START_S = 60.0
PORTS = range(18_000, 29_000)


@dataclass(frozen=True)
class Row:
    """One gateway at one rate; None where there was nothing to measure."""

    gateway: str
    rate_rps: float | None = None
    added_ms_p50: float | None = None
    added_ms_p99: float | None = None
    max_rps: float | None = None
    stream_tokens_per_s: float | None = None
    cpu_ms_per_request: float | None = None
    memory_mb: float | None = None
    failed: int = 0
    absent: bool = False


class Client(asyncio.Protocol):
    """One connection to an HTTP server; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._tail = b""
        self._left: int | None = None
        self._answer: asyncio.Future[bool] | None = None
        self._ok = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The transport is writable."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Counts down to the end of the answer."""
        if self._answer is None:
            return
        if self._left is None:
            data = self._tail + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._tail = data
                return
            head, data = data[:end].lower(), data[end + 4 :]
            self._ok = head.startswith(b"http/1.1 200")
            at = head.find(b"content-length:")
            self._left = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else -1
            self._tail = b""
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._end(self._ok)
        else:
            self._tail = (self._tail + data)[-16:]
            if self._tail.endswith(b"0\r\n\r\n"):
                self._end(self._ok)

    def connection_lost(self, error: Exception | None) -> None:
        """What was under way has failed."""
        if self._answer is not None:
            self._end(False)

    def _end(self, ok: bool) -> None:
        answer, self._answer, self._left, self._tail = self._answer, None, None, b""
        if answer is not None and not answer.done():
            answer.set_result(ok)

    async def ask(self, request: bytes) -> bool:
        """Sends a request and waits for the end of its answer; whether it was 200."""
        if self._transport.is_closing():
            return False
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        """Closes the connection."""
        self._transport.close()


class Load:
    """Requests as they go over the wire, of eight clients: no two with the same prompt."""

    def __init__(self, seed: int, *, stream: bool) -> None:
        self._rng = random.Random(seed)
        syllables = [a + v + c for a in "bcdfglmnprst" for v in "aeiou" for c in ("", "n", "r", "s")]
        self._words = ["".join(self._rng.choices(syllables, k=1 + n % 3)) for n in range(VOCABULARY)]
        self._weights = list(accumulate(1 / (n + 1) for n in range(VOCABULARY)))  # as words of a language are
        self._prefixes = [self._text(PREFIX_CHARS) for _ in range(PREFIXES)]
        self._ends = [self._text(OWN_CHARS // 10) for _ in range(1_000)]
        self._stream = stream

    def next(self) -> bytes:
        """The next request."""
        rng = self._rng
        prompt = rng.choice(self._prefixes) + "".join(rng.choices(self._ends, k=10))
        body = {"model": MODEL, "prompt": prompt, "max_tokens": STREAM_TOKENS, "stream": self._stream}
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"x-fair-client: c{rng.randrange(8)}\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    def _text(self, chars: int) -> str:
        words = self._rng.choices(self._words, cum_weights=self._weights, k=chars)
        return " ".join(words)[: chars - 1] + " "


async def connect(port: int) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


async def at_rate(port: int, rate_rps: float, duration_s: float, load: Load) -> tuple[list[float], int]:
    """Latencies in seconds from the moment each request was due, and how many failed."""
    idle = [await connect(port) for _ in range(8)]
    latencies: list[float] = []
    failed = 0

    async def one(due_s: float, request: bytes) -> None:
        nonlocal failed
        client = idle.pop() if idle else await connect(port)
        if await client.ask(request):
            latencies.append(time.perf_counter() - due_s)
        else:
            failed += 1
        idle.append(client)

    begun_s = time.perf_counter()
    tasks = []
    for number in range(int(rate_rps * duration_s)):
        due_s = begun_s + number / rate_rps
        if (wait_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(one(due_s, load.next())))
    await asyncio.gather(*tasks)
    for client in idle:
        client.close()
    return latencies, failed


async def at_most(port: int, duration_s: float, load: Load) -> tuple[int, int, float]:
    """Requests served and failed by connections that are never idle, and the seconds that it took."""
    end_s = time.perf_counter() + duration_s
    served = failed = 0

    async def one() -> None:
        nonlocal served, failed
        client = await connect(port)
        while time.perf_counter() < end_s:
            if await client.ask(load.next()):
                served += 1
            else:
                failed += 1
                client = await connect(port)
        client.close()

    begun_s = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    return served, failed, time.perf_counter() - begun_s


def free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"no {count} free ports from {PORTS.start} on")


class Children:
    """Processes that end with the bench."""

    def __init__(self) -> None:
        self.log = tempfile.NamedTemporaryFile(prefix="bench-gateway-", suffix=".log")  # noqa: SIM115
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str) -> psutil.Process:
        process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=child_environment())
        self._all.append(process)
        return psutil.Process(process.pid)

    def close(self) -> None:
        for process in reversed(self._all):
            process.terminate()
        for process in self._all:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """CPU time of these processes and their children so far."""
    family = [*processes, *(child for process in processes for child in process.children(recursive=True))]
    return float(sum(times.user + times.system for times in (process.cpu_times() for process in family)))


def memory_mb(processes: Sequence[psutil.Process]) -> float:
    """Resident memory of these processes and their children."""
    family = [*processes, *(child for process in processes for child in process.children(recursive=True))]
    return float(sum(process.memory_info().rss for process in family)) / 1e6


async def until_served(port: int, request: bytes) -> None:
    """Waits for a first answer of 200; TimeoutError after `START_S`."""
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(OSError):
                client = await connect(port)
                ok = await client.ask(request)
                client.close()
                if ok:
                    return
            await asyncio.sleep(0.1)


def start_ours(
    children: Children, port: int, router_port: int, engines: Sequence[int]
) -> list[psutil.Process]:
    """Router and gateway."""
    folder = tokenizer()
    router = children.start(
        sys.executable, "-m", "router", "--bind", f"tcp://127.0.0.1:{router_port}", "--log-level", "warning",
        *(f"--worker=r{index},http=http://127.0.0.1:{engine}" for index, engine in enumerate(engines)),
    )  # fmt: skip
    gateway = children.start(
        sys.executable, "-m", "router.gateway", "--port", str(port), "--model-name", MODEL,
        "--router", f"tcp://127.0.0.1:{router_port}", "--tokenizer", folder, "--log-level", "warning",
    )  # fmt: skip
    return [router, gateway]


def start_theirs(
    children: Children, program: str, port: int, metrics_port: int, engines: Sequence[int]
) -> list[psutil.Process]:
    """The Rust router."""
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    launch = ["launch"] if Path(program).name == "smg" else []
    return [
        children.start(
            program,
            *launch,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--policy",
            "cache_aware",
            "--prometheus-port",
            str(metrics_port),
            "--log-level",
            "error",
            "--worker-urls",
            *urls,
        )
    ]


def tokenizer() -> str:
    """The default model's, or, where its package is missing, the tiny one's: a token a byte."""
    try:
        return find("default").path
    except Exception:  # whatever keeps it from being found
        return find("tiny").path


async def measure(
    name: str, port: int, engine: int, options: argparse.Namespace, show: Show,
    processes: Sequence[psutil.Process],
) -> list[Row]:  # fmt: skip
    """The rows of one gateway, one a rate."""
    whole, streams = Load(options.seed, stream=False), Load(options.seed, stream=True)
    await at_most(port, options.seconds / 4, whole)  # warm
    spent_s = cpu_s(processes)
    served, failed, took_s = await at_most(port, options.seconds, whole)
    spent_s = cpu_s(processes) - spent_s
    streamed, failed_streams, streaming_s = await at_most(port, options.seconds, streams)
    common = {
        "gateway": name,
        "max_rps": round(served / took_s, 1),
        "stream_tokens_per_s": round(streamed * STREAM_TOKENS / streaming_s),
        "cpu_ms_per_request": round(1000 * spent_s / max(1, served), 3),
        "memory_mb": round(memory_mb(processes), 1),
    }
    rows = []
    for rate in options.rates:
        (latencies, failed_here), (own, _) = await asyncio.gather(
            at_rate(port, rate, options.seconds, whole), at_rate(engine, rate, options.seconds, whole)
        )
        median_s = percentile(own, 50)
        row = Row(
            rate_rps=rate,
            added_ms_p50=round(1000 * (percentile(latencies, 50) - median_s), 3),
            added_ms_p99=round(1000 * (percentile(latencies, 99) - median_s), 3),
            failed=failed + failed_streams + failed_here,
            **common,  # type: ignore[arg-type]
        )
        rows.append(row)
        show(
            f"{name:14} {rate:6.0f} rps: {row.added_ms_p50:7.2f} ms added (p99 {row.added_ms_p99:.2f})"
            f" to {1000 * median_s:.2f} ms;"
            f" at most {row.max_rps:,.0f} rps, {row.stream_tokens_per_s:,} tokens/s,"
            f" {row.cpu_ms_per_request} ms CPU, {row.memory_mb:.0f} MB"
        )
    return rows


def percentile(values: Sequence[float], number: int) -> float:
    if len(values) < 2:
        raise ValueError("nothing was served")
    return statistics.quantiles(values, n=100, method="inclusive")[number - 1]


async def run(options: argparse.Namespace, show: Show) -> dict[str, Any]:
    """The result, whose `rows` are as in `Row`."""
    children = Children()
    load_before = [round(load, 2) for load in os.getloadavg()]
    rows: list[Row] = []
    try:
        first, second, router, ours, theirs, metrics = free_ports(6)
        children.start(sys.executable, "-m", "sglang_fair.bench.instant", "--ports", f"{first},{second}")
        whole = Load(options.seed, stream=False)
        await until_served(first, whole.next())
        processes = start_ours(children, ours, router, (first, second))
        await until_served(ours, whole.next())
        rows += await measure("ours", ours, first, options, show, processes)
        for process in processes:
            process.terminate()
        program = shutil.which(options.sglang_router)
        if program is None:
            show(f"sglang-router  absent: there is no program {options.sglang_router}")
            rows.append(Row("sglang-router", absent=True))
        else:
            processes = start_theirs(children, program, theirs, metrics, (first, second))
            await until_served(theirs, whole.next())
            rows += await measure("sglang-router", theirs, first, options, show, processes)
    finally:
        children.close()
    machine = {"cpu": processor(), "cores": os.cpu_count(), "load_before": load_before}
    return {
        "bench": "gateway",
        "seed": options.seed,
        "machine": machine,
        "rows": [asdict(row) for row in rows],
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sglang-fair bench gateway",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the last line to FILE too")
    parser.add_argument("--quick", action="store_true", help="two rates and short runs: under a minute")
    parser.add_argument(
        "--rates", metavar="N,N", help="requests per second (default: 50,100,200; quick: 50,100)"
    )
    parser.add_argument("--seconds", type=float, help="length of each run (default: 10; quick: 3)")
    parser.add_argument(
        "--sglang-router", default="smg", metavar="PATH", help="smg or sglang-router (default: smg in PATH)"
    )
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        options.rates = [
            float(rate)
            for rate in (options.rates or ("50,100" if options.quick else "50,100,200")).split(",")
        ]
    except ValueError:
        parser.error("--rates must be numbers")
    options.seconds = options.seconds or (3.0 if options.quick else 10.0)
    if min(options.rates) <= 0 or options.seconds <= 0:
        parser.error("--rates and --seconds must be positive")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Progress on stderr; the result is the last line of stdout."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    result = carry_out("gateway", lambda show: asyncio.run(run(options, show)), options.json)
    return 2 if result is None else 0


if __name__ == "__main__":
    sys.exit(main())
