"""`sglang-fair compare`: schedulers on live clusters of this machine, one client misbehaving.

python -m workloads.compare --duration 15 --repeats 2
python -m workloads.compare --resume results/compare-20260131-120000     # only what is missing
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from sglang_fair.models.catalog import EMULATED
from sglang_fair.settings import table
from sglang_fair.settings.commands import Option, PassedOn, run
from sglang_fair.settings.program import option_of
from sglang_fair.settings.setting import settings_of
from workloads.clients import SCENARIOS, SMALL, Scale
from workloads.clusters import ClusterError, SpawnCluster, StartCluster
from workloads.datasets import read_codec
from workloads.measures import summarize
from workloads.report import number
from workloads.runs import options
from workloads.runs.case import EACH_PLACEMENT
from workloads.runs.comparison import show
from workloads.runs.live import Comparison, LiveCase
from workloads.runs.probe import Probe
from workloads.terminal import make_console, sigterm_as_ctrl_c

NAME = "sglang-fair compare"
CASE = LiveCase()
"""Whose fields are the options' defaults."""

EPILOG = (
    "Arguments behind -- go to every replica's SGLang server "
    f"(default: {' '.join(CASE.replica_arguments)}, for an emulated engine none)."
)


def of_cluster(name: str, unset: str = "") -> Any:
    return option_of(table.Cluster, name, unset=unset)


@dataclass(frozen=True, kw_only=True)
class CompareOptions(options.ComparisonOptions):
    """Those of the clusters are fields of the case, too."""

    workloads: Annotated[
        str, Option(metavar="W,...", help=f"Comma separated, of {', '.join(SCENARIOS)}.")
    ] = ",".join(CASE.workloads)
    s2: Annotated[bool, Option("--s2", help="Also tot-s2 and judge-s2: longer prefixes.")] = False
    placements: Annotated[
        bool, Option("--placements", help="Every placement over dlpm, in place of --schedulers.")
    ] = False
    question_tokens: options.QuestionTokens = SMALL.question_tokens or 0
    thought_tokens: options.ThoughtTokens = SMALL.thought_tokens
    article_tokens: options.ArticleTokens = SMALL.article_tokens or 0
    judgement_tokens: options.JudgementTokens = SMALL.judgement_tokens
    rates: Annotated[
        str, Option(metavar="W=R,...", help="Programs/s of each client, in place of a measured capacity.")
    ] = ""
    model: Annotated[str, of_cluster("model")] = CASE.model
    tokenizer: Annotated[
        Path | None,
        Option(metavar="DIR", help="Folder with tokenizer.json. [default: the model's]", show_default=False),
    ] = None
    device: Annotated[str, of_cluster("device")] = CASE.device
    engine: Annotated[str, of_cluster("engine")] = CASE.engine
    gpu: Annotated[str | None, of_cluster("gpu")] = CASE.gpu
    cost_model: Annotated[str | None, of_cluster("cost_model", unset="published figures")] = CASE.cost_model
    time_scale: Annotated[float, of_cluster("time_scale")] = CASE.time_scale
    replicas: Annotated[int, of_cluster("replicas")] = CASE.replicas
    quantum: Annotated[float | None, of_cluster("quantum")] = CASE.quantum
    worker_quantum: Annotated[float | None, of_cluster("worker_quantum")] = CASE.worker_quantum
    paper_scale: Annotated[bool, Option("--paper-scale", help="DLPM's own lengths, for real GPUs.")] = False
    out: Annotated[
        Path | None,
        Option(metavar="DIR", help="Folder of the results. [default: results/compare-TIME]"),
    ] = None
    resume: Annotated[
        Path | None, Option(metavar="DIR", help="Go on with the comparison in DIR, by its own case.")
    ] = None
    replica_arguments: PassedOn = None

    @property
    def folder(self) -> Path:
        stamp = datetime.now(UTC).astimezone().strftime("%Y%m%d-%H%M%S")
        return self.resume or self.out or Path("results") / f"compare-{stamp}"

    def new_case(self) -> LiveCase:
        """Raises ValueError."""
        own_arguments = () if self.engine == "emulated" else CASE.replica_arguments
        of_clusters = [
            "engine",
            "model",
            "device",
            "gpu",
            "cost_model",
            "time_scale",
            "replicas",
            "quantum",
            "worker_quantum",
        ]
        case = self.case(
            SMALL,
            workloads=options.names(self.workloads + (",tot-s2,judge-s2" if self.s2 else "")),
            rates_per_s=options.rates(self.rates),
            replica_arguments=tuple(self.replica_arguments or own_arguments),
            **{name: getattr(self, name) for name in of_clusters},
        )
        if self.placements:
            case["schedulers"] = EACH_PLACEMENT
        if self.paper_scale:
            case["scale"] = Scale(good_clients=self.good_clients)
        return LiveCase(**case)


def prepare(given: CompareOptions, folder: Path) -> Comparison:
    """The comparison in `folder`, new or begun before. Raises ValueError, OSError and ClusterError."""
    path = folder / "case.json"
    if given.resume:
        case = LiveCase.from_json(json.loads(path.read_text(encoding="utf-8"))["case"])
    elif path.exists():
        raise ValueError(f"{folder} holds a comparison; --resume {folder} goes on with it")
    else:
        case = given.new_case()
    prepared = EMULATED + case.model if case.engine == "emulated" else case.model
    codec = read_codec(given.tokenizer or model_folder(prepared))
    return Comparison(case, folder, spawn(case, folder), codec, make_console())


def compare(given: CompareOptions) -> int:
    """Compare schedulers on programs of several clients, one of which misbehaves.

    Exit code 0, 1 if a cluster or a run failed, 2 for bad input, 130 after Ctrl-C.
    """
    comparison = prepare(given, given.folder)
    try:
        with sigterm_as_ctrl_c():
            runs = comparison.run()
            show(
                "compare",
                runs,
                [summarize(run) for run in runs],
                comparison.console,
                note=costs_line(comparison.costs),
                seed=comparison.case.seed,
                more={},
                folder=comparison.folder,
                kept={"costs": comparison.costs_json()},
                json_file=given.json_file,
            )
    except (ClusterError, OSError, ValueError, RuntimeError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted; --resume {comparison.folder} goes on", file=sys.stderr)
        return 130
    return 0


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
    given = {name: getattr(case, name, None) for name in settings_of(table.Cluster)}
    settings = {name: value for name, value in given.items() if value is not None}
    return SpawnCluster(table.Cluster(**settings, extra=case.replica_arguments), folder / "logs")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run(options.command(CompareOptions, compare), NAME, arguments, epilog=EPILOG)


if __name__ == "__main__":
    sys.exit(main())
