"""How clients share what a gateway process has: places and bytes (`Allowance`), and turns in a thread pool, for work
that would block the event loop.

Rule. Clients that have work wait in a ring. The first one gets a turn for its oldest piece of work and goes to the end
of the ring. Work that needs several turns goes on before anything that its client brought later. Unit: turns.
Bound: between two turns of one client, every other client that has work all the while gets exactly one. So the wait
for a turn grows with the number of clients, not with how much any of them brings. Leaks: a turn counts the same
however long it takes, and weights do not count.

Work is an iterator. A thread runs a few of its steps, then the next client has its turn, so that one long prompt
does not keep the others waiting.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from router.gateway.errors import ApiError, overloaded
from router.shared_limit import SharedLimit

STEPS_PER_TURN = 64
"""About 5 ms of work where a step tokenizes 256 characters."""

Made = TypeVar("Made")
Work = TypeVar("Work")

_END = object()


class RoundRobin(Generic[Work]):
    """The queue. A client without work costs no memory."""

    def __init__(self) -> None:
        self._ring: OrderedDict[str, deque[Work]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._ring.values()))

    def __bool__(self) -> bool:
        return bool(self._ring)

    def add(self, client: str, work: Work) -> None:
        self._ring.setdefault(client, deque()).append(work)

    def again(self, client: str, work: Work) -> None:
        """Queue work that had a turn and needs another: the client's first, the client last in the ring."""
        self._ring.setdefault(client, deque()).appendleft(work)

    def next(self) -> tuple[str, Work] | None:
        """Remove and return the work whose turn it is, and its client; None if there is no work."""
        if not self._ring:
            return None
        client, queue = self._ring.popitem(last=False)
        work = queue.popleft()
        if queue:
            self._ring[client] = queue
        return client, work

    def remove(self, client: str, work: Work) -> bool:
        queue = self._ring.get(client, deque())
        if work not in queue:
            return False
        queue.remove(work)
        if not queue:
            del self._ring[client]
        return True


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


class Capacity:
    """What one gateway process has to share. Belongs to one event loop."""

    def __init__(self, max_in_flight: int, max_held_bytes: int, max_body_bytes: int) -> None:
        """`max_held_bytes` is for the bodies of all requests in flight, `max_body_bytes` for a single one."""
        self.requests = SharedLimit(max_in_flight)
        self.body_bytes = SharedLimit(max_held_bytes)
        self.max_body_bytes = max_body_bytes


class Allowance:
    """What one request has taken, in the name of one share: a client, or an address while its client is unknown."""

    def __init__(self, capacity: Capacity) -> None:
        self.share = "-"
        self._capacity = capacity
        self._has_place = False
        self._held_bytes = 0

    def enter(self, share: str) -> None:
        """Takes a place for `share`. Raises `ApiError` 429 if it has all that it may have."""
        requests = self._capacity.requests
        self.share = share
        self._has_place = requests.take(share)
        if not self._has_place:
            raise overloaded(f"too many requests in flight: {requests.held(share)} of this client")

    def hold(self, size: int) -> None:
        """The body has `size` bytes or more. Raises `ApiError` 413 or 429 if that is too much."""
        capacity = self._capacity
        if size > capacity.max_body_bytes:
            raise ApiError(
                413, f"the body is larger than {capacity.max_body_bytes} bytes", code="body_too_large"
            )
        more = max(0, size - self._held_bytes)
        if not capacity.body_bytes.take(self.share, more):
            held = capacity.body_bytes.held(self.share)
            raise overloaded(f"too many bytes of requests in flight: {held} of this client")
        self._held_bytes += more

    def move(self, share: str) -> None:
        """From here on everything counts for `share`. Raises `ApiError` as above."""
        size = self._held_bytes
        self.release()
        self.enter(share)
        self.hold(size)

    def release(self) -> None:
        if self._has_place:
            self._capacity.requests.give(self.share)
        self._capacity.body_bytes.give(self.share, self._held_bytes)
        self._has_place, self._held_bytes = False, 0
