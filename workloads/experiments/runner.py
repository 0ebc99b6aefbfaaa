"""Carries out cells: in worker processes, each record written as soon as it is there.

A run may be interrupted at any moment and started again: what has a record of the same cell is kept. A cell
that fails is named with its error, and so is one whose worker dies; the others go on.
"""

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from multiprocessing import connection, get_context, parent_process
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TypeAlias

from sglang_fair.common.processes import die_with_parent
from workloads.experiments import store
from workloads.experiments.contract import CURVES, Cell, Experiment, Json, Measured, Size
from workloads.experiments.store import Record

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


@dataclass(frozen=True, slots=True)
class Made:
    """A run was carried out."""

    measured: Measured
    wall_s: float
    started: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A run was not: the error in a line, and where it came from."""

    error: str
    trace: str = ""


Ended: TypeAlias = tuple[Job, Made | Failed]
CarryOut: TypeAlias = Callable[[Sequence[Job], Callable[[Job], None]], Iterator[Ended]]
"""Carries out jobs, in any order; the second argument is called as each begins."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Functions that hear how it goes."""

    began: Callable[[Job], None] = lambda _: None
    ended: Callable[[Job, Made | Failed], None] = lambda *_: None


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
    heard = watch or Watch()
    failed = []
    for job, outcome in carry_out(jobs, heard.began):
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
        heard.ended(job, outcome)
    return failed


def carry_out_one(job: Job, experiments: Experiments) -> Made | Failed:
    """One run, here and now."""
    started, began_s = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    try:
        measured = experiments[job.experiment].run(job.cell, job.seed)
    except Exception as error:  # whatever an experiment gets wrong is that cell's result
        return Failed(f"{type(error).__name__}: {error}", traceback.format_exc())
    return Made(measured, time.perf_counter() - began_s, started)


def here(experiments: Experiments) -> CarryOut:
    """One run after the other in this process: for a debugger, and for tests."""

    def carry_out(jobs: Sequence[Job], began: Callable[[Job], None]) -> Iterator[Ended]:
        for job in jobs:
            began(job)
            yield job, carry_out_one(job, experiments)

    return carry_out


REGISTRY = "workloads.experiments"
"""The module whose `EXPERIMENTS` a worker carries out."""


def in_processes(workers: int, registry: str = REGISTRY) -> CarryOut:
    """`workers` runs at a time, each worker a process of its own that imports the experiments of `registry`."""

    def carry_out(jobs: Sequence[Job], began: Callable[[Job], None]) -> Iterator[Ended]:
        waiting = list(reversed(jobs))
        crew = [_Worker(registry) for _ in range(min(workers, len(jobs)))]
        try:
            for worker in crew:
                began(worker.take(waiting.pop()))
            while busy := {worker.pipe: worker for worker in crew if worker.job is not None}:
                for pipe in connection.wait(list(busy)):
                    worker = busy[pipe]  # type: ignore[index]  # of what was given
                    yield worker.ended()
                    if waiting:
                        if not worker.alive:
                            crew[crew.index(worker)] = worker = _Worker(registry)
                        began(worker.take(waiting.pop()))
        finally:
            for worker in crew:
                worker.end()

    return carry_out


class _Worker:
    """A process that carries out one job after the other."""

    def __init__(self, registry: str) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, registry), daemon=True)
        self.process.start()
        theirs.close()  # so that the pipe breaks when the process ends
        self.alive = True
        self.job: Job | None = None

    def take(self, job: Job) -> Job:
        """Begin a job. Returns it."""
        assert self.job is None, "one job at a time"
        self.job = job
        with suppress(OSError):  # it died while it was idle: its pipe says so to whoever waits
            self.pipe.send(job)
        return job

    def ended(self) -> Ended:
        """What came of the job, once there is something to read."""
        job, self.job = self.job, None
        assert job is not None, "a job was taken"
        try:
            return job, self.pipe.recv()
        except (EOFError, OSError):
            self.alive = False
            self.process.join()
            return job, Failed(f"its process died with exit code {self.process.exitcode}")

    def end(self) -> None:
        """Stop it, whatever it does."""
        self.pipe.close()
        self.process.terminate()
        self.process.join()


def _serve(pipe: "connection.Connection[Made | Failed, Job]", registry: str) -> None:
    """A worker's life: until the other end closes, or its parent dies. Ctrl-C is the parent's to hear."""
    die_with_parent()
    if (parent := parent_process()) is None or not parent.is_alive():  # it died before that was asked for
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    experiments: Experiments = import_module(registry).EXPERIMENTS
    with suppress(EOFError, BrokenPipeError):
        while True:
            pipe.send(carry_out_one(pipe.recv(), experiments))
