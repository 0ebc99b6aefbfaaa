"""A comparison on live clusters: every scheduler on the same programs and arrivals, in one folder, resumable.

Each scheduler needs a cluster of its own. The order of schedulers is rotated between pairs of repeats and reversed in
every second repeat, so that a machine that drifts favours none, and so that one cluster serves both sides of the turn.
Before the first run, the cost of a decoded token and the capacity of this machine are measured; the arrival rate
follows from the capacity and is the same for all. Each run gives the clients new names and begins with empty caches, so
no run inherits deficits or prefixes.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sglang_fair.common.provenance import machine, versions
from sglang_fair.settings import table
from sglang_fair.sim.gpu_clock import in_words, since
from workloads.clients import SCENARIOS, SMALL, Scale, client_facts
from workloads.compare.cluster import Cluster, ClusterError, StartCluster, clocks, flush, verify
from workloads.compare.probe import Probe, probe
from workloads.driver import Driver, Endpoint
from workloads.measures import summarize
from workloads.programs import Codec
from workloads.records import Manifest, Records, Run, read
from workloads.report import client_table
from workloads.runs.case import ComparedRun, ComparisonCase, completed, errors, parts
from workloads.session import Plan
from workloads.terminal import progress_line


@dataclass(frozen=True)
class LiveCase(ComparisonCase):
    """A comparison on clusters that this machine starts."""

    scale: Scale = SMALL
    model: str = "bench"
    device: str = table.Cluster.device
    gpu: str | None = None
    """With the two below, for an emulated engine; see `sglang_fair.engines.emulated`."""
    cost_model: str | None = None
    time_scale: float = table.Cluster.time_scale
    replicas: int = 2
    quantum: float | None = 500.0
    """Q^u: about two requests' worth here. A round of all clients' quanta should take less than a program."""
    worker_quantum: float | None = 16_000.0
    """Q^w: about a dozen prompts of the judge, which is where DLPM's sweep levels off (Figure 10)."""
    replica_arguments: tuple[str, ...] = ("--max-running-requests", "16")

    @classmethod
    def from_json(cls, text: str) -> "LiveCase":
        """The inverse of `json.dumps(asdict(case))`. Raises ValueError."""
        try:
            given: dict[str, Any] = json.loads(text)
            given["scale"] = Scale(**given["scale"])
            for key in ("workloads", "schedulers", "replica_arguments"):
                given[key] = tuple(given[key])
            return cls(**given)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a comparison's case: {error}") from error


def order(schedulers: Sequence[str], repeats: int) -> list[tuple[int, str]]:
    """(repeat, scheduler) in the order in which they run; the module says why."""
    turns = []
    for repeat in range(repeats):
        by = (repeat // 2) % len(schedulers)
        rotated = [*schedulers[by:], *schedulers[:by]]
        turns += [(repeat, name) for name in (reversed(rotated) if repeat % 2 else rotated)]
    return turns


@dataclass
class Comparison:
    """One comparison in one folder. `run` may be interrupted and called again on the same folder."""

    case: LiveCase
    folder: Path
    start_cluster: StartCluster
    codec: Codec
    console: Console
    costs: Probe | None = None

    def run(self) -> list[Run]:
        """Make the runs that the folder lacks. Returns all runs of the case."""
        self._load()
        self._save()
        began_s, turns = time.monotonic(), order(self.case.schedulers, self.case.repeats)
        missing = [turn for turn in turns if self._missing(*turn)]
        with ExitStack() as stack:
            current, cluster, reported = "", None, {}
            for place, (repeat, scheduler) in enumerate(missing):
                if cluster is None or scheduler != current:
                    stack.close()
                    self._say(f"[{place + 1}/{len(missing)}] starting {scheduler}", began_s)
                    cluster = stack.enter_context(self.start_cluster(*parts(scheduler)))
                    reported, current = verify(cluster, *parts(scheduler)), scheduler
                self._prepare(cluster, began_s)
                for run in self._missing(repeat, scheduler):
                    self._say(f"[{place + 1}/{len(missing)}] {scheduler} on {run.workload}", began_s)
                    self._one(cluster, run, reported)
        return [read(run.path(self.folder)) for turn in turns for run in self._runs(*turn)]

    def costs_json(self) -> dict[str, Any] | None:
        """What a token costs on this machine, as JSON; None before it is measured."""
        return None if self.costs is None else {**asdict(self.costs), "ratio": self.costs.ratio}

    # ---- before the first run

    def _prepare(self, cluster: Cluster, began_s: float) -> None:
        """Measure what is not known yet: the cost of tokens, and each workload's arrival rate."""
        if self.costs is None:
            self._say("measuring what a token costs", began_s)
            self.costs = asyncio.run(probe(cluster.replicas[0], rng=Random(self.case.seed)))
        for workload in self.case.workloads:
            if workload not in self.case.rates_per_s:
                capacity = self._capacity(cluster, workload)
                self.case = self.case.with_capacity(workload, capacity)
                rate = self.case.rates_per_s[workload]
                self._say(f"{workload}: capacity {capacity:.3g}, each client {rate:.3g} programs/s", began_s)
        self._save()

    def _capacity(self, cluster: Cluster, workload: str) -> float:
        """Well-behaved programs per second that the cluster completes in a burst.

        The burst's start and tail are part of the time, so this is rather too low than too high.
        """
        each = 16 if SCENARIOS[workload].app == "judge" else 4
        self._burst(cluster, workload, "warm-up", 1)
        return self._burst(cluster, workload, "calibration", each)

    def _burst(self, cluster: Cluster, workload: str, name: str, each: int) -> float:
        """Programs per second of a burst: `each` of every well-behaved client, from arrival to the last end."""
        flush(cluster)
        clients = self.case.burst(workload, self.codec, seed=name)
        plan = Plan(duration_s=120.0, programs_per_client=each, drain_s=120.0)
        path = self.folder / "records" / f"{name}.{workload}.jsonl"
        with Records(path, Manifest(workload, name, {}, plan.duration_s)) as records:
            tag = f"@{name}.{workload}"
            asyncio.run(Driver(Endpoint(cluster.gateway), clients, plan, records, tag=tag).run())
            programs, last_s = completed(records.run)
            if programs < each * len(clients):
                raise ClusterError(
                    f"{name} on {workload}: not every program ended well: {errors(records.run)}"
                )
        return programs / last_s

    # ---- one run

    def _one(self, cluster: Cluster, run: ComparedRun, reported: Mapping[str, Any]) -> None:
        case, workload, repeat = self.case, run.workload, run.repeat
        seed = case.seed_of(repeat)
        clients = case.clients(workload, self.codec, rate_per_s=case.rates_per_s[workload], seed=seed)
        plan = case.plan
        manifest = Manifest(
            workload=workload,
            scheduler=run.scheduler,
            clients=client_facts(clients),
            duration_s=case.duration_s,
            workers=len(cluster.replicas),
            seed=seed,
            repeat=repeat,
            reported=reported,
            case={**asdict(case), "costs": self.costs_json()},
            versions=versions(),
            machine=machine(),
            started_unix_s=time.time(),
        )
        flush(cluster)
        clocks_before = clocks(cluster)
        path = run.path(self.folder)
        with (
            Live(Text(""), console=self.console, transient=True, refresh_per_second=2) as live,
            Records(path, manifest) as records,
        ):
            driver = Driver(
                Endpoint(cluster.gateway),
                clients,
                plan,
                records,
                replicas={f"r{place}": url for place, url in enumerate(cluster.replicas)},
                tag=f"@{workload}.{repeat}",
                watch=lambda progress: live.update(Text(progress_line(progress, plan))),
            )
            asyncio.run(driver.run())
        summary = summarize(records.run)
        self.console.print(client_table(summary))
        self._report_timing(path, clocks_before, clocks(cluster))
        if not summary.ok:
            raise ClusterError(f"{run.scheduler} on {workload}: no request was served: {errors(records.run)}")

    def _report_timing(
        self, path: Path, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
    ) -> None:
        """How accurate the timing of emulated GPUs was: printed, and kept beside the records."""
        if not after:
            return
        passed = [since(late, early) for late, early in zip(after, before, strict=True)]
        path.with_suffix(".timing.json").write_text(json.dumps(passed) + "\n", encoding="utf-8")
        self.console.print(in_words(passed), highlight=False)

    # ---- the folder

    def _runs(self, repeat: int, scheduler: str) -> list[ComparedRun]:
        return [ComparedRun(workload, scheduler, repeat) for workload in self.case.workloads]

    def _missing(self, repeat: int, scheduler: str) -> list[ComparedRun]:
        return [run for run in self._runs(repeat, scheduler) if not run.is_recorded(self.folder)]

    def _load(self) -> None:
        path = self.folder / "case.json"
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.case = LiveCase.from_json(json.dumps(kept["case"]))
            costs = kept["costs"]
            self.costs = None if costs is None else Probe(**{k: v for k, v in costs.items() if k != "ratio"})

    def _save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = {
            "case": asdict(self.case),
            "costs": self.costs_json(),
            "versions": versions(),
            "machine": machine(),
        }
        (self.folder / "case.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")

    def _say(self, text: str, began_s: float) -> None:
        self.console.print(f"{time.monotonic() - began_s:5.0f} s  {text}", highlight=False, markup=False)
