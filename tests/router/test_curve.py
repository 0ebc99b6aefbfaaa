"""A router behind keys: gateways and replicas with theirs are served, others refused and counted, and nobody reads."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import zmq

from router.core import Router
from router.events import Arrive, Event, Place, WorkerUp
from router.gateway.routing.fleet import Fleet
from router.gateway.routing.links import Link, Links
from router.placement import build
from router.shell import Shell
from router.wire import encode_sequence, pack_tokens
from sglang_fair.common.curve import Gate, Keys, make
from tests.support.proxy import Capture
from tests.support.waiting import eventually, wait_until

MARK = "a prompt that nobody else may read"
TOKENS = list(range(70_001, 70_017))
PAGE = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path / "keys")
    return tmp_path / "keys"


class Running:
    """A shell in a thread, asked from inside."""

    def __init__(self, keys: Keys | None, bind: str = "tcp://127.0.0.1:*") -> None:
        core = Router(build("d2lpm"), name="d2lpm", page_size=PAGE, linger_s=0.0)
        self.shell = Shell(core, bind, keys=keys)
        self._thread = threading.Thread(target=self.shell.run)
        self._thread.start()

    def tell(self, event: Event) -> None:
        self.shell.loop.call_soon_threadsafe(self.shell.tell, event)

    def state(self) -> dict:
        async def look() -> dict:
            return self.shell.snapshot()

        return asyncio.run_coroutine_threadsafe(look(), self.shell.loop).result()

    def close(self) -> None:
        self.shell.stop()
        self._thread.join()
        self.shell.close()


@pytest.fixture(params=[True, False], ids=["keys", "open"])
def has_keys(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def running(folder: Path, has_keys: bool) -> Iterator[Running]:
    made = Running(Keys.read(folder, "router") if has_keys else None)
    yield made
    made.close()


async def place(address: str, keys: Keys | None) -> Place:
    """By a gateway of this address's router."""
    fleet = Fleet(lambda worker: True)
    link = Link(address, 20.0, fleet.side(), keys)
    link.start()
    try:
        await eventually(lambda: link.alive and fleet.workers, "the router answers")
        arrive = Arrive("x", MARK, pack_tokens(TOKENS))
        found = await Links([link], fleet, Mock()).place(arrive)
        assert isinstance(found, Place)
        return found
    finally:
        link.close()


def test_a_capture_of_the_gateways_wire(running: Running, folder: Path, has_keys: bool) -> None:
    """It holds text and token ids without keys, which shows that it would, and neither with them."""
    running.tell(WorkerUp("r0", "http://r0"))
    with Capture(running.shell.endpoint) as wire:
        found = asyncio.run(place(wire.address, Keys.read(folder, "gateway") if has_keys else None))
        assert found.worker == "r0"
        assert len(wire.bytes) > 200
        assert (MARK.encode() in wire.bytes) is not has_keys
        assert any(pack_tokens([token]) in wire.bytes for token in TOKENS) is not has_keys


@pytest.mark.parametrize("has_keys", [True], indirect=True)
def test_only_a_gateway_with_the_right_keys_is_let_in_and_others_are_counted(
    running: Running, folder: Path
) -> None:
    make(folder / "other")
    wrong, right = Keys.read(folder / "other", "gateway"), Keys.read(folder, "gateway")
    replica = Keys.read(folder, "replica")
    assert running.state()["wire"]["refused"] == 0

    async def body() -> None:
        fleet = Fleet(lambda worker: True)
        for keys in (
            None,
            wrong,
            Keys("gateway", wrong.public, wrong.secret, right.others),
            Keys("gateway", right.public, right.secret, wrong.others),
            Keys("replica", replica.public, replica.secret, right.others),
        ):
            before = running.state()["wire"]["refused"]
            link = Link(running.shell.endpoint, 20.0, fleet.side(), keys)
            link.start()
            await eventually(lambda before=before: running.state()["wire"]["refused"] > before, "refused")
            assert not link.alive
            link.close()

    asyncio.run(body())
    assert running.state()["wire"]["peers"] == 0
    running.tell(WorkerUp("r0", "http://r0"))
    assert asyncio.run(place(running.shell.endpoint, right)).worker == "r0"


@pytest.mark.parametrize("wrong", ["admits another gateway", "has another key"])
def test_a_gateway_finds_a_router_that_gets_the_right_keys(
    wrong: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(folder / "other")
    right, other = Keys.read(folder, "router"), Keys.read(folder / "other", "router")
    public, secret = (right.public, right.secret) if "admits" in wrong else (other.public, other.secret)
    first = Running(Keys("router", public, secret, other.others))
    endpoint = first.shell.endpoint

    async def body() -> None:
        fleet = Fleet(lambda worker: True)
        link = Link(endpoint, 20.0, fleet.side(), Keys.read(folder, "gateway"))
        link.start()
        await eventually(lambda: "do not have each other's keys" in caplog.text, "it says so")
        await asyncio.to_thread(first.close)
        second = Running(right, endpoint)
        try:
            await eventually(lambda: link.alive, "the router answers")
        finally:
            link.close()
            await asyncio.to_thread(second.close)

    asyncio.run(body())
    assert caplog.text.count("do not have each other's keys") == 1


class Publisher:
    """A replica's stream of KV events, its replay and its load."""

    def __init__(self, keys: Keys | None) -> None:
        self._context = zmq.Context()
        self._gate = None if keys is None else Gate(self._context, keys)
        self.sockets = [self._context.socket(kind) for kind in (zmq.XPUB, zmq.ROUTER, zmq.XPUB)]
        for socket in self.sockets:
            socket.linger = 0
            if keys is not None and self._gate is not None:
                keys.serve(socket)
                self._gate.watch(socket)
            socket.bind("tcp://127.0.0.1:*")
        self.addresses = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in self.sockets]

    @property
    def refused(self) -> int:
        return 0 if self._gate is None else self._gate.refused

    def turn(self) -> bool:
        """Sends to everybody who asks; whether somebody did."""
        live, replay, load = self.sockets
        poller = zmq.Poller()
        for socket in (*self.sockets, *(() if self._gate is None else self._gate.sockets)):
            poller.register(socket, zmq.POLLIN)
        for source, _ in poller.poll(20):
            if source is replay:
                peer, *_ = replay.recv_multipart()
                replay.send_multipart([peer, b"", b"kv", encode_sequence(0), self._batch()])
                replay.send_multipart([peer, b"", b"", encode_sequence(-1), b""])
            elif source is live:
                live.recv()
                live.send_multipart([b"kv", encode_sequence(1), self._batch(1)])
            elif source is load:
                load.recv()
                load.send_multipart([b"", b"", msgspec.msgpack.encode(["LoadStat", 1, 2, 30, 1000, 0, 4])])
            elif self._gate is not None:
                self._gate.serve(source)
        return True

    def _batch(self, number: int = 0) -> bytes:
        tokens = TOKENS[number * PAGE : (number + 1) * PAGE]
        stored = {
            "type": "BlockStored",
            "block_hashes": [number + 1],
            "parent_block_hash": number or None,
            "token_ids": tokens,
            "block_size": PAGE,
            "lora_name": MARK,
        }
        return msgspec.msgpack.encode([float(number + 1), [stored], 0])

    def close(self) -> None:
        for socket in self.sockets:
            socket.close(0)
        if self._gate is not None:
            self._gate.close()
        self._context.term()


def test_a_capture_of_a_replicas_wires(running: Running, folder: Path, has_keys: bool) -> None:
    publisher = Publisher(Keys.read(folder, "replica") if has_keys else None)
    live, replay, load = publisher.addresses
    with Capture(live) as kv, Capture(replay) as again, Capture(load) as much:
        running.tell(WorkerUp("r0", "http://r0", kv.address, again.address, load=much.address))

        def followed() -> bool:
            publisher.turn()
            counts = running.state()["wire"]["kv"].get("r0", {})
            return counts.get("applied_batches") == 2

        wait_until(followed, "the router has both batches")
        assert publisher.refused == 0
        assert much.bytes, "load has its own wire"
        for wire in (kv, again):
            seen = (
                msgspec.msgpack.encode(TOKENS[0]) in wire.bytes
                or msgspec.msgpack.encode(TOKENS[PAGE]) in wire.bytes
            )
            assert seen is not has_keys
            assert (MARK.encode() in wire.bytes) is not has_keys
    publisher.close()
