"""A process that imports SGLang once and forks each replica: 0.2 GB of memory for one in place of 1.5, in seconds.

    python -m sglang_fair.engines.fork_server NAME REPLICA-OPTIONS      listens on the abstract Unix socket NAME

Every replica has its own connection (SOCK_SEQPACKET, one JSON object in each message):

    to us     {"argv": [...], "env": {...}}, with the file descriptor for the replica's output
    from us   {"pid": 123}, and when it has ended {"code": 0}, negative for a signal as in `subprocess`

On a CPU only, with a model or an emulated GPU: what has begun to use a GPU cannot be forked. A replica leads its own
session. Its parent is its keeper, a process that holds the connection, and kills that session when it closes, because
then whoever asked for the replica is gone, and when we die; and we die with our parent. One keeper is always there and
waits for the next connection. Only processes of the same user are served. The options on the command line are those
that all replicas share; they decide what is imported. Linux only.
"""

import asyncio
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from sglang_fair.cluster.child import kill_session
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
RETRY_S = 1.0
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
        serve_with(listener, run)


def serve_with(listener: socket.socket, run: Callable[[Sequence[str]], int]) -> NoReturn:
    """Has a keeper wait for each next connection; a replica is a process that calls `run`. No thread is started."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps keepers
    while True:
        os.environ[PARENT] = str(os.getpid())
        waits, has_come = os.pipe()
        try:
            if os.fork() == 0:
                os.close(waits)
                _keep(listener, has_come, run)
        except OSError as error:
            print(f"sglang-fair fork server: cannot fork: {error}", file=sys.stderr, flush=True)
            time.sleep(RETRY_S)
        os.close(has_come)
        os.read(waits, 1)
        os.close(waits)


def _keep(listener: socket.socket, has_come: int, run: Callable[[Sequence[str]], int]) -> NoReturn:
    """Takes a connection, starts the replica that is asked for, and ends it when the connection closes or the fork
    server dies. `has_come` is closed when it has the connection."""
    pid = 0
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, _end)
        die_with_parent()
        connection, _ = listener.accept()
        os.close(has_come)
        listener.close()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        message, descriptors, _, _ = socket.recv_fds(connection, LONGEST_MESSAGE, 1)
        if user == os.getuid() and message:
            wanted = json.loads(message)
            wanted["env"][PARENT] = str(os.getpid())
            # A signal that reaches the replica before it has its own handler must wait until it has. Ours would end
            # it as if it had ended by itself, and Python forgets a signal that arrives during the fork.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            pid = os.fork()
            if pid == 0:
                connection.close()
                _become(run, wanted["argv"], wanted["env"], descriptors[0])
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            os.close(descriptors[0])
            _send(connection, {"pid": pid})
            select.select([connection.fileno(), os.pidfd_open(pid)], [], [])
    except SystemExit:
        pass
    except Exception:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if pid:
            os.kill(pid, signal.SIGKILL)  # by its own id too: a new replica may not lead a session yet
            asyncio.run(kill_session(pid))
            # Reaped last: until then no other process can get its id, by which we kill its session.
            _, status = os.waitpid(pid, 0)
            _send(connection, {"code": os.waitstatus_to_exitcode(status)})
        os._exit(0)


def _become(
    run: Callable[[Sequence[str]], int], argv: list[str], env: dict[str, str], output: int
) -> NoReturn:
    """Turns the forked process into a replica that keeps nothing of ours but the imported modules."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        # What is the same stays where it is: the first variable's place tells setproctitle where titles go.
        os.environ.update({name: value for name, value in env.items() if os.environ.get(name) != value})
        _name_process("sglang-fair replica " + " ".join(argv[:2]))
        code = run(argv)
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


def _send(connection: socket.socket, message: dict[str, int]) -> None:
    with contextlib.suppress(OSError):
        connection.send(json.dumps(message).encode())


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit


if __name__ == "__main__":
    main()
