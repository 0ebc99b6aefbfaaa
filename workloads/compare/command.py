"""Compare schedulers on the same programs, one of the clients misbehaving: a table, plots, a JSON line.

python -m workloads.compare --duration 15 --repeats 2
python -m workloads.compare --resume results/compare-20260131-120000     # only what is missing
"""

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from sglang_fair.common.provenance import machine, versions
from sglang_fair.models.catalog import EMULATED
from workloads.clients import SCENARIOS, SMALL, Scale
from workloads.compare.cluster import ClusterError, SpawnCluster, StartCluster
from workloads.compare.probe import Probe
from workloads.compare.runs import EACH_PLACEMENT, LOADS, Case, Comparison
from workloads.datasets import read_codec
from workloads.measures import Summary, summarize
from workloads.medians import Row, ratios, rows
from workloads.records import Run
from workloads.report import comparison_table, number, ratio_table
from workloads.terminal import FILE_COLUMNS, interrupted

OURS = "d2lpm+dlpm"


def json_line(table: Sequence[Row], versions: Mapping[str, str], seed: int) -> str:
    """The comparison for programs, in one line."""
    return json.dumps({"bench": "compare", "rows": list(table), "versions": dict(versions), "seed": seed})


def model_folder(model: str) -> Path | None:
    """Where the model lies here, prepared if it is one of ours. None if it is not on this machine."""
    if Path(model).is_dir():
        return Path(model)
    command = [sys.executable, "-m", "sglang_fair.models", model]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    folder = Path(found.stdout.strip()) if found.returncode == 0 and found.stdout.strip() else None
    return folder if folder is not None and folder.is_dir() else None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Arguments behind `--` go to every replica's SGLang server."""
    default = Case()
    loads = ", ".join(f"{app} {load:g}" for app, load in LOADS.items())
    parser = argparse.ArgumentParser(
        prog="sglang-fair compare",
        description="Compare schedulers on programs with one misbehaving client.",
        epilog="Arguments behind -- are given to every replica's SGLang server "
        f"(default: {' '.join(default.replica_arguments)}).",
    )
    say = parser.add_argument
    say(
        "--workloads", default=",".join(default.workloads), help="comma separated, of " + ", ".join(SCENARIOS)
    )
    say(
        "--s2",
        action="store_true",
        help="also tot-s2 and judge-s2: longer prefixes",
    )
    say(
        "--schedulers",
        metavar="A+B,...",
        default=",".join(default.schedulers),
        help=f"PLACEMENT+POLICY, comma separated (default: {', '.join(default.schedulers)})",
    )
    say(
        "--placements",
        dest="schedulers",
        action="store_const",
        const=",".join(EACH_PLACEMENT),
        help="every placement over dlpm",
    )
    say("--duration", type=float, default=default.duration_s, metavar="S", help="seconds of arrivals a run")
    say("--drain", type=float, default=default.drain_s, metavar="S", help="longest wait for good clients")
    say("--repeats", type=int, default=default.repeats, help="runs of each, medians are shown")
    say("--seed", type=int, default=default.seed)
    say("--load", type=float, help=f"a client's part of its equal share of capacity (default: {loads})")
    say("--rates", default="", metavar="W=R,...", help="programs/s of each client, instead of measuring")
    say("--model", default=default.model)
    say("--tokenizer", type=Path, metavar="DIR", help="folder with tokenizer.json (default: the model's)")
    say("--device", default=default.device, choices=("auto", "cpu", "cuda"))
    say("--engine", default=default.engine, choices=("auto", "cuda", "cpu", "emulated"))
    say("--gpu", help="of an emulated engine, whose --model is llama-3.1-8b or another that it knows")
    say("--cost-model", metavar="FILE", help="of an emulated engine, in place of published figures")
    say(
        "--time-scale", type=float, default=default.time_scale, metavar="FACTOR", help="of an emulated engine"
    )
    say("--replicas", type=int, default=default.replicas)
    say("--quantum", type=float, default=default.quantum, metavar="UNITS", help="DLPM's, per client")
    say("--worker-quantum", type=float, default=default.worker_quantum, metavar="UNITS", help="D2LPM's")
    say("--good-clients", type=int, default=default.scale.good_clients)
    say("--question-tokens", type=int, default=default.scale.question_tokens)
    say("--thought-tokens", type=int, default=default.scale.thought_tokens)
    say("--article-tokens", type=int, default=default.scale.article_tokens)
    say("--judgement-tokens", type=int, default=default.scale.judgement_tokens)
    say("--paper-scale", action="store_true", help="DLPM's own lengths, for real GPUs")
    say("--json", type=Path, metavar="FILE", help="write the last line there as well")
    say("--out", type=Path, metavar="DIR", help="folder of the results (default: results/compare-<time>)")
    say("--resume", type=Path, metavar="DIR", help="go on with the comparison in DIR, by its own case")
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:split])
    own = () if arguments.engine == "emulated" else default.replica_arguments
    arguments.replica_arguments = tuple(words[split + 1 :]) or own
    return arguments


def case_of(arguments: argparse.Namespace) -> Case:
    """The case that the command line asks for. Raises ValueError."""
    names = arguments.workloads.split(",") + (["tot-s2", "judge-s2"] if arguments.s2 else [])
    rates = dict(pair.partition("=")[::2] for pair in arguments.rates.split(",") if pair)
    scale = replace(
        SMALL,
        good_clients=arguments.good_clients,
        question_tokens=arguments.question_tokens,
        thought_tokens=arguments.thought_tokens,
        article_tokens=arguments.article_tokens,
        judgement_tokens=arguments.judgement_tokens,
    )
    return Case(
        workloads=tuple(dict.fromkeys(names)),
        schedulers=tuple(arguments.schedulers.split(",")),
        repeats=arguments.repeats,
        duration_s=arguments.duration,
        drain_s=arguments.drain,
        seed=arguments.seed,
        load=arguments.load,
        rates_per_s={name: float(rate) for name, rate in rates.items()},
        scale=Scale(good_clients=arguments.good_clients) if arguments.paper_scale else scale,
        model=arguments.model,
        device=arguments.device,
        engine=arguments.engine,
        gpu=arguments.gpu,
        cost_model=arguments.cost_model,
        time_scale=arguments.time_scale,
        replicas=arguments.replicas,
        quantum=arguments.quantum,
        worker_quantum=arguments.worker_quantum,
        replica_arguments=arguments.replica_arguments,
    )


def main(
    argv: Sequence[str] | None = None, start_cluster: Callable[[Case, Path], StartCluster] | None = None
) -> int:
    """The command. `start_cluster` makes what starts clusters, given the case and the results' folder."""
    arguments = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else FILE_COLUMNS)
    previous = signal.signal(signal.SIGTERM, interrupted)
    failed = 2  # as for other bad input, until the first run begins
    try:
        stamp = datetime.now(UTC).astimezone().strftime("%Y%m%d-%H%M%S")
        folder = arguments.resume or arguments.out or Path("results") / f"compare-{stamp}"
        if arguments.resume:
            told = json.loads((folder / "case.json").read_text(encoding="utf-8"))
            case = Case.from_json(json.dumps(told["case"]))
        else:
            if (folder / "case.json").exists():
                raise ValueError(f"{folder} holds a comparison; --resume {folder} goes on with it")
            case = case_of(arguments)
        model = EMULATED + case.model if case.engine == "emulated" else case.model
        codec = read_codec(arguments.tokenizer or model_folder(model))
        comparison = Comparison(case, folder, (start_cluster or spawn)(case, folder), codec, console)
        failed = 1
        runs = comparison.run()
        return present(comparison, runs, console, arguments.json)
    except (ClusterError, OSError, ValueError, RuntimeError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return failed
    except KeyboardInterrupt:
        print("compare: interrupted; --resume goes on with what is missing", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)


def spawn(case: Case, folder: Path) -> StartCluster:
    """Clusters by our own command."""
    return SpawnCluster(
        replicas=case.replicas,
        model=case.model,
        log_folder=folder / "logs",
        device=case.device,
        engine=case.engine,
        gpu=case.gpu,
        cost_model=case.cost_model,
        time_scale=case.time_scale,
        quantum=case.quantum,
        worker_quantum=case.worker_quantum,
        replica_arguments=case.replica_arguments,
    )


def present(comparison: Comparison, runs: Sequence[Run], console: Console, json_file: Path | None) -> int:
    """Tables, plots and the last line."""
    summaries: list[Summary] = [summarize(run) for run in runs]
    table = rows(summaries)
    console.print(comparison_table(table, summaries))
    if OURS in comparison.case.schedulers and len(comparison.case.schedulers) > 1:
        console.print(ratio_table(table, summaries, OURS))
    console.print(costs_line(comparison.costs), highlight=False)
    try:
        from workloads.plots import draw_all
    except ImportError as error:
        console.print(f"no plots: {error}", highlight=False)
    else:
        draw_all(runs, summaries, comparison.folder)
    line = json_line(table, versions(), comparison.case.seed)
    told = {
        "comparison": json.loads(line),
        "ratios": ratios(table, summaries, OURS),
        "costs": comparison.told_costs(),
        "machine": machine(),
        "runs": [asdict(summary) for summary in summaries],
    }
    (comparison.folder / "summary.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    console.print(f"records, plots and summary.json: {comparison.folder}", highlight=False, soft_wrap=True)
    print(line, flush=True)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(line + "\n", encoding="utf-8")
    return 0


def costs_line(costs: Probe | None) -> str:
    """What the ratio of costs allows to be read out of the table."""
    if costs is None:
        return "cost of a decoded token against a prefilled one: not measured"
    return (
        f"on one replica here a decoded token costs {number(costs.ratio)} prefilled ones "
        f"({costs.decode_s_per_token * 1e6:.0f} µs at batch {costs.batch}, "
        f"{costs.prefill_s_per_token * 1e6:.0f} µs); on an A100 with an 8B model about 3. "
        "The larger it is, the less a cached prefix can save."
    )
