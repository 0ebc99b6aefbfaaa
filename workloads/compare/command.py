"""`sglang-fair compare`: schedulers on live clusters of this machine.

python -m workloads.compare --duration 15 --repeats 2
python -m workloads.compare --resume results/compare-20260131-120000     # only what is missing
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from sglang_fair.common.provenance import versions
from sglang_fair.models.catalog import EMULATED
from sglang_fair.settings.commands import Mistake, Option, PassedOn, run
from sglang_fair.settings.program import option_of
from sglang_fair.settings.setting import settings_of
from sglang_fair.settings.table import Cluster
from workloads.clients import SCENARIOS, SMALL, Scale
from workloads.compare.cluster import ClusterError, SpawnCluster, StartCluster
from workloads.compare.comparison import Comparison, LiveCase
from workloads.compare.probe import Probe
from workloads.datasets import read_codec
from workloads.measures import summarize
from workloads.records import Run
from workloads.report import ComparisonRow, number
from workloads.runs import options, present
from workloads.runs.case import EACH_PLACEMENT
from workloads.terminal import make_console, sigterm_as_ctrl_c

NAME = "sglang-fair compare"
CASE = LiveCase()
"""Whose fields are the options' defaults."""

EPILOG = (
    "Arguments behind -- go to every replica's SGLang server "
    f"(default: {' '.join(CASE.replica_arguments)}, for an emulated engine none)."
)


def compare(
    workloads: Annotated[
        str, Option(metavar="W,...", help=f"Comma separated, of {', '.join(SCENARIOS)}.")
    ] = ",".join(CASE.workloads),
    s2: Annotated[bool, Option("--s2", help="Also tot-s2 and judge-s2: longer prefixes.")] = False,
    schedulers: options.Schedulers = options.DEFAULT_SCHEDULERS,
    placements: Annotated[
        bool, Option("--placements", help="Every placement over dlpm, in place of --schedulers.")
    ] = False,
    duration: options.Duration = CASE.duration_s,
    drain: options.Drain = CASE.drain_s,
    repeats: options.Repeats = CASE.repeats,
    seed: options.Seed = CASE.seed,
    load: options.LoadPart = CASE.load,
    rates: Annotated[
        str, Option(metavar="W=R,...", help="Programs/s of each client, in place of a measured capacity.")
    ] = "",
    model: Annotated[str, option_of(Cluster, "model")] = CASE.model,
    tokenizer: Annotated[
        Path | None,
        Option(metavar="DIR", help="Folder with tokenizer.json. [default: the model's]", show_default=False),
    ] = None,
    device: Annotated[str, option_of(Cluster, "device")] = CASE.device,
    engine: Annotated[str, option_of(Cluster, "engine")] = CASE.engine,
    gpu: Annotated[str | None, option_of(Cluster, "gpu")] = CASE.gpu,
    cost_model: Annotated[str | None, option_of(Cluster, "cost_model", unset="published figures")] = (
        CASE.cost_model
    ),
    time_scale: Annotated[float, option_of(Cluster, "time_scale")] = CASE.time_scale,
    replicas: Annotated[int, option_of(Cluster, "replicas")] = CASE.replicas,
    quantum: Annotated[float | None, option_of(Cluster, "quantum")] = CASE.quantum,
    worker_quantum: Annotated[float | None, option_of(Cluster, "worker_quantum")] = CASE.worker_quantum,
    good_clients: options.GoodClients = CASE.scale.good_clients,
    question_tokens: options.QuestionTokens = CASE.scale.question_tokens or 0,
    thought_tokens: options.ThoughtTokens = CASE.scale.thought_tokens,
    article_tokens: options.ArticleTokens = CASE.scale.article_tokens or 0,
    judgement_tokens: options.JudgementTokens = CASE.scale.judgement_tokens,
    paper_scale: Annotated[bool, Option("--paper-scale", help="DLPM's own lengths, for real GPUs.")] = False,
    json_file: options.JsonFile = None,
    out: Annotated[
        Path | None,
        Option(metavar="DIR", help="Folder of the results. [default: results/compare-TIME]"),
    ] = None,
    resume: Annotated[
        Path | None, Option(metavar="DIR", help="Go on with the comparison in DIR, by its own case.")
    ] = None,
    replica_arguments: PassedOn = None,
) -> int:
    """Compare schedulers on programs of several clients, one of which misbehaves.

    Exit code 0, 1 if a cluster or a run failed, 2 for bad input, 130 after Ctrl-C.
    """
    own_arguments = () if engine == "emulated" else CASE.replica_arguments
    stamp = datetime.now(UTC).astimezone().strftime("%Y%m%d-%H%M%S")
    folder = resume or out or Path("results") / f"compare-{stamp}"
    try:
        scale = replace(
            SMALL,
            good_clients=good_clients,
            question_tokens=question_tokens,
            thought_tokens=thought_tokens,
            article_tokens=article_tokens,
            judgement_tokens=judgement_tokens,
        )
        if resume:
            kept = json.loads((folder / "case.json").read_text(encoding="utf-8"))
            case = LiveCase.from_json(json.dumps(kept["case"]))
        else:
            if (folder / "case.json").exists():
                raise ValueError(f"{folder} holds a comparison; --resume {folder} goes on with it")
            case = LiveCase(
                engine=engine,
                workloads=(*dict.fromkeys(workloads.split(",") + (["tot-s2", "judge-s2"] if s2 else [])),),
                schedulers=EACH_PLACEMENT if placements else options.names(schedulers),
                repeats=repeats,
                duration_s=duration,
                drain_s=drain,
                seed=seed,
                load=load,
                rates_per_s=options.rates(rates),
                scale=Scale(good_clients=good_clients) if paper_scale else scale,
                model=model,
                device=device,
                gpu=gpu,
                cost_model=cost_model,
                time_scale=time_scale,
                replicas=replicas,
                quantum=quantum,
                worker_quantum=worker_quantum,
                replica_arguments=tuple(replica_arguments or own_arguments),
            )
        prepared = EMULATED + case.model if case.engine == "emulated" else case.model
        codec = read_codec(tokenizer or model_folder(prepared))
        comparison = Comparison(case, folder, spawn(case, folder), codec, make_console())
    except (ClusterError, OSError, ValueError) as error:
        raise Mistake(str(error)) from None
    return carry_out(comparison, json_file)


def carry_out(comparison: Comparison, json_file: Path | None) -> int:
    """Make the runs that are missing, and show them all. Returns the exit code."""
    try:
        with sigterm_as_ctrl_c():
            runs = comparison.run()
            show(comparison, runs, comparison.console, json_file)
    except (ClusterError, OSError, ValueError, RuntimeError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted; --resume goes on with what is missing", file=sys.stderr)
        return 130
    return 0


def show(comparison: Comparison, runs: Sequence[Run], console: Console, json_file: Path | None) -> None:
    """Tables, plots and the last line."""
    summaries = [summarize(run) for run in runs]
    table = present.print_tables(summaries, console)
    console.print(costs_line(comparison.costs), highlight=False)
    line = json_line(table, versions(), comparison.case.seed)
    costs = {"costs": comparison.costs_json()}
    present.keep(comparison.folder, runs, summaries, line, costs, console)
    present.print_line(line, json_file)


def json_line(table: Sequence[ComparisonRow], versions: Mapping[str, str], seed: int) -> dict[str, Any]:
    """The comparison for programs."""
    return {"bench": "compare", "rows": list(table), "versions": dict(versions), "seed": seed}


def costs_line(costs: Probe | None) -> str:
    """How far the ratio of costs limits what the table can show."""
    if costs is None:
        return "cost of a decoded token against a prefilled one: not measured"
    return (
        f"on one replica here a decoded token costs {number(costs.ratio)} prefilled ones "
        f"({costs.decode_s_per_token * 1e6:.0f} µs at batch {costs.batch}, "
        f"{costs.prefill_s_per_token * 1e6:.0f} µs); on an A100 with an 8B model about 3. "
        "The larger it is, the less a cached prefix can save."
    )


def model_folder(model: str) -> Path | None:
    """The folder of the model, prepared if it is one of ours. None if it is not on this machine."""
    if Path(model).is_dir():
        return Path(model)
    command = [sys.executable, "-m", "sglang_fair.models", model]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    folder = Path(found.stdout.strip()) if found.returncode == 0 and found.stdout.strip() else None
    return folder if folder is not None and folder.is_dir() else None


def spawn(case: LiveCase, folder: Path) -> StartCluster:
    """What starts the case's clusters: our own command."""
    given = {name: getattr(case, name, None) for name in settings_of(Cluster)}
    settings = {name: value for name, value in given.items() if value is not None}
    return SpawnCluster(Cluster(**settings, extra=case.replica_arguments), folder / "logs")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run(compare, NAME, arguments, epilog=EPILOG)
