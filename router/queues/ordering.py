"""When the queues are ordered anew, and by whom: the planner that is asked (`replan`), or EDF where there is none.

`look` costs nothing but every `every_s` seconds, and then O(groups).
"""

from collections.abc import Callable, Collection
from math import inf

from router.queues.edf import edf
from router.queues.problem import Orders, Problem
from router.queues.replan import Replans
from router.queues.virtual import VirtualQueues


class Ordering:
    """Of one set of queues. In the beginning there is no planner."""

    def __init__(self, queues: VirtualQueues, replans: Replans, ordered: Callable[[], None]) -> None:
        """`ordered` is called when the queues have another order."""
        self._queues, self._replans, self._ordered = queues, replans, ordered
        self._attended = False
        self._looks_s = -inf
        self._late = self._late_first = frozenset[str]()
        """Workers that were late at the last two looks, and at the last."""
        self.counts: dict[str, int] = {}
        """By reason, how often queues were ordered."""

    def is_due(self, now_s: float) -> bool:
        """Whether to `look`."""
        return now_s >= self._looks_s

    def look(self, now_s: float) -> tuple[int, Problem] | None:
        """The question that goes to the planner, if one does."""
        every_s = self._replans.every_s
        since_s, self._looks_s = now_s - self._looks_s, now_s + every_s
        slots = self._queues.late(now_s)
        late = frozenset(slot.worker for slot in slots if slot.demand.tier == 0)
        self._late = late & self._late_first if since_s <= every_s else frozenset()
        self._late_first = late
        if count := self._queues.take_over(now_s):
            self.counts["taken over"] = self.counts.get("taken over", 0) + count
        if not self._attended:
            if slots:
                self._by_edf(now_s)
            return None
        steps = self._replans.due(bool(slots), now_s)
        if "edf" in steps:
            self._by_edf(now_s)
        return (self._replans.asked, self._queues.problem(now_s)) if "ask" in steps else None

    def late(self, now_s: float) -> Collection[str]:
        """Workers where somebody within its share was late at the last two looks."""
        return self._late if now_s < self._looks_s + self._replans.every_s else ()

    def answer(self, number: int, orders: Orders) -> bool:
        """A plan has come; whether it counts."""
        if not self._replans.accept(number):
            return False
        self._apply(orders, "planner")
        return True

    def attend(self, is_there: bool) -> None:
        """With another planner questions begin anew."""
        self._attended = is_there
        self._replans.restart()

    def _by_edf(self, now_s: float) -> None:
        self._apply(edf(self._queues.problem(now_s)), "edf")

    def _apply(self, orders: Orders, reason: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self._queues.apply(orders)
        self._ordered()
