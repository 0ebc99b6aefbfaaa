"""A comparison in the simulator: every scheduler and every size on the same programs and arrivals.

Runs are independent of each other, so they go to as many processes as there are cores. What they come to does not
depend on that.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from workloads.clients import SCENARIOS, Client, Scale
from workloads.measures import Summary
from workloads.programs import PackedCodec
from workloads.records import stamp
from workloads.runs.case import ComparedRun, ComparisonCase, completed, errors, parts
from workloads.session import Plan
from workloads.simulation.run import describe, simulate
from workloads.simulation.site import Site
from workloads.traces import STAND_INS, find_trace

BURST_S = 60.0
"""Shortest burst that measures capacity: its start and its tail are part of the time."""

CONNECTIONS = 1_000_000
"""Of a client in the burst: so many that none is held back before it has reached the replicas' queues."""

MOST_BURST_PROGRAMS = 4096
"""Of one client, however fast the site is."""


@dataclass(frozen=True)
class SimulatedCase(ComparisonCase):
    """A comparison of simulated sites: of each scheduler, with each number of replicas and each quantum."""

    engine: str = "simulated"
    duration_s: float = 120.0
    drain_s: float = 60.0
    scale: Scale = field(default_factory=Scale)
    site: Site = field(default_factory=lambda: Site(replicas=2))
    """What all variants have in common."""
    traces: Mapping[str, Path] = field(default_factory=dict)
    """By workload: the trace file that is replayed. The names of stand-ins for traces are workloads too. A trace's rate
    is of all clients, in requests per second, and its own where `rates_per_s` has none."""
    replicas: tuple[int, ...] = (2,)
    quanta: tuple[float | None, ...] = (None,)
    worker_quanta: tuple[float | None, ...] = (None,)
    policy_options: Mapping[str, str] = field(default_factory=dict)
    """By policy."""
    placement_options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """By placement."""

    def __post_init__(self) -> None:
        ComparisonCase.__post_init__(self)
        named = {name for scheduler in self.schedulers for name in parts(scheduler)}
        for name in (*self.policy_options, *self.placement_options):
            if name not in named:
                raise ValueError(f"options are given for {name!r}, which is not among the schedulers")
        for site in self.variants().values():
            site.settings()
            describe(site, [], self.plan)

    def known_workloads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*SCENARIOS, *STAND_INS, *self.traces)))

    def is_scenario(self, workload: str) -> bool:
        """A workload of programs, not a trace."""
        return workload in SCENARIOS and workload not in self.traces

    def unmeasured(self) -> list[str]:
        return [name for name in super().unmeasured() if self.is_scenario(name)]

    def variants(self) -> dict[str, Site]:
        """The sites that are compared, by the scheduler's name, in which a dimension with several values stands."""
        found = {}
        for scheduler, count, quantum, worker_quantum in product(
            self.schedulers, self.replicas, self.quanta, self.worker_quanta
        ):
            placement, policy = parts(scheduler)
            dimensions = [
                f"{name}={value:g}" if value is not None else f"{name}=default"
                for name, value, values in (
                    ("D", count, self.replicas),
                    ("Qu", quantum, self.quanta),
                    ("Qw", worker_quantum, self.worker_quanta),
                )
                if len(values) > 1
            ]
            found[" ".join([scheduler, *dimensions])] = replace(
                self.site,
                placement=placement,
                policy=policy,
                replicas=count,
                quantum=quantum,
                worker_quantum=worker_quantum,
                policy_options=self.policy_options.get(policy, ""),
                placement_options=self.placement_options.get(placement, {}),
            )
        return found

    def traffic(self, workload: str, seed: str) -> tuple[Client, ...]:
        """The clients of one run, of a scenario or of a trace."""
        rate = self.rates_per_s.get(workload)
        if self.is_scenario(workload):
            assert rate is not None, workload
            return self.clients(workload, PackedCodec(), rate_per_s=rate, seed=seed)
        trace = find_trace(str(self.traces.get(workload, workload)))
        sent = trace if rate is None else trace.at_rate(rate)
        return sent.between(0.0, self.duration_s).clients(PackedCodec(), seed=seed)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One run of a comparison."""

    case: SimulatedCase
    site: Site
    key: ComparedRun
    path: Path | None
    """Where its records go; None: nowhere."""


@dataclass(frozen=True, slots=True)
class SimulatedResult:
    """What a run came to: its measures, its length in virtual time, and how long it took."""

    run: SimulatedRun
    summary: Summary
    simulated_s: float
    wall_s: float

    @property
    def speed(self) -> float:
        """Times faster than real time."""
        return self.simulated_s / self.wall_s


def runs_of(case: SimulatedCase, folder: Path | None) -> list[SimulatedRun]:
    """All runs, in the order of the tables. Their records go to `folder`, if there is one."""
    return [
        SimulatedRun(case, site, key, folder and key.path(folder))
        for workload in case.workloads
        for name, site in case.variants().items()
        for repeat in range(case.repeats)
        for key in [ComparedRun(workload, name, repeat)]
    ]


def carry_out(run: SimulatedRun) -> SimulatedResult:
    """Simulate one run and measure it. Raises RuntimeError if no request was served."""
    case, key = run.case, run.key
    seed = case.seed_of(key.repeat)
    clients = case.traffic(key.workload, seed)
    made = describe(run.site, clients, case.plan, seed=seed, workload=key.workload, repeat=key.repeat)
    manifest = replace(made, scheduler=key.scheduler, **(stamp() if run.path else {}))
    began_s = time.perf_counter()
    records = simulate(run.site, clients, case.plan, seed=seed, manifest=manifest, path=run.path)
    wall_s = time.perf_counter() - began_s
    assert records.end is not None
    return SimulatedResult(run, key.summary(records), records.end.t_s, wall_s)


def capacity(case: SimulatedCase, workload: str) -> float:
    """Well-behaved programs per second that the first variant completes in a burst. Raises ValueError if none ends
    well."""
    site, each = next(iter(case.variants().values())), 8 * case.replicas[0]
    while True:
        plan = Plan(
            duration_s=3600.0,
            programs_per_client=each,
            drain_s=None,
            connections_per_client=CONNECTIONS,
            sample_s=60.0,
        )
        run = simulate(site, case.burst(workload, PackedCodec()), plan)
        programs, last_s = completed(run)
        if not programs:
            raise ValueError(f"{workload}: no program ended well on this site: {errors(run)}")
        if last_s >= BURST_S or each >= MOST_BURST_PROGRAMS:
            return programs / last_s
        each *= 2
