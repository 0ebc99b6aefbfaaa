"""The gateway over real sockets: a real router in a thread, and replicas that speak SGLang's wire only."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path

import aiohttp
import httpx
import pytest
import uvicorn
import yarl
import zmq
from aiohttp import web

from router.core import Router
from router.events import Arrive, Event, WorkerUp, encode
from router.gateway.answer.sse import Stream, usage_of
from router.gateway.answer.usage import Usage
from router.gateway.app import App, Config, create_app
from router.gateway.clients import header_safe
from router.gateway.errors import ApiError
from router.gateway.gateway import Gateway
from router.gateway.guard import KEY_VARIABLE
from router.gateway.limits import Limits
from router.gateway.listener import Listener
from router.gateway.request.names import Names
from router.gateway.request.parse import parse
from router.gateway.request.tokens import TokenizerError, Tokens
from router.placement import build
from router.shell import INSIDE, Shell
from router.throttling import Throttling
from sglang_fair.common.identity import HEADER_ATTEMPT
from sglang_fair.core import make_policy
from sglang_fair.core.job import Job
from sglang_fair.core.record import Record
from tests.support import apis
from tests.support.stand_in import make_tokenizer
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
"""For what takes little time, on however busy a machine."""

ROUTER_TIMEOUT_S = 1.0
"""Where the router is to be missed soon."""

START_S = 120.0
"""For three interpreters to import what they need, on a busy machine."""
MODEL = "tiny"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer: one token a byte."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class FakeReplica:
    """SGLang's HTTP wire with answers of 3 tokens a sample; `mode` says how the next requests end.

    Beside it stands /explain, over the overlay's own record.
    """

    def __init__(self) -> None:
        self.mode = "ok"
        self.record = Record(make_policy("fcfs"))
        self.explained = 0
        """How often it was asked to explain a request."""
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
        self.explained += 1
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
            event: dict = {"text": "t" * (token + 1), "meta_info": self._meta(rid, token + 1), "index": index}
        elif path == "/v1/completions":
            choice = {"index": index, "text": f"t{token}", "finish_reason": None}
            event = {
                "id": rid,
                "object": "text_completion",
                "created": 1,
                "model": MODEL,
                "choices": [choice],
            }
        else:
            delta = {"role": "assistant", "content": f't{token} "usage":{{}}'}
            choice = {"index": index, "delta": delta, "finish_reason": None}
            kind = "chat.completion.chunk"
            event = {
                "id": rid,
                "object": kind,
                "created": 1,
                "model": MODEL,
                "choices": [choice],
                "usage": None,
            }
        return json.dumps(event, separators=(",", ":")).encode()

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
        usage = self._usage(3 * len(samples))
        return {
            "id": rids[0],
            "object": kind,
            "created": 1,
            "model": MODEL,
            "choices": choices,
            "usage": usage,
        }

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
        return {
            "id": rid,
            "finish_reason": None,
            "prompt_tokens": 5,
            "completion_tokens": tokens,
            "cached_tokens": 2,
        }

    @staticmethod
    def _usage(tokens: int) -> dict:
        details = {"cached_tokens": 2}
        return {
            "prompt_tokens": 5,
            "total_tokens": 8,
            "completion_tokens": tokens,
            "prompt_tokens_details": details,
        }


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


class RouterThread:
    """A router in a thread, which can be taken away."""

    def __init__(
        self,
        replicas: list[FakeReplica],
        throttling: Throttling | None = None,
        endpoint: str = "tcp://127.0.0.1:*",
    ) -> None:
        router = Router(build("round_robin"), name="round_robin", throttling=throttling)
        self.shell = Shell(router, endpoint)
        for index, replica in enumerate(replicas):
            self.shell.tell(WorkerUp(f"r{index}", replica.url))
        self.endpoint = self.shell.endpoint
        self._thread = threading.Thread(target=self.shell.run)
        self._thread.start()
        self.closed = False

    def tell(self, event: Event) -> None:
        """As a peer: the shell's sockets belong to its thread."""
        with self.shell.context.socket(zmq.DEALER) as peer:
            peer.connect(INSIDE)
            peer.send(encode(event))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.shell.stop()
            self._thread.join(DEADLINE_S)
            assert not self._thread.is_alive()
            self.shell.close()


class Cluster:
    """Replicas, router, gateway, and an HTTP client."""

    def __init__(
        self,
        replicas: list[FakeReplica],
        router: RouterThread,
        gateway: Gateway,
        url: str,
        http: aiohttp.ClientSession,
    ):
        self.replicas = replicas
        self.router = router
        self.gateway = gateway
        self.url = url
        self.http = http
        self.status_url, self.status_headers = url + "/status", dict[str, str]()

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
    throttling: Throttling | None = None,
    **limits: object,
) -> AsyncIterator[Cluster]:
    """`access` are fields of `Config`. With an address for operators /status is there, with the admin key."""
    async with contextlib.AsyncExitStack() as stack:
        fakes = [FakeReplica() for _ in range(replicas)]
        for fake in fakes:
            fake.context_tokens = context_tokens
            await fake.start()
            stack.push_async_callback(fake.close)
        router = RouterThread(fakes, throttling)
        stack.callback(router.close)
        access = ({} if tenants is None else {"tenants": str(tenants)}) | (access or {})
        app = create_app(
            Config((router.endpoint,), MODEL, str(tokenizer), router_timeout_s, Limits(**limits), **access)
        )
        url = await stack.enter_async_context(served(app))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        made = Cluster(fakes, router, app.gateway, url, http)
        if "admin_port" in access:
            made.status_url = f"http://127.0.0.1:{access['admin_port']}/status"
            made.status_headers = {"authorization": f"Bearer {os.environ[KEY_VARIABLE]}"}
        await eventually(lambda: app.gateway.link.alive, "the gateway hears the router")
        yield made


def run(body: Callable[[Cluster], Awaitable[None]], tokenizer: Path, **options: object) -> None:
    """Runs `body` in a fresh cluster."""

    async def main() -> None:
        async with cluster(tokenizer, **options) as c:
            await body(c)

    asyncio.run(main())


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": MODEL, "prompt": "hi"}
GENERATE = {"text": "hi", "sampling_params": {"max_new_tokens": 3}}
ENDPOINTS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/generate": GENERATE}


def events(body: bytes) -> list[bytes]:
    assert body.endswith(b"\n\n")
    return [event.removeprefix(b"data: ") for event in body[:-2].split(b"\n\n")]


# -- answers


def test_every_endpoint_whole_and_streamed(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        for path, request in ENDPOINTS.items():
            status, headers, answer = await c.post(path, request, headers={"x-fair-client": "alice"})
            assert status == 200
            assert json.loads(answer)
            assert headers["x-fair-worker"] == "r0"
            assert headers["x-fair-client"] == "alice"
            assert headers["x-fair-matched-tokens"] == "0"
            seen_path, seen_headers, seen = c.replicas[0].requests[-1]
            assert seen_path == path
            assert seen_headers["x-fair-client"] == "alice"
            assert seen["rid"] == headers["x-fair-request-id"]
            assert len(seen["rid"]) == 32

            status, headers, answer = await c.post(path, request | {"stream": True})
            assert status == 200
            assert headers["content-type"].startswith("text/event-stream")
            assert headers["x-fair-client"] == "anonymous"
            *chunks, last = events(answer)
            assert last == b"[DONE]"
            assert len(chunks) == 3, "the usage event is not the client's"
            assert all(json.loads(chunk) for chunk in chunks)
        state = await c.ended(ok=6)
        assert state["counts"]["output_tokens"] == 6 * 3
        assert state["hits"]["measured_cached_tokens"] == 6 * 2

    run(body, tokenizer)


def test_usage_is_shown_to_whom_asks(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        options = {"include_usage": True, "continuous_usage_stats": False}
        for path in ("/v1/chat/completions", "/v1/completions"):
            _, _, answer = await c.post(path, ENDPOINTS[path] | {"stream": True, "stream_options": options})
            usage = json.loads(events(answer)[-2])
            assert usage["choices"] == []
            assert usage["usage"]["completion_tokens"] == 3
            assert c.replicas[0].body["stream_options"] == options
            await c.post(path, ENDPOINTS[path] | {"stream": True})
            assert c.replicas[0].body["stream_options"] == {"include_usage": True}
            await c.post(path, ENDPOINTS[path])
            assert "stream_options" not in c.replicas[0].body
        await c.ended(ok=6)

    run(body, tokenizer)


def test_the_openai_client(tokenizer: Path) -> None:
    import openai  # takes as long as many tests, and is for this one

    async def body(c: Cluster) -> None:
        async with openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="secret", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == [MODEL]
            assert (await client.models.retrieve(MODEL)).id == MODEL
            for unknown in ("gpt-9", "org/gpt-9"):
                with pytest.raises(openai.NotFoundError, match="gpt-9") as missing:
                    await client.models.retrieve(unknown)
                assert missing.value.code == "model_not_found"
            answer = await client.chat.completions.with_raw_response.create(**CHAT | {"model": "default"})
            assert answer.parse().choices[0].message.content == "ttt"
            assert answer.headers["x-fair-client"].startswith("key:")
            assert c.replicas[0].body["model"] == MODEL
            stream = await client.chat.completions.create(**CHAT, stream=True)
            texts = [chunk.choices[0].delta.content async for chunk in stream]
            assert [text[:2] for text in texts] == ["t0", "t1", "t2"]
            whole = await client.completions.create(**COMPLETION)
            assert whole.usage.prompt_tokens_details.cached_tokens == 2
            with pytest.raises(openai.NotFoundError) as caught:
                await client.chat.completions.create(**CHAT | {"model": "gpt-9"})
            assert caught.value.code == "model_not_found"
        await c.ended(ok=3)

    run(body, tokenizer)


def test_batches_and_samples_go_to_one_worker_whole(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        batches = [
            ("/v1/completions", COMPLETION | {"prompt": ["a", "b"], "n": 2}),
            ("/v1/completions", COMPLETION | {"prompt": [[1, 2], [3]], "n": 2}),
            ("/v1/chat/completions", CHAT | {"n": 4}),
            ("/generate", GENERATE | {"text": ["a", "b", "c", "d"]}),
            ("/generate", {"input_ids": [[1], [2]], "sampling_params": {"n": 2}}),
        ]
        for path, request in batches:
            for stream in (False, True):
                status, _, answer = await c.post(path, request | {"stream": stream})
                assert (status, len(answer) > 0) == (200, True)
                rid = c.replicas[0].body["rid"]
                prompts = request.get("prompt") or request.get("text") or request.get("input_ids") or ""
                if isinstance(prompts, list):
                    assert len(set(rid)) == len(prompts)
                    assert {len(one) for one in rid} == {32}
                else:
                    assert len(rid) == 32
        state = await c.ended(ok=10)
        assert state["counts"]["output_tokens"] == 10 * 4 * 3

    run(body, tokenizer)


def test_the_router_is_told_the_tokens_that_the_replica_sees(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        arrived: list[Arrive] = []
        tell = c.router.shell.tell
        c.router.shell.tell = lambda event, peer=b"": (  # type: ignore[method-assign]
            arrived.append(event) if isinstance(event, Arrive) else None,
            tell(event, peer),
        )[1]
        tokens = Tokens(tokenizer)._tokenizer
        long = "x" * 20_000
        await c.post("/v1/chat/completions", CHAT | {"max_completion_tokens": 7, "n": 2, "cache_salt": "s"})
        await c.post("/v1/completions", COMPLETION | {"prompt": long, "max_tokens": 9})
        await c.post("/v1/completions", COMPLETION | {"prompt": [5, 6, 7], "model": f"{MODEL}:lora"})
        await c.post("/generate", {"input_ids": [[1, 2], [3]]})
        expected = [
            [0, *tokens.encode("<user>hi\n<assistant>", add_special_tokens=False).ids],
            tokens.encode(long).ids,
            [5, 6, 7],
            [1, 2, 3],
        ]
        assert [list(memoryview(one.tokens).cast("I")) for one in arrived] == expected
        assert [one.max_output_tokens for one in arrived] == [14, 9, 0, 0]
        assert [one.namespace for one in arrived] == ["\x1fs\x1f", "", "lora\x1f\x1f", ""]
        assert len(long) == len(expected[1])
        await c.ended(ok=4)

    run(body, tokenizer)


def test_nobody_outside_names_a_client_inside(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        fair = {"fair": {"client": "mallory"}, "emu": 3}
        headers = {"x-fair-app": "judge", "x-fair-stage": "2", "x-fair-weight": "9", "x-tenant-id": "acme"}
        await c.post("/v1/chat/completions", CHAT | {"custom_params": fair, "rid": "mine"}, headers=headers)
        _, seen, request = c.replicas[0].requests[-1]
        assert request["custom_params"] == {"emu": 3}
        assert request["rid"] != "mine"
        assert (seen["x-fair-client"], seen["x-fair-app"], seen["x-fair-stage"]) == ("acme", "judge", "2")
        assert "x-fair-weight" not in seen
        assert "x-tenant-id" not in seen
        for sampling in ({"custom_params": fair}, [{"custom_params": fair}]):
            await c.post("/generate", {"text": ["a"], "sampling_params": sampling})
            assert "mallory" not in json.dumps(c.replicas[0].body)
        await c.post("/v1/chat/completions", CHAT | {"user": "zoë\r\nx-fair-app: evil"})
        assert c.replicas[0].requests[-1][1]["x-fair-client"] == "zo%C3%AB%0D%0Ax-fair-app: evil"
        await c.ended(ok=4)

    run(body, tokenizer)


# -- refusals


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/chat/completions", b"{no json", 400, "invalid_json"),
        ("/v1/chat/completions", b"\xff", 400, "invalid_json"),
        ("/v1/chat/completions", b"[1]", 400, "invalid_json"),
        ("/v1/chat/completions", CHAT | {"model": "gpt-9"}, 404, "model_not_found"),
        ("/v1/chat/completions", CHAT | {"model": 3}, 400, 400),
        ("/v1/chat/completions", CHAT | {"messages": []}, 400, "invalid_messages"),
        ("/v1/chat/completions", CHAT | {"messages": ["hi"]}, 400, "invalid_messages"),
        ("/v1/chat/completions", CHAT | {"stream": "yes"}, 400, 400),
        ("/v1/chat/completions", CHAT | {"n": 0}, 400, 400),
        ("/v1/chat/completions", CHAT | {"n": True}, 400, 400),
        ("/v1/chat/completions", CHAT | {"max_tokens": -1}, 400, 400),
        ("/v1/chat/completions", CHAT | {"user": {}}, 400, 400),
        ("/v1/chat/completions", CHAT | {"stream_options": 1}, 400, 400),
        ("/v1/chat/completions", CHAT | {"input_ids": ["a"]}, 400, "invalid_prompt"),
        ("/v1/completions", {"model": MODEL}, 400, "invalid_prompt"),
        ("/v1/completions", COMPLETION | {"prompt": []}, 400, "invalid_prompt"),
        ("/v1/completions", COMPLETION | {"prompt": ["a", 1]}, 400, "invalid_prompt"),
        ("/v1/completions", COMPLETION | {"prompt": [1, -1]}, 400, "invalid_prompt"),
        ("/v1/completions", COMPLETION | {"prompt": [[1], []]}, 400, "invalid_prompt"),
        ("/v1/completions", COMPLETION | {"prompt": ["a"] * 2000}, 400, "batch_too_large"),
        ("/generate", {}, 400, "invalid_prompt"),
        ("/generate", {"text": "a", "sampling_params": 3}, 400, 400),
        ("/generate", {"text": "a", "sampling_params": []}, 400, 400),
    ],
)
def test_a_bad_body_is_refused(path: str, body: object, status: int, code: object) -> None:
    kind = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/generate": "generate"}[path]
    with pytest.raises(ApiError) as caught:
        parse(kind, body if isinstance(body, bytes) else json.dumps(body).encode(), Names(MODEL))
    error = json.loads(caught.value.body())["error"]
    assert (caught.value.status, error["code"]) == (status, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"]


def test_refusals_over_http(tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(c: Cluster) -> None:
        status, _, answer = await c.post("/v1/chat/completions", data=b"{no json")
        assert (status, json.loads(answer)["error"]["code"]) == (400, "invalid_json")
        status, _, answer = await c.post("/v1/chat/completions", CHAT | {"model": "gpt-9"})
        assert (status, json.loads(answer)["error"]["code"]) == (404, "model_not_found")
        status, _, answer = await c.post("/v1/completions", data=b"x" * 5000)
        assert (status, json.loads(answer)["error"]["code"]) == (413, "body_too_large")

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(5):
                yield b"x" * 1000

        status, _, _ = await c.post("/v1/completions", data=pieces())
        assert status == 413
        status, _, answer = await c.post("/v1/nothing", {})
        assert (status, json.loads(answer)["error"]["message"]) == (404, "Not Found")
        for path in ("/v1/completions", "/v1/line%0Abreak"):
            async with c.http.get(yarl.URL(c.url + path, encoded=True)) as response:
                assert (response.status, (await response.json())["error"]["message"]) == (404, "Not Found")
        assert not c.replicas[0].requests
        state = await c.ended(ok=0)
        assert state["gateway"]["refused"] == 4

    run(body, tokenizer, max_body_bytes=4000)
    lines = [
        record for record in caplog.records if record.name == "gateway" and record.levelno == logging.WARNING
    ]
    assert len(lines) == 4, "one line a refused request"


def test_beyond_the_bound_requests_are_told_to_come_back(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        c.replicas[0].mode = "endless"
        first = asyncio.create_task(c.post("/v1/completions", COMPLETION))
        await eventually(lambda: c.replicas[0].working, "the first request is at work")
        status, headers, answer = await c.post("/v1/completions", COMPLETION)
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(answer)["error"]["type"] == "rate_limit_error"
        first.cancel()
        await c.ended(aborted=1)

    run(body, tokenizer, max_in_flight=1)


def test_a_client_that_floods_leaves_room_to_the_others(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        async def ask(client: str, **more: str) -> tuple[int, str]:
            headers = {"x-fair-client": client} if client else {}
            status, _, answer = await c.post("/v1/completions", COMPLETION | more, headers=headers)
            return status, "" if status == 200 else json.loads(answer)["error"]["message"]

        c.replicas[0].mode = "endless"
        flood = [asyncio.create_task(ask("flood")) for _ in range(12)]
        await eventually(lambda: sum(task.done() for task in flood) == 8, "eight are refused")
        refused = [task.result() for task in flood if task.done()]
        assert refused == [(429, "too many requests in flight: 4 of this client")] * 8
        await eventually(lambda: c.replicas[0].working == 4, "four are at work")
        c.replicas[0].mode = "ok"
        assert await asyncio.gather(ask("modest"), ask("meek"), ask("", user="mild")) == [(200, "")] * 3
        # One that is named in its body is so from there on.
        assert (await ask("", user="flood"))[0] == 429
        state = await c.state()
        assert state["gateway"]["in_flight_by_client"] == {"flood": 4}
        for task in flood:
            task.cancel()
        state = await c.ended(aborted=4, ok=3)
        assert (state["gateway"]["in_flight"], state["gateway"]["held_bytes"]) == (0, 0)

    run(body, tokenizer, max_in_flight=8)


def test_all_bodies_together_are_bounded(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        c.replicas[0].mode = "endless"
        large = COMPLETION | {"prompt": "x" * 4000}
        first = asyncio.create_task(c.post("/v1/completions", large))
        await eventually(lambda: c.replicas[0].working, "the first request is at work")
        status, headers, answer = await c.post("/v1/completions", large)
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(answer)["error"]["code"] == "overloaded"
        c.replicas[0].mode = "ok"
        other = {"x-fair-client": "another"}
        assert (await c.post("/v1/completions", COMPLETION, headers=other))[0] == 200
        first.cancel()
        state = await c.ended(aborted=1, ok=1)
        assert (state["gateway"]["held_bytes"], state["gateway"]["refusals"]) == (0, {"429": 1})

    run(body, tokenizer, max_held_bytes=6000)


# -- who may change the workers


@pytest.mark.parametrize(
    ("key", "host", "given", "status"),
    [
        ("", "127.0.0.1", None, 503),
        ("", "10.0.0.9", None, 403),
        ("", "10.0.0.9", "Bearer x", 403),
        ("secret", "127.0.0.1", None, 401),
        ("secret", "10.0.0.9", "Bearer wrong", 401),
        ("secret", "10.0.0.9", "Bearer secret", 503),
    ],
)
def test_workers_are_changed_from_this_machine_or_with_the_key(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch, key: str, host: str, given: str | None, status: int
) -> None:
    """503: allowed, but there is no router to tell."""
    monkeypatch.setenv(KEY_VARIABLE, key)

    async def main() -> None:
        app = create_app(Config(("tcp://127.0.0.1:17998",), MODEL, str(tokenizer), 0.1))
        await app.gateway.start()
        transport = httpx.ASGITransport(app, client=(host, 1))
        headers = {"authorization": given} if given else {}
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as http:
            for method, path in (("GET", "/workers"), ("DELETE", "/workers/r0")):
                assert (await http.request(method, path)).status_code == status
        await app.gateway.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_worker"),
        ({"url": "ftp://x"}, 400, "invalid_worker"),
        ({"url": "http://127.0.0.1:1/path"}, 400, "invalid_worker"),
        ({"url": "http://127.0.0.1:1", "unknown": 1}, 400, "invalid_worker"),
        ({"url": "http://127.0.0.1:1", "name": "a b"}, 400, "invalid_worker"),
        ({"url": "http://127.0.0.1:1", "replay": "tcp://x:1"}, 400, "invalid_worker"),
        ({"url": "http://127.0.0.1:1", "kv": "http://x:1"}, 400, "invalid_worker"),
        ({"url": "http://127.0.0.1:1", "kv": "tcp://x"}, 400, "invalid_worker"),
        ({"url": "http://127.0.0.1:1", "kv": "inproc://router"}, 400, "invalid_worker"),
        ({"url": "http://127.0.0.1:1", "capacity": 0}, 400, "invalid_worker"),
        ({"url": "http://127.0.0.1:1", "capacity": 5e-324}, 400, "invalid_worker"),
        ({"url": "http://127.0.0.1:1", "capacity": 1e30}, 400, "invalid_worker"),
        ({"url": "http://127.0.0.1:1"}, 400, "worker_not_ready"),
        (b" " * 5000, 413, "body_too_large"),
    ],
)
def test_a_worker_that_is_none_is_refused(tokenizer: Path, body: object, status: int, code: str) -> None:
    async def main(c: Cluster) -> None:
        sent = {"data": body} if isinstance(body, bytes) else {"json": body}
        got, _, answer = await c.post("/workers", **sent)
        assert (got, json.loads(answer)["error"]["code"]) == (status, code)
        assert list((await c.state())["workers"]) == ["r0"]

    run(main, tokenizer)


def test_a_worker_is_added_once(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        url = c.replicas[0].url
        status, _, answer = await c.post("/workers", {"url": url})
        assert (status, json.loads(answer)["error"]["message"]) == (409, f"{url} is worker r0")
        status, _, answer = await c.post("/workers", {"url": url, "name": "r0", "capacity": 2})
        assert (status, json.loads(answer)["capacity"]) == (201, 2)
        other = FakeReplica()
        await other.start()
        status, _, answer = await c.post("/workers", {"url": other.url, "name": "r0"})
        assert (status, json.loads(answer)["error"]["message"]) == (409, f"worker r0 is at {url}")
        status, _, answer = await c.post("/workers", {"url": other.url})
        assert (status, json.loads(answer)["name"]) == (201, "r1")
        async with c.http.get(c.url + "/workers") as response:
            assert [row["state"] for row in (await response.json())["workers"]] == ["up", "up"]
        await other.close()

    run(body, tokenizer)


# -- clients that leave


@pytest.mark.parametrize("path", list(ENDPOINTS))
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_not_worked_for(tokenizer: Path, path: str, stream: bool) -> None:
    async def body(c: Cluster) -> None:
        replica = c.replicas[0]
        replica.mode = "endless"
        if stream:
            async with c.http.post(c.url + path, json=ENDPOINTS[path] | {"stream": True}) as response:
                await response.content.readuntil(b"\n\n")
                response.close()
        else:
            asking = asyncio.create_task(c.post(path, ENDPOINTS[path]))
            await eventually(lambda: replica.working, "the replica is at work")
            asking.cancel()
        await eventually(lambda: not replica.working, "the replica has stopped")
        await eventually(lambda: replica.aborted == [replica.body["rid"]], "the replica was told")
        state = await c.ended(aborted=1)
        assert state["gateway"]["left"] == 1
        if stream:
            assert state["counts"]["output_tokens"] > 0

    run(body, tokenizer)


def test_every_part_of_a_batch_is_cancelled(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        replica = c.replicas[0]
        replica.mode = "endless"
        for request in (COMPLETION | {"prompt": ["a", "b"]}, COMPLETION | {"n": 2}):
            replica.aborted.clear()
            async with c.http.post(c.url + "/v1/completions", json=request | {"stream": True}) as response:
                for _ in range(3):
                    await response.content.readuntil(b"\n\n")
                response.close()
            # For samples: the ids that SGLang gave to them, as seen in the stream.
            samples = {replica.body["rid"], f"{0:032x}", f"{1:032x}"} if "n" in request else set()
            expected = samples or set(replica.body["rid"])
            await eventually(lambda: expected <= set(replica.aborted), "each part is cancelled")  # noqa: B023
        await c.ended(aborted=2)

    run(body, tokenizer)


def test_a_client_that_leaves_while_its_body_is_on_the_way(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        host, _, port = c.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()

        async def counted() -> bool:
            return (await c.state())["gateway"]["in_flight"] == 1

        await eventually(counted, "the request is being read")
        writer.close()
        await writer.wait_closed()
        state = await c.ended(ok=0)
        assert state["gateway"]["left"] == 1

    run(body, tokenizer)


# -- replicas that fail


@pytest.mark.parametrize("mode", ["die", "die after headers", "503", "refuse", "silent"])
@pytest.mark.parametrize("stream", [True, False])
def test_before_the_first_byte_another_replica_is_tried(tokenizer: Path, mode: str, stream: bool) -> None:
    async def body(c: Cluster) -> None:
        if mode == "refuse":
            await c.replicas[0].close()
        elif mode == "die after headers" and not stream:
            c.replicas[0].mode = "die"
        else:
            c.replicas[0].mode = mode
        status, headers, answer = await c.post("/v1/chat/completions", CHAT | {"stream": stream})
        assert status == 200, answer
        assert headers["x-fair-worker"] == "r1"
        assert headers["x-fair-request-id"] == c.replicas[1].body["rid"]
        if stream:
            assert events(answer)[-1] == b"[DONE]"
        state = await c.ended(failed=1, ok=1)
        assert state["gateway"]["retried"] == 1
        if mode == "silent":
            await eventually(lambda: c.replicas[0].aborted == [c.replicas[0].body["rid"]], "it was cancelled")

    run(body, tokenizer, replicas=2, idle_timeout_s=1.0 if mode == "silent" else 600.0)


def test_when_no_replica_serves_the_client_is_told(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        for replica in c.replicas:
            replica.mode = "die"
        for stream in (True, False):
            status, headers, answer = await c.post("/v1/chat/completions", CHAT | {"stream": stream})
            assert (status, headers["retry-after"]) == (502, "1")
            error = json.loads(answer)["error"]
            assert error["code"] == "no_replica"
            assert "r0" in error["message"]
            assert "r1" in error["message"]
        await c.ended(failed=4)

    run(body, tokenizer, replicas=2)


@pytest.mark.parametrize("mode", ["die midway", "no end"])
@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_after_the_first_byte_the_stream_ends_in_an_error(tokenizer: Path, path: str, mode: str) -> None:
    async def body(c: Cluster) -> None:
        c.replicas[0].mode = mode
        status, _, answer = await c.post(path, ENDPOINTS[path] | {"stream": True})
        assert status == 200
        *chunks, last = events(answer)
        assert len(chunks) >= 2
        assert all("error" not in json.loads(chunk) for chunk in chunks)
        error = json.loads(last)["error"]
        assert (error["code"], error["type"]) == ("replica_lost", "service_unavailable_error")
        state = await c.ended(aborted=1)
        assert state["counts"]["output_tokens"] > 0
        assert len(c.replicas[1].requests) == 0, "what a client has begun to read is not begun again"

    run(body, tokenizer, replicas=2)


@pytest.mark.parametrize("mode", ["400", "500"])
def test_a_replicas_own_error_is_passed_on(tokenizer: Path, mode: str) -> None:
    async def body(c: Cluster) -> None:
        c.replicas[0].mode = mode
        for stream in (True, False):
            status, headers, answer = await c.post("/v1/chat/completions", CHAT | {"stream": stream})
            assert status == int(mode)
            assert json.loads(answer)["error"]["message"] == "as told"
            assert headers["x-fair-worker"] == "r0"
        await c.ended(failed=2)

    run(body, tokenizer)


# -- the router fails


def test_without_workers_the_client_is_told_to_come_back(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        status, headers, answer = await c.post("/v1/completions", COMPLETION)
        assert (status, headers["retry-after"]) == (503, "1")
        assert "no worker is up" in json.loads(answer)["error"]["message"]

    run(body, tokenizer, replicas=0)


def test_a_router_that_goes_and_comes_back(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        c.replicas[0].mode = c.replicas[1].mode = "endless"
        streaming = await c.http.post(c.url + "/v1/completions", json=COMPLETION | {"stream": True})
        await streaming.content.readuntil(b"\n\n")
        await eventually(lambda: len(c.gateway.fleet.workers) == 2, "the gateway knows the workers")
        c.router.close()
        await eventually(lambda: not c.gateway.link.alive, "the gateway misses the router")
        without = [
            await c.http.post(
                c.url + "/v1/completions",
                json=COMPLETION | {"stream": True},
                headers={"x-fair-client": str(n)},
            )
            for n in range(5)
        ]
        assert [one.status for one in without] == [200] * 5
        assert {one.headers["x-fair-worker"] for one in without} == {"r0", "r1"}
        state = await c.state()
        assert (state["placement"], state["in_flight"], state["gateway"]["fallback"]) == ("fallback", 6, True)
        assert state["gateway"]["placed in fallback"] == 5
        assert sum(worker["in_flight"] for worker in state["workers"].values()) == 6
        async with c.http.get(c.url + "/health") as response:
            assert (response.status, (await response.json())["status"]) == (200, "fallback")

        # Another router, which knows no worker and no request: the gateway tells it both.
        shell = Shell(Router(build("d2lpm"), name="d2lpm"), c.router.endpoint)
        thread = threading.Thread(target=shell.run)
        thread.start()
        try:

            async def taken_over() -> bool:
                state = await c.state()
                return state["placement"] == "d2lpm" and state["in_flight"] == 6

            await eventually(taken_over, "the new router counts what is in flight")
            state = await c.state()
            loads = {name: worker["in_flight"] for name, worker in state["workers"].items()}
            assert loads == dict(c.gateway.fleet.in_flight)
            assert state["counts"]["taken over"] == 6
            assert all(min(row.values()) <= -2 for row in state["deficits"].values()), "prompts are charged"
            for replica in c.replicas:
                replica.mode = "ok"
            for one in (streaming, *without):
                assert (await one.content.read()).endswith(b"data: [DONE]\n\n")
            state = await c.ended()
            assert state["counts"]["ended ok"] == 6
            assert not any(worker["in_flight"] for worker in state["workers"].values())
            assert (await c.post("/v1/completions", COMPLETION))[0] == 200
            assert not (await c.state())["gateway"]["fallback"]
        finally:
            shell.stop()
            thread.join()
            shell.close()

    run(body, tokenizer, replicas=2, router_timeout_s=ROUTER_TIMEOUT_S)


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


def test_a_router_that_does_not_answer(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        await eventually(lambda: c.gateway.fleet.workers, "the gateway knows the worker")
        may_go_on = held_router(c)
        status, _, _ = await c.post("/v1/completions", COMPLETION)
        assert status == 200, "the gateway places by itself"
        may_go_on.set()
        await c.ended(failed=1)
        assert len(c.replicas[0].requests) == 1

    run(body, tokenizer, router_timeout_s=ROUTER_TIMEOUT_S)


def test_without_a_router_and_without_workers_the_client_is_told_to_come_back(tokenizer: Path) -> None:
    async def body(c: Cluster) -> None:
        c.router.close()
        await eventually(lambda: not c.gateway.link.alive, "the gateway misses the router")
        status, headers, answer = await c.post("/v1/completions", COMPLETION | {"stream": True})
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(answer)["error"]["code"] == "router_unavailable"
        async with c.http.get(c.url + "/health") as response:
            assert response.status == 503

    run(body, tokenizer, replicas=0, router_timeout_s=ROUTER_TIMEOUT_S)


# -- pure parts


def call(kind: str, **body: object):
    default = {"chat": CHAT, "completions": COMPLETION, "generate": GENERATE}[kind]
    return parse(kind, json.dumps(default | body).encode(), Names(MODEL))


def test_a_stream_may_be_cut_anywhere() -> None:
    chunks = [
        json.dumps({"choices": [{"delta": {"content": text}}], "usage": None})
        for text in ("a", 'b "usage":{', "c")
    ]
    usage = json.dumps(
        {"choices": [], "usage": {"completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}
    )
    shown = "".join(f"data: {chunk}\n\n" for chunk in chunks).encode()
    whole = shown + f"data: {usage}\n\n".encode() + b"data: [DONE]\n\n"
    for step in (1, 2, 7, 50, len(whole)):
        stream = Stream(call("chat", stream=True))
        out = b"".join(stream.feed(whole[at : at + step]) for at in range(0, len(whole), step))
        assert out == shown + b"data: [DONE]\n\n"
        assert stream.ended
        assert stream.usage == Usage(9, 4)


def test_without_usage_events_are_counted() -> None:
    stream = Stream(call("completions", stream=True))
    for _ in range(5):
        stream.feed(b'data: {"choices":[{"text":"a"}]}\n\n')
    assert stream.usage == Usage(4)
    assert not stream.ended


def test_generate_streams_count_the_last_of_each_index() -> None:
    def event(index: int, tokens: int) -> bytes:
        meta = {"completion_tokens": tokens, "cached_tokens": index}
        return b"data: " + json.dumps({"index": index, "meta_info": meta}).encode() + b"\n\n"

    stream = Stream(call("generate", text=["a", "b"], stream=True))
    stream.feed(event(0, 1) + event(1, 1) + event(0, 2))
    stream.feed(event(1, 2) + event(1, 5) + b"data: [DONE]\n\n")
    assert stream.usage == Usage(7, 1)
    single = Stream(call("generate", stream=True))
    single.feed(event(0, 1) + event(0, 2))
    assert single.usage == Usage(2, 0)
    single.feed(b"data: [DONE]\n\n")
    assert single.usage == Usage(2, 0)


def test_a_body_without_usage_has_none() -> None:
    assert usage_of("chat", b"no json") is None
    assert usage_of("chat", b"{}") is None
    assert usage_of("generate", b"[]") is None
    assert usage_of("completions", b'{"usage":{"completion_tokens":3}}') == Usage(3, None)


def test_a_configuration_reaches_worker_processes_whole() -> None:
    config = Config(
        ("tcp://x:1",), MODEL, "/t", 3.5, Limits(tries=1, idle_timeout_s=2.0), ("api-key", "user")
    )
    assert Config.from_json(config.to_json()) == config


def test_header_safe_names() -> None:
    assert header_safe("Alice & Bob, 50%") == "Alice & Bob, 50%"
    assert header_safe("a\nb") == "a%0Ab"
    assert len(header_safe("é" * 128)) <= 128


def test_chats_that_the_template_refuses_are_routed_by_their_text(tokenizer: Path) -> None:
    tokens = Tokens(tokenizer)
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {}},
        {"type": "text", "text": "b"},
    ]
    ids = tokens.ids(call("chat", messages=[{"role": "user", "content": parts}]))
    assert tokens._tokenizer.decode(ids, skip_special_tokens=False) == "<s><user>a b\n<assistant>"
    prefix = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so"}]
    ids = tokens.ids(call("chat", messages=prefix, continue_final_message=True))
    assert tokens._tokenizer.decode(ids, skip_special_tokens=False) == "<s><user>q\n<assistant>so"
    assert tokens.plain_chats == 0
    ids = tokens.ids(call("chat", messages=[{"content": "norole"}], chat_template_kwargs={"messages": 3}))
    assert tokens._tokenizer.decode(ids, skip_special_tokens=False) == "<s><>norole\n<assistant>"


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokens(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokens(tmp_path)


# -- the process


def test_the_process_with_two_workers(tokenizer: Path) -> None:
    async def main() -> None:
        replica = FakeReplica()
        await replica.start()
        router = RouterThread([replica])
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "router.gateway", "--port", str(port), "--router", router.endpoint]
        command += ["--model-name", MODEL, "--tokenizer", str(tokenizer), "--workers", "2"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as http:

                    async def healthy() -> bool:
                        assert process.poll() is None, process.stderr.read()
                        try:
                            return (await http.get("/health")).status_code == 200
                        except httpx.TransportError:
                            return False

                    await eventually(healthy, "the gateway is up", START_S)
                    assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
            finally:
                process.terminate()
                assert await asyncio.to_thread(process.wait, START_S) == 0
        router.close()
        await replica.close()

    asyncio.run(main())
