"""The one server that workloads are tested against: a made-up engine in all its interfaces, and a cluster of it."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.stand_in import MODEL, PATHS, Engine
from workloads import wire
from workloads.clusters import Cluster


@contextmanager
def served(app: web.Application) -> Iterator[str]:
    """Its URL, for as long as it runs."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    runner = web.AppRunner(app, handler_cancellation=True)

    async def up() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()

    def work() -> None:
        loop.run_until_complete(up())
        loop.call_soon(ready.set)  # in `run_forever`, which a stop before it would not end
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ready.wait(60)
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Peer:
    def __init__(
        self, tokenizer: Path, *, step_s: float = 0.001, usage: bool = True, incremental: bool = False
    ) -> None:
        """`incremental`: events of `generate` have new tokens alone, as SGLang has them with an option."""
        self._engine = Engine(tokenizer)
        self._step_s, self._usage, self._incremental = step_s, usage, incremental
        self.models: list[str] = [MODEL]
        self.refused: set[str] = set()
        self.interrupt_after: int | None = None
        self.headers: list[dict[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.answers: list[list[int]] = []
        """Token ids of `generate`."""
        self.at_once = self.most_at_once = 0
        self.placement = self.policy = self.url = ""
        self.starts: list[tuple[str, str]] = []
        self.flushes = 0

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By path."""
        own = {"/v1/models": self._models, "/fair": self._fair, "/status": self._status}
        engine = {path: self._handler(kind) for path, kind in PATHS.items()}
        return {**own, "/flush_cache": self._flush, **engine}

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Its URL, for as long as it runs."""
        app = web.Application()
        for path, handler in self.handlers.items():
            app.router.add_route("*", path, handler)
        with served(app) as self.url:
            yield self.url

    @contextmanager
    def start(self, placement: str, policy: str) -> Iterator[Cluster]:
        """As a cluster of one replica, whose gateway it is too."""
        self.placement, self.policy = placement, policy
        self.starts.append((placement, policy))
        yield Cluster(self.url, (self.url,))

    def _handler(self, kind: str) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            if len(self.bodies) == self.interrupt_after:
                os.kill(os.getpid(), signal.SIGINT)
            if request.headers.get("x-fair-client") in self.refused:
                return web.Response(status=429, text="too many requests")
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                return await self._stream(kind, body | {"rid": "r"}, request)
            finally:
                self.at_once -= 1

        return answer

    async def _stream(self, kind: str, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if kind in wire.WHOLE:
            *_, step = self._engine.steps(kind, body)
            return web.json_response(self._engine.whole(kind, body, step))
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-fair-worker": "r1"})
        await response.prepare(request)
        ids: list[int] = []
        for event in self._engine.events(kind, body):
            if b'"usage"' in event and not self._usage:
                continue
            await asyncio.sleep(self._step_s)
            if kind == wire.GENERATE and b"output_ids" in event:
                told = json.loads(event.removeprefix(b"data: "))
                new, ids = told["output_ids"][len(ids) :], told["output_ids"]
                if self._incremental:
                    event = b"data: " + json.dumps(told | {"output_ids": new, "text": ""}).encode() + b"\n\n"
            await response.write(event)
        if kind == wire.GENERATE:
            self.answers.append(ids)
        return response

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _fair(self, _: web.Request) -> web.Response:
        return web.json_response({"policy": self.policy, "clients": {}, "bound": 50.0})

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response({"placement": self.placement})

    async def _flush(self, _: web.Request) -> web.Response:
        self.flushes += 1
        return web.Response(status=200 if self.flushes % 2 else 400)  # every second time it is busy
