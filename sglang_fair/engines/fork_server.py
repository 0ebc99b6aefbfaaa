"""A process that imports SGLang once and forks each replica: 0.2 GB of memory for one in place of 1.5, in seconds.

    python -m sglang_fair.engines.fork_server NAME REPLICA-OPTIONS      listens on the abstract Unix socket NAME

Every replica has its own connection (SOCK_SEQPACKET, one JSON object in each message):

    to us     {"argv": [...], "env": {...}}, with the file descriptor for the replica's output
    from us   {"pid": 123}, and when it has ended {"code": 0}, negative for a signal as in `subprocess`

On a CPU only, with a model or an emulated GPU: what has begun to use a GPU cannot be forked. A replica leads its own
session, which is killed when its connection closes, because then whoever asked for it is gone. All replicas die with
this process, and this process with its parent. Only processes of the same user are served. The options on the command
line are those that all replicas share; they decide what is imported. Linux only.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from sglang_fair.cluster.child import SWEEP_S, session_members
from sglang_fair.cluster.plan import PROGRAMS
from sglang_fair.common.processes import PARENT, die_with_parent
from sglang_fair.engines import cpu, replica

MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    "transformers.models.auto.tokenization_auto",
)
"""What a replica's processes import. Whatever is missing here, each replica imports for itself."""

LONGEST_MESSAGE = 1 << 16
_OURS = frozenset({signal.SIGCHLD, signal.SIGINT, signal.SIGTERM})
"""Signals that this process handles; replicas have the default handlers."""

_CREDENTIALS = struct.Struct("3i")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Serves until SIGTERM."""
    name, *shared = sys.argv[1:] if arguments is None else arguments
    die_with_parent()
    options = replica.parse(shared)
    os.environ.update(replica.environment(options))
    import_sglang()
    load_hooks(options.engine)
    serve(name, replica.main)


def import_sglang() -> None:
    """Imports what replicas share. The environment must be a replica's already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels that a CPU lacks
        for module in MODULES:
            importlib.import_module(module)


def load_hooks(engine: str) -> None:
    """Has SGLang call its plugins in this process, and fork its subprocesses."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if engine != "emulated":  # which registers this itself
        HookRegistry.register(cpu.START_METHOD_SET, cpu.fork_subprocesses, HookType.AFTER)
    load_plugins()


def serve(name: str, run: Callable[[Sequence[str]], int]) -> NoReturn:
    """Listens on the abstract socket `name` and calls `run` with its arguments in each process that is forked."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        print(
            f"sglang-fair fork server: {threads} threads run, which a fork loses", file=sys.stderr, flush=True
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        # A collection would write to every object that the replicas share with us.
        gc.collect()
        gc.freeze()
        print(PROGRAMS["fork-server"].ready, flush=True)
        ForkServer(listener, run).run()
    sys.stdout.flush()
    os._exit(0)  # a normal end prints a warning for every object that an extension leaks


class ForkServer:
    """The forked replicas and their connections. No thread is started here."""

    def __init__(self, listener: socket.socket, main: Callable[[Sequence[str]], int]) -> None:
        """Whoever connects to `listener` may ask for one replica: a process that calls `main` with its arguments."""
        self._listener = listener
        self._main = main
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._replicas: dict[socket.socket, int] = {}
        """The process id of each connection's replica, 0 before it is forked and after it has ended."""

    def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then kills the replicas that are left."""
        woken, wakes = socket.socketpair()
        woken.setblocking(False)
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(woken, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self._selector.select():
                    connection: Any = key.fileobj
                    if connection is woken:
                        with contextlib.suppress(BlockingIOError):
                            woken.recv(4096)
                        self._reap()
                    elif connection is self._listener:
                        self._accept()
                    elif connection in self._replicas:
                        self._receive(connection)
        except SystemExit:
            for connection in list(self._replicas):
                self._drop(connection)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user != os.getuid():
            connection.close()
            return
        self._replicas[connection] = 0
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> None:
        """Handles a message: the request for a replica, or the end of the process that had asked for one."""
        try:
            message, descriptors, _, _ = socket.recv_fds(connection, LONGEST_MESSAGE, 1)
        except OSError:
            message, descriptors = b"", []
        if not message or self._replicas[connection]:
            self._drop(connection)
        else:
            replica_spec = json.loads(message)
            sys.stdout.flush()
            sys.stderr.flush()
            # A signal that reaches the replica before it has its own handlers must wait until it has them. Our
            # handlers would end its siblings, and Python forgets a signal that arrives during the fork itself.
            signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
            try:
                pid = os.fork()
                if pid == 0:
                    self._become(replica_spec["argv"], replica_spec["env"], descriptors[0])
                self._replicas[connection] = pid
                _send(connection, {"pid": pid})
            except OSError as error:
                print(f"sglang-fair fork server: cannot fork: {error}", file=sys.stderr, flush=True)
                self._drop(connection)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
        for descriptor in descriptors:
            os.close(descriptor)

    def _reap(self) -> None:
        """Reports the replicas that have ended, and reaps them."""
        by_pid = {pid: connection for connection, pid in self._replicas.items() if pid}
        for pid, connection in by_pid.items():
            # Reaped last: until then no other process can get its id, by which we kill its session.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                _kill_session(pid)
                _, status = os.waitpid(pid, 0)
                self._replicas[connection] = 0
                _send(connection, {"code": os.waitstatus_to_exitcode(status)})
                self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        pid = self._replicas.pop(connection)
        self._selector.unregister(connection)
        connection.close()
        if pid:
            os.kill(pid, signal.SIGKILL)  # by its own id too: a new replica may not lead a session yet
            _kill_session(pid)
            os.waitpid(pid, 0)

    def _become(self, argv: list[str], env: dict[str, str], output: int) -> NoReturn:
        """Turns the forked process into a replica that keeps nothing of ours but the imported modules."""
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
            self._selector.close()
            for held in (self._listener, *self._replicas):
                held.close()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            # What is the same stays where it is: the first variable's place tells setproctitle where titles go.
            os.environ.update({name: value for name, value in env.items() if os.environ.get(name) != value})
            os.environ[PARENT] = str(self._pid)
            random.seed()  # or all replicas would draw the same ports
            _name_process("sglang-fair replica " + " ".join(argv[:2]))
            code = self._main(argv)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _name_process(title: str) -> None:
    """Sets the name that `ps` shows, if the package that SGLang uses for it is installed."""
    with contextlib.suppress(ImportError):
        importlib.import_module("setproctitle").setproctitle(title)


def _kill_session(session: int) -> None:
    """Kills all processes of a session, also those that they start meanwhile."""
    deadline_s = time.monotonic() + SWEEP_S
    while (members := list(session_members(session))) and time.monotonic() < deadline_s:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _send(connection: socket.socket, message: dict[str, int]) -> None:
    with contextlib.suppress(OSError):
        connection.send(json.dumps(message).encode())


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit


if __name__ == "__main__":
    main()
