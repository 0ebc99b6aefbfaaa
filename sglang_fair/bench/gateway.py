"""What the gateway costs a request, beside `sglang-router` in front of the same engine, in one run.

    sglang-fair bench gateway [--quick] [--json FILE] [--sglang-router PATH] [--gateway-workers 1,2]

The engine answers at once (`instant`), so only the way to it is measured. `ours` is a gateway of one process and a
router process with D2LPM, `ours x2` the same with two gateway processes. The other is the Rust router from PyPI with
`cache_aware` (`python -m venv V && V/bin/pip install sglang-router`, then `--sglang-router V/bin/smg`); where it is not
installed its row says `absent`. Each prompt begins with one of 64 prefixes of 3,000 characters and goes on with 1,000
characters of its own.

All are started at once. Each round measures one after the other, in an order of its own; numbers are medians over the
rounds, and so are ratios, each of two numbers of the same round.

    added_ms     latency at a fixed rate with evenly spaced arrivals, less the engine's median latency, measured at
                 the same rate in the same seconds. Latency counts from the moment a request was due, so it includes
                 waiting in the bench's own client, on both sides; the P99 includes the engine's and client's tail
    max_rps      requests per second over 32 connections, each with a request always under way
    stream       tokens per second over 32 connections, in streams of 64 tokens, one event a token
    cpu_ms       CPU time of the gateway's processes per request, measured with max_rps; with streams, per token
    all_cpu_ms   the same of all processes, engine and bench included: what bounds max_rps on these cores
    of_linear    `ours xN`: its max_rps, of the smaller of N times that of `ours` and of what these cores could serve at
                 `all_cpu_ms` of `ours`, all of them busy without a pause
"""

import asyncio
import contextlib
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from sglang_fair.bench import Show, carry_out
from sglang_fair.bench.children import (
    Child,
    Children,
    DidNotStart,
    cpu_s,
    free_ports,
    memory_mb,
)
from sglang_fair.bench.http_load import Requests, at_most, at_rate, connect
from sglang_fair.bench.instant import MODEL, STREAM_TOKENS, quickly
from sglang_fair.common.provenance import cores, processor, versions
from sglang_fair.models.catalog import find
from sglang_fair.settings.commands import Mistake, Numbers, Option, numbers
from sglang_fair.settings.commands import run as run_command

__all__ = ["Children", "DidNotStart", "free_ports", "start_theirs", "until_served"]

START_S = 60.0
WARM_PART = 4
"""A warm-up takes one part in so many of a run."""
PACKAGES = ("uvloop", "uvicorn", "httptools", "msgspec", "pyzmq", "tokenizers")
OURS, THEIRS = "ours", "sglang-router"


@dataclass(frozen=True)
class Plan:
    """What to measure, how long, and how often."""

    rates: tuple[float, ...]
    seconds: float
    seed: int
    sglang_router: str
    rounds: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Gateway:
    """One that is measured."""

    name: str
    port: int
    processes: Sequence[Child]
    workers: int = 0
    """Gateway processes of ours; 0: not ours."""


@dataclass(frozen=True)
class Load:
    """A round at full load."""

    max_rps: float
    cpu_ms_per_request: float
    all_cpu_ms_per_request: float
    stream_tokens_per_s: float
    cpu_us_per_token: float
    failed: int


@dataclass(frozen=True)
class GatewayCost:
    """One gateway at one rate, medians over the rounds; None where nothing was measured."""

    gateway: str
    rate_rps: float | None = None
    added_ms_p50: float | None = None
    added_ms_p99: float | None = None
    max_rps: float | None = None
    stream_tokens_per_s: float | None = None
    cpu_ms_per_request: float | None = None
    cpu_us_per_token: float | None = None
    all_cpu_ms_per_request: float | None = None
    of_linear: float | None = None
    memory_mb: float | None = None
    failed: int = 0
    absent: bool = False


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


def start_ours(
    children: Children, port: int, router_port: int, engines: Sequence[int], workers: int = 1
) -> list[Child]:
    """Router and gateway."""
    folder = tokenizer()
    router = children.start(
        sys.executable, "-m", "router", "--bind", f"tcp://127.0.0.1:{router_port}", "--log-level", "warning",
        *(f"--worker=r{index},http=http://127.0.0.1:{engine}" for index, engine in enumerate(engines)),
    )  # fmt: skip
    gateway = children.start(
        sys.executable, "-m", "router.gateway", "--port", str(port), "--model-name", MODEL,
        "--router", f"tcp://127.0.0.1:{router_port}", "--tokenizer", folder, "--log-level", "warning",
        "--workers", str(workers),
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


def percentile(values: Sequence[float], number: int) -> float:
    """Of at least two values. Raises ValueError."""
    if len(values) < 2:
        raise ValueError("nothing was served")
    return statistics.quantiles(values, n=100, method="inclusive")[number - 1]


async def full_load(gateway: Gateway, engine: Child, plan: Plan, whole: Requests, streams: Requests) -> Load:
    """As much as it serves: requests, then streams."""
    everything = [*gateway.processes, engine]
    await at_most(gateway.port, plan.seconds / WARM_PART, whole)
    before_s, all_before_s = cpu_s(gateway.processes), cpu_s(everything) + _own_cpu_s()
    served, failed, took_s = await at_most(gateway.port, plan.seconds, whole)
    spent_s = cpu_s(gateway.processes) - before_s
    all_spent_s = cpu_s(everything) + _own_cpu_s() - all_before_s
    before_s = cpu_s(gateway.processes)
    streamed, failed_streams, streaming_s = await at_most(gateway.port, plan.seconds, streams)
    streams_spent_s = cpu_s(gateway.processes) - before_s
    if not served or not streamed:
        raise ValueError(f"{gateway.name} served nothing")
    return Load(
        served / took_s,
        1e3 * spent_s / served,
        1e3 * all_spent_s / served,
        streamed * STREAM_TOKENS / streaming_s,
        1e6 * streams_spent_s / (streamed * STREAM_TOKENS),
        failed + failed_streams,
    )


def _own_cpu_s() -> float:
    times = os.times()
    return times.user + times.system


async def added_ms(
    gateway: Gateway, engine_port: int, rate: float, plan: Plan, whole: Requests
) -> tuple[float, float, int]:
    """Median and P99 of what it adds at a rate, and how many requests failed."""
    (latencies, failed), (own, _) = await asyncio.gather(
        at_rate(gateway.port, rate, plan.seconds, whole), at_rate(engine_port, rate, plan.seconds, whole)
    )
    median_s = percentile(own, 50)
    p50, p99 = (1e3 * (percentile(latencies, number) - median_s) for number in (50, 99))
    return p50, p99, failed


class Rounds:
    """What was measured, by gateway."""

    def __init__(self, plan: Plan, gateways: Sequence[Gateway]) -> None:
        self.plan = plan
        self.gateways = gateways
        self.loads: dict[str, list[Load]] = {one.name: [] for one in gateways}
        self.added: dict[tuple[str, float], list[tuple[float, float, int]]] = {}

    def rows(self) -> list[GatewayCost]:
        """One of each gateway and rate."""
        return [
            self._row(one, rate, memory_mb(one.processes))
            for one in self.gateways
            for rate in self.plan.rates
        ]

    def ratios(self) -> list[dict[str, Any]]:
        """Of each of ours to the other, more than 1 where ours has more. Empty where the other is not there."""
        if THEIRS not in self.loads:
            return []
        found = []
        for one in self.gateways:
            if not one.workers:
                continue
            of: dict[str, float] = {
                field: self._ratio(one.name, lambda load, field=field: float(getattr(load, field)))  # type: ignore[misc]
                for field in ("max_rps", "stream_tokens_per_s", "cpu_ms_per_request", "cpu_us_per_token")
            }
            added = {}
            for rate in self.plan.rates:
                pairs = zip(self.added[one.name, rate], self.added[THEIRS, rate], strict=True)
                added[f"{rate:g}"] = round(statistics.median(our[0] / their[0] for our, their in pairs), 3)
            found.append({"gateway": one.name, **of, "added_ms_p50": added})
        return found

    def _ratio(self, name: str, number: Callable[[Load], float]) -> float:
        pairs = zip(self.loads[name], self.loads[THEIRS], strict=True)
        return round(statistics.median(number(our) / number(their) for our, their in pairs), 3)

    def _of_linear(self, one: Gateway) -> float | None:
        if one.workers < 2 or OURS not in self.loads:
            return None
        return statistics.median(
            many.max_rps / min(one.workers * single.max_rps, 1e3 * cores() / single.all_cpu_ms_per_request)
            for many, single in zip(self.loads[one.name], self.loads[OURS], strict=True)
        )

    def _row(self, one: Gateway, rate: float, memory: float) -> GatewayCost:
        loads, added = self.loads[one.name], self.added[one.name, rate]
        of_linear = self._of_linear(one)

        def median(field: str) -> float:
            return statistics.median(float(getattr(load, field)) for load in loads)

        return GatewayCost(
            one.name,
            rate_rps=rate,
            added_ms_p50=round(statistics.median(p50 for p50, _, _ in added), 3),
            added_ms_p99=round(statistics.median(p99 for _, p99, _ in added), 3),
            max_rps=round(median("max_rps"), 1),
            stream_tokens_per_s=round(median("stream_tokens_per_s")),
            cpu_ms_per_request=round(median("cpu_ms_per_request"), 3),
            cpu_us_per_token=round(median("cpu_us_per_token"), 2),
            all_cpu_ms_per_request=round(median("all_cpu_ms_per_request"), 3),
            of_linear=None if of_linear is None else round(of_linear, 3),
            memory_mb=round(memory, 1),
            failed=sum(load.failed for load in loads) + sum(failed for _, _, failed in added),
        )


def line_of(row: GatewayCost) -> str:
    """For people."""
    return (
        f"{row.gateway:14} {row.rate_rps:6.0f} rps: {row.added_ms_p50:7.2f} ms added (p99 {row.added_ms_p99:.2f});"
        f" at most {row.max_rps:,.0f} rps, {row.stream_tokens_per_s:,} tokens/s,"
        f" {row.cpu_ms_per_request} ms CPU, {row.cpu_us_per_token} us a token, {row.memory_mb:.0f} MB"
    )


async def measure(
    gateways: Sequence[Gateway], engine: Child, engine_port: int, plan: Plan, show: Show
) -> Rounds:
    """All rounds."""
    rounds, rng = Rounds(plan, gateways), random.Random(plan.seed)
    # All get the same prompts in a round.
    for number in range(plan.rounds):
        for one in rng.sample(list(gateways), len(gateways)):
            whole = Requests(plan.seed + number, stream=False)
            load = await full_load(one, engine, plan, whole, Requests(plan.seed + number, stream=True))
            rounds.loads[one.name].append(load)
            for rate in plan.rates:
                added = await added_ms(one, engine_port, rate, plan, whole)
                rounds.added.setdefault((one.name, rate), []).append(added)
            show(
                f"round {number + 1}: {one.name:14} {load.max_rps:,.0f} rps, {load.stream_tokens_per_s:,.0f} tokens/s,"
                f" {load.cpu_ms_per_request:.3f} ms CPU, {load.cpu_us_per_token:.1f} us a token; added "
                + ", ".join(
                    f"{rounds.added[one.name, rate][-1][0]:.2f} ms at {rate:g}/s" for rate in plan.rates
                )
            )
    return rounds


async def run(plan: Plan, show: Show) -> dict[str, Any]:
    """The result, whose `rows` are `GatewayCost`s. Raises `DidNotStart`."""
    children = Children()
    load_before = [round(load, 2) for load in os.getloadavg()]
    try:
        first, second, theirs, metrics, *ports = free_ports(4 + 2 * len(plan.workers))
        engine = children.start(
            sys.executable, "-m", "sglang_fair.bench.instant", "--ports", f"{first},{second}"
        )
        request = Requests(plan.seed, stream=False).next()
        await until_served(first, request, [engine])
        gateways = []
        for number, workers in enumerate(plan.workers):
            port, router = ports[2 * number : 2 * number + 2]
            processes = start_ours(children, port, router, (first, second), workers)
            await until_served(port, request, processes)
            name = OURS if workers == 1 else f"{OURS} x{workers}"
            gateways.append(Gateway(name, port, processes, workers))
        program = shutil.which(plan.sglang_router)
        if program is not None:
            processes = start_theirs(children, program, theirs, metrics, (first, second))
            await until_served(theirs, request, processes)
            gateways.append(Gateway(THEIRS, theirs, processes))
        rounds = await measure(gateways, engine, first, plan, show)
        rows = rounds.rows()
    finally:
        children.close()
    for row in rows:
        show(line_of(row))
    if program is None:
        show(f"{THEIRS}  absent: there is no program {plan.sglang_router}")
        rows.append(GatewayCost(THEIRS, absent=True))
    return {
        "bench": "gateway",
        "seed": plan.seed,
        "rounds": plan.rounds,
        "seconds": plan.seconds,
        "machine": {"cpu": processor(), "cores": cores(), "load_before": load_before},
        "versions": all_versions(program),
        "rows": [asdict(row) for row in rows],
        "ratios": rounds.ratios(),
    }


def all_versions(program: str | None) -> Mapping[str, str]:
    """Ours, of the packages that serve, and of the other router."""
    found = dict(versions())
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if program is not None:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
        found[THEIRS] = " ".join(said.split()) or "not said"
    return found


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
    quick: Annotated[
        bool, Option("--quick", help="One round of two rates and short runs: a minute.")
    ] = False,
    rates: Annotated[
        Rates | None,
        Option(
            parser=Rates.parse, metavar="N,N", help="Requests per second (50,100,200; with --quick 50,100)."
        ),
    ] = None,
    seconds: Annotated[float | None, Option(help="Length of each run (5; with --quick 3).")] = None,
    sglang_router: Annotated[
        str, Option(metavar="PATH", help="The program to compare with: smg or sglang-router.")
    ] = "smg",
    seed: Annotated[int, Option(help="Of the prompts, and of the order in each round.")] = 1,
    rounds: Annotated[int | None, Option(help="How often each is measured (3; with --quick once).")] = None,
    gateway_workers: Annotated[
        Numbers | None, numbers("Processes of our gateway, one variant each (1,2; with --quick 1).")
    ] = None,
) -> None:
    """Measure what the gateway adds to a request, beside sglang-router in front of the same engine.

    Progress goes to stderr; the result is the last line of stdout.
    """
    if seconds is not None and not 0 < seconds < math.inf:
        raise Mistake("--seconds must be positive")
    if rounds is not None and rounds < 1:
        raise Mistake("--rounds must be positive")
    plan = Plan(
        rates=rates or Rates((50.0, 100.0) if quick else (50.0, 100.0, 200.0)),
        seconds=seconds or (3.0 if quick else 5.0),
        seed=seed,
        sglang_router=sglang_router,
        rounds=rounds or (1 if quick else 3),
        workers=tuple(dict.fromkeys(gateway_workers or Numbers(*((1,) if quick else (1, 2))))),
    )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    carry_out(lambda show: quickly(run(plan, show)), file)


if __name__ == "__main__":
    sys.exit(run_command(main, "sglang-fair bench gateway"))
