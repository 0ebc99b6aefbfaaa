"""A load of HTTP requests on one port: at a rate, or as many as get served. What it asks itself for is kept small."""

import asyncio
import json
import random
import time
from itertools import accumulate
from typing import cast

from sglang_fair.bench.instant import MODEL, STREAM_TOKENS

CONNECTIONS = 32
PREFIXES, PREFIX_CHARS, OWN_CHARS = 64, 3_000, 1_000
VOCABULARY = 3_000


class Connection(asyncio.Protocol):
    """One connection to an HTTP server, for one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._tail = b""
        self._left: int | None = None
        self._answer: asyncio.Future[bool] | None = None
        self._ok = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        """Reads no more of an answer than its status and its end."""
        if self._answer is None:
            return
        if self._left is None:
            data = self._tail + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._tail = data
                return
            head, data = data[:end].lower(), data[end + 4 :]
            self._ok = head.startswith(b"http/1.1 200")
            at = head.find(b"content-length:")
            self._left = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else -1
            self._tail = b""
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._end(self._ok)
        else:
            self._tail = (self._tail + data)[-16:]
            if self._tail.endswith(b"0\r\n\r\n"):
                self._end(self._ok)

    def connection_lost(self, error: Exception | None) -> None:
        """Fails the request under way."""
        if self._answer is not None:
            self._end(False)

    def _end(self, ok: bool) -> None:
        answer, self._answer, self._left, self._tail = self._answer, None, None, b""
        if answer is not None and not answer.done():
            answer.set_result(ok)

    async def ask(self, request: bytes) -> bool:
        """Sends a request and waits for the whole answer; whether its status was 200."""
        if self._transport.is_closing():
            return False
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        """Closes the connection at once."""
        self._transport.close()


class Requests:
    """Requests of eight clients, as bytes for the wire. No two have the same prompt."""

    def __init__(self, seed: int, *, stream: bool) -> None:
        self._rng = random.Random(seed)
        syllables = [a + v + c for a in "bcdfglmnprst" for v in "aeiou" for c in ("", "n", "r", "s")]
        self._words = ["".join(self._rng.choices(syllables, k=1 + n % 3)) for n in range(VOCABULARY)]
        self._weights = list(accumulate(1 / (n + 1) for n in range(VOCABULARY)))  # as words of a language are
        self._prefixes = [self._text(PREFIX_CHARS) for _ in range(PREFIXES)]
        self._ends = [self._text(OWN_CHARS // 10) for _ in range(1_000)]
        self._stream = stream

    def next(self) -> bytes:
        """The next request."""
        rng = self._rng
        prompt = rng.choice(self._prefixes) + "".join(rng.choices(self._ends, k=10))
        body = {"model": MODEL, "prompt": prompt, "max_tokens": STREAM_TOKENS, "stream": self._stream}
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"x-fair-client: c{rng.randrange(8)}\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    def _text(self, chars: int) -> str:
        words = self._rng.choices(self._words, cum_weights=self._weights, k=chars)
        return " ".join(words)[: chars - 1] + " "


async def connect(port: int) -> Connection:
    """A new connection to this machine. Raises OSError."""
    _, client = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return client


async def at_rate(
    port: int, rate_rps: float, duration_s: float, requests: Requests
) -> tuple[list[float], int]:
    """The latencies in seconds, each from when its request was due, and how many requests failed."""
    idle = [await connect(port) for _ in range(8)]
    latencies: list[float] = []
    failed = 0

    async def one(due_s: float, request: bytes) -> None:
        nonlocal failed
        client = idle.pop() if idle else await connect(port)
        if await client.ask(request):
            latencies.append(time.perf_counter() - due_s)
        else:
            failed += 1
        idle.append(client)

    begun_s = time.perf_counter()
    tasks = []
    for number in range(int(rate_rps * duration_s)):
        due_s = begun_s + number / rate_rps
        if (wait_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(one(due_s, requests.next())))
    await asyncio.gather(*tasks)
    for client in idle:
        client.close()
    return latencies, failed


async def at_most(port: int, duration_s: float, requests: Requests) -> tuple[int, int, float]:
    """How many requests connections that are never idle got served, how many failed, and the seconds it took."""
    end_s = time.perf_counter() + duration_s
    served = failed = 0

    async def one() -> None:
        nonlocal served, failed
        client = await connect(port)
        while time.perf_counter() < end_s:
            if await client.ask(requests.next()):
                served += 1
            else:
                failed += 1
                client = await connect(port)
        client.close()

    begun_s = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    return served, failed, time.perf_counter() - begun_s
