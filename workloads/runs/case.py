"""What decides a comparison of schedulers, on whichever engine, and the runs that it consists of.

A scheduler is a placement at the router with a policy in the replicas, written PLACEMENT+POLICY. Within a repeat all
schedulers see the same programs at the same times; repeats have different seeds. The arrival rate follows from a
capacity that is measured first: the well-behaved programs per second that the engine completes in a burst, whose start
and tail are part of the time, so that it is rather too low than too high.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from router.placement import PLACEMENTS
from sglang_fair.core import POLICIES
from workloads.clients import SCENARIOS, Client, Scale
from workloads.measures import Summary, summarize
from workloads.programs import Codec
from workloads.records import Run, read
from workloads.session import Plan

OURS = "d2lpm+dlpm"

SCHEDULERS = (OURS, "round_robin+lpm", "preble+lpm", "client_round_robin+vtc")
"""Ours, and the baselines of DLPM §7."""

EACH_PLACEMENT = tuple(f"{placement}+dlpm" for placement in PLACEMENTS)
"""Every placement over the same fair replicas."""

LOADS: Mapping[str, float] = {"tot": 0.6, "judge": 0.8}
"""By kind of program: each client's rate as a part of its equal share of the measured capacity, counted in
well-behaved programs. So the well-behaved clients alone never overload the engine, and S1's bad client always does: its
trees cost about 11 times and its judgements about 3 times as much as theirs."""

BURST_RATE_PER_S = 1000.0
"""Arrival rate of the burst that measures capacity: all of its programs are there at once."""


def parts(scheduler: str) -> tuple[str, str]:
    """Placement and policy of PLACEMENT+POLICY. Raises ValueError for unknown names."""
    placement, _, policy = scheduler.partition("+")
    if placement not in PLACEMENTS or policy not in POLICIES:
        raise ValueError(
            f"unknown scheduler {scheduler!r}: it is PLACEMENT+POLICY, of the placements {', '.join(PLACEMENTS)} "
            f"and the policies {', '.join(POLICIES)}"
        )
    return placement, policy


@dataclass(frozen=True)
class ComparisonCase:
    """What every comparison has, whichever engine it runs on; written beside its records.

    Raises ValueError, in one line, for what makes no sense.
    """

    engine: str = "auto"
    """What serves the requests: `cuda`, `cpu` or `emulated` replicas, `auto` for what this machine has, `simulated`."""
    workloads: tuple[str, ...] = ("tot-s1", "judge-s1")
    schedulers: tuple[str, ...] = SCHEDULERS
    repeats: int = 2
    duration_s: float = 15.0
    drain_s: float = 5.0
    """Longest wait for the well-behaved clients' programs after the last arrival; the rest is cut off."""
    sample_s: float = 0.5
    seed: int = 0
    load: float | None = None
    """In place of `LOADS`, for all workloads."""
    cv: float = 1.0
    rates_per_s: Mapping[str, float] = field(default_factory=dict)
    """Programs per second and client, by workload; measured where missing."""
    scale: Scale = field(default_factory=Scale)

    def __post_init__(self) -> None:
        unknown = [name for name in self.workloads if name not in self.known_workloads()]
        if unknown or not self.workloads:
            raise ValueError(
                f"unknown workload {', '.join(unknown) or 'none'}; there are {', '.join(self.known_workloads())}"
            )
        if not self.schedulers:
            raise ValueError("no scheduler to compare")
        for name in self.schedulers:
            parts(name)
        if self.repeats < 1 or self.duration_s <= 0 or self.drain_s < 0 or self.sample_s <= 0:
            raise ValueError("repeats, duration and sampling must be positive, the drain not negative")
        if (self.load is not None and self.load <= 0) or any(rate <= 0 for rate in self.rates_per_s.values()):
            raise ValueError("load and rates must be positive")

    def known_workloads(self) -> tuple[str, ...]:
        return tuple(SCENARIOS)

    def unmeasured(self) -> list[str]:
        """Workloads whose arrival rate is not known yet."""
        return [name for name in self.workloads if name not in self.rates_per_s]

    @property
    def plan(self) -> Plan:
        """The plan of each run."""
        return Plan(self.duration_s, drain_s=self.drain_s, drain_for="well-behaved", sample_s=self.sample_s)

    def seed_of(self, repeat: int) -> str:
        return f"{self.seed}.{repeat}"

    def clients(self, workload: str, codec: Codec, *, rate_per_s: float, seed: str) -> tuple[Client, ...]:
        """The clients of a scenario. All are active from the start, however short the run."""
        return SCENARIOS[workload].clients(
            scale=self.scale, rate_per_s=rate_per_s, codec=codec, cv=self.cv, first_s=0.0, seed=seed
        )

    def burst(self, workload: str, codec: Codec, *, seed: str = "calibration") -> tuple[Client, ...]:
        """The well-behaved clients of a scenario, with all of their programs at the very start."""
        clients = self.clients(workload, codec, rate_per_s=BURST_RATE_PER_S, seed=seed)
        return tuple(client for client in clients if client.well_behaved)

    def with_capacity(self, workload: str, programs_per_s: float) -> Self:
        """This case with the rate that follows from a measured capacity."""
        load = self.load or LOADS.get(SCENARIOS[workload].app, min(LOADS.values()))
        rate = load * programs_per_s / (self.scale.good_clients + 1)
        return replace(self, rates_per_s={**self.rates_per_s, workload: float(f"{rate:.3g}")})


@dataclass(frozen=True)
class ComparedRun:
    """One cell of a comparison: a scheduler (as tables name it) on a workload, with one seed."""

    workload: str
    scheduler: str
    repeat: int

    def __str__(self) -> str:
        return f"{self.scheduler} on {self.workload}"

    def path(self, folder: Path) -> Path:
        """Where its records lie."""
        return folder / "records" / f"{self.workload}.{self.scheduler.replace(' ', '.')}.{self.repeat}.jsonl"

    def is_recorded(self, folder: Path) -> bool:
        """Its records are there and complete: a run that was cut off is made again."""
        path = self.path(folder)
        return path.exists() and read(path).end is not None

    def summary(self, run: Run) -> Summary:
        """Its measures. Raises RuntimeError if no request was served."""
        found = summarize(run)
        if not found.ok:
            raise RuntimeError(f"{self}: no request was served: {errors(run)}")
        return found


def completed(run: Run) -> tuple[int, float]:
    """How many programs of a burst ended well, and when the last of them did, in seconds."""
    done = [p.t_done_s for p in run.programs if p.outcome == "ok" and p.t_done_s is not None]
    return len(done), max(done, default=0.0)


def errors(run: Run) -> str:
    """The first few errors of a run, in one line."""
    return "; ".join(sorted({record.error for record in run.requests if record.error})[:3])
