"""The tests' fork server: one process that has imported SGLang, and from which replicas and the fork servers of
clusters are forked. A replica takes 1 s of CPU time in place of 33, a cluster's fork server none in place of 11.

    python -m tests.support.fork_server NAME      forks processes that run as `python -m MODULE ARGUMENTS` would

It is started when the first test needs it (`start`), or when the workers of pytest-xdist are, which share it; it ends
with the process that runs the tests. A cluster finds it
by its environment (`startup/sitecustomize.py`); without `PREFIX` there, it starts its own as it does elsewhere.
What a test needs to be as on a GPU, where SGLang spawns its processes, starts `python -m MODULE` itself.
"""

import atexit
import contextlib
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

import psutil

from sglang_fair.common.processes import child_environment, die_with_parent
from sglang_fair.engines import fork_server, replica
from sglang_fair.overlay import releases
from tests.support.waiting import wait_until

START_S = 240.0

ADDRESS = "SGLANG_FAIR_TEST_FORK_SERVER"
"""The environment variable with the name of the socket that the fork server listens on."""

LAUNCHED = "SGLANG_FAIR_TEST_LAUNCHED"
"""The environment variable with the fork server's process id."""

PREFIX = "SGLANG_FAIR_TEST_PREFIX"
"""The environment variable with the Python environment whose clusters may use it."""

FORKED = "SGLANG_FAIR_TEST_FORKED"
"""The environment variable with a file that gets the process id of each fork server that a cluster was given."""

ERRORS = "SGLANG_FAIR_TEST_ERRORS"
"""The environment variable with the file that a program's errors go to (`run`)."""

_STARTUP = str(Path(__file__).parent / "startup")


class Forked:
    """A replica that was forked, with the few methods of a `subprocess.Popen` that tests use."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        output: IO[bytes],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._connection = connect()
        self._returncode: int | None = None
        wanted = {"argv": [module, *arguments], "env": dict(environment or os.environ)}
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


def connect() -> socket.socket:
    """A connection to the fork server, which starts one process for it, and kills that when it is closed."""
    start()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0{os.environ[ADDRESS]}")
    return connection


def run(*arguments: str, environment: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """`python ARGUMENTS`, which are `-m MODULE …` or `-c CODE`, with SGLang imported already and no plugin loaded."""
    with tempfile.TemporaryFile() as output, tempfile.NamedTemporaryFile() as errors:
        wanted = {**os.environ, **(environment or {}), ERRORS: errors.name}
        code = Forked("run", arguments, output, wanted).wait()
        output.seek(0)
        said = [file.read().decode(errors="replace") for file in (output, errors)]
    return subprocess.CompletedProcess(arguments, code, *said)


def announce() -> None:
    """Tells all processes where this one's fork server will be, or that of the process that it is a worker of."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ[ADDRESS] = f"sglang-fair-tests/{os.getpid()}"
        os.environ.pop(LAUNCHED, None)
    os.environ[PREFIX] = sys.prefix
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys((_STARTUP, *filter(None, paths))))


def launch() -> None:
    """Starts the fork server and does not wait. The thread that calls this must live as long as the tests run."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fork_server", os.environ[ADDRESS]],
        env={**child_environment(), "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    os.environ[LAUNCHED] = str(process.pid)
    atexit.register(_end, process)


@cache
def start() -> None:
    """Waits for the fork server, and launches it if nobody has."""
    if LAUNCHED not in os.environ:
        launch()
    pid = int(os.environ[LAUNCHED])

    def listens() -> bool:
        assert psutil.pid_exists(pid), "the fork server has ended"
        assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE, "the fork server has ended"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            return probe.connect_ex(f"\0{os.environ[ADDRESS]}") == 0

    wait_until(listens, "the tests' fork server", START_S)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    process.wait()


def main(name: str) -> None:
    die_with_parent()
    importlib.import_module("tests.support.odd_policy")
    os.environ.update(replica.environment(replica.parse(["--device", "cpu", "--model", "tiny"])))
    fork_server.import_sglang()
    releases.adapt()
    for module in ("sglang_fair.overlay.hooks", "sglang_fair.engines.emulated.hooks"):
        importlib.import_module(module)
    registry = importlib.import_module("sglang.srt.models.registry").ModelRegistry
    registry.register("sglang_fair.engines.emulated.networks")
    fork_server.serve(name, become)


def become(argv: Sequence[str]) -> int:
    """In the process that was forked: runs the module."""
    module, *arguments = argv
    if module == "run":
        return _run(arguments)
    if module == "sglang_fair.engines.fork_server":
        fork_server.main(arguments)
    importlib.import_module(module)  # with what it changes
    options = replica.parse(arguments)
    os.environ.update(replica.environment(replica.settled(options)))
    fork_server.load_hooks(options.engine)
    return replica.main(arguments)


def _run(arguments: Sequence[str]) -> int:
    with open(os.environ[ERRORS], "wb") as errors:
        os.dup2(errors.fileno(), 2)
    kind, program, *sys.argv[1:] = arguments
    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(program, {"__name__": "__main__"})
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        raise
    return 0


if __name__ == "__main__":
    main(sys.argv[1])
