"""`sglang-fair compare`: schedulers on live clusters of this machine, one client misbehaving.

python -m workloads.compare --duration 15 --repeats 2
python -m workloads.compare --resume results/compare-20260131-120000     # only what is missing
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from sglang_fair.models.catalog import EMULATED
from sglang_fair.settings import table
from sglang_fair.settings.commands import Option, PassedOn, command, run
from sglang_fair.settings.program import option_of
from sglang_fair.sim.gpu_clock import in_words
from workloads.clients import SCENARIOS, SMALL, Scale
from workloads.clusters import Cluster, ClusterError, SpawnCluster, StartCluster, drive, turns, verify
from workloads.load import read_codec
from workloads.measures import summarize
from workloads.programs import Codec
from workloads.records import Cell, Run
from workloads.report import client_table
from workloads.runs import comparison
from workloads.runs.comparison import EACH_PLACEMENT, Case, Comparison, completed, parts, summary_of
from workloads.session import Plan
from workloads.terminal import make_console, progress_view, sigterm_as_ctrl_c

NAME = "sglang-fair compare"

REPLICA_ARGUMENTS = ("--max-running-requests", "16")
OF_CLUSTERS = (
    "engine",
    "model",
    "device",
    "gpu",
    "cost_model",
    "time_scale",
    "replicas",
    "quantum",
    "worker_quantum",
)
"""Options that are settings of the clusters."""

EPILOG = (
    "Arguments behind -- go to every replica's SGLang server "
    f"(default: {' '.join(REPLICA_ARGUMENTS)}, for an emulated engine none)."
)


def of_cluster(name: str, unset: str = "") -> Any:
    return option_of(table.Cluster, name, unset=unset)


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Case):
    workloads: Annotated[
        str, Option(metavar="W,...", help=f"Comma separated, of {', '.join(SCENARIOS)}.")
    ] = "tot-s1,judge-s1"
    s2: Annotated[bool, Option("--s2", help="Also tot-s2 and judge-s2: longer prefixes.")] = False
    placements: Annotated[
        bool, Option("--placements", help="Every placement over dlpm, in place of --schedulers.")
    ] = False
    duration: comparison.Duration = 15.0
    drain: comparison.Drain = 5.0
    rates: Annotated[
        str, Option(metavar="W=R,...", help="Programs/s of each client, in place of a measured capacity.")
    ] = ""
    model: Annotated[str, of_cluster("model")] = "bench"
    tokenizer: Annotated[
        Path | None,
        Option(metavar="DIR", help="Folder with tokenizer.json. [default: the model's]", show_default=False),
    ] = None
    device: Annotated[str, of_cluster("device")] = table.Cluster.device
    engine: Annotated[str, of_cluster("engine")] = "auto"
    gpu: Annotated[str | None, of_cluster("gpu")] = None
    cost_model: Annotated[str | None, of_cluster("cost_model", unset="published figures")] = None
    time_scale: Annotated[float, of_cluster("time_scale")] = table.Cluster.time_scale
    replicas: Annotated[int, of_cluster("replicas")] = 2
    quantum: Annotated[float | None, of_cluster("quantum")] = 500.0
    worker_quantum: Annotated[float | None, of_cluster("worker_quantum")] = 16_000.0
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
    def workload_names(self) -> tuple[str, ...]:
        return comparison.names(self.workloads + (",tot-s2,judge-s2" if self.s2 else ""))

    @property
    def scheduler_names(self) -> tuple[str, ...]:
        return EACH_PLACEMENT if self.placements else super().scheduler_names

    @property
    def rates_given(self) -> Mapping[str, float]:
        return comparison.rates(self.rates)

    @property
    def base_scale(self) -> Scale:
        return Scale() if self.paper_scale else SMALL

    def resumed(self) -> "CompareOptions":
        """These, or those of the folder to go on in. Raises OSError and ValueError."""
        if self.resume is None:
            return self
        kept = json.loads((self.resume / "case.json").read_text(encoding="utf-8"))["case"]
        try:
            return CompareOptions(**kept, out=self.resume, json_file=self.json_file)
        except TypeError as error:
            raise ValueError(f"{self.resume}: not a comparison's case: {error}") from None


def compare(given: CompareOptions) -> int:
    """Compare schedulers on programs of several clients, one of which misbehaves.

    Exit code 0, 1 if a cluster or a run failed, 2 for bad input, 130 after Ctrl-C.
    """
    case = given.resumed()
    now = datetime.now(UTC).astimezone()
    folder = case.out or Path("results") / f"compare-{now:%Y%m%d-%H%M%S}"
    if not given.resume and (folder / "case.json").exists():
        raise ValueError(f"{folder} holds a comparison; --resume {folder} goes on with it")
    prepared = EMULATED + case.model if case.engine == "emulated" else case.model
    codec = read_codec(Path(case.tokenizer) if case.tokenizer else model_folder(prepared))
    made = Comparison(case, folder, make_console())
    try:
        with sigterm_as_ctrl_c():
            runs = carry_out(made, case, spawn(case, folder), codec)
            made.show("compare", runs, [summarize(run) for run in runs])
    except (ClusterError, OSError, ValueError, RuntimeError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted; --resume {folder} goes on", file=sys.stderr)
        return 130
    return 0


def carry_out(made: Comparison, case: CompareOptions, start: StartCluster, codec: Codec) -> list[Run]:
    """Make the runs that the folder lacks, one cluster for each scheduler in turn. Returns all runs of the case."""
    cells = [
        case.cell(workload, scheduler, repeat)
        for repeat, scheduler in turns(case.scheduler_names, case.repeats)
        for workload in case.workload_names
    ]
    missing = [cell for cell in cells if made.recorded(cell) is None]
    for scheduler, group in groupby(missing, key=lambda cell: cell.scheduler):
        made.say(f"starting {scheduler}")
        with start(*parts(scheduler)) as cluster:
            reported = verify(cluster, *parts(scheduler))
            for workload in case.workload_names:
                if workload not in made.rates:
                    made.measured(workload, capacity(made, cluster, workload, codec))
            for cell in group:
                made.say(f"[{missing.index(cell) + 1}/{len(missing)}] {cell}")
                _one(made, case, cluster, cell, reported, codec)
    return [run for cell in cells if (run := made.recorded(cell)) is not None]


def capacity(made: Comparison, cluster: Cluster, workload: str, codec: Codec) -> float:
    """Programs per second of a burst behind a warm-up, from arrival to the last end."""
    count, last_s = 0, 1.0
    for name, each in (("warm-up", 1), ("calibration", 16 if SCENARIOS[workload].app == "judge" else 4)):
        clients = comparison.burst(workload, made.case.scale, codec, seed=name)
        plan = Plan(duration_s=120.0, programs_per_client=each, drain_s=120.0)
        cell = Cell(workload, name, seed=name)
        path = made.folder and made.folder / "records" / f"{name}.{workload}.jsonl"
        run, _ = drive(cluster, clients, plan, cell, path=path)
        count, last_s = completed(run)
        if count < each * len(clients):
            raise ClusterError(f"{cell}: not every program ended well: {run.errors}")
    return count / last_s


def _one(
    made: Comparison,
    case: CompareOptions,
    cluster: Cluster,
    cell: Cell,
    reported: Mapping[str, Any],
    codec: Codec,
) -> None:
    clients, path = case.clients(cell, codec, made.rates[cell.workload]), made.path(cell)
    with progress_view(made.console, case.plan) as watch:
        run, passed = drive(
            cluster, clients, case.plan, cell,
            reported=reported, case=case.to_json(), path=path, sampled=True, watch=watch,
        )  # fmt: skip
    made.console.print(client_table(summary_of(cell, run)))
    if passed and path:  # how accurate the timing of emulated GPUs was
        path.with_suffix(".timing.json").write_text(json.dumps(passed) + "\n", encoding="utf-8")
        made.say(in_words(passed))


def model_folder(model: str) -> Path | None:
    """The folder of the model, prepared if it is one of ours. None if it is not on this machine."""
    if Path(model).is_dir():
        return Path(model)
    command = [sys.executable, "-m", "sglang_fair.models", model]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    folder = Path(found.stdout.strip()) if found.returncode == 0 and found.stdout.strip() else None
    return folder if folder is not None and folder.is_dir() else None


def spawn(case: CompareOptions, folder: Path) -> StartCluster:
    given = {name: value for name in OF_CLUSTERS if (value := getattr(case, name)) is not None}
    own = () if case.engine == "emulated" else REPLICA_ARGUMENTS
    return SpawnCluster(table.Cluster(**given, extra=tuple(case.replica_arguments or own)), folder / "logs")


def main(arguments: Sequence[str] | None = None) -> int:
    return run(command(CompareOptions, compare), NAME, arguments, epilog=EPILOG)


if __name__ == "__main__":
    sys.exit(main())
