"""What the gateway costs a request, beside `sglang-router` in front of the same engine, in one run.

    sglang-fair bench gateway [--quick] [--json FILE] [--sglang-router PATH]

The engine answers at once (`instant`), so only the way to it is measured. `ours` is one gateway process and one router
process with D2LPM. The other is the Rust router from PyPI with `cache_aware` (`python -m venv V && V/bin/pip install
sglang-router`, then `--sglang-router V/bin/smg`); where it is not installed its row says `absent`. Each prompt begins
with one of 64 prefixes of 3,000 characters and goes on with 1,000 characters of its own.

    added_ms     latency at a fixed rate with evenly spaced arrivals, less the engine's median latency, measured at
                 the same rate in the same seconds. Latency counts from the moment a request was due, so it includes
                 waiting in the bench's own client, on both sides; the P99 includes the engine's and client's tail
    max_rps      requests per second over 32 connections, each with a request always under way
    stream       tokens per second over 32 connections, in streams of 64 tokens, one event a token
    cpu_ms       CPU time of the gateway's processes per request, measured with max_rps
"""

import asyncio
import contextlib
import json
import math
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
from typing import Annotated, Any

import psutil

from sglang_fair.bench import Show, carry_out
from sglang_fair.bench.instant import MODEL, STREAM_TOKENS
from sglang_fair.common.processes import child_environment
from sglang_fair.common.provenance import processor
from sglang_fair.models.catalog import find
from sglang_fair.settings.commands import Mistake, Option
from sglang_fair.settings.commands import run as run_command

CONNECTIONS = 32
PREFIXES, PREFIX_CHARS, OWN_CHARS = 64, 3_000, 1_000
VOCABULARY = 3_000
START_S = 60.0
LAST_LINES = 10
"""Of what a program said before it failed."""
PORTS = range(18_000, 29_000)


@dataclass(frozen=True)
class Plan:
    """What to measure, and how long."""

    rates: tuple[float, ...]
    seconds: float
    seed: int
    sglang_router: str


@dataclass(frozen=True)
class GatewayCost:
    """One gateway at one rate; None where nothing was measured."""

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


class Connection(asyncio.Protocol):
    """One connection to an HTTP server, for one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._tail = b""
        self._left: int | None = None
        self._answer: asyncio.Future[bool] | None = None
        self._ok = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Reads no more of an answer than its status and its end."""
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
        """Fails the request under way."""
        if self._answer is not None:
            self._end(False)

    def _end(self, ok: bool) -> None:
        answer, self._answer, self._left, self._tail = self._answer, None, None, b""
        if answer is not None and not answer.done():
            answer.set_result(ok)

    async def ask(self, request: bytes) -> bool:
        """Sends a request and waits for the whole answer; whether its status was 200."""
        if self._transport.is_closing():
            return False
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        """Closes the connection at once."""
        self._transport.close()


class Requests:
    """Requests of eight clients, as bytes for the wire. No two have the same prompt."""

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


async def connect(port: int) -> Connection:
    _, client = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return client


async def at_rate(
    port: int, rate_rps: float, duration_s: float, requests: Requests
) -> tuple[list[float], int]:
    """The latencies in seconds, each from when its request was due, and how many requests failed."""
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
        tasks.append(asyncio.create_task(one(due_s, requests.next())))
    await asyncio.gather(*tasks)
    for client in idle:
        client.close()
    return latencies, failed


async def at_most(port: int, duration_s: float, requests: Requests) -> tuple[int, int, float]:
    """How many requests connections that are never idle got served, how many failed, and the seconds it took."""
    end_s = time.perf_counter() + duration_s
    served = failed = 0

    async def one() -> None:
        nonlocal served, failed
        client = await connect(port)
        while time.perf_counter() < end_s:
            if await client.ask(requests.next()):
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


class DidNotStart(OSError):
    """A program ended, or did not answer in time. The text shows its command and its last words."""


class Child:
    """A process of the bench, and what it has said."""

    def __init__(self, command: Sequence[str]) -> None:
        """Raises `DidNotStart`."""
        self._command = " ".join(command)
        self._log = tempfile.TemporaryFile(prefix="bench-gateway-")  # noqa: SIM115 (as long as the process)
        try:
            self.popen = subprocess.Popen(
                command, stdout=self._log, stderr=self._log, env=child_environment()
            )
        except OSError as error:
            raise DidNotStart(f"{self._command}: {error}") from error
        self.process = psutil.Process(self.popen.pid)

    def check(self) -> None:
        """Raises `DidNotStart` if the process has ended."""
        if (code := self.popen.poll()) is not None:
            raise self.failure(f"ended with exit code {code}")

    def failure(self, how: str) -> DidNotStart:
        """The error for a program that failed to start."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        said = "\n".join(f"    {line}" for line in lines[-LAST_LINES:]) or "    (it said nothing)"
        return DidNotStart(f"{self._command}: {how}\n{said}")

    def stop(self) -> None:
        """Asks the process to end."""
        self.popen.terminate()

    def close(self) -> None:
        """Waits for its end, and kills it when that takes too long."""
        try:
            self.popen.wait(5)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self._log.close()


class Children:
    """Processes that end with the bench."""

    def __init__(self) -> None:
        self._all: list[Child] = []

    def start(self, *command: str) -> Child:
        """Raises `DidNotStart`."""
        child = Child(command)
        self._all.append(child)
        return child

    def close(self) -> None:
        """Ends all of them, the latest first."""
        for child in reversed(self._all):
            child.stop()
        for child in self._all:
            child.close()


def family(children: Sequence[Child]) -> list[psutil.Process]:
    """Their processes, and the processes that those have started."""
    started = (one for child in children for one in child.process.children(recursive=True))
    return [*(child.process for child in children), *started]


def cpu_s(children: Sequence[Child]) -> float:
    """CPU time of these processes and their children so far."""
    return float(sum(times.user + times.system for times in (one.cpu_times() for one in family(children))))


def memory_mb(children: Sequence[Child]) -> float:
    """Resident memory of these processes and their children."""
    return float(sum(one.memory_info().rss for one in family(children))) / 1e6


async def until_served(port: int, request: bytes, programs: Sequence[Child]) -> None:
    """Waits for a first answer of 200. Raises `DidNotStart` if a program ends, or after `START_S`."""
    try:
        async with asyncio.timeout(START_S):
            while True:
                for program in programs:
                    program.check()
                with contextlib.suppress(ConnectionError):
                    connection = await connect(port)
                    ok = await connection.ask(request)
                    connection.close()
                    if ok:
                        return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise programs[-1].failure(f"did not answer with 200 within {START_S:g} s") from None


def start_ours(children: Children, port: int, router_port: int, engines: Sequence[int]) -> list[Child]:
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
) -> list[Child]:
    """The Rust router."""
    command = [
        program, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware",
        "--prometheus-port", str(metrics_port), "--log-level", "error",
        "--worker-urls", *(f"http://127.0.0.1:{engine}" for engine in engines),
    ]  # fmt: skip
    return [children.start(*command)]


def tokenizer() -> str:
    """The default model's, or, where its package is missing, the tiny one's: a token a byte."""
    try:
        return find("default").path
    except Exception:  # whatever keeps it from being found
        return find("tiny").path


async def measure(
    name: str, port: int, engine: int, plan: Plan, show: Show,
    processes: Sequence[Child],
) -> list[GatewayCost]:  # fmt: skip
    """The rows of one gateway, one a rate."""
    whole, streams = Requests(plan.seed, stream=False), Requests(plan.seed, stream=True)
    await at_most(port, plan.seconds / 4, whole)  # warm
    spent_s = cpu_s(processes)
    served, failed, took_s = await at_most(port, plan.seconds, whole)
    spent_s = cpu_s(processes) - spent_s
    streamed, failed_streams, streaming_s = await at_most(port, plan.seconds, streams)
    common = {
        "gateway": name,
        "max_rps": round(served / took_s, 1),
        "stream_tokens_per_s": round(streamed * STREAM_TOKENS / streaming_s),
        "cpu_ms_per_request": round(1000 * spent_s / max(1, served), 3),
        "memory_mb": round(memory_mb(processes), 1),
    }
    rows = []
    for rate in plan.rates:
        (latencies, failed_here), (own, _) = await asyncio.gather(
            at_rate(port, rate, plan.seconds, whole), at_rate(engine, rate, plan.seconds, whole)
        )
        median_s = percentile(own, 50)
        row = GatewayCost(
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


async def run(plan: Plan, show: Show) -> dict[str, Any]:
    """The result, whose `rows` are `GatewayCost`s. Raises `DidNotStart`."""
    children = Children()
    load_before = [round(load, 2) for load in os.getloadavg()]
    rows: list[GatewayCost] = []
    try:
        first, second, router, ours, theirs, metrics = free_ports(6)
        ports = f"{first},{second}"
        engine = children.start(sys.executable, "-m", "sglang_fair.bench.instant", "--ports", ports)
        whole = Requests(plan.seed, stream=False)
        await until_served(first, whole.next(), [engine])
        processes = start_ours(children, ours, router, (first, second))
        await until_served(ours, whole.next(), processes)
        rows += await measure("ours", ours, first, plan, show, processes)
        for process in processes:
            process.stop()
        program = shutil.which(plan.sglang_router)
        if program is None:
            show(f"sglang-router  absent: there is no program {plan.sglang_router}")
            rows.append(GatewayCost("sglang-router", absent=True))
        else:
            processes = start_theirs(children, program, theirs, metrics, (first, second))
            await until_served(theirs, whole.next(), processes)
            rows += await measure("sglang-router", theirs, first, plan, show, processes)
    finally:
        children.close()
    machine = {"cpu": processor(), "cores": os.cpu_count(), "load_before": load_before}
    return {
        "bench": "gateway",
        "seed": plan.seed,
        "machine": machine,
        "rows": [asdict(row) for row in rows],
    }


class Rates(tuple[float, ...]):
    """Positive numbers, written `50,100`."""

    @classmethod
    def parse(cls, text: str) -> "Rates":
        """Raises ValueError."""
        try:
            rates = cls(float(rate) for rate in text.split(","))
        except ValueError:
            raise ValueError(f"must be numbers, separated by commas, not {text!r}") from None
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"must be positive, not {text!r}")
        return rates


def main(
    file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Write the last line to FILE, too.")
    ] = None,
    quick: Annotated[bool, Option("--quick", help="Two rates and short runs: under a minute.")] = False,
    rates: Annotated[
        Rates | None,
        Option(
            parser=Rates.parse, metavar="N,N", help="Requests per second (50,100,200; with --quick 50,100)."
        ),
    ] = None,
    seconds: Annotated[float | None, Option(help="Length of each run (10; with --quick 3).")] = None,
    sglang_router: Annotated[
        str, Option(metavar="PATH", help="The program to compare with: smg or sglang-router.")
    ] = "smg",
    seed: Annotated[int, Option(help="Of the prompts.")] = 1,
) -> None:
    """Measure what the gateway adds to a request, beside sglang-router in front of the same engine.

    Progress goes to stderr; the result is the last line of stdout.
    """
    if seconds is not None and not 0 < seconds < math.inf:
        raise Mistake("--seconds must be positive")
    plan = Plan(
        rates=rates or Rates((50.0, 100.0) if quick else (50.0, 100.0, 200.0)),
        seconds=seconds or (3.0 if quick else 10.0),
        seed=seed,
        sglang_router=sglang_router,
    )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    carry_out(lambda show: asyncio.run(run(plan, show)), file)


if __name__ == "__main__":
    sys.exit(run_command(main, "sglang-fair bench gateway"))
