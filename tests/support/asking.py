"""Tenants that ask a gateway with their keys, again and again, in a thread of its own."""

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping
from random import Random

import aiohttp

REFUSED_S = 0.5
"""After a refusal, so that many of them leave the processors to the engines."""


class Asking:
    """`with` it: so many requests of each tenant at a time as `ask` said last."""

    def __init__(self, url: str, prompt_tokens: int, output_tokens: int) -> None:
        """Half of a prompt is that of its tenant's next one."""
        self._url, self._prompt_tokens, self._output_tokens = url, prompt_tokens, output_tokens
        self._wanted: dict[str, int] = {}
        self._headers: dict[str, dict[str, str]] = {}
        self._stops = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.answered: Counter[tuple[str, int]] = Counter()
        """By key and status; 0: the connection broke."""

    def ask(self, key: str, at_a_time: int, headers: Mapping[str, str] | None = None) -> None:
        self._headers[key] = {"authorization": f"Bearer {key}", **(headers or {})}
        self._wanted[key] = at_a_time

    def statuses(self, key: str) -> set[int]:
        return {status for one, status in self.answered if one == key}

    def __enter__(self) -> "Asking":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """When all answers are there."""
        self._stops = True
        self._thread.join()

    async def _run(self) -> None:
        started: Counter[str] = Counter()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as group:
            while not self._stops:
                for key, count in list(self._wanted.items()):
                    for number in range(started[key], count):
                        group.create_task(self._asks(http, key, number))
                    started[key] = max(started[key], count)
                await asyncio.sleep(0.05)

    async def _asks(self, http: aiohttp.ClientSession, key: str, number: int) -> None:
        random, half = Random(f"{key} {number}"), self._prompt_tokens // 2
        prefix = [random.randrange(3, 30_000) for _ in range(half)]
        while not self._stops:
            if number >= self._wanted[key]:
                await asyncio.sleep(0.1)
                continue
            body = {
                "input_ids": prefix + [random.randrange(3, 30_000) for _ in range(half)],
                "sampling_params": {"max_new_tokens": self._output_tokens, "ignore_eos": True},
                "stream": number % 2 == 0,
            }
            try:
                async with http.post(
                    f"{self._url}/generate", json=body, headers=self._headers[key]
                ) as answer:
                    await answer.read()
                    status = answer.status
            except (aiohttp.ClientError, TimeoutError):
                status = 0
            self.answered[key, status] += 1
            if status != 200:
                await asyncio.sleep(REFUSED_S)
