"""What a gateway process has open towards replicas: connections, health checks, send windows, cancellations."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import aiohttp

from router.events import WorkerUp
from router.gateway.errors import describe
from router.gateway.replicas.connections import Asking, Connections
from router.gateway.replicas.context import Contexts
from router.gateway.replicas.flow_control import SendWindow
from router.gateway.replicas.health import Health
from sglang_fair.common.service_keys import replica_key
from sglang_fair.settings.table import Limits

log = logging.getLogger("gateway")

ABORT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 3.0
"""Less than the 5 s for which a replica keeps an idle connection, so that none is reused as it closes."""


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
        self._tls = tls
        self.health = Health(limits.health_timeout_s, workers, self.get, health_changed)
        self.connections = Connections(limits.connect_timeout_s, limits.idle_timeout_s, tls)
        self._limits = limits
        self._workers = workers
        self._contexts = Contexts(workers, self.get)
        self._windows: dict[str, SendWindow] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._asking: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        self._key = replica_key.headers()

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            headers=self._key,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=self._tls or True),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=self._limits.connect_timeout_s,
                sock_read=self._limits.idle_timeout_s,
            ),
        )
        self._asking = [
            asyncio.create_task(self.health.run()),
            asyncio.create_task(self._contexts.run()),
        ]

    async def close(self) -> None:
        """Gives cancellations under way the time to reach their replicas, then closes everything."""
        for task in self._asking:
            task.cancel()
        for window in self._windows.values():
            window.close()
        if self._background:
            await asyncio.wait(self._background, timeout=ABORT_TIMEOUT_S)
        self.connections.close()
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """For everything but clients' requests: health checks, contexts, cancellations."""
        assert self._session is not None, "the gateway has not been started"
        return self._session

    def context_tokens(self, model: str) -> int | None:
        """How long a prompt for `model` may be; None while that is unknown."""
        return self._limits.max_context_tokens or self._contexts.tokens(model)

    def post(
        self, url: str, path: str, headers: Mapping[str, str], body: bytes, patience_s: float = 0.0
    ) -> Asking:
        """`async with` it: a client's request on its way to the replica at `url`; `patience_s` as in
        `Connections.post`."""
        headers = {**headers, **self._key} if self._key else headers
        return self.connections.post(url, path, headers, body, patience_s)

    def window(self, url: str) -> SendWindow:
        window = self._windows.get(url)
        if window is None:
            known = {up.url.rstrip("/") for up in self._workers().values()}
            for gone in self._windows.keys() - known:
                self._windows.pop(gone).close()
            window = self._windows[url] = SendWindow(partial(self._probe, url))
        return window

    def cancel_work(self, url: str, rids: tuple[str, ...]) -> None:
        """Tells the replica, in the background, to drop these requests."""
        for rid in rids:
            self._spawn(self._abort(url, rid))

    async def get(self, url: str, path: str, timeout_s: float = ANSWER_TIMEOUT_S) -> tuple[int, bytes]:
        """Status and body with which the replica at `url` answers. Raises OSError, TimeoutError among these, with a
        text."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self.session.get(url.rstrip("/") + path, timeout=timeout) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            kind = TimeoutError if isinstance(error, TimeoutError) else OSError
            raise kind(describe(error)) from error

    async def _probe(self, url: str) -> None:
        """Returns when the replica has answered a question that queues behind everything sent, or does not answer."""
        try:
            await self.get(url, "/ready", self._limits.health_timeout_s)
        except OSError as error:
            log.info("%s does not say whether it has read what it was sent: %s", url, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort(self, url: str, rid: str) -> None:
        try:
            timeout = aiohttp.ClientTimeout(total=ABORT_TIMEOUT_S)
            async with self.session.post(f"{url}/abort_request", json={"rid": rid}, timeout=timeout):
                pass
        except (aiohttp.ClientError, OSError) as error:
            log.info("request %s could not be cancelled at %s: %s", rid, url, describe(error))
