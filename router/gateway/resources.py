"""What the requests of one gateway share: bounds, connections, tokenizer, counters."""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from router.events import TOKEN_BYTES, Arrive, Done, Place, Refuse
from router.gateway.calls import Call
from router.gateway.connections import Connections
from router.gateway.fleet import Fleet
from router.gateway.health import Health
from router.gateway.link import Link, RouterGone
from router.gateway.room import Room
from router.gateway.sampling import Kind
from router.gateway.tokens import Tokens
from sglang_fair.core.identity import DEFAULT_ORDER, bounded

log = logging.getLogger("gateway")

PATHS: Mapping[Kind, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/generate",
}
ABORT_TIMEOUT_S = 2.0
LONG_TEXT_CHARS = 4096
"""More text than this is tokenized off the event loop, where it would take more than a millisecond. To hand over
less costs more than it saves: the thread has to wait for the interpreter twice."""
MAX_ROUTED_TOKENS = 1 << 22
"""Tokens told to the router; beyond them a prompt is counted and compared no further."""

LISTED_CLIENTS = 10
"""Of those with most requests in flight so many are shown."""


@dataclass(frozen=True)
class Limits:
    """What bounds a gateway."""

    max_in_flight: int = 4096
    """Requests at a time, shared by the clients as `room` says."""
    max_body_bytes: int = 16 << 20
    max_held_bytes: int = 512 << 20
    """Of all bodies that are being read or served; shared likewise."""
    tries: int = 3
    connect_timeout_s: float = 2.0
    idle_timeout_s: float = 600.0
    """Longest silence of a replica, its queue included, and of a client that reads too slowly."""
    health_timeout_s: float = 10.0
    """A replica that nothing comes from for this long is given up."""
    progress_interval_s: float = 1.0
    """How often the router hears of a stream's output; 0 for never."""


class Gateway:
    """What requests share: connections, tokenizer, limits, counters. Belongs to one event loop."""

    def __init__(
        self,
        model_name: str,
        router: str,
        router_timeout_s: float,
        tokens: Tokens,
        limits: Limits,
        identity: Sequence[str] = DEFAULT_ORDER,
    ) -> None:
        """`identity` is where a client's name is looked for. `start` opens the connections."""
        self.model_name = model_name
        self.fleet = Fleet(lambda worker: self.health.is_well(worker))
        self.link = Link(router, router_timeout_s, self.fleet)
        self.health = Health(limits.health_timeout_s, lambda: self.fleet.workers, self._tell_health)
        self.limits = limits
        self.identity = identity
        self.places = Room(limits.max_in_flight)
        self.bytes = Room(limits.max_held_bytes)
        self.counts = dict.fromkeys(
            ("requests", "retried", "resumed", "placed in fallback", "failed", "left", "refused"), 0
        )
        self.refusals: Counter[int] = Counter()
        self._tokens = tokens
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._background: set[asyncio.Task[None]] = set()
        self.replicas = Connections(limits.connect_timeout_s, limits.idle_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """For what is asked of replicas besides requests: are they ready, and to cancel."""
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
        )
        await self.link.start()
        self._asking = asyncio.create_task(self.health.run(self._session))

    async def close(self) -> None:
        """Lets cancellations under way reach their replicas, then closes everything."""
        self._asking.cancel()
        if self._background:
            await asyncio.wait(self._background, timeout=ABORT_TIMEOUT_S)
        self.replicas.close()
        if self._session is not None:
            await self._session.close()
        await self.link.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def routed_tokens(self, call: Call) -> bytes:
        """The tokens that the router is told of."""
        prompts = self._tokens.prompts(call)
        if self._tokens.uncached_chars(call, prompts) <= LONG_TEXT_CHARS:
            tokens = self._tokens.packed(call, prompts)
        else:
            loop = asyncio.get_running_loop()
            tokens = await loop.run_in_executor(self._threads, self._tokens.packed, call, prompts)
        return tokens[: MAX_ROUTED_TOKENS * TOKEN_BYTES]

    async def place(self, arrive: Arrive) -> Place | Refuse:
        """The router's word; while no router answers, our own. Raises `RouterGone` when we know no worker.

        The request that is answered may have another id.
        """
        if self.link.alive:
            self.fleet.ask(arrive)
            try:
                answer = await self.link.place(arrive)
            except BaseException as error:
                # Behind the question on the same connection: whatever it was answered is undone.
                self.end(Done(arrive.id, outcome="failed"))
                if not isinstance(error, RouterGone):
                    raise
                log.info("request %s: %s", arrive.id, error)
            else:
                if isinstance(answer, Place):
                    self.fleet.begin(arrive, answer, told=True)
                else:
                    self.fleet.refused(arrive.id)
                return answer
            arrive = msgspec.structs.replace(arrive, id=uuid.uuid4().hex)
        found = self.fleet.place(arrive)
        if found is None:
            raise RouterGone("no router answers, and no replica is known that does")
        self.counts["placed in fallback"] += 1
        self.fleet.begin(arrive, found, told=False)
        return found

    def end(self, done: Done) -> None:
        """A request that went to a worker is over, or one that was asked about will not go."""
        if self.fleet.end(done):
            self.link.tell(done)

    def state(self) -> dict[str, object]:
        """What this process counts."""
        return {
            "in_flight": self.places.taken,
            "in_flight_by_client": self.places.most(LISTED_CLIENTS),
            "held_bytes": self.bytes.taken,
            "workers": len(self.fleet.workers),
            "sick": self.health.sick(),
            "refusals": {str(status): count for status, count in sorted(self.refusals.items())},
            **self.counts,
        }

    def text(self, ids: Sequence[int], hide_special: bool) -> str:
        """The text of token ids."""
        return self._tokens.text(ids, hide_special)

    def _tell_health(self) -> None:
        for event in self.fleet.health():
            self.link.tell(event)

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
