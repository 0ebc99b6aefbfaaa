"""Clients that stream completions from gateways, again and again, and what became of each."""

import asyncio
import ssl
from collections import Counter

import aiohttp

from tests.support.waiting import eventually

CLIENTS = 8
OUTPUT_TOKENS = 100


class Load:
    """Each client asks, again and again, for a stream of tokens."""

    def __init__(self, *urls: str, tls: ssl.SSLContext | None = None) -> None:
        self._urls, self._tls = urls, tls
        self._stops = False
        self.outcomes: Counter[str] = Counter()
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(CLIENTS)]

    async def _ask(self, number: int) -> None:
        body = {
            "model": "default", "prompt": f"client {number} " * 40, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        url = self._urls[number % len(self._urls)]
        connector = aiohttp.TCPConnector(ssl=self._tls or True)
        headers = {"x-fair-client": f"client {number}"}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            while not self._stops:
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    text = (await response.read()).decode()
                is_whole = (
                    text.endswith("data: [DONE]\n\n") and f'"completion_tokens":{OUTPUT_TOKENS}' in text
                )
                is_served = response.status == 200 and is_whole
                self.outcomes["served" if is_served else text[-300:]] += 1
                await asyncio.sleep(0 if is_served else 0.2)

    def failed(self) -> int:
        return self.outcomes.total() - self.outcomes["served"]

    async def goes_on(self) -> None:
        before = self.outcomes.total()
        await eventually(lambda: self.outcomes.total() > before + CLIENTS, "requests are served")

    async def stop(self) -> None:
        self._stops = True
        await asyncio.gather(*self._tasks)
