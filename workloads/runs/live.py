"""A comparison on live clusters: every scheduler on the same programs and arrivals, in one folder, resumable.

Each scheduler needs a cluster of its own (`clusters.turns`). Before the first run, the cost of a decoded token and the
capacity of this machine are measured; the arrival rate follows from the capacity and is the same for all.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sglang_fair.common.provenance import machine, versions
from sglang_fair.settings import table
from sglang_fair.sim.gpu_clock import in_words
from workloads.clients import SCENARIOS, SMALL, Scale, client_facts
from workloads.clusters import Cluster, ClusterError, StartCluster, drive, turns, verify
from workloads.programs import Codec
from workloads.records import Manifest, Run, read, stamp
from workloads.report import client_table
from workloads.runs.case import ComparedRun, ComparisonCase, completed, errors, parts
from workloads.runs.probe import Probe, probe
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
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """The inverse of `asdict`, through JSON. Raises ValueError."""
        try:
            lists = {key: tuple(given[key]) for key in ("workloads", "schedulers", "replica_arguments")}
            return cls(**{**given, **lists, "scale": Scale(**given["scale"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a comparison's case: {error}") from error


@dataclass
class Comparison:
    """One comparison in one folder. `run` may be interrupted and called again on the same folder."""

    case: LiveCase
    folder: Path
    start_cluster: StartCluster
    codec: Codec
    console: Console
    costs: Probe | None = None
    _began_s: float = field(default_factory=time.monotonic)

    def run(self) -> list[Run]:
        """Make the runs that the folder lacks. Returns all runs of the case."""
        self._load()
        self._save()
        runs = [
            ComparedRun(workload, scheduler, repeat)
            for repeat, scheduler in turns(self.case.schedulers, self.case.repeats)
            for workload in self.case.workloads
        ]
        missing = [run for run in runs if not run.is_recorded(self.folder)]
        with ExitStack() as stack:
            current, cluster, reported = "", None, {}
            for place, run in enumerate(missing):
                if cluster is None or run.scheduler != current:
                    stack.close()
                    current = run.scheduler
                    self._say(f"[{place + 1}/{len(missing)}] starting {current}")
                    cluster = stack.enter_context(self.start_cluster(*parts(current)))
                    reported = verify(cluster, *parts(current))
                self._prepare(cluster)
                self._say(f"[{place + 1}/{len(missing)}] {run}")
                self._one(cluster, run, reported)
        return [read(run.path(self.folder)) for run in runs]

    def costs_json(self) -> dict[str, Any] | None:
        """What a token costs on this machine, as JSON; None before it is measured."""
        return None if self.costs is None else {**asdict(self.costs), "ratio": self.costs.ratio}

    # ---- before the first run

    def _prepare(self, cluster: Cluster) -> None:
        """Measure what is not known yet: the cost of tokens, and each workload's arrival rate."""
        if self.costs is None:
            self._say("measuring what a token costs")
            self.costs = asyncio.run(probe(cluster.replicas[0], Random(self.case.seed)))
        for workload in self.case.unmeasured():
            each = 16 if SCENARIOS[workload].app == "judge" else 4
            self._burst(cluster, workload, "warm-up", 1)
            capacity = self._burst(cluster, workload, "calibration", each)
            self.case = self.case.with_capacity(workload, capacity)
            rate = self.case.rates_per_s[workload]
            self._say(f"{workload}: capacity {capacity:.3g}, each client {rate:.3g} programs/s")
        self._save()

    def _burst(self, cluster: Cluster, workload: str, name: str, each: int) -> float:
        """Programs per second of a burst: `each` of every well-behaved client, from arrival to the last end."""
        clients = self.case.burst(workload, self.codec, seed=name)
        plan = Plan(duration_s=120.0, programs_per_client=each, drain_s=120.0)
        run, _ = drive(
            cluster,
            clients,
            plan,
            Manifest(workload, name, {}, plan.duration_s),
            tag=f"@{name}.{workload}",
            path=self.folder / "records" / f"{name}.{workload}.jsonl",
        )
        programs, last_s = completed(run)
        if programs < each * len(clients):
            raise ClusterError(f"{name} on {workload}: not every program ended well: {errors(run)}")
        return programs / last_s

    # ---- one run

    def _one(self, cluster: Cluster, run: ComparedRun, reported: Mapping[str, Any]) -> None:
        case, seed, plan = self.case, self.case.seed_of(run.repeat), self.case.plan
        clients = case.clients(run.workload, self.codec, rate_per_s=case.rates_per_s[run.workload], seed=seed)
        manifest = Manifest(
            workload=run.workload,
            scheduler=run.scheduler,
            clients=client_facts(clients),
            duration_s=case.duration_s,
            workers=len(cluster.replicas),
            seed=seed,
            repeat=run.repeat,
            reported=reported,
            case={**asdict(case), "costs": self.costs_json()},
            **stamp(),
        )
        path, tag = run.path(self.folder), f"@{run.workload}.{run.repeat}"
        with Live(Text(""), console=self.console, transient=True, refresh_per_second=2) as live:
            made, passed = drive(
                cluster,
                clients,
                plan,
                manifest,
                tag=tag,
                path=path,
                sampled=True,
                watch=lambda progress: live.update(Text(progress_line(progress, plan))),
            )
        self.console.print(client_table(run.summary(made)))
        if passed:  # how accurate the timing of emulated GPUs was
            path.with_suffix(".timing.json").write_text(json.dumps(passed) + "\n", encoding="utf-8")
            self.console.print(in_words(passed), highlight=False)

    # ---- the folder

    def _load(self) -> None:
        path = self.folder / "case.json"
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.case = LiveCase.from_json(kept["case"])
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

    def _say(self, text: str) -> None:
        self.console.print(
            f"{time.monotonic() - self._began_s:5.0f} s  {text}", highlight=False, markup=False
        )
