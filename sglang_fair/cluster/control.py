"""How a running cluster is changed: a Unix socket that takes one line of JSON and answers with lines of JSON.

    {"do": "add"}  →  {"say": "r2 is started on port 30005"} …  {"name": "r2", "url": "http://127.0.0.1:30005", …}
    {"do": "drain", "name": "r0"}  →  …  {"error": "there is no replica r0"}

The last line is the result. The socket is named after the port of the cluster's gateway and lies in a folder that only
its owner can enter. A request is carried out even if its sender disconnects. A supervisor that was killed leaves its
socket behind; the next one on that port replaces it.
"""

import asyncio
import contextlib
import json
import os
import socket
import stat
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

Say = Callable[[str], None]
"""Reports progress to the sender of a request."""

Handle = Callable[[dict[str, Any], Say], Awaitable[dict[str, Any]]]
"""Carries out one request. Raises `Refused`."""

MAX_LINE_BYTES = 1 << 16


class Refused(RuntimeError):
    """What was asked cannot be done; the text is one line."""


class NoCluster(RuntimeError):
    """No cluster of ours answers there; the text is one line."""


def folder() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"sglang-fair-{os.getuid()}"


def socket_path(gateway_port: int) -> Path:
    """The socket of the cluster whose gateway listens on this port."""
    return folder() / f"{gateway_port}.sock"


class Control:
    """The supervisor's end of the socket."""

    def __init__(self, path: Path, handle: Handle) -> None:
        self._path = path
        self._handle = handle
        self._server: asyncio.Server | None = None
        self._at_work: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        own_folder(self._path.parent)
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._path, limit=MAX_LINE_BYTES)
        self._path.chmod(0o600)

    async def close(self) -> None:
        """Stops listening and cancels the requests that are being carried out."""
        if self._server is None:
            return
        self._server.close()
        for task in self._at_work:
            task.cancel()
        await asyncio.gather(*self._at_work, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one request of one peer. The work is a task of its own, so that it survives the connection."""

        def write(answer: dict[str, Any]) -> None:
            if not writer.is_closing():
                writer.write(json.dumps(answer).encode() + b"\n")

        try:
            request = json.loads(await reader.readline())
            if not isinstance(request, dict):
                raise ValueError("not an object")
            work = asyncio.create_task(self._work(request, write))
            self._at_work.add(work)
            work.add_done_callback(self._at_work.discard)
            await asyncio.wait([work])
        except ValueError as wrong:  # no JSON, or a line without end
            write({"error": f"not a request: {wrong}"})
        except OSError:  # the peer has gone
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _work(self, request: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        try:
            write(await self._handle(request, lambda text: write({"say": text})))
        except Refused as error:
            write({"error": str(error)})
        except asyncio.CancelledError:
            write({"error": "the cluster is being stopped"})
            raise
        except Exception as error:
            write({"error": f"{type(error).__name__}: {error}"})


def own_folder(path: Path) -> None:
    """Makes a folder that only this user can enter. Raises OSError if it exists and others can."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is not this user's alone")


def ask(path: Path, request: dict[str, Any], say: Say, timeout_s: float | None = None) -> dict[str, Any]:
    """The supervisor's answer to a request; its progress goes to `say`. Raises `Refused` and `NoCluster`.

    `timeout_s` bounds the silence between two lines.
    """
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(timeout_s)
        try:
            peer.connect(str(path))
            peer.sendall(json.dumps(request).encode() + b"\n")
            for answer in _answers(peer):
                if "say" in answer:
                    say(answer["say"])
                elif "error" in answer:
                    raise Refused(answer["error"])
                else:
                    return answer
        except OSError as error:
            raise NoCluster(f"no cluster answers at {path}: {error.strerror or error}") from None
    raise NoCluster("the cluster has ended")


def _answers(peer: socket.socket) -> Iterator[dict[str, Any]]:
    with peer.makefile("rb") as lines:
        for line in lines:
            yield json.loads(line)
