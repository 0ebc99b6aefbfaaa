"""Clients that ask a site again and again."""

import asyncio
from collections import Counter

from tests.support.site import Seen, Site
from tests.support.waiting import eventually

CLIENTS = [f"client {number}" for number in range(10)]
LENGTH = 30


class Load:
    """Each client asks again and again, at both gateways in turn, until `stop`. No request may fail."""

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
            expected = self._site.expected("completions", prompt, LENGTH)
            assert (seen.status, seen.error, seen.ended) == (200, "", True), seen
            assert seen.text == expected, seen
            self.served[client] += 1

    async def goes_on(self, more: int = 3) -> None:
        """Each client is served so often again."""
        before = dict(self.served)
        await eventually(
            lambda: self.broken() or all(self.served[c] >= before.get(c, 0) + more for c in CLIENTS),
            "every client is served",
        )

    async def stop(self) -> None:
        self._stops = True
        await asyncio.gather(*self._tasks)

    def broken(self) -> bool:
        """A client has seen what it must not, which `stop` says."""
        return any(task.done() for task in self._tasks)
