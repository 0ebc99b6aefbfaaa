"""What a gateway process has of files and batches: the store, the folder of uploads, threads that wait for both."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from router.batches.folder import open_blobs, open_store
from router.batches.model import ClientTotals, FileInUse, StoreError, StoreFull
from router.gateway.errors import ApiError
from router.shared_limit import SharedLimit

THREADS = 4
COUNT_S = 2.0
"""Between two counts of what clients have."""
MOST_UPLOADS = 32
"""At a time in one process, shared by the clients (`shared_limit`); more get 429."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """How large files may be, and how long they are kept."""

    file_bytes: int
    client_bytes: int
    keep_s: int


class Files:
    """Belongs to one event loop. What it waits for, it waits for in threads."""

    def __init__(self, batches: str, uploads: str | None, bounds: Bounds) -> None:
        """`batches` and `uploads` as `folder` has them. Raises `StoreError`."""
        self.blobs = open_blobs(batches, uploads)
        self.store = open_store(batches)
        self.bounds = bounds
        self.uploads = SharedLimit(MOST_UPLOADS)
        self._threads = ThreadPoolExecutor(THREADS, "batches")

    async def run(self, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """What `function` returns, called in a thread. Raises `ApiError` in place of `StoreError`."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, partial(function, *given, **named))
        except StoreError as error:
            raise as_api_error(error) from None

    async def follow(self, tell: Callable[[Mapping[str, ClientTotals]], None]) -> None:
        """Tells what each client has in the store, again and again, until it is cancelled."""
        while True:
            with suppress(ApiError):
                tell(await self.run(self.store.totals))
            await asyncio.sleep(COUNT_S)

    def close(self) -> None:
        """What is being written is waited for."""
        self._threads.shutdown()
        self.store.shut()


def as_api_error(error: StoreError) -> ApiError:
    """As a client hears of it."""
    if isinstance(error, FileInUse):
        return ApiError(409, str(error), code="file_in_use")
    if isinstance(error, StoreFull):
        return ApiError(503, "the disk is full: nothing was accepted", code="disk_full", retry_after_s=60)
    return ApiError(
        503, "files and batches cannot be read or written here", code="store_failed", retry_after_s=10
    )
