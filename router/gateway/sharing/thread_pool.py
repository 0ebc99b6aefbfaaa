"""A thread pool for work that would block the event loop; clients take turns in it (`round_robin`).

Work is an iterator. A thread runs a few of its steps, then the next client has its turn, so that one long prompt
does not keep the others waiting.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from router.gateway.sharing.round_robin import RoundRobin

STEPS_PER_TURN = 64
"""About 5 ms of work where a step tokenizes 256 characters."""

Made = TypeVar("Made")

_END = object()


class _Job:
    """An iterator and what its steps have returned so far."""

    __slots__ = ("made", "over", "steps")

    def __init__(self, steps: Iterator[Any], over: "asyncio.Future[None]") -> None:
        self.steps = steps
        self.made: list[Any] = []
        self.over = over

    def turn(self) -> bool:
        """Runs one turn's steps; whether the iterator has ended."""
        for _ in range(STEPS_PER_TURN):
            made = next(self.steps, _END)
            if made is _END:
                return True
            self.made.append(made)
        return False


class FairThreadPool:
    """The pool and the queue before it. Belongs to one event loop."""

    def __init__(self, threads: int) -> None:
        self._free = threads
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="work")
        self._queue: RoundRobin[_Job] = RoundRobin()

    async def run(self, client: str, steps: Iterator[Made]) -> list[Made]:
        """Everything that `steps` yields. Raises what it raises; cancelling the caller stops the work."""
        job = _Job(steps, asyncio.get_running_loop().create_future())
        self._queue.add(client, job)
        self._start()
        try:
            await job.over
        except asyncio.CancelledError:
            self._queue.remove(client, job)
            raise
        except BaseException:
            # The traceback has the job, and with it the body: they would keep each other until the collector comes,
            # which a few large objects do not call.
            del job.over
            raise
        return job.made

    def close(self) -> None:
        """Drops the queue; turns under way finish in the background."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while self._free and (waiting := self._queue.next()) is not None:
            self._free -= 1
            client, job = waiting
            turn = asyncio.get_running_loop().run_in_executor(self._pool, job.turn)
            turn.add_done_callback(partial(self._had_turn, client, job))

    def _had_turn(self, client: str, job: _Job, turn: "asyncio.Future[bool]") -> None:
        self._free += 1
        if turn.cancelled():
            job.over.cancel()
            return
        error = turn.exception()
        if not job.over.done():  # done: its caller was cancelled
            if error is not None:
                job.over.set_exception(error)
            elif turn.result():
                job.over.set_result(None)
            else:
                self._queue.again(client, job)
        self._start()
