"""The agent's process: it carries out the steps that `steps` decides on, and tells the router what the replica has."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from router.client import RouterClient
from router.events import Agent as Report
from router.events import Answer as RouterAnswer
from router.events import Exchange
from sglang_fair.agent.steps import Answer, Do, Steps, read_ahead
from sglang_fair.cluster.plan import PROGRAMS
from sglang_fair.common import tls
from sglang_fair.common.service_keys import replica_key
from sglang_fair.common.swapping import HEADER_MODEL, HEADER_PROBE, PATH, seen
from sglang_fair.models import checkpoint
from sglang_fair.settings import protection
from sglang_fair.settings.table import AgentSettings

log = logging.getLogger("agent")

REPORT_S = 1.0

DISK_BYTES_PER_S = 1e9
"""What is taken for a disk's speed until a model has been loaded."""

LOOK_TIMEOUT_S = 10.0
STEP_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 1800.0
"""Of weights on a slow disk."""

PROBE = {
    "input_ids": [1, 2, 3, 4],
    "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
}


class ReplicaClient:
    """The replica as its agent reaches it: HTTP requests for each step of `steps`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, folders: Mapping[str, Path]) -> None:
        """`folders` are the models' by name; all must be like the first, with which they are compared before each
        load."""
        self._session = session
        self._url = url.rstrip("/")
        self._folders = folders
        self._first = next(iter(folders))
        self._run = ""

    async def do(self, do: Do) -> Answer:
        """One step, and what came of it."""
        try:
            match do.step:
                case "look":
                    found = seen(await self._ask("GET", PATH, timeout_s=LOOK_TIMEOUT_S))
                    self._run = found.run
                    return Answer(found)
                case "check":
                    await asyncio.to_thread(self._check, do.model)
                case "load":
                    await self._load(do.model)
                case "probe":
                    headers = {HEADER_PROBE: self._run, HEADER_MODEL: do.model}
                    answer = await self._ask("POST", "/generate", PROBE, headers)
                    tokens = answer.get("output_ids") if isinstance(answer, Mapping) else None
                    if not isinstance(tokens, list) or len(tokens) != 1:
                        raise ValueError(f"it does not generate: {answer!r:.200}")
                case _:
                    await self._ask("POST", PATH, {"state": do.step, "model": do.model})
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            return Answer(error=f"{do.step}: {type(error).__name__}: {error}", is_gone=True)
        except (ValueError, OSError) as error:
            return Answer(error=str(error))
        return Answer()

    def _check(self, model: str) -> None:
        """Raises ValueError or OSError for weights that are missing, damaged, or of another shape than the first
        model's."""
        ours = checkpoint.read(self._folders[model])
        if self._first != model:
            reason = checkpoint.difference(checkpoint.read(self._folders[self._first]), ours)
            if reason is not None:
                raise ValueError(reason)

    async def _load(self, model: str) -> None:
        """Exchanges the weights while SGLang stands still. Whatever of it has happened before may happen again."""
        await self._ask("POST", "/pause_generation", {"mode": "retract"})
        # An earlier agent's load may still be running. SGLang takes the answer to that for the answer to ours, so ours
        # waits until the scheduler, which does one thing after the other, has answered this.
        await self._ask("GET", "/fair", timeout_s=LOAD_TIMEOUT_S)
        body = {"model_path": str(self._folders[model]), "load_format": "auto", "flush_cache": True}
        answer = await self._ask("POST", "/update_weights_from_disk", body, timeout_s=LOAD_TIMEOUT_S)
        if not isinstance(answer, Mapping) or answer.get("success") is not True:
            raise ValueError(f"SGLang did not load it: {answer!r:.200}")
        await self._ask("POST", "/flush_cache")
        await self._ask("POST", "/continue_generation", {})

    async def _ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = STEP_TIMEOUT_S,
    ) -> Any:
        """The answer, from JSON if it is JSON. Raises ValueError for another status than 200."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)
        async with self._session.request(
            method, self._url + path, json=body, headers=headers, timeout=timeout
        ) as response:
            text = await response.text(errors="replace")
            if response.status != 200:
                raise ValueError(f"{path} answered {response.status}: {text[:300]}")
        try:
            return json.loads(text)
        except ValueError:
            return text


class Agent:
    """One agent. `run` it until it is cancelled."""

    def __init__(self, settings: AgentSettings, folders: Mapping[str, Path]) -> None:
        """Reads what is in the models' folders. ValueError and OSError for models that cannot share a server."""
        keys = protection.read_keys(settings.keys, "gateway")
        self._client = RouterClient(settings.router, keys, on_event=self._take)
        self._exchanges: asyncio.Queue[Exchange] = asyncio.Queue()
        self._replica_tls = tls.believed(settings.replica_ca)
        self._worker, self._url, self._folders = settings.worker, settings.replica, folders
        self._checkpoints = checkpoint.alike(folders)
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
        connector = aiohttp.TCPConnector(ssl=self._replica_tls or True)
        async with (
            self._client,
            aiohttp.ClientSession(headers=replica_key.headers(), connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._step(ReplicaClient(session, self._url, self._folders)))
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

    def _take(self, answer: RouterAnswer) -> None:
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
