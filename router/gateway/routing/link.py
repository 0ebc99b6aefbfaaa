"""The gateway's connection to one router: asks where a request goes, and reports how it ended.

Lost reports are found by comparing tables with the router: as soon as one answers, and every `COMPARE_S`. Each
comparison also says which requests the router still holds.
"""

import logging
import time
from collections.abc import Callable

from router.client import RouterClient
from router.events import Answer, Arrive, Cut, Difference, Follow, Place, Refuse, Workers
from router.gateway.routing.fleet import Side
from sglang_fair.common.curve import Keys

log = logging.getLogger("gateway")

COMPARE_S = 5.0


class Link(RouterClient):
    """The gateway's end of a router's wire. Every question raises `RouterGone` if there is no answer."""

    def __init__(self, address: str, timeout_s: float, side: Side, keys: Keys | None = None) -> None:
        """`timeout_s` bounds every question that the router does not hold. `side` keeps what the router says about
        workers."""
        super().__init__(address, keys, on_event=self._take_answer, on_beat=self._beaten)
        self.changed: Callable[[], None] = lambda: None
        """Called when clients come to this router from others, or leave it for them."""
        self.cut: Callable[[str], None] = lambda attempt: None
        """Called with the id of a request that the router wants cut off."""
        self.side = side
        self.timeout_s = timeout_s
        self._compared_s = float("-inf")
        self._compared_life = 0
        self._has_refused = False

    async def place(self, arrive: Arrive) -> Place | Refuse:
        """Where the request goes. The router may hold the answer back while it lives."""
        return await self.ask(arrive, (Place, Refuse), self.timeout_s)

    def compare(self) -> None:
        """Asks for the workers, and how the tables of requests differ; both sides are told what they lack."""
        self._compared_s, self._compared_life = time.monotonic(), self.lives
        self.tell(Follow(""))
        self.tell(self.side.table(""))

    def _beaten(self, is_alive: bool) -> None:
        now_s = time.monotonic()
        if self.side.answers(now_s) if is_alive else self.side.lost():
            self.changed()
        is_due = now_s - self._compared_s >= COMPARE_S or self._compared_life != self.lives
        if is_alive and (is_due or not self.side.workers):
            self.compare()

    def _take_answer(self, answer: Answer) -> None:
        if isinstance(answer, Workers):
            self._learn(answer)
        elif isinstance(answer, Difference):
            for event in self.side.settle(answer):
                self.tell(event)
            self.ask_again(answer.held)
        elif isinstance(answer, Cut):
            self.cut(answer.id)

    def _learn(self, workers: Workers) -> None:
        if self.side.plans(workers):
            self.changed()
        if self.side.is_refused and not self._has_refused:
            log.error(
                "the router at %s is refused: it plans the replicas' queues, and another one of --router does "
                "already; only one may",
                self.address,
            )
        self._has_refused = self.side.is_refused
        for event in self.side.learn(workers):
            self.tell(event)
