"""An engine that answers at once, with canned answers in SGLang's format, so that only the way to it is measured.

    python -m sglang_fair.bench.instant --ports 18100,18101

A stream has `STREAM_TOKENS` events, each written by itself. Of a request it reads only the end, and whether it streams.
"""

import asyncio
import json
import sys
from typing import Annotated, Any, cast

import uvloop

from sglang_fair.common.processes import die_with_parent
from sglang_fair.settings.commands import Numbers, numbers, run

STREAM_TOKENS = 64
MODEL = "bench"

_JSON = b"application/json\r\ncontent-length: %d"
_EVENTS = b"text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked"
_USAGE = {"prompt_tokens": 1000, "completion_tokens": STREAM_TOKENS, "total_tokens": 1000 + STREAM_TOKENS}
_INFO = {"model_path": MODEL, "served_model_name": MODEL, "tokenizer_path": MODEL, "is_generation": True}


def _answer(text: str, finish: str | None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "matched_stop": None}
    head = {"id": "0" * 32, "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
    return json.dumps(head | more, separators=(",", ":")).encode()


def _response(kind: bytes, body: bytes = b"") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\n\r\n"
    return (head % len(body) if b"%d" in head else head) + body


def _chunk(event: bytes) -> bytes:
    data = b"data: " + event + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


WHOLE = _response(_JSON, _answer("word " * STREAM_TOKENS, "length", usage=_USAGE))
INFO = _response(_JSON, json.dumps(_INFO).encode())
STREAM = [
    _response(_EVENTS),
    *(_chunk(_answer("word ", None)) for _ in range(STREAM_TOKENS)),
    _chunk(_answer("", None, choices=[], usage=_USAGE)) + _chunk(b"[DONE]") + b"0\r\n\r\n",
]


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._received[:end]).lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._received) < end + 4 + size:
                return
            body = bytes(self._received[end + 4 : end + 4 + size])
            del self._received[: end + 4 + size]
            if not head.startswith(b"post"):
                self._transport.write(INFO)
            elif b'"stream":true' in body or b'"stream": true' in body:
                self._write_event(0)
            else:
                self._transport.write(WHOLE)

    def _write_event(self, number: int) -> None:
        if number < len(STREAM) and not self._transport.is_closing():
            self._transport.write(STREAM[number])
            asyncio.get_running_loop().call_soon(self._write_event, number + 1)


async def serve(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(Connection, "127.0.0.1", port, backlog=1024)
    await asyncio.Event().wait()


def main(ports: Annotated[Numbers, numbers("Listen on these.", "PORT,PORT")]) -> None:
    """An engine that answers at once. It serves until it is killed."""
    die_with_parent()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(list(ports)))


if __name__ == "__main__":
    sys.exit(run(main, "python -m sglang_fair.bench.instant"))
