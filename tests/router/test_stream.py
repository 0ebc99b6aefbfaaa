"""The router's wire on one machine: what holds of ZMQ's sockets holds of a Unix socket."""

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from router.client import RouterClient
from router.core import Router
from router.events import Arrive, Place, Query, Snapshot, WorkerUp
from router.placement import build
from router.shell import TURN_MS, Shell
from router.stream import MAX_MESSAGE_BYTES, RECONNECT_S, Frames
from router.wire import pack_tokens

TIMEOUT_S = 30.0


@pytest.fixture(params=["file", "name"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/router" if request.param == "file" else f"ipc://@{tmp_path}"


def connect(stranger: socket.socket, address: str) -> None:
    stranger.connect(address.removeprefix("ipc://").replace("@", "\0"))
    stranger.settimeout(TIMEOUT_S)


@contextmanager
def router(address: str) -> Iterator[Shell]:
    shell = Shell(Router(build("round_robin"), name="round_robin"), address)
    shell.tell(WorkerUp("r0", "http://127.0.0.1:1"))
    thread = threading.Thread(target=shell.run)
    thread.start()
    try:
        yield shell
    finally:
        shell.stop()
        thread.join()
        shell.close()


async def until_alive(client: RouterClient) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not client.alive:
            await asyncio.sleep(0.01)


async def place(client: RouterClient, name: str, tokens: int = 4) -> Place:
    return await client.ask(Arrive(name, "c", pack_tokens(range(tokens))), (Place,), TIMEOUT_S)


async def state(client: RouterClient) -> dict:
    return (await client.ask(Query(""), (Snapshot,), TIMEOUT_S)).state


def test_questions_are_answered_also_long_ones_and_many_at_once(address: str) -> None:
    async def ask() -> None:
        async with RouterClient(address) as client:
            await until_alive(client)
            await place(client, "long", 2_000_000)
            placed = await asyncio.gather(*(place(client, f"r{number}") for number in range(500)))
            assert [one.id for one in placed] == [f"r{number}" for number in range(500)]
            assert (await state(client))["in_flight"] == 501

    with router(address):
        asyncio.run(ask())


def test_a_client_that_connects_anew_is_the_same_one(address: str) -> None:
    async def ask() -> None:
        async with RouterClient(address) as client:
            await until_alive(client)
            await place(client, "before")
            assert client._stream is not None
            assert client._stream._frames is not None
            client._stream._frames._transport.abort()
            await asyncio.sleep(4 * RECONNECT_S)
            await place(client, "after")
            found = await state(client)
            assert (found["wire"]["peers"], found["in_flight"]) == (1, 2)

    with router(address):
        asyncio.run(ask())


def test_a_router_that_comes_again_is_found_and_one_that_is_gone_is_noticed(address: str) -> None:
    async def ask() -> None:
        async with RouterClient(address) as client:
            with router(address):
                await until_alive(client)
                await place(client, "one")
            async with asyncio.timeout(TIMEOUT_S):
                while client.alive:
                    await asyncio.sleep(0.01)
            assert not Path(address.removeprefix("ipc://")).exists()
            with router(address):
                await until_alive(client)
                await place(client, "two")
                assert client.lives == 2

    asyncio.run(ask())


def test_after_a_pause_of_the_router_what_peers_said_meanwhile_comes_first(address: str) -> None:
    paused, goes_on, seen = threading.Event(), threading.Event(), []

    def pause() -> None:
        paused.set()
        goes_on.wait(TIMEOUT_S)

    async def ask(shell: Shell) -> None:
        async with RouterClient(address) as client:
            await until_alive(client)
            shell.loop.call_soon_threadsafe(pause)
            await asyncio.to_thread(paused.wait)
            seen.clear()
            placing = asyncio.create_task(place(client, "one"))
            await asyncio.sleep(2 * TURN_MS / 1e3)
            goes_on.set()
            await placing

    with router(address) as shell:
        handle = shell._router.handle
        shell._router.handle = lambda event, *more: seen.append(type(event)) or handle(event, *more)
        asyncio.run(ask(shell))
    assert seen[0] is Arrive


def test_without_heartbeats_what_is_told_waits_for_a_router_in_order(address: str) -> None:
    async def ask() -> None:
        async with RouterClient(address, beats=False) as client:
            for number in range(3):
                client.tell(WorkerUp(f"late{number}", f"http://127.0.0.1:{number + 2}"))
            asked = asyncio.create_task(state(client))
            await asyncio.sleep(2 * RECONNECT_S)
            with router(address):
                assert list((await asked)["workers"]) == ["late0", "late1", "late2", "r0"]

    asyncio.run(ask())


@pytest.mark.parametrize("sent", [struct.pack("<I", MAX_MESSAGE_BYTES + 1), b"\xff\0\0\0\0\0\0\0\1\x7f"])
def test_who_sends_no_messages_is_cut_off_and_nobody_else(address: str, sent: bytes) -> None:
    async def ask() -> None:
        async with RouterClient(address) as client:
            await until_alive(client)
            await place(client, "one")

    with router(address), socket.socket(socket.AF_UNIX) as stranger:
        connect(stranger, address)
        stranger.sendall(sent if sent[0] == 1 else sent[-1:] * 4 + sent)
        assert stranger.recv(1) == b""
        asyncio.run(ask())


class Written:
    """A transport that notes what is written."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False


def test_what_is_sent_in_one_turn_or_in_answer_to_one_read_is_one_write() -> None:
    async def send() -> None:
        frames, written = Frames(lambda one, message: one.send(message), lambda _: None), Written()
        frames.connection_made(cast(asyncio.BaseTransport, written))
        for message in (b"", b"ab", b"c" * 70_000):
            assert frames.send(message)
        assert written.pieces == []
        await asyncio.sleep(0)
        [piece] = written.pieces
        frames.data_received(piece)  # it comes back
        assert written.pieces == [piece, piece]
        for at in range(0, len(piece), 30_000):
            frames.data_received(piece[at : at + 30_000])
        assert b"".join(written.pieces[2:]) == piece

    asyncio.run(send())


def test_what_is_sent_to_a_peer_that_does_not_read_is_dropped(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.stream.MOST_UNREAD_BYTES", 1 << 16)
    with router(address) as shell, socket.socket(socket.AF_UNIX) as deaf:
        connect(deaf, address)
        deaf.sendall(b"".join(struct.pack("<I", len(one)) + one for one in (b"name", b"")))
        assert deaf.recv(5) == struct.pack("<I", 1) + b"\0"

        async def flood() -> list[bool]:
            return [shell._send(b"name", bytes(1 << 16)) for _ in range(64)]

        sent = asyncio.run_coroutine_threadsafe(flood(), shell.loop).result(TIMEOUT_S)
        assert sent[0]
        assert not sent[-1]
        assert shell._counts["undeliverable"] == sent.count(False)


def test_the_file_of_a_router_that_was_killed_is_replaced_and_no_other_one(tmp_path: Path) -> None:
    path = tmp_path / "router"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with router(f"ipc://{path}"):
        assert path.is_socket()
    path.write_text("precious")
    with pytest.raises(OSError, match="in use"):
        Shell(Router(build("round_robin"), name="round_robin"), f"ipc://{path}")
    assert path.read_text() == "precious"


def test_what_cannot_be_bound_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No such file|too long"):
        Shell(Router(build("round_robin"), name="round_robin"), f"ipc://{tmp_path}/none/router")
