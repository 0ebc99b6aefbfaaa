"""Work that would hold up the event loop, done by threads a slice at a time, the clients in turn (`turns`)."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from router.gateway.turns import Turns

STEPS_PER_TURN = 64
"""Steps of one piece of work before others have their turn: some 5 ms where a step tokenizes 256 characters."""

Made = TypeVar("Made")

_END = object()


class _Job:
    """An iterator that makes something with each step, and what it has made."""

    __slots__ = ("made", "over", "steps")

    def __init__(self, steps: Iterator[Any], over: "asyncio.Future[None]") -> None:
        self.steps = steps
        self.made: list[Any] = []
        self.over = over

    def turn(self) -> bool:
        """Some steps; whether they were the last."""
        for _ in range(STEPS_PER_TURN):
            made = next(self.steps, _END)
            if made is _END:
                return True
            self.made.append(made)
        return False


class Threads:
    """Some threads and the work that waits for them. Belongs to one event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix="work")
        self._turns: Turns[_Job] = Turns()

    async def run(self, client: str, steps: Iterator[Made]) -> list[Made]:
        """All that `steps` makes. Raises what it raises; a caller that is cancelled is worked for no more."""
        job = _Job(steps, asyncio.get_running_loop().create_future())
        self._turns.add(client, job)
        self._start()
        try:
            await job.over
        except asyncio.CancelledError:
            self._turns.remove(client, job)
            raise
        return job.made

    def close(self) -> None:
        """What is under way ends by itself, what waits is not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while self._free and (found := self._turns.next()) is not None:
            self._free -= 1
            client, job = found
            turn = asyncio.get_running_loop().run_in_executor(self._pool, job.turn)
            turn.add_done_callback(partial(self._had_turn, client, job))

    def _had_turn(self, client: str, job: _Job, turn: "asyncio.Future[bool]") -> None:
        self._free += 1
        if turn.cancelled():
            job.over.cancel()
            return
        error = turn.exception()
        if not job.over.done():  # else its caller has left
            if error is not None:
                job.over.set_exception(error)
            elif turn.result():
                job.over.set_result(None)
            else:
                self._turns.again(client, job)
        self._start()
