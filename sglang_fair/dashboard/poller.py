"""Looks at the cluster every so often, and keeps what is to be shown. One is enough for any number of viewers."""

import asyncio
import time
from collections.abc import Callable

import msgspec

from sglang_fair.dashboard.model import Model
from sglang_fair.dashboard.peers import Peers
from sglang_fair.dashboard.view import View


class Poller:
    """`run` it. Belongs to one event loop."""

    def __init__(self, peers: Peers, every_s: float, looked: Callable[[], None] = lambda: None) -> None:
        """`looked` is called after each look."""
        self._peers = peers
        self._every_s = every_s
        self._model = Model(every_s)
        self._encoded: dict[str, bytes] = {}
        self._looked = looked

    async def run(self) -> None:
        """Looks until it is cancelled. A look that takes longer than the time between two delays the next."""
        while True:
            began_s = time.monotonic()
            await self.look()
            await asyncio.sleep(max(0.1, began_s + self._every_s - time.monotonic()))

    async def look(self) -> None:
        """Looks once."""
        reading = await self._peers.look()
        self._model.take(reading, time.time())
        self._encoded.clear()
        self._looked()

    def view(self, span: str) -> View:
        """What is to be shown."""
        return self._model.view(span)

    def encoded(self, span: str) -> bytes:
        """The same as JSON; made once a look, however many ask. KeyError for a span that there is not."""
        if span not in self._encoded:
            self._encoded[span] = msgspec.json.encode(self.view(span))
        return self._encoded[span]
