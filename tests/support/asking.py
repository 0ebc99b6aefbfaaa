"""Tenants that ask a gateway with their keys, again and again, in a thread of its own; and the shares that they get."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import aiohttp

from tests.support.live import Cluster

LIMIT_S = 400
"""For a busy machine; an idle one needs a tenth."""
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


class Shares:
    """Sums up service over the stretches in which two tenants waited at a replica without a break. A stretch ends when
    one has nothing waiting, which happens now and then where a router holds requests. In each what they got in
    proportion to their weights must differ by no more than the bound that the replica reports."""

    def __init__(self, both: Sequence[str]) -> None:
        self._both = both
        self._begin: dict[str, tuple[float, int | None]] = {}
        self._before = self._stretch = dict.fromkeys(both, 0.0)

    def see(self, book: Mapping[str, Any]) -> dict[str, float]:
        """A further GET /fair of the replica; what each got until now."""
        clients = book["clients"]
        present = [name for name in self._both if name in clients]
        now = {name: (clients[name]["service"], clients[name]["backlog"]) for name in present}
        if not self._begin or any(
            now.get(name, (0, None))[1] != begin[1] for name, begin in self._begin.items()
        ):
            self._before = self.got
            self._stretch = dict.fromkeys(self._both, 0.0)
            waits = len(now) == len(self._both) and all(backlog is not None for _, backlog in now.values())
            self._begin = now if waits else {}
        if self._begin:
            self._stretch = {name: now[name][0] - begin for name, (begin, _) in self._begin.items()}
            services = [service / clients[name]["weight"] for name, service in self._stretch.items()]
            assert max(services) - min(services) <= book["bound"], (self._stretch, book["bound"])
        return self.got

    @property
    def got(self) -> dict[str, float]:
        return {name: before + self._stretch[name] for name, before in self._before.items()}


def shares(
    cluster: Cluster,
    both: Sequence[str],
    times_the_bound: float,
    look: Callable[[Mapping[str, Any]], None] = lambda book: None,
) -> dict[str, float]:
    """What both got at all replicas while both waited there, once that is enough; at each inside its bound. `look` is
    shown each GET /fair."""
    seen = [Shares(both) for _ in cluster.addresses["replicas"]]
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        got = dict.fromkeys(both, 0.0)
        for number, book in enumerate(cluster.books()):
            look(book)
            for name, service in seen[number].see(book).items():
                got[name] += service
        if min(got.values()) > times_the_bound * book["bound"]:
            return got
        time.sleep(0.5)
    raise AssertionError(f"little was served: {got}")
