"""Runs cells and keeps their records: a file for each run while they are made, one for each experiment when published.

A record is found again by experiment, cell and seed. It counts only for the cell it was made of: one whose
specification has changed since is made anew. `run` may be interrupted at any moment and started again. A cell that
fails, or whose worker process dies, is reported with its error, and the others go on.
"""

import json
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from sglang_fair.common.provenance import machine, versions
from workloads.experiments.contract import CURVES, Cell, Experiment, Json, Measured, Size, filled
from workloads.records import replace_text
from workloads.runs.pool import Failed, Made, carry_out

DIGITS = 5
"""Significant digits that are kept of a measured number."""


@dataclass(frozen=True, slots=True)
class Record:
    """One run of one cell: what was measured, and where and with what."""

    experiment: str
    size: Size
    cell: Mapping[str, Json]
    """As `Cell.to_json` has it."""
    seed: str
    measured: Mapping[str, Json]
    simulated_s: int | float
    wall_s: int | float
    started: str
    """UTC, ISO 8601."""
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cell", filled(self.cell))

    @property
    def name(self) -> str:
        """The cell's."""
        return str(self.cell["name"])

    def of(self, cell: Cell) -> bool:
        """Whether this is a run of `cell` as it is specified."""
        return dict(self.cell) == cell.to_json()


@dataclass(frozen=True, slots=True)
class Job:
    """One run that is to be made."""

    experiment: Experiment
    cell: Cell
    seed: str

    @property
    def name(self) -> str:
        """As people read it."""
        seeds = f" seed {self.seed}" if len(self.cell.seeds) > 1 else ""
        return f"{self.experiment.id} {self.cell.name}{seeds}"

    def path(self, folder: Path) -> Path:
        """Where its record lies."""
        return folder / self.experiment.id / f"{self.cell.name}.{self.seed}.json"

    def is_made(self, folder: Path) -> bool:
        """Whether there is a record of this cell; a broken one is none."""
        with suppress(ValueError, FileNotFoundError):
            return read(self.path(folder)).of(self.cell)
        return False

    def run(self) -> Measured:
        return self.experiment.run(self.cell, self.seed)


def jobs_of(experiments: Iterable[Experiment], size: Size) -> list[Job]:
    """All runs of these experiments, in order."""
    return [Job(one, cell, seed) for one in experiments for cell in one.cells(size) for seed in cell.seeds]


Outcome: TypeAlias = Made[Measured] | Failed


def run(
    jobs: Sequence[Job],
    folder: Path,
    size: Size,
    workers: int = 0,
    began: Callable[[Job], None] = lambda _: None,
) -> Generator[tuple[Job, Outcome], None, None]:
    """Make the jobs' records in `folder`, in so many processes; 0 is this one. Yields each job as it ends."""
    place = {"versions": versions(), "machine": machine()}
    with closing(carry_out(Job.run, jobs, workers, began)) as outcomes:
        for job, made in outcomes:
            if isinstance(made, Made):
                values, first = made.measured.values, job.seed == job.cell.seeds[0]
                record = {
                    "experiment": job.experiment.id,
                    "size": size,
                    "cell": job.cell.to_json(),
                    "seed": job.seed,
                    "measured": rounded({k: one for k, one in values.items() if first or k != CURVES}),
                    "simulated_s": rounded(made.measured.simulated_s),
                    "wall_s": rounded(made.wall_s),
                    "started": made.started,
                    **place,
                }
                replace_text(job.path(folder), json.dumps(record, sort_keys=True) + "\n")
            yield job, made


def read(path: Path) -> Record:
    """Raises ValueError for a broken file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: not a record: {error}") from error


def read_folder(folder: Path, experiments: Iterable[str]) -> list[Record]:
    """All records of these experiments in `folder`, by experiment, cell and seed."""
    found = (read(path) for experiment in experiments for path in (folder / experiment).glob("*.json"))
    return sorted(found, key=lambda record: (record.experiment, record.name, record.seed))


def publish(folder: Path, records: Sequence[Record]) -> None:
    """Write one experiment's file, smaller than its records: what they share is told once."""
    shared: list[dict[str, Json]] = []
    runs = []
    for record in sorted(records, key=lambda record: (record.name, record.seed)):
        told = asdict(record)
        common = {key: told.pop(key) for key in ("versions", "machine")}
        # The machine's load at the start of each run is no property of the machine.
        common["machine"] = {k: v for k, v in common["machine"].items() if k != "load_1min"}
        if common not in shared:
            shared.append(common)
        runs.append({**told, "made": shared.index(common)})
    lines = ",\n".join(json.dumps(run, sort_keys=True, separators=(",", ":")) for run in runs)
    text = f'{{"made":{json.dumps(shared, sort_keys=True)},\n"runs":[\n{lines}\n]}}\n'
    replace_text(folder / f"{records[0].experiment}.json", text)


def read_published(folder: Path) -> list[Record]:
    """The inverse of `publish`. Raises ValueError."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            told = msgspec.json.decode(path.read_bytes())
            runs = [{**run, **told["made"][run.pop("made")]} for run in told["runs"]]
            records += msgspec.convert(runs, list[Record])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not published records: {error!r}") from error
    return records


def rounded(value: Json, digits: int = DIGITS) -> Json:
    """`value` with numbers of so many significant digits; what is not finite is null, as JSON has no such number."""
    if isinstance(value, Mapping):
        return {str(key): rounded(one, digits) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one, digits) for one in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        short = float(f"{value:.{digits}g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    return value
