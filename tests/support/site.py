"""A cluster of real processes over stand-in engines, each of which can be killed, paused and started again."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.ports import free_port
from tests.support.stand_in import MODEL, Engine
from tests.support.waiting import DEADLINE_S, eventually

QUANTUM = 1e9
"""So large that no credit is ever refilled: what a client was charged can be read from it."""


class Process:
    """One process; `start` may be called again after `kill`."""

    def __init__(self, name: str, *arguments: str) -> None:
        self.name = name
        self.command = [sys.executable, "-m", *arguments]
        self.log = Path(tempfile.mkstemp(prefix=f"{name}-", suffix=".log")[1])
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=log)

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
        routers: int = 1,
    ) -> None:
        """All gateways know all routers; `router` is the first."""
        self.engine = Engine(tokenizer)
        self.step_s = step_s
        self.replicas: dict[str, Process] = {}
        self.urls: dict[str, str] = {}
        for index in range(replicas):
            name, port = f"r{index}", free_port()
            self.replicas[name] = Process(
                name, "tests.support.stand_in", "--port", str(port), "--tokenizer", str(tokenizer),
                "--step", str(step_s),
            )  # fmt: skip
            self.urls[name] = f"http://127.0.0.1:{port}"
        addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(routers)]
        workers = [f"--worker={name},http={url}" for name, url in self.urls.items()]
        self.routers = [
            Process(
                f"router{index}" if index else "router", "router", "--bind", address,
                "--placement", "d2lpm", "--worker-quantum", str(QUANTUM), *workers, *router_options,
            )
            for index, address in enumerate(addresses)
        ]  # fmt: skip
        self.router = self.routers[0]
        ports = [free_port() for _ in range(gateways)]
        self.gateway_urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.gateways = [
            Process(
                f"gateway{index}", "router.gateway", "--port", str(port),
                *(word for address in addresses for word in ("--router", address)),
                "--model-name", MODEL, "--tokenizer", str(tokenizer), *gateway_options,
            )
            for index, port in enumerate(ports)
        ]  # fmt: skip
        self.http: aiohttp.ClientSession

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
        async with self.http.get(f"{self.gateway_urls[gateway]}/status") as response:
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
    ) -> Seen:
        """One greedy stream; what has come so far is in `seen`."""
        path, body = request(kind, prompt, tokens)
        return await read_stream(self.http, self.gateway_urls[gateway] + path, body, seen, client)

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
        _, body = request(kind, prompt, tokens)
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


def request(kind: str, prompt: str, tokens: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a greedy stream."""
    sampling: dict[str, Any] = {"temperature": 0}
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
