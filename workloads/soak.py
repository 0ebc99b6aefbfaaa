"""Hours of steady load on a whole cluster: does its memory stay flat, and does every request end?

    sglang-fair bench soak [--minutes 60] [--rate 10] [--json FILE]

Starts a cluster (two replicas of the tiny model, router, gateway) and sends requests at a fixed rate, open
loop: seeded prompts, half of each one of 64 shared prefixes; one request in ten comes from a client that was
never seen before, one in twenty hangs up in mid-stream. Every process's resident memory is read every few
seconds. Growth is the Theil-Sen slope (the median of the slopes between all pairs of samples) after the
warm-up, in which caches and pools fill. Exit code 1 if a request failed or if the books do not balance.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import aiohttp
import psutil

from sglang_fair.bench import Show, carry_out
from sglang_fair.common.identity import HEADER_CLIENT
from sglang_fair.common.provenance import machine, versions
from workloads.compare.cluster import Cluster, ClusterError, SpawnCluster, get_json

PREFIXES, PREFIX_TOKENS, OWN_TOKENS = 64, 128, 128
CLIENTS = 20
NEW_CLIENT_EVERY, HANG_UP_EVERY = 10, 20
WARM_UP_SHARE = 0.2
"""Of the run; memory may grow in it."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """Resident bytes of each process at one time, by what it is."""

    at_s: float
    resident_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Row:
    """One process. `growth_mib_per_h` is None where the samples are too few."""

    process: str
    start_mib: float
    end_mib: float
    growth_mib_per_h: float | None


@dataclass
class Load:
    """What is sent, and how it ended."""

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
    """What runs under this command line; None for helpers of the interpreter."""
    line = " ".join(command)
    for sign, kind in (
        ("router.gateway", "gateway"),
        ("sglang::scheduler", "replica's scheduler"),
        ("sglang::detokenizer", "replica's detokenizer"),
        ("-m router", "router"),
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


def rows(samples: Sequence[Sample]) -> list[Row]:
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
            Row(
                name,
                round(median(mib[:few]), 1),
                round(median(mib[-few:]), 1),
                None if slope is None else round(slope, 2),
            )
        )
    return made


def table(found: Sequence[Row]) -> str:
    lines = [f"{'process':26}{'MiB after warm-up':>18}{'at the end':>12}{'MiB/h':>9}"]
    for row in found:
        slope = "-" if row.growth_mib_per_h is None else f"{row.growth_mib_per_h:.2f}"
        lines.append(f"{row.process:26}{row.start_mib:>18.1f}{row.end_mib:>12.1f}{slope:>9}")
    return "\n".join(lines)


async def soak(cluster: Cluster, load: Load, duration_s: float, every_s: float, show: Show) -> list[Sample]:
    """Load and samples side by side."""
    assert cluster.pid is not None
    samples: list[Sample] = []
    start_s = time.monotonic()
    sending = asyncio.create_task(load.run(duration_s))
    while not sending.done():
        resident = {}
        for name, process in processes(cluster.pid).items():
            try:
                resident[name] = process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        samples.append(Sample(time.monotonic() - start_s, resident))
        total = sum(resident.values()) / MIB
        ended = ", ".join(f"{count:,} {how}" for how, count in sorted(load.ended.items())) or "none ended"
        show(f"{samples[-1].at_s / 60:6.1f} min  {load.sent:>8,} sent: {ended}; {total:,.0f} MiB in all")
        await asyncio.wait([sending], timeout=every_s)
    await sending
    return samples


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sglang-fair bench soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="default: %(default)g")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second (default: %(default)g)")
    parser.add_argument(
        "--every", type=float, default=15.0, metavar="S", help="between two samples of memory"
    )
    parser.add_argument("--replicas", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="of the cluster (default: a new one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the last line to FILE too")
    given = parser.parse_args(arguments)
    if min(given.minutes, given.rate, given.every, given.replicas) <= 0:
        parser.error("--minutes, --rate, --every and --replicas must be positive")
    return given


def run(given: argparse.Namespace, show: Show) -> dict[str, Any]:
    """The result; `ok` when every request ended as it should and the books balance."""
    logs = given.logs or Path(tempfile.mkdtemp(prefix="soak-"))
    spawn = SpawnCluster(
        given.replicas, "tiny", logs, device="cpu", replica_arguments=("--max-total-tokens", "16384")
    )
    show(f"starting {given.replicas} replicas, router and gateway; logs in {logs}")
    with spawn("d2lpm", "dlpm") as cluster:
        load = Load(cluster.gateway, given.rate, Random(given.seed))
        samples = asyncio.run(soak(cluster, load, 60 * given.minutes, given.every, show))
        books = [get_json(f"{replica}/fair") for replica in cluster.replicas]
        router = get_json(f"{cluster.gateway}/status")
    found = rows(samples)
    show(table(found))
    for error, count in load.errors.most_common(5):
        show(f"{count} x {error}")
    balanced = all(book["conservation"]["ok"] for book in books)
    return {
        "bench": "soak",
        "seed": given.seed,
        "versions": versions(),
        "machine": machine(),
        "minutes": given.minutes,
        "rate_rps": given.rate,
        "requests": {"sent": load.sent, **load.ended},
        "in_flight_at_end": router.get("in_flight"),
        "conservation_ok": balanced,
        "ok": balanced and not load.ended["failed"],
        "rows": [{name: getattr(row, name) for name in Row.__slots__} for row in found],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Progress and table on stderr; the result is the last line of stdout."""
    given = parse(arguments)
    result = carry_out("soak", lambda show: run(given, show), given.json, (ClusterError, OSError))
    if result is None:
        return 2
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
