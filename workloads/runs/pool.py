"""Carries out independent jobs, here or in worker processes. A job that fails fails alone; one that ends its process
takes those with it that run beside it, and the others go on."""

import os
import signal
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import active_children, get_context, parent_process
from typing import Generic, TypeAlias, TypeVar

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
    started, began_s = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    try:
        result = work(job)
    except Exception as error:  # whatever a job gets wrong is its own result
        return Failed(str(error), type(error).__name__, traceback.format_exc())
    return Made(result, time.perf_counter() - began_s, started)


def carry_out(
    work: Callable[[JobT], ResultT],
    jobs: Sequence[JobT],
    workers: int,
    began: Callable[[JobT], None] = lambda _: None,
) -> Generator[Ended[JobT, ResultT], None, None]:
    """Each job with its outcome, as they end, in so many processes; 0 is this one. `began` is called as each begins.

    `work` and the jobs must be picklable. The processes end with the iteration, or with this process, however that
    ends.
    """
    if not workers:
        for job in jobs:
            began(job)
            yield job, attempt(work, job)
        return
    waiting = list(reversed(jobs))
    running: dict[Future[Made[ResultT] | Failed], JobT] = {}
    others, pool = active_children(), _start(workers)
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop()
                running[pool.submit(attempt, work, job)] = job
                began(job)
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            if any(isinstance(one.exception(), BrokenProcessPool) for one in ended):
                ended = set(running)
                wait(ended)
                pool = _start(workers)
            for one in ended:
                broken = isinstance(one.exception(), BrokenProcessPool)
                yield running.pop(one), Failed("its process died") if broken else one.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(active_children()) - set(others):
            process.terminate()


def _start(workers: int) -> ProcessPoolExecutor:
    # They start afresh: a forked process would share this one's threads and locks.
    return ProcessPoolExecutor(workers, get_context("spawn"), _begin)


def _begin() -> None:
    """A worker ends with its parent; Ctrl-C is the parent's."""
    die_with_parent()
    if (parent := parent_process()) is None or not parent.is_alive():  # it died before the kernel was asked
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
