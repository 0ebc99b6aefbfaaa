"""What a connection of a client writes: the bytes that uvicorn writes, in fewer pieces."""

import asyncio
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from router.gateway.listener import Wire


class Transport:
    """Notes what is written, and when it is closed."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed_after: int | None = None

    def write(self, data: bytes) -> None:
        assert self.closed_after is None
        self.written.append(data)

    def close(self) -> None:
        self.closed_after = len(self.written)

    def is_closing(self) -> bool:
        return self.closed_after is not None


def wire() -> tuple[Wire, Transport]:
    transport = Transport()
    return Wire(cast(Any, transport), asyncio.get_running_loop()), transport


PIECES = st.lists(
    st.one_of(st.just(b"HTTP/1.1 200 OK\r\n\r\n"), st.binary(min_size=1), st.none()), max_size=12
)


@given(pieces=PIECES, closes=st.booleans())
async def test_the_same_bytes_arrive_in_order(pieces: list[bytes | None], closes: bool) -> None:
    made, transport = wire()
    for at, piece in enumerate(pieces):
        if piece is not None:
            made.write(piece)
            continue
        await asyncio.sleep(0)  # the loop's turn is over
        await asyncio.sleep(0)
        assert b"".join(transport.written) == b"".join(one for one in pieces[:at] if one)
    if closes:
        made.close()
        assert made.is_closing()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert b"".join(transport.written) == b"".join(one for one in pieces if one)


async def test_head_and_body_are_one_piece() -> None:
    made, transport = wire()
    made.write(b"HTTP/1.1 200 OK\r\n\r\n")
    assert transport.written == []
    made.write(b"body")
    assert transport.written == [b"HTTP/1.1 200 OK\r\n\r\nbody"]
    made.write(b"more")
    assert transport.written[1:] == [b"more"]


async def test_a_head_without_a_body_does_not_wait_for_one() -> None:
    made, transport = wire()
    made.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert transport.written == [b"HTTP/1.1 100 Continue\r\n\r\n"]
    made.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    made.close()
    assert transport.written[1:] == [b"HTTP/1.1 204 No Content\r\n\r\n"]
    assert transport.closed_after == 2
