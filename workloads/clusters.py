"""Clusters of this machine: start one, check that it is the one asked for, drive a load on it, stop it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from sglang_fair.settings import table
from sglang_fair.settings.setting import changed, command_line
from sglang_fair.sim.gpu_clock import since
from workloads.clients import Client, client_facts
from workloads.driver import Driver, Endpoint
from workloads.records import Cell, Manifest, Records, Run, stamp
from workloads.session import Plan, SessionProgress

NameT = TypeVar("NameT")


START_S, STOP_S, FLUSH_S, ANSWER_S = 300.0, 60.0, 60.0, 10.0
"""Longest waits: until a cluster is there, ends, is idle, and answers."""


class ClusterError(RuntimeError):
    """A cluster did not start, is not the one asked for, or broke down. The text is one line."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Addresses of a running cluster."""

    gateway: str
    replicas: tuple[str, ...]
    pid: int | None = None
    """Of the process that supervises it, if we started it."""


StartCluster = Callable[[str, str], AbstractContextManager[Cluster]]
"""(placement, policy) -> a cluster that runs until the context ends."""


def turns(schedulers: Sequence[NameT], repeats: int) -> list[tuple[int, NameT]]:
    """(repeat, scheduler) in the order in which they are to run, where each needs a cluster of its own: rotated between
    pairs of repeats and reversed in every second repeat, so that a machine that drifts favours none, and so that one
    cluster serves both sides of the turn."""
    found = []
    for repeat in range(repeats):
        by = (repeat // 2) % len(schedulers)
        rotated = [*schedulers[by:], *schedulers[:by]]
        found += [(repeat, name) for name in (reversed(rotated) if repeat % 2 else rotated)]
    return found


@dataclass(frozen=True, slots=True)
class SpawnCluster:
    """Starts clusters with our own command, `sglang-fair cluster --json`."""

    settings: table.Cluster
    """All but placement, policy and port."""
    log_folder: Path
    command: tuple[str, ...] = (sys.executable, "-m", "sglang_fair.cli")

    def arguments(self, placement: str, policy: str) -> list[str]:
        asked = replace(self.settings, placement=placement, policy=policy, port=0, json=True, dashboard="off")
        return [*self.command, "cluster", *command_line(table.Cluster, changed(asked))]

    @contextmanager
    def __call__(self, placement: str, policy: str) -> Iterator[Cluster]:
        self.log_folder.mkdir(parents=True, exist_ok=True)
        path = self.log_folder / f"cluster-{placement}+{policy}.log"
        arguments = self.arguments(placement, policy)
        with path.open("a", encoding="utf-8") as log, path.with_suffix(".json").open("w") as output:
            # A session of its own: Ctrl-C reaches this program alone, which then ends the cluster in order.
            process = subprocess.Popen(arguments, stdout=output, stderr=log, start_new_session=True)
            try:
                yield self._ready(process, arguments, Path(output.name), path)
            finally:
                _end(process)

    def _ready(
        self, process: "subprocess.Popen[bytes]", arguments: Sequence[str], output: Path, log_path: Path
    ) -> Cluster:
        deadline_s = time.monotonic() + START_S
        while "\n" not in (text := output.read_text(encoding="utf-8")):
            ended = process.poll() is not None
            if ended or time.monotonic() > deadline_s:
                state = f"ended with status {process.returncode}" if ended else "took too long"
                raise ClusterError(f"{' '.join(arguments)}: {state}; its last words: {_tail(log_path)}")
            time.sleep(0.05)
        try:
            addresses = json.loads(text.splitlines()[0])
            return Cluster(addresses["gateway"], tuple(addresses["replicas"]), process.pid)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ClusterError(f"the cluster did not print its addresses as JSON: {text[:200]!r}") from error


def verify(cluster: Cluster, placement: str, policy: str) -> dict[str, Any]:
    """Read placement and policy back from the running processes, for the records.

    Raises ClusterError if one is not what was asked for: a run on another scheduler is void.
    """
    placed = get_json(f"{cluster.gateway}/status").get("placement")
    if placed != placement:
        raise ClusterError(f"{cluster.gateway} places by {placed!r}, not {placement!r}: the run is void")
    replicas = {}
    for place, replica in enumerate(cluster.replicas):
        fair = get_json(f"{replica}/fair")
        replicas[f"r{place}"] = {name: fair.get(name) for name in ("policy", "config", "emulated")}
        if fair.get("policy") != policy:
            raise ClusterError(
                f"{replica} schedules by {fair.get('policy')!r}, not {policy!r}: the run is void"
            )
    return {"placement": placed, "replicas": replicas}


def drive(
    cluster: Cluster,
    clients: Sequence[Client],
    plan: Plan,
    cell: Cell,
    *,
    reported: Mapping[str, Any] | None = None,
    case: Mapping[str, Any] | None = None,
    path: Path | None = None,
    sampled: bool = False,
    watch: Callable[[SessionProgress], None] | None = None,
) -> tuple[Run, list[Mapping[str, float]]]:
    """One run, with empty caches and clients whose names have a tag, so that it inherits nothing. `sampled`: with the
    replicas' accounts.

    Returns also what each emulated GPU's clock has counted meanwhile; nothing for real engines. Raises ClusterError.
    """
    manifest = Manifest(
        workload=cell.workload,
        scheduler=cell.scheduler,
        clients=client_facts(clients),
        duration_s=plan.duration_s,
        workers=len(cluster.replicas),
        seed=cell.seed,
        repeat=cell.repeat,
        reported=reported or {},
        case=case or {},
        **stamp(),
    )
    flush(cluster)
    before, began_s = _clocks(cluster), time.monotonic()
    replicas = {f"r{place}": url for place, url in enumerate(cluster.replicas)} if sampled else {}
    tag = f"@{cell.workload}.{cell.seed}"
    with Records(path, manifest) as records:
        driver = Driver(
            Endpoint(cluster.gateway), clients, plan, records, replicas=replicas, tag=tag, watch=watch
        )
        asyncio.run(driver.run())
    after, elapsed_s = _clocks(cluster), time.monotonic() - began_s
    passed = [since(late, early) for late, early in zip(after, before, strict=True)]
    return records.run, [{**one, "elapsed_s": elapsed_s} for one in passed]


def _clocks(cluster: Cluster) -> list[dict[str, Any]]:
    reports = [get_json(f"{replica}/fair").get("emulated") for replica in cluster.replicas]
    return [report for report in reports if report is not None]


def flush(cluster: Cluster, timeout_s: float = FLUSH_S) -> None:
    """Empty every replica's cache, which takes an idle replica: waits for that. Raises ClusterError."""
    deadline_s, waiting = time.monotonic() + timeout_s, list(cluster.replicas)
    while waiting:
        try:
            with urllib.request.urlopen(f"{waiting[0]}/flush_cache", b"", timeout=ANSWER_S):
                waiting.pop(0)
        except urllib.error.HTTPError:  # SGLang's answer while requests run
            if time.monotonic() > deadline_s:
                raise ClusterError(
                    f"{waiting[0]} was not idle after {timeout_s:g} s: its cache was not flushed"
                ) from None
            time.sleep(0.2)
        except OSError as error:
            raise ClusterError(f"{waiting[0]} is gone: {error}") from error


def get_json(url: str) -> dict[str, Any]:
    """The JSON object at `url`. Raises ClusterError."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S) as response:
            return dict(json.load(response))
    except (OSError, ValueError, TypeError) as error:
        raise ClusterError(f"GET {url}: {error}") from error


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask the supervisor to end, and its children with it. Kill its whole session if it does not end in time.

    By SIGTERM: a shell without job control starts what it puts into the background with SIGINT ignored.
    """
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(path: Path) -> str:
    return " | ".join(path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:])
