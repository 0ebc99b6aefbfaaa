"""`sglang-fair simulate`: schedulers, quanta and numbers of replicas on GPUs that one need not have.

sglang-fair simulate --gpu h100 --model llama-3.1-8b --replicas 2,4,8 --rate 0.5
sglang-fair simulate --schedulers d2lpm+dlpm --quantum 500,2000,8000 --worker-quantum 5000,20000
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

from router.placement import parse_options
from sglang_fair.common.provenance import cores
from sglang_fair.core import options as policy_options
from sglang_fair.settings import table
from sglang_fair.settings.commands import Option, command, run
from sglang_fair.settings.program import option_of
from sglang_fair.sim.gpus import GPUS
from sglang_fair.sim.shapes import SHAPES
from workloads.clients import SCENARIOS, Client
from workloads.measures import Summary, summarize
from workloads.programs import PackedCodec
from workloads.records import Cell, stamp
from workloads.report import number
from workloads.runs import comparison
from workloads.runs.comparison import Case, Comparison, burst, completed, parts, summary_of
from workloads.runs.pool import Failed, carry_out
from workloads.session import Plan
from workloads.simulation.run import describe, simulate
from workloads.simulation.site import Site
from workloads.terminal import make_console, sigterm_as_ctrl_c
from workloads.traces import STAND_INS, find_trace

NAME = "sglang-fair simulate"
SITE = Site()
"""Whose fields are the options' defaults."""
WORKLOADS = "tot-s1,judge-s1"

BURST_S = 60.0
"""Shortest burst that measures capacity: its start and its tail are part of the time."""

CONNECTIONS = 1_000_000
"""Of a client in the burst: so many that none is held back before it has reached the replicas' queues."""

MOST_BURST_PROGRAMS = 4096
"""Of one client, however fast the site is."""

EPILOG = "Where several values are given, each combination is run on the same programs and arrivals."

OF_SITE = (
    "cost", "payer", "stall_ms", "target_tpot_ms", "client_weights",
    "kv_tokens", "max_running", "chunked_prefill_tokens", "mixed_chunk", "hop_s",
)  # fmt: skip
"""Options that are a site's fields."""

ClusterOption = partial(Option, rich_help_panel="The cluster")


def of_cluster(name: str, help: str = "", unset: str = "", program: type = table.Cluster) -> Any:
    return option_of(program, name, help=help, unset=unset, panel="The cluster")


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(Case):
    gpu: Annotated[str, of_cluster("gpu", f"Of each replica: {', '.join(GPUS)}.")] = SITE.gpu
    model: Annotated[str, ClusterOption(help=f"What it serves: {', '.join(SHAPES)}.")] = SITE.model
    cost_model: Annotated[
        str | None,
        of_cluster(
            "cost_model",
            "Times, memory and limits of a replica, as `sglang-fair calibrate` measured them.",
            unset="by GPU and model",
        ),
    ] = None
    kv_tokens: Annotated[int | None, of_cluster("kv_tokens", unset="by the GPU", program=table.Replica)] = (
        None
    )
    max_running: Annotated[int | None, of_cluster("max_running", program=table.Replica)] = None
    chunked_prefill_tokens: Annotated[
        int | None, ClusterOption("--chunked-prefill", metavar="N", help="Prompt tokens in one step.")
    ] = None
    mixed_chunk: Annotated[
        bool | None,
        ClusterOption(
            help="Steps for prompts have a token for each running request. [default: where there is a stall "
            "bound, as in a cluster]",
        ),
    ] = None
    replicas: Annotated[str, ClusterOption(metavar="N,...", help="One number, or several to compare.")] = "2"
    quantum: Annotated[
        str,
        ClusterOption(metavar="UNITS,...", help="DLPM's and DRR's, per client. [default: the policy's]"),
    ] = ""
    worker_quantum: Annotated[
        str, ClusterOption(metavar="UNITS,...", help="D2LPM's. [default: the router's]")
    ] = ""
    policy_options: Annotated[
        list[str] | None,
        ClusterOption(
            metavar="POLICY:KEY=VALUE,...",
            help="A policy's other options, as dlpm:patience=64; repeatable.",
        ),
    ] = None
    placement_options: Annotated[
        list[str] | None,
        ClusterOption(
            metavar="PLACEMENT:KEY=VALUE,...",
            help="A placement's other options, as d2lpm:cache_threshold=0.3; repeatable.",
        ),
    ] = None
    cost: Annotated[str, of_cluster("cost")] = SITE.cost
    payer: Annotated[str, of_cluster("payer")] = SITE.payer
    stall_ms: Annotated[float, of_cluster("stall_ms")] = SITE.stall_ms
    target_tpot_ms: Annotated[float | None, of_cluster("target_tpot_ms")] = table.Cluster.target_tpot_ms
    client_weights: Annotated[Mapping[str, float] | None, of_cluster("client_weights")] = None
    cache_share: Annotated[str, of_cluster("cache_share")] = "off"
    hop_s: Annotated[
        float | None, ClusterOption("--hop", metavar="S", help="Network time of a request, both ways.")
    ] = None
    workloads: Annotated[
        str | None,
        comparison.Traffic(
            metavar="W,...",
            help=f"Of {', '.join(SCENARIOS)}; {', '.join(STAND_INS)}: made-up traces with the statistics of real ones. "
            f"[default: {WORKLOADS}, with --trace none]",
        ),
    ] = None
    trace: Annotated[
        list[Path] | None,
        comparison.Traffic(
            metavar="FILE",
            help="Replay JSON lines of arrival_s, client, input_tokens, output_tokens, or Mooncake's; repeatable.",
        ),
    ] = None
    rate: Annotated[
        float | None,
        comparison.Traffic(
            metavar="R",
            help="Programs/s of each client [default: by the load]; of a trace, all requests/s [default: its own].",
        ),
    ] = None
    cv: Annotated[
        float,
        comparison.Traffic(help="Variation of the gaps between arrivals: 1 Poisson, 0 even, more: bursts."),
    ] = 1.0
    jobs: Annotated[int, comparison.Runs(metavar="N", help="Processes.")] = cores()
    out: Annotated[
        Path | None,
        comparison.Runs(
            metavar="DIR",
            help="Records, plots and summary.json go there; what is there is not run again. [default: nowhere]",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jobs < 1:
            raise ValueError(f"--jobs must be at least 1, not {self.jobs}")
        for path in self.traces.values():
            find_trace(str(path))
        named = {name for scheduler in self.scheduler_names for name in parts(scheduler)}
        for text in (*(self.policy_options or ()), *(self.placement_options or ())):
            if (name := text.partition(":")[0]) not in named:
                raise ValueError(f"options are given for {name!r}, which is not among the schedulers")
        for site in self.variants.values():
            site.settings()
            describe(site, [], self.plan)

    @property
    def traces(self) -> Mapping[str, Path]:
        """Trace files by name, which is a workload's."""
        traces = {Path(path).stem: Path(path) for path in self.trace or ()}
        if len(traces) < len(self.trace or ()):
            raise ValueError("two traces have the same name")
        return traces

    @property
    def known_workloads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*SCENARIOS, *STAND_INS, *self.traces)))

    @property
    def workload_names(self) -> tuple[str, ...]:
        default = "" if self.trace else WORKLOADS
        return tuple(dict.fromkeys((*comparison.names(self.workloads or default), *self.traces)))

    @property
    def rates_given(self) -> Mapping[str, float]:
        return {} if self.rate is None else dict.fromkeys(self.workload_names, self.rate)

    @property
    def unmeasured(self) -> list[str]:
        """Workloads of programs without a rate; traces have their own."""
        return [
            name for name in self.workload_names if self.is_scenario(name) and name not in self.rates_given
        ]

    def is_scenario(self, workload: str) -> bool:
        """A workload of programs, not a trace."""
        return workload in SCENARIOS and workload not in self.traces

    @cached_property
    def site(self) -> Site:
        """What all variants have in common. Raises ValueError and OSError."""
        given = {name: getattr(self, name) for name in OF_SITE} | {"cache_share": self.cache_share == "on"}
        if self.cost_model is not None:
            return Site.calibrated(Path(self.cost_model), **given)
        known = {name: value for name, value in given.items() if value is not None}
        return Site(gpu=self.gpu, model=self.model, **known)

    @cached_property
    def variants(self) -> Mapping[str, Site]:
        """The sites that are compared, by the scheduler's name, in which a dimension with several values stands."""
        sizes = comparison.numbers("--replicas", self.replicas)
        if not sizes or not all(size.is_integer() for size in sizes):
            raise ValueError(f"--replicas takes whole numbers, not {self.replicas!r}")
        dimensions: dict[str, tuple[float | None, ...]] = {
            "D": sizes,
            "Qu": comparison.numbers("--quantum", self.quantum) or (None,),
            "Qw": comparison.numbers("--worker-quantum", self.worker_quantum) or (None,),
        }
        of_policy = comparison.options_by_name("--policy-options", self.policy_options or [])
        of_placement = comparison.options_by_name("--placement-options", self.placement_options or [])
        found = {}
        for scheduler, values in product(self.scheduler_names, product(*dimensions.values())):
            placement, policy = parts(scheduler)
            named = [
                f"{name}=default" if value is None else f"{name}={value:g}"
                for (name, several), value in zip(dimensions.items(), values, strict=True)
                if len(several) > 1
            ]
            found[" ".join([scheduler, *named])] = replace(
                self.site,
                placement=placement,
                policy=policy,
                replicas=int(values[0] or 0),
                quantum=values[1],
                worker_quantum=values[2],
                policy_options=policy_options.shipped(policy, of_policy.get(policy, "")),
                placement_options=parse_options(of_placement.get(placement, "")),
            )
        return found

    def traffic(self, cell: Cell, rate: float | None) -> tuple[Client, ...]:
        """The clients of one run, of a scenario or of a trace. A trace's rate is of all clients, in requests per
        second."""
        if self.is_scenario(cell.workload):
            assert rate is not None, cell
            return self.clients(cell, PackedCodec(), rate, self.cv)
        trace = find_trace(str(self.traces.get(cell.workload, cell.workload)))
        sent = trace if rate is None else trace.at_rate(rate)
        return sent.between(0.0, self.duration).clients(PackedCodec(), seed=cell.seed)


@dataclass(frozen=True, slots=True)
class Job:
    """One run that is to be made; its records go to `path`, if there is one."""

    case: SimulateOptions
    cell: Cell
    rate: float | None
    path: Path | None


def simulate_cell(job: Job) -> tuple[Summary, float]:
    """Its measures, and its length in virtual time. Raises RuntimeError if no request was served."""
    case, cell = job.case, job.cell
    site, clients = case.variants[cell.scheduler], case.traffic(cell, job.rate)
    made = describe(site, clients, case.plan, seed=cell.seed, workload=cell.workload, repeat=cell.repeat)
    manifest = replace(made, scheduler=cell.scheduler, **(stamp() if job.path else {}))
    records = simulate(site, clients, case.plan, seed=cell.seed, manifest=manifest, path=job.path)
    assert records.end is not None
    return summary_of(cell, records), records.end.t_s


def capacity(case: SimulateOptions, workload: str) -> float:
    """Well-behaved programs per second that the first variant completes in a burst. Raises ValueError if none ends
    well."""
    site = next(iter(case.variants.values()))
    each = 8 * site.replicas
    while True:
        plan = Plan(
            duration_s=3600.0,
            programs_per_client=each,
            drain_s=None,
            connections_per_client=CONNECTIONS,
            sample_s=60.0,
        )
        run = simulate(site, burst(workload, case.scale, PackedCodec()), plan)
        programs, last_s = completed(run)
        if not programs:
            raise ValueError(f"{workload}: no program ended well on this site: {run.errors}")
        if last_s >= BURST_S or each >= MOST_BURST_PROGRAMS:
            return programs / last_s
        each *= 2


def compare(case: SimulateOptions) -> int:
    """Compare schedulers, quanta and numbers of replicas in virtual time.

    The router and the policies are those of the live cluster. The engines are modelled: a cost model says how long
    each of their steps takes.

    Exit code 0, 2 for bad input, 130 after Ctrl-C.
    """
    made, began_s = Comparison(case, case.out, make_console()), time.monotonic()
    workers = 0 if case.jobs == 1 else case.jobs
    with sigterm_as_ctrl_c():
        for workload, found, _ in _made(
            partial(capacity, case), [name for name in case.unmeasured if name not in made.rates], workers
        ):
            made.measured(workload, found)
        cells = [
            case.cell(workload, scheduler, repeat)
            for workload in case.workload_names
            for scheduler in case.variants
            for repeat in range(case.repeats)
        ]
        missing = [
            Job(case, cell, made.rates.get(cell.workload), made.path(cell))
            for cell in cells
            if made.recorded(cell) is None
        ]
        summaries: dict[Cell, Summary] = {}
        simulated_s, speeds = 0.0, list[float]()
        for job, (summary, length_s), wall_s in _made(simulate_cell, missing, workers):
            summaries[job.cell] = summary
            simulated_s, speeds = simulated_s + length_s, [*speeds, length_s / wall_s]
            made.say(
                f"[{len(speeds)}/{len(missing)}] {job.cell}, seed {job.cell.seed}: {length_s:.0f} s in {wall_s:.1f} s"
            )
        runs = {cell: run for cell in cells if (run := made.recorded(cell)) is not None}
        speed = median(speeds) if speeds else None
        made.show(
            "simulate",
            list(runs.values()),
            [summaries.get(cell) or summarize(runs[cell]) for cell in cells],
            f"{number(simulated_s)} s of {case.site.engine} simulated in {number(time.monotonic() - began_s)} s; "
            f"one run {number(speed)} times faster than real time (median)",
            rates_per_s=made.rates,
            times_real_time=speed,
        )
    return 0


JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


def _made(
    work: Callable[[JobT], ResultT], jobs: Sequence[JobT], workers: int
) -> Iterator[tuple[JobT, ResultT, float]]:
    """Jobs with their results and their time, as they end. Raises RuntimeError as soon as one fails."""
    with closing(carry_out(work, jobs, workers)) as outcomes:
        for job, outcome in outcomes:
            if isinstance(outcome, Failed):
                raise RuntimeError(outcome.reason)
            yield job, outcome.measured, outcome.wall_s


def main(arguments: Sequence[str] | None = None) -> int:
    return run(command(SimulateOptions, compare), NAME, arguments, epilog=EPILOG)


if __name__ == "__main__":
    sys.exit(main())
