"""A real SGLang replica on this machine's CPU, and a few ways to talk to it."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil

from router.gateway.guard import KEY_VARIABLE
from sglang_fair.common.processes import child_environment
from sglang_fair.common.service_keys import bearer, replica_key
from tests.support.fork_server import FORKED, PREFIX, Forked, start
from tests.support.ports import free_port
from tests.support.waiting import wait_until

START_S = 240.0
SPAWNED_S = 600.0
"""How long a replica may take that is not forked: its processes import SGLang, each for 30 s of CPU time and more."""
STEP_S = 120.0

EMULATED = ("--engine", "emulated", "--gpu", "a100-80g", "--model", "llama-3.1-8b")
"""For a cluster: the scheduler is SGLang's, the model's steps take an A100's time and none of this machine's."""

REPORTS = "SGLANG_FAIR_TEST_REPORTS"
"""Names the directory that the ranks of `ranks_replica` report to."""


def check_conservation(*books: dict[str, Any]) -> None:
    """Each of these GET /fair compared charges with the engine's counters, and they never differed; and nobody came,
    ran or left without the books' knowledge."""
    for each in books:
        assert each["corrections"] == 0, each
        found = each["conservation"]
        assert found["mismatches"] == 0, found
        assert found["ok"], found


def lives(pid: int) -> bool:
    """Whether a process is there and no zombie, which an orphan stays where process 1 reaps nobody."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def living(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that are there and no zombies."""
    return [process for process in processes if process.is_running() and lives(process.pid)]


def command_line(process: psutil.Process) -> str:
    """Empty for one that has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def shared_files(processes: Sequence[psutil.Process]) -> set[str]:
    """The files in /dev/shm that these hold open or have mapped."""
    found = set()
    for process in processes:
        names = [file.path for file in process.open_files()] + [area.path for area in process.memory_maps()]
        found |= {name for name in names if name.startswith("/dev/shm/")}
    return found


def check_nothing_is_shared_after(replica: int, url: str) -> None:
    """kill -9 of a replica's processes: its schedulers have reported their load, and no file of it is left."""
    loads = httpx.get(f"{url}/v1/loads", timeout=120).json()["loads"]
    assert [load["dp_rank"] for load in loads] == [0], "the schedulers' reports arrive"
    family = [psutil.Process(replica)]
    family += family[0].children(recursive=True)
    held = shared_files(family)
    for process in family:
        process.kill()
    wait_until(lambda: not living(family), "the end of its processes")
    assert [name for name in held if Path(name).exists()] == []


@dataclass
class Answer:
    """What a client saw of one request."""

    status: int = 0
    rid: str = ""
    ids: list[int] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    retractions: int = 0
    finish: str = ""
    first_at: float = 0.0
    """When the first token came."""
    finished_at: float = 0.0


class Replica:
    """`python -m sglang_fair.engines.replica --model tiny …` as a context manager.

    `forked`: from the tests' fork server, in a second; otherwise in a process whose subprocesses SGLang spawns.
    """

    def __init__(
        self,
        *arguments: str,
        kv_events: bool = False,
        module: str = "sglang_fair.engines.replica",
        forked: bool = True,
    ) -> None:
        own, _, engine = _split(list(arguments))
        self.port = free_port()
        self.kv_port = free_port(2) if kv_events else None
        kv = ["--kv-port", str(self.kv_port)] if kv_events else []
        self.url = f"http://127.0.0.1:{self.port}"
        self._module = module
        self._arguments = [
            "--model", "tiny", "--port", str(self.port), *kv, *own, "--", "--log-level", "warning", *engine
        ]  # fmt: skip
        self._forked = forked
        if forked:
            start()  # which ends with the thread that starts it
        self.log = Path(tempfile.mkstemp(prefix="replica-", suffix=".log")[1])
        self.process: subprocess.Popen[bytes] | Forked | None = None

    def __enter__(self) -> "Replica":
        with self.log.open("wb") as log:
            if self._forked:
                self.process = Forked(self._module, self._arguments, log)
            else:
                command, environment = self._command()
                self.process = subprocess.Popen(
                    command, stdout=log, stderr=log, start_new_session=True, env=environment
                )
        try:
            limit_s = START_S if self._forked else SPAWNED_S
            wait_until(self._ready, f"a replica {' '.join(self._arguments)}", limit_s)
        except BaseException as error:
            self.__exit__(type(error))
            print(self.log.read_text()[-4000:])
            raise
        return self

    def _command(self) -> tuple[list[str], dict[str, str]]:
        """How it is started where it is not forked, and in which environment."""
        environment = {name: value for name, value in child_environment().items() if name != PREFIX}
        return [sys.executable, "-m", self._module, *self._arguments], environment

    def __exit__(self, raised: object = None, *_: object) -> None:
        """Its books must have agreed with the engine's counters after every batch that it ran."""
        assert self.process is not None
        books = self.fair() if raised is None and self.process.poll() is None else {}
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        check_conservation(*books.get("data_parallel", [books] if books else []))

    def kill(self) -> None:
        """SIGKILL to all of its processes. When it returns they are gone, and its ports are free."""
        assert self.process is not None
        leader = psutil.Process(self.process.pid)
        processes = [leader, *leader.children(recursive=True)]
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        wait_until(lambda: not living(processes), "the end of a replica's processes")

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"replica ended: {self.log.read_text()[-2000:]}"
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        return False

    def fair(self) -> dict[str, Any]:
        """GET /fair."""
        state: dict[str, Any] = httpx.get(f"{self.url}/fair", timeout=120).json()
        return state

    def metrics(self, headers: Mapping[str, str] | None = None) -> str:
        """GET /metrics. A scheduler that is too busy to answer leaves its numbers out, and is asked again."""

        def page() -> str | None:
            answer = httpx.get(f"{self.url}/metrics", headers=headers, timeout=120)
            assert answer.status_code == 200
            return answer.text if "\nsglang_fair_scheduler_answers 1.0\n" in answer.text else None

        text: str = wait_until(page, "a page with the scheduler's numbers")
        return text

    def flush(self) -> None:
        """Empty the prefix cache; waits until the engine is idle enough to do so."""
        wait_until(
            lambda: httpx.post(f"{self.url}/flush_cache", timeout=120).status_code == 200, "an idle engine"
        )

    def abort(self, request_id: str) -> None:
        httpx.post(f"{self.url}/abort_request", json={"rid": request_id}, timeout=120)

    def generate(self, client: str, tokens: list[int], output_tokens: int = 1, **body: Any) -> Answer:
        return asyncio.run(self.ask(client, tokens, output_tokens, **body))

    async def ask(
        self,
        client: str,
        tokens: list[int],
        output_tokens: int = 1,
        *,
        session: aiohttp.ClientSession | None = None,
        leave_after_tokens: int | None = None,
        ignore_eos: bool = True,
        headers: Mapping[str, str] | None = None,
        answer: Answer | None = None,
        **body: Any,
    ) -> Answer:
        """One /generate request, streamed. The client hangs up after `leave_after_tokens`. `answer` grows as it comes.

        With `ignore_eos` the engine reserves memory for the whole output; without, it gambles and retracts.
        """
        payload = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": output_tokens, "ignore_eos": ignore_eos, "temperature": 0},
            "stream": True,
            **body,
        }
        if not ignore_eos:
            payload["sampling_params"]["min_new_tokens"] = output_tokens
        async with contextlib.AsyncExitStack() as stack:
            if session is None:
                session = await stack.enter_async_context(aiohttp.ClientSession())
            answer = Answer() if answer is None else answer
            named = {"x-fair-client": client, **(headers or {})}
            async with session.post(f"{self.url}/generate", json=payload, headers=named) as response:
                answer.status = response.status
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        _note(answer, json.loads(line[6:]))
                    if leave_after_tokens is not None and answer.output_tokens >= leave_after_tokens:
                        break
            answer.finished_at = time.monotonic()
            return answer


def _note(answer: Answer, event: dict[str, Any]) -> None:
    meta = event.get("meta_info", {})
    answer.rid = meta.get("id", answer.rid)
    answer.ids = event.get("output_ids", answer.ids)
    answer.output_tokens = meta.get("completion_tokens", answer.output_tokens)
    if answer.output_tokens and not answer.first_at:
        answer.first_at = time.monotonic()
    answer.cached_tokens = meta.get("cached_tokens", answer.cached_tokens)
    answer.prompt_tokens = meta.get("prompt_tokens", answer.prompt_tokens)
    answer.retractions = meta.get("num_retractions", answer.retractions)
    answer.finish = (meta.get("finish_reason") or {}).get("type", answer.finish)


def _split(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    if "--" not in arguments:
        return arguments, "", []
    at = arguments.index("--")
    return arguments[:at], "--", arguments[at + 1 :]


class Cluster:
    """`sglang-fair cluster --model tiny --json …` as a context manager: two replicas, router, gateway. `--models` takes
    the place of the one model.

    With tenants, `environment` has the keys for operators and replicas. It has a page only with --dashboard-port.
    `forked`: its fork server is forked from the tests' own, and imports nothing.
    """

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        forked: bool = True,
        command: Sequence[str] = (),
        folder: Path | None = None,
    ) -> None:
        """`command`: another installation's `sglang-fair`, with which `environment` is all that it gets, and which is
        started in `folder`."""
        self._forked = Path(tempfile.mkstemp(prefix="forked-")[1])
        self._environment = {**os.environ, FORKED: str(self._forked), **(environment or {})}
        if command:
            self._environment = dict(environment or {})
        elif not forked:
            del self._environment[PREFIX]
        self._folder = folder
        self._admin = bearer(self._environment.get(KEY_VARIABLE, ""))
        self._operator = bearer(self._environment.get(replica_key.variable, ""))
        own, _, engine = _split(list(arguments))
        self._command = [
            *(command or (sys.executable, "-m", "sglang_fair.cli")), "cluster",
            "--device", "cpu", *(() if "--models" in own else ("--model", "tiny")),
            "--port", "0", "--json", "--quiet-replicas",
            *(() if "--dashboard-port" in own else ("--dashboard", "off")), *own, "--", *engine,
        ]  # fmt: skip
        self.log = Path(tempfile.mkstemp(prefix="cluster-", suffix=".log")[1])
        self.addresses: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Cluster":
        """Does not wait; several clusters can start at once."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=self._environment,
                cwd=self._folder,
            )
        return self

    def __enter__(self) -> "Cluster":
        if self._process is None:
            self.start()
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            print(self.log.read_text()[-4000:])
            raise AssertionError(f"the cluster ended with {self._process.wait()}")
        self.addresses = json.loads(line)
        return self

    def __exit__(self, raised: object = None, *_: object) -> None:
        """Ctrl-C, and nothing of it may be left; what the replicas' books found is the test's."""
        assert self._process is not None
        books = list(self._living_books()) if raised is None else []
        family = self.processes()
        self._process.send_signal(signal.SIGINT)
        self._process.wait(STEP_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        try:
            wait_until(lambda: not living(family), "the end of all its processes")
        finally:
            for process in living(family):
                print(f"left behind: {process}")
                process.kill()
        check_conservation(*books)

    def processes(self) -> list[psutil.Process]:
        """The cluster's process and all below it, and those below its fork server."""
        assert self._process is not None
        forked = [int(pid) for pid in self._forked.read_text().split()]
        family: list[psutil.Process] = []
        for pid in (self._process.pid, *forked):
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                family += (root, *root.children(recursive=True))
        return family

    def _living_books(self) -> Iterator[dict[str, Any]]:
        """The books of the replicas that no test has killed just now."""
        for url in self.addresses["replicas"]:
            with contextlib.suppress(httpx.TransportError):
                yield httpx.get(f"{url}/fair", timeout=30, headers=self._operator).json()

    @property
    def url(self) -> str:
        url: str = self.addresses["gateway"]
        return url

    def status(self) -> dict[str, Any]:
        """GET /status of the gateway: the router's snapshot."""
        url = self.addresses["admin"] or self.url
        state: dict[str, Any] = httpx.get(f"{url}/status", timeout=30, headers=self._admin).json()
        return state

    def books(self) -> list[dict[str, Any]]:
        """GET /fair of each replica."""
        urls = self.addresses["replicas"]
        return [httpx.get(f"{url}/fair", timeout=30, headers=self._operator).json() for url in urls]
