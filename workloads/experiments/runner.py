"""Runs cells and writes the record of each run as soon as it has ended.

`run` may be interrupted at any moment and started again: runs with a record of the same cell are not made again. A
cell that fails, or whose worker process dies, is reported with its error, and the others go on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from workloads.experiments import store
from workloads.experiments.contract import CURVES, Cell, Experiment, Json, Measured, Size
from workloads.experiments.store import Record
from workloads.runs.pool import Failed, Made, Pool

__all__ = ["CarryOut", "Failed", "Job", "Made", "Watch", "here", "in_processes", "jobs_of", "missing", "run"]

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
CarryOut: TypeAlias = Callable[[Sequence[Job], Callable[[Job], None]], Iterator[tuple[Job, Outcome]]]
"""Carries out jobs, in any order; the second argument is called as each begins."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Functions that are called as jobs begin and end."""

    began: Callable[[Job], None] = lambda _: None
    ended: Callable[[Job, Outcome], None] = lambda *_: None


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
    *,
    folder: Path,
    size: Size,
    carry_out: CarryOut,
    versions: Mapping[str, str],
    machine: Mapping[str, Json],
    watch: Watch | None = None,
) -> list[tuple[Job, Failed]]:
    """Make the jobs' records in `folder`. Returns what failed."""
    watch = watch or Watch()
    failed = []
    for job, outcome in carry_out(jobs, watch.began):
        if isinstance(outcome, Made):
            first = job.seed == job.cell.seeds[0]
            values = {key: one for key, one in outcome.measured.values.items() if first or key != CURVES}
            record = Record(
                experiment=job.experiment,
                size=size,
                cell=job.cell.to_json(),
                seed=job.seed,
                measured=store.rounded(values),
                simulated_s=store.rounded(outcome.measured.simulated_s),
                wall_s=store.rounded(outcome.wall_s),
                started=outcome.started,
                versions=versions,
                machine=machine,
                version=job.version,
            )
            store.write(folder, record)
        else:
            failed.append((job, outcome))
        watch.ended(job, outcome)
    return failed


REGISTRY = "workloads.experiments"
"""The module whose `EXPERIMENTS` a worker carries out."""


def here(experiments: Experiments) -> CarryOut:
    """One run after the other in this process: for a debugger, and for tests."""

    def carry_out(jobs: Sequence[Job], began: Callable[[Job], None]) -> Iterator[tuple[Job, Outcome]]:
        return Pool(0).carry_out(partial(_measure, experiments), jobs, began)

    return carry_out


def in_processes(workers: int, registry: str = REGISTRY) -> CarryOut:
    """`workers` runs at a time, each in a process that imports the experiments of `registry`."""

    def carry_out(jobs: Sequence[Job], began: Callable[[Job], None]) -> Iterator[tuple[Job, Outcome]]:
        with Pool(workers) as pool:
            yield from pool.carry_out(partial(_measure_registered, registry), jobs, began)

    return carry_out


def _measure(experiments: Experiments, job: Job) -> Measured:
    return experiments[job.experiment].run(job.cell, job.seed)


def _measure_registered(registry: str, job: Job) -> Measured:
    return _measure(import_module(registry).EXPERIMENTS, job)
