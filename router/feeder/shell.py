"""The feeder's process: one event loop between the store and a gateway. What is done is decided in `core`.

One loop asks the store, in a thread: it looks what there is, writes the results that have come since the last turn, and
leases what there is room for. What is leased is sent at once. What cannot be written stays here and is tried again; a
call that has failed may have leased something all the same, so leases are compared with what is in flight. Another loop
validates batches, in another thread.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import aiohttp
import msgspec

from router.batches.folder import Blobs, open_blobs, open_store
from router.batches.lines import Reader, result_id
from router.batches.model import Ending, StoreDamaged, StoreError
from router.feeder.answers import Again, Answer
from router.feeder.core import Feeder, Send
from router.feeder.intake import validation
from router.gateway.access.identity import HEADER_FEEDER, HEADER_ON_BEHALF, HEADER_STANDS_FOR
from router.gateway.record import REQUEST_ID
from sglang_fair.common import tls
from sglang_fair.common.deadlines import HEADER_CLASS, HEADERS_SLO
from sglang_fair.common.fields import Facts
from sglang_fair.common.service_keys import feeder_key
from sglang_fair.settings.table import Feeder as Settings

log = logging.getLogger("feeder")

LOOK_S = 0.5
"""Between two looks at the store: so late is a new batch noticed."""
TURN_S = 0.02
"""Between two turns: what comes meanwhile is written together."""
LEASE_S = 10.0
"""A feeder that has not renewed its leases for so long has lost them. Clocks of machines agree within half of it."""
RENEW_S = 2.0
SWEEP_S = 600.0
STORE_AGAIN_S = 1.0
COMMIT_RESULTS = 1_000
CLOSED_AT_ONCE = 2_000
VALIDATED_AT_ONCE = 8
"""Batches, each of another client."""
MOST_ANSWER_BYTES = 64 << 20
CONNECT_S = 5.0

T = TypeVar("T")


class _ErrorDetail(msgspec.Struct):
    code: str | int | None = None


class _Error(msgspec.Struct):
    error: _ErrorDetail | None = None


class Shell:
    """Runs one feeder. Belongs to one event loop."""

    def __init__(self, settings: Settings) -> None:
        """Raises `StoreError`."""
        self._settings = settings
        self._owner = uuid.uuid4().hex
        self._facts = Facts.allowing(settings.max_logprobs, settings.allow_fields)
        self._trusted = tls.believed(settings.gateway_ca, settings.gateway_cert) or True
        self._blobs: Blobs = open_blobs(settings.batches, settings.batch_files)
        self._store = open_store(settings.batches)
        self.store_name = self._store.name
        token_s = None if settings.batch_token_ms is None else settings.batch_token_ms / 1000
        self._core = Feeder(settings.slo_classes, settings.batch_in_flight, token_s)
        self._threads = ThreadPoolExecutor(1, "store")
        self._validating_threads = ThreadPoolExecutor(1, "validating")
        self._sent: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._endings: list[Ending] = []
        self._released: set[int] = set()
        self._tries: dict[int, int] = {}
        self._is_sure = True
        """Nothing else is leased to it than what is in flight."""
        self._changed, self._is_to_validate = asyncio.Event(), asyncio.Event()
        self._complained_s: dict[str, float] = {}
        self._session: aiohttp.ClientSession

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`. Raises `StoreDamaged`."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._trusted),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )
        running = [
            asyncio.ensure_future(one)
            for one in (self._turns(), self._validate(), self._sweep(), stop.wait())
        ]
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            tasks = (*running, *self._sent.values(), *self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._session.close()
            self._threads.shutdown()
            self._validating_threads.shutdown()
            with contextlib.suppress(StoreError):
                self._store.turn(self._owner, int(time.time()), self._endings, keep=())
            self._store.shut()

    # -- what goes on all the time

    async def _turns(self) -> None:
        looked_s = renewed_s = float("-inf")
        while True:
            now_s = time.monotonic()
            try:
                if now_s >= looked_s + LOOK_S:
                    is_busy = await self._look()
                    looked_s = now_s
                    if is_busy and now_s >= renewed_s + RENEW_S:
                        await self._ask(self._store.renew, self._owner, time.time() + LEASE_S)
                        renewed_s = now_s
                await self._turn(may_lease=renewed_s + LEASE_S / 2 > now_s)
            except StoreError as error:
                self._complain("the store", error)
                self._is_sure = False
                await asyncio.sleep(STORE_AGAIN_S)
                continue
            await asyncio.sleep(TURN_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_S)
            self._changed.clear()

    async def _look(self) -> bool:
        """Whether a batch is open."""
        await self._ask(self._store.reclaim, time.time())
        batches, leased = await self._ask(self._store.open_batches), await self._ask(self._store.leased)
        gone, close = self._core.look(batches, leased, time.time())
        for key in gone:
            if (task := self._sent.pop(key, None)) is not None:
                task.cancel()
        for batch in close:
            task = asyncio.create_task(self._close(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if any(batch.status == "validating" for batch in batches):
            self._is_to_validate.set()
        return bool(batches)

    async def _turn(self, *, may_lease: bool) -> None:
        """Writes what has come, which is here until the store has it, and sends what is leased in the same step."""
        endings, tries, released = self._endings[:COMMIT_RESULTS], self._tries.copy(), self._released.copy()
        wanted, most_bytes = self._core.wanted(time.time()) if may_lease else ({}, 0)
        if not (endings or tries or released or wanted) and self._is_sure:
            return
        keep = None if self._is_sure else self._core.keys
        turn = partial(
            self._store.turn, tries=tries, released=released, keep=keep, wanted=wanted, most_bytes=most_bytes
        )
        found = await self._ask(turn, self._owner, int(time.time()), endings)
        self._is_sure = True
        del self._endings[: len(endings)]
        self._core.unwritten -= len(endings)
        self._tries = dict(self._tries.items() - tries.items())
        self._released -= released
        sends, lost = self._core.leased(wanted, found)
        self._released.update(lost)
        for send in sends:
            self._sent[send.item.key] = asyncio.create_task(self._send(send))
        if self._endings or lost:
            self._changed.set()

    async def _validate(self) -> None:
        """A commit of each batch in turn, of one batch a client."""
        begun: dict[str, Iterator[None]] = {}
        ask = partial(self._ask, threads=self._validating_threads)
        while True:
            try:
                if not begun:
                    await self._is_to_validate.wait()
                if self._is_to_validate.is_set():
                    self._is_to_validate.clear()
                    await self._begin(begun)
                for client, one in list(begun.items()):
                    if await ask(next, one, self) is self:  # at its end
                        del begun[client]
                        self._changed.set()
            except StoreError as error:
                self._complain("batches cannot be validated yet", error)
                begun.clear()
                await asyncio.sleep(STORE_AGAIN_S)

    async def _begin(self, begun: dict[str, Iterator[None]]) -> None:
        settings, store, owner = self._settings, self._store, self._owner
        ask = partial(self._ask, threads=self._validating_threads)
        while len(begun) < VALIDATED_AT_ONCE:
            await ask(store.renew, owner, time.time() + LEASE_S)
            batch = await ask(store.claim, owner, list(begun))
            if batch is None:
                return
            most = settings.batch_line_bytes
            reader = Reader(batch, settings.batch_items, most, self._facts)
            begun[batch.client] = validation(store, self._blobs, batch, owner, reader, most)

    async def _sweep(self) -> None:
        while True:
            keep_s = 86_400 * self._settings.batch_keep_days
            try:
                left = await self._ask(self._store.sweep, int(time.time()), int(time.time() - keep_s))
                self._blobs.sweep(left)
            except StoreError as error:
                self._complain("nothing old is taken away", error)
            await asyncio.sleep(SWEEP_S)

    # -- one item, one batch

    async def _send(self, send: Send) -> None:
        """An item, until it has a result or waits in the store again."""
        key, tries = send.item.key, send.item.tries
        while True:
            sent_s = time.monotonic()
            answer = await self._answer(send)
            answer = answer._replace(took_s=time.monotonic() - sent_s)
            match self._core.answered(send, answer, tries, time.time()):
                case Again(after_s, _, counts):
                    if counts:
                        self._tries[key] = tries = tries + 1
                        self._changed.set()
                    await asyncio.sleep(after_s)
                    continue
                case None:
                    self._released.add(key)
                case ending:
                    self._endings.append(ending)
            self._sent.pop(key, None)
            self._changed.set()
            return

    async def _close(self, batch: str) -> None:
        try:
            while not await self._ask(self._store.close, batch, int(time.time()), CLOSED_AT_ONCE):
                await asyncio.sleep(0)
        except StoreError as error:
            self._complain(f"{batch} cannot be closed yet", error)
        self._core.closed(batch)

    async def _answer(self, send: Send) -> Answer:
        """What a gateway answers."""
        batch = send.batch
        left_ms = max(1.0, 1e3 * (batch.expires_at - time.time()))
        headers = {
            "content-type": "application/json",
            HEADER_FEEDER: feeder_key.key(),
            HEADER_ON_BEHALF: batch.client,
            HEADER_CLASS: send.slo_class,
            HEADERS_SLO[0]: f"{left_ms:.0f}",
            REQUEST_ID: result_id(batch.id, send.item.number),
            HEADER_STANDS_FOR: str(send.stands_for),
        }
        url, body = self._settings.gateway.rstrip("/") + batch.endpoint, b""
        try:
            async with self._session.post(url, data=send.item.body, headers=headers) as response:
                while more := await response.content.read(MOST_ANSWER_BYTES + 1):
                    body += more
                    if len(body) > MOST_ANSWER_BYTES:
                        return Answer(502, b'{"error": {"message": "the answer is too long"}}')
                return _read(response, body)
        except aiohttp.ClientConnectorError as error:
            self._complain("no gateway", error)
            return Answer(0)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("%s: lost a gateway: %s", headers[REQUEST_ID], error)
            return Answer(1, b'{"error": {"message": "the gateway was lost, again and again"}}')

    # -- inside

    async def _ask(
        self, function: Callable[..., T], *given: object, threads: ThreadPoolExecutor | None = None
    ) -> T:
        """What the store answers. Raises `StoreError`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads or self._threads, partial(function, *given))

    def _complain(self, what: str, error: Exception) -> None:
        """Once a minute. Raises what no waiting ends."""
        if isinstance(error, StoreDamaged):
            raise error
        now_s = time.monotonic()
        if now_s - self._complained_s.get(what, float("-inf")) > 60:
            self._complained_s[what] = now_s
            log.warning("%s: %s", what, error)


def _read(response: aiohttp.ClientResponse, body: bytes) -> Answer:
    code, retry_after = "", response.headers.get("retry-after", "")
    if response.status >= 400:
        with contextlib.suppress(msgspec.MsgspecError):
            detail = msgspec.json.decode(body, type=_Error).error
            code = "" if detail is None else str(detail.code or "")
    return Answer(
        max(2, response.status),
        body,
        response.headers.get(REQUEST_ID, ""),
        code,
        float(retry_after) if retry_after.isascii() and retry_after.isdecimal() else None,
    )
