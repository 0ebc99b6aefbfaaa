"""What changes of orders would be worth, all places of all queues at once.

If a group is put before another one, all behind it move by the same time, whatever it is: what was late by l is then
late by max(0, l + moved). So a place costs one sum over the rest of its queue, and numpy adds up the sums of all places
together. `problem.worth` is the definition; tests hold one against the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router.queues.problem import Problem, Worth, can_serve

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Weighed:
    """By row and place what changes in late, later and waiting seconds; inf where the group may not stand."""

    late: Floats
    later: Floats
    waiting: Floats

    def best(self) -> tuple[int, int]:
        """Row and place of the least, the first of equals."""
        late, later = np.round(self.late, 6), np.round(self.later, 6)
        keep = late == late.min()
        later = np.where(keep, later, inf)
        waiting = np.where(later == later.min(), np.round(self.waiting, 6), inf)
        row, place = np.unravel_index(int(waiting.argmin()), waiting.shape)
        return int(row), int(place)

    def at(self, row: int, place: int) -> Worth:
        return Worth(
            float(self.late[row, place]), float(self.later[row, place]), float(self.waiting[row, place])
        ).rounded()


class State:
    """Orders that change, with the times of every queue beside them. Groups and queues are numbers here."""

    def __init__(self, problem: Problem) -> None:
        demands, queues = problem.demands, problem.queues
        self.problem = problem
        models = sorted({d.model for d in demands} | {q.loaded for q in queues if q.loaded is not None})
        number = {model: at for at, model in enumerate(models)}
        self.models = np.array([number[d.model] for d in demands], np.int64)
        self.tiers = np.array([d.tier for d in demands], np.int64)
        self.bound = [d.is_bound for d in demands]
        self.bounds = np.array(self.bound, bool)
        self.loaded = np.array([-1 if q.loaded is None else number[q.loaded] for q in queues], np.int64)
        self.ahead = np.array([q.ahead_s for q in queues])
        self.first_tail = np.array([q.tail_s for q in queues])
        self.swap = np.array([[q.swap_s.get(model, 0.0) for model in models] for q in queues]).reshape(
            len(queues), len(models)
        )
        self.drain, self.tail, self.slack = (np.zeros((len(queues), len(demands))) for _ in range(3))
        self.allowed = np.zeros((len(queues), len(demands)), bool)
        for at, d in enumerate(demands):
            for row, q in enumerate(queues):
                drain_s = d.drain_s.get(q.worker, 0.0)
                self.allowed[row, at] = can_serve(q, d)
                self.drain[row, at], self.tail[row, at] = drain_s, d.tail_s.get(q.worker, 0.0)
                self.slack[row, at] = min(d.slack_s, d.last_slack_s - drain_s)
        self.rows_of = [np.flatnonzero(self.allowed[:, at]) for at in range(len(demands))]
        self.orders: list[list[int]] = [[] for _ in queues]
        self.where = [-1] * len(demands)
        self.worths = [Worth(0.0, 0.0, 0.0)] * len(queues)
        self._size(4)

    def _size(self, places: int) -> None:
        """Room for so many groups in each queue."""
        rows = len(self.problem.queues)
        self.length = np.zeros(rows, np.int64)
        self.filled = np.full((rows, places + 1), -1, np.int64)
        self.start = np.zeros((rows, places + 1))
        self.end = np.zeros((rows, places + 1))
        self.late = np.full((rows, places + 1), -inf)
        self.by_tier = np.zeros((rows, places + 1, 2))
        """1 at the tier of the group in this place."""
        self.behind = np.arange(places + 1)[None, :, None] <= np.arange(places + 1)[None, None, :]
        """Whether the group in the second place moves when one is put before the first."""
        self.first_bound = np.zeros(rows, np.int64)
        self.last_free = np.zeros(rows, np.int64)
        """One more than the place of the last of tier 0."""
        for row in range(rows):
            self._refresh(row)

    # -- changes

    def set(self, orders: Sequence[Sequence[int]]) -> None:
        """All orders at once."""
        self.orders = [list(order) for order in orders]
        for row, order in enumerate(self.orders):
            for at in order:
                self.where[at] = row
        most = max((len(order) for order in self.orders), default=0)
        if most >= self.filled.shape[1] - 1 or most < self.filled.shape[1] // 4:
            self._size(most + 4)
        else:
            for row in range(len(self.orders)):
                self._refresh(row)

    def take_out(self, at: int) -> tuple[int, int]:
        """A group leaves its queue; row and place where it was."""
        row = self.where[at]
        place = self.orders[row].index(at)
        del self.orders[row][place]
        self.where[at] = -1
        self._refresh(row)
        return row, place

    def put(self, at: int, row: int, place: int) -> None:
        self.orders[row].insert(place, at)
        self.where[at] = row
        if len(self.orders[row]) >= self.filled.shape[1]:
            self._size(2 * len(self.orders[row]))
        else:
            self._refresh(row)

    def _refresh(self, row: int) -> None:
        """Compute a queue anew."""
        order = self.orders[row]
        drain, tail, slack, swap = self.drain[row], self.tail[row], self.slack[row], self.swap[row]
        now, last_tail, model = float(self.ahead[row]), float(self.first_tail[row]), int(self.loaded[row])
        first_bound, last_free, sums = len(order), 0, [0.0, 0.0, 0.0]
        self.late[row], self.by_tier[row], self.filled[row] = -inf, 0.0, -1
        for place, at in enumerate(order):
            own, tier = int(self.models[at]), int(self.tiers[at])
            start = now if own == model else now + last_tail + float(swap[own])
            now, last_tail, model = start + float(drain[at]), float(tail[at]), own
            late = start - float(slack[at])
            self.filled[row, place], self.start[row, place], self.end[row, place] = at, start, now
            self.late[row, place], self.by_tier[row, place, tier] = late, 1.0
            sums[tier] += max(0.0, late)
            sums[2] += start
            if not tier:
                last_free = place + 1
            elif self.bound[at]:
                first_bound = min(first_bound, place)
        self.length[row], self.first_bound[row], self.last_free[row] = len(order), first_bound, last_free
        self.worths[row] = Worth(*sums)

    def worth(self) -> Worth:
        late, later, waiting = (sum(part) for part in zip(*self.worths, strict=True))
        return Worth(late, later, waiting).rounded()

    # -- what a change would be worth

    def weigh(self, at: int) -> Weighed:
        """What putting a group, which is in no queue, in each place would add to all sums."""
        rows = self.rows_of[at]
        width = int(self.length[rows].max()) + 1
        places = np.arange(width)[None, :]
        length = self.length[rows][:, None]
        own, tier = int(self.models[at]), int(self.tiers[at])
        filled = self.filled[rows, :width]
        before, end, switch = self._before(rows, filled, width)
        start = end + np.where(before == own, 0.0, switch + self.swap[rows, own][:, None])
        moved = self._moves(
            rows, filled, start + self.drain[rows, at][:, None], own, self.tail[rows, at][:, None]
        )
        moved -= self.start[rows, :width]
        moved[places >= length] = 0.0
        sums = self._moved(rows, width, moved)
        own_late = np.maximum(start - self.slack[rows, at][:, None], 0.0)
        sums[..., tier] += own_late
        waiting = start + moved * np.maximum(length - places, 0)
        if self.bound[at]:
            may = (places >= self.last_free[rows][:, None]) & (places <= length)
        elif tier == 0:
            may = places <= self.first_bound[rows][:, None]
        else:
            may = places <= length
        late = np.where(may, sums[..., 0], inf)
        return Weighed(late, sums[..., 1], waiting)

    def _before(
        self, rows: NDArray[np.int64], filled: NDArray[np.int64], width: int
    ) -> tuple[Any, Floats, Floats]:
        """By place: the model of what stands before it, when that ends, and its tail."""
        before = np.empty((len(rows), width), np.int64)
        end, tail = np.empty((len(rows), width)), np.empty((len(rows), width))
        before[:, 0], end[:, 0], tail[:, 0] = self.loaded[rows], self.ahead[rows], self.first_tail[rows]
        if width > 1:
            previous = filled[:, :-1]
            before[:, 1:] = self.models[previous]
            end[:, 1:] = self.end[rows, : width - 1]
            tail[:, 1:] = self.tail[rows[:, None], previous]
        return before, end, tail

    def _moves(
        self, rows: NDArray[np.int64], filled: NDArray[np.int64], end: Floats, own: int, tail: Floats
    ) -> Floats:
        """When the group in each place starts if one of model `own` that ends at `end` is put before it."""
        models = self.models[filled]
        moved: Floats = end + np.where(models == own, 0.0, tail + self.swap[rows[:, None], models])
        return moved

    def _moved(self, rows: NDArray[np.int64], width: int, moved: Floats) -> Floats:
        """By place and tier, how much later those behind are if they move by `moved`."""
        late = self.late[rows, :width]
        after = np.maximum(late[:, None, :] + moved[:, :, None], 0.0)
        after -= np.maximum(late, 0.0)[:, None, :]
        after *= self.behind[:, :width, :width]
        sums: Floats = after @ self.by_tier[rows, :width]
        return sums

    def weigh_swaps(self, at: int) -> Floats:
        """By group, what changing places with it would add to all sums, in three rows; inf where that may not be."""
        row, others = self.where[at], np.arange(len(self.where))
        place = self.orders[row].index(at)
        sums = np.full((3, len(self.where)), inf)
        rows = self.rows_of[at]
        rows = rows[(rows != row) & (self.length[rows] > 0)]
        if len(rows):
            width = int(self.length[rows].max())
            there = self._instead(rows, width, at)
            inside = np.arange(width)[None, :] < self.length[rows][:, None]
            sums[:, self.filled[rows, :width][inside]] = there[:, inside]
        same = (self.tiers == self.tiers[at]) & (self.bounds == self.bounds[at]) & self.allowed[row]
        others = np.flatnonzero(same & np.isfinite(sums[0]))
        here = self._in_its_place(row, place, others)
        total: Floats = np.full((3, len(self.where)), inf)
        total[:, others] = sums[:, others] + here
        return total

    def _instead(self, rows: NDArray[np.int64], width: int, at: int) -> Floats:
        """By row and place, what a group adds if it stands there instead of the one that does."""
        own, tier = int(self.models[at]), int(self.tiers[at])
        filled, late = self.filled[rows, :width], self.late[rows, :width]
        before, end, switch = self._before(rows, filled, width)
        start = end + np.where(before == own, 0.0, switch + self.swap[rows, own][:, None])
        after = start + self.drain[rows, at][:, None]
        moved = np.zeros((len(rows), width))
        if width > 1:
            follows = self._moves(rows, filled[:, 1:], after[:, :-1], own, self.tail[rows, at][:, None])
            moved[:, :-1] = follows - self.start[rows, 1:width]
        length = self.length[rows][:, None]
        behind = np.maximum(length - 1 - np.arange(width)[None, :], 0)
        moved[behind == 0] = 0.0
        shifted = np.maximum(late[:, None, :] + moved[:, :, None], 0.0) - np.maximum(late, 0.0)[:, None, :]
        shifted *= self.behind[:, :width, :width] & ~np.eye(width, dtype=bool)[None]
        sums = shifted @ self.by_tier[rows, :width]
        sums[..., tier] += np.maximum(start - self.slack[rows, at][:, None], 0.0) - np.maximum(late, 0.0)
        waiting = start - self.start[rows, :width] + moved * behind
        return np.stack([sums[..., 0], sums[..., 1], waiting])

    def _in_its_place(self, row: int, place: int, others: NDArray[np.int64]) -> Floats:
        """What each of `others` adds if it stands in a place instead of the group that does."""
        length, tier = int(self.length[row]), int(self.tiers[self.filled[row, place]])
        if place:
            previous = int(self.filled[row, place - 1])
            before, end, switch = (
                self.models[previous],
                self.end[row, place - 1],
                self.tail[row, previous],
            )
        else:
            before, end, switch = self.loaded[row], self.ahead[row], self.first_tail[row]
        models = self.models[others]
        start = end + np.where(models == before, 0.0, switch + self.swap[row, models])
        after = start + self.drain[row, others]
        late = self.late[row, place + 1 : length]
        sums = np.zeros((3, len(others)))
        moved = np.zeros(len(others))
        if len(late):
            following = int(self.models[self.filled[row, place + 1]])
            moved = after + np.where(
                models == following, 0.0, self.tail[row, others] + self.swap[row, following]
            )
            moved -= self.start[row, place + 1]
            shifted = np.maximum(late[None, :] + moved[:, None], 0.0) - np.maximum(late, 0.0)[None, :]
            sums[:2] = (shifted @ self.by_tier[row, place + 1 : length]).T
        sums[tier] += np.maximum(start - self.slack[row, others], 0.0) - max(
            0.0, float(self.late[row, place])
        )
        sums[2] = start - self.start[row, place] + moved * len(late)
        return sums
