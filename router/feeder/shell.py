"""The feeder's process: one event loop between the store, a gateway and the routers. What is done is decided in `core`.

The store is asked in threads: one for what waits for answers, one for validating. Results are written together, so many
as have come while the last ones were written. What cannot be written stays here and is tried again.
"""

import asyncio
import contextlib
import fcntl
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, TypeVar, assert_never

import aiohttp
import msgspec

from router.batches.blobs import Blobs
from router.batches.contract import Store, StoreDamaged, StoreError
from router.batches.folder import MARK, open_blobs, open_store
from router.batches.lines import result_id
from router.batches.model import ClientTotals, Ending, StoredBatch
from router.events import MOST_ROWS, MOST_TOTALS, Backlog, ClientItems
from router.feeder.answers import Answer
from router.feeder.core import Abort, Action, Close, Feeder, Keep, Load, Send, Write
from router.feeder.intake import Validation, unreadable
from router.feeder.link import Link
from router.gateway.access.identity import HEADER_FEEDER, HEADER_ON_BEHALF, HEADER_STANDS_FOR
from router.gateway.record import REQUEST_ID
from sglang_fair.common import tls
from sglang_fair.common.curve import Keys
from sglang_fair.common.deadlines import HEADER_CLASS, HEADERS_SLO
from sglang_fair.common.fields import Facts
from sglang_fair.common.service_keys import feeder_key
from sglang_fair.settings.table import Feeder as Settings

log = logging.getLogger("feeder")

LOOK_S = 0.5
"""Between two looks at the store: so late is a new batch noticed."""
TELL_S = 1.0
SWEEP_S = 600.0
STORE_AGAIN_S = 1.0
COMMIT_RESULTS = 500
CLOSED_AT_ONCE = 2_000
VALIDATED_AT_ONCE = 8
"""Batches, each of another client."""
MOST_ANSWER_BYTES = 64 << 20
CONNECT_S = 5.0
MARK_S = 20.0
"""Longest wait for the feeder before, which may be dying."""

T = TypeVar("T")


class Usage(msgspec.Struct):
    """What an answer says of its tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Told(msgspec.Struct):
    usage: Usage | None = None


class _ErrorDetail(msgspec.Struct):
    code: str | int | None = None


class _Error(msgspec.Struct):
    error: _ErrorDetail | None = None


class AnotherFeeder(Exception):
    """The folder has a feeder that lives."""


class Shell:
    """Runs one feeder. Belongs to one event loop."""

    def __init__(self, settings: Settings, keys: Keys | None = None) -> None:
        """`keys` are those for routers. Raises `StoreError`."""
        self._settings = settings
        self._facts = Facts.allowing(settings.max_logprobs, settings.allow_fields)
        self._trusted = tls.believed(settings.gateway_ca, settings.gateway_cert) or True
        self._folder = Path(settings.batches)
        self._blobs: Blobs = open_blobs(self._folder)
        self._store: Store = open_store(self._folder)
        self._validating_store: Store = open_store(self._folder)
        self._core = Feeder(settings.slo_classes, settings.batch_in_flight)
        self._link = Link(settings.router, lambda _: None, keys)
        self._threads = ThreadPoolExecutor(1, "store")
        self._validating_threads = ThreadPoolExecutor(1, "validating")
        self._sent: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._to_write: list[tuple[Ending, str]] = []
        """Each with the model that it is of."""
        self._to_keep: dict[str, dict[int, int]] = {}
        """Tries of items, by batch."""
        self._has_results = asyncio.Event()
        self._is_validating: set[str] = set()
        self._to_validate: OrderedDict[str, StoredBatch] = OrderedDict()
        self._has_batches = asyncio.Event()
        self._totals: dict[str, ClientTotals] = {}
        self._complained_s: dict[str, float] = {}
        self._session: aiohttp.ClientSession

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`. Raises `StoreDamaged` and `AnotherFeeder`."""
        mark = await _marked(self._folder / MARK)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._trusted),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )
        self._link.start()
        loops = [self._look(), self._tell(), self._write(), self._validate(), self._sweep(), stop.wait()]
        running = [asyncio.ensure_future(one) for one in loops]
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            for task in (*running, *self._sent.values(), *self._tasks):
                task.cancel()
            await asyncio.gather(*running, *self._sent.values(), *self._tasks, return_exceptions=True)
            with contextlib.suppress(StoreError):
                self._store.finish([one for one, _ in self._to_write], _now_s())
            await self._session.close()
            await self._link.close()
            self._threads.shutdown()
            self._validating_threads.shutdown()
            self._store.shut()
            self._validating_store.shut()
            mark.close()

    # -- what goes on all the time

    async def _look(self) -> None:
        while True:
            try:
                batches = await self._ask(self._store.open_batches)
                parts = await self._ask(self._store.parts)
                self._totals = dict(await self._ask(self._store.totals))
            except StoreError as error:
                self._complain("the store", error)
                await asyncio.sleep(STORE_AGAIN_S)
                continue
            self._core.replicas(self._link.replicas())
            self._do(self._core.look(batches, parts, time.time()))
            for batch in batches:
                if batch.status == "validating" and batch.id not in self._is_validating:
                    self._is_validating.add(batch.id)
                    self._to_validate[batch.id] = batch
                    self._has_batches.set()
            await asyncio.sleep(LOOK_S)

    async def _tell(self) -> None:
        while True:
            rows = tuple(self._core.backlog(time.time(), MOST_ROWS))
            most = sorted(self._totals.items(), key=lambda pair: (-pair[1].left, pair[0]))[:MOST_TOTALS]
            clients = tuple(ClientItems(name, one.left, one.completed, one.failed) for name, one in most)
            self._link.tell(Backlog(rows, clients))
            await asyncio.sleep(TELL_S)

    async def _write(self) -> None:
        while True:
            await self._has_results.wait()
            taken = self._to_write[:COMMIT_RESULTS]
            endings = [ending for ending, _ in taken]
            try:
                await self._ask(self._store.finish, endings, _now_s())
            except StoreError as error:
                self._complain("results wait for the store", error)
                await asyncio.sleep(STORE_AGAIN_S)
                continue
            del self._to_write[: len(taken)]
            if not self._to_write:
                self._has_results.clear()
            models = {(ending.batch, ending.number): model for ending, model in taken}
            self._do(self._core.written(endings, models, time.time()))

    async def _validate(self) -> None:
        """A commit of each batch in turn, of one batch a client."""
        begun: OrderedDict[str, Validation] = OrderedDict()
        while True:
            if not begun and not self._to_validate:
                self._has_batches.clear()
                await self._has_batches.wait()
            for name, batch in list(self._to_validate.items()):
                if batch.client not in begun and len(begun) < VALIDATED_AT_ONCE:
                    del self._to_validate[name]
                    begun[batch.client] = self._validation(batch)
            for client, validation in list(begun.items()):
                if await self._step(validation):
                    del begun[client]
                    self._is_validating.discard(validation.batch.id)

    async def _step(self, validation: Validation) -> bool:
        """Whether it is over."""
        name = validation.batch.id
        try:
            return await self._ask(validation.step, _now_s(), threads=self._validating_threads)
        except StoreDamaged:
            raise
        except StoreError as error:
            self._complain(f"{name} cannot be validated yet", error)
            file = self._blobs.path(validation.batch.input_file)
            if not file.exists():
                issues = (unreadable("the file is gone"),)
                with contextlib.suppress(StoreError):
                    await self._ask(self._validating_store.fail, name, issues, _now_s())
            await asyncio.sleep(STORE_AGAIN_S)
            return True  # from the beginning, after the next look

    def _validation(self, batch: StoredBatch) -> Validation:
        settings = self._settings
        return Validation(
            self._validating_store,
            self._blobs,
            batch,
            settings.batch_items,
            settings.batch_line_bytes,
            self._facts,
        )

    async def _sweep(self) -> None:
        while True:
            keep_s = 86_400 * self._settings.batch_keep_days
            try:
                for name in await self._ask(self._store.sweep, _now_s(), int(time.time() - keep_s)):
                    self._blobs.remove(name)
                self._blobs.sweep(await self._ask(self._store.uploaded))
            except StoreError as error:
                self._complain("nothing old is taken away", error)
            await asyncio.sleep(SWEEP_S)

    # -- what the core wants done

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(key, item):
                    task = asyncio.create_task(self._send(action))
                    self._sent[key[0], item.number] = task
                case Abort(key, number):
                    sent = self._sent.pop((key[0], number), None)
                    if sent is not None:
                        sent.cancel()
                case Write(ending, model):
                    self._to_write.append((ending, model))
                    self._has_results.set()
                case Load():
                    self._start(self._load(action))
                case Keep(batch, number, tries):
                    if not self._to_keep:
                        self._start(self._keep())
                    self._to_keep.setdefault(batch, {})[number] = tries
                case Close(batch):
                    self._start(self._close(batch))
                case _:
                    assert_never(action)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, load: Load) -> None:
        try:
            items = await self._ask(self._store.items, *load.key, load.after, load.limit)
        except StoreError as error:
            self._complain("nothing can be read", error)
            await asyncio.sleep(STORE_AGAIN_S)
            self._core.not_loaded(load)
            return
        self._do(self._core.loaded(load, items, time.time()))

    async def _keep(self) -> None:
        """All that there is: one commit a batch."""
        taken, self._to_keep = self._to_keep, {}
        for batch, tries in taken.items():
            try:
                await self._ask(self._store.tried, batch, tries)
            except StoreError as error:
                self._complain("tries are not kept", error)

    async def _close(self, batch: str) -> None:
        try:
            while not await self._ask(self._store.close, batch, _now_s(), CLOSED_AT_ONCE):
                await asyncio.sleep(0)
        except StoreError as error:
            self._complain(f"{batch} cannot be closed yet", error)
        self._core.closed(batch)

    async def _send(self, send: Send) -> None:
        answer, tokens = await self._answer(send)
        self._sent.pop((send.key[0], send.item.number), None)
        self._do(self._core.answered(send, answer, tokens, time.time()))

    async def _answer(self, send: Send) -> tuple[Answer, int]:
        """What a gateway answers, and the tokens that it took."""
        left_ms = max(1.0, 1e3 * (send.due_s - time.time()))
        headers = {
            "content-type": "application/json",
            HEADER_FEEDER: feeder_key.key(),
            HEADER_ON_BEHALF: send.client,
            HEADER_CLASS: send.slo_class,
            HEADERS_SLO[0]: f"{left_ms:.0f}",
            REQUEST_ID: result_id(send.key[0], send.item.number),
            HEADER_STANDS_FOR: str(send.stands_for),
        }
        url, has_begun = self._settings.gateway.rstrip("/") + send.endpoint, False
        try:
            async with self._session.post(url, data=send.item.body, headers=headers) as response:
                has_begun = True
                body = await response.content.read(MOST_ANSWER_BYTES + 1)
                while more := await response.content.read(MOST_ANSWER_BYTES + 1):
                    body += more
                    if len(body) > MOST_ANSWER_BYTES:
                        return Answer(502, b'{"error": {"message": "the answer is too long"}}'), 0
                return _read(response, body)
        except aiohttp.ClientConnectorError as error:
            self._complain("no gateway", error)
            return Answer(0), 0
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("%s: lost a gateway (%s): %s", headers[REQUEST_ID], has_begun, error)
            return Answer(1, b'{"error": {"message": "the gateway was lost, again and again"}}'), 0

    # -- inside

    async def _ask(
        self, function: Callable[..., T], *given: object, threads: ThreadPoolExecutor | None = None
    ) -> T:
        """What the store answers. Raises `StoreError`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads or self._threads, partial(function, *given))

    def _complain(self, what: str, error: Exception) -> None:
        """Once a minute. Raises what nobody can wait for to end."""
        if isinstance(error, StoreDamaged):
            raise error
        now_s = time.monotonic()
        if now_s - self._complained_s.get(what, float("-inf")) > 60:
            self._complained_s[what] = now_s
            log.warning("%s: %s", what, error)


def _read(response: aiohttp.ClientResponse, body: bytes) -> tuple[Answer, int]:
    code, tokens = "", 0
    if response.status >= 400:
        with contextlib.suppress(msgspec.MsgspecError):
            detail = msgspec.json.decode(body, type=_Error).error
            code = "" if detail is None else str(detail.code or "")
    else:
        with contextlib.suppress(msgspec.MsgspecError):
            usage = msgspec.json.decode(body, type=_Told).usage
            tokens = 0 if usage is None else usage.prompt_tokens + usage.completion_tokens
    retry_after = response.headers.get("retry-after", "")
    return (
        Answer(
            max(2, response.status),
            body,
            response.headers.get(REQUEST_ID, ""),
            code,
            float(retry_after) if retry_after.isascii() and retry_after.isdecimal() else None,
        ),
        tokens,
    )


async def _marked(path: Path) -> IO[bytes]:
    """The folder is ours as long as this file is open. Raises `AnotherFeeder`."""
    file = path.open("ab")
    until_s = time.monotonic() + MARK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            if time.monotonic() > until_s:
                file.close()
                raise AnotherFeeder(f"{path.parent} has another feeder") from None
        await asyncio.sleep(0.1)


def _now_s() -> int:
    return int(time.time())
