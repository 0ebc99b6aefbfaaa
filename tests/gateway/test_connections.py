"""The gateway's HTTP connections to replicas, against servers that send whatever bytes a test says."""

import asyncio
import contextlib
import os
import random
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from router.gateway.replicas.connections import (
    MAX_BUFFERED_BYTES,
    MAX_HEAD_BYTES,
    Broken,
    Connection,
    Connections,
    NoDescriptors,
    NotConnected,
)
from tests.support.budget import examples
from tests.support.virtual_time import run

LIMIT_S = 60.0
"""For what takes no time, on however busy a machine."""

HEADERS = {"content-type": "application/json", "x-fair-client": "c"}

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(params=[asyncio, uvloop], ids=["asyncio", "uvloop"])
def loop_factory(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    """A gateway runs on uvloop."""
    return request.param.new_event_loop


def response(body: bytes, *, chunks: int = 0, status: str = "200 OK", more: str = "") -> bytes:
    """With a length, or in so many chunks."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\n{more}"
    if not chunks:
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    size = max(1, -(-len(body) // chunks))
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    framed = b"".join(f"{len(one):x}\r\n".encode() + one + b"\r\n" for one in pieces)
    return f"{head}transfer-encoding: chunked\r\n\r\n".encode() + framed + b"0\r\n\r\n"


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head, await reader.readexactly(length)


@contextlib.asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[str]:
    tasks: set[asyncio.Task[None]] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def connected(serve: Serve) -> AsyncIterator[tuple[Connections, str]]:
    async with asyncio.timeout(LIMIT_S), serving(serve) as url:
        connections = Connections(LIMIT_S, LIMIT_S)
        try:
            yield connections, url
        finally:
            connections.close()
            await asyncio.sleep(0)


def sends(*data: bytes, closes: bool = False) -> Serve:
    """Answers each request with this, a write at a time."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            for one in data:
                writer.write(one)
                await writer.drain()
                await asyncio.sleep(0)
            if closes:
                return

    return serve


async def ask(connections: Connections, url: str, body: bytes = b"{}") -> tuple[int, dict[str, str], bytes]:
    async with connections.request("POST", url, "/generate", HEADERS, body) as answer:
        return answer.status, answer.headers, await answer.read()


@settings(max_examples=examples(25))
@given(
    st.lists(st.tuples(st.binary(max_size=300), st.integers(0, 4)), min_size=1, max_size=4),
    st.integers(0, 2**32),
)
async def test_answers_that_are_cut_anywhere_arrive_whole(
    answers: list[tuple[bytes, int]], seed: int
) -> None:
    """One after the other over one connection, however the bytes are cut."""
    rng, peers = random.Random(seed), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(writer)
        for body, chunks in answers:
            head, sent = await read_request(reader)
            assert sent == b"\x00" * len(body)
            assert b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1:" in head
            assert b"x-fair-client: c\r\n" in head
            data = response(body, chunks=chunks)
            while data:
                size = rng.randrange(1, 90)
                writer.write(data[:size])
                await writer.drain()
                data = data[size:]
        await reader.read()

    async with connected(serve) as (connections, url):
        for expected, _ in answers:
            status, headers, got = await ask(connections, url, b"\x00" * len(expected))
            assert (status, headers["content-type"], got) == (200, "text/plain", expected)
        assert len(peers) == 1


@pytest.mark.parametrize(
    ("data", "status", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", 200, b"until the end"),
        (b"HTTP/1.0 503 No\r\ncontent-length: 2\r\n\r\nno", 503, b"no"),
        (b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n", 204, b""),
        (
            b"HTTP/1.1 100 Go\r\n\r\n" + response(b"after all", more="connection: close\r\n"),
            200,
            b"after all",
        ),
        (response(b"x", more="connection: close\r\n"), 200, b"x"),
    ],
)
async def test_other_ways_to_end(data: bytes, status: int, expected: bytes) -> None:
    async with connected(sends(data, closes=True)) as (connections, url):
        for _ in range(2):
            got, _, read = await ask(connections, url)
            assert (got, read) == (status, expected)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort",
        response(b"in chunks", chunks=2)[:-5],
        b"no http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
    ],
)
async def test_a_broken_answer_is_an_error(data: bytes) -> None:
    async with connected(sends(data, closes=True)) as (connections, url):
        with pytest.raises(Broken):
            await ask(connections, url)


async def test_what_came_before_the_break_is_read() -> None:
    serve = sends(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n", b"first", closes=True)
    async with (
        connected(serve) as (connections, url),
        connections.request("POST", url, "/", HEADERS, b"") as answer,
    ):
        assert await answer.piece() == b"first"
        with pytest.raises(Broken):
            await answer.piece()


async def test_a_silent_replica_is_an_error_and_a_slow_reader_is_none() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nab")
        await reader.read()

    async with (
        connected(serve) as (connections, url),
        connections.request("POST", url, "/", HEADERS, b"") as answer,
    ):
        while not answer._pieces:
            await asyncio.sleep(0)
        answer._idle_timeout_s = 0.02
        answer._look()
        await asyncio.sleep(0.1)
        assert await answer.piece() == b"ab"
        with pytest.raises(TimeoutError, match="nothing came for"):
            await answer.piece()


class Taken:
    """A transport that takes everything."""

    def write(self, data: bytes) -> None: ...

    def abort(self) -> None: ...

    def is_closing(self) -> bool:
        return False


@pytest.mark.parametrize("patience_s", [0.0, 50.0])
def test_silence_counts_from_each_request_whatever_the_timer_was_set_to_before(patience_s: float) -> None:
    async def main() -> None:
        connection, now_s = Connection(10.0), asyncio.get_running_loop().time
        connection.connection_made(cast(asyncio.BaseTransport, Taken()))
        for wait_s in (4.0, 9.0, 9.0):
            asking = asyncio.create_task(connection.ask(b"", patience_s))
            await asyncio.sleep(wait_s)
            connection.data_received(response(b""))
            await asking
            assert await connection.read() == b""
            connection.rest()
            await asyncio.sleep(7.0)
        assert connection.is_reusable
        began_s = now_s()
        with pytest.raises(TimeoutError, match="nothing came for 10 s"):
            await connection.ask(b"")
        assert now_s() - began_s == pytest.approx(10.0)
        connection.connection_lost(None)
        await asyncio.sleep(60.0)

    run(main())


async def test_nobody_listens() -> None:
    async with connected(sends(b"")) as (connections, _):
        for wrong in ("http://127.0.0.1:1", "ftp://127.0.0.1", "http://", "http://127.0.0.1:x"):
            with pytest.raises(NotConnected):
                await ask(connections, wrong)


async def test_giving_up_ends_an_attempt_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not when the attempt ends by itself, which it does when its time is over."""

    async with connected(sends(response(b"ok"))) as (connections, url):
        begun = asyncio.Event()

        async def never(*_: object, **__: object) -> None:
            begun.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(asyncio.get_running_loop().__class__, "create_connection", never)
        connections.connect_timeout_s = 3600.0
        asking = connections.request("POST", url, "/", HEADERS, b"")
        entering = asyncio.create_task(asking.__aenter__())
        await begun.wait()
        for _ in range(2):
            asking.give_up(Broken("it is down"))
        with pytest.raises(Broken, match="it is down"):
            await entering
        connections.connect_timeout_s = 0.05
        with pytest.raises(TimeoutError, match=r"no connection within 0\.05 s"):
            await ask(connections, url)
        monkeypatch.undo()
        assert (await ask(connections, url))[2] == b"ok"


async def test_giving_up_as_the_connection_is_made_sends_nothing() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert not await reader.read()

    async with connected(serve) as (connections, url):
        asking = connections.request("POST", url, "/", HEADERS, b"")
        connect = connections.connect

        async def made(origin: object) -> Connection:
            found = await connect(origin)  # type: ignore[arg-type]
            asking.give_up(Broken("it is down"))
            return found

        connections.connect = made  # type: ignore[assignment, method-assign]
        with pytest.raises(Broken, match="it is down"):
            await asking.__aenter__()


async def test_an_answer_that_is_not_read_to_its_end_costs_its_connection() -> None:
    asked, ended = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        asked.set()
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
        assert not await reader.read()
        ended.set()

    async with connected(serve) as (connections, url):
        async with connections.request("POST", url, "/", HEADERS, b"") as answer:
            assert await answer.piece() == b"ab"
        await ended.wait()
        asked.clear()
        ended.clear()
        asking = asyncio.create_task(ask(connections, url))
        await asked.wait()
        asking.cancel()
        await ended.wait()


async def test_a_connection_that_was_closed_or_speaks_out_of_turn_is_not_used_again(
    opened: list[Connection],
) -> None:
    peers = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal peers
        peers += 1
        await read_request(reader)
        writer.write(response(b"ok"))
        while not opened[-1].is_reusable or opened[-1]._is_asked:
            await asyncio.sleep(0)
        if peers == 2:
            writer.write(response(b"unasked"))
            await reader.read()

    async with connected(serve) as (connections, url):
        for _ in range(3):
            assert (await ask(connections, url))[2] == b"ok"
            while not opened[-1]._transport.is_closing():
                await asyncio.sleep(0)
        assert peers == len(opened) == 3


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """All connections, in the order in which they were opened."""
    all_of_them: list[Connection] = []
    made = Connection.connection_made

    def remember(self: Connection, transport: asyncio.BaseTransport) -> None:
        all_of_them.append(self)
        made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", remember)
    return all_of_them


async def test_idle_connections_are_kept_and_then_closed(
    opened: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(sends(response(b"ok"))) as (connections, url):
        monkeypatch.setattr("router.gateway.replicas.connections.KEEP_S", LIMIT_S)
        assert {(await ask(connections, url))[0] for _ in range(3)} == {200}
        assert len(opened) == 1
        connections._sweep()
        assert not opened[0]._transport.is_closing()
        monkeypatch.setattr("router.gateway.replicas.connections.KEEP_S", 0.03)
        connections._sweep()
        while connections._sweeper is not None:
            await asyncio.sleep(0.01)
        assert opened[0]._transport.is_closing()
        assert not connections._idle
        assert (await ask(connections, url))[0] == 200
        assert len(opened) == 2


async def test_an_answer_that_nobody_reads_waits_at_the_replica() -> None:
    size = 64 * MAX_BUFFERED_BYTES
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(64):
            writer.write(b"x" * MAX_BUFFERED_BYTES)
            await writer.drain()
            sent += 1
        await reader.read()

    async with (
        connected(serve) as (connections, url),
        connections.request("POST", url, "/", HEADERS, b"") as answer,
    ):
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.05)
        assert sent < 64
        assert answer._buffered_bytes < 4 * MAX_BUFFERED_BYTES
        assert len(await answer.read()) == size


async def test_without_files_to_open_nobody_but_this_process_is_at_fault() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(response(b"x"))
        await writer.drain()

    async with connected(serve) as (connections, url):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(NoDescriptors):
                async with connections.request("POST", url, "/", HEADERS, b""):
                    pass
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        async with connections.request("POST", url, "/", HEADERS, b"") as answer:
            assert await answer.read() == b"x"
