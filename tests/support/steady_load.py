"""Clients that ask a site again and again."""

import asyncio
from collections import Counter

from tests.support.site import Seen, Site
from tests.support.waiting import eventually

CLIENTS = [f"client {number}" for number in range(10)]
LENGTH = 30


class Load:
    """Each client asks again and again, at both gateways in turn, until `stop`. No request may fail, or with `may_fail`
    one is refused or broken off at times."""

    def __init__(self, site: Site, *, may_fail: bool = False) -> None:
        self._site = site
        self._may_fail = may_fail
        self._stops = False
        self.served: Counter[str] = Counter()
        self.failed = 0
        self._tasks = [asyncio.create_task(self._ask(client)) for client in CLIENTS]

    async def _ask(self, client: str) -> None:
        number = 0
        while not self._stops:
            number += 1
            prompt, seen = f"{client} {number}", Seen()
            await self._site.stream("completions", prompt, LENGTH, seen, client=client, gateway=number % 2)
            expected = self._site.expected("completions", prompt, LENGTH)
            if self._may_fail and (seen.status != 200 or seen.error):
                assert not seen.ended, seen
                assert expected.startswith(seen.text), seen
                self.failed += 1
                await asyncio.sleep(0.1)
                continue
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
