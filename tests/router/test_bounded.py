"""What bounds the connections of the page and of the router's HTTP port."""

import asyncio
from contextlib import closing, suppress

import pytest
from aiohttp import ClientSession, web

from router import bounded

HALF = b"GET / HTTP/1.1\r\nhost: here\r\n"
WHOLE = HALF + b"\r\n"


async def answer(_: web.Request) -> web.Response:
    return web.Response(text="here")


def run(body, **options: float) -> None:
    async def main() -> None:
        app = web.Application()
        app.add_routes([web.get("/", answer)])
        listener = bounded.listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        async with bounded.serving(app, listener, **options):
            await body(port)

    asyncio.run(main())


@pytest.mark.parametrize(
    "sent", [b"", HALF, WHOLE, WHOLE + HALF], ids=["nothing", "half", "whole", "the next"]
)
def test_a_connection_without_a_whole_head_is_closed(sent: bytes) -> None:
    async def body(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with closing(writer):
            writer.write(sent)
            answered = b""
            with suppress(ConnectionResetError):
                while piece := await reader.read(1000):
                    answered += piece
            assert answered.count(b"200 OK") == sent.count(WHOLE)

    run(body, head_timeout_s=0.1)


def test_an_answer_may_take_longer_than_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(0.1)
        return web.Response(text="at last")

    async def body(port: int) -> None:
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{port}/") as answered:
            assert await answered.text() == "at last"

    monkeypatch.setattr(f"{__name__}.answer", slow)
    run(body, head_timeout_s=0.02)


def test_one_address_has_half_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(port: int) -> None:
        open_ = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        try:
            assert (await open_[2][0].read()).startswith(b"HTTP/1.1 429 ")
            open_[0][1].close()
            for _, writer in open_[1:2]:
                writer.write(WHOLE)
            assert (await open_[1][0].readline()).endswith(b"200 OK\r\n")
        finally:
            for _, writer in open_:
                writer.close()

    monkeypatch.setattr(bounded, "MOST_CONNECTIONS", 4)
    run(body)
