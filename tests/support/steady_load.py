"""Clients that ask a site again and again, and of whose requests none may fail."""

import asyncio
from collections import Counter

from tests.support.site import Seen, Site
from tests.support.waiting import eventually

CLIENTS = [f"client {number}" for number in range(12)]
LENGTH = 30


class Load:
    """Each client asks again and again, at both gateways in turn, until `stop`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._stops = False
        self.served: Counter[str] = Counter()
        self._tasks = [asyncio.create_task(self._ask(client)) for client in CLIENTS]

    async def _ask(self, client: str) -> None:
        number = 0
        while not self._stops:
            number += 1
            prompt, seen = f"{client} {number}", Seen()
            await self._site.stream("completions", prompt, LENGTH, seen, client=client, gateway=number % 2)
            assert (seen.status, seen.error, seen.ended) == (200, "", True), seen
            assert seen.text == self._site.expected("completions", prompt, LENGTH)
            self.served[client] += 1

    async def goes_on(self, more: int = 4) -> None:
        """Each client is served so often again."""
        before = dict(self.served)
        await eventually(
            lambda: self._broken() or all(self.served[c] >= before.get(c, 0) + more for c in CLIENTS),
            "every client is served",
        )

    async def stop(self) -> None:
        self._stops = True
        await asyncio.gather(*self._tasks)

    def _broken(self) -> bool:
        """A client was not served, which `stop` says."""
        return any(task.done() for task in self._tasks)
