"""A replica's publisher of KV events behind keys: SGLang makes it, a router follows it, others are refused. A whole
cluster with keys: `tests/whole/test_exposed.py`."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from router.wire import decode_numbered
from sglang_fair.common.curve import KEYS_VARIABLE, PUBLISHER, Keys, make
from tests.support.ports import free_port
from tests.support.proxy import Capture
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

TOKENS = [70_001, 70_002, 70_003, 70_004]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make(tmp_path / "keys")
    monkeypatch.setenv(KEYS_VARIABLE, str(tmp_path / "keys"))
    return tmp_path / "keys"


class Clients:
    """Sockets of would-be routers."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._made: list[zmq.Socket] = []

    def connect(self, kind: int, address: str, keys: Keys | None) -> zmq.Socket:
        made = self._context.socket(kind)
        self._made.append(made)
        made.linger = 0
        if kind == zmq.SUB:
            made.subscribe(b"")
        if keys is not None:
            keys.connect(made, "replica")
        made.connect(address)
        return made

    def close(self) -> None:
        for one in self._made:
            one.close(0)
        self._context.term()


@pytest.fixture
def clients() -> Iterator[Clients]:
    made = Clients()
    yield made
    made.close()


def test_events_and_load_go_to_routers_alone(sglang: None, folder: Path, clients: Clients) -> None:
    from sglang.srt.disaggregation import kv_events

    from sglang_fair.overlay import wire

    wire.register()
    wire.register()
    port = free_port(3)
    live, replay, load = (f"tcp://127.0.0.1:{port + at}" for at in range(3))
    config = {
        "publisher": PUBLISHER,
        "topic": "kv",
        "bind": True,
        "endpoint": live,
        "replay_endpoint": replay,
    }
    publisher = kv_events.EventPublisherFactory.create(msgspec.json.encode(config).decode())
    loads = wire.open_load_socket(None, load)
    assert wire.refused() == 0
    right = Keys.read(folder, "router")
    make(folder / "other")
    wrong = Keys.read(folder / "other", "router")

    def publish() -> None:
        stored = kv_events.BlockStored([1], None, TOKENS, 4, None)
        publisher.publish(kv_events.KVEventBatch(1.0, [stored]))
        loads.send(b"load")

    with Capture(live) as first, Capture(replay) as second:
        feed, asking = (
            clients.connect(zmq.SUB, first.address, right),
            clients.connect(zmq.DEALER, second.address, right),
        )
        much = clients.connect(zmq.SUB, load, right)

        def heard() -> bool:
            publish()
            return bool(feed.poll(20) and much.poll(20))

        wait_until(heard, "the router hears events and load")
        assert feed.recv_multipart()[0] == b"kv"
        asking.send_multipart([b"", (0).to_bytes(8, "big")])
        assert asking.poll(30_000)
        assert decode_numbered(asking.recv_multipart()[1:])[0] == 0
        for capture in (first, second):
            assert not any(msgspec.msgpack.encode(token) in capture.bytes for token in TOKENS)
    before = wire.refused()
    strangers = [clients.connect(zmq.SUB, live, None), clients.connect(zmq.SUB, load, wrong)]
    wait_until(lambda: (wire.refused() or 0) >= (before or 0) + 2, "both are refused")
    publish()
    assert not any(one.poll(100) for one in strangers)
    publisher.shutdown()
    loads.close(0)


@pytest.mark.parametrize(
    ("kv", "host"),
    [("tcp://127.0.0.1:5", "127.0.0.1"), ("tcp://[::1]:5", "::1"), ("tcp://*:5", "*"), (None, "0.0.0.0")],
)
def test_load_is_published_where_kv_events_are(sglang: None, kv: str | None, host: str) -> None:
    from sglang_fair.overlay import wire

    assert wire.beside_kv_events((("0.0.0.0", 7), None), kv_endpoint=kv) == ((host, 7), None)
    assert wire.beside_kv_events((None, "why"), kv_endpoint=kv) == (None, "why")


def test_hooks_fit(sglang: None, folder: Path) -> None:
    """Without keys SGLang's own socket is opened."""
    from sglang_fair.overlay import wire

    del os.environ[KEYS_VARIABLE]
    assert wire.open_load_socket(lambda endpoint: endpoint, "tcp://x:1") == "tcp://x:1"
    assert wire.refused() is None
