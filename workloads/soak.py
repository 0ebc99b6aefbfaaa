"""Hours of steady load on a whole cluster: does its memory stay flat, and does every request end?

    sglang-fair bench soak [--minutes 60] [--rate 10] [--json FILE]

Starts a cluster (two replicas of the tiny model, router, gateway) and sends requests at a fixed rate, open loop.
Prompts are seeded; half of each is one of 64 shared prefixes. One request in ten comes from a client that was never
seen before, and one in twenty hangs up in mid-stream. The resident memory of every process is read every few seconds.
Its growth is the Theil-Sen slope (the median of the slopes between all pairs of samples) after the warm-up, in which
caches and pools fill.
"""

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated, Any

import aiohttp
import psutil

from sglang_fair.bench import Show, carry_out
from sglang_fair.cluster.options import USUAL
from sglang_fair.common.identity import HEADER_CLIENT
from sglang_fair.common.provenance import machine, versions
from sglang_fair.settings import table as settings
from sglang_fair.settings.commands import Mistake, Option, run
from workloads.compare.cluster import Cluster, ClusterError, SpawnCluster, get_json

PREFIXES, PREFIX_TOKENS, OWN_TOKENS = 64, 128, 128
CLIENTS = 20
NEW_CLIENT_EVERY, HANG_UP_EVERY = 10, 20
WARM_UP_SHARE = 0.2
"""Part of the run in which memory may grow."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Resident bytes of each process at one time, by what it is."""

    at_s: float
    resident_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The memory of one process. `growth_mib_per_h` is None where there are too few samples."""

    process: str
    start_mib: float
    end_mib: float
    growth_mib_per_h: float | None


@dataclass
class SteadyLoad:
    """Sends requests at a fixed rate and counts how they ended."""

    url: str
    rate_per_s: float
    random: Random
    ended: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    sent: int = 0

    async def run(self, duration_s: float) -> None:
        """Send at the rate until the time is up, then wait for the rest."""
        prefixes = [self._tokens(PREFIX_TOKENS) for _ in range(PREFIXES)]
        start_s = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=120)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            while (due_s := self.sent / self.rate_per_s) < duration_s:
                await asyncio.sleep(max(0.0, start_s + due_s - time.monotonic()))
                tokens = self.random.choice(prefixes) + self._tokens(OWN_TOKENS)
                output_tokens = self.random.randint(2, 12)
                group.create_task(self._one(session, self.sent, tokens, output_tokens))
                self.sent += 1

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(3, 250) for _ in range(count)]

    async def _one(
        self, session: aiohttp.ClientSession, number: int, tokens: list[int], output_tokens: int
    ) -> None:
        client = f"new-{number}" if number % NEW_CLIENT_EVERY == 0 else f"client-{number % CLIENTS}"
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": output_tokens, "ignore_eos": True, "temperature": 0},
            "stream": True,
        }
        try:
            async with session.post(
                f"{self.url}/generate", json=body, headers={HEADER_CLIENT: client}
            ) as response:
                if response.status != 200:
                    raise ValueError(f"HTTP {response.status}: {(await response.text())[:120]}")
                last = b""
                async for line in response.content:
                    if number % HANG_UP_EVERY == 1 and line.startswith(b"data: "):
                        self.ended["hung up"] += 1
                        return
                    last = line.strip() or last
                if last != b"data: [DONE]":
                    raise ValueError(f"the stream was cut: {last[:120]!r}")
                self.ended["answered"] += 1
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self.ended["failed"] += 1
            self.errors[f"{type(error).__name__}: {error}"] += 1


def processes(supervisor_pid: int) -> dict[str, psutil.Process]:
    """The cluster's processes by what they are; those of one kind are numbered by their pids."""
    try:
        children = psutil.Process(supervisor_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        raise ClusterError("the cluster is gone") from None
    found: dict[str, psutil.Process] = {}
    counts: Counter[str] = Counter()
    for child in sorted(children, key=lambda process: process.pid):
        try:
            kind = kind_of(child.cmdline())
        except psutil.NoSuchProcess:
            continue
        if kind is not None:
            counts[kind] += 1
            found[f"{kind} {counts[kind]}"] = child
    return found


def kind_of(command: Sequence[str]) -> str | None:
    """The kind of process that has this command line. None for helper processes of Python."""
    line = " ".join(command)
    for sign, kind in (
        ("router.gateway", "gateway"),
        ("sglang::scheduler", "replica's scheduler"),
        ("sglang::detokenizer", "replica's detokenizer"),
        ("-m router", "router"),
        ("sglang_fair.engines.fork_server", "fork server"),
        ("sglang-fair replica", "replica's server"),
        ("sglang_fair.engines.replica", "replica's server"),
    ):
        if sign in line:
            return kind
    return None


def growth_per_h(times_s: Sequence[float], values: Sequence[float]) -> float | None:
    """Theil-Sen slope per hour: the median of the slopes between all pairs. None for fewer than ten points."""
    if len(times_s) < 10:
        return None
    step = max(1, len(times_s) // 400)
    points = list(zip(times_s, values, strict=True))[::step]
    return 3600 * median((y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in combinations(points, 2))


def rows(samples: Sequence[MemorySample]) -> list[ProcessMemory]:
    """One for each process that lived through the whole run."""
    if not samples:
        return []
    begin_s = samples[-1].at_s * WARM_UP_SHARE
    kept = [sample for sample in samples if sample.at_s >= begin_s] or list(samples)
    whole = [name for name in kept[0].resident_bytes if all(name in s.resident_bytes for s in kept)]
    times_s, few = [sample.at_s for sample in kept], max(1, len(kept) // 10)
    made = []
    for name in whole:
        mib = [sample.resident_bytes[name] / MIB for sample in kept]
        slope = growth_per_h(times_s, mib)
        made.append(
            ProcessMemory(
                name,
                round(median(mib[:few]), 1),
                round(median(mib[-few:]), 1),
                None if slope is None else round(slope, 2),
            )
        )
    return made


def table(memory: Sequence[ProcessMemory]) -> str:
    """The processes for people."""
    lines = [f"{'process':26}{'MiB after warm-up':>18}{'at the end':>12}{'MiB/h':>9}"]
    for row in memory:
        slope = "-" if row.growth_mib_per_h is None else f"{row.growth_mib_per_h:.2f}"
        lines.append(f"{row.process:26}{row.start_mib:>18.1f}{row.end_mib:>12.1f}{slope:>9}")
    return "\n".join(lines)


async def soak(
    cluster: Cluster, load: SteadyLoad, duration_s: float, every_s: float, show: Show
) -> list[MemorySample]:
    """Send the load, and read the memory of all processes meanwhile."""
    assert cluster.pid is not None
    samples: list[MemorySample] = []
    start_s = time.monotonic()
    sending = asyncio.create_task(load.run(duration_s))
    while not sending.done():
        resident = {}
        for name, process in processes(cluster.pid).items():
            try:
                resident[name] = process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        samples.append(MemorySample(time.monotonic() - start_s, resident))
        total = sum(resident.values()) / MIB
        ended = ", ".join(f"{count:,} {how}" for how, count in sorted(load.ended.items())) or "none ended"
        show(f"{samples[-1].at_s / 60:6.1f} min  {load.sent:>8,} sent: {ended}; {total:,.0f} MiB in all")
        await asyncio.wait([sending], timeout=every_s)
    await sending
    return samples


def soak_cluster(
    show: Show,
    *,
    minutes: float,
    rate: float,
    every_s: float,
    replicas: int,
    seed: int,
    logs: Path,
) -> dict[str, Any]:
    """The result; `ok` when every request ended as it should and the books balance."""
    small = ("--max-total-tokens", "16384")
    spawn = SpawnCluster(settings.Cluster(replicas=replicas, model="tiny", device="cpu", extra=small), logs)
    show(f"starting {replicas} replicas, router and gateway; logs in {logs}")
    with spawn(USUAL, settings.Cluster.policy) as cluster:
        load = SteadyLoad(cluster.gateway, rate, Random(seed))
        samples = asyncio.run(soak(cluster, load, 60 * minutes, every_s, show))
        books = [get_json(f"{replica}/fair") for replica in cluster.replicas]
        router = get_json(f"{cluster.gateway}/status")
    memory = rows(samples)
    show(table(memory))
    for error, count in load.errors.most_common(5):
        show(f"{count} x {error}")
    balanced = all(book["conservation"]["ok"] for book in books)
    return {
        "bench": "soak",
        "seed": seed,
        "versions": versions(),
        "machine": machine(),
        "minutes": minutes,
        "rate_rps": rate,
        "requests": {"sent": load.sent, **load.ended},
        "in_flight_at_end": router.get("in_flight"),
        "conservation_ok": balanced,
        "ok": balanced and not load.ended["failed"],
        "rows": [{name: getattr(row, name) for name in ProcessMemory.__slots__} for row in memory],
    }


def command(
    minutes: Annotated[float, Option(help="Length of the run.")] = 60.0,
    rate: Annotated[float, Option(help="Requests a second.")] = 10.0,
    every: Annotated[float, Option(metavar="S", help="Between two samples of memory.")] = 15.0,
    replicas: Annotated[int, Option(help="Of the cluster.")] = 2,
    seed: Annotated[int, Option(help="Of the prompts.")] = 0,
    logs: Annotated[
        Path | None, Option(metavar="FOLDER", help="Of the cluster. [default: a new folder]")
    ] = None,
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Write the last line to FILE too.")
    ] = None,
) -> int:
    """Steady load on a whole cluster: memory of every process, and what failed.

    One request in ten comes from a new client, one in twenty hangs up in mid-stream. Progress and a table go to
    stderr; the result is the last line of stdout.

    Exit code 0, 1 if a request failed or the books do not balance, 2 for bad input or a cluster that does not start.
    """
    if min(minutes, rate, every, replicas) <= 0:
        raise Mistake("--minutes, --rate, --every and --replicas must be positive")
    soaking = partial(
        soak_cluster,
        minutes=minutes,
        rate=rate,
        every_s=every,
        replicas=replicas,
        seed=seed,
        logs=logs or Path(tempfile.mkdtemp(prefix="soak-")),
    )
    result = carry_out(soaking, json_file, (ClusterError, OSError))
    return 0 if result["ok"] else 1


def main(arguments: Sequence[str] | None = None) -> int:
    return run(command, "sglang-fair bench soak", arguments)


if __name__ == "__main__":
    sys.exit(main())
