"""The runs of a comparison: every scheduler on the same programs and arrivals, in one folder, resumable.

Each scheduler is a placement at the router and a policy in the replicas, so each needs a cluster of its
own. Within a repeat all schedulers see the same programs at the same times; repeats have other seeds. The
order of schedulers is rotated between pairs of repeats and reversed in every second repeat, so that a
machine that drifts favours none (and one cluster serves both sides of the turn). Before the first run the
cost of a decoded token and the programs a second that this machine completes are measured; the arrival
rate follows from these and is the same for all. Clients are named anew in each run and caches are flushed,
so no run inherits deficits or prefixes.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from router.placement import PLACEMENTS
from sglang_fair.common.provenance import machine, versions
from sglang_fair.core import POLICIES
from sglang_fair.sim.gpu_clock import in_words, since
from workloads.clients import SCENARIOS, SMALL, Client, Scale
from workloads.compare.cluster import Cluster, ClusterError, StartCluster, clocks, flush, verify
from workloads.compare.probe import Probe, probe
from workloads.driver import Driver, Endpoint
from workloads.measures import summarize
from workloads.programs import Codec
from workloads.records import Manifest, Records, Run, read
from workloads.report import client_table
from workloads.session import Plan
from workloads.terminal import progress_line

SCHEDULERS = ("d2lpm+dlpm", "round_robin+lpm", "preble+lpm", "client_round_robin+vtc")
"""PLACEMENT+POLICY: ours, and the baselines of DLPM §7."""

EACH_PLACEMENT = tuple(f"{placement}+dlpm" for placement in PLACEMENTS)
"""Every placement over the same fair replicas."""


def parts(scheduler: str) -> tuple[str, str]:
    """Placement and policy of PLACEMENT+POLICY. ValueError for names that there are not."""
    placement, _, policy = scheduler.partition("+")
    if placement not in PLACEMENTS or policy not in POLICIES:
        raise ValueError(
            f"unknown scheduler {scheduler!r}: it is PLACEMENT+POLICY, of the placements {', '.join(PLACEMENTS)} "
            f"and the policies {', '.join(POLICIES)}"
        )
    return placement, policy


LOADS: Mapping[str, float] = {"tot": 0.6, "judge": 0.8}
"""By kind of program: each client's rate, as a part of an equal share of the measured capacity, counted in
well-behaved programs. So the well-behaved clients alone never overload the cluster, and S1's bad client,
whose trees cost about 11 times and whose judgements about 3 times theirs, always does."""


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that decides a comparison; written beside its records."""

    workloads: tuple[str, ...] = ("tot-s1", "judge-s1")
    schedulers: tuple[str, ...] = SCHEDULERS
    repeats: int = 2
    duration_s: float = 15.0
    drain_s: float = 5.0
    """Longest wait for the well-behaved clients' programs after the last arrival; the rest is cut off."""
    seed: int = 0
    load: float | None = None
    """In place of `LOADS`, for all workloads."""
    cv: float = 1.0
    rates_per_s: Mapping[str, float] = field(default_factory=dict)
    """Programs a second and client, by workload; measured where missing."""
    scale: Scale = SMALL
    model: str = "bench"
    device: str = "auto"
    engine: str = "auto"
    gpu: str | None = None
    """With the two below, of an emulated engine; see `sglang_fair.sim.emulation`."""
    cost_model: str | None = None
    time_scale: float = 1.0
    replicas: int = 2
    quantum: float | None = 500.0
    """Q^u: about two requests' worth here. A round of all clients' quanta should take less than a program."""
    worker_quantum: float | None = 16_000.0
    """Q^w: about a dozen prompts of the judge, which is where DLPM's sweep levels off (Figure 10)."""
    replica_arguments: tuple[str, ...] = ("--max-running-requests", "16")

    def __post_init__(self) -> None:
        unknown = [name for name in self.workloads if name not in SCENARIOS]
        if unknown or not self.workloads:
            raise ValueError(
                f"unknown workload {', '.join(unknown) or 'none'}; there are {', '.join(SCENARIOS)}"
            )
        if not self.schedulers:
            raise ValueError("no scheduler to compare")
        for name in self.schedulers:
            parts(name)
        if self.repeats < 1 or self.duration_s <= 0 or self.drain_s < 0 or (self.load or 1) <= 0:
            raise ValueError("repeats, duration and load must be positive, the drain not negative")

    @classmethod
    def from_json(cls, text: str) -> "Case":
        """The inverse of `json.dumps(asdict(case))`. Raises ValueError."""
        try:
            told: dict[str, Any] = json.loads(text)
            told["scale"] = Scale(**told["scale"])
            for key in ("workloads", "schedulers", "replica_arguments"):
                told[key] = tuple(told[key])
            return cls(**told)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a comparison's case: {error}") from error


def order(schedulers: Sequence[str], repeats: int) -> list[tuple[int, str]]:
    """(repeat, scheduler) in the order they are run: see the module."""
    turns = []
    for repeat in range(repeats):
        by = (repeat // 2) % len(schedulers)
        rotated = [*schedulers[by:], *schedulers[:by]]
        turns += [(repeat, name) for name in (reversed(rotated) if repeat % 2 else rotated)]
    return turns


@dataclass
class Comparison:
    """One comparison in one folder. `run` may be interrupted and called again on the same folder."""

    case: Case
    folder: Path
    start_cluster: StartCluster
    codec: Codec
    console: Console
    costs: Probe | None = None

    def run(self) -> list[Run]:
        """All runs of the case, those found in the folder included."""
        self._load()
        self._save()
        began_s, turns = time.monotonic(), order(self.case.schedulers, self.case.repeats)
        missing = [turn for turn in turns if any(self._missing(*turn, w) for w in self.case.workloads)]
        with ExitStack() as stack:
            current, cluster, reported = "", None, {}
            for place, (repeat, scheduler) in enumerate(missing):
                if cluster is None or scheduler != current:
                    stack.close()
                    self._say(f"[{place + 1}/{len(missing)}] starting {scheduler}", began_s)
                    cluster = stack.enter_context(self.start_cluster(*parts(scheduler)))
                    reported, current = verify(cluster, *parts(scheduler)), scheduler
                self._prepare(cluster, began_s)
                for workload in self.case.workloads:
                    if self._missing(repeat, scheduler, workload):
                        self._say(f"[{place + 1}/{len(missing)}] {scheduler} on {workload}", began_s)
                        self._one(cluster, scheduler, workload, repeat, reported)
        return [read(self._path(*turn, workload)) for turn in turns for workload in self.case.workloads]

    def told_costs(self) -> dict[str, Any] | None:
        """What a token costs here, for a file of JSON."""
        return None if self.costs is None else {**asdict(self.costs), "ratio": self.costs.ratio}

    # ---- before the first run

    def _prepare(self, cluster: Cluster, began_s: float) -> None:
        """Measure what is not known yet: what tokens cost, and how many programs a second to send."""
        if self.costs is None:
            self._say("measuring what a token costs", began_s)
            self.costs = asyncio.run(probe(cluster.replicas[0], rng=Random(self.case.seed)))
        for workload in self.case.workloads:
            if workload not in self.case.rates_per_s:
                capacity = self._capacity(cluster, workload)
                load = self.case.load or LOADS[SCENARIOS[workload].app]
                rate = load * capacity / (self.case.scale.good_clients + 1)
                known = {**self.case.rates_per_s, workload: float(f"{rate:.3g}")}
                self.case = replace(self.case, rates_per_s=known)
                self._say(f"{workload}: capacity {capacity:.3g}, each client {rate:.3g} programs/s", began_s)
        self._save()

    def _capacity(self, cluster: Cluster, workload: str) -> float:
        """Well-behaved programs a second that the cluster completes when all of a burst are there at once.

        Its start and its tail are part of the time, so this is rather too low than too high.
        """
        each = 16 if SCENARIOS[workload].app == "judge" else 4
        self._burst(cluster, workload, "warm-up", 1)
        return self._burst(cluster, workload, "calibration", each)

    def _burst(self, cluster: Cluster, workload: str, name: str, each: int) -> float:
        """Programs a second of a burst: `each` of every well-behaved client, from arrival to the last end."""
        flush(cluster)
        clients = self._clients(workload, rate_per_s=1000.0, seed=name, with_bad=False)
        plan = Plan(duration_s=120.0, programs_per_client=each, drain_s=120.0)
        path = self.folder / "records" / f"{name}.{workload}.jsonl"
        with Records(path, Manifest(workload, name, {}, plan.duration_s)) as records:
            tag = f"@{name}.{workload}"
            asyncio.run(Driver(Endpoint(cluster.gateway), clients, plan, records, tag=tag).run())
            ended = [program for program in records.run.programs if program.outcome == "ok"]
            done = [program.t_done_s for program in ended if program.t_done_s is not None]
            if len(done) < each * len(clients):
                errors = sorted({r.error for r in records.run.requests if r.error})
                raise ClusterError(f"{name} on {workload}: not every program ended well: {errors[:3]}")
        return len(done) / max(done)

    def _clients(
        self, workload: str, *, rate_per_s: float, seed: str, with_bad: bool = True
    ) -> tuple[Client, ...]:
        return SCENARIOS[workload].clients(
            scale=self.case.scale,
            rate_per_s=rate_per_s,
            codec=self.codec,
            cv=self.case.cv,
            first_s=0.0,  # all are active from the start, however short the run
            seed=seed,
            with_bad=with_bad,
        )

    # ---- one run

    def _one(
        self, cluster: Cluster, scheduler: str, workload: str, repeat: int, reported: Mapping[str, Any]
    ) -> None:
        case, seed = self.case, f"{self.case.seed}.{repeat}"
        rate = case.rates_per_s[workload]
        clients = self._clients(workload, rate_per_s=rate, seed=seed)
        plan = Plan(duration_s=case.duration_s, drain_s=case.drain_s, drain_for="well-behaved")
        manifest = Manifest(
            workload=workload,
            scheduler=scheduler,
            clients={
                client.name: {
                    "well_behaved": client.well_behaved,
                    "app": client.app,
                    "requests": client.requests,
                    "rate_per_s": rate,
                    "cv": case.cv,
                }
                for client in clients
            },
            duration_s=case.duration_s,
            workers=len(cluster.replicas),
            seed=seed,
            repeat=repeat,
            reported=reported,
            case={**asdict(case), "costs": self.told_costs()},
            versions=versions(),
            machine=machine(),
            started_unix_s=time.time(),
        )
        flush(cluster)
        clocks_before = clocks(cluster)
        path = self._path(repeat, scheduler, workload)
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
        self._judge_timing(path, clocks_before, clocks(cluster))
        if not summary.ok:
            errors = sorted({record.error for record in records.run.requests if record.error})
            raise ClusterError(f"{scheduler} on {workload}: no request was served: {errors[:3]}")

    def _judge_timing(
        self, path: Path, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
    ) -> None:
        """Says how true emulated GPUs' timing was, and keeps it beside the records."""
        if not after:
            return
        passed = [since(late, early) for late, early in zip(after, before, strict=True)]
        path.with_suffix(".timing.json").write_text(json.dumps(passed) + "\n", encoding="utf-8")
        self.console.print(in_words(passed), highlight=False)

    # ---- the folder

    def _path(self, repeat: int, scheduler: str, workload: str) -> Path:
        return self.folder / "records" / f"{workload}.{scheduler}.{repeat}.jsonl"

    def _missing(self, repeat: int, scheduler: str, workload: str) -> bool:
        path = self._path(repeat, scheduler, workload)
        return not path.exists() or read(path).end is None

    def _load(self) -> None:
        path = self.folder / "case.json"
        if path.exists():
            told = json.loads(path.read_text(encoding="utf-8"))
            self.case = Case.from_json(json.dumps(told["case"]))
            costs = told["costs"]
            self.costs = None if costs is None else Probe(**{k: v for k, v in costs.items() if k != "ratio"})

    def _save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        told = {
            "case": asdict(self.case),
            "costs": self.told_costs(),
            "versions": versions(),
            "machine": machine(),
        }
        (self.folder / "case.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")

    def _say(self, text: str, began_s: float) -> None:
        self.console.print(f"{time.monotonic() - began_s:5.0f} s  {text}", highlight=False, markup=False)
