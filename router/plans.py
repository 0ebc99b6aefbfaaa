"""Work of a placement that is done in a process of its own, one piece at a time, while the router goes on.

The process is started with the first question. It is asked one question at a time: who asks again before the answer has
come gives the last one up, and its process with it. What fails, or ends its process, is answered by None.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from router.events import Planned
from router.placement.contract import Work
from sglang_fair.common.processes import PARENT, die_with_parent

log = logging.getLogger("router")


class Plans:
    """Belongs to one thread, which must live as long as the process does (`die_with_parent`)."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called in some thread when `done` has something."""
        self._wake = wake
        self._pool: ProcessPoolExecutor | None = None
        self._pid: Future[int] | None = None
        self._asked: tuple[int, Future[object]] | None = None

    def ask(self, number: int, work: Work) -> None:
        """`work` is to be done. What was asked before is given up."""
        if self._asked is not None:
            log.warning("plan %d took too long: its process is ended", self._asked[0])
            self._drop()
        try:
            future = self._submit(work)
        except BrokenProcessPool:  # it has ended since the last answer
            self._drop()
            future = self._submit(work)
        self._asked = number, future
        future.add_done_callback(lambda _: self._wake())

    def done(self) -> Planned | None:
        """What has come of the last question, once."""
        if self._asked is None or not self._asked[1].done():
            return None
        (number, future), self._asked = self._asked, None
        error = future.exception()
        if error is None:
            return Planned(number, future.result())
        log.warning("plan %d failed: %s: %s", number, type(error).__name__, error)
        if isinstance(error, BrokenProcessPool):
            self._drop()
        return Planned(number)

    @property
    def pid(self) -> int | None:
        """Of the process, once it runs."""
        ready = self._pid is not None and self._pid.done() and self._pid.exception() is None
        return self._pid.result() if ready and self._pid is not None else None

    def close(self) -> None:
        """Ends the process."""
        self._drop()

    def _submit(self, work: Work) -> "Future[object]":
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, initializer=_begin)
            self._pid = self._pool.submit(os.getpid)
        return self._pool.submit(work)

    def _drop(self) -> None:
        pool, pid = self._pool, self.pid
        self._pool = self._pid = self._asked = None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin() -> None:
    """In the process: it ends with the router, and a Ctrl-C is the router's."""
    os.environ.pop(PARENT, None)  # it names the router's own parent
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
