"""The router's wire between processes of one machine: messages over a Unix socket, which the loop itself reads.

A socket of ZMQ has a thread of its own, so that a question and its answer wake six threads one after the other. That
is on the way of each request, and takes a third of the router's CPU time. This is for `ipc://PATH` without keys: who
may open the file may ask; and `ipc://@NAME` is no file, for any process of the machine. What holds of ZMQ's sockets
holds here: a client has a name by which the router knows it again when it has connected anew, it connects again and
again, and what is sent to a peer that does not read is dropped.

A message is its length, in four bytes, and its bytes. The first one of a connection is the client's name.
"""

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable
from functools import partial
from typing import cast

SCHEME = "ipc://"

MAX_MESSAGE_BYTES = 64 << 20
MOST_UNREAD_BYTES = 4 * MAX_MESSAGE_BYTES
"""Of one peer. What follows is dropped."""
RECONNECT_S = 0.05
BACKLOG = 1024

_LENGTH = struct.Struct("<I")


class Frames(asyncio.Protocol):
    """One end of a connection. What is sent in one turn of the loop, or in answer to what came with one read, leaves as
    one write: each wakes the other end."""

    def __init__(self, take: Callable[["Frames", bytes], None], ended: Callable[["Frames"], None]) -> None:
        """`take` is called with each message."""
        self._transport: asyncio.Transport
        self._take = take
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._held = bytearray()
        """The beginning of a message."""
        self._leaving: list[bytes] = []
        self._leaving_bytes = 0
        self._is_reading = False

    def send(self, message: bytes) -> bool:
        """False if the other end is gone, or does not read."""
        transport = self._transport
        unread_bytes = transport.get_write_buffer_size() + self._leaving_bytes
        if transport.is_closing() or unread_bytes > MOST_UNREAD_BYTES:
            return False
        if not (self._leaving or self._is_reading):
            self._loop.call_soon(self._flush)
        self._leaving += _LENGTH.pack(len(message)), message
        self._leaving_bytes += len(message)
        return True

    def close(self) -> None:
        """What was sent before still leaves, with the loop's next turn."""
        self._flush()
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        held: bytes | bytearray = data
        if self._held:
            self._held += data
            held = self._held
        self._is_reading = True
        try:
            at = self._take_all(held)
        finally:
            self._is_reading = False
            self._flush()
        if held is self._held:
            del self._held[:at]
        elif at < len(held):
            self._held += held[at:]

    def connection_lost(self, error: Exception | None) -> None:
        self._ended(self)

    def _take_all(self, held: bytes | bytearray) -> int:
        """Takes the messages in `held`; where the last one ends that is whole."""
        at = 0
        while len(held) - at >= _LENGTH.size:
            start = at + _LENGTH.size
            end = start + _LENGTH.unpack_from(held, at)[0]
            if end - start > MAX_MESSAGE_BYTES:
                self._transport.abort()
                return len(held)
            if end > len(held):
                break
            at = end
            self._take(self, bytes(held[start:end]))
        return at

    def _flush(self) -> None:
        leaving, self._leaving, self._leaving_bytes = self._leaving, [], 0
        if leaving and not self._transport.is_closing():
            self._transport.write(b"".join(leaving))


class Stream:
    """A client's connection to the router at `address`, which is made again when it ends, until `close`."""

    def __init__(self, address: str, name: bytes, take: Callable[[bytes], None], *, keeps: bool) -> None:
        """`keeps`: what is sent while there is no connection waits for one, in order."""
        self._address = address
        self._name = name
        self._take = take
        self._keeps = keeps
        self._kept: list[bytes] = []
        self._frames: Frames | None = None
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def send(self, message: bytes) -> bool:
        """False if it is dropped."""
        if self._frames is not None and self._frames.send(message):
            return True
        if self._keeps:
            self._kept.append(message)
        return self._keeps

    def close(self) -> None:
        self._connecting.cancel()
        if self._frames is not None:
            self._frames.close()
            self._frames = None

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            ended = asyncio.Event()
            frames, wire = Frames(lambda _, message: self._take(message), partial(_set, ended)), _socket()
            try:
                wire.connect(_path(self._address))  # it waits for nobody
                await loop.create_unix_connection(lambda: frames, sock=wire)  # noqa: B023 (called at once)
            except OSError:
                wire.close()
                await asyncio.sleep(RECONNECT_S)
                continue
            kept, self._kept = self._kept, []
            for message in (self._name, *kept):
                frames.send(message)
            self._frames = frames
            await ended.wait()
            self._frames = None


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.setblocking(False)
    return made


def _path(address: str) -> str:
    name = address.removeprefix(SCHEME)
    return f"\0{name[1:]}" if name.startswith("@") else name


def _unlink(path: str) -> None:
    """Removes the socket's file, if there is one."""
    with contextlib.suppress(OSError, ValueError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)


def _set(ended: asyncio.Event, _: Frames) -> None:
    ended.set()


class Streams:
    """The router's end of all connections to `address`."""

    def __init__(self, address: str, take: Callable[[bytes, bytes], None]) -> None:
        """Takes the address; raises OSError if it cannot. `take` is called with a peer's name and its message."""
        self._path = _path(address)
        self._take = take
        self._names: dict[Frames, bytes] = {}
        self._peers: dict[bytes, Frames] = {}
        """The latest connection of each."""
        self._wire = _socket()
        _unlink(self._path)  # of a router that did not close it
        try:
            self._wire.bind(self._path)
            self._wire.listen(BACKLOG)
        except OSError:
            self._wire.close()
            raise

    async def serve(self, ended: asyncio.Future[None]) -> None:
        """Serves in the running loop until `ended`. What was sent before still leaves."""
        make, loop = partial(Frames, self._hear, self._forget), asyncio.get_running_loop()
        server = await loop.create_unix_server(make, sock=self._wire, backlog=BACKLOG)
        try:
            await asyncio.wait([ended])
        finally:
            server.close()
            for frames in list(self._names):
                frames.close()
            await asyncio.sleep(0)

    def send(self, peer: bytes, message: bytes) -> bool:
        """False if it is dropped."""
        frames = self._peers.get(peer)
        return frames is not None and frames.send(message)

    def close(self) -> None:
        self._wire.close()
        _unlink(self._path)

    def _hear(self, frames: Frames, message: bytes) -> None:
        name = self._names.get(frames)
        if name is not None:
            self._take(name, message)
            return
        self._names[frames] = message
        self._peers[message] = frames

    def _forget(self, frames: Frames) -> None:
        name = self._names.pop(frames, None)
        if name is not None and self._peers.get(name) is frames:
            del self._peers[name]
