"""When the queues are ordered anew: by a plan, which is made elsewhere, or by EDF as long as none comes.

Every `every_s` it is looked who will be late. If somebody will, a plan is asked for, one at a time. Its answer counts
if it is to the last question. Before the first answer, and after a question that failed or had none within
`patience_s`, queues are ordered by EDF at each look, until a plan comes.
"""

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from math import inf

from router.queues.edf import edf
from router.queues.problem import Answer, Orders, Problem, Solver
from router.queues.virtual import VirtualQueues

OLD_S = 15.0
"""What was planned so long ago says nothing of a shortage any more."""
NEEDED_EVERY_S = 5.0
"""How often it is looked for what would do."""

Question = tuple[int, Callable[[], Answer]]


class Ordering:
    """Of one set of queues. ValueError for times that are not positive."""

    def __init__(
        self,
        queues: VirtualQueues,
        ordered: Callable[[], None],
        every_s: float,
        patience_s: float,
        solver: Solver,
        most_work: int,
    ) -> None:
        """`ordered` is called when the queues have another order."""
        if not (every_s > 0 and patience_s > 0):
            raise ValueError(f"every_s and patience_s are above 0, not {every_s} and {patience_s}")
        self._queues, self._ordered = queues, ordered
        self._every_s, self._patience_s = every_s, patience_s
        self._solver, self._most_work = solver, most_work
        self._looks_s = -inf
        self._late = self._late_first = frozenset[str]()
        """Workers that were late at the last two looks, and at the last."""
        self._asked = 0
        self._asked_s: float | None = None
        """Of the question that has no answer."""
        self._is_planned = False
        """The last question that is over had an answer."""
        self._last: Answer | None = None
        self._last_s = self._needed_s = -inf
        self._short_since_s = 0.0
        self.counts: Counter[str] = Counter()
        """What was asked and came, and by reason how often queues were ordered."""

    def is_due(self, now_s: float) -> bool:
        """Whether to `look`."""
        return now_s >= self._looks_s

    def look(self, now_s: float) -> Question | None:
        """The question that is to be worked on, if there is one. O(groups)."""
        since_s, self._looks_s = now_s - self._looks_s, now_s + self._every_s
        slots = self._queues.late(now_s)
        late = frozenset(slot.worker for slot in slots if slot.demand.tier == 0)
        self._late = late & self._late_first if since_s <= self._every_s else frozenset()
        self._late_first = late
        self.counts["taken over"] += self._queues.take_over(now_s)
        if self._asked_s is not None and now_s - self._asked_s >= self._patience_s:
            self._asked_s, self._is_planned = None, False
            self.counts["unanswered"] += 1
        if not slots:
            return None
        if not self._is_planned:
            self._apply(edf(self._queues.problem(now_s)), "edf")
        if self._asked_s is not None:
            return None
        self._asked += 1
        self._asked_s = now_s
        self.counts["asked"] += 1
        is_needed = now_s - self._needed_s >= NEEDED_EVERY_S
        self._needed_s = now_s if is_needed else self._needed_s
        problem = self._queues.problem(now_s)
        return self._asked, partial(
            planned, problem, solver=self._solver, most_work=self._most_work, needs=is_needed
        )

    def late(self, now_s: float) -> Collection[str]:
        """Workers where somebody within its share was late at the last two looks."""
        return self._late if now_s < self._looks_s + self._every_s else ()

    def answer(self, number: int, found: object, now_s: float) -> None:
        """A plan has come, or will not (None)."""
        if number != self._asked or self._asked_s is None:
            self.counts["stale"] += 1
            return
        self._asked_s = None
        self._is_planned = isinstance(found, Answer)
        if not isinstance(found, Answer):
            self.counts["failed"] += 1
            return
        self.counts["answered"] += 1
        was_short = self._is_short(now_s)
        if found.is_short and found.needed is None and self._last is not None:
            found = found._replace(needed=self._last.needed)
        self._last, self._last_s = found, now_s
        if not was_short:
            self._short_since_s = now_s
        self._apply(found.orders, "plan")

    def report(self, now_s: float) -> dict[str, object]:
        """`plans` and `shortage`, for `Queued.report`."""
        last = self._last
        names = ("asked", "answered", "stale", "failed", "unanswered", "edf", "taken over")
        plans: dict[str, object] = {name: self.counts[name] for name in names}
        plans["ignored"] = self._queues.ignored
        plans["last"] = (
            None
            if last is None
            else {
                "s_ago": round(now_s - self._last_s, 3),
                "late": last.late,
                "late_s": round(last.late_s, 3),
                "later_s": round(last.later_s, 3),
            }
        )
        shortage = None
        if last is not None and last.needed is not None and self._is_short(now_s):
            needed = last.needed
            shortage = {
                "more": needed.more,
                "least": needed.least,
                "models": dict(needed.models),
                "why": needed.why,
                "for_s": round(now_s - self._short_since_s, 3),
            }
        return {"plans": plans, "shortage": shortage}

    def _is_short(self, now_s: float) -> bool:
        return self._last is not None and self._last.needed is not None and now_s - self._last_s <= OLD_S

    def _apply(self, orders: Orders, reason: str) -> None:
        self.counts[reason] += 1
        self._queues.apply(orders)
        self._ordered()


def planned(problem: Problem, *, solver: Solver, most_work: int, needs: bool) -> Answer:
    """As `shortage.answered`, which the router itself does not load: it takes numpy and scipy."""
    from router.queues.shortage import answered

    return answered(problem, solver=solver, most_work=most_work, needs=needs)
