"""What a connection of a client writes, and that one who takes nothing is given up."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import httptools
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from router.gateway.listener import RELAY, STATE, ClientGone, ClientRequest, ConnectionBounds, Listener
from router.gateway.request.kinds import PATHS, Kind
from router.shared_limit import SharedLimit
from tests.support.virtual_time import VirtualLoop

IDLE_S = 0.05
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n%b\r\nbody"


@pytest.fixture
def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    return VirtualLoop


class Transport:
    """Notes what is written, and when it is closed."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.written.append(data)

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Answers:
    """What httptools reads of whole answers."""

    def __init__(self, raw: bytes) -> None:
        self.found: list[tuple[int, dict[str, str], bytes]] = []
        self._headers: dict[str, str] = {}
        self._body = b""
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(raw)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.found.append((self._parser.get_status_code(), self._headers, self._body))
        self._headers, self._body = {}, b""


async def no_page(scope: Any, receive: Any, send: Any) -> None:
    head: Any = {"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]}
    await send(head)
    await send({"type": "http.response.body", "body": scope["path"].encode()[:0]})


def listen(serve: Callable[[ClientRequest], Awaitable[None]]) -> tuple[Listener, Transport]:
    async def relay(kind: Kind, request: ClientRequest) -> None:
        assert kind == "chat"
        await serve(request)

    bounds = ConnectionBounds(SharedLimit(8), 9.0, IDLE_S, lambda *_: None)
    config = uvicorn.Config(no_page, proxy_headers=False, access_log=False, log_config=None)
    state = {STATE: bounds, RELAY: relay}
    transport = Transport()
    listener = Listener(config, ServerState(), state, asyncio.get_running_loop())
    listener.connection_made(cast(Any, transport))
    return listener, transport


async def turns(number: int = 4) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@given(
    pieces=st.lists(st.one_of(st.binary(min_size=1, max_size=40), st.none()), max_size=8), last=st.binary()
)
async def test_a_stream_arrives_whole_and_its_head_with_the_first_piece(
    pieces: list[bytes | None], last: bytes
) -> None:
    async def serve(request: ClientRequest) -> None:
        assert request.whole_body() == b"body"
        assert request.headers["host"] == "x"
        request.start(200, {"content-type": "text/event-stream"})
        for piece in pieces:
            await (turns() if piece is None else request.piece(piece))
        await request.end(last)

    listener, transport = listen(serve)
    listener.data_received(CHAT % b"")
    await turns(4 * len(pieces) + 4)
    [(status, headers, body)] = Answers(b"".join(transport.written)).found
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    assert body == b"".join(filter(None, pieces)) + last
    waits = bool(pieces) and pieces[0] is None
    assert len(transport.written) == 1 + sum(piece is not None for piece in pieces) + waits
    assert not transport.is_closed
    listener.connection_lost(None)


async def test_an_answer_is_one_piece_and_requests_are_answered_in_order() -> None:
    async def serve(request: ClientRequest) -> None:
        request.own_headers = {"x-request-id": request.headers["x"]}
        await asyncio.sleep(1.0 if request.headers["x"] == "a" else 0.0)
        await request.answer(429, {"content-type": "text/plain"}, request.headers["x"].encode())

    listener, transport = listen(serve)
    listener.data_received(CHAT % b"x: a\r\n" + CHAT % b"x: b\r\n")
    listener.data_received(b"POST /v1/%63hat/completions?a=b HTTP/1.0\r\nx: c\r\ncontent-length: 0\r\n\r\n")
    await asyncio.sleep(2.0)
    found = Answers(b"".join(transport.written)).found
    assert [(status, headers["x-request-id"], body) for status, headers, body in found] == [
        (429, "a", b"a"), (429, "b", b"b"), (429, "c", b"c")
    ]  # fmt: skip
    assert ["connection" in headers for _, headers, _ in found] == [False, False, True]
    assert len(transport.written) == 3
    assert transport.is_closed
    listener.connection_lost(None)


async def test_who_offers_another_protocol_is_answered_in_this_one() -> None:
    async def serve(request: ClientRequest) -> None:
        await request.answer(200, {}, b"%d" % len(request.headers))

    listener, transport = listen(serve)
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n"
    listener.data_received(CHAT % offer)
    await turns()
    assert [(status, body) for status, _, body in Answers(b"".join(transport.written)).found] == [(200, b"5")]
    listener.connection_lost(None)


async def test_all_other_requests_go_to_the_application() -> None:
    async def serve(request: ClientRequest) -> None:
        raise AssertionError

    listener, transport = listen(serve)
    for line in (b"GET /v1/chat/completions", b"POST /v1/chat/completion", b"POST /", b"OPTIONS *"):
        listener.data_received(line + b" HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
        await turns()
    assert [status for status, *_ in Answers(b"".join(transport.written)).found] == [404] * 4
    assert set(PATHS.values()) >= {"/v1/chat/completions"}
    listener.connection_lost(None)


async def test_a_header_of_two_lines_is_not_written() -> None:
    async def serve(request: ClientRequest) -> None:
        await request.answer(200, {"x-evil": "a\r\nset-cookie: b"}, b"")

    listener, transport = listen(serve)
    listener.data_received(CHAT % b"")
    await turns()
    assert b"set-cookie" not in b"".join(transport.written)
    listener.connection_lost(None)


async def test_a_client_that_takes_nothing_is_gone_and_one_that_is_slow_is_not() -> None:
    taken: list[bytes] = []

    async def serve(request: ClientRequest) -> None:
        request.start(200, {})
        try:
            for piece in (b"a", b"b", b"c"):
                await request.piece(piece)
                taken.append(piece)
        except ClientGone:
            taken.append(b"gone")

    listener, transport = listen(serve)
    listener.pause_writing()
    listener.data_received(CHAT % b"")
    await turns()
    for _ in range(3):
        await asyncio.sleep(0.8 * IDLE_S)
        listener.resume_writing()
        await turns(1)
        listener.pause_writing()
    assert taken == [b"a", b"b", b"c"]
    listener.connection_lost(None)

    taken.clear()
    listener, transport = listen(serve)
    listener.pause_writing()
    listener.data_received(CHAT % b"")
    await asyncio.sleep(1.2 * IDLE_S)
    assert taken == [b"gone"]
    assert transport.is_closed  # an answer that has begun and does not end
    listener.connection_lost(None)


async def test_whoever_else_cancels_is_not_taken_for_the_client() -> None:
    how: list[BaseException] = []

    async def serve(request: ClientRequest) -> None:
        request.start(200, {})
        try:
            await request.piece(b"a")
        except BaseException as error:
            how.append(error)

    listener, _ = listen(serve)
    listener.pause_writing()
    listener.data_received(CHAT % b"")
    await turns()
    for task in listener.tasks:
        task.cancel()
    await turns()
    assert [type(one) for one in how] == [asyncio.CancelledError]
    listener.connection_lost(None)


async def test_a_client_that_leaves_is_noticed_once_also_behind_others() -> None:
    left: list[str] = []

    async def serve(request: ClientRequest) -> None:
        stop = request.when_client_leaves(lambda: left.append(request.headers["x"]))
        if request.headers["x"] == "b":
            stop()
            request.when_client_leaves(lambda: left.append("again"))
        await request.answer(200, {}, b"")

    listener, _ = listen(serve)
    listener.data_received(CHAT % b"x: a\r\n" + CHAT % b"x: b\r\n")
    await turns(8)
    listener.connection_lost(None)
    await turns()
    assert sorted(left) == ["a", "again"]
