"""What the requests of one gateway share: bounds, connections, tokenizer, counters."""

import asyncio
import contextlib
import logging
import uuid
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from functools import partial
from ipaddress import IPv6Address
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from router.events import TOKEN_BYTES, Arrive, Done, Place, Refuse
from router.gateway.errors import ApiError
from router.gateway.limits import Limits
from router.gateway.replicas.connections import Connections
from router.gateway.replicas.context import Contexts
from router.gateway.replicas.flow_control import SendWindow
from router.gateway.replicas.health import Health
from router.gateway.request.call import LARGE_BODY_BYTES, Call, Prompt, check_size, parse
from router.gateway.request.continuation import Kind
from router.gateway.request.tokens import Tokens, TooLong
from router.gateway.routing.fleet import Fleet
from router.gateway.routing.link import Link, RouterGone
from router.gateway.sharing.thread_pool import FairThreadPool
from router.shared_limit import SharedLimit
from sglang_fair.common.identity import DEFAULT_ORDER, bounded

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
CHARS_PER_TOKEN = 4
"""Of a text that has not been tokenized, as `max_prompt_tokens` counts it."""
THREADS = 2
"""For what would hold up the event loop: parsing and tokenizing."""

LISTED_CLIENTS = 10
"""Of those with most requests in flight so many are shown."""


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
        self.places = SharedLimit(limits.max_in_flight)
        self.bytes = SharedLimit(limits.max_held_bytes)
        self.connections = SharedLimit(limits.max_connections)
        self.counts = dict.fromkeys(
            ("requests", "retried", "resumed", "placed in fallback", "failed", "left", "refused"), 0
        )
        self.refusals: Counter[int] = Counter()
        self._tokens = tokens
        self._threads = FairThreadPool(THREADS)
        self._contexts = Contexts(lambda: self.fleet.workers)
        self._paces: dict[str, SendWindow] = {}
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
        self._asking = [
            asyncio.create_task(self.health.run(self._session)),
            asyncio.create_task(self._contexts.run(self._session)),
        ]

    async def close(self) -> None:
        """Lets cancellations under way reach their replicas, then closes everything."""
        for task in self._asking:
            task.cancel()
        for pace in self._paces.values():
            pace.close()
        if self._background:
            await asyncio.wait(self._background, timeout=ABORT_TIMEOUT_S)
        self.replicas.close()
        if self._session is not None:
            await self._session.close()
        await self.link.close()
        self._threads.close()

    @property
    def context_tokens(self) -> int | None:
        """How long a prompt may be; None when it is not known."""
        return self.limits.max_context_tokens or self._contexts.tokens

    @property
    def _most_tokens(self) -> int:
        """In all prompts of a request together."""
        return max(self.limits.max_prompt_tokens, 2 * (self.context_tokens or 0))

    async def parsed(self, kind: Kind, raw: bytes, share: str) -> Call:
        """A body, checked; a large one in the turn of `share`. Raises `ApiError`."""
        if len(raw) <= LARGE_BODY_BYTES:
            return parse(kind, raw, self.model_name)

        def steps() -> Iterator[Call | None]:
            check_size(raw, self._most_tokens)
            yield None
            yield parse(kind, raw, self.model_name)

        _, call = await self._threads.run(share, steps())
        assert call is not None
        return call

    async def routed_tokens(self, call: Call, share: str) -> bytes:
        """The tokens that the router is told of; those of long texts are made in the turn of `share`.

        Raises `ApiError` for a prompt that is too long for the model.
        """
        context_tokens = self.context_tokens
        try:
            if len(call.encoded) > LARGE_BODY_BYTES:
                pieces = await self._threads.run(share, self._pieces(call, context_tokens))
            else:
                prompts = self._tokens.prompts(call)
                self._check_length(call, prompts, context_tokens)
                made = self._tokens.pieces(call, prompts, context_tokens)
                if self._tokens.uncached_chars(prompts) <= LONG_TEXT_CHARS:
                    pieces = list(made)
                else:
                    pieces = await self._threads.run(share, made)
        except TooLong:
            raise _too_long(call, context_tokens) from None
        return b"".join(pieces)[: MAX_ROUTED_TOKENS * TOKEN_BYTES]

    def _pieces(self, call: Call, context_tokens: int | None) -> Iterator[bytes]:
        prompts = self._tokens.prompts(call)
        self._check_length(call, prompts, context_tokens)
        yield from self._tokens.pieces(call, prompts, context_tokens)

    def _check_length(self, call: Call, prompts: tuple[Prompt, ...], context_tokens: int | None) -> None:
        """What can be told of prompts from their length alone."""
        if context_tokens is not None and any(
            self._tokens.least_tokens(one) > context_tokens for one in prompts
        ):
            raise TooLong
        most = self._most_tokens
        if sum(len(one) / (CHARS_PER_TOKEN if isinstance(one, str) else 1) for one in prompts) > most:
            raise ApiError(
                400,
                f"all prompts together have more than {most} tokens or {CHARS_PER_TOKEN * most} characters",
                code="prompt_too_large",
                param=call.param,
            )

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

    def pace(self, url: str) -> SendWindow:
        """How fast the replica at `url` is given what it has to read."""
        found = self._paces.get(url)
        if found is None:
            known = {up.url.rstrip("/") for up in self.fleet.workers.values()}
            for gone in self._paces.keys() - known:
                self._paces.pop(gone).close()
            found = self._paces[url] = SendWindow(partial(self._is_through, url))
        return found

    async def _is_through(self, url: str) -> None:
        """Returns when the replica has come to a question behind all that it was sent, or does not answer."""
        try:
            timeout = aiohttp.ClientTimeout(total=self.limits.health_timeout_s)
            async with self.session.get(f"{url}/ready", timeout=timeout):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.info("%s does not say whether it has read what it was sent: %s", url, why(error))

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
            "connections": self.connections.taken,
            "context_tokens": self.context_tokens,
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


def _too_long(call: Call, context_tokens: int | None) -> ApiError:
    return ApiError(
        400,
        f"this model's maximum context length is {context_tokens} tokens, and `{call.param}` is longer",
        code="context_length_exceeded",
        param=call.param,
    )


def header_safe(name: str) -> str:
    """`name` as it can stand in a header, so that router and replica know a client by one name.

    Printable ASCII is itself; anything else, line breaks among it, is percent-encoded.
    """
    if name.isascii() and name.isprintable():
        return bounded(name)
    return bounded(quote(name, safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}"))


def address_share(peer: Sequence[Any] | None) -> str:
    """Whose share a request counts for while nothing but its peer, (host, port), is known.

    No client has such a name (`bounded`). Of an IPv6 address the first 64 bits, which is what one site has.
    """
    host = str(peer[0]) if peer else ""
    if ":" in host:
        with contextlib.suppress(ValueError):
            host = str(IPv6Address(int(IPv6Address(host)) >> 64 << 64))
    return f"({host})"


def why(error: BaseException) -> str:
    """One line that says what went wrong."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
