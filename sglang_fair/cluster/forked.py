"""A replica that `sglang_fair.engines.fork_server` forks for us, with the few methods of an asyncio subprocess."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence

RETRY_S = 0.2
FORK_SERVER_WAIT_S = 120.0
"""Longest wait for the fork server. One that has died must import SGLang again before it answers."""

LONGEST_MESSAGE = 1 << 16


class Forked:
    """A process that the fork server started and waits for. It counts as killed when the fork server dies."""

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
