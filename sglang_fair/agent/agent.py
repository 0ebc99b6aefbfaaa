"""The agent's process: it carries out the steps that `steps` decides on, and tells the router what the replica has."""

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from router.client import RouterClient
from router.events import Agent as Report
from router.events import Answer, Exchange
from sglang_fair.agent.replica import ReplicaClient
from sglang_fair.agent.steps import Steps, read_ahead
from sglang_fair.cluster.plan import PROGRAMS
from sglang_fair.common.curve import Keys
from sglang_fair.models import checkpoint

log = logging.getLogger("agent")

REPORT_S = 1.0

DISK_BYTES_PER_S = 1e9
"""What is taken for a disk's speed until a model has been loaded."""


class Agent:
    """One agent. `run` it until it is cancelled."""

    def __init__(
        self,
        worker: str,
        url: str,
        router: str,
        folders: Mapping[str, Path],
        keys: Keys | None = None,
        replica_tls: ssl.SSLContext | None = None,
    ) -> None:
        """Reads what is in the folders. With `keys`, the router must have its own; `replica_tls` is for an https://
        address of the replica. ValueError and OSError for models that cannot share a server."""
        self._client = RouterClient(router, keys, on_event=self._take)
        self._exchanges: asyncio.Queue[Exchange] = asyncio.Queue()
        self._replica_tls = replica_tls
        self._worker, self._url = worker, url
        self._folders = dict(folders)
        self._checkpoints = checkpoint.alike(self._folders)
        self._sizes = {name: one.bytes for name, one in self._checkpoints.items()}
        self._steps = Steps({name: 0.05 + size / DISK_BYTES_PER_S for name, size in self._sizes.items()})
        self._changed = asyncio.Event()
        """The router is to hear of something."""
        self._ordered = asyncio.Event()
        """There is something to do before the next look would be due."""
        self._was_read: tuple[str, ...] = ()
        self._is_ready = False
        self._complaint = ""
        """What the router has against what was said last."""

    async def run(self) -> None:
        """Until it is cancelled."""
        async with (
            self._client,
            ReplicaClient(self._url, self._folders, next(iter(self._folders)), self._replica_tls) as replica,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._step(replica))
            tasks.create_task(self._report())
            tasks.create_task(self._listen())

    async def _step(self, replica: ReplicaClient) -> None:
        while True:
            do = self._steps.next()
            if do.after_s:
                await self._pause(do.after_s)
                if self._steps.next() is not do:
                    continue  # an order has come
            before = self._said()
            if do.step != "look":
                log.info("%s: %s", do.step, do.model)
            answer = await replica.do(do)
            if answer.error and do.step != "look":
                log.warning("%s of %s failed: %s", do.step, do.model, answer.error)
            self._steps.answer(answer, time.monotonic())
            if self._said() != before:
                self._changed.set()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ordered.wait(), seconds)
        self._ordered.clear()

    def _said(self) -> tuple[object, ...]:
        steps = self._steps
        return steps.loaded, steps.done, steps.busy, steps.error

    async def _report(self) -> None:
        while True:
            self._changed.clear()
            steps = self._steps
            report = Report(
                "report", self._worker, steps.loaded, steps.done, steps.error, steps.busy, steps.ordered,
                {name: round(seconds, 4) for name, seconds in steps.swap_s.items()},
            )  # fmt: skip
            self._client.tell(report)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), REPORT_S)

    def _take(self, answer: Answer) -> None:
        if isinstance(answer, Exchange) and answer.worker == self._worker:
            self._exchanges.put_nowait(answer)

    async def _listen(self) -> None:
        while True:
            await self._told(await self._exchanges.get())

    async def _told(self, answer: Exchange) -> None:
        if answer.complaint != self._complaint:
            self._complaint = answer.complaint
            log.info("the router says: %s", answer.complaint or "all is well")
        before = self._said()
        if answer.number:
            self._steps.order(answer.number, answer.model, time.monotonic())
        if self._said() != before:
            self._ordered.set()
            self._changed.set()
        if self._steps.loaded and not self._is_ready:
            self._is_ready = True
            print(f"{PROGRAMS['agent'].ready}: {self._worker} has {self._steps.loaded}", flush=True)
        await self._read_ahead(answer.ahead)

    async def _read_ahead(self, ahead: tuple[str, ...]) -> None:
        available = psutil.virtual_memory().available
        chosen = read_ahead(ahead, self._steps.loaded, self._sizes, available)
        if chosen == self._was_read:
            return
        self._was_read = chosen
        for model in chosen:
            log.info("%s is read into the page cache", model)
            with contextlib.suppress(OSError):
                await asyncio.to_thread(checkpoint.read_ahead, self._checkpoints[model])
