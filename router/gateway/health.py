"""Which workers answer this gateway: `Health` asks GET /ready of each, `Watch` decides.

Rule. A worker is sick when it refuses connections twice in a row, when it says 503, or when nothing has come
from it for `timeout_s`: neither an answer to a question nor a byte of a request. It is well again with the next
answer. What was in flight at a silent one is given up at once, as if it had died; what is in flight at one
that says 503 goes on, for a replica that shuts down finishes what it has. Leaks: a replica whose HTTP process
answers while its scheduler hangs is well.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import aiohttp

from router.events import WorkerUp

log = logging.getLogger("gateway")

INTERVAL_S = 1.0
"""Between two questions to a worker, and between two decisions."""

REFUSALS = 2
"""Connections in a row that a worker may not accept."""


class Watch:
    """The decisions. Times are of one clock that never goes back."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._heard_s: dict[str, float] = {}
        self._refusals: dict[str, int] = {}
        self._leaving: set[str] = set()
        self._decided_s: float | None = None
        self.silent: frozenset[str] = frozenset()

    def is_well(self, worker: str) -> bool:
        """Whether it can be sent requests; a worker that nothing is known of can."""
        return (
            worker not in self.silent
            and worker not in self._leaving
            and self._refusals.get(worker, 0) < REFUSALS
        )

    def heard(self, worker: str, now_s: float) -> None:
        """Bytes came from it."""
        self._heard_s[worker] = now_s

    def answered(self, worker: str, ready: bool, now_s: float) -> None:
        """It said whether it is ready."""
        self._heard_s[worker] = now_s
        self._refusals.pop(worker, None)
        self.silent -= {worker}
        (self._leaving.discard if ready else self._leaving.add)(worker)

    def refused(self, worker: str, now_s: float) -> None:
        """It accepted no connection, or broke it."""
        self._heard_s[worker] = now_s  # it is not silent
        self._refusals[worker] = self._refusals.get(worker, 0) + 1
        self.silent -= {worker}

    def decide(self, workers: Iterable[str], now_s: float) -> frozenset[str]:
        """The workers that have fallen silent since the last decision. To be called every `INTERVAL_S`.

        A caller that comes late by half the timeout was itself asleep, and what it has not heard means nothing.
        """
        names = set(workers)
        asleep = self._decided_s is not None and now_s - self._decided_s > INTERVAL_S + self._timeout_s / 2
        self._decided_s = now_s
        for name in names:
            if asleep or name not in self._heard_s:
                self._heard_s[name] = now_s
        for known in (self._heard_s, self._refusals):
            for name in known.keys() - names:
                del known[name]
        self._leaving &= names
        before = self.silent & names
        self.silent = before | {name for name in names if now_s - self._heard_s[name] > self._timeout_s}
        return self.silent - before


GiveUp = Callable[[TimeoutError], None]
"""Ends what waits for a worker, with this error."""


class Health:
    """Asks the workers, and gives up what is in flight at those that fall silent. Of one event loop."""

    def __init__(
        self, timeout_s: float, workers: Callable[[], dict[str, WorkerUp]], changed: Callable[[], None]
    ) -> None:
        """`workers` are those to ask; `changed` is called when one has fallen sick or recovered."""
        self.watch = Watch(timeout_s)
        self._timeout_s = timeout_s
        self._workers = workers
        self._changed = changed
        self._was_well: dict[str, bool] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self.open: dict[str, set[GiveUp]] = {}
        """What waits for each worker."""

    def is_well(self, worker: str) -> bool:
        """Whether it can be sent requests."""
        return self.watch.is_well(worker)

    def sick(self) -> list[str]:
        """The known workers that are not well."""
        return [name for name in self._workers() if not self.is_well(name)]

    def heard(self, worker: str, now_s: float) -> None:
        """Bytes came from it, at `now_s` of the monotonic clock."""
        self.watch.heard(worker, now_s)

    def refused(self, worker: str) -> None:
        """It accepted no connection."""
        if worker in self._workers():
            self.watch.refused(worker, time.monotonic())
            self._compare()

    def while_it_answers(self, worker: str, give_up: GiveUp) -> "Watched":
        """Calls `give_up` when `worker` falls silent in its body. Raises TimeoutError at once when it is."""
        return Watched(self, worker, give_up)

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Asks and decides until it is cancelled."""
        try:
            while True:
                workers = self._workers()
                now_s = time.monotonic()
                for worker in self.watch.decide(workers, now_s):
                    log.warning("worker %s has been silent for %g s: it is given up", worker, self._timeout_s)
                    for give_up in list(self.open.get(worker, ())):
                        give_up(TimeoutError(f"{worker} does not answer"))
                self._compare()
                for name, up in workers.items():
                    if name not in self._asking:
                        self._asking[name] = asyncio.create_task(self._ask(up, session))
                await asyncio.sleep(INTERVAL_S)
        finally:
            for task in list(self._asking.values()):
                task.cancel()

    async def _ask(self, up: WorkerUp, session: aiohttp.ClientSession) -> None:
        try:
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            async with session.get(f"{up.url.rstrip('/')}/ready", timeout=timeout) as response:
                self.watch.answered(up.worker, response.status != 503, time.monotonic())
        except TimeoutError:
            pass  # `decide` counts the silence
        except (aiohttp.ClientError, OSError):
            self.watch.refused(up.worker, time.monotonic())
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


class Watched:
    """Made by `Health.while_it_answers`."""

    def __init__(self, health: Health, worker: str, give_up: GiveUp) -> None:
        self._health = health
        self._worker = worker
        self._give_up = give_up

    def __enter__(self) -> None:
        if self._worker in self._health.watch.silent:
            raise TimeoutError(f"{self._worker} does not answer")
        self._health.open.setdefault(self._worker, set()).add(self._give_up)

    def __exit__(self, *_: object) -> None:
        waiting = self._health.open[self._worker]
        waiting.discard(self._give_up)
        if not waiting:
            del self._health.open[self._worker]
