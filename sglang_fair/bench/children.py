"""Processes of a bench: started, measured and ended."""

import asyncio
import contextlib
import socket
import subprocess
import tempfile
from collections.abc import Sequence

import psutil

from sglang_fair.common.processes import child_environment

START_S = 60.0
LAST_LINES = 10
"""Of what a program said before it failed."""
PORTS = range(18_000, 29_000)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens at. Raises OSError."""
    found: list[int] = []
    for port in PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"no {count} free ports from {PORTS.start} on")


class DidNotStart(OSError):
    """A program ended, or did not answer in time. The text shows its command and its last words."""


class Child:
    """A process of the bench, and what it has said."""

    def __init__(self, command: Sequence[str]) -> None:
        """Raises `DidNotStart`."""
        self._command = " ".join(command)
        self._log = tempfile.TemporaryFile(prefix="bench-gateway-")  # noqa: SIM115 (as long as the process)
        try:
            self.popen = subprocess.Popen(
                command, stdout=self._log, stderr=self._log, env=child_environment()
            )
        except OSError as error:
            raise DidNotStart(f"{self._command}: {error}") from error
        self.process = psutil.Process(self.popen.pid)

    def check(self) -> None:
        """Raises `DidNotStart` if the process has ended."""
        if (code := self.popen.poll()) is not None:
            raise self.failure(f"ended with exit code {code}")

    def failure(self, how: str) -> DidNotStart:
        """The error for a program that failed to start."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        said = "\n".join(f"    {line}" for line in lines[-LAST_LINES:]) or "    (it said nothing)"
        return DidNotStart(f"{self._command}: {how}\n{said}")

    def stop(self) -> None:
        """Asks the process to end."""
        self.popen.terminate()

    def close(self) -> None:
        """Waits for its end, and kills it when that takes too long."""
        try:
            self.popen.wait(5)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self._log.close()


class Children:
    """Processes that end with the bench."""

    def __init__(self) -> None:
        self._all: list[Child] = []

    def start(self, *command: str) -> Child:
        """Raises `DidNotStart`."""
        child = Child(command)
        self._all.append(child)
        return child

    def close(self) -> None:
        """Ends all of them, the latest first."""
        for child in reversed(self._all):
            child.stop()
        for child in self._all:
            child.close()


async def until_served(port: int, request: bytes, programs: Sequence[Child]) -> None:
    """Waits until `request`, as it is sent, is answered by 200. Raises `DidNotStart` if a program ends, or after
    `START_S`."""
    try:
        async with asyncio.timeout(START_S):
            while True:
                for program in programs:
                    program.check()
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.write(request)
                    status = await reader.readline()
                    writer.close()
                    if b" 200 " in status:
                        return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise programs[-1].failure(f"did not answer with 200 within {START_S:g} s") from None


def start_sglang_router(
    children: Children, program: str, port: int, metrics_port: int, engines: Sequence[int]
) -> list[Child]:
    """The Rust router of PyPI, in front of these ports."""
    command = [
        program, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware",
        "--prometheus-port", str(metrics_port), "--log-level", "error",
        "--worker-urls", *(f"http://127.0.0.1:{engine}" for engine in engines),
    ]  # fmt: skip
    return [children.start(*command)]


def family(children: Sequence[Child]) -> list[psutil.Process]:
    """Their processes, and the processes that those have started."""
    started = (one for child in children for one in child.process.children(recursive=True))
    return [*(child.process for child in children), *started]


def cpu_s(children: Sequence[Child]) -> float:
    """CPU time of these processes and their children so far."""
    return float(sum(times.user + times.system for times in (one.cpu_times() for one in family(children))))


def memory_mb(children: Sequence[Child]) -> float:
    """Resident memory of these processes and their children."""
    return float(sum(one.memory_info().rss for one in family(children))) / 1e6
