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
"""Of the output of a program that failed."""


def free_ports(count: int) -> list[int]:
    """Ports of this machine that are free now, below those that the system gives out by itself. Raises OSError."""
    found: list[int] = []
    for port in range(18_000, 29_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"no {count} free ports")


class DidNotStart(OSError):
    """A program ended, or did not answer in time. The text shows its command and its last lines."""


class Child:
    """A process of the bench, and its output."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = " ".join(command)
        self.log = tempfile.TemporaryFile(prefix="bench-")  # noqa: SIM115 (as long as the process)
        try:
            self.process = psutil.Popen(command, stdout=self.log, stderr=self.log, env=child_environment())
        except OSError as error:
            raise DidNotStart(f"{self.command}: {error}") from error

    def failure(self, how: str) -> DidNotStart:
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()[-LAST_LINES:] or ["(no output)"]
        return DidNotStart("\n    ".join([f"{self.command}: {how}", *lines]))


class Children:
    """Processes that end with the bench."""

    def __init__(self) -> None:
        self._all: list[Child] = []

    def start(self, *command: str) -> Child:
        self._all.append(Child(command))
        return self._all[-1]

    def close(self) -> None:
        """Ends all of them, the latest first."""
        for child in reversed(self._all):
            child.process.terminate()
        for child in self._all:
            try:
                child.process.wait(5)
            except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
                child.process.kill()
                child.process.wait()
            child.log.close()


async def until_served(port: int, request: bytes, programs: Sequence[Child]) -> None:
    """Waits until `request`, as it is sent, is answered by 200. Raises `DidNotStart` if a program ends, or after
    `START_S`."""
    try:
        async with asyncio.timeout(START_S):
            while True:
                for program in programs:
                    if (code := program.process.poll()) is not None:
                        raise program.failure(f"ended with exit code {code}")
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


def cost(children: Sequence[Child]) -> tuple[float, float]:
    """CPU seconds so far, and resident memory in MB, of these processes and their children."""
    family = [one for child in children for one in (child.process, *child.process.children(recursive=True))]
    times = [one.cpu_times() for one in family]
    return sum(one.user + one.system for one in times), sum(one.memory_info().rss for one in family) / 1e6
