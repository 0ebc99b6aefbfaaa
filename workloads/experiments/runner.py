"""Runs cells and writes the record of each run as soon as it has ended.

`run` may be interrupted at any moment and started again: runs with a record of the same cell are not made again. A
cell that fails, or whose worker process dies, is reported with its error, and the others go on.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeAlias, cast

from workloads.experiments import store
from workloads.experiments.contract import CURVES, Cell, Experiment, Json, Measured, Size
from workloads.experiments.store import Record
from workloads.runs.pool import Failed, Made, carry_out

__all__ = ["Failed", "Job", "Made", "Outcome", "jobs_of", "missing", "run"]

Experiments: TypeAlias = Mapping[str, Experiment]


@dataclass(frozen=True, slots=True)
class Job:
    """One run that is to be made."""

    experiment: str
    cell: Cell
    seed: str
    version: int = 1
    """The experiment's."""

    @property
    def name(self) -> str:
        """As people read it."""
        seeds = f" seed {self.seed}" if len(self.cell.seeds) > 1 else ""
        return f"{self.experiment} {self.cell.name}{seeds}"


Outcome: TypeAlias = Made[Measured] | Failed


def jobs_of(experiments: Experiments, size: Size) -> list[Job]:
    """All runs of these experiments, in order."""
    return [
        Job(name, cell, seed, experiment.version)
        for name, experiment in experiments.items()
        for cell in experiment.cells(size)
        for seed in cell.seeds
    ]


def missing(jobs: Sequence[Job], folder: Path) -> list[Job]:
    """Those without a record of the same cell in `folder`; a broken record is none."""
    return [job for job in jobs if not _kept(job, folder)]


def _kept(job: Job, folder: Path) -> bool:
    with suppress(ValueError):
        record = store.read(store.path_of(folder, job.experiment, job.cell.name, job.seed))
        return record is not None and record.of(job.cell, job.version)
    return False


def run(
    jobs: Sequence[Job],
    experiments: Experiments | str,
    *,
    folder: Path,
    size: Size,
    versions: Mapping[str, str],
    machine: Mapping[str, Json],
    workers: int = 0,
    began: Callable[[Job], None] = lambda _: None,
) -> Generator[tuple[Job, Outcome], None, None]:
    """Make the jobs' records in `folder`, so many at a time, or one after the other in this process. Yields each job
    as it ends.

    For other processes `experiments` is the name of the module whose `EXPERIMENTS` they import.
    """
    with closing(carry_out(partial(_measure, experiments), jobs, workers, began)) as outcomes:
        for job, outcome in outcomes:
            if isinstance(outcome, Made):
                store.write(folder, _record(job, outcome, size, versions, machine))
            yield job, outcome


def _measure(experiments: Experiments | str, job: Job) -> Measured:
    known = import_module(experiments).EXPERIMENTS if isinstance(experiments, str) else experiments
    return cast("Experiments", known)[job.experiment].run(job.cell, job.seed)


def _record(
    job: Job, made: Made[Measured], size: Size, versions: Mapping[str, str], machine: Mapping[str, Json]
) -> Record:
    first = job.seed == job.cell.seeds[0]
    values = {key: one for key, one in made.measured.values.items() if first or key != CURVES}
    return Record(
        experiment=job.experiment,
        size=size,
        cell=job.cell.to_json(),
        seed=job.seed,
        measured=store.rounded(values),
        simulated_s=store.rounded(made.measured.simulated_s),
        wall_s=store.rounded(made.wall_s),
        started=made.started,
        versions=versions,
        machine=machine,
        version=job.version,
    )
