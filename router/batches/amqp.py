"""A store whose log is a stream of RabbitMQ: several machines have the same batches, and none is lost with one of them.

A stream is kept by several brokers and is read without being used up. A change is published, and has happened when this
machine has applied it (`journal`), which is after a majority of the brokers have it. Each machine has all in a database
of its own, and reads there.

Why no queue of items for each model and class: an item has to be found by its number, closed with its batch, and left
alone while another client's share comes first; a queue gives whoever is first. And a result is kept in one step with
its item's end, which no broker does.

A call that fails because the broker is away may have happened all the same, if that was when the broker went: as with
any database whose connection breaks while it commits. Whoever repeats it finds out.
"""

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from router.batches.contract import StoreError
from router.batches.journal import Change, Logged

log = logging.getLogger(__name__)

STREAM = "sglang-fair.batches"
KEPT = "90D"
"""What is older leaves the stream. No batch is kept so long."""
WAIT_S = 20.0
"""Until a change that was not applied is given up."""
RETRY_S = 1.0
PREFETCH = 256


class AmqpStore(Logged):
    """`contract.Store` of the stream at the broker of `url`, with its database at `path`. Raises `StoreError`, without
    the URL's password."""

    def __init__(self, path: Path, url: str, stream: str = STREAM) -> None:
        try:
            import aio_pika
            import yarl
        except ImportError:
            raise StoreError("a broker needs aio-pika: pip install 'sglang-fair[amqp]'") from None
        self._pika: Any = aio_pika
        self._url, self._stream = url, stream
        try:
            shown = yarl.URL(url)
            self._shown = f"{shown.host}:{shown.port or 5672}{shown.path}"
        except ValueError:
            raise StoreError(
                "SGLANG_FAIR_BROKER is no URL, as amqp://user:password@host:5672/vhost"
            ) from None
        if shown.scheme not in ("amqp", "amqps") or not shown.host:
            raise StoreError("SGLANG_FAIR_BROKER is no URL, as amqp://user:password@host:5672/vhost")
        super().__init__(path)
        self._said: dict[str, tuple[Change, Future[None]]] = {}
        """Changes that were not applied here yet, the oldest first."""
        self._channel: Any = None
        self._broken: asyncio.Future[None] | None = None
        """Of the connection that there is: done when it is no more."""
        self._why = "it does not answer"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="broker", daemon=True)
        self._thread.start()
        self._following = asyncio.run_coroutine_threadsafe(self._follow(), self._loop)
        try:
            self._say("")  # and so all that was said before is here
        except StoreError:
            self.shut()
            raise

    def shut(self) -> None:
        if self._loop.is_running():
            self._following.cancel()
            asyncio.run_coroutine_threadsafe(self._ended(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        super().shut()

    # -- inside: whoever calls

    def _say(self, method: str, *arguments: Any) -> Any:
        """Publishes a change, and waits until it is applied here. Raises `StoreError` if that takes too long."""
        change = Change(uuid4().hex, method, arguments)
        future: Future[None] = Future()
        self._loop.call_soon_threadsafe(self._begin, change, future)
        try:
            future.result(WAIT_S)
        except TimeoutError:
            self._loop.call_soon_threadsafe(self._said.pop, change.id, None)
            self._loop.call_soon_threadsafe(self._connect_anew)
            why = self._why
            if self._channel is not None:  # of a shorter stream nothing comes that is behind its end
                why = f"nothing comes, as if {self._path} had followed another log"
            raise StoreError(f"broker {self._shown}: not within {WAIT_S:g} s: {why}") from None
        return self.outcome(change)

    # -- inside: the loop's thread

    def _begin(self, change: Change, future: "Future[None]") -> None:
        self._said[change.id] = change, future
        if self._channel is not None:
            self._tell(change)

    def _tell(self, change: Change) -> None:
        task = self._loop.create_task(self._publish(self._channel, change))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _publish(self, channel: Any, change: Change) -> None:
        """If it fails the connection is gone, and it is published again with the next one."""
        message = self._pika.Message(msgspec.msgpack.encode(change))
        await channel.default_exchange.publish(message, routing_key=self._stream)

    async def _follow(self) -> None:
        while True:
            try:
                await self._connected()
            except (OSError, TimeoutError, self._pika.exceptions.AMQPError, StoreError, ValueError) as error:
                self._why = " ".join(str(error).split())[:200] or type(error).__name__
                log.warning("broker %s: %s", self._shown, self._why)
            self._channel = None
            await asyncio.sleep(RETRY_S)

    async def _connected(self) -> None:
        """Follows the stream until the connection breaks."""
        connection = await self._pika.connect(self._url, timeout=WAIT_S / 4)
        async with connection:
            channel = await connection.channel(publisher_confirms=True)
            await channel.set_qos(prefetch_count=PREFETCH)
            kind = {"x-queue-type": "stream", "x-max-age": KEPT}
            stream = await channel.declare_queue(self._stream, durable=True, arguments=kind)
            broken = self._broken = self._loop.create_future()

            async def came(message: Any) -> None:
                try:
                    self._apply(int(message.headers["x-stream-offset"]), message.body)
                    await message.ack()
                except Exception as error:
                    if not broken.done():
                        broken.set_exception(error)

            def closed(_: Any, error: BaseException | None = None) -> None:
                if not broken.done():
                    broken.set_exception(OSError(str(error or "the connection has ended")))

            connection.close_callbacks.add(closed)
            channel.close_callbacks.add(closed)
            await stream.consume(came, arguments={"x-stream-offset": self.next})
            self._channel = channel
            for change, _ in list(self._said.values()):
                self._tell(change)
            try:
                await broken
            finally:
                self._channel = self._broken = None

    def _connect_anew(self) -> None:
        """A broker that has moved a stream may end its reader, and say so to nobody."""
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(OSError(f"nothing came for {WAIT_S:g} s"))

    def _apply(self, place: int, body: bytes) -> None:
        before = self.next
        change = self.apply(place, body)
        _, future = self._said.pop(change.id, (None, None))
        if future is not None and not future.done():
            if place < before and not self._knows(change):
                future.set_exception(
                    StoreError(f"{self._path}: it has followed another log than that of broker {self._shown}")
                )
            else:
                future.set_result(None)

    def _knows(self, change: Change) -> bool:
        with self._reading():
            return self._is_known(change.id)

    async def _ended(self) -> None:
        """All tasks of the loop are over."""
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*others, return_exceptions=True)
