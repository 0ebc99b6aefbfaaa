"""`sglang-fair simulate`: schedulers, quanta and numbers of replicas on GPUs that one need not have.

sglang-fair simulate --gpu h100 --model llama-3.1-8b --replicas 2,4,8 --rate 0.5
sglang-fair simulate --schedulers d2lpm+dlpm --quantum 500,2000,8000 --worker-quantum 5000,20000
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.console import Console

from router.placement import PLACEMENTS, parse_options
from sglang_fair.common.provenance import cores, machine, versions
from sglang_fair.core import POLICIES
from sglang_fair.sim.gpus import GPUS
from sglang_fair.sim.shapes import SHAPES
from workloads.clients import SCENARIOS, Scale
from workloads.compare.runs import LOADS
from workloads.medians import Row, ratios, rows
from workloads.records import read
from workloads.report import comparison_table, number, ratio_table
from workloads.simulation.comparison import Came, Case, Processes, turns, with_rates
from workloads.simulation.site import Site
from workloads.terminal import FILE_COLUMNS, interrupted
from workloads.traces import STAND_INS, find_trace

OURS = "d2lpm+dlpm"


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Says defaults, where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, "", []) else super()._get_help_string(action)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    case, site, scale = Case(), Site(), Scale()
    loads = ", ".join(f"{app} {load:g}" for app, load in LOADS.items())
    parser = argparse.ArgumentParser(
        prog="sglang-fair simulate",
        description="Compare schedulers, quanta and numbers of replicas in the simulator: the router and the "
        "policies of the live cluster, and engines whose steps take as long as a cost model says.",
        epilog="Where several values are given, each combination is run on the same programs and arrivals.",
        formatter_class=_Help,
    )
    what = parser.add_argument_group("the cluster").add_argument
    what("--gpu", default=site.gpu, help="of each replica: " + ", ".join(GPUS))
    what("--model", default=site.model, help="what it serves: " + ", ".join(SHAPES))
    what(
        "--cost-model",
        type=Path,
        metavar="FILE",
        help="what `sglang-fair calibrate` wrote: times, memory, limits",
    )
    what(
        "--kv-tokens", type=int, metavar="N", help="tokens that a replica's cache holds (default: by the GPU)"
    )
    what("--max-running", type=int, metavar="N", help="requests that a replica runs at once")
    what("--chunked-prefill", type=int, metavar="N", help="prompt tokens in one step")
    what("--replicas", default="2", metavar="N,...", help="one number, or several to compare")
    what(
        "--schedulers",
        default=",".join(case.schedulers),
        metavar="A+B,...",
        help=f"PLACEMENT+POLICY, of {', '.join(PLACEMENTS)} and {', '.join(POLICIES)}",
    )
    what("--quantum", default="", metavar="UNITS,...", help="DLPM's and DRR's, per client (default: 2000)")
    what("--worker-quantum", default="", metavar="UNITS,...", help="D2LPM's (default: the router's)")
    what(
        "--policy-options",
        action="append",
        default=[],
        metavar="POLICY:KEY=VALUE,...",
        help="a policy's other options, as dlpm:patience=64; repeatable",
    )
    what(
        "--placement-options",
        action="append",
        default=[],
        metavar="PLACEMENT:KEY=VALUE,...",
        help="a placement's other options, as d2lpm:cache_threshold=0.3; repeatable",
    )
    what("--cost", default=site.cost, help="what service costs, as for `sglang-fair cluster`")
    what("--payer", default=site.payer, help="who pays for a prefix that clients share")
    what("--client-weights", default="{}", metavar="JSON", help='shares, for example {"bad": 0.5}')
    what("--hop", type=float, metavar="S", help="network time of a request, both ways")
    load = parser.add_argument_group("the traffic").add_argument
    load(
        "--workloads",
        metavar="W,...",
        help=f"of {', '.join(SCENARIOS)}; {', '.join(STAND_INS)}: made-up traces with the statistics of real ones "
        f"(default: {','.join(case.workloads)}, with --trace none)",
    )
    load(
        "--trace",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="replay JSON lines of arrival_s, client, input_tokens, output_tokens, or Mooncake's; repeatable",
    )
    load(
        "--rate",
        type=float,
        metavar="R",
        help="programs/s of each client (default: by the load); of a trace, all requests/s (default: its own)",
    )
    load(
        "--load",
        type=float,
        metavar="PART",
        help="a client's part of its equal share of the measured capacity of the first number of replicas "
        f"(default: {loads})",
    )
    load(
        "--cv",
        type=float,
        default=case.cv,
        help="of the gaps between arrivals: 1 Poisson, 0 even, more: bursts",
    )
    load("--duration", type=float, default=case.duration_s, metavar="S", help="virtual seconds of arrivals")
    load("--drain", type=float, default=case.drain_s, metavar="S", help="longest wait for good clients")
    load("--good-clients", type=int, default=scale.good_clients, metavar="N", help="beside the bad one")
    load("--question-tokens", type=int, default=scale.question_tokens, metavar="N", help="tree of thoughts")
    load("--thought-tokens", type=int, default=scale.thought_tokens, metavar="N", help="tree of thoughts")
    load("--article-tokens", type=int, default=scale.article_tokens, metavar="N", help="judge")
    load("--judgement-tokens", type=int, default=scale.judgement_tokens, metavar="N", help="judge")
    run = parser.add_argument_group("the runs").add_argument
    run("--repeats", type=int, default=case.repeats, metavar="N", help="runs of each, medians are shown")
    run("--seed", type=int, default=case.seed, metavar="N", help="another one is other programs and arrivals")
    run("--jobs", type=int, default=cores(), metavar="N", help="processes")
    run("--out", type=Path, metavar="DIR", help="records, plots and summary.json go there (default: nowhere)")
    run("--json", type=Path, metavar="FILE", help="write the last line there as well")
    arguments = parser.parse_args(argv)
    return arguments


def case_of(arguments: argparse.Namespace) -> Case:
    """The case that the command line asks for. Raises ValueError in one line."""
    weights = _weights(arguments.client_weights)
    replicas = tuple(int(count) for count in _numbers("--replicas", arguments.replicas, whole=True))
    if not replicas:
        raise ValueError("--replicas: no number is given")
    traces = {path.stem: path for path in arguments.trace}
    if len(traces) < len(arguments.trace):
        raise ValueError("two traces have the same name")
    named = (
        arguments.workloads
        if arguments.workloads is not None
        else ""
        if traces
        else ",".join(Case().workloads)
    )
    workloads = (*dict.fromkeys(name for name in named.split(",") if name), *traces)
    stand_ins = {name: None for name in workloads if name in STAND_INS and name not in traces}
    for path in traces.values():
        find_trace(str(path))
    given = {
        "replicas": replicas[0],
        "cost": arguments.cost,
        "payer": arguments.payer,
        "client_weights": weights,
        "kv_tokens": arguments.kv_tokens,
        "max_running": arguments.max_running,
        "chunked_prefill_tokens": arguments.chunked_prefill,
        "hop_s": arguments.hop,
    }
    if arguments.cost_model is not None:
        site = Site.calibrated(arguments.cost_model, **given)
    else:
        site = Site(
            gpu=arguments.gpu, model=arguments.model, **{k: v for k, v in given.items() if v is not None}
        )
    return Case(
        site=site,
        schedulers=tuple(name for name in arguments.schedulers.split(",") if name),
        workloads=workloads,
        traces={**stand_ins, **traces},
        replicas=replicas,
        quanta=_numbers("--quantum", arguments.quantum) or (None,),
        worker_quanta=_numbers("--worker-quantum", arguments.worker_quantum) or (None,),
        policy_options=_options_of("--policy-options", arguments.policy_options),
        placement_options={
            placement: parse_options(text)
            for placement, text in _options_of("--placement-options", arguments.placement_options).items()
        },
        repeats=arguments.repeats,
        duration_s=arguments.duration,
        drain_s=arguments.drain,
        seed=arguments.seed,
        load=arguments.load,
        cv=arguments.cv,
        rates_per_s=dict.fromkeys(workloads, arguments.rate) if arguments.rate is not None else {},
        scale=Scale(
            good_clients=arguments.good_clients,
            question_tokens=arguments.question_tokens,
            thought_tokens=arguments.thought_tokens,
            article_tokens=arguments.article_tokens,
            judgement_tokens=arguments.judgement_tokens,
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    arguments = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else FILE_COLUMNS)
    previous = signal.signal(signal.SIGTERM, interrupted)
    processes: Processes | None = None
    try:
        case = case_of(arguments)
        if arguments.out is not None and (arguments.out / "summary.json").exists():
            raise ValueError(f"{arguments.out} holds a comparison already")
        processes = Processes(arguments.jobs)
        began_s = time.monotonic()
        case = _measured(case, processes, console)
        came = _carried_out(case, arguments.out, processes, console)
        wall_s = time.monotonic() - began_s
        present(case, came, wall_s, console, folder=arguments.out, json_file=arguments.json)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("simulate: interrupted", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
        if processes is not None:
            processes.close()
    return 0


def _measured(case: Case, processes: Processes, console: Console) -> Case:
    """With a rate for each workload."""
    missing = [name for name in case.workloads if name not in case.rates_per_s and name not in case.traces]
    if missing:
        console.print(f"measuring the capacity for {', '.join(missing)}", highlight=False)
    for workload, found in zip(missing, processes.capacities(case, missing), strict=True):
        case = with_rates(case, workload, found)
        console.print(
            f"{workload}: capacity {number(found)}, each client {number(case.rates_per_s[workload])} programs/s",
            highlight=False,
        )
    return case


def _carried_out(case: Case, folder: Path | None, processes: Processes, console: Console) -> list[Came]:
    due, done = turns(case, folder), 0

    def came(one: Came) -> None:
        nonlocal done
        done += 1
        console.print(
            f"[{done}/{len(due)}] {one.turn.variant.name} on {one.turn.workload}, seed {case.seed}."
            f"{one.turn.repeat}: {one.simulated_s:.0f} s in {one.wall_s:.1f} s, {number(one.speed)} times real time",
            highlight=False,
            markup=False,
        )

    return processes.run(due, came)


def present(
    case: Case,
    came: Sequence[Came],
    wall_s: float,
    console: Console,
    *,
    folder: Path | None = None,
    json_file: Path | None = None,
) -> None:
    """Tables, files and the last line."""
    summaries = [one.summary for one in came]
    table = rows(summaries)
    console.print(comparison_table(table, summaries))
    names = [variant.name for variant in case.variants()]
    if OURS in names and len(names) > 1:
        console.print(ratio_table(table, summaries, OURS))
    simulated_s, speed = sum(one.simulated_s for one in came), median(one.speed for one in came)
    console.print(
        f"{number(simulated_s)} s of {case.site.engine} simulated in {number(wall_s)} s; "
        f"one run {number(speed)} times faster than real time (median)",
        highlight=False,
    )
    line = json_line(case, table, speed)
    if folder is not None:
        _keep(case, came, table, line, folder, console)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)


def json_line(case: Case, table: Sequence[Row], speed: float) -> str:
    """The comparison for programs, in one line."""
    return json.dumps(
        {
            "bench": "simulate",
            "rows": list(table),
            "versions": versions(),
            "seed": case.seed,
            "rates_per_s": dict(case.rates_per_s),
            "times_real_time": speed,
        }
    )


def _keep(
    case: Case, came: Sequence[Came], table: Sequence[Row], line: str, folder: Path, console: Console
) -> None:
    summaries = [one.summary for one in came]
    told = {
        "comparison": json.loads(line),
        "case": json.loads(json.dumps(asdict(case), default=str)),
        "ratios": ratios(table, summaries, OURS),
        "machine": machine(),
        "runs": [asdict(summary) for summary in summaries],
    }
    (folder / "summary.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    try:
        from workloads.plots import draw_all
    except ImportError as error:
        console.print(f"no plots: {error}", highlight=False)
    else:
        draw_all([read(one.turn.path) for one in came if one.turn.path], summaries, folder)
    console.print(f"records, plots and summary.json: {folder}", highlight=False, soft_wrap=True)


def _numbers(option: str, text: str, *, whole: bool = False) -> tuple[float, ...]:
    try:
        return tuple((int if whole else float)(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ValueError(f"{option} takes numbers, separated by commas, not {text!r}") from None


def _weights(text: str) -> Mapping[str, float]:
    try:
        weights = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--client-weights is not JSON: {error}") from None
    if not isinstance(weights, dict):
        raise ValueError(f"--client-weights maps clients to numbers, and is {text}")
    return weights


def _options_of(option: str, told: Sequence[str]) -> dict[str, str]:
    """By policy or placement."""
    options: dict[str, str] = {}
    for text in told:
        name, colon, values = text.partition(":")
        if not colon or not values:
            raise ValueError(f"{option} is NAME:KEY=VALUE,..., not {text!r}")
        options[name] = values
    return options
