"""A gateway over real sockets: a real router in a thread, and replicas that speak SGLang's wire only."""

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web

from router.core import Router
from router.events import Arrive, Event, WorkerUp
from router.gateway.app import App, create_app
from router.gateway.gateway import Gateway
from router.gateway.guard import KEY_VARIABLE
from router.gateway.listener import Listener
from router.gateway.request.call import Call, Names
from router.gateway.request.kinds import PATHS
from router.gateway.request.parse import parse
from router.placement import build
from router.shell import Shell
from sglang_fair.common.identity import HEADER_ATTEMPT
from sglang_fair.core import make_policy
from sglang_fair.core.job import Job
from sglang_fair.core.record import Record
from sglang_fair.settings import table
from sglang_fair.tenants import edit, keys
from sglang_fair.tenants.model import Tenant
from tests.support import apis
from tests.support.site import Seen, read_stream, request
from tests.support.stand_in import MODEL, Engine, Server, chunk, event_of, meta, usage
from tests.support.waiting import eventually

DEADLINE_S = 60.0
"""For what takes little time, on however busy a machine."""
ROUTER_TIMEOUT_S = 1.0
"""Where the router is to be missed soon."""
DONE = b"data: [DONE]\n\n"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": MODEL, "prompt": "hi"}
GENERATE = {"text": "hi", "sampling_params": {"max_new_tokens": 3}}
ENDPOINTS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/generate": GENERATE}


class FakeReplica(Server):
    """A replica without the overlay's token ids: 3 tokens a sample, also of batches; `mode` says how requests end.

    Beside it stands /explain, over the overlay's own record.
    """

    def __init__(self, context_tokens: int | None = None) -> None:
        super().__init__(None, 0.0)
        self.mode = "ok"
        self.record = Record(make_policy("fcfs"))
        self.context_tokens = context_tokens
        self.requests: list[tuple[str, dict, dict]] = []
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/explain/{id}", self._explain)

    @property
    def working(self) -> int:
        return self.work["running"]

    @property
    def headers(self) -> dict[str, str]:
        """Of the last request, in lower case."""
        return {name.lower(): value for name, value in self.requests[-1][1].items()}

    @property
    def body(self) -> dict:
        return self.requests[-1][2]

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL, "max_model_len": self.context_tokens}]})

    async def _explain(self, request: web.Request) -> web.Response:
        self.record.tick(time.monotonic())
        found = self.record.find(request.match_info["id"], request.query.get("client"))
        return web.json_response({"requests": found}, status=200 if found else 404)

    async def _answer(self, kind: str, body: dict, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.path, dict(request.headers), body))
        given = body.get("rid") or body.get("request_id") or request.headers[HEADER_ATTEMPT]
        rids = given if isinstance(given, list) else [given]
        job = Job(
            rids[0], request.headers["x-fair-client"], 5, extend_tokens=3, cached_tokens=2, output_tokens=3
        )
        job.attempt = request.headers[HEADER_ATTEMPT]
        has_answered = False
        try:
            for note in (self.record.arrive, self.record.admit, self.record.computed):
                self.record.tick(time.monotonic())
                note(job)
            answer = await self._ended(kind, body, rids, request)
            has_answered = True
            return answer
        finally:
            self.record.tick(time.monotonic())
            self.record.finish(job, "finished" if has_answered else "aborted")

    async def _ended(
        self, kind: str, body: dict, rids: list[str], request: web.Request
    ) -> web.StreamResponse:
        """As `mode` says."""
        if self.mode == "die":
            request.transport.abort()
            return web.Response()
        if self.mode in ("503", "400", "401", "500", "504"):
            return web.json_response({"object": "error", "message": "as told"}, status=int(self.mode))
        if self.mode == "silent":
            await asyncio.sleep(DEADLINE_S)
        if not body.get("stream"):
            if self.mode == "endless":
                await asyncio.Event().wait()
            return web.json_response(self._whole(kind, body, rids))
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if self.mode == "die after headers":
            request.transport.abort()
            return response
        for sent, event in enumerate(self._events(kind, body, rids)):
            if self.mode == "no end" and event == DONE:
                break
            if self.mode == "die midway" and sent == 2:
                await response.write(b'data: {"cut')
                request.transport.abort()
                break
            await asyncio.sleep(0.002 if self.mode == "endless" and sent > 2 else 0)
            await response.write(event)
        return response

    def _events(self, kind: str, body: dict, rids: list[str]) -> Iterator[bytes]:
        tokens = count() if self.mode == "endless" else iter(range(3))
        if kind in ("responses", "messages"):
            yield from apis.events(PATHS[kind], rids[0], (f"t{token}" for token in tokens), MODEL, 5)
            return
        samples = self._samples(kind, body, rids)
        for token in tokens:
            for index, rid in samples:
                if kind == "generate":
                    told = {
                        "text": "t" * (token + 1),
                        "meta_info": meta(rid, None, 5, token + 1, 2),
                        "index": index,
                    }
                elif kind == "completions":
                    told = chunk(kind, {"id": rid}, {"index": index, "text": f"t{token}"})
                else:
                    delta = {"role": "assistant", "content": f't{token} "usage":{{}}'}
                    told = chunk(kind, {"id": rid, "usage": None}, {"index": index, "delta": delta})
                yield event_of(told)
        if kind != "generate" and (body.get("stream_options") or {}).get("include_usage"):
            yield event_of({"id": rids[0], "choices": [], "usage": usage(5, 3 * len(samples), 2)})
        yield DONE

    def _whole(self, kind: str, body: dict, rids: list[str]) -> object:
        if kind not in ("chat", "completions", "generate"):
            return apis.whole(PATHS[kind], rids[0], "ttt", MODEL, apis.Counts(5, 3, 2))
        samples = self._samples(kind, body, rids)
        if kind == "generate":
            answers = [{"text": "ttt", "meta_info": meta(rid, None, 5, 3, 2)} for _, rid in samples]
            return answers if isinstance(body["rid"], list) or len(answers) > 1 else answers[0]
        choice = {"text": "ttt", "message": {"role": "assistant", "content": "ttt"}, "finish_reason": "stop"}
        choices = [{"index": index, **choice} for index, _ in samples]
        return {"id": rids[0], "choices": choices, "usage": usage(5, 3 * len(samples), 2)}

    @staticmethod
    def _samples(kind: str, body: dict, rids: list[str]) -> list[tuple[int, str]]:
        sampling = body.get("sampling_params") or {}
        sampling = sampling[0] if isinstance(sampling, list) else sampling
        n = sampling.get("n", 1) if kind == "generate" else body.get("n", 1)
        if n == 1:
            return list(enumerate(rids))
        return [(index, f"{index:032x}") for index in range(n * len(rids))]  # SGLang gives them new ids


class QuietServer(uvicorn.Server):
    """uvicorn in our event loop, leaving the signal handlers to pytest."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.leave = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self):
        yield

    async def main_loop(self) -> None:
        await self.leave.wait()


def worker(name: str, url: str, model: str = "") -> WorkerUp:
    """Another model than none is named."""
    return WorkerUp(name, url, models=(model,), loaded=model) if model else WorkerUp(name, url)


class RouterThread:
    """A router in a thread, which can be taken away."""

    def __init__(
        self,
        replicas: list[FakeReplica],
        models: Sequence[str] = (),
        endpoint: str = "tcp://127.0.0.1:*",
        placement: str = "round_robin",
        **options: Any,
    ) -> None:
        """`models` are those of the replicas; `options` are the router's."""
        self.shell = Shell(Router(build(placement), name=placement, **options), endpoint)
        for index, replica in enumerate(replicas):
            self.shell.tell(worker(f"r{index}", replica.url, *models[index : index + 1]))
        self.endpoint = self.shell.endpoint
        self._thread = threading.Thread(target=self.shell.run)
        self._thread.start()
        self.closed = False

    def tell(self, event: Event) -> None:
        self.shell.loop.call_soon_threadsafe(self.shell.tell, event)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.shell.stop()
            self._thread.join(DEADLINE_S)
            assert not self._thread.is_alive()
            self.shell.close()


@dataclass
class Cluster:
    """Replicas, router, gateway, and an HTTP client."""

    replicas: list[FakeReplica]
    router: RouterThread
    gateway: Gateway
    url: str
    http: aiohttp.ClientSession
    status_url: str
    status_headers: dict[str, str]

    async def stream(
        self, kind: str, prompt: str, tokens: int, seen: Seen, *, client: str = "c", **more: Any
    ) -> Seen:
        """A greedy stream; what has come so far is in `seen`."""
        path, body = request(kind, prompt, tokens)
        return await read_stream(self.http, self.url + path, body | more, seen, client)

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        """Status and body, of JSON."""
        async with self.http.get(self.url + path, **options) as response:
            return response.status, json.loads(await response.read())

    async def post(self, path: str, body: object = None, **options: object) -> tuple[int, dict, bytes]:
        """Status, headers in lower case, and body."""
        if body is not None:
            options["json"] = body
        async with self.http.post(self.url + path, **options) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return response.status, headers, await response.read()

    async def lose_router(self) -> None:
        self.router.close()
        await eventually(lambda: not self.gateway.link.alive, "the gateway misses the router")

    async def state(self) -> dict:
        async with self.http.get(self.status_url, headers=self.status_headers) as response:
            return await response.json()

    async def ended(self, **outcomes: int) -> dict:
        """The router's state once nothing is in flight; each placement has ended exactly once, as given."""

        async def settled() -> bool:
            state = await self.state()
            return state["in_flight"] == 0 and state["gateway"]["in_flight"] == 0

        await eventually(settled, "nothing is in flight")
        state = await self.state()
        counts = state["counts"]
        assert {name: counts.get(f"ended {name}", 0) for name in outcomes} == outcomes, counts
        if outcomes:
            assert counts.get("placed", 0) == sum(outcomes.values())
        assert "done ignored" not in counts
        return state


def add_tenant(path: Path, name: str, key: str = "", **more: Any) -> None:
    """Its key is its name, unless another one is given."""
    edit.add(path, name, Tenant(keys=[keys.written(keys.digest(key or name))], **more))


def call(kind: Any, **body: object) -> Call:
    """A request of this kind, with these fields."""
    default = {"chat": CHAT, "completions": COMPLETION, "generate": GENERATE}[kind]
    return parse(kind, json.dumps(default | body).encode(), Names(MODEL))


def gateway_settings(router: str, tokenizer: Path, **more: Any) -> table.Gateway:
    """Of a gateway that serves MODEL and listens where its test says."""
    return table.Gateway(
        **{
            "port": 0,
            "router": (router,),
            "model_name": MODEL,
            "tokenizer": str(tokenizer),
            "notice_s": 0.0,
            **more,
        }
    )


@contextlib.asynccontextmanager
async def served(app: App) -> AsyncIterator[str]:
    """The address at which a gateway listens."""
    server = QuietServer(
        uvicorn.Config(app, port=0, http=Listener, log_level="warning", timeout_graceful_shutdown=1)
    )
    serving = asyncio.create_task(server.serve())
    try:
        await eventually(lambda: server.started or serving.done(), "the gateway listens")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.leave.set()
        await serving


@contextlib.asynccontextmanager
async def cluster(
    tokenizer: Path,
    replicas: int = 1,
    router_timeout_s: float = DEADLINE_S,
    context_tokens: int | None = None,
    tenants: Path | None = None,
    access: dict | None = None,
    models: Sequence[str] = (),
    router: Callable[[], dict] = dict,
    **limits: object,
) -> AsyncIterator[Cluster]:
    """`access` are settings of the gateway, `router` makes options of the router, `models` those of the replicas.

    With an address for operators /status is there, with the admin key.
    """
    async with contextlib.AsyncExitStack() as stack:
        fakes = [FakeReplica(context_tokens) for _ in range(replicas)]
        for fake in fakes:
            await fake.start()
            stack.push_async_callback(fake.close)
        thread = RouterThread(fakes, models, **router())
        stack.callback(thread.close)
        access = ({} if tenants is None else {"tenants": str(tenants)}) | (access or {})
        more_models = ",".join(f"{model}={tokenizer}" for model in models if model != MODEL)
        app = create_app(
            gateway_settings(
                thread.endpoint,
                tokenizer,
                router_timeout_s=router_timeout_s,
                more_models=more_models,
                **limits,
                **access,
            )
        )
        url = await stack.enter_async_context(served(app))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        status_url, status_headers = f"{url}/status", dict[str, str]()
        if "admin_port" in access:
            status_url = f"http://127.0.0.1:{access['admin_port']}/status"
            status_headers = {"authorization": f"Bearer {os.environ[KEY_VARIABLE]}"}
        link, fleet = app.gateway.link, app.gateway.fleet
        await eventually(lambda: link.alive and len(fleet.workers) == replicas, "it knows the workers")
        yield Cluster(fakes, thread, app.gateway, url, http, status_url, status_headers)


@contextlib.asynccontextmanager
async def stand_ins(
    c: Cluster, tokenizer: Path, *models: str, has: str = ""
) -> AsyncIterator[dict[str, Server]]:
    """r0, r1, ..., which the router takes to have these models: each has answers of its own, as MODEL has. With `has`
    they refuse to answer for another one."""
    salts = {model: salt for salt, model in enumerate(dict.fromkeys((MODEL, *models)))}
    made = {f"r{at}": Server(Engine(tokenizer, salts[model]), 0.0, has) for at, model in enumerate(models)}
    try:
        for (name, one), model in zip(made.items(), models, strict=True):
            await one.start()
            c.router.tell(worker(name, one.url, model))
        await eventually(lambda: len(c.gateway.fleet.workers) == len(made), "the gateway knows the workers")
        yield made
    finally:
        for one in made.values():
            await one.close()


def text_of(tokenizer: Path, kind: str, prompt: str, tokens: int, salt: int = 0) -> str:
    """What an undisturbed stand-in answers."""
    *_, last = Engine(tokenizer, salt).steps(kind, request(kind, prompt, tokens)[1])
    return last.text


def held_router(c: Cluster) -> threading.Event:
    """From now on the router places nothing, until the event is set."""
    may_go_on = threading.Event()
    handle = c.router.shell._router.handle

    def held(event: object, now_s: float, peer: bytes = b"") -> list:
        if isinstance(event, Arrive):
            may_go_on.wait(DEADLINE_S)
        return handle(event, now_s, peer)

    c.router.shell._router.handle = held
    return may_go_on


def listening(c: Cluster) -> list[Arrive]:
    """What the router hears of requests from now on."""
    arrived: list[Arrive] = []
    tell = c.router.shell.tell
    c.router.shell.tell = lambda event, peer=b"": (  # type: ignore[method-assign]
        arrived.append(event) if isinstance(event, Arrive) else None,
        tell(event, peer),
    )[1]
    return arrived
