"""A replica that `sglang_fair.engines.fork_server` forks for us, with the few methods of an asyncio subprocess."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence

RETRY_S = 0.2
ZYGOTE_WAIT_S = 120.0
"""Longest wait for a zygote; one that died has SGLang to import again before it answers."""

LONGEST_MESSAGE = 1 << 16


class Forked:
    """A process that the zygote started and waits for. When the zygote dies, it counts as killed."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        """`connection` is closed when the process has ended; closing it before kills the process."""
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    async def wait(self) -> int:
        """Its exit code, negative for a signal."""
        told = await _next(self._connection)
        self._connection.close()
        self.returncode = told.get("code", -signal.SIGKILL)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError when there is no such process any more."""
        os.kill(self.pid, number)


async def fork(zygote: str, argv: Sequence[str], env: Mapping[str, str], output: int) -> Forked:
    """Has the zygote that listens on the abstract socket `zygote` start a replica with these arguments, and
    variables on top of its own; what it prints goes to `output`. OSError when the zygote does not."""
    connection = await _connect(zygote)
    try:
        message = json.dumps({"argv": list(argv), "env": dict(env)}).encode()
        socket.send_fds(connection, [message], [output])
        async with asyncio.timeout(ZYGOTE_WAIT_S):
            told = await _next(connection)
        if "pid" not in told:
            raise OSError(f"the zygote {zygote} forked none")
        return Forked(connection, told["pid"])
    except TimeoutError:
        connection.close()
        raise OSError(f"the zygote {zygote} does not answer") from None
    except BaseException:
        connection.close()
        raise


async def _connect(zygote: str) -> socket.socket:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + ZYGOTE_WAIT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, f"\0{zygote}")
            return connection
        except BaseException as error:
            connection.close()
            if not isinstance(error, ConnectionRefusedError) or loop.time() > deadline_s:
                raise
        await asyncio.sleep(RETRY_S)


async def _next(connection: socket.socket) -> dict[str, int]:
    """The next message; empty when the zygote is gone."""
    with contextlib.suppress(OSError):
        message = await asyncio.get_running_loop().sock_recv(connection, LONGEST_MESSAGE)
        if message:
            told: dict[str, int] = json.loads(message)
            return told
    return {}
