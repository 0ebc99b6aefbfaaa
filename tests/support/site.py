"""A cluster of real processes over stand-in engines, each of which can be killed, paused and started again."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from router.gateway.guard import KEY_VARIABLE
from tests.support.ports import free_port
from tests.support.stand_in import MODEL, Engine
from tests.support.waiting import DEADLINE_S, eventually

QUANTUM = 1e9
"""So large that no credit is ever refilled: what a client was charged can be read from it."""


class Process:
    """One process; `start` may be called again after `kill`."""

    def __init__(
        self,
        name: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        folder: Path | None = None,
    ) -> None:
        """It runs in `folder`, and `python` is another environment's."""
        self.name = name
        self._environment = {**os.environ, **(environment or {})}
        self._folder = folder
        self.command = [python, "-m", *arguments]
        self.log = Path(tempfile.mkstemp(prefix=f"{name}-", suffix=".log")[1])
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=self._environment, cwd=self._folder
            )

    def kill(self) -> None:
        """kill -9, and reaped."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def send(self, number: int) -> None:
        self._signal(number)

    @property
    def is_started(self) -> bool:
        return self._process is not None

    def exit_code(self) -> int | None:
        """None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self.log.unlink(missing_ok=True)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


@dataclass
class Seen:
    """What a client saw of one stream."""

    status: int = 0
    worker: str = ""
    events: int = 0
    text: str = ""
    error: str = ""
    ended: bool = False
    completion_tokens: int = 0
    finish: list[str] = field(default_factory=list)


class Site:
    """Stand-in replicas r0, r1, …, routers, gateways. Nothing is started by itself."""

    def __init__(
        self,
        tokenizer: Path,
        *,
        replicas: int = 2,
        gateways: int = 1,
        step_s: float = 0.02,
        router_options: tuple[str, ...] = (),
        gateway_options: tuple[str, ...] = (),
        tenants: Path | None = None,
        admin_key: str = "",
        models: Sequence[str] = (),
        routers: int = 1,
        replica_options: Sequence[str] = (),
    ) -> None:
        """All gateways know all routers; `router` is the first. With `tenants`, a file, gateways have an address for
        operators, which `admin_key` opens. `models` are those of the replicas, the first one first; without any, they
        have one that nobody names."""
        self._replica_options = tuple(replica_options)
        self._models = list(models)
        self._salts = {model: salt for salt, model in enumerate(dict.fromkeys(models))}
        self.engine = Engine(tokenizer)
        self.tokenizer = tokenizer
        self.step_s = step_s
        self.replicas: dict[str, Process] = {}
        self.urls: dict[str, str] = {}
        for index in range(replicas):
            self.add_replica(f"r{index}")
        self.router_addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(routers)]
        self.router_address = self.router_addresses[0]
        named = [f",model={model}" for model in models] or [""] * replicas
        workers = [
            f"--worker={name},http={url}{model}"
            for (name, url), model in zip(self.urls.items(), named, strict=True)
        ]
        more_models = ",".join(f"{model}={tokenizer}" for model in self._salts if model != MODEL)
        self.routers = [
            Process(
                f"router{index}" if index else "router", "router", "--bind", address,
                "--placement", "d2lpm", "--worker-quantum", str(QUANTUM),
                *workers, *router_options,
            )
            for index, address in enumerate(self.router_addresses)
        ]  # fmt: skip
        self.router = self.routers[0]
        self.gateways: list[Process] = []
        self.gateway_urls: list[str] = []
        self.admin_urls = self.gateway_urls if tenants is None else []
        self.admin_headers = {"authorization": f"Bearer {admin_key}"} if tenants is not None else {}
        environment = {KEY_VARIABLE: admin_key}
        for index in range(gateways):
            port = free_port()
            self.gateway_urls.append(f"http://127.0.0.1:{port}")
            access: tuple[str, ...] = ()
            if tenants is not None:
                admin_port = free_port()
                self.admin_urls.append(f"http://127.0.0.1:{admin_port}")
                access = ("--tenants", str(tenants), "--admin-port", str(admin_port))
            self.gateways.append(
                Process(
                    f"gateway{index}",
                    "router.gateway",
                    "--port",
                    str(port),
                    *(word for address in self.router_addresses for word in ("--router", address)),
                    "--model-name",
                    MODEL,
                    "--tokenizer",
                    str(tokenizer),
                    *(("--more-models", more_models) if more_models else ()),
                    *access,
                    *gateway_options,
                    environment=environment if tenants is not None else {},
                )
            )
        self.http: aiohttp.ClientSession

    def add_replica(self, name: str) -> Process:
        port = free_port()
        made = Process(
            name, "tests.support.stand_in", "--port", str(port),
            "--tokenizer", str(self.tokenizer), "--step", str(self.step_s),
            "--salt", str(self._salt(len(self.replicas))), *self._replica_options,
        )  # fmt: skip
        self.replicas[name], self.urls[name] = made, f"http://127.0.0.1:{port}"
        return made

    def _salt(self, index: int) -> int:
        """Of the replica's model: stand-ins with another one give other answers."""
        return self._salts[self._models[index]] if index < len(self._models) else 0

    async def __aenter__(self) -> "Site":
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=DEADLINE_S)
        )
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self.http.close()
        for process in (*self.gateways, *self.routers, *self.replicas.values()):
            if kind is not None and process.log.exists():
                print(f"--- {process.name}\n{process.log.read_text()[-3000:]}")
            process.close()

    async def start(self) -> None:
        """Everything, and waits until it serves."""
        for process in (*self.replicas.values(), *self.routers, *self.gateways):
            process.start()
        await self.ready()

    async def ready(self) -> None:
        for name in self.replicas:
            await eventually(lambda name=name: self.answers(f"{self.urls[name]}/ready"), f"{name} is ready")
        for index in range(len(self.gateways)):
            await eventually(lambda index=index: self.all_up(index), "the router knows the workers")

    async def answers(self, url: str) -> bool:
        async with self.http.get(url) as response:
            return response.status == 200

    async def all_up(self, gateway: int = 0) -> bool:
        state = await self.state(gateway)
        workers = state["workers"].values()
        return (
            not state["gateway"]["fallback"]
            and not state["gateway"]["sick"]
            and all(router["state"] == "up" for router in state["gateway"]["routers"])
            and min(len(workers), state["gateway"]["workers"]) >= len(self.replicas)
            and all(worker["state"] == "up" for worker in workers)
        )

    async def state(self, gateway: int = 0) -> dict[str, Any]:
        async with self.http.get(
            f"{self.admin_urls[gateway]}/status", headers=self.admin_headers
        ) as response:
            return await response.json()

    async def work(self, name: str) -> dict[str, Any]:
        """What a stand-in has computed."""
        async with self.http.get(f"{self.urls[name]}/work") as response:
            return await response.json()

    async def hold(self, tokens: int | None, *names: str) -> None:
        """From here on no answer of these stand-ins, or of all, has more tokens, until None lets them go on. So nothing
        ends before what is to happen to it has happened, however slow the machine is."""
        for name in names or self.replicas:
            async with self.http.post(f"{self.urls[name]}/hold", json={"tokens": tokens}) as response:
                assert response.status == 200

    async def stream(
        self,
        kind: str,
        prompt: str,
        tokens: int,
        seen: Seen,
        *,
        client: str = "c",
        gateway: int = 0,
        temperature: float = 0,
        **more: Any,
    ) -> Seen:
        """One stream; what has come so far is in `seen`. `more` are further fields of the body."""
        path, body = request(kind, prompt, tokens, temperature)
        return await read_stream(self.http, self.gateway_urls[gateway] + path, body | more, seen, client)

    async def whole(
        self, prompt: str, tokens: int, *, client: str = "c", gateway: int = 0
    ) -> tuple[int, str]:
        """One answer in a piece: status, and text or error."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
        url = f"{self.gateway_urls[gateway]}/v1/completions"
        async with self.http.post(url, json=body, headers={"x-fair-client": client}) as response:
            answer = await response.json()
            return response.status, (
                answer["choices"][0]["text"] if response.status == 200 else json.dumps(answer)
            )

    def expected(self, kind: str, prompt: str, tokens: int) -> str:
        """The text of an undisturbed greedy answer."""
        _, body = request(kind, prompt, tokens, 0)
        *_, last = self.engine.steps(kind, body)
        return last.text

    async def quiet(self, gateway: int = 0) -> dict[str, Any]:
        """The router's state once nothing is in flight; every placement has ended, once."""

        async def settled() -> dict[str, Any] | None:
            state = await self.state(gateway)
            idle = not state["gateway"]["fallback"] and not state["gateway"]["in_flight"]
            return state if idle and state["in_flight"] == 0 else None

        state: dict[str, Any] = await eventually(settled, "nothing is in flight")
        counts = state["counts"]
        ended = sum(number for name, number in counts.items() if name.startswith("ended "))
        assert ended == counts.get("placed", 0) + counts.get("taken over", 0), counts
        assert not any(worker["in_flight"] for worker in state["workers"].values())
        return state


def request(kind: str, prompt: str, tokens: int, temperature: float) -> tuple[str, dict[str, Any]]:
    """Path and body of a stream."""
    sampling = {"temperature": temperature}
    if kind == "generate":
        sampling["max_new_tokens"] = tokens
        return "/generate", {"text": prompt, "stream": True, "sampling_params": sampling}
    options = {"stream": True, "max_tokens": tokens, "stream_options": {"include_usage": True}} | sampling
    if kind == "chat":
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]} | options
    return "/v1/completions", {"prompt": prompt} | options


async def read_stream(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], seen: Seen, client: str = "c"
) -> Seen:
    """The stream that answers `body`, into `seen`."""
    async with http.post(url, json=body, headers={"x-fair-client": client}) as response:
        seen.status = response.status
        seen.worker = response.headers.get("x-fair-worker", "")
        if response.status != 200:
            seen.error = await response.text()
            return seen
        async for line in response.content:
            if line.startswith(b"data: "):
                read(seen, line[6:].strip())
    return seen


def read(seen: Seen, data: bytes) -> None:
    """One event of a stream."""
    seen.events += 1
    if data == b"[DONE]":
        seen.ended = True
        return
    event = json.loads(data)
    if "error" in event:
        seen.error = event["error"]["message"]
    elif "meta_info" in event:
        seen.text = event["text"]
        seen.completion_tokens = event["meta_info"]["completion_tokens"]
        if event["meta_info"]["finish_reason"]:
            seen.finish.append(event["meta_info"]["finish_reason"]["type"])
    elif event["choices"]:
        choice = event["choices"][0]
        seen.text += choice.get("delta", choice).get("content") or choice.get("text") or ""
        if choice.get("finish_reason"):
            seen.finish.append(choice["finish_reason"])
    else:
        seen.completion_tokens = event["usage"]["completion_tokens"]
