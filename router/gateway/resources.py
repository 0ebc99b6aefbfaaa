"""What the requests of one gateway share: bounds, connections, tokenizer, counters."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp

from router.events import TOKEN_BYTES
from router.gateway.calls import Call, Kind, pack_prompts
from router.gateway.link import Link
from router.gateway.tokens import Tokens
from sglang_fair.core.identity import DEFAULT_ORDER, bounded

log = logging.getLogger("gateway")

PATHS: Mapping[Kind, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/generate",
}
ABORT_TIMEOUT_S = 2.0
LONG_BODY_BYTES = 4096
"""Longer bodies are tokenized off the event loop."""
MAX_ROUTED_TOKENS = 1 << 22
"""Tokens told to the router; beyond them a prompt is counted and compared no further."""


@dataclass(frozen=True)
class Limits:
    """What bounds a gateway."""

    max_in_flight: int = 2048
    max_body_bytes: int = 16 << 20
    tries: int = 3
    connect_timeout_s: float = 2.0
    idle_timeout_s: float = 600.0
    """Longest silence of a replica, its queue included, and of a client that reads too slowly."""
    progress_interval_s: float = 1.0
    """How often the router hears of a stream's output; 0 for never."""


class Gateway:
    """What requests share: connections, tokenizer, limits, counters. Belongs to one event loop."""

    def __init__(
        self,
        model_name: str,
        link: Link,
        tokens: Tokens,
        limits: Limits,
        identity: Sequence[str] = DEFAULT_ORDER,
    ) -> None:
        """`identity` is where a client's name is looked for. `start` opens the connections."""
        self.model_name = model_name
        self.link = link
        self.limits = limits
        self.identity = identity
        self.in_flight = 0
        self.counts = {"requests": 0, "retried": 0, "failed": 0, "left": 0, "refused": 0}
        self._tokens = tokens
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._background: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The HTTP connections to replicas."""
        assert self._session is not None, "the gateway is not started"
        return self._session

    async def start(self) -> None:
        """Opens what belongs to the running loop."""
        self._session = aiohttp.ClientSession(
            # Shorter than the 5 s for which a replica keeps an idle connection: none is reused as it closes.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=self.limits.connect_timeout_s,
                sock_read=self.limits.idle_timeout_s,
            ),
            auto_decompress=False,
            read_bufsize=1 << 18,
        )
        await self.link.start()

    async def close(self) -> None:
        """Lets cancellations under way reach their replicas, then closes everything."""
        if self._background:
            await asyncio.wait(self._background, timeout=ABORT_TIMEOUT_S)
        if self._session is not None:
            await self._session.close()
        await self.link.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def routed_tokens(self, call: Call, body_bytes: int) -> bytes:
        """The tokens that the router is told of."""

        def work() -> bytes:
            return pack_prompts(self._tokens.ids(call))[: MAX_ROUTED_TOKENS * TOKEN_BYTES]

        if body_bytes <= LONG_BODY_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def cancel_work(self, url: str, rids: tuple[str, ...]) -> None:
        """Tells the replica to drop these requests, in the background."""
        for rid in rids:
            self._spawn(self._abort(url, rid))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort(self, url: str, rid: str) -> None:
        try:
            timeout = aiohttp.ClientTimeout(total=ABORT_TIMEOUT_S)
            async with self.session.post(f"{url}/abort_request", json={"rid": rid}, timeout=timeout):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.info("request %s could not be cancelled at %s: %s", rid, url, why(error))


def header_safe(name: str) -> str:
    """`name` as it can stand in a header, so that router and replica know a client by one name.

    Printable ASCII is itself; anything else, line breaks among it, is percent-encoded.
    """
    if name.isascii() and name.isprintable():
        return bounded(name)
    return bounded(quote(name, safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}"))


def why(error: BaseException) -> str:
    """One line that says what went wrong."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
