"""Replicas for tests, forked from a process that has imported SGLang: 0.6 s of CPU time for one in place of 33.

    python -m tests.support.fork_server NAME MODULE      serves replicas as `python -m MODULE` would start them

What a test needs to be as on a GPU, where SGLang spawns its processes, starts `python -m MODULE` itself.
"""

import atexit
import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import BinaryIO

from sglang_fair.common.processes import child_environment
from sglang_fair.engines import fork_server
from tests.support.waiting import wait_until

START_S = 240.0


class Forked:
    """A replica that was forked, with the few methods of a `subprocess.Popen` that tests use."""

    def __init__(self, module: str, arguments: Sequence[str], output: BinaryIO) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(f"\0{fork_server_of(module)}")
        self._returncode: int | None = None
        wanted = {"argv": list(arguments), "env": dict(os.environ)}
        socket.send_fds(self._connection, [json.dumps(wanted).encode()], [output.fileno()])
        self.pid: int = json.loads(self._connection.recv(fork_server.LONGEST_MESSAGE))["pid"]

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        with contextlib.suppress(BlockingIOError):
            self._hear(socket.MSG_DONTWAIT)
        return self._returncode

    def wait(self) -> int:
        """Its exit code, negative for a signal."""
        self._hear()
        assert self._returncode is not None
        return self._returncode

    def _hear(self, flags: int = 0) -> None:
        if self._returncode is None:
            self._returncode = json.loads(self._connection.recv(fork_server.LONGEST_MESSAGE, flags))["code"]
            self._connection.close()


@cache
def fork_server_of(module: str) -> str:
    """The name of this process's fork server for `module`. It is started once, and ends with this process."""
    name = f"sglang-fair-tests/{os.getpid()}/{module}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fork_server", name, module],
        env={**child_environment(), "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )

    atexit.register(_end, process)

    def listens() -> bool:
        assert process.poll() is None, "the fork server has ended"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            return probe.connect_ex(f"\0{name}") == 0

    wait_until(listens, f"the fork server for {module}", START_S)
    return name


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    process.wait()


if __name__ == "__main__":
    name, module = sys.argv[1:]
    importlib.import_module(module)  # with what it changes
    fork_server.main([name, "--device", "cpu", "--model", "tiny"])
