"""One process of a plan. It runs in a session of its own, so that it can be killed with everything it started."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import psutil

from sglang_fair.cluster.plan import Process
from sglang_fair.common.processes import child_environment

TAIL_LINES = 100
"""As many as the stack of a thread of a scheduler that hung has, and some more."""
LONGEST_LINE = 2_000
"""Characters of a line that are shown. SGLang prints its whole configuration in one line."""

MAX_PENDING_BYTES = 1 << 20
SWEEP_S = 2.0
LAST_LINES_S = 0.5

RETRY_S = 0.2
FORK_SERVER_WAIT_S = 120.0
"""Longest wait for the fork server. One that has died must import SGLang again before it answers."""

LONGEST_MESSAGE = 1 << 16


class Forked:
    """A replica that `sglang_fair.engines.fork_server` forked for us and waits for, with the few methods of an asyncio
    subprocess. It counts as killed when the fork server dies."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        """`connection` is closed when the process has ended; closing it before kills the process."""
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    async def wait(self) -> int:
        """Its exit code, negative for a signal."""
        reply = await _next(self._connection)
        self._connection.close()
        self.returncode = reply.get("code", -signal.SIGKILL)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError when there is no such process any more."""
        os.kill(self.pid, number)


class Child:
    """A running process. Made by `Child.start`; `pid` is also the id of its session and process group."""

    def __init__(
        self,
        spec: Process,
        process: asyncio.subprocess.Process | Forked,
        output: int,
        on_line: Callable[[str, str], None],
    ) -> None:
        """`output` is the read end of the pipe that stdout and stderr go to; it is closed here."""
        self.spec = spec
        self.pid = process.pid
        self.started_s = time.monotonic()
        self.ready_s: float | None = None
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = process
        self._on_line = on_line
        self._wanted: dict[asyncio.Event, str] = {}
        self._swept = False
        """Whether nothing of its session is left. From then on its id may belong to another session."""
        self._reader = asyncio.create_task(self._read(output))
        self._exit = asyncio.create_task(process.wait())

    @classmethod
    async def start(
        cls, spec: Process, on_line: Callable[[str, str], None], inherited: Sequence[int] = ()
    ) -> "Child":
        """Starts `spec`. Each line that it prints goes to `on_line(name, line)`. Raises OSError if it cannot start.

        `inherited` are open files that it gets too; a forked one gets none.
        """
        ours, its = os.pipe()
        process: asyncio.subprocess.Process | Forked
        try:
            if spec.fork_server is not None:
                process = await fork(spec.fork_server, spec.argv, spec.env, its)
            else:
                process = await asyncio.create_subprocess_exec(
                    *spec.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=its,
                    stderr=its,
                    env={**child_environment(), **spec.env},
                    start_new_session=True,
                    pass_fds=inherited,
                )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(its)
        return cls(spec, process, ours, on_line)

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    @property
    def served_s(self) -> float:
        return 0.0 if self.ready_s is None else time.monotonic() - self.ready_s

    async def exited(self) -> str:
        """Waits for the main process to end, kills what it left behind and reads its last lines. Says how it ended."""
        await asyncio.shield(self._exit)
        await self._sweep()
        await asyncio.wait([self._reader], timeout=LAST_LINES_S)
        return how_it_ended(self._exit.result())

    async def saw(self, text: str) -> None:
        """Waits for a line that contains `text`, unless one of its last lines already did."""
        seen = asyncio.Event()
        if any(text in line for line in self.tail):
            return
        self._wanted[seen] = text
        try:
            await seen.wait()
        finally:
            del self._wanted[seen]

    async def stop(self, hurry: asyncio.Event) -> bool:
        """Stops it and everything in its session. False if it had to be killed.

        Only the main process gets SIGTERM, because SGLang's other processes must go on while it finishes what is in
        flight. After `stop_grace_s`, or as soon as `hurry` is set, all are killed.
        """
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            hurried = asyncio.create_task(hurry.wait())
            await asyncio.wait(
                [self._exit, hurried], timeout=self.spec.stop_grace_s, return_when=asyncio.FIRST_COMPLETED
            )
            hurried.cancel()
        in_time = not self.running
        if not in_time:
            await kill_session(self.pid)
            await asyncio.shield(self._exit)
        await self._sweep()
        await asyncio.wait([self._reader], timeout=LAST_LINES_S)
        self._reader.cancel()
        await asyncio.wait([self._reader])
        return in_time

    async def _sweep(self) -> None:
        if not self._swept:
            self._swept = await kill_session(self.pid)

    async def _read(self, output: int) -> None:
        loop = asyncio.get_running_loop()
        stream = asyncio.StreamReader()
        with os.fdopen(output, "rb", buffering=0) as pipe:
            transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
            try:
                pending = b""
                while block := await stream.read(1 << 16):
                    *lines, pending = (pending + block).split(b"\n")
                    for line in lines:
                        self._take(line)
                    if len(pending) > MAX_PENDING_BYTES:
                        self._take(pending)
                        pending = b""
                if pending:
                    self._take(pending)
            finally:
                transport.close()

    def _take(self, raw: bytes) -> None:
        # A progress bar overwrites itself; its last state counts.
        line = raw.decode(errors="replace").rstrip("\r").rpartition("\r")[2].rstrip()
        if not line:
            return
        for seen, text in self._wanted.items():
            if text in line:
                seen.set()
        if len(line) > LONGEST_LINE:
            line = f"{line[:LONGEST_LINE]} … ({len(line) - LONGEST_LINE} more characters)"
        self.tail.append(line)
        self._on_line(self.spec.name, line)


def session_members(session: int) -> Iterator[int]:
    """Ids of the living processes of a session; zombies are left to their parents."""
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                yield pid
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue


async def kill_session(session: int) -> bool:
    """Kills every process of a session, for at most `SWEEP_S`. True if none is left."""
    deadline_s = time.monotonic() + SWEEP_S
    while members := list(session_members(session)):
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(0.02)
    return True


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


async def fork(fork_server: str, argv: Sequence[str], env: Mapping[str, str], output: int) -> Forked:
    """A replica that the fork server on the abstract socket `fork_server` starts with these arguments.

    `env` is added to the fork server's environment; the replica prints to `output`. Raises OSError when there is none.
    """
    connection = await _connect(fork_server)
    try:
        message = json.dumps({"argv": list(argv), "env": dict(env)}).encode()
        socket.send_fds(connection, [message], [output])
        async with asyncio.timeout(FORK_SERVER_WAIT_S):
            reply = await _next(connection)
        if "pid" not in reply:
            raise OSError(f"the fork server {fork_server} forked nothing")
        return Forked(connection, reply["pid"])
    except TimeoutError:
        connection.close()
        raise OSError(f"the fork server {fork_server} does not answer") from None
    except BaseException:
        connection.close()
        raise


async def _connect(fork_server: str) -> socket.socket:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + FORK_SERVER_WAIT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, f"\0{fork_server}")
            return connection
        except BaseException as error:
            connection.close()
            if not isinstance(error, ConnectionRefusedError) or loop.time() > deadline_s:
                raise
        await asyncio.sleep(RETRY_S)


async def _next(connection: socket.socket) -> dict[str, int]:
    """The next message; empty when the fork server is gone."""
    with contextlib.suppress(OSError):
        message = await asyncio.get_running_loop().sock_recv(connection, LONGEST_MESSAGE)
        if message:
            reply: dict[str, int] = json.loads(message)
            return reply
    return {}
