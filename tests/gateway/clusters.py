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
from router.gateway.request.call import Call
from router.gateway.request.names import Names
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
from tests.support.stand_in import Engine, Server
from tests.support.waiting import eventually

DEADLINE_S = 60.0
"""For what takes little time, on however busy a machine."""
ROUTER_TIMEOUT_S = 1.0
"""Where the router is to be missed soon."""
MODEL = "tiny"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": MODEL, "prompt": "hi"}
GENERATE = {"text": "hi", "sampling_params": {"max_new_tokens": 3}}
ENDPOINTS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/generate": GENERATE}


class FakeReplica:
    """SGLang's HTTP wire with answers of 3 tokens a sample; `mode` says how the next requests end.

    Beside it stands /explain, over the overlay's own record.
    """

    def __init__(self) -> None:
        self.mode = "ok"
        self.record = Record(make_policy("fcfs"))
        self.context_tokens: int | None = None
        self.requests: list[tuple[str, dict, dict]] = []
        self.aborted: list[str] = []
        self.working = 0
        self._cancel: dict[str, asyncio.Event] = {}
        app = web.Application(client_max_size=1 << 26)
        for path in apis.BODIES:
            app.router.add_post(path, self._serve)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/explain/{id}", self._explain)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        self.url = ""

    async def start(self) -> None:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()

    @property
    def body(self) -> dict:
        return self.requests[-1][2]

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL, "max_model_len": self.context_tokens}]})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        if rid in self._cancel:
            self._cancel[rid].set()
        return web.Response()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, dict(request.headers), body))
        self.working += 1
        [rid, *_] = self._rids(request, body)
        job = Job(rid, request.headers["x-fair-client"], 5, extend_tokens=3, cached_tokens=2, output_tokens=3)
        job.attempt = request.headers[HEADER_ATTEMPT]
        has_answered = False
        try:
            for note in (self.record.arrive, self.record.admit, self.record.computed):
                self.record.tick(time.monotonic())
                note(job)
            answer = await self._answer(request, body)
            has_answered = True
            return answer
        finally:
            self.working -= 1
            self.record.tick(time.monotonic())
            self.record.finish(job, "finished" if has_answered else "aborted")

    @staticmethod
    def _rids(request: web.Request, body: dict) -> list[str]:
        given = body.get("rid") or body.get("request_id") or request.headers[HEADER_ATTEMPT]
        return given if isinstance(given, list) else [given]

    async def _explain(self, request: web.Request) -> web.Response:
        self.record.tick(time.monotonic())
        found = self.record.find(request.match_info["id"], request.query.get("client"))
        return web.json_response({"requests": found}, status=200 if found else 404)

    async def _answer(self, request: web.Request, body: dict) -> web.StreamResponse:
        if self.mode == "die":
            request.transport.abort()
            return web.Response()
        if self.mode in ("503", "400", "401", "500"):
            return web.json_response({"object": "error", "message": "as told"}, status=int(self.mode))
        if self.mode == "silent":
            await asyncio.sleep(DEADLINE_S)
        rids = self._rids(request, body)
        if body.get("stream"):
            return await self._answer_stream(request, body, rids)
        if self.mode == "endless":
            cancel = self._cancel[rids[0]] = asyncio.Event()
            await cancel.wait()
        return web.json_response(self._whole(request.path, body, rids))

    async def _answer_stream(self, request: web.Request, body: dict, rids: list[str]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if self.mode == "die after headers":
            request.transport.abort()
            return response
        sent = 0
        async for event in self._events(request.path, body, rids):
            if self.mode == "no end" and event == b"[DONE]":
                break
            await response.write(event if event.endswith(b"\n\n") else b"data: " + event + b"\n\n")
            sent += 1
            if self.mode == "die midway" and sent == 2:
                await response.write(b'data: {"cut')
                request.transport.abort()
                return response
        return response

    async def _events(self, path: str, body: dict, rids: list[str]) -> AsyncIterator[bytes]:
        if path in ("/v1/responses", "/v1/messages"):
            for event in apis.events(path, rids[0], self._pieces(), MODEL, 5):
                await asyncio.sleep(0.002 if self.mode == "endless" else 0)
                yield event
            return
        samples = self._samples(path, body, rids)
        for token in range(3):
            for index, rid in samples:
                yield self._event(path, rid, index, token)
        tokens = 3
        while self.mode == "endless":
            await asyncio.sleep(0.002)
            yield self._event(path, rids[0], 0, tokens)
            tokens += 1
        if path != "/generate" and (body.get("stream_options") or {}).get("include_usage"):
            chunk = {"id": rids[0], "choices": [], "usage": self._usage(3 * len(samples))}
            yield json.dumps(chunk, separators=(",", ":")).encode()
        yield b"[DONE]"

    def _pieces(self) -> Iterator[str]:
        numbers = count() if self.mode == "endless" else iter(range(3))
        return (f"t{number}" for number in numbers)

    def _event(self, path: str, rid: str, index: int, token: int) -> bytes:
        if path == "/generate":
            event = {"text": "t" * (token + 1), "meta_info": self._meta(rid, token + 1), "index": index}
        elif path == "/v1/completions":
            event = self._head(rid, "text_completion", {"index": index, "text": f"t{token}"})
        else:
            delta = {"role": "assistant", "content": f't{token} "usage":{{}}'}
            event = self._head(rid, "chat.completion.chunk", {"index": index, "delta": delta}) | {
                "usage": None
            }
        return json.dumps(event, separators=(",", ":")).encode()

    @staticmethod
    def _head(rid: str, kind: str, *choices: dict) -> dict[str, Any]:
        choices = tuple({"finish_reason": None, **choice} for choice in choices)
        return {"id": rid, "object": kind, "created": 1, "model": MODEL, "choices": choices}

    def _whole(self, path: str, body: dict, rids: list[str]) -> object:
        if path not in ("/v1/chat/completions", "/v1/completions", "/generate"):
            return apis.whole(path, rids[0], "ttt", MODEL, apis.Counts(5, 3, 2))
        samples = self._samples(path, body, rids)
        if path == "/generate":
            answers = [{"text": "ttt", "meta_info": self._meta(rid, 3)} for _, rid in samples]
            return answers if isinstance(body["rid"], list) or len(answers) > 1 else answers[0]
        message = {"role": "assistant", "content": "ttt"}
        choices = [
            {"index": i, "text": "ttt", "message": message, "finish_reason": "stop"} for i, _ in samples
        ]
        kind = "chat.completion" if path == "/v1/chat/completions" else "text_completion"
        return self._head(rids[0], kind, *choices) | {"usage": self._usage(3 * len(samples))}

    @staticmethod
    def _samples(path: str, body: dict, rids: list[str]) -> list[tuple[int, str]]:
        sampling = body.get("sampling_params") or {}
        sampling = sampling[0] if isinstance(sampling, list) else sampling
        n = sampling.get("n", 1) if path == "/generate" else body.get("n", 1)
        if n == 1:
            return list(enumerate(rids))
        return [(index, f"{index:032x}") for index in range(n * len(rids))]  # SGLang gives them new ids

    @staticmethod
    def _meta(rid: str, tokens: int) -> dict:
        counts = {"prompt_tokens": 5, "completion_tokens": tokens, "cached_tokens": 2}
        return {"id": rid, "finish_reason": None, **counts}

    @staticmethod
    def _usage(tokens: int) -> dict:
        counts = {"prompt_tokens": 5, "total_tokens": 8, "completion_tokens": tokens}
        return counts | {"prompt_tokens_details": {"cached_tokens": 2}}


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
        **options: Any,
    ) -> None:
        """`models` are those of the replicas; `options` are the router's."""
        self.shell = Shell(Router(build("round_robin"), name="round_robin", **options), endpoint)
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
        path, body = request(kind, prompt, tokens, 0)
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
        fakes = [FakeReplica() for _ in range(replicas)]
        for fake in fakes:
            fake.context_tokens = context_tokens
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


class StandIn:
    """A replica that computes (`tests.support.stand_in`), and may be taken away."""

    def __init__(self, tokenizer: Path, salt: int, model: str) -> None:
        self.server = Server(Engine(tokenizer, salt), 0.0, model)
        self._runner = web.AppRunner(self.server.app, handler_cancellation=True, shutdown_timeout=0.01)
        self.url = ""

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def lose(self) -> None:
        await self._runner.cleanup()


@contextlib.asynccontextmanager
async def stand_ins(
    c: Cluster, tokenizer: Path, *models: str, has: str = ""
) -> AsyncIterator[dict[str, StandIn]]:
    """r0, r1, ..., which the router takes to have these models: each has answers of its own, as MODEL has. With `has`
    they refuse to answer for another one."""
    salts = {model: salt for salt, model in enumerate(dict.fromkeys((MODEL, *models)))}
    made = {f"r{at}": StandIn(tokenizer, salts[model], has) for at, model in enumerate(models)}
    try:
        for (name, one), model in zip(made.items(), models, strict=True):
            await one.start()
            c.router.tell(worker(name, one.url, model))
        await eventually(lambda: len(c.gateway.fleet.workers) == len(made), "the gateway knows the workers")
        yield made
    finally:
        for one in made.values():
            await one.lose()


def text_of(tokenizer: Path, kind: str, prompt: str, tokens: int, salt: int = 0) -> str:
    """What an undisturbed stand-in answers."""
    *_, last = Engine(tokenizer, salt).steps(kind, request(kind, prompt, tokens, 0)[1])
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
