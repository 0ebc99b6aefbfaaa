"""`sglang-fair simulate`: schedulers, quanta and numbers of replicas on GPUs that one need not have.

sglang-fair simulate --gpu h100 --model llama-3.1-8b --replicas 2,4,8 --rate 0.5
sglang-fair simulate --schedulers d2lpm+dlpm --quantum 500,2000,8000 --worker-quantum 5000,20000
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

from rich.console import Console

from router.placement import parse_options
from sglang_fair.common.provenance import cores
from sglang_fair.settings import table
from sglang_fair.settings.commands import Option, run
from sglang_fair.settings.program import option_of
from sglang_fair.sim.gpus import GPUS
from sglang_fair.sim.shapes import SHAPES
from workloads.clients import SCENARIOS, Scale
from workloads.records import read
from workloads.report import number
from workloads.runs import options
from workloads.runs.comparison import show
from workloads.runs.pool import Failed, Pool
from workloads.simulation.comparison import SimulatedCase, SimulatedResult, capacity, carry_out, runs_of
from workloads.simulation.site import Site
from workloads.terminal import make_console, sigterm_as_ctrl_c
from workloads.traces import STAND_INS, find_trace

NAME = "sglang-fair simulate"
CASE, SITE = SimulatedCase(), Site()
"""Whose fields are the options' defaults."""

EPILOG = "Where several values are given, each combination is run on the same programs and arrivals."

ClusterOption = partial(Option, rich_help_panel="The cluster")


def of_cluster(name: str, help: str = "", unset: str = "", program: type = table.Cluster) -> Any:
    """The option of a setting that a live cluster has too."""
    return option_of(program, name, help=help, unset=unset, panel="The cluster")


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(options.ComparisonOptions):
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
    chunked_prefill: Annotated[int | None, ClusterOption(metavar="N", help="Prompt tokens in one step.")] = (
        None
    )
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
    hop: Annotated[float | None, ClusterOption(metavar="S", help="Network time of a request, both ways.")] = (
        None
    )
    workloads: Annotated[
        str | None,
        options.Traffic(
            metavar="W,...",
            help=f"Of {', '.join(SCENARIOS)}; {', '.join(STAND_INS)}: made-up traces with the statistics of real ones. "
            f"[default: {','.join(CASE.workloads)}, with --trace none]",
        ),
    ] = None
    trace: Annotated[
        list[Path] | None,
        options.Traffic(
            metavar="FILE",
            help="Replay JSON lines of arrival_s, client, input_tokens, output_tokens, or Mooncake's; repeatable.",
        ),
    ] = None
    rate: Annotated[
        float | None,
        options.Traffic(
            metavar="R",
            help="Programs/s of each client [default: by the load]; of a trace, all requests/s [default: its own].",
        ),
    ] = None
    cv: Annotated[
        float,
        options.Traffic(help="Variation of the gaps between arrivals: 1 Poisson, 0 even, more: bursts."),
    ] = CASE.cv
    duration: options.Duration = CASE.duration_s
    drain: options.Drain = CASE.drain_s
    jobs: Annotated[int, options.Runs(metavar="N", help="Processes.")] = cores()
    out: Annotated[
        Path | None,
        options.Runs(metavar="DIR", help="Records, plots and summary.json go there. [default: nowhere]"),
    ] = None

    def site(self, replicas: int) -> Site:
        """What all variants have in common. Raises ValueError and OSError."""
        given: dict[str, Any] = {
            "replicas": replicas,
            "cost": self.cost,
            "payer": self.payer,
            "stall_ms": self.stall_ms,
            "target_tpot_ms": self.target_tpot_ms,
            "client_weights": self.client_weights or {},
            "cache_share": self.cache_share == "on",
            "kv_tokens": self.kv_tokens,
            "max_running": self.max_running,
            "chunked_prefill_tokens": self.chunked_prefill,
            "hop_s": self.hop,
        }
        if self.cost_model is not None:
            return Site.calibrated(Path(self.cost_model), **given)
        known = {name: value for name, value in given.items() if value is not None}
        return Site(gpu=self.gpu, model=self.model, **known)

    def new_case(self) -> SimulatedCase:
        """Raises ValueError and OSError."""
        sizes = tuple(_whole("--replicas", size) for size in options.numbers("--replicas", self.replicas))
        if not sizes:
            raise ValueError("--replicas: no number is given")
        traces = _traces(self.trace or [])
        default = () if traces else CASE.workloads
        named = default if self.workloads is None else options.names(self.workloads)
        workloads = tuple(dict.fromkeys((*named, *traces)))
        by_placement = options.options_by_name("--placement-options", self.placement_options or [])
        return SimulatedCase(
            **self.case(
                Scale(),
                site=self.site(sizes[0]),
                workloads=workloads,
                traces=traces,
                replicas=sizes,
                quanta=options.numbers("--quantum", self.quantum) or (None,),
                worker_quanta=options.numbers("--worker-quantum", self.worker_quantum) or (None,),
                policy_options=options.options_by_name("--policy-options", self.policy_options or []),
                placement_options={name: parse_options(text) for name, text in by_placement.items()},
                cv=self.cv,
                rates_per_s={} if self.rate is None else dict.fromkeys(workloads, self.rate),
            )
        )


def simulate(given: SimulateOptions) -> int:
    """Compare schedulers, quanta and numbers of replicas in virtual time.

    The router and the policies are those of the live cluster. The engines are modelled: a cost model says how long
    each of their steps takes.

    Exit code 0, 2 for bad input, 130 after Ctrl-C.
    """
    if given.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, not {given.jobs}")
    case, console = given.new_case(), make_console()
    if given.out is not None and (given.out / "summary.json").exists():
        raise ValueError(f"{given.out} holds a comparison already")
    with sigterm_as_ctrl_c(), Pool(0 if given.jobs == 1 else given.jobs) as pool:
        began_s = time.monotonic()
        case = _with_rates(case, pool, console)
        results = _carried_out(case, given.out, pool, console)
        simulated_s, speed = sum(one.simulated_s for one in results), median(one.speed for one in results)
        show(
            "simulate",
            [read(result.run.path) for result in results if result.run.path],
            [result.summary for result in results],
            console,
            note=f"{number(simulated_s)} s of {case.site.engine} simulated in "
            f"{number(time.monotonic() - began_s)} s; one run {number(speed)} times faster than real time (median)",
            seed=case.seed,
            more={"rates_per_s": dict(case.rates_per_s), "times_real_time": speed},
            folder=given.out,
            kept={"case": asdict(case)},
            json_file=given.json_file,
        )
    return 0


JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


def _made(
    pool: Pool, work: Callable[[JobT], ResultT], jobs: Sequence[JobT]
) -> Iterator[tuple[JobT, ResultT]]:
    """Jobs with their results, as they end. Raises RuntimeError as soon as one fails."""
    for job, outcome in pool.carry_out(work, jobs):
        if isinstance(outcome, Failed):
            raise RuntimeError(outcome.reason)
        yield job, outcome.measured


def _with_rates(case: SimulatedCase, pool: Pool, console: Console) -> SimulatedCase:
    """The case with an arrival rate for each scenario; measured where none is given."""
    missing = case.unmeasured()
    if missing:
        console.print(f"measuring the capacity for {', '.join(missing)}", highlight=False)
    found = dict(_made(pool, partial(capacity, case), missing))
    for workload in missing:
        case = case.with_capacity(workload, found[workload])
        console.print(
            f"{workload}: capacity {number(found[workload])}, "
            f"each client {number(case.rates_per_s[workload])} programs/s",
            highlight=False,
        )
    return case


def _carried_out(
    case: SimulatedCase, folder: Path | None, pool: Pool, console: Console
) -> list[SimulatedResult]:
    """All runs, in the order of the tables, with a line for each as it ends."""
    runs = runs_of(case, folder)
    results = {}
    for one, result in _made(pool, carry_out, runs):
        results[one.key] = result
        console.print(
            f"[{len(results)}/{len(runs)}] {one.key}, seed {case.seed_of(one.key.repeat)}: "
            f"{result.simulated_s:.0f} s in {result.wall_s:.1f} s, {number(result.speed)} times real time",
            highlight=False,
            markup=False,
        )
    return [results[one.key] for one in runs]


def _traces(paths: Sequence[Path]) -> dict[str, Path]:
    """Trace files by name. Raises ValueError and OSError for files that are no traces."""
    traces = {path.stem: path for path in paths}
    if len(traces) < len(paths):
        raise ValueError("two traces have the same name")
    for path in traces.values():
        find_trace(str(path))
    return traces


def _whole(option: str, value: float) -> int:
    if not value.is_integer():
        raise ValueError(f"{option} takes whole numbers, not {value:g}")
    return int(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run(options.command(SimulateOptions, simulate), NAME, arguments, epilog=EPILOG)
