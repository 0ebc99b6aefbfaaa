"""Health checks: `Health` asks `GET /ready` of every worker, and is a `Watch`, which decides which are healthy.

Rule. A worker is sick
- when it refuses two connections in a row;
- when it answers 503;
- when nothing has come from it for `timeout_s`: no answer to a health check and no byte for a request;
- when it reports twice in a row that it has requests and that a scheduler hangs (`Liveness`).
It is well again with the next answer that says otherwise. Requests in flight at a worker that is silent or hangs are
given up at once, as if it had died. Those at a worker that answers 503 go on, because a replica that shuts down
finishes what it has.

A scheduler hangs when its process has not run, or its loop has not come round, for `timeout_s`. A forward pass may
take `FORWARD_TIMEOUTS` times as long, for example a long prefill on a CPU. Leaks: a worker that does not report on
its scheduler (an engine without the overlay) counts as well as long as it answers.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from router.events import WorkerUp
from router.silence import ActiveClock

log = logging.getLogger("gateway")

INTERVAL_S = 1.0
"""Between two health checks of a worker, and between two decisions."""

REFUSALS = 2
"""Refused connections in a row that make a worker sick."""

FORWARD_TIMEOUTS = 30
"""How many times longer a forward pass may take than anything else."""

HANGS = 2
"""Reports in a row of a hanging scheduler that make a worker sick. One may be false: scheduler and server may have been
paused together, and have just gone on."""


class Scheduler(msgspec.Struct, frozen=True):
    """One scheduler, as its HTTP server sees it. Seconds are of the worker's own clock."""

    ran_s_ago: float
    """Since its process last ran any thread."""
    passed_s_ago: float
    """Since its loop last came round."""
    computes: bool
    """It has since entered a forward pass, or the wait for its results."""

    def hangs(self, timeout_s: float) -> bool:
        """Whether it should have shown a sign of life since."""
        limit_s = timeout_s * FORWARD_TIMEOUTS if self.computes else timeout_s
        return self.ran_s_ago > timeout_s or self.passed_s_ago > limit_s


class Liveness(msgspec.Struct, frozen=True):
    """What a worker with the overlay reports in its answer to `GET /ready`."""

    in_flight: int
    """Requests that its server has not finished."""
    schedulers: tuple[Scheduler, ...]

    @staticmethod
    def read(body: bytes) -> "Liveness | None":
        """The report in an answer; None if there is none, as from another engine."""
        try:
            return msgspec.json.decode(body, type=Liveness)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None


class Watch:
    """The decisions. Times are of one monotonic clock."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._heard_s: dict[str, float] = {}
        self._refusals: dict[str, int] = {}
        self._hangs: dict[str, int] = {}
        self._leaving: set[str] = set()
        self._time = ActiveClock(INTERVAL_S + timeout_s / 2)
        self.silent: frozenset[str] = frozenset()

    def is_well(self, worker: str) -> bool:
        return (
            worker not in self.silent
            and worker not in self._leaving
            and self._refusals.get(worker, 0) < REFUSALS
        )

    def is_leaving(self, worker: str) -> bool:
        """Whether it has answered that it takes nothing more: it is about to stop."""
        return worker in self._leaving

    def heard(self, worker: str, now_s: float) -> None:
        self._heard_s[worker] = self._time.look(now_s)

    def hangs(self, worker: str) -> bool:
        """Whether it answers although its scheduler hangs."""
        return self._hangs.get(worker, 0) >= HANGS

    def answered(self, worker: str, ready: bool, now_s: float, liveness: Liveness | None = None) -> None:
        self._heard_s[worker] = self._time.look(now_s)
        self._refusals.pop(worker, None)
        (self._leaving.discard if ready else self._leaving.add)(worker)
        if liveness is None or not any(one.hangs(self._timeout_s) for one in liveness.schedulers):
            self._hangs.pop(worker, None)
        elif liveness.in_flight > 0 or worker in self._hangs:
            self._hangs[worker] = self._hangs.get(worker, 0) + 1
        if not self.hangs(worker):
            self.silent -= {worker}

    def refused(self, worker: str, now_s: float) -> None:
        """It refused a connection, or broke it."""
        self._heard_s[worker] = self._time.look(now_s)  # refusing is not silence
        self._refusals[worker] = self._refusals.get(worker, 0) + 1
        self._hangs.pop(worker, None)
        self.silent -= {worker}

    def decide(self, workers: Iterable[str], now_s: float) -> frozenset[str]:
        """The workers that have fallen silent, or begun to hang, since the last decision. Call it every `INTERVAL_S`.

        A caller that is late by more than half the timeout was itself not running, and that time is nobody's silence.
        """
        now_s = self._time.look(now_s)
        names = set(workers)
        for name in names:
            self._heard_s.setdefault(name, now_s)
        for known in (self._heard_s, self._refusals, self._hangs):
            for name in known.keys() - names:
                del known[name]
        self._leaving &= names
        before = self.silent & names
        self.silent = before | {
            name for name in names if now_s - self._heard_s[name] > self._timeout_s or self.hangs(name)
        }
        return self.silent - before


GiveUp = Callable[[TimeoutError], None]
"""Fails a request that waits for a worker, with this error."""

Get = Callable[..., Awaitable[tuple[int, bytes]]]
"""`Replicas.get`."""


class Health(Watch):
    """Asks the workers, and gives up what is in flight at those that fall silent. Belongs to one event loop."""

    def __init__(
        self,
        timeout_s: float,
        workers: Callable[[], Mapping[str, WorkerUp]],
        get: Get,
        changed: Callable[[], None],
    ) -> None:
        """`workers` are those to ask; `changed` is called when one falls sick or recovers."""
        super().__init__(timeout_s)
        self._workers = workers
        self._get = get
        self._changed = changed
        self._was_well: dict[str, bool] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._open: dict[str, set[GiveUp]] = {}
        """The requests that wait for each worker."""

    def sick(self) -> list[str]:
        return [name for name in self._workers() if not self.is_well(name)]

    def refused_request(self, worker: str) -> None:
        if worker in self._workers():
            self.refused(worker, time.monotonic())
            self._compare()

    @contextmanager
    def while_it_answers(self, worker: str, give_up: GiveUp) -> Iterator[None]:
        """Calls `give_up` if `worker` falls silent meanwhile. Raises TimeoutError if it already is."""
        if worker in self.silent:
            raise TimeoutError(f"{worker} does not answer")
        waiting = self._open.setdefault(worker, set())
        waiting.add(give_up)
        try:
            yield
        finally:
            waiting.discard(give_up)

    async def run(self) -> None:
        try:
            while True:
                workers = self._workers()
                for worker in self.decide(workers, time.monotonic()):
                    how = "answers, but its scheduler hangs" if self.hangs(worker) else "is silent"
                    log.warning(
                        "worker %s %s, for more than %g s: it is given up", worker, how, self._timeout_s
                    )
                    for give_up in list(self._open.get(worker, ())):
                        give_up(TimeoutError(f"{worker} does not answer"))
                self._open = {name: waiting for name, waiting in self._open.items() if waiting}
                self._compare()
                for name, up in workers.items():
                    if name not in self._asking:
                        self._asking[name] = asyncio.create_task(self._ask(up))
                await asyncio.sleep(INTERVAL_S)
        finally:
            for task in list(self._asking.values()):
                task.cancel()

    async def _ask(self, up: WorkerUp) -> None:
        try:
            status, body = await self._get(up.url, "/ready", self._timeout_s)
            self.answered(up.worker, status != 503, time.monotonic(), Liveness.read(body))
        except TimeoutError:
            pass  # silence: `decide` notices
        except OSError:
            self.refused(up.worker, time.monotonic())
        finally:
            del self._asking[up.worker]
        self._compare()

    def _compare(self) -> None:
        well = {name: self.is_well(name) for name in self._workers()}
        changed = {name for name, one in well.items() if one is not self._was_well.get(name, True)}
        for name in sorted(changed):
            log.warning("worker %s %s", name, "answers again" if well[name] else "does not answer")
        self._was_well = well
        if changed:
            self._changed()
