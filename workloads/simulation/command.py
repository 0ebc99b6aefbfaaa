"""`sglang-fair simulate`: schedulers, quanta and numbers of replicas on GPUs that one need not have.

sglang-fair simulate --gpu h100 --model llama-3.1-8b --replicas 2,4,8 --rate 0.5
sglang-fair simulate --schedulers d2lpm+dlpm --quantum 500,2000,8000 --worker-quantum 5000,20000
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from rich.console import Console

from router.placement import parse_options
from sglang_fair.common.provenance import cores, versions
from sglang_fair.settings import table
from sglang_fair.settings.commands import Mistake, Option, run
from sglang_fair.settings.program import option_of
from sglang_fair.sim.gpus import GPUS
from sglang_fair.sim.shapes import SHAPES
from workloads.clients import SCENARIOS, Scale
from workloads.records import read
from workloads.report import ComparisonRow, number
from workloads.runs import options, present
from workloads.runs.pool import Pool
from workloads.simulation.comparison import SimulatedCase, SimulatedResult, capacity, carry_out, runs_of
from workloads.simulation.site import Site
from workloads.terminal import make_console, sigterm_as_ctrl_c
from workloads.traces import STAND_INS, find_trace

NAME = "sglang-fair simulate"
CASE, SITE, SCALE = SimulatedCase(), Site(), Scale()
"""Whose fields are the options' defaults."""

EPILOG = "Where several values are given, each combination is run on the same programs and arrivals."

CLUSTER = "The cluster"
"""Group of options in the help."""

ClusterOption = partial(Option, rich_help_panel=CLUSTER)
TrafficOption = partial(Option, rich_help_panel=options.TRAFFIC)
RunOption = partial(Option, rich_help_panel=options.RUNS)


def cluster_setting(name: str, help: str = "", unset: str = "") -> Any:
    """The option of a setting that a live cluster has too."""
    return option_of(table.Cluster, name, help=help, unset=unset, panel=CLUSTER)


def simulate(
    gpu: Annotated[str, cluster_setting("gpu", f"Of each replica: {', '.join(GPUS)}.")] = SITE.gpu,
    model: Annotated[str, ClusterOption(help=f"What it serves: {', '.join(SHAPES)}.")] = SITE.model,
    cost_model: Annotated[
        str | None,
        cluster_setting(
            "cost_model",
            "Times, memory and limits of a replica, as `sglang-fair calibrate` measured them.",
            unset="by GPU and model",
        ),
    ] = None,
    kv_tokens: Annotated[
        int | None, option_of(table.Replica, "kv_tokens", unset="by the GPU", panel=CLUSTER)
    ] = None,
    max_running: Annotated[int | None, option_of(table.Replica, "max_running", panel=CLUSTER)] = None,
    chunked_prefill: Annotated[
        int | None, ClusterOption(metavar="N", help="Prompt tokens in one step.")
    ] = None,
    replicas: Annotated[str, ClusterOption(metavar="N,...", help="One number, or several to compare.")] = "2",
    schedulers: options.Schedulers = options.DEFAULT_SCHEDULERS,
    quantum: Annotated[
        str,
        ClusterOption(metavar="UNITS,...", help="DLPM's and DRR's, per client. [default: the policy's]"),
    ] = "",
    worker_quantum: Annotated[
        str, ClusterOption(metavar="UNITS,...", help="D2LPM's. [default: the router's]")
    ] = "",
    policy_options: Annotated[
        list[str] | None,
        ClusterOption(
            metavar="POLICY:KEY=VALUE,...",
            help="A policy's other options, as dlpm:patience=64; repeatable.",
        ),
    ] = None,
    placement_options: Annotated[
        list[str] | None,
        ClusterOption(
            metavar="PLACEMENT:KEY=VALUE,...",
            help="A placement's other options, as d2lpm:cache_threshold=0.3; repeatable.",
        ),
    ] = None,
    cost: Annotated[str, cluster_setting("cost")] = SITE.cost,
    payer: Annotated[str, cluster_setting("payer")] = SITE.payer,
    stall_ms: Annotated[float, cluster_setting("stall_ms")] = SITE.stall_ms,
    target_tpot_ms: Annotated[float | None, cluster_setting("target_tpot_ms")] = table.Cluster.target_tpot_ms,
    client_weights: Annotated[Mapping[str, float] | None, cluster_setting("client_weights")] = None,
    cache_share: Annotated[str, cluster_setting("cache_share")] = "off",
    hop: Annotated[
        float | None, ClusterOption(metavar="S", help="Network time of a request, both ways.")
    ] = None,
    workloads: Annotated[
        str | None,
        TrafficOption(
            metavar="W,...",
            help=f"Of {', '.join(SCENARIOS)}; {', '.join(STAND_INS)}: made-up traces with the statistics of real ones. "
            f"[default: {','.join(CASE.workloads)}, with --trace none]",
        ),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        TrafficOption(
            metavar="FILE",
            help="Replay JSON lines of arrival_s, client, input_tokens, output_tokens, or Mooncake's; repeatable.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        TrafficOption(
            metavar="R",
            help="Programs/s of each client [default: by the load]; of a trace, all requests/s [default: its own].",
        ),
    ] = None,
    load: options.LoadPart = CASE.load,
    cv: Annotated[
        float,
        TrafficOption(help="Variation of the gaps between arrivals: 1 Poisson, 0 even, more: bursts."),
    ] = CASE.cv,
    duration: options.Duration = CASE.duration_s,
    drain: options.Drain = CASE.drain_s,
    good_clients: options.GoodClients = SCALE.good_clients,
    question_tokens: options.QuestionTokens = SCALE.question_tokens or 0,
    thought_tokens: options.ThoughtTokens = SCALE.thought_tokens,
    article_tokens: options.ArticleTokens = SCALE.article_tokens or 0,
    judgement_tokens: options.JudgementTokens = SCALE.judgement_tokens,
    repeats: options.Repeats = CASE.repeats,
    seed: options.Seed = CASE.seed,
    jobs: Annotated[int, RunOption(metavar="N", help="Processes.")] = cores(),
    out: Annotated[
        Path | None,
        RunOption(metavar="DIR", help="Records, plots and summary.json go there. [default: nowhere]"),
    ] = None,
    json_file: options.JsonFile = None,
) -> int:
    """Compare schedulers, quanta and numbers of replicas in virtual time.

    The router and the policies are those of the live cluster. The engines are modelled: a cost model says how long
    each of their steps takes.

    Exit code 0, 2 for bad input, 130 after Ctrl-C.
    """
    given: dict[str, Any] = {
        "cost": cost,
        "payer": payer,
        "stall_ms": stall_ms,
        "target_tpot_ms": target_tpot_ms,
        "cache_share": cache_share == "on",
        "kv_tokens": kv_tokens,
        "max_running": max_running,
        "chunked_prefill_tokens": chunked_prefill,
        "hop_s": hop,
    }
    try:
        scale = Scale(
            good_clients=good_clients,
            question_tokens=question_tokens,
            thought_tokens=thought_tokens,
            article_tokens=article_tokens,
            judgement_tokens=judgement_tokens,
        )
        sizes = tuple(_whole("--replicas", size) for size in options.numbers("--replicas", replicas))
        if not sizes:
            raise ValueError("--replicas: no number is given")
        if jobs < 1:
            raise ValueError(f"--jobs must be at least 1, not {jobs}")
        given |= {"replicas": sizes[0], "client_weights": client_weights or {}}
        if cost_model is not None:
            site = Site.calibrated(Path(cost_model), **given)
        else:
            site = Site(gpu=gpu, model=model, **{k: v for k, v in given.items() if v is not None})
        traces = _traces(trace or [])
        default_workloads = () if traces else CASE.workloads
        named = default_workloads if workloads is None else options.names(workloads)
        all_workloads = tuple(dict.fromkeys((*named, *traces)))
        case = SimulatedCase(
            site=site,
            schedulers=options.names(schedulers),
            workloads=all_workloads,
            traces=traces,
            replicas=sizes,
            quanta=options.numbers("--quantum", quantum) or (None,),
            worker_quanta=options.numbers("--worker-quantum", worker_quantum) or (None,),
            policy_options=options.options_by_name("--policy-options", policy_options or []),
            placement_options={
                placement: parse_options(text)
                for placement, text in options.options_by_name(
                    "--placement-options", placement_options or []
                ).items()
            },
            repeats=repeats,
            duration_s=duration,
            drain_s=drain,
            seed=seed,
            load=load,
            cv=cv,
            rates_per_s={} if rate is None else dict.fromkeys(all_workloads, rate),
            scale=scale,
        )
        if out is not None and (out / "summary.json").exists():
            raise ValueError(f"{out} holds a comparison already")
        compare(case, 0 if jobs == 1 else jobs, out, json_file, make_console())
    except (OSError, ValueError, RuntimeError) as error:
        raise Mistake(str(error)) from None
    return 0


def compare(
    case: SimulatedCase, processes: int, folder: Path | None, json_file: Path | None, console: Console
) -> None:
    """Make all runs of the case, and show what they come to."""
    with sigterm_as_ctrl_c(), Pool(processes) as pool:
        began_s = time.monotonic()
        case = _with_rates(case, pool, console)
        results = _carried_out(case, folder, pool, console)
        show(case, results, time.monotonic() - began_s, console, folder=folder, json_file=json_file)


def _with_rates(case: SimulatedCase, pool: Pool, console: Console) -> SimulatedCase:
    """The case with an arrival rate for each scenario; measured where none is given."""
    missing = [name for name in case.workloads if name not in case.rates_per_s and case.is_scenario(name)]
    if missing:
        console.print(f"measuring the capacity for {', '.join(missing)}", highlight=False)
    for workload, found in zip(missing, pool.results(partial(capacity, case), missing), strict=True):
        case = case.with_capacity(workload, found)
        console.print(
            f"{workload}: capacity {number(found)}, each client {number(case.rates_per_s[workload])} programs/s",
            highlight=False,
        )
    return case


def _carried_out(
    case: SimulatedCase, folder: Path | None, pool: Pool, console: Console
) -> list[SimulatedResult]:
    """Make all runs, with a line for each as it ends."""
    runs, done = runs_of(case, folder), 0

    def say(result: SimulatedResult) -> None:
        nonlocal done
        done += 1
        key = result.run.key
        console.print(
            f"[{done}/{len(runs)}] {key.scheduler} on {key.workload}, seed {case.seed_of(key.repeat)}: "
            f"{result.simulated_s:.0f} s in {result.wall_s:.1f} s, {number(result.speed)} times real time",
            highlight=False,
            markup=False,
        )

    return pool.results(carry_out, runs, say)


def show(
    case: SimulatedCase,
    results: Sequence[SimulatedResult],
    wall_s: float,
    console: Console,
    *,
    folder: Path | None = None,
    json_file: Path | None = None,
) -> None:
    """Tables, files and the last line."""
    summaries = [result.summary for result in results]
    table = present.print_tables(summaries, console)
    simulated_s, speed = sum(one.simulated_s for one in results), median(one.speed for one in results)
    console.print(
        f"{number(simulated_s)} s of {case.site.engine} simulated in {number(wall_s)} s; "
        f"one run {number(speed)} times faster than real time (median)",
        highlight=False,
    )
    line = json_line(case, table, speed)
    if folder is not None:
        runs = [read(result.run.path) for result in results if result.run.path]
        present.keep(folder, runs, summaries, line, {"case": asdict(case)}, console)
    present.print_line(line, json_file)


def json_line(case: SimulatedCase, table: Sequence[ComparisonRow], speed: float) -> dict[str, Any]:
    """The comparison for programs."""
    return {
        "bench": "simulate",
        "rows": list(table),
        "versions": versions(),
        "seed": case.seed,
        "rates_per_s": dict(case.rates_per_s),
        "times_real_time": speed,
    }


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
    return run(simulate, NAME, arguments, epilog=EPILOG)
