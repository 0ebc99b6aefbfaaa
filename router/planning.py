"""Planners as the router's core sees them: who is asked, what of an answer is believed, and what it says of a shortage.

    which     the planner that has said first that it is there; others stand by. The next one takes over when the first
              is gone, or has said nothing for `SILENT_S`, or has left a question without an answer until the placement
              asked again
    none      the placement is told so (`Planning.attend`) and orders its queues itself
    believed  an answer to the last question, of the planner that was asked, that has no more entries than there were
              groups and workers. All others are counted and ignored. What of its orders is still there is the
              placement's matter
    kinds     every `LENGTHS_EVERY_S` a question also says how long the requests are that wait, and the answer which
              kinds there are

Nothing waits for a planner: queues are served in the order that they have. O(planners) for a message, and there are at
most `MOST_PLANNERS`.
"""

from collections import Counter
from collections.abc import Mapping
from math import isfinite
from typing import NamedTuple

import msgspec

from router.events import MOST_POINTS, MOST_SORTS, Lengths, Plan, Planner, Replan, Shortage, Sorts
from router.placement.contract import Planning
from router.silence import OwnTime

MOST_PLANNERS = 8
SILENT_S = 3.5
"""A planner says every second that it is there."""
LOOK_S = 1.0
"""While the router runs it looks at least so often."""
MOST_NAME = 100
"""Characters of a planner's name that are kept."""
LENGTHS_EVERY_S = 30.0
OLD_S = 15.0
"""What was planned so long ago says nothing of a shortage any more."""


class _Asked(NamedTuple):
    """The last question, while it has no answer."""

    question: Replan
    peer: bytes
    at_s: float

    @property
    def most_entries(self) -> int:
        """Of its answer: each group and each worker once."""
        problem = self.question.problem
        return len(problem.demands) + len(problem.queues)


class _Answered(NamedTuple):
    """The last plan that counted."""

    plan: Plan
    at_s: float
    after_s: float
    """From the question on."""


class Planners:
    """Asks for plans in the name of one placement, and keeps what it was told."""

    def __init__(self, placement: Planning) -> None:
        """`placement` has the queues."""
        self._placement = placement
        self._known: dict[bytes, str] = {}
        """Peers and their names, the first one first."""
        self._time = OwnTime(LOOK_S)
        self._heard_s: dict[bytes, float] = {}
        """By `_time`."""
        self._asked: _Asked | None = None
        self._answered: _Answered | None = None
        self._short_since_s = 0.0
        """When plans began to say that replicas are missing, if the last one does."""
        self._measured_s = -LENGTHS_EVERY_S
        self._counts: Counter[str] = Counter()

    # -- what planners say

    def hello(self, peer: bytes, event: Planner, now_s: float) -> None:
        """`peer` plans."""
        if peer not in self._known and len(self._known) >= MOST_PLANNERS:
            return
        self._heard_s[peer] = self._time.look(now_s)
        if peer in self._known:
            return
        self._known[peer] = event.name[:MOST_NAME]
        if len(self._known) == 1:
            self._placement.attend(True, now_s)

    def gone(self, peer: bytes, now_s: float) -> list[tuple[bytes, Replan]]:
        """`peer` is dead. What it was asked, the next one is asked."""
        if self._known.pop(peer, None) is None:
            return []
        del self._heard_s[peer]
        self._counts["gone"] += 1
        if not self._known:
            self._placement.attend(False, now_s)
        asked = self._asked
        if asked is None or asked.peer != peer:
            return []
        self._asked = None
        return self._ask(asked.question, now_s)

    def look(self, now_s: float) -> list[tuple[bytes, Replan]]:
        """Who is silent is gone. To be called when all that has come so far was heard."""
        own_s = self._time.look(now_s)
        silent = [peer for peer, heard_s in self._heard_s.items() if own_s - heard_s > SILENT_S]
        return [asked for peer in silent for asked in self.gone(peer, now_s)]

    def plan(self, peer: bytes, plan: Plan, now_s: float) -> None:
        """`peer` answers."""
        asked = self._asked
        if asked is None or asked.peer != peer or asked.question.number != plan.number:
            self._counts["stale"] += 1
            return
        self._asked = None
        self._learn(plan.centres)
        entries = len(plan.orders) + sum(map(len, plan.orders.values()))
        if entries > asked.most_entries or not all(map(isfinite, (plan.late_s, plan.later_s, plan.took_s))):
            self._counts["refused"] += 1
            return
        if not self._placement.answer(plan.number, plan.orders, now_s):
            self._counts["stale"] += 1
            return
        self._counts["answered"] += 1
        was_short = self._is_short(now_s)
        self._answered = _Answered(plan, now_s, now_s - asked.at_s)
        if not was_short:
            self._short_since_s = now_s

    # -- what it is asked

    def ask(self, now_s: float) -> list[tuple[bytes, Replan]]:
        """To be called after everything that happens: the question that goes out now, and to whom."""
        found = self._placement.question(now_s)
        if found is None:
            return []
        if self._asked is not None:  # it has asked again, so this one has had all the time that there is
            name = self._known.pop(self._asked.peer, None)
            if name is not None:
                self._known[self._asked.peer] = name
            self._counts["unanswered"] += 1
        return self._ask(Replan(*found, self._lengths(now_s)), now_s)

    def _ask(self, question: Replan, now_s: float) -> list[tuple[bytes, Replan]]:
        peer = next(iter(self._known), None)
        if peer is None:
            self._asked = None
            return []
        self._counts["asked"] += 1
        self._asked = _Asked(question, peer, now_s)
        return [(peer, question)]

    def _lengths(self, now_s: float) -> Sorts:
        if now_s - self._measured_s < LENGTHS_EVERY_S or not self._known:
            return ()
        self._measured_s = now_s
        found = sorted(self._placement.lengths().items())[:MOST_SORTS]
        return tuple(Lengths(*sort, tuple(points[:MOST_POINTS])) for sort, points in found)

    def _learn(self, centres: Sorts) -> None:
        for one in centres:
            try:
                self._placement.centre(one.model, one.slo_class, one.points)
            except ValueError:
                self._counts["refused"] += 1

    # -- looking in

    def shortage(self, now_s: float) -> Shortage | None:
        """What would do, if the last plan says so and is not old."""
        return self._answered.plan.needed if self._answered is not None and self._is_short(now_s) else None

    def state(self, now_s: float) -> dict[str, object]:
        """For `/status`: plain maps, texts and numbers."""
        answered, shortage = self._answered, self.shortage(now_s)
        return {
            "up": bool(self._known),
            "name": next(iter(self._known.values()), None),
            "standing_by": max(0, len(self._known) - 1),
            "waits_s": None if self._asked is None else round(now_s - self._asked.at_s, 3),
            "counts": {name: self._counts[name] for name in COUNTS},
            "last": None if answered is None else _last(answered, now_s),
            "shortage": None
            if shortage is None
            else {**msgspec.to_builtins(shortage), "for_s": round(now_s - self._short_since_s, 3)},
        }

    def _is_short(self, now_s: float) -> bool:
        answered = self._answered
        return answered is not None and answered.plan.needed is not None and now_s - answered.at_s <= OLD_S


COUNTS = ("asked", "answered", "stale", "refused", "unanswered", "gone")
"""What is counted: questions sent; answers that counted; answers to another question or of somebody else; answers that
cannot be; questions that had no answer when the next was due; planners that died."""


def _last(answered: _Answered, now_s: float) -> Mapping[str, object]:
    plan = answered.plan
    return {
        "s_ago": round(now_s - answered.at_s, 3),
        "after_s": round(answered.after_s, 3),
        "took_s": round(plan.took_s, 3),
        "late": plan.late,
        "late_s": round(plan.late_s, 3),
        "later_s": round(plan.later_s, 3),
    }
