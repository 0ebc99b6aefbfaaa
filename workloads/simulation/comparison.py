"""A comparison in the simulator: every scheduler and every size on the same programs and arrivals.

The arrival rate follows from the capacity that is measured first, as in a live comparison: well-behaved programs
that the first site completes in a burst, a second. Runs are independent of each other, so they go to as many
processes as there are cores, and what they come to does not depend on that.
"""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing import active_children, get_context
from pathlib import Path

from sglang_fair.common.processes import die_with_parent
from sglang_fair.common.provenance import machine, versions
from workloads.clients import SCENARIOS, Client, Scale
from workloads.compare.runs import LOADS, SCHEDULERS, parts
from workloads.measures import Summary, summarize
from workloads.programs import PackedCodec
from workloads.records import Run
from workloads.session import Plan
from workloads.simulation.cluster import describe, simulate
from workloads.simulation.site import Site
from workloads.traces import STAND_INS, find_trace

BURST_S = 60.0
"""A burst that measures capacity lasts at least so long: its start and its tail are part of the time."""

CONNECTIONS = 1_000_000
"""Of a client: so many that none is held back before it has reached the replicas' queues."""

MOST_BURST_PROGRAMS = 4096
"""Of one client, however fast the site is."""


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that decides a comparison. ValueError, in one line, for what makes no sense."""

    site: Site = field(default_factory=lambda: Site(replicas=2))
    """What all variants have in common."""
    schedulers: tuple[str, ...] = SCHEDULERS
    workloads: tuple[str, ...] = ("tot-s1", "judge-s1")
    traces: Mapping[str, Path | None] = field(default_factory=dict)
    """By workload: the file that is replayed; None: the stand-in for the trace of that name."""
    replicas: tuple[int, ...] = (2,)
    quanta: tuple[float | None, ...] = (None,)
    worker_quanta: tuple[float | None, ...] = (None,)
    policy_options: Mapping[str, str] = field(default_factory=dict)
    """By policy."""
    placement_options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """By placement."""
    repeats: int = 2
    duration_s: float = 120.0
    drain_s: float = 60.0
    """Longest wait for the well-behaved clients' programs after the last arrival; the rest is cut off."""
    sample_s: float = 0.5
    seed: int = 0
    load: float | None = None
    """A client's part of its equal share of the capacity, in well-behaved programs. None: by kind of program."""
    cv: float = 1.0
    rates_per_s: Mapping[str, float] = field(default_factory=dict)
    """By workload, programs a second and client, measured where missing; of a trace, requests a second of all
    clients, as in the trace where missing."""
    scale: Scale = field(default_factory=Scale)

    def __post_init__(self) -> None:
        unknown = [name for name in self.workloads if name not in {*SCENARIOS, *self.traces}]
        if unknown or not self.workloads:
            raise ValueError(
                f"unknown workload {', '.join(unknown) or 'none'}; there are {', '.join([*SCENARIOS, *STAND_INS])}"
            )
        if not self.schedulers:
            raise ValueError("no scheduler to compare")
        named = {name for scheduler in self.schedulers for name in parts(scheduler)}
        for name in (*self.policy_options, *self.placement_options):
            if name not in named:
                raise ValueError(f"options are given for {name!r}, which is not among the schedulers")
        if self.repeats < 1 or self.duration_s <= 0 or self.drain_s < 0 or self.sample_s <= 0:
            raise ValueError("repeats, duration and sampling must be positive, the drain not negative")
        if (self.load is not None and self.load <= 0) or any(rate <= 0 for rate in self.rates_per_s.values()):
            raise ValueError("load and rates must be positive")
        for variant in self.variants():
            site = variant.site
            site.settings()
            describe(site, [], self.plan)

    @property
    def plan(self) -> Plan:
        return Plan(self.duration_s, drain_s=self.drain_s, drain_for="well-behaved", sample_s=self.sample_s)

    def variants(self) -> list["Variant"]:
        """The sites that are compared. A dimension with several values is told in the scheduler's name."""
        found = []
        for scheduler, count, quantum, worker_quantum in product(
            self.schedulers, self.replicas, self.quanta, self.worker_quanta
        ):
            placement, policy = parts(scheduler)
            told = [
                f"{name}={value:g}" if value is not None else f"{name}=default"
                for name, value, values in (
                    ("D", count, self.replicas),
                    ("Qu", quantum, self.quanta),
                    ("Qw", worker_quantum, self.worker_quanta),
                )
                if len(values) > 1
            ]
            site = replace(
                self.site,
                placement=placement,
                policy=policy,
                replicas=count,
                quantum=quantum,
                worker_quantum=worker_quantum,
                policy_options=self.policy_options.get(policy, ""),
                placement_options=self.placement_options.get(placement, {}),
            )
            found.append(Variant(" ".join([scheduler, *told]), site))
        return found

    def traffic(self, workload: str, seed: str) -> tuple[Client, ...]:
        """The clients of one run."""
        rate = self.rates_per_s.get(workload)
        if workload not in self.traces:
            assert rate is not None, workload
            return self.clients(workload, rate_per_s=rate, seed=seed)
        trace = find_trace(str(self.traces[workload] or workload))
        sent = trace if rate is None else trace.at_rate(rate)
        return sent.between(0.0, self.duration_s).clients(PackedCodec(), seed=seed)

    def clients(
        self, workload: str, *, rate_per_s: float, seed: str, with_bad: bool = True
    ) -> tuple[Client, ...]:
        """Those of `workload`; all are active from the start, but a trace's."""
        return SCENARIOS[workload].clients(
            scale=self.scale,
            rate_per_s=rate_per_s,
            codec=PackedCodec(),
            cv=self.cv,
            first_s=0.0,
            seed=seed,
            with_bad=with_bad,
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """One site, by the name that tables have for it."""

    name: str
    site: Site


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of a comparison."""

    case: Case
    variant: Variant
    workload: str
    repeat: int
    path: Path | None
    """Where its records go; None: nowhere."""


@dataclass(frozen=True, slots=True)
class Came:
    """What a run came to: its measures, how long it was in virtual time, and how long it took."""

    turn: Turn
    summary: Summary
    simulated_s: float
    wall_s: float

    @property
    def speed(self) -> float:
        """Times faster than real time."""
        return self.simulated_s / self.wall_s


def capacity(case: Case, workload: str) -> float:
    """Well-behaved programs a second that the first variant completes when all of a burst are there at once.

    Its start and its tail are part of the time, so this is rather too low than too high.
    """
    site, each = case.variants()[0].site, 8 * case.replicas[0]
    while True:
        clients = case.clients(workload, rate_per_s=1000.0, seed="calibration", with_bad=False)
        plan = Plan(
            duration_s=3600.0,
            programs_per_client=each,
            drain_s=None,
            connections_per_client=CONNECTIONS,
            sample_s=60.0,
        )
        run = simulate(site, clients, plan)
        done = [
            program.t_done_s
            for program in run.programs
            if program.outcome == "ok" and program.t_done_s is not None
        ]
        if not done:
            raise ValueError(f"{workload}: no program ended well on this site: {_errors(run)}")
        if max(done) >= BURST_S or each >= MOST_BURST_PROGRAMS:
            return len(done) / max(done)
        each *= 2


def with_rates(case: Case, workload: str, measured: float) -> Case:
    """`case` with the rate that follows from a measured capacity."""
    app = SCENARIOS[workload].app
    rate = (case.load or LOADS.get(app, min(LOADS.values()))) * measured / (case.scale.good_clients + 1)
    return replace(case, rates_per_s={**case.rates_per_s, workload: float(f"{rate:.3g}")})


def run_turn(turn: Turn) -> Came:
    """One run, in whichever process."""
    case, seed = turn.case, f"{turn.case.seed}.{turn.repeat}"
    clients = case.traffic(turn.workload, seed)
    manifest = replace(
        describe(
            turn.variant.site, clients, case.plan, seed=seed, workload=turn.workload, repeat=turn.repeat
        ),
        scheduler=turn.variant.name,
        versions=versions() if turn.path else {},
        machine=machine() if turn.path else {},
        started_unix_s=time.time(),
    )
    began_s = time.perf_counter()
    run = simulate(turn.variant.site, clients, case.plan, seed=seed, manifest=manifest, path=turn.path)
    wall_s = time.perf_counter() - began_s
    summary = summarize(run)
    if not summary.ok:
        raise ValueError(f"{turn.variant.name} on {turn.workload}: no request was served: {_errors(run)}")
    assert run.end is not None
    return Came(turn, summary, run.end.t_s, wall_s)


def turns(case: Case, folder: Path | None) -> list[Turn]:
    """All runs, in the order of the tables."""
    return [
        Turn(
            case,
            variant,
            workload,
            repeat,
            folder and folder / "records" / f"{workload}.{variant.name.replace(' ', '.')}.{repeat}.jsonl",
        )
        for workload in case.workloads
        for variant in case.variants()
        for repeat in range(case.repeats)
    ]


class Processes:
    """`jobs` processes for runs; one does without."""

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise ValueError(f"jobs must be at least 1, not {jobs}")
        # Each starts afresh: a forked one would share whatever threads and locks there are here.
        self._pool = (
            ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin_worker)
            if jobs > 1
            else None
        )

    def capacities(self, case: Case, workloads: Sequence[str]) -> list[float]:
        """`capacity` of each."""
        if self._pool is None:
            return [capacity(case, workload) for workload in workloads]
        return list(self._pool.map(capacity, [case] * len(workloads), workloads))

    def run(self, due: Sequence[Turn], came: Callable[[Came], None]) -> list[Came]:
        """All of them, in the order of `due`; `came` hears of each as it ends."""
        found: dict[int, Came] = {}
        for place, one in self._ended(due):
            found[place] = one
            came(one)
        return [found[place] for place in range(len(due))]

    def _ended(self, due: Sequence[Turn]) -> Iterator[tuple[int, Came]]:
        if self._pool is None:
            yield from ((place, run_turn(turn)) for place, turn in enumerate(due))
            return
        places = {self._pool.submit(run_turn, turn): place for place, turn in enumerate(due)}
        for future in as_completed(places):
            yield places[future], future.result()

    def close(self) -> None:
        """Drop what is not done, and end."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()


def _begin_worker() -> None:
    """Ctrl-C is for the command, which ends its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()


def _errors(run: Run) -> str:
    return "; ".join(sorted({record.error for record in run.requests if record.error})[:3])
