"""What a gateway process has open towards replicas: connections, looks at their health, send windows, cancellations."""

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from router.events import WorkerUp
from router.gateway.errors import describe
from router.gateway.replicas.connections import Asking, Connections
from router.gateway.replicas.health import INTERVAL_S, Contexts, Liveness, Watch
from router.gateway.sharing import RoundRobin
from sglang_fair.common.service_keys import replica_key
from sglang_fair.settings.table import Limits

log = logging.getLogger("gateway")

ABORT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 5.0
WINDOW_BYTES = 1 << 18

GiveUp = Callable[[TimeoutError], None]
"""Fails a request that waits for a worker, with this error."""


class Replicas:
    """The replicas, as one gateway process reaches them. Belongs to one event loop."""

    def __init__(
        self,
        limits: Limits,
        workers: Callable[[], Mapping[str, WorkerUp]],
        health_changed: Callable[[], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`workers` are those that the router names; `health_changed` is called when one fails or recovers. `tls` is
        for https:// addresses; None: as the system believes."""
        self.health = Watch(limits.health_timeout_s)
        self.connections = Connections(limits.connect_timeout_s, limits.idle_timeout_s, tls)
        self._limits = limits
        self._workers = workers
        self._health_changed = health_changed
        self._was_well: dict[str, bool] = {}
        self._contexts = Contexts()
        self._looks: dict[str, asyncio.Task[None]] = {}
        """Those under way, by worker."""
        self._open: dict[str, set[GiveUp]] = {}
        """The requests that wait for each worker."""
        self._windows: dict[str, SendWindow] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._key = replica_key.headers()

    def start(self) -> None:
        self._looking = asyncio.create_task(self._look_at_all())

    async def close(self) -> None:
        """Gives cancellations under way the time to reach their replicas, then closes everything."""
        for task in (self._looking, *self._looks.values()):
            if task is not None:
                task.cancel()
        for window in self._windows.values():
            window.close()
        if self._background:
            await asyncio.wait(self._background, timeout=ABORT_TIMEOUT_S)
        self.connections.close()

    # -- requests

    def context_tokens(self, model: str) -> int | None:
        """How long a prompt for `model` may be; None while that is unknown."""
        return self._limits.max_context_tokens or self._contexts.tokens(model)

    def post(
        self, url: str, path: str, headers: Mapping[str, str], body: bytes, patience_s: float = 0.0
    ) -> Asking:
        """`async with` it: a client's request on its way to the replica at `url`; `patience_s` as in
        `Connections.request`."""
        headers = {**headers, **self._key} if self._key else headers
        return self.connections.request("POST", url, path, headers, body, patience_s)

    def window(self, url: str) -> "SendWindow":
        window = self._windows.get(url)
        if window is None:
            known = {up.url.rstrip("/") for up in self._workers().values()}
            for gone in self._windows.keys() - known:
                self._windows.pop(gone).close()
            window = self._windows[url] = SendWindow(partial(self._probe, url))
        return window

    def waiting_for(self, worker: str) -> set[GiveUp]:
        """Of the requests that wait for `worker`: called if it falls silent. Raises TimeoutError if it already is."""
        if worker in self.health.silent:
            raise TimeoutError(f"{worker} does not answer")
        return self._open.setdefault(worker, set())

    def refused_request(self, worker: str) -> None:
        if worker in self._workers():
            self.health.refused(worker, time.monotonic())
            self._compare()

    def cancel_work(self, url: str, rids: tuple[str, ...]) -> None:
        """Tells the replica, in the background, to drop these requests."""
        for rid in rids:
            self._spawn(self._abort(url, rid))

    # -- questions of our own

    async def get(self, url: str, path: str, timeout_s: float = ANSWER_TIMEOUT_S) -> tuple[int, bytes]:
        """Status and body with which the replica at `url` answers. Raises OSError, TimeoutError among these."""
        return await self.connections.get(url, path, self._key, timeout_s)

    async def _probe(self, url: str) -> None:
        """Returns when the replica has answered a question that queues behind everything sent, or does not answer."""
        try:
            await self.get(url, "/ready", self._limits.health_timeout_s)
        except OSError as error:
            log.info("%s does not say whether it has read what it was sent: %s", url, describe(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort(self, url: str, rid: str) -> None:
        headers = {"content-type": "application/json"}
        try:
            async with (
                asyncio.timeout(ABORT_TIMEOUT_S),
                self.post(url, "/abort_request", headers, json.dumps({"rid": rid}).encode()) as answer,
            ):
                await answer.read()
        except OSError as error:
            log.info("request %s could not be cancelled at %s: %s", rid, url, describe(error))

    # -- health

    def sick(self) -> list[str]:
        return [name for name in self._workers() if not self.health.is_well(name)]

    async def _look_at_all(self) -> None:
        """Gives up what is in flight at workers that fall silent, and looks at each of them every `INTERVAL_S`."""
        health, timeout_s = self.health, self._limits.health_timeout_s
        while True:
            workers = self._workers()
            for worker in health.decide(workers, time.monotonic()):
                how = "answers, but its scheduler hangs" if health.hangs(worker) else "is silent"
                log.warning("worker %s %s, for more than %g s: it is given up", worker, how, timeout_s)
                for give_up in list(self._open.get(worker, ())):
                    give_up(TimeoutError(f"{worker} does not answer"))
            self._open = {name: waiting for name, waiting in self._open.items() if waiting}
            self._compare()
            self._contexts.reckon(workers)
            for name, up in workers.items():
                if name not in self._looks:
                    self._looks[name] = asyncio.create_task(self._look_at(up))
            await asyncio.sleep(INTERVAL_S)

    async def _look_at(self, up: WorkerUp) -> None:
        try:
            status, body = await self.get(up.url, "/ready", self._limits.health_timeout_s)
            self.health.answered(up.worker, status != 503, time.monotonic(), Liveness.read(body))
            if self._contexts.is_due(up, time.monotonic()):
                with suppress(OSError):  # it is asked again with the next look
                    self._contexts.answered(up, *await self.get(up.url, "/v1/models"), time.monotonic())
                    self._contexts.reckon(self._workers())
        except TimeoutError:
            pass  # silence: `decide` notices
        except OSError:
            self.health.refused(up.worker, time.monotonic())
        finally:
            del self._looks[up.worker]
        self._compare()

    def _compare(self) -> None:
        well = {name: self.health.is_well(name) for name in self._workers()}
        changed = {name for name, one in well.items() if one is not self._was_well.get(name, True)}
        for name in sorted(changed):
            log.warning("worker %s %s", name, "answers again" if well[name] else "does not answer")
        self._was_well = well
        if changed:
            self._health_changed()


class SendWindow:
    """Flow control towards one replica: it is sent no more than a window of bytes that it has not read yet.

    A replica's HTTP process parses and tokenizes a request in one go and answers nobody meanwhile. A flood of long
    prompts would therefore make it look dead, and everything in flight there would be given up.

    Rule. After half a window of request bodies the replica is asked whether it is ready (`GET /ready`); the question
    queues behind those bodies, so its answer acknowledges them. When a whole window is unacknowledged, further requests
    wait, the clients in turn. A replica that keeps up is never waited for. Unit: bytes of bodies. Bound: at most two
    windows and two requests are unread, because the answer may overtake what was sent just before the question. Leaks:
    each gateway process has a window of its own.
    """

    def __init__(self, probe: Callable[[], Awaitable[None]]) -> None:
        """`probe` asks the replica whether it is ready, and returns when it has answered or will not."""
        self._probe = probe
        self._unread_bytes = 0
        self._waiting: RoundRobin[tuple[int, asyncio.Future[None]]] = RoundRobin()
        self._probing: asyncio.Task[None] | None = None
        self._is_closed = False

    async def reserve(self, client: str, size: int) -> None:
        """Returns when `client` may send a body of `size` bytes."""
        if self._is_closed or (self._unread_bytes < WINDOW_BYTES and not self._waiting):
            self._count(size)
            return
        waiting = size, asyncio.get_running_loop().create_future()
        self._waiting.add(client, waiting)
        try:
            await waiting[1]
        except asyncio.CancelledError:
            self._waiting.remove(client, waiting)
            raise

    def close(self) -> None:
        """The replica is gone: everyone who waits may go on, and fails by itself."""
        self._is_closed = True
        if self._probing is not None:
            self._probing.cancel()
        while (waiting := self._waiting.next()) is not None:
            self._release(*waiting[1])

    def _count(self, size: int) -> None:
        self._unread_bytes += size
        if self._probing is None and self._unread_bytes > WINDOW_BYTES // 2 and not self._is_closed:
            self._probing = asyncio.create_task(self._acknowledge())

    async def _acknowledge(self) -> None:
        sent_bytes = self._unread_bytes
        await self._probe()
        self._probing = None
        self._unread_bytes -= sent_bytes
        self._count(0)
        while self._unread_bytes < WINDOW_BYTES and (waiting := self._waiting.next()) is not None:
            self._release(*waiting[1])

    def _release(self, size: int, waiting: "asyncio.Future[None]") -> None:
        if not waiting.done():
            waiting.set_result(None)
            self._count(size)
