"""Carries out independent jobs, here or in worker processes. A job that fails, or kills its worker, fails alone."""

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import connection, get_context, parent_process
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, Self, TypeAlias, TypeVar

from sglang_fair.common.processes import die_with_parent

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Made(Generic[ResultT]):
    """A job was carried out."""

    measured: ResultT
    wall_s: float
    started: str
    """UTC, ISO 8601."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A job was not carried out."""

    reason: str
    """One line."""
    kind: str = ""
    """Class of the exception, if there was one."""
    trace: str = ""

    @property
    def error(self) -> str:
        """The reason with its kind, in one line."""
        return f"{self.kind}: {self.reason}" if self.kind else self.reason


Ended: TypeAlias = tuple[JobT, Made[ResultT] | Failed]


def attempt(work: Callable[[JobT], ResultT], job: JobT) -> Made[ResultT] | Failed:
    """Carry out one job, here and now."""
    started, began_s = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    try:
        result = work(job)
    except Exception as error:  # whatever a job gets wrong is its own result
        return Failed(str(error), type(error).__name__, traceback.format_exc())
    return Made(result, time.perf_counter() - began_s, started)


class Pool:
    """Up to `workers` processes, each of which carries out one job after the other; 0 carries out jobs in this process.

    Processes start when they are first needed and end with the pool, or with this process, however that ends. Use it
    as a context manager.
    """

    def __init__(self, workers: int) -> None:
        if workers < 0:
            raise ValueError(f"a pool has 0 workers or more, not {workers}")
        self._size = workers
        self._crew: list[_Worker] = []

    def carry_out(
        self,
        work: Callable[[JobT], ResultT],
        jobs: Sequence[JobT],
        began: Callable[[JobT], None] = lambda _: None,
    ) -> Iterator[Ended[JobT, ResultT]]:
        """Each job with what came of it, as they end. `began` is called as each begins.

        `work` and the jobs must be picklable; `work` should be found by import.
        """
        if not self._size:
            for job in jobs:
                began(job)
                yield job, attempt(work, job)
            return
        waiting = list(reversed(jobs))
        self._crew = [worker for worker in self._crew if worker.alive]
        self._crew += [_Worker() for _ in range(min(self._size, len(jobs)) - len(self._crew))]
        for worker in self._crew[: len(jobs)]:
            began(worker.take(work, waiting.pop()))
        while busy := {worker.pipe: worker for worker in self._crew if worker.job is not None}:
            for pipe in connection.wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]  # of what was given
                yield worker.ended()
                if waiting:
                    if not worker.alive:
                        self._crew[self._crew.index(worker)] = worker = _Worker()
                    began(worker.take(work, waiting.pop()))

    def close(self) -> None:
        """End the processes, whatever they do."""
        for worker in self._crew:
            worker.end()
        self._crew.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """A process that carries out one job after the other."""

    def __init__(self) -> None:
        # It starts afresh: a forked process would share this one's threads and locks.
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()  # so that the pipe breaks when the process ends
        self.alive = True
        self.job: Any = None

    def take(self, work: Callable[[JobT], ResultT], job: JobT) -> JobT:
        """Begin a job. Returns it."""
        assert self.job is None, "one job at a time"
        self.job = job
        with suppress(OSError):  # it died while it was idle; its broken pipe says so to `ended`
            self.pipe.send((work, job))
        return job

    def ended(self) -> Ended[Any, Any]:
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
        self.pipe.close()
        self.process.terminate()
        self.process.join()


def _serve(pipe: "connection.Connection[Any, Any]") -> None:
    """A worker's life: until the other end of the pipe closes, or the parent dies. Ctrl-C is left to the parent."""
    die_with_parent()
    if (parent := parent_process()) is None or not parent.is_alive():  # it died before the kernel was asked
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(EOFError, BrokenPipeError):
        while True:
            work, job = pipe.recv()
            pipe.send(attempt(work, job))
